"""The base of the optimizers for torch: an optimizer of the core behind torch's interface with parameter groups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist

from qcomp.checkpoint.saves import Saves
from qcomp.comm.base import Communicator
from qcomp.comm.broadcasting import broadcast
from qcomp.comm.launch import world
from qcomp.comm.torch_dist import TorchCommunicator, over_ranks
from qcomp.core.mean.stages import Stages, drive
from qcomp.core.numeric.arrays import to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.unused import settings_since, stages_of_used
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.optimizer import OverlappedOptimizer
from qcomp.integrations.ddp.parameters import inside
from qcomp.private_names.torch import found_inf, grad_scale
from qcomp.torch.buffers import is_plain
from qcomp.torch.equal_parameters import COMPARED, compare_parameters, of_first_rank
from qcomp.torch.group_keys import require_read
from qcomp.torch.group_settings import LiveSettings, compressors_of, exact_of
from qcomp.torch.parameters import (
    inside_wrapper,
    names_of,
    plain_products,
    require_dense,
    require_memory_of_its_own,
)
from qcomp.torch.state_saving import SavedOptimizer

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep torch.compile out of a function: it cannot trace exchanges and kernels."""
    found: _Function = torch.compiler.disable(function)
    return found


def _of_inner(method: _Function) -> _Function:
    """Make a method act on the optimizer inside Fabric's wrapper, whose class inherits the method."""

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        return method(inside_wrapper(self), *args)

    return cast(_Function, call)


class AveragingOptimizer(SavedOptimizer):
    """Base of the optimizers for torch, which themselves average over the ranks.

    Every rank makes the same steps, so `step` and `load_state_dict` are collective, as is making an optimizer.

    Parameters
    ----------
    params : iterable
        Parameters, pairs of names and parameters, or dicts of groups, as for every optimizer of torch.
    defaults : dict
        The settings of groups that do not have their own.
    make : callable
        Returns the optimizer of the core from its settings.
    comm : communicator or ProcessGroup, optional
        The ranks. By default all ranks of torch.distributed if it is initialised, else `qcomp.comm.world`. With
        ``model``, the default is all ranks of the model's process group.
    model : torch.nn.parallel.DistributedDataParallel, optional
        The model whose backward pass the exchange overlaps with; it must have no communication hook.
    init_sync : bool, default True
        Whether all ranks get rank 0's ``params``, frozen ones too. With ``model``, DistributedDataParallel has copied
        them already.
    """

    shared: ClassVar[tuple[str, ...]] = ("betas", "eps")
    """The keys of param_groups besides lr and weight_decay that are read in every step; see `LiveSettings`."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        make: Callable[..., Optimizer],
        comm: Any,
        model: Any = None,
        *,
        init_sync: bool = True,
    ) -> None:
        self._make = make
        self._init_sync = init_sync
        self._model = None if model is None else inside(model)
        self._overlapped: OverlappedOptimizer | None = None
        self._state: OptimizerState | None = None
        self._shown: list[dict[str, Any]] = []
        self._saves = Saves()
        super().__init__(params, defaults)
        if model is None:
            self._comm = communicator(comm)
            self._begin()
        else:
            self._begin()
            self._overlap(comm)

    def _begin(self) -> None:
        """Give all ranks the parameters of rank 0, or compare them, and start with moments of zero."""
        self._frozen = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]
        groups = self.param_groups
        of_groups = [[p for p in group["params"] if p.requires_grad] for group in groups]
        self._tensors = list(chain.from_iterable(of_groups))
        if not self._tensors:
            raise ValueError("params has no parameter that requires a gradient; expected at least one")
        self._fixed = [{key: group[key] for key in self.fixed} for group in groups]
        names = names_of(groups, self._model)
        self._names = tuple(chain.from_iterable(names))
        require_memory_of_its_own(zip(self._names, self._tensors, strict=True))
        self._given = [[(id(p), p.shape) for p in group["params"]] for group in groups]
        make, policies = self._make, self._policies(groups, names)
        self._settings = LiveSettings(lambda **live: make(**policies, **live), names, self.shared)
        if self._model is None:
            optimizer = self._settings.optimizer(groups, 0)
            if self._init_sync:
                self._begin_with_first()
            self._take(optimizer.init(self._values(), self._comm, self._names))

    @torch.no_grad()
    def _begin_with_first(self) -> None:
        """Give all ranks the parameters of rank 0, also those that are frozen: of these, whatever bits they have."""
        frozen = [p for p in self._frozen if is_plain(p) and not hasattr(p, "device_mesh")]
        bits = [p.detach().contiguous().flatten().view(torch.uint8) for p in frozen]
        values = of_first_rank(self._names, self._values(), self._comm, bits)
        self._write(values[: len(self._names)])
        for p, own, new in zip(frozen, bits, values[len(self._names) :], strict=True):
            if new is not own:
                p.copy_(new.clone().view(p.dtype).reshape(p.shape))

    def _policies(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        """Return the core's settings that follow from the group settings in `fixed`, and the names in each group."""
        return {
            "exact": exact_of(groups, names),
            "compressors": compressors_of(groups, names),
            "compressor": groups[0]["compressor"],
        }

    @_of_inner
    def attach(self, model: Any) -> None:
        """Take part in the backward passes of a wrapped model from now on, as ``model=`` does.

        For frameworks that make the optimizer, and perhaps load its state, before they hand over the wrapped model. The
        optimizer goes on from its state. Collective, before the first step or between two steps.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel
            A model of this optimizer's parameters, without a communication hook.

        Raises
        ------
        RuntimeError
            If there is a model already.
        TypeError, ValueError
            If ``model`` is not wrapped, or averages other parameters; or, on some rank, if it averages over other ranks
            than the optimizer's earlier steps did.
        MismatchError
            On the other ranks, if some rank raises that ValueError.
        """
        if self._model is not None:
            raise RuntimeError(
                "this optimizer has a model already: call attach only once, and not after passing model="
            )
        model = inside(model)
        names_of(self.param_groups, model)  # raises before anything is exchanged
        saved = self._saved() if self.core_state.step else None
        if saved is not None:
            self._agree(self._other_place(model), doing="attach", what="attach a model")
        before, state = dict(vars(self)), self.core_state
        apart = self._settings.optimizer(self.param_groups, state.step).apart(state.stage)
        own = [p.clone() for p in self._values()] if apart else self._values()
        self._model = model
        try:
            if apart:  # a start compares the parameters of all ranks; loading puts each rank's own back
                self._adopt(broadcast(self._values(), self._comm), state)
            self._begin()
            self._overlap(None)
            if saved is not None:
                self._load(saved)
        except Exception:
            vars(self).update(before)
            self._adopt(own, state)
            raise

    def _other_place(self, model: Any) -> Exception | None:
        """Return an error if rank or size differ between a model's process group and this optimizer's communicator."""
        group = model.process_group
        here, there = (self._comm.rank, self._comm.size), (group.rank(), group.size())
        if here == there:
            return None
        return ValueError(
            f"model averages over {there[1]} ranks, of which this is rank {there[0]}; this optimizer has made "
            f"{self.core_state.step} steps as rank {here[0]} of {here[1]}. Expected the same ranks: attach before the "
            "first step, or load the states of all ranks after attach"
        )

    def _overlap(self, comm: Any) -> None:
        """Let the model's backward passes start the exchange."""

        def live() -> tuple[Optimizer, str]:
            step = 0 if self._state is None else self._state.step
            return self._settings.optimizer(self.param_groups, step), self._settings.text

        overlapped = OverlappedOptimizer(self._model, live, comm)
        self._overlapped, self._comm = overlapped, overlapped.comm
        self._names, self._tensors = overlapped.parameters
        self._take(overlapped.state)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: a copy would have the same communicator, or none."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because it has a communicator: make another, and "
            "load_state_dict(optimizer.state_dict())"
        )

    @_of_inner
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, before the first step.

        Parameters
        ----------
        param_group : dict
            The parameters under ``"params"``, and the settings in which the group differs from the defaults.

        Raises
        ------
        RuntimeError
            After the first step: all parameters of an optimizer share one warm-up.
        ValueError
            If the group has a setting that no step reads.
        """
        state = self._state
        if self._overlapped is not None:
            raise RuntimeError(
                "add_param_group was called on an optimizer that was made with model=: pass all parameters when you "
                "make the optimizer"
            )
        if state is not None and state.step:
            raise RuntimeError(
                f"add_param_group was called after {state.step} steps; all parameters of an optimizer share one "
                "warm-up: add groups before the first step, or make another optimizer for them"
            )
        if isinstance(param_group, dict):  # else torch raises, and says what it expected
            of_all = inspect.signature(type(self)).parameters.keys() - self.defaults.keys()
            name, number = type(self).__name__, len(self.param_groups)
            require_read(param_group, number, name=name, own=self.defaults, of_all=of_all)
        before = dict(vars(self))
        super().add_param_group(param_group)
        if state is None:
            return
        try:
            self._begin()
        except Exception:
            self.param_groups.pop()
            vars(self).update(before)
            raise

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average over the ranks, and update the parameters.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and the gradients again, before the step uses these gradients.

        Returns
        -------
        The loss that ``closure`` returned, else None.

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank is not finite, unless ``nonfinite="skip"`` or a GradScaler scales
            the loss. Parameters and state do not change.
        MismatchError
            On every rank, if the settings of the groups differ between ranks, as they do if each rank's own loss drives
            a scheduler. Parameters and state do not change.
        RuntimeError
            If a parameter requires a gradient now but did not when the optimizer was made, or has been replaced.
        ValueError
            If a setting of a group is out of range, or ``exact`` or ``compressor`` has changed.

        Warns
        -----
        UserWarning
            On every rank, if no parameter has a gradient on any rank, so that the step changes nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overlapped is not None:
            self._require_unchanged()
            self._require_no_scaler()
            before = self.core_state
            self._overlapped.step()
            self._take(self._overlapped.state)
            self._compare(before)
            return loss
        self._compare(self.core_state)
        stages = self._stages(self._values(), self.core_state, donate=True)
        with plain_products(self._tensors[0]):
            self._adopt(*drive(stages, self._comm))
        return loss

    def _compare(self, before: OptimizerState) -> None:
        """Compare the parameters of all ranks, if that is due in the step after this state."""
        if before.size == 1 or before.step not in COMPARED:
            return
        if not self._settings.optimizer(self.param_groups, before.step).apart(before.stage):
            self._drive(
                compare_parameters(self._values(), before), f"step {before.step + 1} ({before.stage})"
            )

    def _stages(self, params: Sequence[Any], state: OptimizerState, *, donate: bool = False) -> Stages[Any]:
        """Make one step with the current gradients and settings as a generator of pure stages."""
        optimizer = self._core(state)
        gradients, scaled = self._gradients()
        if scaled and optimizer.nonfinite != "skip":
            optimizer = self._settings.skipping()
        return stages_of_used(
            optimizer,
            params,
            gradients,
            state,
            settings=settings_since(self._settings.text, optimizer, state),
            donate=donate,
        )

    def _core(self, state: OptimizerState) -> Optimizer:
        """Return the core's optimizer for the step after a state; raise if parameters or settings are not as before."""
        self._require_unchanged()
        return self._settings.optimizer(self.param_groups, state.step)

    def _adopt(self, params: Sequence[Any], state: OptimizerState) -> None:
        """Write new values into the parameters, and make the state that belongs to them the current state."""
        self._write(params)
        self._take(state)

    @torch.no_grad()
    def _write(self, params: Sequence[Any]) -> None:
        """Write values into the parameters that do not hold them already."""
        for p, new in zip(self._tensors, params, strict=True):
            if new.data_ptr() != p.data_ptr():
                p.copy_(new)

    def _move(self, comm: Communicator) -> None:
        """Switch to another communicator. Forget the rate of the last step, which some of its ranks may not know."""
        self._comm, self._settings = comm, self._settings.anew()

    def _require_unchanged(self) -> None:
        """Raise if a parameter has changed, or a setting that steps do not read again."""
        self._require_own_groups()
        for number, (group, fixed) in enumerate(zip(self.param_groups, self._fixed, strict=True)):
            for key, value in fixed.items():
                if group[key] is not value and group[key] != value:
                    raise ValueError(
                        f"param_groups[{number}] has {key}={group[key]!r} now; expected {value!r}, as when the "
                        "optimizer was made, since residuals depend on it. Make the optimizer again"
                    )
        for name, p, shown in zip(self._names, self._tensors, self._shown, strict=True):
            own = self.state.get(p, {})
            if not all(map(is_, map(own.get, shown), shown.values())):
                raise RuntimeError(
                    f"state no longer has the moments of {name!r}, but steps do not read moments from state: to begin "
                    "with moments of zero, make the optimizer again; to load others, use load_state_dict"
                )
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError(
                "a parameter requires a gradient now, but did not when the optimizer was made, so the optimizer never "
                "averages this gradient: make the optimizer again"
            )

    def _require_no_scaler(self) -> None:
        if found_inf(self) is not None:
            raise RuntimeError(
                "a GradScaler scales the loss, but with model= momenta are averaged during the backward pass, before "
                "it can unscale: use bfloat16 without a scaler, or leave out model= and DistributedDataParallel"
            )

    def _gradients(self) -> tuple[list[Any], bool]:
        """Return the gradient of each parameter, without the scale of a GradScaler, and whether there was one."""
        gradients: list[Any] = [p.grad for p in self._tensors]
        require_dense(zip(self._names, gradients, strict=True))
        pairs = zip(gradients, self._tensors, strict=True)
        gradients = [g if g is None or g.dtype is p.dtype else _as_precise(g, p) for g, p in pairs]
        scale = grad_scale(self)
        if scale is not None:
            inverse = 1.0 / float(scale)
            # In float32, since gradients in half precision would underflow once they are unscaled.
            gradients = [None if g is None else to_compute_dtype(g) * inverse for g in gradients]
        return gradients, found_inf(self) is not None


def _as_precise(grad: Any, p: Any) -> Any:
    """Return a gradient in the precision, single or double, of its parameter; with ``grad_dtype`` they may differ."""
    return grad.to(p.dtype) if (grad.dtype == torch.float64) != (p.dtype == torch.float64) else grad


def arguments(make: Callable[..., Optimizer], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `AveragingOptimizer` for an optimizer with these settings.

    ``given`` is what `locals` returns at the start of the optimizer's ``__init__``: its arguments by name, and itself.
    """
    settings = {name: value for name, value in given.items() if name not in ("self", "__class__")}
    own = {name: settings.pop(name) for name in ("params", "comm", "model", "init_sync")}
    optimizer: AveragingOptimizer = given["self"]
    of_groups = {"lr", "weight_decay", *optimizer.shared, *optimizer.fixed}
    defaults = {name: settings.pop(name) for name in list(settings) if name in of_groups}
    if missing := sorted(set(optimizer.shared) - defaults.keys()):
        kind = type(optimizer).__name__
        raise TypeError(
            f"{kind}.shared has {missing}, which are no arguments of {kind}; expected settings of groups"
        )
    return {**own, "defaults": defaults, "make": functools.partial(make, **settings)}


def communicator(given: Any = None) -> Communicator:
    """Return the given communicator, one over the given process group, or by default one over all ranks.

    All ranks are those of torch.distributed if it is initialised, else those of `qcomp.comm.world`.
    """
    if given is not None:
        found: Communicator = over_ranks(given)
        return found
    return TorchCommunicator() if dist.is_available() and dist.is_initialized() else world()
