"""Checks before each step of any torch optimizer: NaN gradients, means that no step used, squares made equal."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.reporting import warn_caller
from qcomp.private_names.torch import found_inf

NOT_FOR_THIS_MODEL = (
    "call model.requires_grad_(False) before that forward pass, use model.module in that pass, and call "
    "model.requires_grad_(True) after its backward pass"
)
"""How to keep a backward pass through a model from counting as the model's own. DistributedDataParallel expects a
backward pass after each of its forward passes, even in no_sync()."""

_SIZE = 1 << 16
_LOOKS = 8
"""The number of steps before which states are inspected. Each optimizer makes its state in its first step."""
_AVERAGES_OF_SQUARES = frozenset(
    ["exp_avg_sq", "exp_avg_sq_row", "exp_inf", "row_var", "square_avg", "state2", "sum", "variance"]
)
"""Names of averaged squares in the states of Adam, RMSprop, Adagrad, Adamax, Adafactor and the like."""


class BeforeSteps(ABC):
    """Base of the checks; torch calls each before every step of any optimizer, as long as the check exists."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.params = tuple(params)
        self._own = frozenset(map(id, self.params))
        _watch()
        _watching.add(self)

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Whether there is something to do before the next step."""

    @abstractmethod
    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the check before a step, perhaps one with other parameters; an error prevents the step."""

    def of(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Return the parameters of this check that an optimizer updates."""
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._own]


class UnusableGradients(BeforeSteps):
    """Keeps optimizers from using gradients that are NaN on all ranks because a gradient on some rank was not finite.

    A GradScaler that finds such gradients skips the step and lowers its scale, on all ranks. They are an error only
    without a GradScaler.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self._error: NonFiniteError | None = None

    def refuse(self, error: NonFiniteError) -> None:
        """Make steps with the gradients raise the error; raise it at once if a step has used them already."""
        if not all(map(_is_finite, self.params)):
            raise error
        self._error = error

    @property
    def waits(self) -> bool:
        """Whether there may still be such gradients."""
        return self._error is not None

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer would use such gradients, and nothing else skips its step."""
        torch.compiler.disable(self._require_usable)(optimizer)

    def _require_usable(self, optimizer: torch.optim.Optimizer) -> None:
        unusable = {id(p) for p in self.params if p.grad is not None and not _is_finite(p.grad)}
        if not unusable:  # all gradients come from a later backward pass
            self._error = None
        elif found_inf(optimizer) is None and any(id(p) in unusable for p in self.of(optimizer)):
            raise NonFiniteError(str(self._error)) from self._error


class BlindVariances(BeforeSteps):
    """Warns once if an optimizer divides by averages of squares although compression makes all squares equal."""

    def __init__(self, params: Iterable[Any], compressors: Iterable[Compressor]) -> None:
        super().__init__(params)
        self._blind = [c.spec for c in compressors if _says_signs_alone(c)]
        self._looks = _LOOKS

    @property
    def waits(self) -> bool:
        """Whether to go on inspecting optimizers' states."""
        return bool(self._blind) and self._looks > 0

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if the optimizer's earlier steps have made such averages."""
        own = self.of(optimizer)
        self._looks -= bool(own)
        kept = {key for p in own for key in optimizer.state.get(p, {})}
        if kept.isdisjoint(_AVERAGES_OF_SQUARES):
            return
        (spec, *_), self._looks = self._blind, 0
        warn_caller(
            f"{type(optimizer).__name__} divides by averages of squared gradients, and gradients compressed by {spec} "
            "have the same square in all elements of a bucket, so it learns far less than with exact gradients: let "
            "qcomp.torch.OneBitAdam average momenta instead, or compress with at least 4 bits, such as "
            "qcomp.QSGD(levels=7, bucket_size=128), or use an optimizer without such averages, such as SGD"
        )


class UnusedMeans(BeforeSteps):
    """Warns once if steps have left out the means of some parameters, though error feedback counts them as used."""

    def __init__(self, params: Mapping[int, Any], names: Sequence[str]) -> None:
        super().__init__(params.values())
        self._numbers = {id(p): number for number, p in params.items()}
        self._names = names
        self._looks = _LOOKS if params else 0
        self._unused: frozenset[int] = frozenset()
        """The numbers of the parameters whose last means no step has used."""
        self._stepped = False
        """Whether there was a step since the last backward pass."""

    @property
    def waits(self) -> bool:
        """Whether some means are not used yet."""
        return bool(self._unused)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which means an optimizer uses."""
        self._unused -= {self._numbers[id(p)] for p in self.of(optimizer)}
        self._stepped = True

    def after_backward(self, averaged: Iterable[int]) -> None:
        """Warn if steps since the last backward pass left out means; ``averaged`` are the new pass's parameters."""
        lost = sorted(self._unused) if self._stepped else []
        self._looks = 0 if lost else max(0, self._looks - 1)
        self._unused = self._unused.union(averaged).intersection(
            self._numbers.values() if self._looks else ()
        )
        self._stepped = False
        if lost:
            warn_caller(
                f"no optimizer has used the last mean gradients of {len(lost)} parameters, such as "
                f"{self._names[lost[0]]!r}, but error feedback counts them as used, so the residuals in them are "
                "lost. If the loss of another model goes through this one, as a generator's through its "
                f"discriminator, {NOT_FOR_THIS_MODEL}"
            )


def _says_signs_alone(compressor: Compressor) -> bool:
    """Return whether a compressor has one bit per element, and so gives all elements of a bucket the same magnitude."""
    bits = 8 * compressor.for_shape((_SIZE,)).payload_spec(_SIZE).nbytes / _SIZE
    return bits < 1.5 and not compressor.traits.keeps_zero


_watching: weakref.WeakSet[BeforeSteps] = weakref.WeakSet()


@functools.cache
def _watch() -> None:
    """Register a hook that torch calls before all steps from now on."""
    register_optimizer_step_pre_hook(_tell)


def _tell(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run the checks before a step. If the step has a closure, wrap the closure so that the checks run after it."""

    def tell() -> None:
        for each in list(_watching):
            if each.waits:
                each.before(optimizer)

    def after(closure: Any) -> Any:
        loss = closure()
        tell()
        return loss

    own, *rest = args
    if rest and callable(rest[0]):
        return (own, functools.partial(after, rest[0]), *rest[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": functools.partial(after, kwargs["closure"])}
    tell()
    return None


@torch.no_grad()
def _is_finite(x: Any) -> bool:
    """Return whether all elements are finite; of a sharded tensor, all elements on this rank."""
    local = x.to_local() if hasattr(x, "to_local") else x
    return bool(local.isfinite().all())
