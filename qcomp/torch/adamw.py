"""The base of optimizers whose warm-up steps are AdamW's: they load AdamW's state, and can save a state for AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from qcomp.core.checkpoint.format import DIGESTS, MAKER
from qcomp.core.checkpoint.schema import shown
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.own_counts import own_counts, with_own_counts
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.parameters import plain_name
from qcomp.torch.optimizer import AveragingOptimizer
from qcomp.torch.state_format import OfRank

_STEP, _MOMENTUM, _VARIANCE, _LARGEST = "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
_DECOUPLED = "decoupled_weight_decay"
_USUAL = {"amsgrad": False, "maximize": False}
"""Settings of AdamW that change its steps, with the only values under which its steps equal those of the warm-up."""
_DROPPED = {*_USUAL, _DECOUPLED, "foreach", "capturable", "differentiable", "fused", "param_names"}
"""Keys of AdamW's groups that loading drops."""
_BEGIN_ANEW = "Or begin without this state, with a warm-up of the learning rate"


class BeginsAsAdamW(AveragingOptimizer):
    """Base of the optimizers for torch whose warm-up makes the steps of ``torch.optim.AdamW``.

    ``load_state_dict`` also takes what ``AdamW.state_dict`` returned, the same on all ranks: a script may change from
    AdamW to one of these optimizers between any two steps. Parameters are matched by position, as in torch.
    """

    def adamw_state_dict(self) -> dict[str, Any]:
        """Return what ``torch.optim.AdamW.load_state_dict`` takes, so that AdamW goes on from the warm-up.

        Not collective: in the warm-up all ranks have the same moments.

        Returns
        -------
        dict
            Copies of the moments, the count of steps for each parameter, and the groups. A parameter that never had a
            gradient has no moments. Moments of parameters in half precision are in float32; AdamW rounds them.

        Raises
        ------
        ValueError
            If the warm-up is over.
        """
        core, state = self._in_use(), self.core_state
        if state.stage != "warmup":
            raise ValueError(
                f"adamw_state_dict was called in the stage {state.stage!r}, after {state.step} steps; expected "
                "'warmup': AdamW updates its variance in every step, and this optimizer no longer does. Go on from a "
                f"checkpoint of the warm-up. {_BEGIN_ANEW}"
            )
        counts = own_counts(state, state.step)
        moments: dict[str, tuple[float, Any, Any]] = dict(
            zip(self._names, zip(counts, state.momentum, state.variance, strict=True), strict=True)
        )
        names = dict(zip(map(id, self._tensors), self._names, strict=True))
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = {id(p): number for number, p in enumerate(every)}
        own = {_DECOUPLED: _is_decoupled(core), **_USUAL}
        found = {}
        for p in self._tensors:
            steps, momentum, variance = moments[names[id(p)]]
            if steps:
                found[numbers[id(p)]] = {
                    _STEP: torch.tensor(float(steps)),
                    _MOMENTUM: momentum.clone(),
                    _VARIANCE: variance.clone(),
                }
        return {
            "state": found,
            "param_groups": [
                {key: value for key, value in group.items() if key not in self.fixed}
                | own
                | {"params": [numbers[id(p)] for p in group["params"]]}
                for group in self.param_groups
            ],
        }

    def _read(
        self, saved: Mapping[str, Any], names: Sequence[str | None], sizes: Sequence[int]
    ) -> tuple[list[OfRank], Any]:
        """Return each rank's part of a saved state, and the saved groups; AdamW saves the same state on all ranks."""
        if not _is_of_adamw(saved):
            return super()._read(saved, names, sizes)
        core, state = self._in_use(), self.core_state
        groups = saved["param_groups"]
        _require_groups(groups, self.param_groups, core)
        entries: dict[str, Mapping[str, Any]] = {}
        for number, name in zip(chain.from_iterable(group["params"] for group in groups), names, strict=True):
            # In what torch.distributed.checkpoint has read, the key of an entry is its number as text.
            entry = saved["state"].get(str(number), saved["state"].get(number))
            if name is not None and entry is not None:
                entries[name] = entry
        values = self._values()
        first = core.initial_state(values, state.names, state.rank, state.size)
        first = core.compression.on_nodes(first, values, state.exchange.nodes)
        after = _with_steps(first, entries)._replace(
            momentum=_moments(_MOMENTUM, entries, first.names, first.momentum),
            variance=_moments(_VARIANCE, entries, first.names, first.variance),
        )
        flat = core.state_dict(self._after_adamw(core, after))
        for key in (MAKER, DIGESTS):  # qcomp has not saved this
            del flat[key]
        kept = [{key: _plain(x) for key, x in group.items() if key not in _DROPPED} for group in groups]
        return [OfRank(flat, {}, self._overlapped is not None)], kept

    def _after_adamw(self, core: Any, state: OptimizerState) -> OptimizerState:  # noqa: ARG002
        """Return the state from which this optimizer goes on, given a first state with AdamW's moments."""
        return state


def _is_of_adamw(saved: Any) -> bool:
    """Return whether torch.optim.AdamW or Adam saved a state."""
    if not isinstance(saved, Mapping):
        return False
    groups, state = saved.get("param_groups"), saved.get("state")
    return (
        isinstance(groups, list | tuple)
        and all(isinstance(group, Mapping) and "amsgrad" in group for group in groups)
        and all(isinstance(group.get("params"), list | tuple) for group in groups)
        and isinstance(state, Mapping)
        and all(isinstance(one, Mapping) and {_MOMENTUM, _VARIANCE} <= one.keys() for one in state.values())
    )


def _is_decoupled(core: Any) -> bool:
    return bool(core.decoupled_weight_decay)


def _require_groups(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], core: Optimizer
) -> None:
    """Raise ValueError unless AdamW's groups have the parameters of these groups, and settings supported here."""
    counts = [[len(group["params"]) for group in of] for of in (saved, groups)]
    if counts[0] != counts[1]:
        raise ValueError(f"AdamW has groups of {counts[0]} parameters; this optimizer has {counts[1]}")
    for number, (then, now) in enumerate(zip(saved, groups, strict=True)):
        for key, usual in _USUAL.items():
            if then.get(key, usual) != usual:
                raise ValueError(
                    f"param_groups[{number}] of AdamW has {key}={shown(then[key])}; expected {usual}, which this "
                    f"optimizer uses in all steps. {_BEGIN_ANEW}"
                )
        decoupled = then.get(_DECOUPLED, _is_decoupled(core))
        if decoupled != _is_decoupled(core) and then.get("weight_decay"):
            raise ValueError(
                f"param_groups[{number}] of {'AdamW' if decoupled else 'Adam'} has {_DECOUPLED}={decoupled}; expected "
                f"{_is_decoupled(core)}, as this optimizer has: make it with {_DECOUPLED}={decoupled}"
            )
        pairs = zip(then.get("param_names", ()), now.get("param_names", ()), strict=False)
        for place, pair in enumerate(pairs):
            old, new = (plain_name(name).removeprefix("module.") for name in pair)
            if old != new:
                raise ValueError(
                    f"param_groups[{number}] of AdamW has {old!r} at position {place}, this optimizer {new!r}; "
                    "expected the same, since parameters are matched by position: give them to both in the same order"
                )


def _with_steps(first: OptimizerState, entries: Mapping[str, Mapping[str, Any]]) -> OptimizerState:
    """Return a first state with the number of AdamW's steps for each parameter."""
    steps: dict[str, int] = {}
    for name, entry in entries.items():
        if _LARGEST in entry:
            raise ValueError(
                f"AdamW has {_LARGEST} of {name!r}; expected a state without amsgrad. {_BEGIN_ANEW}"
            )
        given = _plain(entry.get(_STEP))
        if not isinstance(given, int | float) or not (given >= 0 and float(given).is_integer()):
            raise ValueError(f"AdamW has {_STEP}={shown(given)} of {name!r}; expected a whole number >= 0")
        steps[name] = int(given)
    return with_own_counts(first, [steps.get(name, 0) for name in first.names])


def _moments(
    kind: str, entries: Mapping[str, Mapping[str, Any]], names: Sequence[str], zeros: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """Return one kind of moment for each parameter, in the core's dtype; zeros for a parameter without one in AdamW."""
    found = []
    for name, zero in zip(names, zeros, strict=True):
        if name not in entries:
            found.append(zero)
            continue
        given = entries[name][kind]
        shape = tuple(getattr(given, "shape", ()))
        if not isinstance(given, torch.Tensor) or shape != tuple(zero.shape):
            raise ValueError(f"AdamW has {kind} of {name!r} with shape {shape}; expected {tuple(zero.shape)}")
        moment = given.detach().to(zero.device, zero.dtype, copy=True).contiguous()  # steps overwrite it
        if not moment.isfinite().all() or (kind == _VARIANCE and (moment < 0).any()):
            raise ValueError(
                f"AdamW has {kind} of {name!r} with a value that is negative or not finite: load an earlier checkpoint"
            )
        found.append(moment)
    return tuple(found)


def _plain(value: Any) -> Any:
    """Return a tensor's value as a number or list, and anything else unchanged."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
