"""Laws about form: a compressor's specs, traits and announcements are sound, and its payloads match them."""

import copy
import math
import pickle
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from qcomp.core.compressor import Compressor
from qcomp.core.numeric.arrays import dtype_name
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload
from qcomp.core.registry import compressor as from_spec
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import sizes, tested_bucket, vector
from qcomp.testing.libraries import to_numpy


def sound_traits(case: Case) -> None:
    """The traits are possible and constant: a positive bucket size, omega and delta in their ranges."""
    traits = case.compressor.traits
    size = traits.bucket_size
    assert type(size) is int and not size < 1, (  # noqa: PT018 - one promise
        f"traits.bucket_size is {traits.bucket_size!r}; expected an integer from 1 on"
    )
    assert traits.omega is None or 0 <= traits.omega < math.inf, (
        f"traits.omega is {traits.omega!r}; expected at least 0"
    )
    assert traits.omega is None or traits.unbiased, "traits.omega is given, and traits.unbiased is False"
    assert traits.delta is None or 0 < traits.delta <= 1, (
        f"traits.delta is {traits.delta!r}; expected above 0, at most 1"
    )
    assert traits.peak is None or traits.peak >= 0, f"traits.peak is {traits.peak!r}; expected at least 0"
    assert traits.kept is None or 0 <= traits.kept <= traits.bucket_size, (
        f"traits.kept is {traits.kept!r} of a bucket"
    )
    assert case.compressor.traits == traits, "traits differ from one access to the next"


def fields_as_announced(case: Case) -> None:
    """`encode` returns exactly the fields that `payload_spec` announces, with their sizes and dtypes."""
    own = case.plain.compressor
    for size in sizes(own.traits.bucket_size):
        for dtype in case.dtypes:
            spec = own.payload_spec(size, dtype)
            assert spec == own.payload_spec(size, dtype), (
                f"payload_spec({size}) differs from one call to the next"
            )
            if case.jit:
                continue
            parts = own.encode(case.array(vector("gaussian", size, 0), dtype), Key(seed=1))
            names = [field.name for field in spec.fields]
            assert set(parts) == set(names), (
                f"encode returned the fields {sorted(parts)}, payload_spec says {sorted(names)}"
            )
            for number, field in enumerate(spec.fields):
                part = parts[field.name]
                length = math.prod(part.shape)
                unit = "bytes" if field.dtype == "uint8" else "elements"
                shorter = spec.variable_length and number == len(spec.fields) - 1 and length <= field.size
                assert length == field.size or shorter, (
                    f"encode returned {length} {unit} of {field.name!r} for "
                    f"{size} elements of {dtype}, payload_spec says {field.size}"
                )
                assert len(part.shape) == 1, (
                    f"encode returned {field.name!r} of shape {tuple(part.shape)}; expected one axis"
                )
                assert dtype_name(part.dtype) == field.dtype, (
                    f"encode returned {field.name!r} as {dtype_name(part.dtype)}, payload_spec says {field.dtype}"
                )


def needs_key(case: Case) -> None:
    """A random compressor refuses a missing key, for every size; other compressors need none."""
    for size in (9, tested_bucket(case.compressor.traits.bucket_size) + 1):
        x = case.array(vector("gaussian", size, 4))
        if not case.compressor.traits.random:
            case.compressor.compress(x)
            continue
        try:
            case.compressor.compress(x)
        except ValueError:
            continue
        raise AssertionError("a missing key is not an error")


def round_trip_of_bytes(case: Case) -> None:
    """`to_bytes` and `from_bytes` keep the payload, and the spec string keeps the compressor."""
    again = from_spec(case.compressor.spec)
    assert again == case.compressor, f"the spec string {case.compressor.spec!r} makes {again!r}"
    for size in (0, 1, 9, tested_bucket(case.compressor.traits.bucket_size) + 1):
        for dtype in case.dtypes:
            x = vector("gaussian", size, 2).astype(dtype)
            payload = case.payload(x)
            back = Payload.from_bytes(payload.to_bytes(), like=case.array(x))
            assert to_numpy(back.data).tobytes() == to_numpy(payload.data).tobytes(), "the data changed"
            found, expected = (back.compressor, back.size, back.dtype), (case.compressor.spec, size, dtype)
            assert found == expected, f"the payload says {found}; expected {expected}"


def identity_of_configuration(case: Case) -> None:
    """Compressors with equal fields are equal, and have equal hashes and specs; with other fields they differ."""
    own = case.compressor
    for how, other in (("copied", copy.deepcopy(own)), ("made from its spec", from_spec(own.spec))):
        assert other == own, f"{how}, the compressor is not equal to the original"
        assert hash(other) == hash(own), f"{how}, the compressor has a different hash"
        assert other.spec == own.spec, f"{how}, its spec is {other.spec!r}; expected {own.spec!r}"
        assert other.traits == own.traits, f"{how}, its traits are {other.traits}; expected {own.traits}"
    try:
        pickled = pickle.dumps(own)
    except (pickle.PicklingError, AttributeError):
        pickled = b""  # a class that cannot be imported by name
    if pickled:
        assert pickle.loads(pickled) == own, "pickled and loaded, the compressor is not equal to the original"
    assert own != object(), "the compressor is equal to an unrelated object"
    for sibling in siblings(own):
        assert sibling != own, f"{sibling!r} is equal to {own!r}"
        assert sibling.spec != own.spec, f"{sibling!r} and {own!r} have the same spec {own.spec!r}"


def siblings(compressor: Compressor) -> Iterator[Compressor]:
    """Yield compressors of the same class that differ in one field."""
    hints = get_type_hints(type(compressor))
    for field in fields(compressor):
        value: Any = getattr(compressor, field.name)
        kind = hints.get(field.name)
        others: tuple[Any, ...] = ()
        if get_origin(kind) is Literal:
            others = tuple(option for option in get_args(kind) if option != value)
        elif isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, int):
            others = tuple(number for number in (2 * value, value // 2, value + 1) if number != value)
        elif isinstance(value, float):
            others = (value / 2, value + 0.125)
        elif isinstance(value, str):
            others = (value + "a",)
        elif isinstance(value, Compressor):
            others = tuple(siblings(value))
        for other in others:
            try:
                sibling = replace(compressor, **{field.name: other})
                np.asarray(sibling.payload_spec(9).nbytes)
            except (ValueError, TypeError, ArithmeticError, KeyError):
                continue  # not a legal value
            yield sibling
