"""Damage to saved states: dicts of real optimizers, any entry of which may be removed, renamed or replaced."""

import json
import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np

__all__ = ["damaged", "deep"]


def deep(levels: int = 10_000) -> list:
    """Return a list in a list in a list, and so on."""
    found: list = []
    for _ in range(levels):
        found = [found]
    return found


def _text(content: str) -> np.ndarray:
    return np.frombuffer(content.encode(), np.uint8)


STRANGE: tuple[Callable[[], Any], ...] = (
    *[
        (lambda value=value: value)
        for value in (
            *(
                None,
                True,
                False,
                "",
                "x",
                "\ud800",
                "größe" * 1000,
                b"",
                b"12",
                (),
                {},
                {"a": 1},
                [1],
                [[]],
                [None],
            ),
            *(
                -1,
                0,
                1,
                3,
                1 << 31,
                (1 << 53) + 1,
                1 << 70,
                -(1 << 70),
                10**400,
                math.nan,
                math.inf,
                -math.inf,
            ),
            *(1.5, -0.5, 1e308, 5e-324, 2 + 1j, range(3), {1, 2}, int, np.ndarray, len, ..., object()),
        )
    ],
    deep,
    lambda: 10**5000,
    lambda: np.float64(3),
    lambda: np.int64(-1),
    lambda: np.uint64(2**64 - 1),
    lambda: np.bool_(True),
    lambda: np.str_("warmup"),
    lambda: np.array(3),
    lambda: np.array(3.0),
    lambda: np.array(math.nan),
    lambda: np.array("x"),
    lambda: np.array(["a", "b"]),
    lambda: np.array([1.0, math.nan]),
    lambda: np.array([1, 2]),
    lambda: np.zeros((3, 3)),
    lambda: np.zeros((0,), np.float32),
    lambda: np.array([{}, None], dtype=object),
    lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    lambda: np.array(["2026-11-23"], dtype="M8[D]"),
    lambda: np.broadcast_to(np.float32(0), (1 << 40,)),
    lambda: np.broadcast_to(np.uint8(91), (1 << 20,)),
    lambda: np.broadcast_to(np.uint8(91), (1 << 40,)),
    lambda: _text("[" * 100_000),
    lambda: _text("9" * 5000),
    lambda: _text("1e999"),
    lambda: _text("NaN"),
    lambda: _text("{"),
    lambda: _text("-1"),
    lambda: _text('"compressed"'),
    lambda: _text("[1, true, null]"),
    lambda: _text("\ud800".encode("utf-8", "surrogatepass").decode("latin-1")),
    lambda: np.frombuffer(b"\xff\xfe\x00", np.uint8),
    lambda: json.dumps({"optimizer": "Adam", "settings": {"betas": 3}}),
    lambda: json.dumps({"optimizer": ["Adam"], "settings": []}),
    lambda: '{"optimizer": "Adam"}',
    lambda: "[" * 100_000,
)
"""Values that may replace an entry."""

STAGES = [
    *("start", "epoch", "warmup", "compressed", "rewarm", "local"),
    *(
        f"under way {x}"
        for x in ("", "0", "x@y", "0@1", "9@1", "0@-1", "0@999999", "0@1,0@1", f"0@{'9' * 5000}")
    ),
]


def _of_array(x: np.ndarray, rng: Random) -> Any:
    """Return an altered array."""
    dtype = rng.choice(["float64", "float16", "int64", "bool", "complex64", ">f4", "U8", "uint8"])
    changes: tuple[Callable[[], Any], ...] = (
        lambda: x.astype(dtype),
        lambda: x.reshape(-1),
        lambda: x.reshape(-1)[: rng.randrange(1 + x.size)],
        lambda: x[None],
        lambda: x.T,
        lambda: x[..., None],
        lambda: np.broadcast_to(x, (1 << 20, *x.shape)),
        lambda: np.concatenate([x.reshape(-1)] * 2),
        lambda: np.asfortranarray(x),
        x.tolist,
        lambda: np.full_like(x, math.nan),
        lambda: -x,
        lambda: _flipped(x, rng),
        lambda: x.reshape(-1)[::-1],
    )
    return rng.choice(changes)()


def _of_tensor(x: Any, rng: Random) -> Any:
    """Return an altered tensor of torch, or an array of NumPy."""
    import torch

    found = _of_array(x.detach().numpy(), rng)
    try:
        return torch.from_numpy(np.array(found)) if np.size(found) < 1 << 20 else found
    except (TypeError, ValueError):
        return found


def _flipped(x: np.ndarray, rng: Random) -> np.ndarray:
    """Return the array with one bit flipped."""
    data = bytearray(x.tobytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return np.frombuffer(bytes(data), x.dtype).reshape(x.shape)


def _value(key: Any, value: Any, rng: Random) -> Any:
    """Return another value for an entry."""
    if key == "stage" and rng.random() < 0.5:
        return rng.choice(STAGES)
    if (
        isinstance(value, np.ndarray)
        and value.size < 1 << 20
        and value.dtype.kind in "fi"
        and rng.random() < 0.7
    ):
        return _of_array(value, rng)
    if hasattr(value, "detach") and rng.random() < 0.7:
        return _of_tensor(value, rng)
    if type(value) in (int, float) and abs(value) < 1 << 60 and rng.random() < 0.5:
        return rng.choice([value + 1, value - 1, -value, value * 2, value + 0.5, str(value), [value]])
    changes: list[Any] = []
    if isinstance(value, str):
        cut = rng.randrange(1 + len(value))
        changes = [value[:cut], value[cut:], value[:cut] + "\x00" + value[cut:], value.upper()]
    if isinstance(value, list | tuple):
        changes = [value[:-1], [*value, *value], [*value, rng.choice(STRANGE)()]]
    return rng.choice(changes) if changes and rng.random() < 0.5 else rng.choice(STRANGE)()


def _key(key: Any, rng: Random) -> Any:
    """Return another name for an entry."""
    text = str(key)
    names = (
        *(
            text + "x",
            text[:-1],
            text.upper(),
            f"{text}@0",
            f"{text}@8",
            f"{text}@{'9' * 5000}",
            f"number.{text}",
            "",
        ),
        *(
            "\ud800",
            "x" * 100_000,
            7,
            None,
            ("a",),
            text.replace(".", "@", 1),
            text.replace("worker", "server"),
        ),
        *(f"rank 0 of {1 << 70}", "rank 1 of 2", "shared"),
    )
    return rng.choice(names)


def _once(saved: dict, rng: Random) -> dict:
    """Return the dict with one fault, in it or in one of the dicts and lists inside."""
    keys = list(saved)
    if not keys:
        return {rng.choice(["step", 0, "x"]): rng.choice(STRANGE)()}
    key = rng.choice(keys)
    inner = saved[key]
    if isinstance(inner, Mapping) and inner and rng.random() < 0.8:
        return {**saved, key: _once(dict(inner), rng)}
    if isinstance(inner, list | tuple) and inner and rng.random() < 0.8 and key != "history":
        place = rng.randrange(len(inner))
        changed = list(inner)
        part = inner[place]
        changed[place] = _once(dict(part), rng) if isinstance(part, Mapping) else _value(key, part, rng)
        return {**saved, key: type(inner)(changed)}
    other, rest = rng.choice(keys), {k: v for k, v in saved.items() if k != key}
    changes: tuple[Callable[[], dict], ...] = (
        lambda: rest,
        lambda: {**rest, _key(key, rng): inner},
        lambda: {**saved, _key(key, rng): rng.choice([inner, rng.choice(STRANGE)()])},
        lambda: {**saved, key: saved[other], other: inner},
        *[lambda: {**saved, key: _value(key, inner, rng)}] * 4,
    )
    return rng.choice(changes)()


def _without_digests(x: Any) -> Any:
    """Return a value in which no dict has digests."""
    if isinstance(x, Mapping):
        return {key: _without_digests(value) for key, value in x.items() if key != "digests"}
    return type(x)(map(_without_digests, x)) if isinstance(x, list | tuple) else x


def damaged(saved: Mapping[str, Any], rng: Random) -> dict[str, Any]:
    """Return the dict with up to three faults; half of the results have no digests, which would reveal most faults."""
    found = dict(saved)
    if rng.random() < 0.5:
        found = _without_digests(found)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        found = _once(found, rng)
    return found
