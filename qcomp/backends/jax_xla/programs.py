"""The encoders and decoders of compressors, in their pure version, compiled by XLA into programs that are cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from array_api_compat import is_array_api_obj

from qcomp.backends.jax_xla.arithmetic import Array
from qcomp.core import primitives
from qcomp.core.kernels import use_kernels
from qcomp.core.numeric.arrays import LIMIT, compute_dtype_name, flush, to_compute_dtype
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload
from qcomp.core.traits import AnyCompressor

Program = Callable[..., Any]

PROGRAMS = 512
"""The most programs of a kind in the cache, one for each compressor, shape and dtype. The least recently used are
dropped."""


def arguments_of(key: Key) -> tuple[tuple[tuple[str, int], ...], dict[str, Array]] | None:
    """Return the parts of a key that are compiled into a program, and the parts that are its arguments.

    An argument has 32 bits, so larger numbers, such as a large seed, are compiled. Returns None for an invalid key, for
    which the pure version raises an error.
    """
    constant, traced = [], {}
    for name, value in key._asdict().items():
        if is_array_api_obj(value):
            traced[name] = value
        elif not isinstance(value, Integral):
            return None
        elif 0 <= int(value) < 1 << 32:
            traced[name] = np.asarray(int(value), np.uint32).view(np.int32)
        else:
            constant.append((name, int(value)))
    return tuple(constant), traced


@lru_cache(PROGRAMS)
def encoder(
    compressor: AnyCompressor,
    layout: tuple[tuple[int, ...], str, bool],  # noqa: ARG001 - so that each layout has its own program in the cache
    constant: tuple[tuple[str, int], ...],
) -> Program:
    """Return the program that compresses arrays of one shape and dtype, with or without a residual."""

    def encode(
        x: Array, residual: Array | None, traced: Mapping[str, Array]
    ) -> tuple[Array, Array | None, Array]:
        key = Key(**dict(constant), **traced)
        with use_kernels(None):
            data, new, _ = primitives.encode(compressor, x, residual, key)
        p: Any = to_compute_dtype(x) if residual is None else flush(flush(to_compute_dtype(x)) + residual)
        # "Not below" includes NaN; "at or above" would not.
        refused = jnp.any(~(jnp.abs(p) < LIMIT))
        return data, new, jnp.reshape(refused, (1,)).astype(jnp.uint8)

    return jax.jit(encode)


@lru_cache(PROGRAMS)
def decoder(compressor: AnyCompressor, layout: tuple[tuple[int, ...], str, bool]) -> Program:
    """Return the program that decompresses into arrays of one shape and dtype, or adds to such an array."""
    shape, name, accumulate = layout
    size = math.prod(shape)

    def decode(data: Array, out: Array | None) -> Array:
        like = jnp.zeros(shape, name)
        payload = Payload(compressor.spec, size, compute_dtype_name(name), data)
        with use_kernels(None):
            return primitives.decode(compressor, payload, like, out=out, accumulate=accumulate)

    return jax.jit(decode)
