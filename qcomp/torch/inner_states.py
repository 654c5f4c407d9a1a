"""What an outer loop does with the states of torch's optimizers: keeps, averages or resets them."""

from __future__ import annotations

from typing import Any

import torch

from qcomp.core.mean.stages import Stages
from qcomp.core.outer.inner_states import InnerStates
from qcomp.core.outer.loop import OuterLoop as CoreLoop
from qcomp.core.outer.settings import rounds_key
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState
from qcomp.torch.buffers import WITH_A_MEAN, own_part
from qcomp.torch.optimizer import AveragingOptimizer
from qcomp.torch.trained_parameters import Trained

Written = list[tuple[Any, Any]]
"""Entries of states, each with its new value."""

_CHOICES = ("keep", "average", "reset")
_OF_ADAM = ("exp_avg", "exp_avg_sq")
_COUNT = "step"
"""The entry that counts a parameter's steps. Its shape is (), and a parameter may have this shape as well."""


class InnerOfTorch:
    """What happens to the states of the inner optimizers where a loop exchanges."""

    def __init__(self, given: str | InnerStates, trained: Trained, loop: CoreLoop) -> None:
        if given not in _CHOICES and not isinstance(given, InnerStates):
            raise ValueError(
                f"inner_state is {given!r}; expected 'keep', 'average', 'reset', or periods, such as "
                "qcomp.outer.InnerStates({'exp_avg': 600, 'exp_avg_sq': 300})"
            )
        self._trained, self._loop = trained, loop
        self._resets = given == "reset"
        averages = InnerStates(loop.every) if given == "average" else given
        self._averages = averages if isinstance(averages, InnerStates) else None
        if self._averages is not None:
            self._averages.require_fits(loop)
        for number, optimizer in enumerate(trained.optimizers):
            self._require_fits(number, optimizer)
        moved = [id(p) for one in trained.optimizers for group in one.param_groups for p in group["params"]]
        if self._averages is not None and len(set(moved)) < len(moved):
            raise ValueError(
                "inner_state averages, but two optimizers move the same parameter and keep states of the same names; "
                "expected 'keep' or 'reset'"
            )

    def _require_fits(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if the state of an optimizer cannot be averaged, or reset, entry by entry."""
        kind = type(optimizer).__name__
        if self._averages is not None and isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"inner_state averages, but optimizer {number} is a {kind}, whose history describes the steps of one "
                "rank only; expected 'keep' or 'reset'"
            )
        if self._resets and (isinstance(optimizer, AveragingOptimizer) or _begins_with_state(optimizer)):
            raise ValueError(
                f"inner_state is 'reset', but optimizer {number} is a {kind}, which makes its state in its "
                "constructor instead of in a parameter's first step; expected 'keep' or 'average'"
            )

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks."""
        averages = self._averages
        told: Any = averages.facts if averages else {"what": "reset" if self._resets else "keep"}
        return {"inner_state": told}

    def stages(self, after: OptimizerState, weight: float | None) -> Stages[Written]:
        """Return the means of the entries that are due after an inner step; nothing is written yet."""
        if self._averages is None or not self._averages.is_due(self._loop, after):
            return []
        entries = self._entries()
        values = {
            kind: [
                None if x is None else x.to(p.device) for x, p in zip(xs, self._trained.values(), strict=True)
            ]
            for kind, xs in entries.items()
        }
        means = yield from self._averages.stages(values, self._loop, after, weight=weight)
        new = {
            (kind, index): (own[index], mean)
            for kind, own in entries.items()
            for index, mean in enumerate(means[kind])
            if mean is not values[kind][index]
        }
        first, second = _OF_ADAM
        beside = entries.get(second, [None] * len(self._trained.tensors))
        if any(
            kind == first and beside[index] is not None and (second, index) not in new for kind, index in new
        ):
            warn_caller(
                f"{first} is averaged in a step without {second}: if a rank has had hardly any gradients for some "
                "elements, as for rare tokens, Adam divides the mean of all ranks by that rank's small second moment. "
                f"Give {second} a period that divides the period of {first}"
            )
        return list(new.values())

    def write(self, means: Written, before: OptimizerState, after: OptimizerState) -> None:
        """Write means into the states, or forget the states of the fragments whose results a step has applied."""
        for entry, mean in means:
            entry.copy_(mean)
        if not self._resets:
            return
        for fragment in range(self._loop.fragments):
            key = rounds_key(fragment)
            if after.numbers[key] != before.numbers[key]:
                for number in self._loop.members(after, fragment):
                    for optimizer in self._trained.optimizers:
                        optimizer.state.pop(self._trained.tensors[number], None)

    def _entries(self) -> dict[str, list[Any]]:
        """Return the entries that can be averaged, by name: one for each parameter, None where an optimizer has none.

        They are dense tensors of the parameter's shape. A copy of a parameter is left out: it moves with the parameter.
        """
        found: dict[str, list[Any]] = {}
        for number, optimizer in enumerate(self._trained.optimizers):
            for index, p in enumerate(self._trained.tensors):
                state = optimizer.state.get(p) or {}
                for name, entry in state.items():
                    if name == _COUNT or not _has_mean(entry, p):
                        continue
                    if self._trained.positions.has(number, name):
                        continue
                    of_name = found.setdefault(name, [None] * len(self._trained.tensors))
                    of_name[index] = own_part(entry)
        return found


def _has_mean(entry: Any, p: Any) -> bool:
    """Return whether an entry of a state is a tensor that can be averaged over the ranks."""
    if not isinstance(entry, torch.Tensor) or entry.layout is not torch.strided:
        return False
    own = own_part(entry)
    return type(own) is torch.Tensor and own.dtype in WITH_A_MEAN and own.shape == own_part(p).shape


def _begins_with_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer that has made no step has a state, as Adagrad does."""
    return any(not entry.get(_COUNT, 1) for entry in optimizer.state.values() if isinstance(entry, dict))
