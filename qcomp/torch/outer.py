"""The outer loop around any optimizers of torch: they step as before, and hooks do the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from qcomp.comm.base import Communicator
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.stages import drive
from qcomp.core.optimizers.compression import EXACT
from qcomp.core.optimizers.unused import used_anywhere
from qcomp.core.outer.loop import OuterLoop as CoreLoop
from qcomp.core.outer.overlapped import Overlapped
from qcomp.core.state import OptimizerState
from qcomp.torch.optimizer import communicator

__all__ = ["OuterLoop"]


class OuterLoop:
    """Lets the steps of torch's optimizers be the inner steps of a `qcomp.OuterLoop`.

    After each step of the last optimizer it takes what the step has made, and where an outer round ends it exchanges,
    and writes the shared parameters into the model. Everything else of a script stays. Collective: all ranks make one,
    with equal parameters, and then the same number of steps.

    Parameters
    ----------
    model : Module, or iterable of Parameter or of pairs of names and parameters
        What is trained. Parameters that require no gradient stay as they are. A module is not wrapped in
        DistributedDataParallel, unless among the ranks of one worker.
    optimizer : torch.optim.Optimizer, or sequence of them
        The inner optimizers, in the order in which they step. Their states stay on their ranks.
    loop : qcomp.OuterLoop
        The settings, for instance ``qcomp.outer.diloco(100)``.
    comm : communicator, optional
        By default that of torch.distributed if it is initialised, else `qcomp.comm.world`. If a worker has several
        ranks, one of the ranks that have the same place in each worker. So must it be for models that FSDP2 shards
        within a worker: each rank exchanges its own shards.
    buffers : bool, default True
        Whether a module's floating-point buffers, such as the running statistics of BatchNorm, are averaged exactly
        once in ``every`` steps, with the last fragment. Others, and with False all, stay on their ranks.

    Raises
    ------
    ValueError
        If an optimizer has parameters that ``model`` has not, or the model averages over all ranks itself.
    MismatchError
        On every rank, if the ranks differ in settings or parameters.

    Notes
    -----
    With a ``delay`` the exchanges travel while inner steps run, see `qcomp.outer.Overlapped`. In the warm-up, gradients
    are averaged before the first optimizer steps; a parameter that no rank has used stays without a gradient. A
    GradScaler that skips a step on one rank alone makes the ranks differ in their steps, which raises `MismatchError`
    at the next exchange: use bfloat16 without a scaler.

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
        comm: Communicator | None = None,
        buffers: bool = True,
    ) -> None:
        if not isinstance(loop, CoreLoop):
            raise TypeError(f"loop is {loop!r}; expected a qcomp.OuterLoop, such as qcomp.outer.diloco(100)")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
            raise TypeError(f"optimizer is {optimizer!r}; expected a torch.optim.Optimizer, or several")
        named = _named(model)
        self._names = tuple(name for name, _ in named)
        self._tensors = [p for _, p in named]
        _require_all(optimizers, self._tensors)
        self._buffers: list[Any] = []
        if buffers and isinstance(model, torch.nn.Module):
            self._buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
        self._comm: Any = comm or communicator()
        if isinstance(model, DistributedDataParallel) and model.process_group.size() == self._comm.size > 1:
            raise ValueError(
                f"model is a DistributedDataParallel over all {self._comm.size} ranks, which averages in every step; "
                "expected model.module, or one over the ranks of a worker"
            )
        self._loop = loop
        overlaps = loop.delay and hasattr(self._comm, "start")
        self._running = Overlapped(loop, self._comm) if overlaps else None
        self._state = loop.init(self._values(), self._comm, self._names)
        self._hooks = [
            one.register_step_pre_hook(partial(self._before, is_first=not number))
            for number, one in enumerate(optimizers)
        ]
        self._hooks.append(optimizers[-1].register_step_post_hook(self._after))

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
        """The state of the loop of the core."""
        return self._state

    def remove(self) -> None:
        """Take the hooks off the optimizers, which then train this rank alone."""
        for hook in self._hooks:
            hook.remove()

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the shared parameters by name, the same on all ranks in every step.

        After an outer round of one fragment without delay they are the model's own. Of a sharded model they are this
        rank's shards.
        """
        return dict(zip(self._names, self._loop.shared(self._values(), self._state), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return everything of this rank's loop and its parameters, as `qcomp.OuterLoop.state_dict` does.

        Every rank saves its own, with that of its optimizers; and that of its model, for buffers.
        """
        return self._loop.state_dict(self._values(), self._state)

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue from saved states, and write the parameters into the model. Collective.

        Parameters
        ----------
        state_dict : dict, or list of dict
            This rank's own, or those of all ranks that saved, see `qcomp.OuterLoop.load_state_dict`.
        strict : bool
            As there.

        Raises
        ------
        ValueError, MismatchError
            As there; nothing has changed then.
        """
        like = [torch.zeros_like(p) for p in self._values()]
        params, state = self._loop.load_state_dict(state_dict, like, self._comm, self._names, strict=strict)
        self._take(params, state)

    def _before(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_first: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Average the gradients in the warm-up: those that there are, or that a closure will compute."""
        if self._state.stage != "warmup":
            return None
        (of_step, *given), named = args, dict(kwargs)
        closure = named.pop("closure", given[0] if given else None)
        if closure is None:
            if is_first:
                self._average()
            return None

        def averaged() -> Any:
            loss = closure()
            self._average()
            return loss

        return (of_step, averaged, *given[1:]), named

    @torch.no_grad()
    def _average(self) -> None:
        """Replace the gradients by their means."""
        state = self._state
        values, used = self._values(), [p.grad is not None for p in self._tensors]
        anywhere = drive(used_anywhere(used, state, values[0]), self._comm)
        grads = [
            _own_part(p.grad) if is_used else torch.zeros_like(value)
            for p, value, is_used in zip(self._tensors, values, used, strict=True)
        ]
        means = drive(self._loop.average_stages(grads, state), self._comm)
        for p, mean, is_used in zip(self._tensors, means, anywhere, strict=True):
            if is_used:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                _own_part(p.grad).copy_(mean)

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        """Take an inner step."""
        before = self._state
        if self._running is None:
            params, state = self._loop.step(self._values(), before, self._comm)
        else:
            params, state = self._running.step(self._values(), before)
        last = f"rounds.{self._loop.fragments - 1}"
        if self._buffers and state.numbers[last] != before.numbers[last]:
            nothing = MeanState(self._comm.rank, self._comm.size, (), ())
            means, _ = drive(EXACT.stages(self._buffers, nothing), self._comm)
            for buffer, mean in zip(self._buffers, means, strict=True):
                buffer.copy_(mean)
        self._take(params, state)

    @torch.no_grad()
    def _take(self, params: Sequence[Any], state: OptimizerState) -> None:
        """Write what has changed into the model."""
        for value, new in zip(self._values(), params, strict=True):
            if new.data_ptr() != value.data_ptr():
                value.copy_(new)
        self._state = state

    def _values(self) -> list[Any]:
        return [_own_part(p) for p in self._tensors]


def _named(model: Any) -> list[tuple[str, Any]]:
    """Return the parameters that are trained, with their names."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    given: Iterable[Any] = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    numbered = enumerate(given)
    pairs = [entry if isinstance(entry, tuple) else (str(number), entry) for number, entry in numbered]
    found = [(name, p) for name, p in pairs if p.requires_grad]
    if not found:
        raise ValueError("model has no parameter that requires a gradient; expected at least one")
    return found


def _own_part(x: Any) -> Any:
    """Return what this rank holds of a tensor, in the same memory: all of it, or its shard of a DTensor."""
    own = x.detach()
    return own.to_local() if hasattr(own, "to_local") else own


def _require_all(optimizers: Sequence[torch.optim.Optimizer], tensors: Sequence[Any]) -> None:
    """Raise ValueError if an optimizer moves a parameter that the loop would leave apart on every rank."""
    known = {id(p) for p in tensors}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in known:
                    raise ValueError(
                        f"optimizer {number} has a parameter of shape {tuple(p.shape)} that model has not; expected "
                        "only parameters of the model, since others would differ between the ranks"
                    )
