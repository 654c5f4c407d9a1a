"""Which tensors are compressed and which stay exact."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ExactBelow", "ExactPolicy", "Tensor"]


class Tensor(NamedTuple):
    """What a policy is told of a tensor."""

    name: str
    shape: tuple[int, ...]
    size: int


ExactPolicy = Callable[[Sequence[Tensor]], Sequence[bool]]
"""Says of every tensor of a model whether it stays exact."""


@dataclass(frozen=True)
class ExactBelow:
    """Small tensors, norms and biases stay exact: a few thousandths of the bytes, and most of the harm.

    A tensor stays exact if it has fewer than ``size`` elements, or if it is a vector among other tensors, as
    norms and biases are. A model that is given as one flat vector is compressed.

    Parameters
    ----------
    size : int
        The smallest size that is compressed.

    Notes
    -----
    Source: Alistarh et al., NeurIPS 2017, section 4 (10 000 elements); practice of 8-bit training for norms and
    biases.

    Examples
    --------
    >>> policy = ExactBelow(10_000)
    >>> policy([Tensor("weight", (256, 128), 32768), Tensor("bias", (20_000,), 20_000)])
    (False, True)
    """

    size: int = 10_000

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 0:
            raise ValueError(f"size is {self.size!r}; expected an integer, at least 0")

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
        """Return whether each tensor stays exact."""
        several = len(tensors) > 1
        return tuple(t.size < self.size or (several and len(t.shape) <= 1) for t in tensors)
