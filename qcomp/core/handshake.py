"""The check that all ranks were started alike, made once before they work together."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from qcomp.core.errors import MismatchError
from qcomp.core.mean.stages import AllGather, Stages, Transport, drive
from qcomp.core.numeric.arrays import Array, flushes_subnormals, from_host_bytes, host_bytes
from qcomp.core.reporting import name_ranks
from qcomp.version import version_and_sources

_ABSENT = object()
_LONGEST_VALUE = 100
_SUBNORMALS = "subnormal numbers"
_SAME_MODE = (
    "The processor is in another mode on these ranks, because torch.set_flush_denormal or a library built with "
    "-ffast-math has changed it: call torch.set_flush_denormal(False) on all ranks after the imports"
)


def handshake(
    comm: Transport,
    facts: Mapping[str, object],
    *,
    like: Array,
    explain: Mapping[str, Callable[[Sequence[Any]], str | None]] = MappingProxyType({}),
) -> None:
    """Verify that all ranks have the same facts.

    Each rank sends 8 bytes and its facts as JSON to every other rank. The facts always include the version of qcomp,
    with a digest of the sources that decide what is exchanged, and whether the processor takes subnormal numbers for 0.

    Parameters
    ----------
    comm : Communicator
    facts : mapping of str to object
        Facts that must be equal on all ranks: compressor, sizes, seed and the like. A value that JSON cannot represent
        is compared by its `str`.
    like : array
        Gives the library and the device of the exchanged buffers.
    explain : mapping of str to callable
        Describes the difference in a fact, given its value on each rank.

    Raises
    ------
    MismatchError
        On every rank, with the same text: each fact that differs, and which ranks have which value. Of a list or
        mapping, the text gives the first entry that differs.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> x = np.zeros(1)
    >>> qcomp.comm.run_local(2, lambda comm: handshake(comm, {"seed": 0}, like=x))
    [None, None]
    >>> try:
    ...     qcomp.comm.run_local(3, lambda comm: handshake(comm, {"seed": comm.rank // 2}, like=x))
    ... except qcomp.MismatchError as error:
    ...     print(error)
    the ranks were not started alike: seed is 0 on ranks 0 and 1, but 1 on rank 2
    """
    drive(handshake_stages(facts, size=comm.size, like=like, explain=explain), comm)


def handshake_stages(
    facts: Mapping[str, object],
    *,
    size: int,
    like: Array,
    explain: Mapping[str, Callable[[Sequence[Any]], str | None]] = MappingProxyType({}),
) -> Stages[None]:
    """Verify that all ranks have the same facts, as a generator of pure stages; see `handshake`.

    Parameters
    ----------
    facts, like, explain
        As for `handshake`.
    size : int
        Number of ranks.
    """
    subnormals = "flushed to 0" if flushes_subnormals() else "kept"
    always = {"version": version_and_sources(), _SUBNORMALS: subnormals}
    text = json.dumps({**always, **facts}, sort_keys=True, default=str)
    texts = yield from gather_texts(text, size, like)
    if len(set(texts)) == 1:
        return
    held = [_facts(text, rank) for rank, text in enumerate(texts)]
    differences = []
    for key in sorted({key for facts_of_rank in held for key in facts_of_rank}):
        values = [facts_of_rank.get(key, _ABSENT) for facts_of_rank in held]
        found = explain[key](values) if key in explain else _describe(key, values)
        differences.append(f"{found}. {_SAME_MODE}" if found and key == _SUBNORMALS else found)
    raise MismatchError("the ranks were not started alike: " + "; ".join(filter(None, differences)))


def _facts(text: str, rank: int) -> dict[str, object]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        problem = f"rank {rank} sent {_shorten(repr(text))} instead of its settings"
        raise MismatchError("the ranks were not started alike: " + problem)
    return facts


def agree(comm: Transport, problem: Exception | None, *, what: str, like: Array) -> None:
    """If any rank has a problem, raise it on that rank, and `MismatchError` on all ranks without a problem.

    ``problem`` keeps this rank from continuing. ``what`` says what a rank with a problem cannot do, such as
    ``"load its state"``.
    """
    drive(agree_stages(problem, what=what, size=comm.size, like=like), comm)


def agree_stages(problem: Exception | None, *, what: str, size: int, like: Array) -> Stages[None]:
    """`agree` as a generator of pure stages, for one of ``size`` ranks."""
    own = "" if problem is None else f"{type(problem).__name__}: {problem}"
    texts = yield from gather_texts(own, size, like)
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text:
            raise MismatchError(f"rank {rank} cannot {what}: {text}")


def gather_texts(text: str, size: int, like: Array) -> Stages[list[str]]:
    """Return the texts of all ranks, in rank order; each rank sends 8 bytes and its text to every other rank."""
    data = text.encode(errors="backslashreplace")  # saved texts and names may have lone surrogates
    arrived = yield AllGather(from_host_bytes(len(data).to_bytes(8, "little"), like), (8,) * size)
    sizes = tuple(int.from_bytes(host_bytes(part), "little") for part in arrived)
    arrived = yield AllGather(from_host_bytes(data, like), sizes)
    return [host_bytes(part).decode(errors="replace") for part in arrived]


def _describe(path: str, values: list[Any]) -> str | None:
    """Describe which ranks have which value, at the first place where the values differ."""
    ranks_of = defaultdict(list)
    for rank, value in enumerate(values):
        ranks_of[_text(value)].append(rank)
    if len(ranks_of) == 1:
        return None
    if all(isinstance(value, dict) for value in values):
        keys = sorted({key for value in values for key in value})
        return _first(
            _describe(f"{path}.{key}", [value.get(key, _ABSENT) for value in values]) for key in keys
        )
    if all(isinstance(value, list) for value in values):
        longest = max(len(value) for value in values)
        return _first(
            _describe(f"{path}[{i}]", [value[i] if i < len(value) else _ABSENT for value in values])
            for i in range(longest)
        )
    held = [f"{_shorten(text)} on {name_ranks(ranks)}" for text, ranks in ranks_of.items()]
    return f"{path} is {', '.join(held[:-1])}, but {held[-1]}"


def _first(descriptions: Iterable[str | None]) -> str | None:
    return next(filter(None, descriptions), None)


def _text(value: object) -> str:
    # Compared as text, since NaN is not equal to itself.
    if value is _ABSENT:
        return "absent"
    return repr(value) if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
