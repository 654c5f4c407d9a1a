"""Kernels for CuPy arrays on NVIDIA GPUs, in CUDA C++.

Their results have the same bytes as those of the pure versions in `qcomp.core`. They need CuPy:
``pip install cupy-cuda12x``, or the package for your CUDA version. The first call of a kernel compiles its file, or
reads it from CuPy's cache on disk. `qcomp.backends.cupy_cuda.launches` chooses kernels and arguments for any runtime,
so tests run the same files on the CPU.
"""
