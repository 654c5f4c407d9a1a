"""The kernel set for JAX arrays: which calls run compiled programs, and which the pure version."""

from __future__ import annotations

import jax
import numpy as np

from qcomp.backends.jax_xla.arithmetic import Array, finish_mean, frozen_step, momentum, scalars
from qcomp.backends.jax_xla.programs import arguments_of, decoder, encoder
from qcomp.core.compressors import QSGD, MinMaxUInt8, Scaled, ScaledSign
from qcomp.core.kernels import Blend, Encoded, StepNumbers
from qcomp.core.numeric.arrays import compute_dtype_name, dtype_name, is_traced
from qcomp.core.numeric.random import Key, draws_are_replaced
from qcomp.core.traits import AnyCompressor

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class JaxKernels:
    """Compiled primitives for concrete JAX arrays, on their device.

    The pure version handles traced arrays, and becomes a part of the caller's program. It also handles calls with an
    output buffer: it raises, since JAX arrays cannot be written to.
    """

    name = "jax"

    def takes(self, x: Array) -> bool:
        """Return whether x is a concrete JAX array of a floating-point dtype, on one device."""
        if not isinstance(x, jax.Array) or is_traced(x):
            return False
        return dtype_name(x.dtype) in _DTYPES and len(x.devices()) == 1

    def encode(
        self,
        compressor: AnyCompressor,
        x: Array,
        residual: Array | None,
        key: Key | None,
        *,
        out: Array | None,
        blend: Blend | None,
    ) -> Encoded | None:
        """Compress x plus the residual, without waiting for the check of the range.

        Returns None for a blend: the caller then computes the momentum with `momentum`, a separate program.
        """
        if out is not None or blend is not None or not _has_program(compressor):
            return None
        constant: tuple[tuple[str, int], ...] = ()
        traced: dict[str, Array] = {}
        if compressor.traits.random:
            if key is None or draws_are_replaced() or (arguments := arguments_of(key)) is None:
                return None
            constant, traced = arguments
        layout = (tuple(x.shape), dtype_name(x.dtype), residual is not None)
        data, new, refused = encoder(compressor, layout, constant)(x, residual, traced)
        return Encoded(data, new, refused)

    def decode(
        self, compressor: AnyCompressor, data: Array, like: Array, *, out: Array | None, accumulate: bool
    ) -> Array | None:
        """Return the decompressed payload, or with ``accumulate`` its sum with ``out``."""
        name = dtype_name(like.dtype)
        if not _has_program(compressor) or accumulate != (out is not None):
            return None
        # XLA may omit a rounding to half precision before an addition.
        if accumulate and name != compute_dtype_name(name):
            return None
        return decoder(compressor, (tuple(like.shape), name, accumulate))(data, out)

    def finish_mean(self, total: Array, count: int) -> Array | None:
        """Return a sum over ranks divided by their number."""
        if dtype_name(total.dtype) not in ("float32", "float64"):
            return None
        return finish_mean(total, np.asarray(count, total.dtype))

    def momentum(self, m: Array, g: Array, beta1: float, scale: float) -> Array | None:
        """Return ``beta1 * m + (1 - beta1) * scale * g``."""
        if not _are_alike(m, g):
            return None
        return momentum(m, g, scalars(m, beta1=beta1, weight=(1 - beta1) * scale))

    def frozen_step(self, p: Array, m: Array, v: Array, numbers: StepNumbers) -> tuple[Array, Array] | None:
        """Return the parameters after a step with a frozen variance, and the masked momentum."""
        if not _are_alike(p, m, v):
            return None
        named = numbers._asdict()
        if not numbers.weight_decay:
            del named["weight_decay"]
        moved: tuple[Array, Array] = frozen_step(p, m, v, scalars(m, **named))
        return moved


KERNELS = JaxKernels()


def _has_program(compressor: AnyCompressor) -> bool:
    """Return whether a compressor's pure version is known to give the same bytes when compiled."""
    if type(compressor) is Scaled:
        return type(compressor.compressor) is QSGD
    return type(compressor) in (ScaledSign, QSGD, MinMaxUInt8)


def _are_alike(first: Array, *others: Array) -> bool:
    """Return whether arrays have the same shape, and all are float32 or all float64."""
    if dtype_name(first.dtype) not in ("float32", "float64"):
        return False
    return all(x.shape == first.shape and x.dtype == first.dtype for x in others)
