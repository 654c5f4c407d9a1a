"""Kernels for torch tensors on CUDA and ROCm devices, written in Triton.

Their results have the same bytes as those of the pure versions in `qcomp.core`. They need Triton 3.4 or newer. Builds
of torch for these devices install it, from torch 2.8 on; otherwise use ``pip install triton``. The first call of a
kernel compiles it, or reads it from Triton's cache on disk. If ``TRITON_INTERPRET=1`` is set before Triton is imported,
the kernels run on CPU tensors, slowly.
"""
