"""The decoder of `qcomp.core.compressors.qsgd`, alone or inside `qcomp.Scaled`: it turns levels and steps into values.

Bytes read and written per element, with b bits: b/8 and 4, plus 4 read to accumulate.
"""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu.codec import DecodeRun, decode_run
from qcomp.backends.numba_cpu.drivers import Layout, Own, decoder
from qcomp.backends.numba_cpu.jit import Bytes, Codes, Floats, inline, inline_always
from qcomp.backends.numba_cpu.packing import codes_and_scales, empty_codes, unpack
from qcomp.backends.numba_cpu.primitives import (
    ZERO,
    F,
    U,
    bucket_length,
    flush,
    load_scale,
    truncate_last_bit,
)


@inline
def scaled(x: np.float32, factor: np.float32) -> np.float32:
    """Return x times the factor, rounded as in `qcomp.Scaled`."""
    return flush(truncate_last_bit(x * factor))


@inline
def _value(code: np.uint32, sign: np.uint32, step: np.float32) -> np.float32:
    value = F(np.int32(code & U(sign - U(1)))) * step
    return -value if code > sign else value


@inline
def _write(codes: Codes, sign: np.uint32, step: np.float32, out: Floats) -> None:
    for j in range(out.size):
        out[j] = _value(U(codes[j]), sign, step)


@inline
def _accumulate(codes: Codes, sign: np.uint32, step: np.float32, out: Floats) -> None:
    for j in range(out.size):
        out[j] += _value(U(codes[j]), sign, step)


@inline
def _write_scaled(codes: Codes, sign: np.uint32, step: np.float32, out: Floats, factor: np.float32) -> None:
    for j in range(out.size):
        out[j] = scaled(_value(U(codes[j]), sign, step), factor)


@inline
def _accumulate_scaled(
    codes: Codes, sign: np.uint32, step: np.float32, out: Floats, factor: np.float32
) -> None:
    for j in range(out.size):
        out[j] += scaled(_value(U(codes[j]), sign, step), factor)


@inline
def _layout(size: int, held: int, own: Own) -> Layout:
    return codes_and_scales(size, held, own[0], own[2])


@inline_always
def _decode_bucket(
    data: Bytes,
    layout: Layout,
    start: int,  # noqa: ARG001
    bucket: int,
    adds: int,
    out: Floats,
    own: Own,
) -> None:
    bucket_size, held, bits, factor, codes = own
    sign = U(1 << (bits - 1))
    length = bucket_size if out.size == held else bucket_length(out.size)
    at = bucket * bucket_size * bits // 8
    unpack(data[at : at + length * bits // 8], bits, codes[:length])
    step = load_scale(data, layout[1] + 4 * bucket)
    part = codes[: out.size]
    if factor == ZERO:  # not scaled; unlike 0, a factor that rounds to 1 still clears a bit
        if adds:
            _accumulate(part, sign, step, out)
        else:
            _write(part, sign, step, out)
    elif adds:
        _accumulate_scaled(part, sign, step, out, factor)
    else:
        _write_scaled(part, sign, step, out, factor)


_decode, _decode_wide = (
    decoder(name, f"(int64, int64, int64, float32, {codes})", _layout, _decode_bucket)
    for name, codes in (("decode_qsgd", "u8"), ("decode_qsgd_wide", "u16"))
)
"""Kernels for codes of up to 8 and of up to 16 bits."""


def decode_qsgd(levels: int, bucket_size: int, factor: float | None, held: int | None) -> DecodeRun:
    """Return a function that decompresses payloads of levels and steps; see `qsgd_kernels`."""
    bits, filled = levels.bit_length() + 1, held or bucket_size
    settings = bucket_size, filled, bits, factor or 0.0
    kernel = _decode if bits <= 8 else _decode_wide
    return decode_run(kernel, filled, lambda _: (*settings, empty_codes(bucket_size, bits)))
