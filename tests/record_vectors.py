"""Writes the test vectors of docs/format.md, `tests/vectors/*.json`: ``python -m tests.record_vectors``."""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ["QCOMP_KERNELS"] = "pure"

import numpy as np

import qcomp
from qcomp.core.coding import elias, gaps, integer_classes, model, rans
from qcomp.core.coding.bits import BitWriter
from qcomp.core.compressors.qsgd import round_up_step
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.codec import Codec
from qcomp.core.mean.framing import Frame, seal
from qcomp.core.numeric.buckets import blocks
from qcomp.core.numeric.random import draws16, philox4x32, stream_of
from qcomp.core.numeric.sums import mean_abs, norm2, pad_to_power_of_two, rms, tree_sum
from tests import releases

FOLDER = Path(__file__).parent / "vectors"
KEY = qcomp.Key(seed=2**33 + 1, step=2**40 + 7, tensor=1, rank=2, hop=1, bucket=3)
SPECS = {
    "identity": ["identity"],
    "cast": ["cast:dtype=bfloat16", "cast:dtype=float16"],
    "sign": ["sign:bucket_size=16,scale=l1", "sign:bucket_size=16,scale=rms"],
    "qsgd": [
        "qsgd:levels=1,bucket_size=16,norm=l2",
        "qsgd:levels=7,bucket_size=16,norm=max",
        "qsgd:levels=20,bucket_size=16,norm=l2",
        "qsgd:levels=127,bucket_size=16,norm=max",
    ],
    "qsgd_elias": [
        "qsgd:levels=1,bucket_size=32,norm=l2,coding=elias",
        "qsgd:levels=7,bucket_size=32,norm=max,coding=elias",
        "qsgd:levels=32767,bucket_size=32,norm=max,coding=elias",
    ],
    "qsgd_range": [
        "qsgd:levels=3,bucket_size=32,norm=l2,coding=range",
        "qsgd:levels=300,bucket_size=32,norm=max,coding=range",
    ],
    "lloyd_max": [f"lloyd_max:bits={bits},bucket_size=16,coding=fixed" for bits in (1, 2, 3, 4)],
    "lloyd_max_range": [f"lloyd_max:bits={bits},bucket_size=32,coding=range" for bits in (2, 4)],
    "minmax": ["minmax:bucket_size=16"],
    "onebit_sgd": ["onebit_sgd:column_size=9", "onebit_sgd:column_size=16"],
    "topk": [
        "topk:k=3,bucket_size=16",
        *(f"topk:k=5,bucket_size=16,value_bits={bits},coding=fixed" for bits in (1, 3)),
        "topk:k=3,bucket_size=256",
        "topk:k=3,bucket_size=65536,value_bits=4,coding=fixed",
    ],
    "topk_gaps": [f"topk:k=5,bucket_size=16,value_bits={bits}" for bits in (1, 2, 4)],
    "randk": [
        "randk:k=16,bucket_size=16",
        "randk:k=2,bucket_size=1024",
        "randk:k=4,bucket_size=16,value_bits=3",
        "randk:k=16,bucket_size=64,value_bits=8",
    ],
    "scaled": [
        "scaled(identity)",
        "scaled(qsgd:levels=127,bucket_size=16,norm=max)",
        "scaled(qsgd:levels=20,bucket_size=16,norm=l2)",
        "scaled(qsgd:levels=128,bucket_size=32,norm=max,coding=elias)",
        "scaled(randk:k=4,bucket_size=16)",
        "scaled(randk:k=4,bucket_size=16,value_bits=2)",
    ],
    "whole_fields": [
        "whole_fields(qsgd:levels=7,bucket_size=16,norm=max):field=3",
        "whole_fields(minmax:bucket_size=16):field=9",
        "whole_fields(topk:k=3,bucket_size=16):field=5",
        "whole_fields(scaled(qsgd:levels=3,bucket_size=8,norm=l2)):field=3",
        "scaled(whole_fields(randk:k=4,bucket_size=16):field=5)",
    ],
}
"""What each file has, by its name."""
AT_A_LIMIT = {
    "topk": [
        "topk:k=8,bucket_size=65536",
        "topk:k=8,bucket_size=128,value_bits=1,coding=fixed",
        "topk:k=8,bucket_size=4096,value_bits=4,coding=fixed",
        "topk:k=8,bucket_size=8192,value_bits=4,coding=fixed",
    ],
    "randk": ["randk:k=8,bucket_size=2048", "randk:k=8,bucket_size=4096"],
}
"""Specs whose entries would have another width in a reader that is off by one."""
DTYPES = ("float32", "float64", "float16", "bfloat16")
Vector = dict[str, Any]


def native(dtype: str) -> Any:
    """Return NumPy's dtype of a name; bfloat16 needs ml_dtypes."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def array(bits: str, dtype: str) -> Any:
    """Return the array of some hexadecimal bits, such as "0000803f" or "0000803f*12", which is that 12 times."""
    digits, _, times = bits.partition("*")
    return np.frombuffer(bytes.fromhex(digits) * int(times or 1), dtype=native(dtype))


def hexadecimal(x: Any, times: int = 1) -> str:
    """Return the bits of an array that consists of equal parts, the inverse of `array`."""
    data = x.tobytes()
    part = data[: len(data) // times]
    assert part * times == data
    return part.hex() + (f"*{times}" if times > 1 else "")


def inputs(spec: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the name of a case, a dtype and values."""
    i = np.arange(37)
    odd = (i * 7919 % 1009 - 504) * 2.0 ** (i % 11 - 9)
    odd[[5, 20, 6]] = 0.0, -0.0, 2.0**-140
    largest = np.nextafter(
        np.float32(65520 if "float16" in spec and "bf" not in spec else 2.0**100), np.float32(0)
    )
    yield "no element", "float32", []
    yield "one element", "float32", [-2.5]
    yield "zeros", "float32", [0.0, -0.0] * 5
    yield "three buckets, the last padded", "float32", odd
    yield "subnormal numbers", "float32", [-(2.0**-126), 0.0, -0.0, 2.0**-140, 2.0**-126, -(2.0**-127)]
    yield "largest magnitudes", "float32", np.array([1, -1, 0.5, 1, 0, -0.25, 1, 1, -1]) * float(largest)
    yield "equal values", "float32", [0.1] * 9
    yield "float64", "float64", (odd + odd / 3e7)[:21]
    yield (
        "far apart in float64",
        "float64",
        [1e-300, -(2.0**-126), float(largest) * (1 - 2**-30), 0.1, -1 / 3, 1e4],
    )
    for dtype in ("float16", "bfloat16"):
        yield dtype, dtype, np.array([3, -7, 0, 11, 96, -1, 5, -33, 8]) / 8


def uneven(count: int) -> Any:
    """Return numbers of both signs, with which each order of additions gives other bits."""
    i = np.arange(1, count + 1)
    return (-1) ** (i // 2) * (i * 7919 % 1009 + 300) / 3 * 1.02**-i


def decoded(spec: str, payload: qcomp.Payload, dtype: str, times: int = 1) -> str:
    like = np.zeros(payload.size, dtype=native(dtype))
    return hexadecimal(qcomp.compressor(spec).decompress(payload, like=like), times)


def vector(case: str, spec: str, dtype: str, x: Any, times: int = 1) -> Vector:
    """Return the vector of an input that consists of equal parts."""
    x, c = np.asarray(x, dtype=np.float64).astype(native(dtype)), qcomp.compressor(spec)
    payload = c.compress(x, key=KEY if c.traits.random else None)
    assert payload.compressor == spec
    others = {"one element": DTYPES, "float64": DTYPES[:2]}.get(case, ())
    return {
        "case": case,
        "compressor": spec,
        "dtype": dtype,
        "input": hexadecimal(x, times),
        "file": payload.to_bytes().hex(),
        "decoded": {name: decoded(spec, payload, name, times) for name in sorted({*others, dtype})},
    }


def long_vectors(file: str) -> Iterator[Vector]:
    """Yield vectors of an input that consists of many equal buckets."""
    bucket = np.where(np.arange(128) % 9, 0.01, 1.0) * np.where(np.arange(128) % 7, 1, -3)
    if file == "topk":
        spec = "topk:k=3,bucket_size=512"
        yield vector(
            "positions of two bytes", spec, "float32", np.resize(bucket, 300) * (np.arange(300) > 250)
        )
    if file == "qsgd_range":
        sparse, spec = (
            np.where(np.arange(64) == 60, 4.0, 0.0),
            "qsgd:levels=7,bucket_size=64,norm=max,coding=range",
        )
        for buckets, case in ((255, "one state"), (256, "four states, from 2^14 elements on")):
            yield vector(case, spec, "float32", np.tile(sparse, buckets), buckets)
    if file == "topk_gaps":
        for k, size, n in ((4, 128, 266), (2, 16, 16), (5, 128, 69)):
            spec = f"topk:k={k},bucket_size={size},value_bits=3"
            yield vector(f"{k} of {n} elements", spec, "float32", np.resize([*bucket, *bucket * 0], n))
    rising = np.arange(1, 49)
    if file == "onebit_sgd":
        yield vector("means that show the order of sums", "onebit_sgd:column_size=11", "float32", uneven(22))
    if file == "randk":
        spec = "randk:k=4,bucket_size=16,value_bits=3"
        yield vector("no zero in three buckets", spec, "float32", rising)
    for spec in AT_A_LIMIT.get(file, ()):
        yield vector("entries whose width is at a limit", spec, "float32", rising[:9])


def blob(spec: str, size: int, data: bytes, **header: Any) -> bytes:
    """Return a file with a good checksum, whatever else is wrong with it."""
    text = header.get("text", spec.encode())
    start = struct.pack(
        "<4sBBHQQ",
        header.get("magic", b"QCMP"),
        header.get("version", 1),
        header.get("dtype", 0),
        header.get("spec_bytes", len(text)),
        size,
        header.get("data_bytes", len(data)),
    )
    return start + text + struct.pack("<I", zlib.crc32(data, zlib.crc32(start + text))) + data


ONE = np.ones(1, dtype="<f4").tobytes()


def bits(*parts: Any) -> bytes:
    """Return the bytes of some codewords, and of digits of bits."""
    writer = BitWriter()
    for part in parts:
        word = elias.Codeword(int(part, 2), len(part)) if isinstance(part, str) else part
        writer.put(*word)
    return writer.finish()


def refused_files() -> Iterator[tuple[str, bytes]]:
    spec, data = "sign:bucket_size=8,scale=l1", bytes(8)
    good = blob(spec, 8, data)
    yield "no bytes", b""
    yield "a part of the header", good[:23]
    yield "another magic", blob(spec, 8, data, magic=b"QCMQ")
    for version in (0, 2, 128, 255):
        yield f"version {version}", blob(spec, 8, data, version=version)
    for dtype in (2, 255):
        yield f"dtype number {dtype}", blob(spec, 8, data, dtype=dtype)
    yield "the last byte is missing", good[:-1]
    yield "a byte follows", good + b"\0"
    yield "a bit of the data has changed", good[:-1] + b"\1"
    yield "a bit of the spec string has changed", good.replace(b"l1", b"l3")
    yield "the checksum leaves out the header", good[:51] + struct.pack("<I", zlib.crc32(data)) + data
    yield "a spec string that is longer than the file", blob(spec, 8, data, spec_bytes=65535)
    yield "a spec string that is shorter than it is", blob(spec, 8, data, spec_bytes=26)
    yield "2^64 - 1 bytes of data", blob(spec, 8, data, data_bytes=2**64 - 1)
    for size in (0, 9, 2**40, 2**64 - 1):
        yield f"{size} elements in the data of 8", blob(spec, size, data)
    for spec, size, dtype in (
        ("identity", 2**62 + 2, 0),
        ("identity", 2**61 + 1, 1),
        ("cast:dtype=float16", 2**63 + 4, 0),
        ("whole_fields(qsgd:levels=1,bucket_size=8,norm=max):field=5", 5 * 2**61 + 3, 0),
    ):
        yield (
            f"{size} elements, whose length is 8 modulo 2^64",
            blob(spec, size, data, dtype=dtype),
        )


def long_spec(k: int) -> str:
    """Return a spec string of 1000 characters for one digit, and of 1001 for two."""
    return f"scaled({'whole_fields(' * 44}randk:k={k},bucket_size=16{'):field=1' * 44})"


def long_as_given() -> str:
    """Return a spec string of 1001 characters, of which qcomp would write 985."""
    inner = "randk():k=32768,bucket_size=65536,value_bits=32"
    return f"scaled({'whole_fields(' * 43}{inner}{'):field=1' * 43})"


def refused_specs() -> Iterator[tuple[str, bytes]]:
    for text in (
        b"", b"nothing", b"Sign", b"sign ", b"mypackage.ternary", b"sign:scale=\xff", b"identity:a=1",
        b"sign:bucket_size", b"sign:bucket_size=", b"sign:bucket_size=9", b"sign:bucket_size=4",
        b"sign:bucket_size=2097152",
        b"sign:bucket_size=08", b"sign:bucket_size=+8", b"sign:bucket_size= 8", b"sign:bucket_size=8.0",
        b"sign:bucket_size=-8", b"sign:bucket_size=1_6", b"sign:bucket_size=8,bucket_size=8", b"sign:bucket_size=8,",
        b"sign:scale=l2", b"sign:levels=7", "sign:bucket_size=\u0668".encode(),
        b"qsgd:levels=0", b"qsgd:levels=128", b"qsgd:levels=32768,coding=range", b"qsgd:norm=l1", b"qsgd:coding=gaps",
        b"qsgd:levels=" + b"9" * 900, b"lloyd_max:bits=0", b"lloyd_max:bits=5", b"lloyd_max:bits=1,coding=range",
        b"lloyd_max:coding=elias", b"minmax:bucket_size=131072", b"onebit_sgd:column_size=0",
        b"onebit_sgd:column_size=1048577", b"cast:dtype=float32", b"topk:k=0", b"topk:k=9,bucket_size=8",
        b"topk:value_bits=5", b"topk:value_bits=0", b"topk:coding=fixed", b"topk:value_bits=2,coding=gaps",
        b"topk:value_bits=2,coding=None", b"topk:bucket_size=131072", b"randk:k=3", b"randk:k=16,bucket_size=8",
        b"randk:value_bits=1", b"randk:value_bits=9", b"randk:coding=fixed", b"scaled", b"scaled()", b"scaled(identity",
        b"scaled(identity))", b"scaled(identity)x", b"scaled(nothing)", b"scaled(sign)", b"scaled(scaled(identity))",
        b"identity(identity)", b"whole_fields", b"whole_fields(sign):field=3", b"whole_fields(lloyd_max):field=3",
        b"whole_fields(onebit_sgd):field=3",
        b"whole_fields(qsgd:coding=range):field=3", b"whole_fields(topk:value_bits=2):field=3",
        b"whole_fields(qsgd):field=0",
        b"whole_fields(qsgd):field=513", b"whole_fields(identity):field=2", b"whole_fields(qsgd:field=9)",
        b"whole_fields(qsgd)", b"whole_fields(qsgd:bucket_size=8):field=1", b"whole_fields(whole_fields(qsgd):field=3)",
        b"topk:bucket_size=8", b"randk:bucket_size=16", long_as_given().encode(),
        long_spec(16).encode(), long_spec(16).replace(":field=1", "").encode(), b"scaled(" * 143,
        b"scaled(" * 30 + b"qsgd" + b")" * 30,
    ):  # fmt: skip
        data = bytes(16 if b"randk:value_bits" in text else b"coding" in text and b"topk" not in text)
        yield repr(text[:60].decode(errors="replace")), blob("", 0, data, text=text)


def accepted_specs() -> Iterator[Vector]:
    """Yield files whose spec strings are not those that qcomp writes."""
    x = np.array([1, -2, 0, 5, 5, -1, 0, 0.5, -7, 3, 2], dtype=np.float32)
    for text in (
        "sign", "sign:", "sign()", "sign:scale=rms", "sign:scale=rms,bucket_size=8", "scaled(qsgd:levels=7)",
        "qsgd:norm=l2,levels=15,coding=fixed", "scaled(qsgd)",
        "scaled(whole_fields(qsgd))", "whole_fields(qsgd:bucket_size=8):field=2",
        "topk:k=1,value_bits=32", "randk:value_bits=32", "cast", "lloyd_max", "minmax", "onebit_sgd", "topk", "randk",
        "qsgd:coding=elias,bucket_size=8", "whole_fields(qsgd:bucket_size=8):field=8", long_spec(1),
    ):  # fmt: skip
        c = qcomp.compressor(text)
        payload = c.compress(x, key=KEY)
        yield {
            "written by qcomp": c.spec,
            "file": blob(text, x.size, np.asarray(payload.data).tobytes()).hex(),
            "decoded": {"float32": decoded(text, payload, "float32")},
        }


def omega_of_65_bits(low: int) -> list[str]:
    """Return a codeword of 2^64 and a number, as readers must refuse it."""
    return ["10", "110", "1000000", f"1{low:064b}", "0"]


def gamma_of_65_bits(low: int) -> list[str]:
    return ["0" * 64, f"1{low:064b}"]


def refused_elias() -> Iterator[tuple[str, bytes]]:
    spec, zero = "qsgd:levels=7,bucket_size=64,norm=max,coding=elias", "0"
    dense, sparse = "0" * 8, "00000001"

    def coded(*parts: Any, size: int = 40, more: bytes = b"") -> bytes:
        return blob(spec, size, ONE + b"\1" + bits(*parts) + more)

    yield "kind 2", blob(spec, 40, ONE + b"\2" + bits(dense, zero * 40))
    yield "kind 1 without elements", blob(spec, 0, b"\1")
    yield "kind 0 with too few codes", blob(spec, 40, ONE + b"\0" + bytes(31))
    yield "kind 0 with too many codes", blob(spec, 40, ONE + b"\0" + bytes(33))
    yield "no kind", blob(spec, 40, ONE)
    yield "a kind without elements, and codes", blob(spec, 0, b"\0\0")
    yield "more bytes than codes of fixed width have", coded(dense, zero * 40, more=bytes(27))
    yield "method 2", coded("00000010", "0")
    longer = blob(
        "qsgd:levels=7,bucket_size=8,norm=max,coding=elias", 8, ONE + b"\1" + bits(dense, "1000" * 8)
    )
    yield "5 bytes of codes, which take 4 at fixed width", longer
    yield "no method", blob(spec, 40, ONE + b"\1")
    yield "a level of 8 of 7", coded(dense, elias.omega(9), zero, zero * 39)
    yield (
        "a level of 8 of 7 in the sparse code",
        coded(sparse, elias.omega(2), elias.omega(1), zero, elias.omega(8)),
    )
    yield "39 of 40 levels", coded(dense, *[elias.omega(2), zero] * 10, zero * 6)
    yield "41 levels for 40 elements", coded(sparse, elias.omega(42))
    yield "a level at 40 of 40", coded(sparse, elias.omega(2), elias.omega(41), zero, elias.omega(1))
    yield "a number of 65 bits", coded(sparse, "10", "110", "1000000", "1" + "0" * 64)
    one, last = elias.omega(1), [zero, elias.omega(1)]
    yield "2^64 + 1 levels", coded(sparse, *omega_of_65_bits(2), one, *last)
    yield "2^32 + 1 levels", coded(sparse, elias.omega(2**32 + 2), one, *last)
    yield "a gap of 2^64 + 1", coded(sparse, elias.omega(2), *omega_of_65_bits(1), *last)
    yield (
        "a gap that leads back in 64 bits",
        coded(sparse, elias.omega(3), elias.omega(6), *last, elias.omega(2**64 - 3), *last),
    )
    yield "a level of 2^64 + 1", coded(dense, *omega_of_65_bits(2), "0", zero * 39)
    yield "ones after the end", coded(dense, zero * 39, elias.omega(2), "0", "1")
    yield "a byte after the end", coded(dense, zero * 40, more=b"\0")


def stream(
    levels: Sequence[int], most: int, *, fine: int | None = None, sign: int = 0, weights: Sequence[int] = ()
) -> bytes:
    """Return a range code of levels, the last with a sign. Its model has fine bits and perhaps weights, or is flat."""
    signs = memoryview(bytes(len(levels) - 1) + bytes([sign]))
    data = memoryview(np.array(levels, dtype="<u2").tobytes())
    if fine is None:
        return b"\0" + rans.push(data, signs, model.flat(most), 1)
    counts = [0] * (max(integer_classes.class_of(level, fine) for level in levels) + 1)
    for level in levels:
        counts[integer_classes.class_of(level, fine)] += 1
    weights = weights or [model._weight(count) for count in counts]
    steps = map(elias.gamma, model._steps(weights, len(levels)))
    described = bits(f"{1 + fine:03b}", elias.gamma(len(weights)), *steps)
    return described + rans.push(data, signs, model._model(weights, fine), 1)


def refused_range() -> Iterator[tuple[str, bytes]]:
    spec, size = "qsgd:levels=5,bucket_size=64,norm=max,coding=range", 40
    good = stream([1] * size, 5)

    def coded(data: bytes) -> bytes:
        return blob(spec, size, ONE + b"\1" + data)

    def modelled(*weights: int) -> bytes:
        return coded(bits("001", elias.gamma(len(weights)), *map(elias.gamma, weights)) + good[1:])

    yield "method 4 of 3", coded(stream([1] * size, 5, fine=3))
    yield "5 classes of 4", coded(stream([1] * size, 5, fine=0, weights=[0, 9, 0, 0, 1]))
    yield "a weight of -1", modelled(2 * model._weight(size) + 3)
    yield "a weight of 157", modelled(2 * (157 - model._weight(size)))
    yield "a last weight of 0", coded(stream([1] * size, 5, fine=0, weights=[0, 9, 0]))
    yield "no model", coded(b"")
    yield "a part of a model", coded(bits("001", "0"))
    yield "a number of classes with more than 64 bits", coded(bits("001", "0" * 64, "1"))
    modelled_well = stream([1] * size, 5, fine=0)
    of_model, far = [elias.gamma(35), elias.gamma(34)], [elias.gamma(35), elias.gamma(34 + 2**33)]
    assert modelled_well[:4] == bits("001", elias.gamma(2), *of_model)
    yield "2^64 + 2 classes", coded(bits("001", *gamma_of_65_bits(2), *of_model) + modelled_well[4:])
    yield "a difference of 2^32 between weights", coded(bits("001", elias.gamma(2), *far) + modelled_well[4:])
    yield "ones after the model", coded(b"\1" + good[1:])
    yield "a part of the states", coded(good[:4])
    yield "half a word", coded(good[:-1])
    yield "a word is missing", coded(good[:-2])
    yield "a word too much", coded(good + bytes(2))
    yield "another state at the end", coded(stream([1] * (size + 1), 5))
    yield "a level of 7 of 5", coded(stream([1] * (size - 1) + [7], 5))
    yield "a level of 7 of 5 in a class with 4 to 7", coded(stream([1] * (size - 1) + [7], 5, fine=0))
    yield "a sign of a level of 0", coded(stream([1] * (size - 1) + [0], 5, sign=1))
    yield "kind 2", blob(spec, size, ONE + b"\2" + good)


def refused_lloyd_max_range() -> Iterator[tuple[str, bytes]]:
    spec, size = "lloyd_max:bits=2,bucket_size=64,coding=range", 40
    for level in (0, 3):
        data = stream([1] * (size - 1) + [level], 2, fine=0)
        yield f"a level of {level}; expected 1 or 2", blob(spec, size, ONE + b"\1" + data)


def refused_gaps() -> Iterator[tuple[str, bytes]]:
    spec, size = "topk:k=5,bucket_size=16,value_bits=2", 16

    def difference(number: int) -> tuple[elias.Codeword, str]:
        return elias.gamma(abs(number + (number < 0)) + 1), str(int(number < 0))

    def coded(*parts: Any, more: bytes = b"", size: int = size) -> bytes:
        flat = [word for part in parts for word in (part if type(part) is tuple else [part])]
        return blob(spec, size, bits(*flat) + more)

    def kept(lowest: int = 952, step: int = 936) -> list[Any]:
        return ["0", "001", difference(lowest - 952), difference(step - lowest + 16)]

    m = gaps.divisor(16, 1)
    assert m == 11
    yield "6 elements of 5", coded("0", "110", difference(0), difference(0), *["10", "00"] * 6)
    for lowest in (7, 1817):
        yield f"a lowest level of number {lowest}", coded(*kept(lowest, 936), "1", "000", "00")
    for step in (7, 1817, -1):
        yield f"a step of number {step}", coded(*kept(952, step), "1", "000", "00")
    yield "16 elements skipped of 15", coded(*kept(), "01", "1010", "00")
    yield "many elements skipped", coded(*kept(), "0" * 40, "1")
    yield "the bits end early", coded("1", difference(0), difference(0))
    yield "no bits", coded()
    yield "a second bucket is missing", coded("0", "000", size=80)
    yield "bits without elements", coded("0", "0000000", size=0)
    yield "a number of 65 bits", coded("0", "001", "0" * 64, "1", "0" * 64, size=160)
    largest = [elias.gamma(2**64 - 1)]
    for case, word in (("2^64", gamma_of_65_bits(1)), ("2^64 - 2, which leads back in 64 bits,", largest)):
        differing = *word, "0", elias.gamma(1), "0"
        first = ["0", "001", *differing, "1", "000", "00"]
        yield f"a difference of {case} between lowest levels", coded(*first, *["0", "000"] * 9, size=160)
    yield "ones after the end", coded("0", "000", "1")
    yield "a byte after the end", coded("0", "000", more=b"\0")
    yield "far more bytes than elements", coded("0", "000", more=bytes(100))


def unusual() -> Iterator[tuple[str, bytes] | tuple[str, bytes, Sequence[str]]]:
    """Yield valid files that qcomp does not write, some with the dtypes in which they are read."""
    halves = np.array(
        [0x7C00, 0x7C01, 0xFC00, 0xFFFF, 0x7BFF, 0xFBFF, 0x03FF, 0x8001, 0x8000, 0x3C00], dtype="<u2"
    )
    yield "all kinds of float16", blob("cast:dtype=float16", 10, halves.tobytes())
    yield "some kinds of bfloat16", blob("cast:dtype=bfloat16", 6, halves[4:].tobytes())
    large = [
        65504,
        65519,
        65520,
        -65520,
        65535,
        1e9,
        2.0**99 * 1.999,
        3.4e38,
        -(2.0**-24),
        2.0**-25,
        2.0**-26,
    ]
    large += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]  # ties
    yield (
        "values that float16 and bfloat16 round",
        blob("identity", 15, np.array(large, dtype="<f4").tobytes()),
    )
    yield (
        "float64 that float32 rounds",
        blob("identity", 2, np.array([1 / 3, 1e300], dtype="<f8").tobytes(), dtype=1),
    )
    for spec in ("qsgd:levels=5,bucket_size=8,norm=max", "randk:k=8,bucket_size=8,value_bits=4"):
        data = bytes.fromhex("87e6d5c4") + ONE + bytes(range(16 * spec.startswith("randk")))
        yield f"a sign of a level of 0 in {spec.partition(':')[0]}, and large levels", blob(spec, 8, data)
    yield "ones in padding and between fields", blob("sign:bucket_size=8,scale=l1", 3, b"\xfd\1\2\3" + ONE)
    yield "ones after the bytes of a number", blob("randk:k=1,bucket_size=65536", 8, b"\3\0\xff\xff" + ONE)
    yield "a number of two bytes", blob("randk:k=1,bucket_size=512", 257, b"\0\1\0\0" + ONE), ["float32"]
    zeros = blob("topk:k=2,bucket_size=8,value_bits=2,coding=fixed", 8, b"\x06\0" + bytes(10))
    yield "a sign in a bucket of zeros", zeros
    coded = "qsgd:levels=7,bucket_size=8,norm=max,coding=elias"
    codes = bits("0" * 8, *["1000"] * 2, *["1001"] * 3, "000")
    yield "codes that coding does not shorten", blob(coded, 8, ONE + b"\1" + codes)
    codes = bits("00000001", elias.omega(2), elias.omega(2), "1", elias.omega(3))
    yield "the sparse code where the dense one is as short", blob(coded, 3, ONE + b"\1" + codes)
    ranges = "qsgd:levels=5,bucket_size=64,norm=max,coding=range"
    codes = stream([1] * 40, 5, fine=0, weights=[0, 156])
    yield "a weight of 156", blob(ranges, 40, ONE + b"\1" + codes)
    yield "a flat model", blob(ranges, 40, ONE + b"\1" + stream([1, 5, 0, 4] * 10, 5, sign=1))
    same, kept = [elias.gamma(1), "0"], ["1", "0", "11"]
    codes = bits("0", "101", *same, *same, *kept * 5)
    yield "a number of 5 where a bit would say so", blob("topk:k=5,bucket_size=16,value_bits=2", 16, codes)
    codes = bits("0", "1011", elias.gamma(600), "1", "0" * 7, *["1", "0", "1"] * 11)
    yield "a bucket of nearly the greatest length", blob("topk:k=12,bucket_size=32,value_bits=1", 25, codes)
    for number in (8, 1816):
        lowest = elias.gamma(number - 951 if number > 952 else 952 - number), str(int(number < 952))
        codes = bits(
            "0", "001", *lowest, elias.gamma(17), "0", "1", "011", "11"
        )  # the step is the lowest level
        yield f"scales of number {number}", blob("topk:k=5,bucket_size=16,value_bits=2", 16, codes)


def accepted(case: str, file: bytes, dtypes: Sequence[str] = DTYPES) -> Vector:
    payload = qcomp.Payload.from_bytes(file, like=np.zeros(0))
    with np.errstate(over="ignore"):
        values = {dtype: decoded(payload.compressor, payload, dtype) for dtype in dtypes}
    return {"case": case, "file": file.hex(), "decoded": values}


REFUSED = {
    "files": refused_files,
    "specs": refused_specs,
    "qsgd_elias": refused_elias,
    "qsgd_range": refused_range,
    "lloyd_max_range": refused_lloyd_max_range,
    "topk_gaps": refused_gaps,
}


def of_another_length(file: str) -> Iterator[tuple[str, bytes]]:
    """Yield payloads of fixed length whose data is a byte too short or too long."""
    for spec in SPECS[file]:
        c = qcomp.compressor(spec)
        if not c.variable_length:
            size = c.payload_spec(21).nbytes
            for length in (size - 1, size + 1):
                yield f"{length} bytes of data; expected {size}", blob(spec, 21, bytes(length))


def refused(file: str) -> list[Vector]:
    found = list(REFUSED[file]()) if file in REFUSED else list(of_another_length(file))
    return [{"case": case, "file": data.hex()} for case, data in found]


def codewords() -> Vector:
    numbers = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 255, 256, 32767, 65536, 2**32, 2**63 - 1, 2**64 - 1]
    counts = [*range(20), 27, 28, 100, 16384, 10**6]
    return {
        "gamma": {str(n): str(elias.gamma(n)) for n in numbers},
        "omega": {str(n): str(elias.omega(n)) for n in numbers},
        "class, with 2 fine bits": {str(n): integer_classes.class_of(n, 2) for n in counts},
        "weight": {str(n): model._weight(n) for n in [*counts, 2**40, 2**41, 2**64 - 1]},
    }


def draws() -> Vector:
    words = [0] * 6, [2**32 - 1] * 6, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    like = np.zeros(0, dtype=np.float32)
    keys = [qcomp.Key(), KEY, qcomp.Key(2**52 - 1, 2**52 + 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1)]
    found = []
    for key in keys:
        tail = blocks(2 * 64 + 5, 64)[-1]
        found.append(
            {
                "key": key._asdict(),
                "stream": np.asarray(stream_of(key, like=like)).view(np.uint32).tolist(),
                "draws of bucket 2, of 5 elements, bucket_size 64": np.asarray(
                    draws16(key, tail, bucket_size=64, like=like)
                )[0]
                .astype(int)
                .tolist(),
            }
        )
    philox = [
        {"counter": w[:4], "key": w[4:], "words": list(philox4x32((w[0], w[1], w[2], w[3]), (w[4], w[5])))}
        for w in map(list, words)
    ]
    return {"philox": philox, "keys": found}


def sums() -> Vector:
    """Return the intermediate results of writers."""
    rows = [
        ("float32", uneven(16)),
        ("float32", uneven(11)),
        ("float32", uneven(8) * 2.0**80),
        ("float32", uneven(8) * 2.0**-120),
        ("float64", uneven(11)),
        ("float32", np.zeros(8)),
    ]
    found = [of_row(np.asarray(row, dtype=dtype)) for dtype, row in rows]
    steps = []
    for dtype, norm, over, significant in (
        ("float32", 1 / 3, 7, 17),
        ("float32", 1.0, 1, 17),
        ("float32", 0.7, 255, 16),
        ("float32", 0.7, 32767, 9),
        ("float32", 2.0**-125, 7, 17),
        ("float32", 0.0, 7, 17),
        ("float64", 1 + 2.0**-40, 1, 17),
        ("float64", 1 / 3, 7, 17),
    ):
        y = np.asarray([norm], dtype=dtype)
        step = hexadecimal(round_up_step(y, over, bits=significant))
        steps.append(
            {"dtype": dtype, "norm": hexadecimal(y), "over": over, "bits": significant, "step": step}
        )
    return {"rows": found, "rounded up": steps}


def of_row(row: Any) -> Vector:
    count = row.shape[0]
    padded = pad_to_power_of_two(row[None, :])
    results = {
        "sum": tree_sum(padded),
        "mean magnitude": mean_abs(padded, count),
        "root mean square": rms(padded, count),
        "norm": norm2(padded),
    }
    return {
        "dtype": row.dtype.name,
        "row": hexadecimal(row),
        **{k: hexadecimal(x) for k, x in results.items()},
    }


def messages() -> Vector:
    like, found = np.arange(5, dtype=np.float32), []
    for specs, with_lengths in ((MESSAGES[:2], False), (MESSAGES, True)):
        frame = frame_of(specs, with_lengths=with_lengths)
        data = [qcomp.compressor(spec).compress(like).data for spec in specs]
        accepts = frame.join(data, np.array([0], dtype=np.uint8))
        (refuses,) = Codec([like]).refusals([frame], None).messages
        for verdict, message in enumerate((accepts, refuses)):
            blamed = {2} if verdict else set()
            found.append(
                {
                    "compressors": specs,
                    "elements": 5,
                    "lengths": with_lengths,
                    "payloads": [hexadecimal(payload.data) for payload in frame.open(message).payloads],
                    "verdict": verdict,
                    "message": hexadecimal(message),
                    "blamed": sorted(blamed),
                    "sealed for 3 ranks": hexadecimal(seal(message, blamed, 3)),
                }
            )
    return {"frames": found, "bounds": [bounds(spec, size) for spec, size in BOUNDS]}


def bounds(spec: str, size: int) -> Vector:
    """Return the bounds of the data of a payload."""
    layout = qcomp.compressor(spec).payload_spec(size)
    return {"compressor": spec, "elements": size, "shortest": layout.shortest, "longest": layout.nbytes}


MESSAGES = [
    "sign:bucket_size=8,scale=l1",
    "identity",
    "topk:k=2,bucket_size=8,value_bits=2",
    "lloyd_max:bits=2,bucket_size=8,coding=range",
]
BOUNDS = [
    ("sign:bucket_size=8,scale=l1", 37),
    ("lloyd_max:bits=2,bucket_size=16,coding=range", 37),
    ("qsgd:levels=300,bucket_size=16,norm=max,coding=elias", 37),
    ("qsgd:levels=300,bucket_size=16,norm=max,coding=elias", 0),
    ("topk:k=5,bucket_size=16,value_bits=1", 37),
    ("topk:k=64,bucket_size=128,value_bits=2", 1024),
    ("topk:k=64,bucket_size=128,value_bits=2", 0),
    ("topk:k=1,bucket_size=8,value_bits=4", 9),
]


def frame_of(specs: Sequence[str], *, with_lengths: bool) -> Frame:
    chunk = tuple(Segment(number, 0, 5, number) for number in range(len(specs)))
    return Frame(chunk, tuple(map(qcomp.compressor, specs)), ("float32",) * len(specs), with_lengths)


OF_PARTS = {"codewords": codewords, "draws": draws, "messages": messages, "sums": sums}
FILES = [*SPECS, "files", "specs", "unusual", *OF_PARTS]


@cache
def record(file: str) -> Vector:
    """Return what a file has to have."""
    if file in OF_PARTS:
        return OF_PARTS[file]()
    if file == "unusual":
        return {"accepted": [accepted(*found) for found in unusual()]}
    vectors = [vector(*case[:1], spec, *case[1:]) for spec in SPECS.get(file, []) for case in inputs(spec)]
    others = {"accepted": list(accepted_specs())} if file == "specs" else {}
    of_draws = (
        {"key": KEY._asdict()} if any(qcomp.compressor(s).traits.random for s in SPECS.get(file, [])) else {}
    )
    return {**of_draws, "decoded": [*vectors, *long_vectors(file)], **others, "refused": refused(file)}


def text_of(content: Vector) -> str:
    """Return JSON with a line for each item of the lists and mappings at the top."""

    def lines(part: Any) -> str:
        if isinstance(part, dict):
            return (
                "{\n"
                + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in part.items())
                + "\n}"
            )
        return "[\n" + ",\n".join(map(json.dumps, part)) + "\n]"

    return "{\n" + ",\n".join(f"{json.dumps(key)}: {lines(part)}" for key, part in content.items()) + "\n}\n"


def main() -> None:
    """Write every file, and say which has changed."""
    for file in FILES:
        path, text = FOLDER / f"{file}.json", text_of(record(file))
        if not path.exists() or path.read_text() != text:
            if file != "messages":
                releases.require_kept(path, text)
            path.write_text(text)
            print(f"{file}: has changed")


if __name__ == "__main__":
    main()
