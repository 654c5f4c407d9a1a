"""Reads the spec strings of compressors for `read_payload.py`."""

import re
from math import sqrt
from types import SimpleNamespace
from typing import Any

from payload_bits import require

OPTIONS = {  # numbers: the default and the greatest value; words: all values, the default first
    **{"identity": "", "scaled": "", "cast": "dtype=bfloat16|float16", "minmax": "bucket_size=2048:65536"},
    **{"onebit_sgd": "column_size=1048576:1048576", "whole_fields": "field=1:1048576"},
    "sign": "bucket_size=4096:1048576 scale=l1|rms",
    "qsgd": "levels=7:32767 bucket_size=512:1048576 norm=max|l2 coding=fixed|elias|range",
    "lloyd_max": "bits=2:4 bucket_size=128:1048576 coding=fixed|range",
    "topk": "k=32:65536 bucket_size=1024:65536 value_bits=32:32 coding=gaps|fixed",
    "randk": "k=32:65536 bucket_size=1024:65536 value_bits=32:32",
}
NO_INNER = SimpleNamespace(spec="", unbiased=False, keeps_zero=False, bucket_size=1)


def parsed(spec: str) -> Any:
    match = re.fullmatch(r"([^(:]*)(?:\((.*)\))?(?::(.*))?", spec, re.DOTALL)
    name, inside, options = match.groups() if match else ("", "", "")
    require(len(spec) <= 1000 and name in OPTIONS, f"there is no compressor {spec}")
    known = dict(option.split("=") for option in OPTIONS[name].split())
    c = SimpleNamespace(name=name, k=1, field=1, bucket_size=1, value_bits=32, coding="fixed", inner=NO_INNER)
    for field, values in known.items():
        setattr(c, field, int(values.partition(":")[0]) if ":" in values else values.partition("|")[0])
    given = [option.partition("=")[::2] for option in options.split(",")] if options else []
    for field, text in given:
        words, _, most = known.get(field, "").partition(":")
        number = int(text) if most and re.fullmatch("[1-9][0-9]*", text) else 0
        fits = 1 <= number <= int(most) if most else text in words.split("|") and text not in {"", "gaps"}
        require(fits and len(dict(given)) == len(given), f"{field}={text} is no option of {name}")
        setattr(c, field, number if most else text)
    c.inner = parsed(inside) if inside else NO_INNER
    size, v, fixed, wraps = (
        c.bucket_size,
        c.value_bits,
        c.coding == "fixed",
        name in {"scaled", "whole_fields"},
    )
    require("bucket_size" not in known or (size >= 8 and size & size - 1 == 0), f"bucket_size is {size}")
    require(c.k <= size and (name != "randk" or c.k & c.k - 1 == 0), f"k is {c.k}")
    require(
        v in {"topk": (1, 2, 3, 4, 32), "randk": (*range(2, 9), 32)}.get(name, (32,)), f"value_bits is {v}"
    )
    too_few, too_many = name == "lloyd_max" and c.bits == 1, name == "qsgd" and c.levels > 127
    require(not (too_many or (name == "topk" and v == 32)) if fixed else not too_few, f"coding is {c.coding}")
    require(
        wraps >= bool(inside) and (name != "scaled" or c.inner.unbiased),
        f"{spec} is around another compressor",
    )
    require(
        name != "whole_fields" or (c.inner.keeps_zero and c.field <= c.inner.bucket_size),
        f"field is {c.field}",
    )
    c.unbiased = name in {"identity", "qsgd", "randk"} or (name == "whole_fields" and c.inner.unbiased)
    keeps_zero = name in {"identity", "cast", "qsgd", "minmax", "topk", "randk"}
    c.keeps_zero = c.inner.keeps_zero or (keeps_zero and (fixed or (name == "topk" and v == 32)))
    unwritten = {"value_bits=32", "coding=gaps", *["coding=fixed"] * (name == "qsgd")}
    options = ",".join(
        option for field in known if (option := f"{field}={getattr(c, field)}") not in unwritten
    )
    c.spec = name + f"({c.inner.spec})" * bool(inside) + f":{options}" * bool(options)
    require(len(c.spec) <= 1000, "the spec string is too long with all its options")
    c.bucket_size = c.inner.bucket_size // c.field * c.field if wraps else getattr(c, "column_size", size)
    return c


def omega(c: Any) -> float:
    if c.name in {"identity", "whole_fields"}:
        return 0.0 if c.inner is NO_INNER else omega(c.inner)
    if c.name == "randk":
        levels = (1 << c.value_bits - 1) - 1
        values = SimpleNamespace(name="qsgd", levels=levels, bucket_size=max(8, c.k), norm="max")
        return float(c.bucket_size / c.k * (1 + (omega(values) if c.value_bits < 32 else 0)) - 1)
    n, s, root = c.bucket_size, c.levels, sqrt(c.bucket_size)
    pair = ((n - 1) / (4 * s**2), (1 + root) / (2 * s)) if c.norm == "max" else (n / (4 * s**2), root / s)
    if s <= 127:
        return float(min(pair) * (1 + 2**-14))
    return float(
        (min(pair) + (n * 2**-17 / s**2 + root * 2**-24 / s)) * (1 + 2.0 ** (s.bit_length() - 23)) ** 2
    )
