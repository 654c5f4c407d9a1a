"""The pure version of compressing and decompressing as compiled programs, kept for the next call."""

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

from qcomp.core import primitives
from qcomp.core.kernels import use_kernels
from qcomp.core.numeric.arrays import LIMIT, compute_dtype_name, flush, to_compute_dtype
from qcomp.core.numeric.buckets import blocks
from qcomp.core.numeric.random import Key, draws16, replace_draws
from qcomp.core.payload import Payload
from qcomp.core.traits import AnyCompressor

__all__ = ["arguments_of", "decoder", "drawer", "encoder"]

Array = Any
Program = Callable[..., Any]

PROGRAMS = 512
"""How many programs of a kind are kept, the most recently used: one for each compressor, shape and dtype."""


def arguments_of(key: Key) -> tuple[tuple[tuple[str, int], ...], dict[str, Array]] | None:
    """Return the parts of a key that a program is compiled for, and those that it takes as arguments.

    An argument has 32 bits. What needs more, such as a large seed, is compiled in. None where the pure version has to
    say what is wrong with the key.
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
def drawer(size: int, bucket_size: int, constant: tuple[tuple[str, int], ...]) -> Program:
    """Return the program that makes the draws of each block, on the device of x.

    A program of its own, because XLA fuses the generator into every place where a draw is used, and runs it there anew.
    """

    def draw(x: Array, traced: Mapping[str, Array]) -> tuple[Array, ...]:
        key = Key(**dict(constant), **traced)
        return tuple(
            draws16(key, block, bucket_size=bucket_size, like=x).astype(jnp.uint16)
            for block in blocks(size, bucket_size)
        )

    return jax.jit(draw, keep_unused=True)


@lru_cache(PROGRAMS)
def encoder(compressor: AnyCompressor, layout: tuple[tuple[int, ...], str, bool]) -> Program:
    """Return the program that compresses arrays of one shape and dtype, with a residual or without."""
    size = math.prod(layout[0])

    def encode(
        x: Array, residual: Array | None, draws: tuple[Array, ...]
    ) -> tuple[Array, Array | None, Array]:
        drawn = dict(zip(blocks(size, compressor.traits.bucket_size), draws, strict=False))
        with use_kernels(None), replace_draws(lambda _, block: drawn[block]):
            data, new, _ = primitives.encode(compressor, x, residual, Key())
        p = to_compute_dtype(x) if residual is None else flush(flush(to_compute_dtype(x)) + residual)
        # Not below is more than at or above: a NaN is neither.
        refused = jnp.any(~(jnp.abs(p) < LIMIT))
        return data, new, jnp.reshape(refused, (1,)).astype(jnp.uint8)

    return jax.jit(encode)


@lru_cache(PROGRAMS)
def decoder(compressor: AnyCompressor, layout: tuple[tuple[int, ...], str, bool]) -> Program:
    """Return the program that decompresses to arrays of one shape and dtype, and adds to another if asked."""
    shape, name, accumulate = layout
    size = math.prod(shape)

    def decode(data: Array, out: Array | None) -> Array:
        like = jnp.zeros(shape, name)
        payload = Payload(compressor.spec, size, compute_dtype_name(name), data)
        with use_kernels(None):
            return primitives.decode(compressor, payload, like, out=out, accumulate=accumulate)

    return jax.jit(decode)
