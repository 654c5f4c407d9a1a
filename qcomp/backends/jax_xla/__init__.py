"""The primitives on JAX arrays: the pure version compiled by XLA, for callers that are not under `jax.jit` themselves.

Eager JAX reads and writes memory for every operation of the pure version; XLA fuses the operations.

There is no Pallas kernel. On a CPU (docs/benchmarks/jax.json, 2^24 elements), compressing with feedback takes 2.4
(sign), 2.5 (min-max) and 4.4 (4-bit QSGD) times as long as a copy in JAX. That is 1.6, 1.5 and 2.8 times what moving
the bytes alone would take; for decompressing it is 1.4 to 2.0 times. Pallas only interprets on a CPU, so it could not
be faster there; on other devices it has not been tried.
"""

from qcomp.backends.jax_xla.kernel_set import KERNELS

__all__ = ["KERNELS"]
