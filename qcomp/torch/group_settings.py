"""`LiveSettings`: makes an optimizer of the core from parameter groups, whose settings schedulers may change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qcomp.core.checkpoint.schema import shown
from qcomp.core.compressor import Compressor
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.groups import Group
from qcomp.core.policies.exact_below import ExactPolicy, Tensor

OF_GROUPS = ("betas", "eps")
"""The settings, besides the rate and the decay, that may differ between groups."""

_LAST_RATE = "last_lr"
"""The key, in saved groups, of the learning rate of the last step."""


class LiveSettings:
    """Makes an optimizer of the core with the current settings of the parameter groups.

    ``make`` gets ``learning_rate``, ``weight_decay``, ``groups`` and the settings in ``shared``. These are the keys of
    param_groups besides lr and weight_decay that are read in every step. Their values are equal in all groups, except
    those of ``betas`` and ``eps``.
    """

    def __init__(
        self,
        make: Callable[..., Optimizer],
        names: Sequence[Sequence[str]],
        shared: Sequence[str],
        last_rate: float | None = None,
    ) -> None:
        self._make = make
        self._names = names
        self._shared = shared
        self._read: str | None = None
        self._largest = 0.0
        self._values: tuple[Any, ...] | None = None
        self._rate = _Rate(last_rate)
        self._optimizer: Optimizer | None = None
        self._skipping: Optimizer | None = None
        self.text = ""
        """The settings that `optimizer` has read last, as text; equal settings give equal text."""

    def anew(self, last_rate: float | None = None) -> LiveSettings:
        """Return a copy that remembers no earlier step, except for the given rate of the last step."""
        return LiveSettings(self._make, self._names, self._shared, last_rate)

    def saved(self, groups: Sequence[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
        """Return the groups to save, with the largest rate of step ``step`` added if it is known."""
        last = self._rate.before(step)
        return [dict(group) if last is None else {**group, _LAST_RATE: last} for group in groups]

    def skipping(self) -> Optimizer:
        """Return the last optimizer with ``nonfinite="skip"``."""
        assert self._optimizer is not None
        if self._skipping is None:
            self._skipping = _with_layouts(replace(self._optimizer, nonfinite="skip"), self._optimizer)
        return self._skipping

    def optimizer(self, groups: Sequence[Mapping[str, Any]], step: int) -> Optimizer:
        """Return the optimizer for the next step; raise ValueError if a setting of the groups does not fit."""
        read = self._as_read(groups)
        if read is not None and read == self._read:
            assert self._optimizer is not None
            self._rate.advance(step, self._largest)
            return self._optimizer
        self._read = None
        rates, decays = _not_negative(groups, "lr"), _not_negative(groups, "weight_decay")
        others = {key: _of_each(groups, key) for key in self._shared}
        shared = {key: next(x for x in values if x is not None) for key, values in others.items()}
        own = {k: tuple(None if x == shared[k] else x for x in values) for k, values in others.items()}
        differing = {f"{k} of groups": others[k] for k in own if any(x is not None for x in own[k])}
        self._largest = max(rates)
        self._rate.advance(step, self._largest)
        told = {"lr": rates, "weight_decay": decays, **shared, **differing}
        self.text = ", ".join(f"{k}={v}" for k, v in told.items())
        factors = tuple(rate / max(rates) if max(rates) else 1.0 for rate in rates)
        values = (factors, decays, *others.values())
        if self._optimizer is not None and values == self._values:
            self._read = read
            return self._optimizer
        nothing = (None,) * len(groups)
        of_groups = zip(factors, decays, *(own.get(key, nothing) for key in OF_GROUPS), strict=True)
        found = self._make(
            learning_rate=self._rate,
            weight_decay=decays[0],
            groups=tuple(
                _group(number, names, settings)
                for number, (names, settings) in enumerate(zip(self._names, of_groups, strict=True))
                if names and settings != (1.0, decays[0], None, None)
            ),
            **shared,
        )
        if self._optimizer is not None:
            found = _with_layouts(found, self._optimizer)
        self._read, self._values, self._optimizer, self._skipping = read, values, found, None
        return found

    def _as_read(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a text that is equal for equal settings; None if some settings are not plain, such as tensors."""
        keys = ("lr", "weight_decay", *self._shared, "use_muon")
        try:
            return json.dumps([[group.get(key) for key in keys] for group in groups])
        except (TypeError, ValueError):
            return None


def split_last_rate(
    groups: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], float | None]:
    """Split what `LiveSettings.saved` returned: return groups without the last rate, and this rate, None if unknown.

    Raises ValueError if the rate is not a finite number >= 0.
    """
    known = any(_LAST_RATE in group for group in groups)
    rate = max(_not_negative(groups, _LAST_RATE)) if known else None
    return [{key: value for key, value in group.items() if key != _LAST_RATE} for group in groups], rate


def _with_layouts(optimizer: Optimizer, other: Optimizer) -> Optimizer:
    """Return an optimizer with the layouts of another, if both have the same settings of the exchange."""
    if optimizer.compression == other.compression:
        vars(optimizer)["compression"] = other.compression
    return optimizer


def _not_negative(groups: Sequence[Mapping[str, Any]], key: str) -> tuple[float, ...]:
    """Return each group's number under a key."""
    found = []
    for number, group in enumerate(groups):
        try:
            found.append(float(out_of_arrays(group[key])))
        except (KeyError, TypeError, ValueError, OverflowError):
            found.append(math.nan)
        if not 0 <= found[-1] < math.inf:
            value = shown(group[key]) if key in group else "nothing"
            raise ValueError(f"param_groups[{number}] has {key}={value}; expected a finite number >= 0")
    return tuple(found)


def _of_each(groups: Sequence[Mapping[str, Any]], key: str) -> tuple[Any, ...]:
    """Return each group's setting under a key, with None for groups that do not read it.

    Raises ValueError if a group lacks the key, or settings that must be equal differ.
    """
    for number, group in enumerate(groups):
        if key not in group:
            raise ValueError(f"param_groups[{number}] lacks {key}; expected a value for each group")
    readers = [number for number, group in enumerate(groups) if _reads(group, key)] or range(len(groups))
    first = out_of_arrays(groups[readers[0]][key])
    found: list[Any] = [None] * len(groups)
    for number in readers:
        value = out_of_arrays(groups[number][key])
        if value is None:
            raise TypeError(f"param_groups[{number}] has {key}=None; expected a value")
        if value != first and key not in OF_GROUPS:
            raise ValueError(
                f"param_groups[{number}] has {key}={value!r:.200}, param_groups[{readers[0]}] has {first!r:.200}; "
                f"expected one {key} for all groups of an optimizer: make an optimizer for each value, with different "
                "seeds"
            )
        found[number] = value
    return tuple(found)


def _group(number: int, names: Sequence[str], settings: Sequence[Any]) -> Group:
    """Return the settings of a group for the core."""
    try:
        return Group(tuple(names), *settings)
    except (TypeError, ValueError) as error:
        raise type(error)(f"param_groups[{number}]: {error}") from error


def out_of_arrays(value: Any) -> Any:
    """Return the plain numbers in a tensor or list, as schedulers and scripts may write them."""
    if isinstance(value, list | tuple):
        return tuple(map(out_of_arrays, value))
    if not hasattr(value, "reshape"):
        return value
    numbers = value.reshape(-1)[:9].tolist()  # a damaged state may have more numbers; no setting has
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _reads(group: Mapping[str, Any], key: str) -> bool:
    """Return whether a group's optimizer reads a setting: Muon reads momentum, and AdamW reads all others.

    A group without ``use_muon`` reads all settings.
    """
    use_muon = group.get("use_muon")
    return use_muon is None or (key == "momentum") == use_muon


class _Rate:
    """The largest learning rate of all groups, as a schedule that knows only the last step and the next.

    A freeze rule asks whether the rate will rise, but a scheduler decides that only after the step. So this schedule
    assumes that the last change repeats. If the ``last`` rate is None, the rate of the next step counts as unchanged.
    """

    def __init__(self, last: float | None) -> None:
        self._step = -1
        self._before = self._now = last

    def advance(self, step: int, rate: float) -> None:
        """Set the rate of the next step, after ``step`` completed steps."""
        if step != self._step:
            self._before = rate if self._now is None else self._now
        self._step, self._now = step, rate

    def before(self, step: int) -> float | None:
        """Return the rate of the last step, if ``step`` steps are completed; None if it is not known."""
        return self._before if step == self._step else self._now

    def __call__(self, step: int) -> float:
        assert self._now is not None  # since the first `advance`
        assert self._before is not None
        change = self._now - self._before
        return max(0.0, self._now + change * ((step > self._step) - (step < self._step)))

    def __repr__(self) -> str:
        return "of param_groups"


@dataclass(frozen=True, repr=False)
class _ByGroup:
    """A policy that gives each tensor the setting of its group."""

    names: tuple[tuple[str, ...], ...]
    settings: tuple[Any, ...]

    def __repr__(self) -> str:
        return "of param_groups"  # the ranks compare its choices instead

    def of(self, name: str) -> int:
        return next(number for number, names in enumerate(self.names) if name in names)


class _ExactByGroup(_ByGroup):
    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[bool]:
        chosen = [self._choices(setting, tensors) for setting in self.settings]
        return tuple(chosen[self.of(tensor.name)][number] for number, tensor in enumerate(tensors))

    @staticmethod
    def _choices(setting: ExactPolicy | bool | None, tensors: Sequence[Tensor]) -> Sequence[bool]:
        if callable(setting):
            return setting(tensors)
        return [bool(setting)] * len(tensors)


class _CompressorByGroup(_ByGroup):
    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Compressor, ...]:
        return tuple(self.settings[self.of(tensor.name)] for tensor in tensors)


def exact_of(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> ExactPolicy | None:
    """Return one policy for all groups: the policy that they share, else one that asks the policy of each group.

    Each group's ``exact`` is a policy, or True or False for all its tensors, or None for False.
    """
    settings = [group["exact"] for group in groups]
    if all(setting == settings[0] for setting in settings) and not isinstance(settings[0], bool):
        found: ExactPolicy | None = settings[0]
        return found
    return _ExactByGroup(tuple(map(tuple, names)), tuple(settings))


def compressors_of(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> _CompressorByGroup | None:
    """Return a policy that gives each group's tensors its compressor; None if all groups have the same compressor."""
    settings = tuple(group["compressor"] for group in groups)
    for number, compressor in enumerate(settings):
        if not isinstance(compressor, Compressor):
            raise TypeError(
                f"param_groups[{number}] has compressor={compressor!r}; expected a qcomp.Compressor; exact=True keeps "
                "the tensors of a group exact"
            )
    if all(compressor == settings[0] for compressor in settings):
        return None
    return _CompressorByGroup(tuple(map(tuple, names)), settings)
