"""The compressed collectives that FSDP2 calls: reduce-scatter, all-gather, and the mean over replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule

from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.core.checkpoint.format import DIGESTS, require_intact, sealed
from qcomp.core.checkpoint.schema import Entries, NumericArray, Several, Text, Whole, read, shown
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import Identity
from qcomp.core.errors import NonFiniteError
from qcomp.core.handshake import handshake
from qcomp.core.mean.averaging import Averaging
from qcomp.core.mean.shards import Shards
from qcomp.core.mean.stages import Owner, Stages, drive, owned
from qcomp.core.numeric.arrays import dtype_name
from qcomp.core.numeric.random import Key
from qcomp.core.optimizers.agreement import stream_of
from qcomp.core.policies.exact_below import Tensor
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.before_steps import BeforeSteps
from qcomp.integrations.ddp.gradient_mean import GradientMean
from qcomp.integrations.ddp.parameters import mark_of
from qcomp.torch.fsdp_units import Unit

if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
    raise ImportError(
        f"qcomp.torch.fsdp needs torch 2.9 or newer, whose FSDP2 can use other collectives; this is {torch.__version__}"
    )

_SAME_MODULES = (
    "every rank must run the same modules of a sharded model in the same order; a rank that would skip a module must "
    "run it and multiply the result by zero"
)

_WEIGHTS_HOP = 1 << 31
"""The hop of the draws that round weights. No mean of gradients uses this hop, so the draws for gradients and for
weights are independent."""


@dataclass(frozen=True)
class Rules:
    """The settings that all exchanges of a model share; see `qcomp.torch.fsdp.compress`."""

    feedback: bool
    exact: Mapping[str, bool]
    """Whether each parameter stays exact, by name."""
    seed: int
    refuse: Callable[[NonFiniteError], None]
    """Called when a module's gradients are not finite on some rank, and have become NaN on all."""
    watches: tuple[BeforeSteps | None, ...]
    """Checks that run before steps as long as the model has these exchanges."""


class _Sharded:
    """The shards of one unit over one communicator."""

    def __init__(self, unit: Unit, compressor: Compressor, comm: TorchCommunicator, terms: Rules) -> None:
        self._unit = unit
        self._compressor = compressor
        self._comm = comm
        self._terms = terms
        self._stream = stream_of(unit.names, [tuple(p.shape) for p in unit.params])
        self._known: dict[tuple[str, ...], Shards] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor for messages, as FSDP2 makes it by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, stages: Stages[Any], what: str) -> Any:
        """Run a computation in stages. Its exchanges name the module, as ranks may run different modules by mistake."""
        unit = self._unit
        owner = Owner(unit.label, 0, unit.names, self._stream, what, _SAME_MODULES)
        return drive(owned(stages, owner), self._comm)

    def _shards(self, unit: Unit) -> Shards:
        """Return the shards of parameters whose places in a message are known."""
        if unit.names not in self._known:
            compressors = [
                Identity() if self._terms.exact[name] else self._compressor.for_shape((p.numel(),))
                for name, p in zip(unit.names, unit.params, strict=True)
            ]
            self._known[unit.names] = self._of(tuple(compressors), unit.sizes(self._comm.size))
        return self._known[unit.names]

    def _of(self, compressors: tuple[Compressor, ...], sizes: tuple[int, ...]) -> Shards:
        return Shards(compressors, sizes, self._comm.rank, self._comm.size)

    def _for(self, unit: Unit, size: int) -> Shards | None:
        """Return the shards in a message with ``size`` elements per rank; None if the message lacks some parameters."""
        shards = self._shards(unit)
        return shards if shards.size == size else None

    def _joined(self, size: int) -> Shards:
        """Treat a message as the shards of one tensor, since it is not known where in it the parameters are."""
        return self._of((self._compressor.for_shape((size * self._comm.size,)),), (size,))


class _Scattered(NamedTuple):
    """The saved state of one reduce-scatter."""

    calls: int
    skipped: int
    residual: torch.Tensor | None
    owing: Unit
    """The parameters that the residual belongs to."""


class ScatteredGradients(_Sharded):
    """The compressed reduce-scatter of one unit.

    It averages over the ranks over which the unit is sharded, and compresses the parameters that ``terms`` do not keep
    exact.
    """

    def __init__(self, unit: Unit, compressor: Compressor, comm: TorchCommunicator, terms: Rules) -> None:
        super().__init__(unit, compressor, comm, terms)
        self._calls = 0
        self.skipped = 0
        self._residual: torch.Tensor | None = None
        self._owing = unit
        self._padding: dict[tuple[str, ...], torch.Tensor] = {}
        if terms.feedback:
            self._shards(unit).require_contraction()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,  # noqa: ARG002 - the one that `comm` was made from
        op: Any,
        async_op: bool = False,  # noqa: ARG002 - backward passes wait for it at once
    ) -> None:
        """Average ``input_tensor`` over the ranks, and put this rank's shards into ``output_tensor``."""
        factor = self._factor(op)
        unit = self._unit.trained()
        shards = self._for(unit, output_tensor.shape[0])
        residual = self._owed(unit, shards, input_tensor) if self._terms.feedback else None
        shards = shards or self._joined(output_tensor.shape[0])
        key = Key(seed=self._terms.seed, step=self._calls, tensor=self._stream)
        self._calls += 1
        try:
            what = f"the gradients of backward pass {self._calls}"
            mean, new = self._run(shards.scatter_mean(input_tensor, residual, key), what)
        except NonFiniteError as error:
            self.skipped += 1
            output_tensor.fill_(torch.nan)
            self._terms.refuse(error)
            return
        if new is not None:
            # A saved state holds the parameters' residuals without padding.
            new[self._padding_of(unit)] = 0
        self._residual, self._owing = new, unit
        output_tensor.copy_(mean if factor == 1 else mean * factor)

    def _factor(self, op: Any) -> float:
        """Return the ratio of a reduction's result to the mean."""
        if op == ReduceOp.AVG:
            return 1
        if op == ReduceOp.SUM:
            return self._comm.size
        raise ValueError(
            f"{self._unit.label} has a gradient_divide_factor, which torch makes a part of its reduction {op!r}: call "
            "set_force_sum_reduction_for_comms(True) too, so that FSDP2 itself divides"
        )

    def _padding_of(self, unit: Unit) -> torch.Tensor:
        """Return the positions of the padding in a message of a unit."""
        if unit.names not in self._padding:
            self._padding[unit.names] = unit.padding(self._comm.size)
        return self._padding[unit.names]

    def _owed(self, unit: Unit, shards: Shards | None, like: torch.Tensor) -> torch.Tensor:
        """Return the residual to add to a message with a unit's gradients."""
        if shards is None:
            raise ValueError(
                f"feedback is True, but some parameters of {self._unit.label} have no gradient, and torch does not "
                "tell which: call set_reduce_scatter_unused_params(True) to give them zeros, or use an unbiased "
                "compressor with feedback=False"
            )
        if self._residual is None:
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            return torch.zeros(like.shape, dtype=dtype, device=like.device)
        _require_same(self._owing, unit)
        return self._residual

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor."""
        if self._residual is not None:
            self._residual *= factor

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by name, as whole tensors, and the counters."""
        residuals = {}
        if self._residual is not None:
            unit = self._owing
            residuals = dict(zip(unit.names, unit.to_whole(self._residual, self._comm.size), strict=True))
        saved = {"calls": self._calls, "skipped": self.skipped}
        digests = sealed(_flat(saved, residuals))[DIGESTS]
        return {**saved, "residuals": residuals, DIGESTS: digests}

    def read(self, saved: Sequence[Any]) -> _Scattered:
        """Return what saved states hold, for `agreed`: the counters, and the mean of the residuals."""
        where, owing = f"the state of {self._unit.label}", self._unit
        calls, skipped, residual = set(), 0, None
        for one in saved:
            counters = {key: read(one, key, Whole(), where) for key in ("calls", "skipped")}
            residuals = self._residuals(read(one, "residuals", Entries(), where))
            if DIGESTS in one:
                require_intact({**_flat(counters, residuals), DIGESTS: read(one, DIGESTS, Text(), where)})
            calls.add(counters["calls"])
            skipped += counters["skipped"]
            if residuals:
                unit = self._unit.only(residuals)
                owing = unit if residual is None else _common(owing, unit)
                vector = unit.to_vector(list(residuals.values()), self._comm.size)
                residual = vector if residual is None else residual + vector
        if len(calls) != 1:
            raise ValueError(
                f"the states were saved after {sorted(calls)} exchanges of {self._unit.label}; expected the same "
                "number in all states"
            )
        if residual is not None:
            residual = (residual / len(saved)).to(self._unit.params[0].device)
        return _Scattered(calls.pop(), skipped // len(saved), residual, owing)

    def _residuals(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a state's residuals by the names of the trained parameters; empty if the state has no residuals."""
        unit, label = self._unit.only(saved), self._unit.label
        if saved and not self._terms.feedback:
            raise ValueError(f"the state has residuals of {label}; feedback is False here")
        if saved and tuple(saved) != unit.names:
            raise ValueError(
                f"{label} has the parameters {self._unit.names}; the state has {tuple(map(shown, saved))}"
            )
        found = {name: read(saved, name, NumericArray(), f"the state of {label}") for name in saved}
        for (name, residual), p in zip(found.items(), unit.params, strict=False):
            if residual.shape != p.shape:
                raise ValueError(
                    f"{name} has the shape {tuple(p.shape)}; the residual has {tuple(residual.shape)}"
                )
            if dtype_name(residual.dtype) not in ("float32", "float64"):
                raise ValueError(
                    f"the residual of {name} has dtype {residual.dtype}; expected float32 or float64"
                )
        return found

    def agreed(self, known: _Scattered) -> _Scattered:
        """Return ``known`` if the residuals on all ranks belong to the same parameters, else raise; collective."""
        handshake(self._comm, {"residuals of": known.owing.names}, like=self._unit.own_shards(1)[0])
        return known

    def load(self, agreed: _Scattered) -> None:
        """Continue from what `agreed` returned."""
        self._calls, self.skipped, self._residual, self._owing = agreed


class GatheredWeights(_Sharded):
    """The compressed all-gather of one unit.

    With ``changes`` only the changes since the last all-gather are compressed.

    A step gathers the same weights several times: in the forward pass, again in the backward pass, and where
    activations are recomputed. All these calls must return the same decoded weights. So draws depend on the weights and
    not on the number of calls, and unchanged weights have no further change to send.
    """

    def __init__(
        self, unit: Unit, compressor: Compressor, comm: TorchCommunicator, terms: Rules, *, changes: bool
    ) -> None:
        super().__init__(unit, compressor, comm, terms)
        self._changes = changes
        self._last: torch.Tensor | None = None
        self._sent = 0
        if changes:
            try:
                self._shards(unit).require_contraction()
            except ValueError as error:
                raise ValueError(
                    f"weight_changes is True, but weights={compressor.spec} promises no contraction; expected a "
                    "compressor that promises one, such as qcomp.Scaled(...) around it, or the same with more levels "
                    "or smaller buckets"
                ) from error

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,  # noqa: ARG002 - it is complete on return
    ) -> None:
        """Put the weights of all ranks into ``output_tensor``, with the same decoded values on all ranks."""
        if group.size() != self._comm.size:
            raise ValueError(
                f"{self._unit.label} is gathered over {group.size()} ranks, but sharded over {self._comm.size}: "
                "reshard_after_forward must be True or False where weights are compressed"
            )
        if input_tensor.dtype == torch.uint8:
            raise ValueError(
                f"{self._unit.label} has parameters of several dtypes, which torch gathers as bytes: give them one "
                "dtype, or set weights=None"
            )
        size = input_tensor.shape[0]
        shards = self._for(self._unit, size) or self._joined(size)
        needs_mark = self._changes or self._compressor.traits.random
        mark = mark_of(input_tensor) if needs_mark else 0
        key = Key(seed=self._terms.seed, step=mark, tensor=self._stream, hop=_WEIGHTS_HOP)
        what = "the weights"
        if self._changes:
            self._last = self._run(self._changes_in(shards, input_tensor, mark, key), what)
            output_tensor.copy_(self._last)
            return
        into = output_tensor if output_tensor.dtype in (torch.float32, torch.float64) else None
        found = self._run(shards.gather(input_tensor, key, into=into), what)
        if found is not output_tensor:
            output_tensor.copy_(found)

    def _changes_in(self, shards: Shards, own: torch.Tensor, mark: int, key: Key) -> Stages[Any]:
        """Return all weights: the last weights plus the changes since then. The first call gathers them exactly."""
        sent, self._sent = self._sent, mark
        found: Any
        if self._last is None:
            found = yield from self._of((Identity(),), (shards.size,)).gather(own, key)
        else:
            if sent == mark:  # a change of zero
                own = self._last[shards.rank * shards.size :][: shards.size]
            found = yield from shards.gather_changes(own, self._last, key)
        return found

    def forget(self) -> None:
        """Let the next call gather all weights exactly."""
        self._last = None


class ReplicatedGradients(BeforeSteps):
    """The compressed mean over replicas of one unit's gradients, which FSDP2 has reduced inside a shard group.

    The ranks of ``comm`` hold the same shards.
    """

    def __init__(
        self, unit: Unit, compressor: Compressor, comm: TorchCommunicator, terms: Rules, topology: str
    ) -> None:
        super().__init__(unit.params)
        self._unit = unit
        self._compressor = compressor
        self._comm = comm
        self._terms = terms
        self._topology = topology
        self._trained = unit.trained()
        self._kept: torch.Tensor | None = None
        self._mean = self._mean_of(self._trained)
        self._state = self._begin(self._mean, self._trained)

    @property
    def waits(self) -> bool:
        """Whether gradients still await the replicas' mean."""
        return self._kept is not None

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer would use the zeros that stand for gradients not yet averaged over the replicas."""
        if any(p.grad is not None for p in self.of(optimizer)):
            raise RuntimeError(
                f"the replicas have not averaged the gradients of {self._unit.label}, whose backward passes all came "
                "after set_requires_all_reduce(False): call set_requires_all_reduce(True) before the last backward "
                "pass of a step"
            )

    def _mean_of(self, unit: Unit) -> GradientMean:
        """Return the mean of the gradients of these parameters."""
        nothing = all(self._terms.exact[name] for name in unit.names)
        return GradientMean(
            compressor=Identity() if nothing else self._compressor,
            averaging=Averaging(topology=self._topology, feedback=self._terms.feedback and not nothing),
            exact=None if nothing else _Chosen(self._terms.exact),
            exact_iterations=0,
            seed=self._terms.seed,
        )

    def _begin(self, mean: GradientMean, unit: Unit) -> OptimizerState | None:
        """Return the first state of a unit's mean, None if the unit has no parameters; collective."""
        return mean.init(unit.own_shards(self._unit.shards), self._comm, unit.names) if unit.params else None

    @property
    def skipped(self) -> int:
        """How often the gradients were not finite on some rank."""
        return 0 if self._state is None else self._state.skipped

    def __call__(self, gradients: torch.Tensor) -> None:
        """Replace this rank's gradients by their mean over the replicas."""
        unit = self._unit.trained()
        sizes = unit.sizes(unit.shards)
        if gradients.shape[0] != sum(sizes):
            raise ValueError(
                f"{unit.label} has gradients of {gradients.shape[0]} elements, but shards of {sum(sizes)}: some "
                "parameters have no gradient, and torch does not tell which: call "
                "set_reduce_scatter_unused_params(True)"
            )
        state = self._follow(unit)
        kept, self._kept = self._kept, None
        if kept is not None and unit.has_gradients:  # else zero_grad has dropped the earlier gradients
            if kept.shape != gradients.shape:
                raise ValueError(
                    f"{unit.label} has gradients of {gradients.shape[0]} elements, but had {kept.shape[0]} in earlier "
                    "backward passes of the step: change requires_grad only after a backward pass with "
                    "set_requires_all_reduce(True)"
                )
            gradients += kept
        if not unit.is_averaged_now:
            self._kept = gradients.clone()
            gradients.zero_()  # FSDP2 adds them to the gradients of the next backward passes
            return
        parts = list(gradients.split(sizes))
        try:
            means, self._state = self._mean.step(parts, parts, state, self._comm)
        except NonFiniteError as error:
            self._state = state._replace(skipped=state.skipped + 1)
            gradients.fill_(torch.nan)
            self._terms.refuse(error)
            return
        for part, mean in zip(parts, means, strict=True):
            part.copy_(mean)

    def _follow(self, unit: Unit) -> OptimizerState:
        """Return the state of the mean of these parameters, which without feedback may change between calls."""
        before = self._state
        if before is not None and unit.names == self._trained.names:
            return before
        if before is not None and self._mean.averaging.feedback:
            _require_same(self._trained, unit)
        mean = self._mean_of(unit)
        state = self._begin(mean, unit)
        assert state is not None  # since there are gradients
        if before is not None:
            state = state._replace(step=before.step, skipped=before.skipped)
        self._trained, self._mean, self._state = unit, mean, state
        return state

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor."""
        if (state := self._state) is not None:
            rescaled = self._mean.mean_of(state).rescaled(state.exchange, factor)
            self._state = state._replace(exchange=rescaled)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of this rank's shards."""
        where = {"shard": self._unit.shard, "shards": self._unit.shards, "axes": self._trained.axes}
        where["trained"] = list(self._trained.names)
        return {**where, "mean": {} if self._state is None else self._mean.state_dict(self._state)}

    def read(self, saved: Sequence[Any]) -> tuple[Unit, Any]:
        """Return the parameters that were trained, and this rank's own state, or a list of its shard's states."""
        where, unit = f"the state of {self._unit.label}", self._unit
        for one in saved:
            shards = read(one, "shards", Whole(), where)
            if shards != unit.shards:
                raise ValueError(f"{unit.label} is in {unit.shards} shards; the state has {shards}")
        trained = reduce(_common, map(self._trained_in, saved))
        own = [
            read(one, "mean", Entries(), where)
            for one in saved
            if read(one, "shard", Whole(), where) == unit.shard
        ]
        if len(saved) == 1 and not own:
            raise ValueError(
                f"the state belongs to shard {saved[0]['shard']} of {unit.label}; expected {unit.shard}"
            )
        return trained, own[0] if len(saved) == 1 else own

    def _trained_in(self, saved: Any) -> Unit:
        """Return the parameters that required a gradient when a state was saved."""
        where = f"the state of {self._unit.label}"
        given = read(saved, "trained", Several(), where)
        names = tuple(read(given, number, Text(), "trained") for number in range(len(given)))
        unit = self._unit.only(names)
        if unit.names != names:
            raise ValueError(
                f"{unit.label} has the parameters {self._unit.names}; the state has {tuple(map(shown, names))}"
            )
        axes = saved.get("axes", unit.axes)  # an older state has none
        if axes != unit.axes:
            raise ValueError(
                f"{unit.label} is sharded along the axes {unit.axes}; the state has residuals of shards along other "
                "axes: use the same shard_placement_fn"
            )
        return unit

    def agreed(self, known: tuple[Unit, Any]) -> tuple[Unit, GradientMean, OptimizerState | None]:
        """Return this rank's state for `load`, agreed with the other replicas; collective over them."""
        unit, saved = known
        handshake(self._comm, {"residuals of": unit.names}, like=self._unit.own_shards(1)[0])
        mean, like = self._mean_of(unit), unit.own_shards(self._unit.shards)
        state = mean.load_state_dict(saved, like, self._comm, unit.names) if unit.params else None
        return unit, mean, state

    def load(self, agreed: tuple[Unit, GradientMean, OptimizerState | None]) -> None:
        """Continue from what `agreed` returned."""
        self._trained, self._mean, self._state = agreed
        self._kept = None


def _common(one: Unit, other: Unit) -> Unit:
    """Return the parameters of two saved states; raise ValueError if they differ."""
    if one.names != other.names:
        raise ValueError(
            f"some states have the parameters {one.names} of {one.label}, others have {other.names}: pass states that "
            "were saved together"
        )
    return one


def _require_same(before: Unit, now: Unit) -> None:
    """Raise ValueError unless the parameters with a residual are exactly the parameters with a gradient."""
    if before.names == now.names:
        return
    changes = {
        "now without a gradient": [name for name in before.names if name not in now.names],
        "now with a gradient": [name for name in now.names if name not in before.names],
    }
    told = "; ".join(f"{how}: {', '.join(names)}" for how, names in changes.items() if names)
    raise ValueError(
        f"requires_grad has changed since the residuals of {now.label} were made ({told}): call compress again, which "
        "starts without residuals, or use an unbiased compressor with feedback=False"
    )


def _flat(counters: Mapping[str, int], residuals: Mapping[str, Any]) -> dict[str, Any]:
    """Return counters and residuals as one flat dict, whose entries get digests."""
    return {**counters, **{f"residual.{name}": x for name, x in residuals.items()}}


@dataclass(frozen=True)
class _Chosen:
    """A policy that repeats earlier choices: `qcomp.torch.fsdp.compress` has made them for whole parameters."""

    exact: Mapping[str, bool]

    def __call__(self, tensors: Sequence[Tensor]) -> list[bool]:
        return [self.exact[tensor.name] for tensor in tensors]

    def __repr__(self) -> str:
        return type(self).__name__  # the ranks compare its choices instead
