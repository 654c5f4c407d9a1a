"""Kernels for torch tensors on CUDA and ROCm devices, written in Triton; they return the bytes of the pure versions.

Needs ``pip install triton``, which torch for these devices brings along. The first call of a kernel compiles it, or
reads it from Triton's cache on disk. With ``TRITON_INTERPRET=1`` set before Triton is imported, they run on tensors on
the CPU, slowly.
"""
