"""Short jobs of every optimizer and outer loop, with the same bits on every machine."""

import base64
import hashlib
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import array_api_compat
import numpy as np

import qcomp
from qcomp.core import handshake
from qcomp.core.mean.stages import AllToAll
from qcomp.testing import lockstep
from qcomp.testing.one_thread import watched
from tests.optimizers.every import EVERY, QSGD

SHAPES = [(3, 6), (4, 5), (3,)]
"""Two tensors that are compressed, and one that stays exact."""
STEPS, SAVED_AFTER = 6, 4
Texts = dict[str, str]
VERSION = "0.1.0+000000000000"
"""What ranks tell each other in place of qcomp's version, so that a new one changes no message."""
EXACT = {"exact": qcomp.ExactBelow(10)}
POWERS_ARE_EXACT = {"betas": (0.75, 0.5)}
"""So the libraries of all machines agree on them."""
LOOPS = {
    "local SGD": qcomp.outer.local_sgd(2, warmup=2, **EXACT),
    "DiLoCo": qcomp.outer.diloco(2, warmup=2, compressor=qcomp.ScaledSign(16), **EXACT),
    "streaming DiLoCo": qcomp.outer.streaming_diloco(2, 2, warmup=2, compressor=QSGD, **EXACT),
    "SparseLoCo": qcomp.outer.sparse_loco(2, warmup=2, compressor=qcomp.TopK(4, 16, value_bits=2), **EXACT),
    "MuLoCo": qcomp.outer.muloco(2, warmup=2, compressor=qcomp.QSGD(3, 16), **EXACT),
}


def _makers() -> Iterator[tuple[str, Any]]:
    """Yield optimizers and loops by name: loops and the first of each class with every topology."""
    swept: set[type] = set()
    makers: dict[str, Any] = dict(_optimizers()) | LOOPS
    for name, maker in makers.items():
        if not hasattr(maker, "averaging") or type(maker) in swept - {qcomp.OuterLoop}:
            yield name, maker
            continue
        swept.add(type(maker))
        for topology in qcomp.topologies.names():
            divisor = maker.averaging.divisor if topology == "all_gather" else "ranks"
            averaging = replace(maker.averaging, topology=topology, divisor=divisor)
            yield f"{name}, {topology}", replace(maker, averaging=averaging)


def _optimizers() -> Iterator[tuple[str, qcomp.Optimizer]]:
    for name, entry in EVERY.items():
        early = {"freeze": 3} if isinstance(getattr(entry.opt, "freeze", None), qcomp.FreezeAt) else {}
        if not getattr(entry.opt, "whiten_steps", None):  # LAPACK's bits differ between machines
            yield name, entry.make(**EXACT, **POWERS_ARE_EXACT, **early)


CASES = {f"{name}, {size} ranks": (maker, size) for name, maker in _makers() for size in (2, 3)}
"""What to run, by name: an optimizer or a loop, and the number of ranks."""


def values(rank: int, step: int) -> list[np.ndarray]:
    """Return arrays from integer arithmetic, which grow with the steps."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    integers = (np.arange(sum(sizes)) * 7919 + rank * 1031 + step * 2003) % 1009 - 440
    parts = np.split((integers * (4 + step % 100) / 2048).astype(np.float32), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a matrix product whose terms are added in order; BLAS has another order on each processor."""
    terms = a.astype(np.float64)[..., None] * b.astype(np.float64)[..., None, :, :]
    return terms.sum(-2).astype(a.dtype)


@contextmanager
def _same_everywhere(case: str) -> Iterator[None]:
    library = array_api_compat.array_namespace(np.zeros(0))
    with (
        warnings.catch_warnings(),
        patch.object(library, "matmul", _product),
        patch.object(handshake, "version_and_sources", lambda: VERSION),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        except Exception as error:
            error.add_note(f"This is the job {case!r} of tests/golden.")
            raise


@cache
def run(case: str) -> tuple[Texts, Texts, dict[str, Any]]:
    """Return the messages and the parameters of each step of a job, and its states after some steps."""
    maker, size = CASES[case]
    starts = [(values(50, 0), place) for place in _places(size)]
    with _same_everywhere(case):
        states = lockstep([maker.init_stages(params, **place) for params, place in starts])
        *texts, params, states = _steps(maker, [p for p, _ in starts], states, range(SAVED_AFTER))
        saved = _saved(maker, params, states)
        rest = _steps(maker, params, states, range(SAVED_AFTER, STEPS))
    return texts[0] | rest[0], texts[1] | rest[1], saved


def continued(case: str, saved: dict[str, Any]) -> Texts:
    """Return the messages of the steps after what `run` has saved."""
    maker, size = CASES[case]
    dicts = [_decoded(saved["rank 0"] | of_rank) for of_rank in saved.values()]
    params: Any = [[held.pop(f"params {i}") for i in range(len(SHAPES))] for held in dicts]
    starts = zip(dicts, params, _places(size), strict=True)
    with _same_everywhere(case):
        states: Any = lockstep([maker.load_stages(held, p, **place) for held, p, place in starts])
        if isinstance(maker, qcomp.OuterLoop):
            params, states = zip(*states, strict=True)
        return _steps(maker, params, states, range(SAVED_AFTER, STEPS))[0]


def _places(size: int) -> list[dict[str, Any]]:
    return [{"rank": rank, "size": size, "host": "abb"[rank]} for rank in range(size)]


def _steps(maker: Any, params: Any, states: Any, steps: range) -> tuple[Texts, Texts, Any, Any]:
    """Make steps; return messages, parameters of rank 0, and the parameters and states of all ranks."""
    messages, numbers = {}, {}
    for step in steps:
        stage = states[0].stage
        sent: list[list[tuple[str, str, str]]] = [[] for _ in states]
        stages = [
            watched(_step(maker, p, state, step), lambda request, own=own: own.append(_seen(request)))  # type: ignore[misc]  # a lambda's default
            for p, state, own in zip(params, states, sent, strict=True)
        ]
        params, states = zip(*lockstep(stages), strict=True)
        held = _digest(x.tobytes() for of_rank in params for x in of_rank)
        exchanges = [_told(of_ranks) for of_ranks in zip(*sent, strict=True)]
        messages[f"step {step + 1}"] = " | ".join([stage, *exchanges, f"parameters {held}"])
        floats = [float(value).hex().split("p") for x in params[0] for value in x.flat]
        numbers[f"step {step + 1}"] = " | ".join(
            f"{x.rstrip('0').rstrip('.')}p{power}" for x, power in floats
        )
    return messages, numbers, params, states


def _step(maker: Any, params: Any, state: Any, step: int) -> Generator[Any, Any, Any]:
    gradients: Any = values(state.rank, step)
    if isinstance(maker, qcomp.OuterLoop):
        moves = yield from maker.average_stages(gradients, state)
        moved = [p - move for p, move in zip(params, moves, strict=True)]
        return (yield from maker.stages(moved, state, compares=True))
    if isinstance(maker, qcomp.QSVRG):
        if step % 4 == 0:
            params = maker.next_snapshot(params, state) if step else params
            state = yield from maker.epoch_stages(params, values(state.rank, 100 + step), state)
        gradients = gradients, values(state.rank, 200 + step)
    return (yield from maker.stages(params, gradients, state))


def _seen(request: Any) -> tuple[str, str, str]:
    """Return the kind of an exchange, and the bytes and the digest of what one rank sends, without qcomp's version."""
    kind, send = ("to each", request.send) if isinstance(request, AllToAll) else ("to all", [request.send])
    buffers = [np.asarray(x).tobytes().replace(VERSION.encode(), b"") for x in send]
    return kind, "+".join(str(len(x)) for x in buffers), _digest(buffers)


def _told(seen: Sequence[tuple[str, str, str]]) -> str:
    """Return an exchange as text: its kind, the bytes that each rank sends, once if they are equal, and the digests."""
    kinds, sizes, digests = zip(*seen, strict=True)
    return " ".join([kinds[0], *(sizes[:1] if len(set(sizes)) == 1 else sizes), *digests])


def _digest(buffers: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(buffers)).hexdigest()[:8]


def _saved(maker: Any, params: Any, states: Any) -> dict[str, Any]:
    """Return parameters and states in the types of JSON: of rank 0, and what differs on each other rank."""
    found = []
    for own, state in zip(params, states, strict=True):
        dict_ = maker.state_dict(*([own, state] if isinstance(maker, qcomp.OuterLoop) else [state]))
        named = {f"params {i}": x for i, x in enumerate(own)}
        found.append({key: _encoded(x) for key, x in {**dict_, **named}.items()})
    first = found[0]
    differing = [
        {key: held.get(key) for key in first | held if repr(held.get(key)) != repr(first.get(key))}
        for held in found[1:]
    ]
    return {f"rank {rank}": entries for rank, entries in enumerate([first, *differing])}


def _encoded(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    form = f"{value.dtype} {'x'.join(map(str, value.shape))}"
    return {form: base64.b64encode(value.tobytes()).decode()}


def _decoded(entries: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in entries.items() if value is not None}
    for key, value in found.items():
        if isinstance(value, dict):
            ((form, text),) = value.items()
            dtype, shape = form.split(" ")
            sizes = [int(size) for size in shape.split("x")]
            found[key] = np.frombuffer(bytearray(base64.b64decode(text)), dtype).reshape(sizes)
    return found
