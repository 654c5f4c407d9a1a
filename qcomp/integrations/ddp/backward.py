"""One backward pass under DistributedDataParallel: which buckets have arrived, and with what outcome."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qcomp.core.errors import NonFiniteError
from qcomp.core.optimizers.compression import Means


@dataclass(eq=False)
class Piece:
    """Gradients of a bucket that are averaged together."""

    numbers: tuple[int, ...]
    """The numbers of their parameters, in rising order."""
    gradients: tuple[Any, ...]
    """Views into the bucket's buffer; once refused, only the largest magnitude of each gradient."""
    sent: tuple[Any, ...]
    """The tensors to average: the gradients, or copies of gradients that this rank did not compute."""
    of_gradients: bool = False
    """Whether the means are means of gradients, not of momenta."""
    means: Means | None = None
    unused: frozenset[int] = frozenset()
    """The numbers of the parameters that no rank used, if requested."""
    moved_zeros: Sequence[str] = ()
    """Descriptions of the parameters that moved in elements whose gradients are 0 on all ranks."""
    refused: bool = False
    """Whether a value on some rank was not finite."""
    over: bool = False


@dataclass(eq=False)
class Bucket:
    """A bucket of DistributedDataParallel."""

    parts: tuple[Piece, ...]
    buffer: Any
    future: Any

    @property
    def refused(self) -> bool:
        """Whether a value on some rank was not finite."""
        return any(part.refused for part in self.parts)

    @property
    def over(self) -> bool:
        """Whether all its parts have been averaged or have failed."""
        return all(part.over for part in self.parts)


@dataclass(eq=False)
class BackwardPass:
    """The buckets of one backward pass, in order of arrival; ``count`` parameters get gradients."""

    count: int
    buckets: list[Bucket] = field(default_factory=list)
    refusal: NonFiniteError | None = None
    """The first error about a non-finite value, the same on all ranks."""
    error: BaseException | None = None
    """The first error of another kind."""
    in_backward: bool = True
    """Whether gradients come from this rank's own backward pass, and not from other ranks through torch's ``Join``."""
    samples: list[Any] = field(default_factory=list)
    """Copies of the gradients' first elements, if the ranks compare them."""
    same_everywhere: bool = False
    """Whether the samples were the same on all ranks."""
    ended: bool = False
    """Whether the outcome has been reported to the hook or optimizer."""
    _came: set[int] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def parts(self) -> list[Piece]:
        """The parts of all buckets."""
        return [part for bucket in self.buckets for part in bucket.parts]

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of all parameters have arrived."""
        return len(self._came) == self.count

    @property
    def missing(self) -> list[int]:
        """The numbers of the parameters whose gradients have not arrived."""
        return [number for number in range(self.count) if number not in self._came]

    def expects(self, numbers: Sequence[int]) -> bool:
        """Return whether this pass still waits for these parameters."""
        return self._came.isdisjoint(numbers)

    def add(self, bucket: Bucket) -> None:
        """Add the next bucket."""
        self.buckets.append(bucket)
        self._came.update(number for part in bucket.parts for number in part.numbers)

    def settle(self) -> None:
        """Let `wait` return: no bucket changes any more."""
        self._over.set()

    def wait(self) -> None:
        """Wait until no bucket changes any more."""
        self._over.wait()


def put_means(part: Piece) -> None:
    """Replace the gradients of a part with their means, except for parameters that no rank used."""
    assert part.means is not None
    # Further averages follow the means of the gradients.
    mean: Any
    for number, gradient, mean in zip(part.numbers, part.gradients, part.means.values, strict=False):
        if number not in part.unused and mean.data_ptr() != gradient.data_ptr():
            gradient.copy_(mean)
