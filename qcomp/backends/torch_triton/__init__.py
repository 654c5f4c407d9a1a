"""Kernels for torch tensors on CUDA and ROCm devices, written in Triton.

Their results have the same bytes as those of the pure versions in `qcomp.core`. They need Triton 3.4, which torch
installs for these devices from 2.8 on (else ``pip install triton``). The first call of a kernel compiles it, or reads
it from Triton's cache on disk. If ``TRITON_INTERPRET=1`` is set before Triton is imported, they run on CPU tensors,
slowly.
"""
