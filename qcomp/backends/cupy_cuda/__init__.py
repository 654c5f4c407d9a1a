"""Kernels for CuPy arrays on NVIDIA GPUs, in CUDA C++; they return the bytes of the pure versions in `qcomp.core`.

Needs CuPy, ``pip install cupy-cuda12x`` or the package for your CUDA. The first call of a kernel compiles the file that
it is in, or reads it from CuPy's cache on disk. `qcomp.backends.cupy_cuda.launches` says which kernel runs on what, for
any way to run one; the tests run the same files on the CPU.
"""
