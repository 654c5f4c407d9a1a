"""Levels and steps back to values: the decoder of `qcomp.core.compressors.qsgd`, also inside `qcomp.Scaled`.

Bytes read and written per element, with b bits: b/8 and 4, plus 4 read to accumulate.
"""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu.codec import DecodeRun
from qcomp.backends.numba_cpu.jit import Bytes, Codes, Floats, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.packing import empty_codes, unpack
from qcomp.backends.numba_cpu.primitives import (
    F,
    U,
    as_bits,
    as_float,
    bucket_length,
    finish,
    flush,
    load_scale,
)
from qcomp.backends.numba_cpu.stream import finish_streams, stream
from qcomp.backends.numba_cpu.tables import Decoded, output_vectors, run_of

__all__ = ["decode_qsgd", "scaled"]


def decode_qsgd(
    levels: int, bucket_size: int, *, factor: float | None = None, held: int | None = None
) -> DecodeRun:
    """Return a function that decompresses payloads of levels and steps; see `encode_qsgd`."""
    bits, filled = levels.bit_length() + 1, held or bucket_size
    kernel = _decode if bits <= 8 else _decode_wide

    def run(vectors: Decoded, accumulate: bool, streams: bool, finish: bool, first: int, last: int) -> None:
        codes = empty_codes(bucket_size, bits)
        beside = np.empty(bucket_size if streams else 0, dtype=np.float32)
        kernel(
            *vectors,
            bucket_size,
            filled,
            bits,
            accumulate,
            streams,
            finish,
            first,
            last,
            codes,
            beside,
            F(factor or 0),
        )

    return run


@inline
def scaled(x: np.float32, factor: np.float32) -> np.float32:
    """Return x times the factor as `qcomp.Scaled` rounds it."""
    return flush(as_float(as_bits(x * factor) & U(0xFFFFFFFE)))


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
def _decode_vector(
    data: Bytes,
    bucket_size: int,
    held: int,
    bits: int,
    out: Floats,
    accumulate: bool,
    streams: bool,
    ranks: np.float32,
    first: int,
    last: int,
    codes: Codes,
    beside: Floats,
    factor: np.float32,
) -> None:
    data, out, codes, beside = borrow(data), borrow(out), borrow(codes), borrow(beside)
    full = out.size // held
    rest = out.size - full * held
    codes_end = (full * bucket_size + (bucket_length(rest) if rest > 0 else 0)) * bits // 8
    scales = (codes_end + 3) // 4 * 4
    sign = U(1 << (bits - 1))
    for bucket in range(first, last):
        start = bucket * held
        stop = min(start + held, out.size)
        length = bucket_size if stop - start == held else bucket_length(stop - start)
        at = bucket * bucket_size * bits // 8
        unpack(data[at : at + length * bits // 8], bits, codes[:length])
        step = load_scale(data, scales + 4 * bucket)
        part, values = codes[: stop - start], out[start:stop]
        if streams:
            values = beside[: stop - start]
        if factor == F(0):  # not scaled; unlike 0, a factor that rounds to 1 still clears a bit
            if accumulate:
                _accumulate(part, sign, step, values)
            else:
                _write(part, sign, step, values)
        elif accumulate:
            _accumulate_scaled(part, sign, step, values, factor)
        else:
            _write_scaled(part, sign, step, values, factor)
        if streams:
            stream(out[start:stop], beside)
        elif ranks > F(0):
            finish(values, ranks)
    if streams:
        finish_streams()


def _decode_vectors(
    rows: Longs,
    payloads: Longs,
    ends: Longs,
    bucket_size: int,
    held: int,
    bits: int,
    accumulate: bool,
    streams: bool,
    finishes: bool,
    first: int,
    last: int,
    codes: Codes,
    beside: Floats,
    factor: np.float32,
) -> None:
    codes, beside = borrow(codes), borrow(beside)
    ranks = payloads.shape[1]
    vector = 0
    while first < last:
        vector, start, stop = run_of(ends, vector, first, last)
        for rank in range(ranks):
            data, out = output_vectors(rows, payloads, vector, rank)
            divisor = F(ranks) if finishes and rank == ranks - 1 else F(0)
            _decode_vector(
                data,
                bucket_size,
                held,
                bits,
                out,
                accumulate or rank > 0,
                streams,
                divisor,
                start,
                stop,
                codes,
                beside,
                factor,
            )
        first += stop - start


_decode, _decode_wide = (
    kernel(
        "void(table, table, i64, int64, int64, int64, boolean, boolean, boolean, "
        f"int64, int64, {codes}, f32, float32)"
    )(_decode_vectors)
    for codes in ("u8", "u16")
)
"""For codes of up to 8 bits and of up to 16."""
