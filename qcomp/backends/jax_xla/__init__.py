"""The primitives on JAX arrays: the pure version compiled by XLA, for callers that are not under `jax.jit` themselves.

Eager JAX reads and writes memory for every operation of the pure version; XLA fuses the operations.

There is no Pallas kernel. On a CPU (docs/benchmarks/jax.json, 2^24 elements), compressing with feedback takes 2.3
(sign), 2.7 (min-max) and 4.0 (4-bit QSGD) times as long as a copy in JAX. That is 1.5, 1.6 and 2.5 times as long as
moving the bytes alone would take. Decompressing takes 1.4 to 2.0 times as long as moving its bytes. Pallas only
interprets on a CPU, so it could not be faster there; on other devices it has not been tried.
"""

from qcomp.backends.jax_xla.kernel_set import KERNELS

__all__ = ["KERNELS"]
