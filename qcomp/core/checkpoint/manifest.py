"""`Manifest`: the description of a saved dict, which ranks exchange before they resume in a new world.

A dict fits every rank if it has no arrays that only its own rank has.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from qcomp.core.checkpoint.format import MAKER, NUMBER, SERVER, WORKER, array_keys, read_scalars, some
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    device,
    digest,
    dtype_name,
    from_bytes_of,
    itemsize,
)
from qcomp.core.reporting import name_ranks
from qcomp.core.state import OptimizerState

CURES = (
    "If one rank saves for all, as in Accelerate, Lightning and the Trainer of Hugging Face, call gather_states() on "
    "all ranks before that rank saves; lost='drop' loads a state without the missing arrays"
)
"""The advice to callers who load the state of only one rank."""

_RESIDUALS = (WORKER, SERVER)

_NAMED = 8
"""The most ranks that a message names."""

_LONGEST = 100
"""The most characters of a stage in a message; a stage may name many fragments that are under way."""


class Described(Protocol):
    """The optimizer or outer loop whose states are described; see `qcomp.core.optimizers.replica.Replica`."""

    resizes: bool

    def mean_of(self, state: OptimizerState) -> CompressedMean:
        """Return the mean whose residuals a state holds."""

    def shapes_of(self, params: Sequence[Array]) -> list[tuple[int, ...]]:
        """Return the shapes of whole parameters."""

    def own_kinds(self, stage: str) -> tuple[str, ...]:
        """Return the kinds of arrays that differ between ranks in a stage, besides the residuals."""

    def differing_kinds(self, saved: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the kinds of arrays in which the saved states of the ranks may differ."""

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state at the start of a stage."""

    def adopt(self, saved: Mapping[str, Any], fresh: OptimizerState) -> Mapping[str, Any]:
        """Return a saved state with exactly the entries that are kept here."""

    def require_maker(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError if another class or compressor made a saved state."""


def kind_of(key: str) -> str:
    """Return the kind of array that has a key."""
    return key.partition(".")[0]


class ArrayEntry(NamedTuple):
    """The description of an array, sent before the array."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    """Digest of the bytes; empty for arrays that belong to one rank."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def read(self, data: Array) -> Array:
        """Return the array from its bytes."""
        xp = array_namespace(data)
        if not self.nbytes:
            return xp.zeros(self.shape, dtype=getattr(xp, self.dtype), device=device(data))
        return xp.reshape(from_bytes_of(data, self.dtype), self.shape)


class Manifest(NamedTuple):
    """The description of a dict."""

    scalars: dict[str, Any]
    arrays: dict[str, ArrayEntry]

    def of_kinds(self, *kinds: str) -> dict[str, ArrayEntry]:
        """Return the arrays of these kinds."""
        return {key: entry for key, entry in self.arrays.items() if kind_of(key) in kinds}

    def but_kinds(self, *kinds: str) -> dict[str, ArrayEntry]:
        """Return the arrays of all other kinds."""
        return {key: entry for key, entry in self.arrays.items() if kind_of(key) not in kinds}


def facts_of(saved: Any, accept: Callable[[Mapping[str, Any]], None]) -> Any:
    """Return the facts about a rank's dicts, or a text that says what is wrong with them.

    ``accept`` raises an error if a dict is not acceptable.
    """
    facts = []
    try:
        for each in saved:
            scalars = read_scalars(each)
            accept(scalars)
            facts.append([scalars[name] for name in ("rank", "size", "step", "stage")])
    except Exception as error:  # share the error, so that no rank waits
        return str(error)
    return facts


def require_no_problem(told: Sequence[Any]) -> None:
    """Raise ValueError, with the same text on all ranks, if any rank has sent a text, which reports a problem."""
    problems = [f"on rank {rank}: {text}" for rank, text in enumerate(told) if isinstance(text, str)]
    if problems:
        raise ValueError("; ".join(problems))


def holders(held: Sequence[Any]) -> tuple[dict[int, int], int]:
    """Return, for each old rank, the new rank that contributes its dict, and the number of old ranks.

    If no rank has the dict of an old rank, that old rank is not among the keys. ``held`` holds the facts about every
    new rank's dicts.
    """
    require_no_problem(held)
    dicts = [(new, *fact) for new, facts in enumerate(held) for fact in facts]
    if not dicts:
        raise ValueError("saved is empty on every rank; expected the dict of each old rank on some rank")
    for each in dicts:
        if each[2:] != dicts[0][2:]:
            raise ValueError(
                f"the dicts belong to different jobs or steps: {_told(dicts[0])}, but {_told(each)}"
            )
    old_size = dicts[0][2]
    counts = Counter((new, old) for new, old, *_ in dicts)
    twice = [
        f"rank {new} passes {count} dicts of old rank {old}"
        for (new, old), count in counts.items()
        if count > 1
    ]
    if twice:
        raise ValueError(f"saved has a dict more than once: {'; '.join(twice)}")
    strange = [each for each in dicts if each[1] >= old_size]
    if strange:
        raise ValueError(f"{_told(strange[0])}: the dict is damaged; load an earlier one")
    having: dict[int, list[int]] = {}
    for new, old in sorted(counts):
        having.setdefault(old, []).append(new)
    # A rank contributes its own dict; if all ranks have all dicts, each contributes an equal share.
    by = {
        old: old % len(held) if old % len(held) in ranks else min(ranks)
        for old, ranks in sorted(having.items())
    }
    return by, old_size


def name_missing(given: Collection[int], size: int) -> str:
    """Return a phrase that names the first of the old ranks whose dicts are missing, and counts the others."""
    # A damaged dict may claim any size, so look for the first few only.
    missing = list(islice((old for old in range(size) if old not in given), _NAMED))
    more = size - len(given) - len(missing)
    return f"{name_ranks(missing)}{f' and {more} more' if more else ''}"


def _told(fact: Sequence[Any]) -> str:
    new, old, size, step, stage = fact
    return (
        f"rank {new} passes the dict of old rank {old} of {size} after step {step}, "
        f"{ascii(stage)[1:-1][:_LONGEST]}"
    )


def describe(scalars: Mapping[str, Any], found: Mapping[str, Array], own_kinds: Sequence[str]) -> Manifest:
    """Describe a dict: entries that must be equal in all dicts by value or digest, other arrays by shape."""
    told = {
        key: value
        for key, value in scalars.items()
        if key.startswith(NUMBER) or key in ("step", "skipped", MAKER, "stage", "history")
    }
    arrays = {}
    for key, value in found.items():
        own = kind_of(key) in (WORKER, SERVER, *own_kinds)
        arrays[key] = ArrayEntry(tuple(value.shape), dtype_name(value.dtype), "" if own else digest(value))
    return Manifest(told, arrays)


def require_agreement(manifests: Mapping[int, Manifest], owned_kinds: Sequence[str] = ()) -> None:
    """Raise ValueError unless the dicts of old ranks agree in all entries that do not belong to one rank.

    Arrays of the kinds in ``owned_kinds`` need not be in every dict.
    """
    reference = min(manifests)
    first = shared_entries(manifests[reference], owned_kinds)
    for old, manifest in manifests.items():
        other = shared_entries(manifest, owned_kinds)
        differing = [key for key in sorted({*first, *other}) if first.get(key) != other.get(key)]
        if differing:
            raise ValueError(
                f"the dicts of old ranks {reference} and {old} differ in [{some(differing)}], which must be the same "
                "on all ranks: the dicts belong to different jobs"
            )


def shared_entries(manifest: Manifest, owned_kinds: Sequence[str]) -> dict[str, str]:
    """Return the entries that must be equal in all dicts, as text, since NaN is not equal to itself.

    Arrays that belong to one rank are described by their shapes, since their digests are empty.
    """
    scalars = {name: value for name, value in manifest.scalars.items() if name != "skipped"}
    entries = {**scalars, **manifest.but_kinds(WORKER, SERVER, *owned_kinds)}
    return {key: repr(value) for key, value in entries.items()}


def own_kinds_in(replica: Described, saved: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of arrays in a saved state that only its rank has, sorted; none if the state fits every rank.

    ``saved`` must hold its numbers and texts as Python objects. Its arrays are not read, so they may be any objects.
    """
    present = {kind_of(key) for key in array_keys(saved)}
    return tuple(sorted(present.intersection(replica.differing_kinds(saved))))


def phrase(kinds: Sequence[str]) -> str:
    """Return a phrase that names kinds of arrays.

    Examples
    --------
    >>> phrase(("momentum", "pending", "server_residual", "worker_residual"))
    "residuals, 'momentum' and 'pending'"
    """
    others = [repr(kind) for kind in kinds if kind not in _RESIDUALS]
    parts = ["residuals"][: len(kinds) - len(others)] + others
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def as_of_rank(saved: Mapping[str, Any], rank: int, size: int, template: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state that fits every rank to the state of a given rank; residuals are taken from ``template``."""
    found = {key: value for key, value in saved.items() if kind_of(key) not in _RESIDUALS}
    if len(found) < len(saved):
        found |= {key: x for key, x in template.items() if kind_of(key) in _RESIDUALS}
    return found | {"rank": rank, "size": size}
