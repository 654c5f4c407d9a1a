"""Prints what is in a payload file: ``python read_payload.py FILE``; a reader that follows docs/format.md.

It imports neither qcomp nor NumPy.
"""

import struct
import sys
import zlib
from math import copysign, inf
from pathlib import Path
from typing import Any

from payload_bits import MASK, RefusedError, Source, elias, gaps, ranges, require
from payload_specs import omega, parsed

NUMBERS = {1: [1], 2: [3, 10], 3: [10, 31, 55, 88], 4: [5, 15, 25, 36, 48, 62, 79, 104]}


def single(x: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return copysign(inf, x)


def flushed(x: float) -> float:
    return 0.0 if abs(x) < 2.0**-126 else x


def recoded(values: list[Any], old: str, new: str) -> list[Any]:
    """Return the bits of values of one `struct` format as values of another."""
    return list(struct.unpack(f"<{len(values)}{new}", struct.pack(f"<{len(values)}{old}", *values)))


def philox(counter: list[int], key: list[int]) -> list[int]:
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & MASK, a >> 32 ^ c3 ^ k1, a & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return [c0, c1, c2, c3]


def draws(stream: list[int], number: int, bucket_size: int, length: int) -> list[int]:
    first = (stream[3] + number) * (bucket_size // 8)
    words = [philox([first + e & MASK, stream[2], 0, 0], stream[:2]) for e in range(length // 8)]
    return [w[d // 2] >> d % 2 * 16 & 0xFFFF for d in range(8) for w in words]


def levels(
    c: Any, source: Source, counts: list[int], padded: list[int]
) -> tuple[list[tuple[int, int]], list[float]]:
    """Return the level and the sign of each element, and the steps; levels of `lloyd_max` start at 1."""
    low = int(c.name == "lloyd_max")
    bits, most = (c.bits, 1 << c.bits - 1) if low else (c.levels.bit_length() + 1, c.levels)
    step = [] if c.coding == "fixed" else source.field("f", len(counts))
    if kind := 0 if c.coding == "fixed" else source.bits(8):
        require(
            kind == 1 and counts and source.left() <= sum(padded) * bits // 8, "the codes have no such kind"
        )
        signed = (elias if c.coding == "elias" else ranges)(source, sum(counts), most)
        require(all(level >= low for level, _ in signed), "a level is 0")
    else:
        top = 1 << bits - 1
        signed = [(q % top + low, q // top) for q in source.codes(bits, counts, padded)]
    return signed, step or source.field("f", len(counts))


def sparse(
    c: Any, source: Source, counts: list[int], padded: list[int], rounded: Any
) -> list[tuple[int, float]]:
    """Return the places of kept elements in the vector, and their values."""
    v, size, m, buckets = c.value_bits, c.bucket_size, len(counts), range(len(counts))
    if c.name == "randk":
        strata = [min(c.k, length) for length in padded]
        owner = [(b, j, padded[b] // strata[b]) for b in buckets for j in range(strata[b])]
        if v == 32:
            numbers = source.by_significance(len(owner), size // c.k)
            values = source.field("f", len(owner))
        else:
            codes, top = source.codes(v, strata, [max(8, s) for s in strata]), 1 << v - 1
            step, stream = source.field("f", m), source.field("I", 4)
            drawn = [draw for b in buckets for draw in draws(stream, b, size, padded[b])[: strata[b]]]
            numbers = [draw * f >> 16 for draw, (_, _, f) in zip(drawn, owner, strict=True)]
            values = [
                q % top * step[b] * (-1 if q > top else 1) for q, (b, _, _) in zip(codes, owner, strict=True)
            ]
        kept = zip(numbers, values, owner, strict=True)
        return [(b * size + i * strata[b] + j, rounded(rounded(x) * f)) for i, x, (b, j, f) in kept]
    if v < 32 and c.coding == "gaps":
        entries, *scales = gaps(source, c.k, v, counts)
        lowest, step = (recoded([number << 20 for number in each], "I", "f") for each in scales)
    else:
        of = [b for b in buckets for _ in range(min(c.k, counts[b]))]
        entries = list(zip(of, source.by_significance(len(of), size << v % 32), strict=True))
        if v == 32:
            values = source.field("f", len(of))
            return [(b * size + i, rounded(x)) for (b, i), x in zip(entries, values, strict=True)]
        lowest, step = source.field("f", m), source.field("f", m)
    before, found = (-1, 0), []
    for b, entry in entries:
        if b != before[0] or entry >> v > before[1]:
            x = rounded(lowest[b] + rounded(step[b] * (entry % (1 << v - 1))))
            found.append((b * size + (entry >> v), flushed(-x if entry >> v - 1 & 1 else x)))
        before = b, entry >> v
    return found


def decoded(c: Any, source: Source, n: int, kind: str, rounded: Any) -> list[float]:
    """Return the values of n elements; ``rounded`` rounds to the dtype of the computation."""
    if c.name == "scaled":
        factor, kinds = rounded(1 / (1 + omega(c.inner))), "fI" if rounded is single else "dQ"
        products = [rounded(x * factor) for x in decoded(c.inner, source, n, kind, rounded)]
        return list(map(flushed, recoded([b & ~1 for b in recoded(products, *kinds)], *kinds[::-1])))
    if c.name == "whole_fields":
        room, held = c.inner.bucket_size, c.bucket_size
        longer = decoded(c.inner, source, n // held * room + n % held, kind, rounded)
        return [x for i, x in enumerate(longer) if i % room < held]
    if c.name == "identity":
        return [rounded(x) for x in source.field(kind, n)]
    if c.name == "cast":
        numbers, is_bfloat = source.field("H", n), c.dtype == "bfloat16"
        bits = [h << 16 if is_bfloat else h & 0xFC00 if h & 0x7C00 == 0x7C00 else h for h in numbers]
        return recoded(bits, *("If" if is_bfloat else "He"))
    require(-(-n // c.bucket_size) <= 8 * len(source.data), "the data is too short")  # each bucket has a bit
    counts = [min(c.bucket_size, n - start) for start in range(0, n, c.bucket_size)]
    padded = [max(8, 1 << (count - 1).bit_length()) for count in counts]
    if c.name in {"topk", "randk"}:
        found = dict(sparse(c, source, counts, padded, rounded))
        return [found.get(i, 0.0) for i in range(n)]
    return dense(c, source, counts, padded, rounded)


def dense(c: Any, source: Source, counts: list[int], padded: list[int], rounded: Any) -> list[float]:
    """Return the values of compressors with a code for each element."""
    of, m = [b for b, count in enumerate(counts) for _ in range(count)], len(counts)
    if c.name in {"qsgd", "lloyd_max"}:
        signed, step = levels(c, source, counts, padded)
        numbers = [NUMBERS[c.bits][level - 1] if c.name == "lloyd_max" else level for level, _ in signed]
        values = [rounded(number * step[b]) for number, b in zip(numbers, of, strict=True)]
        return [-x if sign and level else x for x, (level, sign) in zip(values, signed, strict=True)]
    if c.name == "minmax":
        codes, base, step = source.codes(8, counts, padded), source.field("f", m), source.field("f", m)
        return [rounded(base[b] + rounded(q * step[b])) for q, b in zip(codes, of, strict=True)]
    if c.name == "sign":
        codes, scale = source.codes(1, counts, padded), source.field("f", m)
        return [(1 - 2 * q) * scale[b] for q, b in zip(codes, of, strict=True)]
    codes = source.codes(1, counts, [-(-count // 8) * 8 for count in counts])
    means = source.field("f", m), source.field("f", m)
    return [means[q][b] for q, b in zip(codes, of, strict=True)]


def read(blob: bytes, dtype: str = "") -> tuple[str, str, list[float]]:
    """Return the spec string, the dtype and the values of a payload file, in the file's dtype or another."""
    require(len(blob) >= 24, "the header is too short")
    magic, version, number, s, n, length = struct.unpack_from("<4sBBHQQ", blob)
    require(magic == b"QCMP" and version == 1 and number < 2, "this is no payload of version 1")
    require(len(blob) == 28 + s + length, "the file has another length than its header says")
    (checksum,) = struct.unpack_from("<I", blob, 24 + s)
    require(zlib.crc32(blob[28 + s :], zlib.crc32(blob[: 24 + s])) == checksum, "the checksum does not match")
    spec, dtype = blob[24 : 24 + s].decode(errors="replace"), dtype or ("float32", "float64")[number]
    source = Source(blob[28 + s :])
    c = parsed(spec)
    require(c.name != "whole_fields" or c.field > 1, "whole_fields has no field")
    values = decoded(c, source, n, "fd"[number], float if dtype == "float64" else single)
    require(source.bytes(source.left()) == b"", "bytes follow the data")
    return spec, dtype, values


def written(values: list[float], dtype: str) -> bytes:
    """Return the bytes of values, rounded to a dtype."""
    if dtype == "bfloat16":
        halves = [bits + 0x7FFF + (bits >> 16 & 1) >> 16 for bits in recoded(values, "f", "I")]
        return struct.pack(f"<{len(values)}H", *halves)
    if dtype == "float16":
        values = [x if abs(x) < 65520 else copysign(inf, x) for x in values]
    return struct.pack(f"<{len(values)}{ {'float16': 'e', 'float32': 'f', 'float64': 'd'}[dtype] }", *values)


def main() -> None:
    (file,) = sys.argv[1:]
    try:
        spec, dtype, values = read(Path(file).read_bytes())
    except RefusedError as error:
        sys.exit(f"{file}: {error}")
    print(f"{spec}: {len(values)} elements of {dtype}")
    print(*values[:10], *["..."] * (len(values) > 10))


if __name__ == "__main__":
    main()
