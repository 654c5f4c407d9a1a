"""The primitives on JAX arrays: the pure version compiled by XLA, for callers that are not under `jax.jit` themselves.

Eager JAX runs every operation of the pure version by itself, from memory to memory; compiled they are fused.

There is no Pallas kernel here. Measured on a CPU (docs/benchmarks/jax.json, 2^24 elements), compressing with feedback
takes 3.2 (sign), 3.6 (min-max) and 6.9 (4-bit QSGD) times a copy in JAX, which is 2.1, 2.2 and 4.4 times what the bytes
alone would take, and decompressing 1.1 to 2.7 times. On a CPU Pallas only interprets, so it could not do better there;
on another device the question is open.
"""

from qcomp.backends.jax_xla.kernel_set import KERNELS

__all__ = ["KERNELS"]
