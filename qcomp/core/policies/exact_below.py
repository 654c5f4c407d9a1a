"""`ExactBelow`: the policy that keeps small tensors, norms and biases exact."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from qcomp.core.policies.patterns import require_matches


class Tensor(NamedTuple):
    """A tensor as a policy sees it.

    Parameters
    ----------
    name : str
        The name of the parameter.
    shape : tuple of int
        Its shape.
    size : int
        Its number of elements.
    """

    name: str
    shape: tuple[int, ...]
    size: int


ExactPolicy = Callable[[Sequence[Tensor]], Sequence[bool]]
"""Returns for every tensor of a model whether it stays exact."""


def names_of(tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of a policy's tensors; raise TypeError if the policy got anything else, such as a step."""
    if not isinstance(tensors, Sequence):
        raise TypeError(
            f"tensors is {tensors!r}; expected a sequence of qcomp.Tensor: optax.inject_hyperparams calls every "
            "function among the arguments as a schedule, but a policy is not a schedule. Inject the learning rate "
            "only: optax.inject_hyperparams(lambda learning_rate: ...)(learning_rate)"
        )
    return [t.name for t in tensors]


@dataclass(frozen=True)
class ExactBelow:
    """Keeps small tensors, norms and biases exact: a few thousandths of all bytes, but compressing them does most harm.

    A tensor stays exact if it has fewer than ``size`` elements, or if it is a vector among other tensors, as norms and
    biases are. A model given as one flat vector is compressed.

    Parameters
    ----------
    size : int
        Tensors with fewer elements stay exact.
    names : sequence of str
        Patterns, with ``*``, ``?`` and ``[...]`` as in file names: a tensor whose name matches a pattern stays exact,
        whatever its size and shape. Each pattern must match a name.

    Notes
    -----
    Source: Alistarh et al., NeurIPS 2017, section 4 (10 000 elements); practice of 8-bit training for norms and
    biases.

    Examples
    --------
    >>> policy = ExactBelow(10_000)
    >>> policy([Tensor("weight", (256, 128), 32768), Tensor("bias", (20_000,), 20_000)])
    (False, True)
    >>> policy = ExactBelow(10_000, names=("embed*",))
    >>> policy([Tensor("weight", (256, 128), 32768), Tensor("embedding", (300, 128), 38400)])
    (False, True)
    """

    size: int = 10_000
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 0:
            raise ValueError(f"size is {self.size!r}; expected an integer, at least 0")
        if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
            raise TypeError(f"names is {self.names!r}; expected a sequence of str")
        names = sorted(self.names) if isinstance(self.names, Set) else self.names  # alike on all ranks
        object.__setattr__(self, "names", tuple(names))

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
        """Return whether each tensor stays exact."""
        require_matches("names", self.names, names_of(tensors))
        several = len(tensors) > 1
        return tuple(
            t.size < self.size
            or (several and len(t.shape) <= 1)
            or any(fnmatchcase(t.name, pattern) for pattern in self.names)
            for t in tensors
        )
