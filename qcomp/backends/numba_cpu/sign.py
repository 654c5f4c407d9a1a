"""The kernels of `qcomp.core.compressors.sign`: the sign of every element and a scale for every bucket, with feedback.

p = flush(flush(x) + residual); scale = mean |p| or root mean p^2 of the bucket; code = 1 where p < 0;
residual' = flush(p - (scale or -scale)).

Bytes read and written per element: encode with feedback 8 and 4.125, without 4 and 0.125; decode 0.125 and 4, plus
4 read to accumulate. Memory bandwidth is the limit: encoding passes over a bucket three times (sum; signs and sums;
new residual), but only the first pass reads it from memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np

from qcomp.backends.numba_cpu.codec import CompressorKernels, decode_run, encode_run
from qcomp.backends.numba_cpu.drivers import Layout, Own, decoder, encoder
from qcomp.backends.numba_cpu.jit import Bytes, Floats, inline, inline_always
from qcomp.backends.numba_cpu.packing import codes_and_scales
from qcomp.backends.numba_cpu.primitives import (
    F,
    U,
    bucket_length,
    flush,
    largest,
    load_scale,
    scaled_squares,
    store_scale,
    too_large,
    top_bit,
    tree_sum,
    with_sign,
)


@inline
def _signs_and_sums(p: Floats, codes: Bytes, sums: Floats) -> None:
    """Pack the signs, and let sums hold the third level of the halving tree over the magnitudes.

    In a bucket of 8 * W elements, bit k of byte j is the sign of element k * W + j. Three halvings add up the eight
    elements whose signs share a byte, so one loop does both.
    """
    width = codes.size
    p0, p1, p2, p3 = p[:width], p[width : 2 * width], p[2 * width : 3 * width], p[3 * width : 4 * width]
    p4, p5, p6, p7 = (
        p[4 * width : 5 * width],
        p[5 * width : 6 * width],
        p[6 * width : 7 * width],
        p[7 * width :],
    )
    for j in range(codes.size):
        a, b, c, d, e, f, g, h = p0[j], p1[j], p2[j], p3[j], p4[j], p5[j], p6[j], p7[j]
        lower = (abs(a) + abs(e)) + (abs(c) + abs(g))
        upper = (abs(b) + abs(f)) + (abs(d) + abs(h))
        sums[j] = lower + upper
        codes[j] = np.uint8(
            top_bit(a)
            | top_bit(b) << U(1)
            | top_bit(c) << U(2)
            | top_bit(d) << U(3)
            | top_bit(e) << U(4)
            | top_bit(f) << U(5)
            | top_bit(g) << U(6)
            | top_bit(h) << U(7)
        )


@inline
def _subtract(p: Floats, scale: np.float32) -> None:
    """Let p = flush(p - decoded)."""
    for i in range(p.size):
        p[i] = flush(p[i] - with_sign(scale, p[i]))


@inline
def _layout(size: int, bucket_size: int, own: Own) -> Layout:  # noqa: ARG001
    return codes_and_scales(size, bucket_size, bucket_size, 1)


@inline_always
def _encode_bucket(
    p: Floats,
    filled: int,
    start: int,
    bucket: int,
    data: Bytes,
    layout: Layout,
    feeds: bool,
    own: Own,
    scratch: Floats,
) -> bool:
    (rms,) = own
    width = p.size // 8
    _signs_and_sums(p, data[start // 8 : start // 8 + width], scratch[:width])
    if rms:
        peak = largest(p)
        if too_large(peak):
            return False
        total, power = scaled_squares(p, peak, scratch[: p.size // 2])
        scale = flush(F(np.sqrt(total / p.dtype.type(filled)) * power))
    else:
        # No magnitude exceeds the sum, so the elements are checked only if the sum is too large.
        total = tree_sum(scratch[:width])
        if too_large(total) and too_large(largest(p)):
            return False
        scale = flush(F(total / p.dtype.type(filled)))
    store_scale(data, layout[1] + 4 * bucket, scale)
    if feeds:
        _subtract(p, p.dtype.type(scale))
    return True


# Choosing between two values uses every lane of a vector; numba would shift bytes in 64 bits.


@inline
def _write(codes: Bytes, bit: np.uint8, scale: np.float32, out: Floats) -> None:
    negative = -scale
    for j in range(out.size):
        out[j] = negative if codes[j] & bit else scale


@inline
def _accumulate(codes: Bytes, bit: np.uint8, scale: np.float32, out: Floats) -> None:
    negative = -scale
    for j in range(out.size):
        out[j] += negative if codes[j] & bit else scale


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
    width = bucket_length(out.size) // 8
    codes = data[start // 8 : start // 8 + width]
    scale = out.dtype.type(load_scale(data, layout[1] + 4 * bucket))
    for plane in range(8):
        a, bit = plane * width, np.uint8(1 << plane)
        values = out[min(a, out.size) : min(a + width, out.size)]
        if adds:
            _accumulate(codes, bit, scale, values)
        else:
            _write(codes, bit, scale, values)


_encode = encoder("encode_sign", "(boolean,)", _layout, _encode_bucket, pads=True)
_decode = decoder("decode_sign", "()", _layout, _decode_bucket)


@lru_cache(256)
def sign_kernels(bucket_size: int, scale: Literal["l1", "rms"]) -> CompressorKernels:
    """Return the kernels of `qcomp.ScaledSign`."""
    encode = encode_run(_encode, bucket_size, (scale == "rms",), scratch=bucket_size)
    return CompressorKernels.without_draws(bucket_size, encode, decode_run(_decode, bucket_size))
