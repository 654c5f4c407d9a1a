"""The kernels of `qcomp.core.compressors.minmax`: eight bits between the extremes of every bucket, with feedback.

p = flush(flush(x) + residual); step = (max - min) / 255, rounded up to 16 bits; base = a whole number of steps if the
bucket spans zero, else min; code = rint(flush(p - base) / step), clamped to 0 to 255; residual' = flush(p - (base +
code * step)).

Bytes read and written per element: encode with feedback 8 and 5, without 4 and 1; decode 1 and 4, plus 4 read to
accumulate. Memory bandwidth is nearly the limit; the division is most of the arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import extending

from qcomp.backends.numba_cpu.codec import CompressorKernels, decode_run, encode_run
from qcomp.backends.numba_cpu.drivers import Layout, Own, decoder, encoder
from qcomp.backends.numba_cpu.jit import Bytes, Floats, inline, inline_always
from qcomp.backends.numba_cpu.packing import codes_and_scales
from qcomp.backends.numba_cpu.primitives import (
    ZERO,
    F,
    as_bits,
    as_float,
    as_signed,
    flush,
    load_scale,
    rounding,
    store_scale,
    too_large,
)
from qcomp.backends.numba_cpu.qsgd import round_up_step


@extending.intrinsic
def _ordered(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Map the bits of floats to integers in the same order, and back; NaN lies beyond the infinities.

    The kernels compare integers because comparisons of floats that may be NaN do not vectorise.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        (value,) = arguments
        negative = builder.ashr(value, value.type(bits.bitwidth - 1))
        return builder.xor(value, builder.lshr(negative, value.type(1)))

    return bits(bits), generate


@inline
def _extremes(p: Floats) -> tuple[np.float32, np.float32]:
    low = high = _ordered(as_signed(p[0]))
    for i in range(p.size):
        value = _ordered(as_signed(p[i]))
        low = min(low, value)
        high = max(high, value)
    return as_float(_ordered(low)), as_float(_ordered(high))


@inline
def _clamp(code: np.float32) -> np.float32:
    code = code if code > ZERO else ZERO
    return F(255) if code > F(255) else code


@inline
def _quantise(p: Floats, base: np.float32, step: np.float32, divisor: np.float32, codes: Bytes) -> None:
    """Fill the codes, and let p = flush(p - decoded)."""
    magic = rounding(step)
    for i in range(p.size):
        value = p[i]
        # Clamping before rounding gives the same code. An addition then rounds, and leaves the code in the last byte.
        rounded = _clamp(flush(value - base) / divisor) + magic
        codes[i] = np.uint8(as_bits(rounded))
        p[i] = flush(value - (base + (rounded - magic) * step))


@inline
def _layout(size: int, bucket_size: int, own: Own) -> Layout:  # noqa: ARG001
    """Return the end of the codes, and the starts of the bases and steps, which are aligned."""
    _, bases = codes_and_scales(size, bucket_size, bucket_size, 8)
    return size, bases, bases + 4 * ((size + bucket_size - 1) // bucket_size)


@inline_always
def _encode_bucket(
    p: Floats,
    filled: int,
    start: int,
    bucket: int,
    data: Bytes,
    layout: Layout,
    feeds: bool,  # noqa: ARG001
    own: Own,  # noqa: ARG001
    scratch: Floats,  # noqa: ARG001
) -> bool:
    low, high = _extremes(p)
    if too_large(low) or too_large(high):
        return False
    step = round_up_step(flush(high - low), 255, 0xFF)
    divisor = step if step > ZERO else F(1)
    base = low
    if low <= ZERO and high >= ZERO:
        base = -(_clamp(np.rint(-low / divisor)) * step)
    base = flush(F(base))
    store_scale(data, layout[1] + 4 * bucket, base)
    store_scale(data, layout[2] + 4 * bucket, step)
    as_p = p.dtype.type
    _quantise(p, as_p(base), as_p(step), as_p(divisor), data[start : start + filled])
    return True


@inline
def _write(codes: Bytes, base: np.float32, step: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = base + F(np.int32(codes[i])) * step


@inline
def _accumulate(codes: Bytes, base: np.float32, step: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] += base + F(np.int32(codes[i])) * step


@inline_always
def _decode_bucket(
    data: Bytes,
    layout: Layout,
    start: int,
    bucket: int,
    adds: int,
    out: Floats,
    own: Own,  # noqa: ARG001
) -> None:
    codes = data[start : start + out.size]
    base = out.dtype.type(load_scale(data, layout[1] + 4 * bucket))
    step = out.dtype.type(load_scale(data, layout[2] + 4 * bucket))
    if adds:
        _accumulate(codes, base, step, out)
    else:
        _write(codes, base, step, out)


_encode = encoder(
    "encode_minmax", "()", _layout, _encode_bucket, pads=False
)  # zeros as padding would affect the extremes
_decode = decoder("decode_minmax", "()", _layout, _decode_bucket)


@lru_cache(256)
def minmax_kernels(bucket_size: int) -> CompressorKernels:
    """Return the kernels of `qcomp.MinMaxUInt8`."""
    runs = encode_run(_encode, bucket_size), decode_run(_decode, bucket_size)
    return CompressorKernels.without_draws(bucket_size, *runs)
