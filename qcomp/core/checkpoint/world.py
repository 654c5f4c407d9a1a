"""`World`: the ranks and the optimizer with which a saved state resumes, and the meaning of its arrays' keys."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from qcomp.core.checkpoint.format import array_keys, named_arrays, owned_keys
from qcomp.core.checkpoint.manifest import Described, kind_of
from qcomp.core.checkpoint.schema import shown
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.numeric.arrays import Array
from qcomp.core.state import OptimizerState

Saved = Mapping[str, Any]


class PartOfTensor(NamedTuple):
    """Where a part lies in its tensor. The tensor is seen as a matrix, and the part is some of its columns."""

    name: str
    """The name of the tensor."""
    start: int
    """The number of elements in the columns before the part."""
    rows: int
    """The number of rows of the matrix; 1 if the part is a range of elements."""


@dataclass(frozen=True)
class World:
    """The ranks and the optimizer with which a saved state resumes."""

    replica: Described
    """The optimizer or outer loop."""
    fresh: OptimizerState
    """The state before the first step, on this rank."""
    params: Sequence[Array]
    strict: bool = True
    """Whether to accept only dicts from a replica of the same class with the same compressors."""
    lost: Collection[int] = ()
    """The old ranks whose own arrays are lost: zeros replace these arrays in their dicts. The same on all ranks."""
    drops: bool = False
    """Whether dicts may be missing even if their ranks had arrays of their own, which are then lost."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.fresh.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.fresh.size

    @property
    def like(self) -> Array:
        """Gives the library and the device of exchanged arrays."""
        return self.params[0]

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Elements of each parameter, by name."""
        return dict(zip(self.fresh.names, map(math.prod, self.replica.shapes_of(self.params)), strict=True))

    @cached_property
    def mean(self) -> CompressedMean:
        """The mean whose residuals the state holds."""
        return self.replica.mean_of(self.fresh)

    @cached_property
    def owned(self) -> Sequence[str]:
        """The keys of all arrays that only the owners of tensors have; the keys are the same on all ranks."""
        return owned_keys(self.fresh, self.mean)

    @property
    def part_kinds(self) -> tuple[str, ...]:
        """The kinds of arrays that are cut: each rank holds a part for each tensor."""
        return self.mean.part_kinds

    @property
    def owned_kinds(self) -> tuple[str, ...]:
        """The kinds of arrays that only the owners of tensors have."""
        return tuple(sorted({kind_of(key) for key in self.owned}))

    def template(self, step: int, stage: str) -> Mapping[str, Array]:
        """Return the arrays that this rank holds at the start of a stage, by key."""
        return dict(named_arrays(self.replica.enter(self.fresh._replace(step=step), stage), self.mean))

    def accept(self, one: Saved) -> None:
        """If `strict`, raise ValueError if another class or compressor made a dict with these scalars."""
        if self.strict:
            self.replica.require_maker(one)

    def has_other_parts(self, saved: Saved) -> bool:
        """Return whether a dict has other parts of tensors than this rank."""
        every = dict(named_arrays(self.fresh, self.mean)), array_keys(saved)
        now, then = ({key for key in keys if kind_of(key) in self.part_kinds} for keys in every)
        return now != then

    def place(self, key: str) -> PartOfTensor:
        """Return where the part with this key lies in its tensor."""
        _, _, name = key.partition(".")
        if name in self.sizes:
            return PartOfTensor(name, 0, 1)
        name, _, start = name.rpartition("@")
        start, star, rows = start.partition("*")
        numbers = [int(text) if text.isdecimal() else -1 for text in (start, rows if star else "1")]
        if name not in self.sizes or numbers[0] < 0 or numbers[1] < 1 or self.sizes[name] % numbers[1]:
            raise ValueError(
                f"the state has {shown(key)}, but params has no such tensor: the state belongs to another model or "
                "optimizer"
            )
        return PartOfTensor(name, *numbers)
