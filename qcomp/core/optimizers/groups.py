"""`Group`: options for some parameters, selected by name."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import lru_cache
from glob import escape
from math import inf
from typing import Any

from qcomp.core.settings import plain_numbers


@dataclass(frozen=True, repr=False)
class Group:
    """Options for the parameters that match a pattern; the first matching group counts.

    Parameters
    ----------
    pattern : str or sequence of str
        Pattern of parameter names, with ``*``, ``?`` and ``[...]`` as in file names, that matches at least one name. Or
        a list or tuple of the names themselves.
    learning_rate_factor : float
        Factor of the optimizer's learning rate (or schedule) for these parameters, >= 0. 0 keeps them unchanged.
        Default 1.
    weight_decay : float, optional
        Replaces the optimizer's weight decay, >= 0. None, the default, keeps the optimizer's.
    betas : tuple of two floats, optional
        Replaces the optimizer's decay rates, each from 0 to below 1. None, the default, keeps the optimizer's.
    eps : float, optional
        Replaces the optimizer's ``eps``, >= 0. None, the default, keeps the optimizer's.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> groups = (qcomp.Group("*.bias", weight_decay=0.0), qcomp.Group("head.*", learning_rate_factor=0.5))
    >>> opt = qcomp.Adam(learning_rate=0.1, weight_decay=0.5, groups=groups)
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = [np.ones(1), np.ones(1)]
    >>> state = opt.init(params, comm, names=["head.bias", "head.weight"])
    >>> params, state = opt.step(params, params, state, comm)
    >>> [p.round(4).tolist() for p in params]
    [[0.9], [0.925]]
    """

    pattern: str | Sequence[str]
    learning_rate_factor: float = 1.0
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        plain_numbers(self)
        if isinstance(self.pattern, list | tuple) and all(isinstance(name, str) for name in self.pattern):
            object.__setattr__(self, "pattern", tuple(self.pattern))
        elif not isinstance(self.pattern, str):
            raise TypeError(f"pattern is {self.pattern!r}; expected a str, or a list of names")
        if not 0 <= self.learning_rate_factor < inf:
            raise ValueError(
                f"learning_rate_factor is {self.learning_rate_factor!r}; expected a finite number >= 0"
            )
        if self.weight_decay is not None and not 0 <= self.weight_decay < inf:
            raise ValueError(f"weight_decay is {self.weight_decay!r}; expected a finite number >= 0, or None")
        if self.betas is not None:
            require_betas(self.betas)
        if self.eps is not None:
            require_eps(self.eps)

    def __repr__(self) -> str:
        """Return the options, without betas and eps if they are None."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = [f"{k}={x!r}" for k, x in options.items() if x is not None or k not in ("betas", "eps")]
        return f"Group({', '.join(shown)})"


def as_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return an optimizer's ``groups`` as a tuple."""
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Group) for group in groups):
        raise TypeError(f"groups is {groups!r}; expected a sequence of qcomp.Group")
    return tuple(groups)


def patterns_of(groups: Sequence[Group]) -> list[str]:
    """Return the patterns of groups; names that are given instead of a pattern become patterns that match only them."""
    return [
        pattern
        for group in groups
        for pattern in ([group.pattern] if isinstance(group.pattern, str) else map(escape, group.pattern))
    ]


@lru_cache(64)  # the same every step, unless a schedule changes the rates of groups
def group_of_each(groups: tuple[Group, ...], names: tuple[str, ...]) -> tuple[Group, ...]:
    """Return the group of each name: the first group that matches, or a group without options."""
    default = Group("*")
    named = {
        name: group
        for group in reversed(groups)
        if isinstance(group.pattern, tuple)
        for name in group.pattern
    }
    patterns = [(group.pattern, group) for group in groups if isinstance(group.pattern, str)]
    found = []
    for name in names:
        matching = [group for pattern, group in patterns if fnmatchcase(name, pattern)][:1]
        matching += [named[name]] if name in named else []
        found.append(min(matching, key=groups.index, default=default))
    return tuple(found)


@lru_cache(256)
def setting_of_each(
    groups: tuple[Group, ...], names: tuple[str, ...], setting: str, default: Any
) -> tuple[Any, ...]:
    """Return a setting of each name, such as ``betas``: from its group, or else from the optimizer."""
    found = [getattr(group, setting) for group in group_of_each(groups, names)]
    return tuple([default if value is None else value for value in found])


def require_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless these are two numbers from 0 to below 1."""
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ValueError(f"betas is {betas!r:.200}; expected two numbers from 0 to below 1")


def require_eps(eps: float) -> None:
    """Raise ValueError unless this is a number >= 0."""
    if not eps >= 0:
        raise ValueError(f"eps is {eps!r}; expected a number >= 0")
