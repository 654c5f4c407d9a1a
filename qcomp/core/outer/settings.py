"""`OuterSettings`: the settings of an outer loop, and the contents of its state in each stage."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qcomp.core.checkpoint.format import MAKER, SERVER, WORKER
from qcomp.core.checkpoint.schema import Number, shown
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.deprecations import FormerAttribute
from qcomp.core.mean.averaging import Averaging
from qcomp.core.numeric.arrays import Array, array_namespace, device, to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import EXACT, Compressing
from qcomp.core.optimizers.groups import Group
from qcomp.core.optimizers.makers import maker
from qcomp.core.optimizers.replica import Replica
from qcomp.core.optimizers.sgd import SGD
from qcomp.core.optimizers.tensors import copy
from qcomp.core.outer.fragments import LOCAL, assign, stage_of, under_way
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState

WARMUP = "warmup"
"""The name of the stage in which gradients are averaged in every step."""

ANCHOR, SENT, OWN = "anchor", "sent", "local"
"""Kinds of arrays: the shared parameters, the outer gradients under way and, in checkpoints, this rank's parameters."""


@dataclass(frozen=True, kw_only=True)
class OuterSettings(Replica[tuple[Any, OptimizerState]]):
    """The settings of `OuterLoop` (described there), and the form of its state."""

    outer: Optimizer = SGD(learning_rate=1.0)
    every: int
    compressor: Compressor = Identity()
    averaging: Averaging = Averaging()
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None
    decay: float = 1.0
    scale: float = 1.0
    fragments: int = 1
    delay: int = 0
    turn: str = "send"
    mixing: float = 0.0
    warmup: int = 0
    seed: int = 0
    groups = FormerAttribute("qcomp.OuterLoop.groups")
    learning_rate = FormerAttribute("qcomp.OuterLoop.learning_rate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.outer, Optimizer) or self.outer.compression.mean is not EXACT:
            raise TypeError(
                f"outer is {self.outer!r}; expected an optimizer whose mean is exact, such as qcomp.SGD(...): the loop "
                "compresses, with its own compressor and averaging"
            )
        for name, default in (("clip_norm", None), ("nonfinite", "raise"), ("rounding", "nearest")):
            if getattr(self.outer, name) != default:
                raise ValueError(f"outer has {name}={getattr(self.outer, name)!r}; expected {default!r}")
        for name, least, most in (
            ("every", 1, None),
            ("fragments", 1, self.every),
            ("delay", 0, None),
            ("warmup", 0, None),
            ("seed", 0, (1 << 64) - 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least or (most is not None and value > most):
                range_ = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
                raise ValueError(f"{name} is {value!r}; expected {range_}")
        if self.delay >= self.every:
            raise ValueError(f"delay is {self.delay}; expected less than every, which is {self.every}")
        if self.turn not in ("send", "apply"):
            raise ValueError(f"turn is {self.turn!r}; expected 'send' or 'apply'")
        if self.turn == "apply" and self.delay >= self.every // self.fragments:
            raise ValueError(
                f"delay is {self.delay} with turn='apply'; expected less than every // fragments = "
                f"{self.every // self.fragments}, so that each fragment is sent after the previous fragment's turn"
            )
        self._require_factors()
        self.compression  # noqa: B018 - raises if compressor, averaging and policies do not go together

    def _require_factors(self) -> None:
        """Raise ValueError unless all factors are in their ranges, and factors without an effect are 1."""
        for name in ("decay", "mixing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a number from 0 to 1")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale!r}; expected a finite number above 0")
        for name in ("decay", "scale"):
            if getattr(self, name) != 1 and not self.averaging.feedback:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} with feedback=False; expected 1: there are no residuals"
                )

    @cached_property
    def compression(self) -> Compressing:
        """What the loop compresses, and how."""
        averaging = self.averaging
        if not averaging.tensorwise:
            averaging = replace(averaging, tensorwise=True)
        return Compressing(averaging.mean(self.compressor), self.exact, self.compressors)

    def moves(self) -> tuple[Sequence[Group], float | Callable[[int], float]]:
        """Return the groups and the learning rate of the outer optimizer."""
        return self.outer.moves()

    def _loaded(self, params: Any, state: OptimizerState) -> tuple[Any, OptimizerState]:
        return params, state

    def own_kinds(self, stage: str) -> tuple[str, ...]:
        """Return the kinds of arrays that differ between ranks in a stage, besides the residuals."""
        return (OWN, SENT) if self.apart(stage) else ()

    def differing_kinds(self, saved: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the kinds of arrays in which saved states of the ranks may differ.

        There are none in the warm-up, and only residuals if an outer round has just ended for all parameters.
        """
        if not self.apart(saved["stage"]):
            return ()
        ends_round = saved.get(MAKER) == maker(self) and self._ends_round(saved["step"], saved["stage"])
        return (WORKER, SERVER, *(() if ends_round else self.own_kinds(saved["stage"])))

    def _ends_round(self, step: int, stage: str) -> bool:
        """Return whether a step ends an outer round, so that all ranks have the shared parameters afterwards."""
        if stage != LOCAL or self.fragments > 1 or self.mixing:
            return False
        step -= self.warmup
        since_landing = step - (self.delay if self.turn == "send" else 0)
        return not step or (since_landing > 0 and since_landing % self.every == 0)

    def apart(self, stage: str) -> bool:
        """Return whether ranks have different parameters in a stage by design, as in all stages after the warm-up."""
        return stage != WARMUP

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:
        """Return the limits of ``state.numbers`` in a saved state."""
        rounds = Number(least=0, most=state.step, whole=True)
        of_fragments = {rounds_key(fragment): rounds for fragment in range(self.fragments)}
        return {**self.outer.limits(state), **of_fragments}

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return a state in a stage, with all arrays that a checkpoint of this stage holds."""
        sent = under_way(stage)
        if stage not in (WARMUP, stage_of(sent)) or not all(
            0 <= fragment < self.fragments and 0 < step <= state.step for fragment, step in sent.items()
        ):
            raise ValueError(
                f"stage is {shown(stage)} after step {state.step}; expected a stage of an OuterLoop with "
                f"{self.fragments} fragments"
            )
        anchor = state.arrays[ANCHOR]
        arrays = {**state.arrays, OWN: anchor}
        if sent:
            fragments = self._fragments(anchor)
            travelling = {i for fragment in sent for i in fragments[fragment]}
            arrays[SENT] = tuple(x if i in travelling else nothing_like(x) for i, x in enumerate(anchor))
        return state._replace(stage=stage, arrays=arrays)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return the state before the first step, without an exchange."""
        if self.fragments > len(params):
            raise ValueError(
                f"fragments is {self.fragments}; expected at most one for each of {len(params)} tensors"
            )
        state = self.outer.initial_state(params, names, rank, size)
        rounds = {rounds_key(fragment): 0.0 for fragment in range(self.fragments)}
        state = state._replace(
            stage=WARMUP if self.warmup else LOCAL,
            arrays={**state.arrays, ANCHOR: tuple(copy(to_compute_dtype(p)) for p in params)},
            numbers={**state.numbers, **rounds},
        )
        if self.mean.lossless and self.compressors is None:
            return state._replace(exact=(True,) * len(params))
        return self.compression.begin(state, params, type(self).__name__)

    def _fragments(self, tensors: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
        return assign([math.prod(x.shape) for x in tensors], self.fragments)


def rounds_key(fragment: int) -> str:
    """Return the key under which ``state.numbers`` counts a fragment's completed outer rounds."""
    return f"rounds.{fragment}"


def nothing_like(like: Array) -> Array:
    """Return an array without elements."""
    return array_namespace(like).zeros((0,), dtype=like.dtype, device=device(like))
