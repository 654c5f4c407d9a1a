"""The kernels of `qcomp.core.compressors.identity`: uncompressed values.

Without a residual, a payload holds x, or the momentum that x is blended into. With a residual, it holds
p = flush(flush(x) + residual), and residual' = 0.

Bytes read and written per element: encode 4 and 4, with feedback 8 and 8; decode 4 and 4, plus 4 read to accumulate.
Memory bandwidth is the limit; checking the values takes no pass of its own.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from qcomp.backends.numba_cpu.codec import CompressorKernels
from qcomp.backends.numba_cpu.jit import Bytes, Floats, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.primitives import (
    EXACT_LIMIT,
    EXACT_TINY,
    NO_RESIDUAL,
    ZERO,
    F,
    blend,
    by_width,
    finish,
    largest,
    load,
)
from qcomp.backends.numba_cpu.stream import finish_streams, stream
from qcomp.backends.numba_cpu.tables import (
    Decoded,
    ToEncode,
    input_vectors,
    input_weights,
    output_vectors,
    run_of,
)

RUN = 1 << 10
"""Elements that the kernels treat as a bucket, few enough to stay in the first-level cache."""


@lru_cache(1)
def identity_kernels() -> CompressorKernels:
    """Return the kernels of `qcomp.Identity`."""

    def encode(vectors: ToEncode, mode: int, first: int, last: int) -> int:
        *table, dtype = vectors
        failed: int = _encode.of(dtype).compiled(*table, mode, first, last, np.empty(RUN, dtype))
        return failed

    def decode(
        vectors: Decoded, accumulate: bool, streams: bool, finish: bool, first: int, last: int
    ) -> None:
        *table, dtype = vectors
        _decode.of(dtype).compiled(*table, accumulate, streams, finish, first, last, np.empty(RUN, dtype))

    return CompressorKernels.without_draws(RUN, encode, decode)


# Values are copied as bytes, since a payload may be at any address.


@inline
def _store(values: Floats, data: Bytes) -> None:
    raw = values.view(np.uint8)
    for i in range(data.size):
        data[i] = raw[i]


@inline
def _load(data: Bytes, values: Floats) -> None:
    raw = values.view(np.uint8)
    for i in range(data.size):
        raw[i] = data[i]


@inline
def _accumulate(values: Floats, out: Floats) -> None:
    for i in range(out.size):
        out[i] += values[i]


@kernel("int64(table, i64, int64, int64, int64, f32)")
def _encode(
    rows: Longs,
    ends: Longs,
    mode: int,
    first: int,
    last: int,
    scratch: Floats,
) -> int:
    scratch = borrow(scratch)
    vector = 0
    width, limit = by_width(scratch, 4, 8), by_width(scratch, *EXACT_LIMIT)
    tiny = by_width(scratch, *EXACT_TINY)
    while first < last:
        vector, begin, end = run_of(ends, vector, first, last)
        x, residual, out, m, data = input_vectors(rows, vector, scratch)
        weights = input_weights(rows, vector, scratch)
        for run in range(begin, end):
            start, stop = run * RUN, min((run + 1) * RUN, x.size)
            if mode != NO_RESIDUAL:
                p = load((x, residual, out, mode, m, weights, tiny), start, stop, stop - start, scratch)
            elif m.size > 0:
                p = scratch[: stop - start]
                blend(x[start:stop], m[start:stop], weights, p, ZERO)
            else:
                p = x[start:stop]
            if not largest(p) < limit:
                return first + run - begin
            _store(p, data[width * start : width * stop])
            if mode != NO_RESIDUAL:
                out[start:stop] = ZERO
        first += end - begin
    return -1


@kernel("void(table, table, i64, boolean, boolean, boolean, int64, int64, f32)")
def _decode(
    rows: Longs,
    payloads: Longs,
    ends: Longs,
    accumulate: bool,
    streams: bool,
    finishes: bool,
    first: int,
    last: int,
    scratch: Floats,
) -> None:
    scratch, width = borrow(scratch), by_width(scratch, 4, 8)
    ranks = payloads.shape[1]
    vector = 0
    while first < last:
        vector, begin, end = run_of(ends, vector, first, last)
        for rank in range(ranks):
            data, out = output_vectors(rows, payloads, vector, rank, scratch)
            for run in range(begin, end):
                start, stop = run * RUN, min((run + 1) * RUN, out.size)
                to = out[start:stop]
                if accumulate or rank > 0 or streams:
                    values = scratch[: stop - start]
                    _load(data[width * start : width * stop], values)
                    if accumulate or rank > 0:
                        _accumulate(values, to)
                    else:
                        stream(to, values)
                else:
                    _load(data[width * start : width * stop], to)
                if finishes and rank == ranks - 1:
                    finish(to, F(ranks))
        first += end - begin
    if streams:
        finish_streams()
