"""Kernels for torch tensors on CUDA and ROCm devices, written in Triton; they return the bytes of the pure versions.

They need Triton 3.4, which torch installs for these devices from 2.8 on (else ``pip install triton``). The first call
of a kernel compiles it, or reads it from Triton's cache on disk. With ``TRITON_INTERPRET=1`` set before Triton is
imported, they run on CPU tensors, slowly.
"""
