"""The kernels of `qcomp.core.compressors.lloyd_max`: nearest rounding to the best levels for a normal distribution.

p = flush(flush(x) + residual); code = how many thresholds * (root mean p^2 of the bucket) are below |p|, with the sign
in the top bit; step = <|p|, level> / ||level||^2, cut to 17 bits; residual' = flush(p - signed level * step).

Bytes read and written per element, with b bits: encode with feedback 8 and 4 + b/8, without 4 and b/8; decode b/8 and
4, plus 4 read to accumulate. Arithmetic is the limit: a pass over the bucket for each threshold.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from qcomp.backends.numba_cpu.codec import CompressorKernels, decode_run, encode_run
from qcomp.backends.numba_cpu.drivers import Layout, Own, decoder, encoder
from qcomp.backends.numba_cpu.jit import Bytes, Codes, Floats, inline, inline_always
from qcomp.backends.numba_cpu.packing import codes_and_scales, empty_codes, pack, unpack
from qcomp.backends.numba_cpu.primitives import (
    ZERO,
    F,
    U,
    as_bits,
    as_float,
    bucket_length,
    flush,
    largest,
    load_scale,
    scaled_squares,
    store_scale,
    too_large,
    tree_sum,
    truncate_last_bit,
    with_sign,
)
from qcomp.core.compressors.lloyd_max import LEVELS, THRESHOLDS


@inline
def _choose(
    p: Floats, levels: Floats, thresholds: Floats, scale: np.float32, codes: Codes, chosen: Floats
) -> None:
    """Fill the codes and the levels."""
    sign = np.uint8(levels.size)
    for i in range(p.size):
        codes[i] = sign if p[i] < ZERO else np.uint8(0)
        chosen[i] = levels[0]
    for k in range(thresholds.size):
        threshold, more = flush(thresholds[k] * scale), levels[k + 1] - levels[k]
        for i in range(p.size):
            above = abs(p[i]) > threshold
            codes[i] += np.uint8(above)
            chosen[i] += more if above else ZERO


@inline
def _best_step(p: Floats, chosen: Floats, filled: int, sums: Floats) -> np.float32:
    """Return <|p|, levels> / ||levels||^2, cut to 17 bits."""
    for i in range(p.size):
        sums[i] = truncate_last_bit(abs(p[i]) * chosen[i])
    along = tree_sum(sums)
    for i in range(p.size):
        sums[i] = chosen[i] * chosen[i] if i < filled else ZERO
    step: np.float32 = as_float(U(as_bits(F(along / tree_sum(sums))) & U(0xFFFFFF80)))
    return step


@inline
def _mean_magnitude(p: Floats, filled: int, sums: Floats) -> np.float32:
    for i in range(p.size):
        sums[i] = abs(p[i])
    return F(tree_sum(sums) / p.dtype.type(filled))


@inline
def _subtract(p: Floats, chosen: Floats, step: np.float32) -> None:
    """Let p = flush(p - decoded), where the decoded value has the sign of p."""
    for i in range(p.size):
        p[i] = flush(p[i] - with_sign(chosen[i] * step, p[i]))


@inline
def _layout(size: int, bucket_size: int, own: Own) -> Layout:
    return codes_and_scales(size, bucket_size, bucket_size, own[0])


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
    bits, levels, thresholds, all_codes = own
    codes, chosen, sums = all_codes[: p.size], scratch[: p.size], scratch[p.size : 2 * p.size]
    peak = largest(p)
    if too_large(peak):
        return False
    total, power = scaled_squares(p, peak, sums[: p.size // 2])
    scale = flush(np.sqrt(total / p.dtype.type(filled)) * power)
    _choose(p, levels, thresholds, scale, codes, chosen)
    step = flush(_mean_magnitude(p, filled, sums) if bits == 1 else _best_step(p, chosen, filled, sums))
    store_scale(data, layout[1] + 4 * bucket, step)
    at = start * bits // 8
    pack(codes, bits, data[at : at + p.size * bits // 8])
    if feeds:
        _subtract(p, chosen, step)
    return True


@inline
def _write(codes: Codes, values: Floats, out: Floats) -> None:
    for j in range(out.size):
        out[j] = values[codes[j]]


@inline
def _accumulate(codes: Codes, values: Floats, out: Floats) -> None:
    for j in range(out.size):
        out[j] += values[codes[j]]


@inline_always
def _decode_bucket(
    data: Bytes, layout: Layout, start: int, bucket: int, adds: int, out: Floats, own: Own
) -> None:
    bits, levels, codes, values = own
    length, at = bucket_length(out.size), start * bits // 8
    unpack(data[at : at + length * bits // 8], bits, codes[:length])
    step = load_scale(data, layout[1] + 4 * bucket)
    for k in range(levels.size):
        values[k] = levels[k] * step
        values[levels.size + k] = -values[k]
    if adds:
        _accumulate(codes[: out.size], values, out)
    else:
        _write(codes[: out.size], values, out)


_encode = encoder("encode_lloyd_max", "(int64, f32, f32, u8)", _layout, _encode_bucket, pads=True)
_decode = decoder("decode_lloyd_max", "(int64, f32, u8, f32)", _layout, _decode_bucket)


@lru_cache(256)
def lloyd_max_kernels(bits: int, bucket_size: int) -> CompressorKernels:
    """Return the kernels of `qcomp.LloydMax` without a coder."""

    def encodes(dtype: np.dtype[Any]) -> Own:
        levels, thresholds = (np.asarray(table[bits], dtype) for table in (LEVELS, THRESHOLDS))
        return bits, levels, thresholds, empty_codes(bucket_size, bits)

    def decodes(dtype: np.dtype[Any]) -> Own:
        levels = np.asarray(LEVELS[bits], dtype)
        return bits, levels, empty_codes(bucket_size, bits), np.empty(2 * levels.size, dtype)

    encode = encode_run(_encode, bucket_size, encodes, scratch=2 * bucket_size)
    return CompressorKernels.without_draws(bucket_size, encode, decode_run(_decode, bucket_size, decodes))
