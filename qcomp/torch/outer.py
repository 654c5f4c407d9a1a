"""`OuterLoop`: hooks that make the steps of any optimizers of torch the inner steps of an outer loop."""

from __future__ import annotations

import inspect
import json
import os
import struct
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist

from qcomp.checkpoint.saves import Saves
from qcomp.comm.base import Communicator
from qcomp.core.checkpoint.gathering import of_rank, states_in
from qcomp.core.handshake import gather_texts, handshake
from qcomp.core.mean.stages import AllGather, Stages, drive, owned
from qcomp.core.numeric.arrays import from_host_bytes, host_bytes
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.outer.inner_states import InnerStates
from qcomp.core.outer.loop import OuterLoop as CoreLoop
from qcomp.core.outer.overlapped import Overlapped
from qcomp.core.outer.settings import WARMUP
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.parameters import wrapped_in
from qcomp.torch.equal_parameters import of_first_rank
from qcomp.torch.inner_states import InnerOfTorch
from qcomp.torch.optimizer import AveragingOptimizer, communicator, untraced
from qcomp.torch.parameters import plain_products
from qcomp.torch.positions import without_positions
from qcomp.torch.trained_parameters import Trained

_STEP_FILE = torch.optim.Optimizer.register_step_pre_hook.__code__.co_filename
"""The file of torch with the function that runs the hooks of a step."""

LOOPED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers whose steps are the inner steps of a loop."""


class OuterLoop:
    """Lets the steps of torch's optimizers be the inner steps of a `qcomp.OuterLoop`.

    After each step of the last optimizer it counts an inner step. Where an outer round ends, it exchanges, and writes
    the shared parameters into the model. The rest of a script stays as it is. Collective: all ranks make such a loop,
    and then the same number of steps.

    Parameters
    ----------
    model : Module, or iterable of Parameter or of pairs of names and parameters
        What is trained. Parameters that require no gradient stay as they are. A parameter that is given twice counts
        once. Do not wrap a module in DistributedDataParallel, except over the ranks of one node.
    optimizer : torch.optim.Optimizer, or sequence of them
        The inner optimizers, in the order in which they step, or the wrappers of a framework around them.
    loop : qcomp.OuterLoop
        The settings, for instance ``qcomp.outer.diloco(100)``.
    comm : communicator or ProcessGroup, optional
        By default all ranks of torch.distributed if it is initialised, else `qcomp.comm.world`. If the ranks of each
        node train data-parallel, pass a group of the ranks that have the same place in each node. Models that FSDP2
        shards within a node need this too: each rank exchanges its own shards.
    buffers : bool, default True
        Whether a module's dense buffers become the same on all ranks once in ``every`` steps, with the last fragment.
        Running means and variances, as in BatchNorm, become the means and variances of all ranks' data together. Ranges
        of quantisation observers become the range over all ranks, and histories of largest magnitudes (``amax``) their
        maximum. All other buffers are copied from rank 0, as under DistributedDataParallel, since not all have a useful
        mean: a mean of unit vectors is no unit vector. With False no buffer is exchanged.
    inner_state : {"keep", "average", "reset"} or qcomp.outer.InnerStates, default "keep"
        What happens to the states of the inner optimizers. With ``"keep"`` they stay on their ranks. With ``"average"``
        the tensors of a parameter's shape, such as ``exp_avg``, are averaged exactly whenever the parameter is
        exchanged; with `qcomp.outer.InnerStates` each name has a period of its own, and may be compressed. Neither
        works with a ``delay`` or with LBFGS. Counts of steps, tensors of other shapes and copies of parameters stay.
        With ``"reset"`` a parameter's state is dropped when a result of its exchange is applied, so that the next step
        begins as with a new optimizer; values in an optimizer's groups or attributes stay.
    init_sync : bool, default True
        Whether all ranks get rank 0's parameters, also those that are not trained, and its shared buffers when the loop
        is made. If False, the ranks only compare the trained parameters.

    Raises
    ------
    ValueError
        If a parameter has no values yet, or shares memory with another; if an optimizer has parameters that ``model``
        does not have, or has a loop already; or if ``inner_state`` does not fit the optimizers or the loop. On every
        rank, if the model or an optimizer of qcomp averages over all these ranks in every step. A step raises it before
        it changes anything: if, after the loop was made, an optimizer received other parameters, the model got other
        tensors, or a parameter began to require a gradient; or, on every rank, if a state that ``inner_state`` names is
        due and no optimizer has it.
    MismatchError
        On every rank, if the ranks differ in settings, or with ``init_sync=False`` in parameters; or from a step that
        makes buffers equal, if these differ in name, shape or dtype.

    Warns
    -----
    UserWarning
        On every rank, if all ranks have the same outer gradients in the first round, or gradients in the first step of
        a warm-up; see `qcomp.OuterLoop.step`. On a single rank, if no parameter has a gradient in an inner step; if a
        warm-up begins although an optimizer has made steps before, as after loading a checkpoint without the loop's
        state; if an optimizer has what may be a copy of the parameters, and the loop cannot recognise it; or once, if
        an inner optimizer's state was saved without the loop's.

    Notes
    -----
    With a ``delay`` the exchanges travel while inner steps run, see `qcomp.outer.Overlapped`. In the warm-up, the
    gradients of an optimizer's parameters are averaged before each of its steps, so all ranks make the same steps in
    the same order; a parameter that no rank has used stays without a gradient. The loss that a closure returns is
    averaged as well.

    A rank whose GradScaler skips a step reaches the next exchange one iteration later, and the others wait for it. So
    the last exchange of a job may lack a rank: use bfloat16 without a scaler.

    Examples
    --------
    >>> import torch, qcomp.torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> outer = qcomp.torch.OuterLoop(model, optimizer, qcomp.outer.diloco(2))
    >>> for _ in range(3):
    ...     model(torch.ones(1, 4)).sum().backward()
    ...     optimizer.step()
    >>> outer.core_state.step, outer.core_state.numbers
    (3, {'rounds.0': 1.0})
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loop: CoreLoop,
        *,
        comm: Any = None,
        buffers: bool = True,
        inner_state: Literal["keep", "average", "reset"] | InnerStates = "keep",
        init_sync: bool = True,
    ) -> None:
        if not isinstance(loop, CoreLoop):
            raise TypeError(f"loop is {loop!r}; expected a qcomp.OuterLoop, such as qcomp.outer.diloco(100)")
        self._trained = Trained(model, optimizer, buffers=buffers)
        self._comm: Any = communicator(comm)
        optimizers = self._trained.optimizers
        for number, one in enumerate(optimizers):
            if one in LOOPED:
                raise ValueError(
                    f"optimizer {number} has an OuterLoop already; expected one loop: call remove() of the other first"
                )
        self._inner = InnerOfTorch(inner_state, self._trained, loop)
        _require_own_steps(model, self._trained, self._comm)
        handshake(self._comm, self._inner.facts, like=self._trained.values()[0])
        self._loop = loop
        self.weight: float | None = None
        """How much this rank counts in the mean of the next outer gradients, see `qcomp.OuterLoop.step`; not read in
        the warm-up."""
        overlaps = loop.delay and hasattr(self._comm, "start")
        self._running = Overlapped(loop, self._comm) if overlaps else None
        if init_sync:
            self._trained.begin_with(of_first_rank(self._trained.names, self._trained.values(), self._comm))
        self._state = loop.init(self._trained.values(), self._comm, self._trained.names)
        if init_sync:
            with torch.no_grad():
                self._drive(self._trained.first_value_stages(self._state), "first buffers")
        self._calls = StepCalls()
        self._has_begun = False
        self._saves, self._inner_saves = Saves(), _InnerSaves()
        self._hooks = [
            hook
            for one in optimizers
            for hook in (
                one.register_step_pre_hook(self._before),
                one.register_step_post_hook(self._after),
                one.register_state_dict_post_hook(self._inner_saves.note),
            )
        ]
        LOOPED.update(optimizers)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: a copy would have the same communicator, or none."""
        raise TypeError(
            "an OuterLoop cannot be copied or pickled, because it has a communicator: save its state_dict()"
        )

    @property
    def comm(self) -> Communicator:
        """The communicator over which the ranks exchange."""
        found: Communicator = self._comm
        return found

    @property
    def core_state(self) -> OptimizerState:
        """The state of the core's loop."""
        return self._state

    def remove(self) -> None:
        """Wait for messages under way, and take the hooks off the optimizers, which then train this rank alone."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        LOOPED.difference_update(self._trained.optimizers)
        if self._running is not None:
            self._running.close()

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the shared parameters by name, the same on all ranks in every step.

        After an outer round of one fragment without delay they equal the model's own. For a sharded model they are this
        rank's shards.
        """
        trained = self._trained
        return dict(zip(trained.names, self._loop.shared(trained.values(), self._state), strict=True))

    def gather_states(self, to: int = 0) -> None:
        """Give one rank the loops and parameters of all, so that its `state_dict` has them until the next inner step.

        For scripts and frameworks in which one rank saves for all; every rank loads that dict. Collective. Buffers and
        the states of inner optimizers are not gathered: from a checkpoint of one rank, all ranks load that rank's.

        Parameters
        ----------
        to : int
            The rank that will save; it needs memory for the parameters and residuals of all ranks.
        """
        self._inner_saves.has_own = True
        values = self._trained.values()
        own = self._loop.state_dict(values, self._state) | self._trained.positions.saved
        self._saves.gather(own, self._loop, self._state, self._comm, like=values[0], root=to)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's loop and parameters under one key, such as "rank 0 of 2".

        Every rank saves its own dict, with the dicts of its optimizers and, for buffers, of its model; or see
        `gather_states`. As the keys differ, torch.distributed.checkpoint keeps the states of all ranks.

        Warns
        -----
        UserWarning
            Once, if only some ranks save their parameters; see ``state_dict`` of the optimizers in `qcomp.torch`.
        """
        self._inner_saves.has_own = True
        whole = self._loop.state_dict(self._trained.values(), self._state)
        within = self._loop.every + self._loop.delay if self._loop.delay else 0
        self._saves.note(self._loop, self._state, whole, self._comm, within=within)
        own = {key: value.cpu() if hasattr(value, "cpu") else value for key, value in whole.items()}
        own |= self._trained.positions.saved
        # In a tuple, since torch.distributed.checkpoint would read arrays in place before anything is checked.
        return {of_rank(self._state.rank, self._state.size): (own,)} | self._saves.of_all

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        strict: bool = True,
        lost: Literal["raise", "drop"] = "raise",
    ) -> None:
        """Continue from saved states, and write the parameters into the model. Collective.

        Parameters
        ----------
        state_dict : dict, or list of dict
            This rank's own dict, or what torch.distributed.checkpoint has read with a `qcomp.torch.LoadPlanner`, or the
            dicts of all ranks that saved, see `qcomp.OuterLoop.load_state_dict`. A dict saved in the warm-up, or by an
            exact loop at the end of an outer round, may come from any one rank.
        strict, lost
            As for `qcomp.OuterLoop.load_state_dict`.

        Raises
        ------
        ValueError, MismatchError
            As for `qcomp.OuterLoop.load_state_dict`, before anything changes.
        """
        like = [torch.zeros_like(p) for p in self._trained.values()]
        found = states_in(state_dict, self._comm.rank, self._comm.size)
        saved, known = without_positions(found)
        params, state = self._loop.load_state_dict(
            saved, like, self._comm, self._trained.names, strict=strict, lost=lost
        )
        self._saves.forget()
        self._trained.look_anew()
        self._trained.write(params)
        self._state = state
        # A rank may have read no state, if the job has more ranks than before.
        texts = self._drive(gather_texts(json.dumps(known), state.size, like[0]), "copies of parameters")
        self._trained.positions.resume(map(json.loads, texts))

    @untraced  # in a compiled step
    def _before(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Average the gradients in the warm-up: the present gradients, or the gradients that a closure will compute."""
        if not self._calls.enter(optimizer):
            return None
        if optimizer is self._trained.optimizers[0]:
            self._trained.begin_step()
        if not self._has_begun and not self._state.step:
            self._require_unchanged()
            self._warn_of_a_second_warmup()
        self._has_begun = True
        if self._state.stage != WARMUP:
            return None
        (of_step, *given), named = args, dict(kwargs)
        closure = named.pop("closure", given[0] if given else None)
        if closure is None:
            self._average(optimizer)
            return None

        def averaged() -> Any:
            loss = closure()
            self._average(optimizer)
            return self._drive(
                _mean_loss_stages(loss, self._state, self._trained.values()[0]), "the mean loss"
            )

        return (of_step, averaged, *given[1:]), named

    @torch.no_grad()
    def _require_unchanged(self) -> None:
        """Raise RuntimeError if parameters have changed between the making of the loop and the first inner step."""
        shared = self._loop.shared(self._trained.values(), self._state)
        changing = self._trained.changing_in_forward
        for name, value, first in zip(self._trained.names, self._trained.values(), shared, strict=True):
            if name not in changing and not torch.equal(value, first):
                raise RuntimeError(
                    f"the parameter {name!r} has changed since the loop was made, which would count as an inner step: "
                    "make the loop after everything that changes parameters before the first step, such as loading "
                    "weights, another optimizer, or a forward pass that writes to them"
                )

    def _warn_of_a_second_warmup(self) -> None:
        """Warn if a warm-up begins, and an optimizer has made steps before."""
        for number, optimizer in enumerate(self._trained.optimizers):
            if self._state.stage == WARMUP and _has_stepped(optimizer):
                warn_caller(
                    f"a warm-up of {self._loop.warmup} steps begins, but optimizer {number} has made steps before: if "
                    "this run resumes from a checkpoint, load the state_dict() of its OuterLoop too; otherwise the "
                    "run repeats the warm-up and loses what the ranks owed. If the loop is new, ignore this warning"
                )
                return

    @torch.no_grad()
    def _average(self, optimizer: Any) -> None:
        """Replace the gradients of an optimizer's parameters by their means."""
        number = self._trained.optimizers.index(optimizer)
        stages = self._trained.average_stages(self._loop, self._state, [optimizer])
        self._drive(stages, f"gradients of optimizer {number}")

    def _drive(self, stages: Stages[Any], what: str) -> Any:
        """Run a computation in stages, and label its exchanges as exchanges of this loop's next step."""
        owner = owner_of(self._loop, self._state)
        return drive(owned(stages, owner._replace(doing=f"{owner.doing}, {what},")), self._comm)

    @untraced
    @torch.no_grad()
    def _after(self, optimizer: Any, *_: Any) -> None:
        """Count an inner step, exchange where it is due, and write the result into the model."""
        if not self._calls.leave(optimizer) or optimizer is not self._trained.optimizers[-1]:
            return
        before, values = self._state, self._trained.values()
        self._trained.look(self._loop.every, exchanges=self._loop.exchanges(before))
        with plain_products(values[0]):
            if self._running is None:
                params, state = self._loop.step(values, before, self._comm, shares=True, weight=self.weight)
            else:
                params, state = self._running.step(values, before, shares=True, weight=self.weight)
        means = drive(self._inner.stages(state, self.weight), self._comm)
        self._drive(self._trained.buffer_stages(self._loop, before, state), "buffers")
        self._trained.write(params)
        self._inner.write(means, before, state)
        self._saves.forget()
        self._inner_saves.end_step(before.step)
        self._state = state


def _has_stepped(optimizer: Any) -> bool:
    """Return whether an optimizer has made steps, as far as its state tells."""
    if isinstance(optimizer, AveragingOptimizer):
        return bool(optimizer.core_state.step)
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, Mapping)]
    return any(
        bool(entry["step"]) if "step" in entry else entry.get("momentum_buffer") is not None
        for entry in entries
    )


class _InnerSaves:
    """Notices when the states of inner optimizers are saved without the state of their loop."""

    def __init__(self) -> None:
        self.has_own = False
        self._has_inner = False
        self._has_warned = False

    def note(self, *_: Any) -> None:
        """Take note that the state of an inner optimizer is saved."""
        self._has_inner = True

    def end_step(self, step: int) -> None:
        """Warn once, after the next inner step, if only an inner state was saved after inner step ``step``."""
        if step and self._has_inner and not self.has_own and not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"the state of an inner optimizer was saved after step {step}, but the state of its OuterLoop was "
                "not: a run that resumes without the loop's state begins a new loop, repeats its warm-up, and loses "
                "what the ranks owed. Save outer.state_dict() too; where one rank saves for all, call "
                "outer.gather_states() on all ranks before"
            )
        self._has_inner = self.has_own = False


class StepCalls:
    """The calls of `step` that are running, to tell a whole step from a part of one.

    torch runs an optimizer's hooks around `step` of its class, and again if that method calls `step` of the base class.
    A call that raises has no post-hook, so calls that are no longer on the stack are dropped.
    """

    def __init__(self) -> None:
        self._running: dict[int, list[FrameType]] = {}

    def enter(self, optimizer: Any) -> bool:
        """Return whether the call that runs this pre-hook is the outermost for its optimizer."""
        calls, stack = self._on_stack(optimizer)
        calls.append(next(frame for frame in stack if frame.f_code.co_filename == _STEP_FILE))
        self._running[id(optimizer)] = calls
        return len(calls) == 1

    def leave(self, optimizer: Any) -> bool:
        """Return whether the call that runs this post-hook is the outermost for its optimizer."""
        calls, _ = self._on_stack(optimizer)
        self._running[id(optimizer)] = calls[:-1]
        return len(calls) <= 1

    def _on_stack(self, optimizer: Any) -> tuple[list[FrameType], list[FrameType]]:
        """Return the calls for an optimizer that are running, and all frames, beginning with the innermost."""
        stack, frame = list[FrameType](), inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_filename != __file__:  # a frame that held itself would be freed late
                stack.append(frame)
            frame = frame.f_back
        held = set(map(id, stack))
        return [call for call in self._running.get(id(optimizer), []) if id(call) in held], stack


def _mean_loss_stages(loss: Any, state: OptimizerState, like: Any) -> Stages[Any]:
    """Return the mean of all ranks' closure losses, with the same bits on all; if any is no number, this rank's own.

    Otherwise an optimizer that decides by losses, such as LBFGS, would decide differently on each rank.
    """
    loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
    is_number = isinstance(loss, float) or (
        isinstance(loss, torch.Tensor) and loss.is_floating_point() and loss.numel() == 1
    )
    own = struct.pack("<?d", is_number, float(loss) if is_number else 0.0)
    arrived = yield AllGather(from_host_bytes(own, like), (len(own),) * state.size)
    are_numbers, losses = zip(*[struct.unpack("<?d", host_bytes(part)) for part in arrived], strict=True)
    if not all(are_numbers):
        return loss
    mean = sum(losses) / state.size
    return mean if isinstance(loss, float) else torch.full_like(loss, mean)


def _require_own_steps(model: Any, trained: Trained, comm: Communicator) -> None:
    """Raise ValueError on every rank of a loop if one group averages over all of them in every step; collective.

    A group is identified by bytes that its first rank draws. Ranks of the loop may share such a group, but not all of
    them.
    """
    drawn = [
        (
            f"optimizer {number}",
            "one with comm=qcomp.comm.LocalCommunicator.alone()",
            _drawn_by_first(one.comm),
        )
        for number, one in enumerate(trained.optimizers)
        if isinstance(one, AveragingOptimizer)
    ]
    first = trained.tensors[0]
    wrapped = wrapped_in(model)
    if wrapped is not None:
        cure = "model.module, in steps without the wrapper"
        drawn.append(("model", cure, _broadcast(first.device, wrapped.process_group)))
    elif hasattr(first, "device_mesh"):
        groups = first.device_mesh.get_all_groups()
        drawn += [
            ("model, being sharded,", "a whole one", _broadcast(first.device, group)) for group in groups
        ]
    for what, cure, own in drawn:
        found = {bytes(x.tolist()) for x in comm.all_gather(own, [len(own)] * comm.size)}
        if len(found) < min(2, comm.size):
            raise ValueError(
                f"{what} averages over all {comm.size} ranks of the loop in every step; expected {cure}, or one that "
                "averages only over the ranks of a node"
            )


def _broadcast(on: torch.device, group: Any) -> torch.Tensor:
    """Return what the first rank of a process group has drawn."""
    drawn = _drawing().to(on)
    dist.broadcast(drawn, group=group, group_src=0)
    return drawn.cpu()


def _drawn_by_first(comm: Communicator) -> torch.Tensor:
    """Return what the first rank of a communicator has drawn."""
    drawn = _drawing()
    return torch.as_tensor(comm.all_gather(drawn, [len(drawn)] * comm.size)[0])


def _drawing() -> torch.Tensor:
    """Return 16 random bytes, without torch's generator, whose draws belong to the script."""
    return torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
