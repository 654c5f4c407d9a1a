"""What an outer loop of torch trains: the parameters of a model, its buffers, and the inner optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from qcomp.core.mean.stages import Stages
from qcomp.core.optimizers.unused import used_anywhere, warn_of_no_gradient
from qcomp.core.outer.fragment_state import take
from qcomp.core.outer.loop import OuterLoop as CoreLoop
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.parameters import plain_name, wrapped_in
from qcomp.private_names.torch import found_inf, grad_scale, runs_hooks, take_off_scale
from qcomp.torch.buffers import buffers_of, combine_stages, frozen_of, of_first_stages, own_part
from qcomp.torch.parameters import inside_wrapper, require_memory_of_its_own
from qcomp.torch.positions import Positions, entries

_LOOKS = 100
"""At least this many of the first inner steps look for positions; later, only steps that exchange do."""


class Trained:
    """What an outer loop trains: the parameters of a model, its buffers, and the optimizers that make the inner steps.

    Call its methods that change tensors under ``torch.no_grad()``.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        buffers: bool,
    ) -> None:
        self._given = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        optimizers = [inside_wrapper(one) for one in self._given]
        if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
            raise TypeError(f"optimizer is {optimizer!r}; expected a torch.optim.Optimizer, or several")
        for number, one in enumerate(optimizers):
            if not runs_hooks(one):
                raise TypeError(
                    f"optimizer {number} is a {type(one).__name__}, whose __init__ does not call "
                    "torch.optim.Optimizer.__init__, so torch runs no hooks and the loop would never notice a step. "
                    "Call it there, or give the loop the optimizer that this one wraps"
                )
        named = _named(model)
        self.optimizers = optimizers
        require_memory_of_its_own(named)
        self.names = tuple(name for name, _ in named)
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._shares_buffers = buffers
        self.tensors = [p for _, p in named]
        self.positions = Positions(optimizers)
        self.positions.begin(self.tensors)
        self._looked = 0
        self._known = {id(p) for p in self.tensors}
        self.require_all()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The model's present buffers: a module may have replaced earlier ones."""
        return [] if self._model is None else list(self._model.buffers())

    def require_all(self) -> None:
        """Raise ValueError unless the loop knows all parameters that the optimizers move, and the model has them."""
        of_model = None if self._model is None else {id(p) for p in self._model.parameters()}
        for name, p in zip(self.names, self.tensors, strict=True):
            if of_model is not None and id(p) not in of_model:
                raise ValueError(
                    f"the parameter {name!r} of the model has been replaced by another tensor, as by "
                    "load_state_dict(assign=True), and steps would not train that tensor: make optimizer and loop "
                    "again"
                )
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.requires_grad and id(p) not in self._known:
                        raise ValueError(
                            f"optimizer {number} has a parameter of shape {tuple(p.shape)} that the model did not have "
                            "when the loop was made, or that required no gradient then; expected only parameters that "
                            "the loop averages, since others would differ between the ranks: make the loop again"
                        )
        for number, (given, inner) in enumerate(zip(self._given, self.optimizers, strict=True)):
            own = getattr(given, "state", None)
            if given is not inner and own is not inner.state and (entry := next(entries(own), None)):
                raise ValueError(
                    f"optimizer {number} is a {type(given).__name__} around another optimizer and keeps a state "
                    f"{'.'.join(map(str, entry[0][1:]))!r} of its own, such as slow weights: the loop "
                    "exchanges in the step of the inner optimizer, and then the wrapper would undo the exchange. Give "
                    "the loop one optimizer class that does what both do"
                )

    @torch.no_grad()
    def begin_step(self) -> None:
        """Call `require_all`; before the first step after a start, also warn of what may be copies of parameters."""
        self.require_all()
        if not self._looked:
            self.positions.warn_of_strays()

    def look(self, every: int, *, exchanges: bool) -> None:
        """Inspect an inner step, before its exchange if it has one; warn if no parameter has a gradient.

        Positions are looked for before each exchange, and in the first steps: some equal their parameters only after
        the first step, or after every k-th step.
        """
        if all(p.grad is None for p in self.tensors):
            warn_of_no_gradient("on this rank")
        if self._looked < max(every, _LOOKS) or exchanges:
            self.positions.note()
        self._looked += 1

    def look_anew(self) -> None:
        """Look for positions in the states that optimizers have loaded, before parameters are written."""
        self.positions.forget()
        self.positions.note()
        self._looked = 0

    def values(self) -> list[Any]:
        """Return the parameters of this rank, in the model's memory."""
        return [own_part(p) for p in self.tensors]

    def first_value_stages(self, state: OptimizerState) -> Stages[None]:
        """Give all ranks the frozen parameters of rank 0, and its buffers, if the loop shares buffers."""
        if self._model is not None:
            values = self.values()
            buffers = buffers_of(self._model, values) if self._shares_buffers else {}
            yield from of_first_stages(frozen_of(self._model) | buffers, state, values[0])

    @torch.no_grad()
    def begin_with(self, params: Sequence[Any]) -> None:
        """Write parameters into the model before the first step, and move the optimizers' copies of them."""
        self.positions.note(at_start=True)
        self.write(params)
        self.positions.forget()
        self.positions.begin(self.tensors)

    def write(self, params: Sequence[Any]) -> None:
        """Write what has changed into the model, and move the copies of it in the optimizers' states."""
        for p, new in zip(self.tensors, params, strict=True):
            value = own_part(p)
            if new.data_ptr() != value.data_ptr():
                self.positions.move(p, new)
                value.copy_(new)

    @property
    def changing_in_forward(self) -> set[str]:
        """The names of the parameters that forward passes change: of embeddings that renormalise their rows."""
        layers = [] if self._model is None else self._model.modules()
        changed = {id(layer.weight) for layer in layers if getattr(layer, "max_norm", None) is not None}
        return {name for name, p in zip(self.names, self.tensors, strict=True) if id(p) in changed}

    def average_stages(
        self, loop: CoreLoop, state: OptimizerState, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Stages[None]:
        """Replace the gradients that optimizers use by their means, in the warm-up.

        A parameter that no rank uses stays without a gradient. With ``fused=True``, a GradScaler leaves unscaling and
        skipping to the optimizer's step. So gradients are unscaled here, and a step that overflows on any rank is
        skipped on all.
        """
        scales = {id(p): _scale(one) for one in optimizers for g in one.param_groups for p in g["params"]}
        members = tuple(number for number, p in enumerate(self.tensors) if id(p) in scales)
        if not members:
            return
        tensors = [self.tensors[number] for number in members]
        values, used = [own_part(p) for p in tensors], [p.grad is not None for p in tensors]
        overflows = any(map(_overflows, optimizers))
        *anywhere, is_skipped = yield from used_anywhere([*used, overflows], state, values[0])
        if is_skipped:
            for one in optimizers:
                _skip(one)
            return
        grads = []
        for p, value, is_used in zip(tensors, values, used, strict=True):
            # A gradient may differ in dtype from its parameter; a missing gradient counts as zeros.
            grad = _unscaled(own_part(p.grad), scales[id(p)]) if is_used else torch.zeros_like(value)
            grads.append(grad.to(torch.promote_types(value.dtype, torch.float32)))
        means = yield from loop.average_stages(grads, take(state, members, loop.compression))
        for p, mean, is_used in zip(tensors, means, anywhere, strict=True):
            if is_used:
                own = getattr(p, "grad_dtype", p.dtype)
                if p.grad is None or own is None:  # None allows any dtype, so ranks may differ
                    p.grad = torch.zeros_like(p, dtype=own or mean.dtype)
                own_part(p.grad).copy_(mean)
        for one in optimizers:
            take_off_scale(one)  # else the step would unscale again

    def buffer_stages(self, loop: CoreLoop, before: OptimizerState, after: OptimizerState) -> Stages[None]:
        """Make the buffers the same on all ranks, if the step between two states has applied the last fragment."""
        last = f"rounds.{loop.fragments - 1}"
        if self._model is None or not self._shares_buffers or after.numbers[last] == before.numbers[last]:
            return
        values = self.values()
        yield from combine_stages(buffers_of(self._model, values), before, values[0])


def _scale(optimizer: Any) -> float:
    """Return the scale of the gradients that a GradScaler leaves to an optimizer's step, or 1 without a GradScaler."""
    scale = grad_scale(optimizer)
    return 1.0 if scale is None else float(scale)


def _unscaled(grad: Any, scale: float) -> Any:
    """Return a gradient without its scale, in the same memory if the scale is 1."""
    return grad if scale == 1 else grad / scale


def _overflows(optimizer: Any) -> bool:
    """Return whether a GradScaler has found an infinite gradient, and left it to the optimizer to skip the step."""
    found = found_inf(optimizer)
    return found is not None and bool(found)


def _skip(optimizer: Any) -> None:
    """Let an optimizer under a GradScaler skip its step, as if this rank's own gradients had overflowed."""
    found = found_inf(optimizer)
    if found is not None:
        found.fill_(1.0)
    for group in optimizer.param_groups:  # optimizers of qcomp look at the gradients
        for p in group["params"]:
            if p.grad is not None:
                p.grad.fill_(torch.nan)


def _named(model: Any) -> list[tuple[str, Any]]:
    """Return the parameters that are trained, each once, under its first name."""
    wrapped = wrapped_in(model)
    model = model if wrapped is None else wrapped.module
    given: Iterable[Any] = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    numbered = enumerate(given)
    pairs = [entry if isinstance(entry, tuple) else (str(number), entry) for number, entry in numbered]
    found: dict[int, tuple[str, Any]] = {}
    for name, p in pairs:
        if p.requires_grad:
            found.setdefault(id(p), (plain_name(name), p))
    if not found:
        raise ValueError("model has no parameter that requires a gradient; expected at least one")
    return list(found.values())
