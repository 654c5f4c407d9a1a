"""Loops over vectors, ranks and buckets, which turn a compressor family's functions for one bucket into kernels.

``encode_bucket`` and ``decode_bucket`` compress and decompress a bucket. ``layout`` returns the facts about a payload
that they need: first the end of its codes, then the end of the unused bytes after the codes. The family's own
arguments, such as its settings and scratch arrays, are a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qcomp.backends.numba_cpu.jit import Bytes, Floats, Kernel, Longs, borrow, kernel
from qcomp.backends.numba_cpu.primitives import (
    NO_RESIDUAL,
    TINY,
    ZERO,
    F,
    Source,
    bucket_length,
    finish,
    load,
)
from qcomp.backends.numba_cpu.stream import finish_streams, stream
from qcomp.backends.numba_cpu.tables import input_vectors, input_weights, output_vectors, run_of

Own = tuple[Any, ...]
"""A family's own arguments of a kernel."""
Layout = tuple[int, ...]

WRITE, ADD, ADD_AGAIN = range(3)
"""What a decoder does with the values in a vector: it overwrites them; it adds to them; or it adds to them, and they
are decompressed values already, which contain no -0."""


def encoder(
    name: str,
    own: str,
    layout: Callable[[int, int, Own], Layout],
    encode_bucket: Callable[[Floats, int, int, int, Bytes, Layout, bool, Own, Floats], bool],
    *,
    pads: bool,
) -> Kernel:
    """Return the kernel that compresses the buckets of a table.

    ``own`` has the types of the family's own arguments, as a tuple in numba's notation. ``layout(size, bucket_size,
    own)`` returns the layout of a vector's payload. ``encode_bucket`` compresses a bucket that begins at element
    ``start`` of its vector and has ``filled`` elements before its padding; with ``feeds`` it leaves the new residual in
    p. It returns whether no value is too large. If a kernel ``pads``, the last bucket is filled up with zeros.
    """

    def encode(
        rows: Longs,
        ends: Longs,
        mode: int,
        bucket_size: int,
        own: Own,
        first: int,
        last: int,
        room: Floats,
    ) -> int:
        own, room = borrow(own), borrow(room)
        beside, scratch = room[:bucket_size], room[bucket_size:]
        feeds = mode != NO_RESIDUAL
        vector = 0
        while first < last:
            vector, begin, end = run_of(ends, vector, first, last)
            x, residual, out, m, data = input_vectors(rows, vector, room)
            source: Source = x, residual, out, mode, m, input_weights(rows, vector, room), TINY
            fields = layout(x.size, bucket_size, own)
            for bucket in range(begin, end):
                start = bucket * bucket_size
                stop = min(start + bucket_size, x.size)
                filled = stop - start
                length = bucket_length(filled) if pads and filled < bucket_size else filled
                p = load(source, start, stop, length, beside)
                if not encode_bucket(p, filled, start, bucket, data, fields, feeds, own, scratch):
                    return first + bucket - begin
                if feeds and filled < length:
                    out[start:stop] = p[:filled]
            if end * bucket_size >= x.size:
                data[fields[0] : fields[1]] = np.uint8(0)
            first += end - begin
        return -1

    signature = f"int64(table, i64, int64, int64, Tuple({own}), int64, int64, f32)"
    return kernel(signature, name)(encode)


def decoder(
    name: str,
    own: str,
    layout: Callable[[int, int, Own], Layout],
    decode_bucket: Callable[[Bytes, Layout, int, int, int, Floats, Own], None],
) -> Kernel:
    """Return the kernel that decompresses a table: for each vector, it adds up the payloads of all ranks, one by one.

    ``decode_bucket(data, layout, start, bucket, adds, out, own)`` decompresses a bucket into ``out``, where ``adds`` is
    `WRITE`, `ADD` or `ADD_AGAIN`. The other parameters are as for `encoder`.
    """

    def decode(
        rows: Longs,
        payloads: Longs,
        ends: Longs,
        bucket_size: int,
        own: Own,
        accumulate: bool,
        streams: bool,
        finishes: bool,
        first: int,
        last: int,
        beside: Floats,
    ) -> None:
        own, beside = borrow(own), borrow(beside)
        ranks = payloads.shape[1]
        vector = 0
        while first < last:
            vector, begin, end = run_of(ends, vector, first, last)
            for rank in range(ranks):
                data, out = output_vectors(rows, payloads, vector, rank, beside)
                fields = layout(out.size, bucket_size, own)
                divisor = F(ranks) if finishes and rank == ranks - 1 else ZERO
                adds = ADD_AGAIN if rank > 0 else ADD if accumulate else WRITE
                for bucket in range(begin, end):
                    start = bucket * bucket_size
                    stop = min(start + bucket_size, out.size)
                    values = beside[: stop - start] if streams else out[start:stop]
                    decode_bucket(data, fields, start, bucket, adds, values, own)
                    if streams:
                        stream(out[start:stop], values)
                    elif divisor > ZERO:
                        finish(values, divisor)
            first += end - begin
        if streams:
            finish_streams()

    signature = f"void(table, table, i64, int64, Tuple({own}), boolean, boolean, boolean, int64, int64, f32)"
    return kernel(signature, name)(decode)
