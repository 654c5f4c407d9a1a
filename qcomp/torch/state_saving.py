"""`SavedOptimizer`: the state of the optimizers for torch, and how they save and load it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain, count
from typing import Any, ClassVar, Literal, TypeVar

import torch

from qcomp.checkpoint.saves import Saves
from qcomp.comm.base import Communicator
from qcomp.core.checkpoint.format import read_scalars, some
from qcomp.core.checkpoint.schema import NumericArray, read
from qcomp.core.handshake import agree_stages, gather_texts
from qcomp.core.mean.stages import Owner, Stages, drive, owned
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.optimizer import OverlappedOptimizer
from qcomp.private_names.torch import ScaledStep, hooks_of_loading, hooks_of_saving
from qcomp.torch.group_settings import LiveSettings, out_of_arrays, split_last_rate
from qcomp.torch.state_format import (
    OfRank,
    flattened,
    groups_to_load,
    nested,
    of_no_parameter,
    of_ranks,
    own_part,
)

_Result = TypeVar("_Result")


class SavedOptimizer(ScaledStep, torch.optim.Optimizer):
    """Base of the optimizers for torch: it saves and loads a state of the core through torch's ``state_dict``."""

    fixed: ClassVar[tuple[str, ...]] = ("compressor", "exact")
    """The keys of param_groups whose values are not plain, and are fixed from the first step on."""

    _comm: Communicator
    _fixed: list[dict[str, Any]]
    """The values of each group under the keys in `fixed`."""
    _given: list[list[tuple[int, Any]]]
    """The identity and the shape of each parameter in the groups."""
    _names: tuple[str, ...]
    _overlapped: OverlappedOptimizer | None
    """The exchange of a model's backward passes, with ``model=``."""
    _saves: Saves
    _settings: LiveSettings
    _shown: list[dict[str, Any]]
    """The entries that the last step has written into torch's own ``state``, for each parameter."""
    _state: OptimizerState | None
    _tensors: list[torch.Tensor]

    @property
    def comm(self) -> Communicator:
        """The communicator over which the ranks average."""
        return self._comm

    @property
    def core_state(self) -> OptimizerState:
        """The state of the optimizer of the core, with its stage; the next step overwrites its arrays."""
        assert self._state is not None
        return self._state

    def _drive(self, stages: Stages[_Result], doing: str) -> _Result:
        """Run a computation in stages; its exchanges name the call of this optimizer in which they are made."""
        state = self.core_state
        owner = Owner(type(self).__name__, state.number, self._names, state.stream, doing)
        return drive(owned(stages, owner), self._comm)

    def _agree(self, problem: Exception | None, *, doing: str, what: str) -> None:
        """Raise on every rank if any has a problem; see `qcomp.core.handshake.agree`."""
        stages = agree_stages(problem, what=what, size=self._comm.size, like=self._values()[0])
        self._drive(stages, doing)

    def gather_states(self, to: int = 0) -> None:
        """Gather the states of all ranks on one rank, so that its `state_dict` serves all ranks until the next step.

        For scripts and frameworks in which one rank saves for all. Every rank loads that dict. Collective: all ranks
        call it, just before one saves. Each rank sends its residuals, and the gathering rank needs memory for all of
        them; with many ranks, let every rank save its own dict instead. Lightning and Fabric call it themselves, under
        the name ``consolidate_state_dict`` that it has in ``torch.distributed.optim.ZeroRedundancyOptimizer``.

        Parameters
        ----------
        to : int
            The rank that will save.
        """
        self._saves.forget()
        own = own_part(self._entries(self._in_use().state_dict(self.core_state)))
        like = self._values()[0]
        self._saves.gather(own, self._in_use(), self.core_state, self._comm, like=like, root=to)

    consolidate_state_dict = gather_states

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters' states, and the groups; the first parameter's state also has this rank's own entries.

        Residuals differ between ranks, so every rank must save its own dict as a whole; or see `gather_states`.
        torch.distributed.checkpoint keeps the entries of each rank, and one copy of the entries that all ranks share.
        Hooks run as in torch.

        Raises
        ------
        RuntimeError
            If parameters in the groups have been replaced since the optimizer was made.

        Warns
        -----
        UserWarning
            Once, if this rank has residuals or other arrays of its own, and only some ranks save: at once in a
            framework that is known to do so, else over torch.distributed when it saves for the second time.
        """
        for hook in hooks_of_saving(self)[0]:
            hook(self)
        saved = self._saved()
        for hook in hooks_of_saving(self)[1]:
            returned = hook(self, saved)
            saved = saved if returned is None else returned
        return saved

    def _saved(self) -> dict[str, Any]:
        """Return what `state_dict` returns, without hooks."""
        places = count()
        groups = [
            {key: value for key, value in group.items() if key not in (*self.fixed, "params")}
            | {"params": [next(places) for _ in group["params"]]}
            for group in self.param_groups
        ]
        others = {key: value for key, value in self.state.items() if not isinstance(key, torch.Tensor)}
        state, optimizer = self.core_state, self._in_use()
        whole = optimizer.state_dict(state)
        self._saves.note(optimizer, state, whole, self._comm)
        return {
            "state": {**others, **self._entries(whole)},
            "param_groups": self._settings.saved(groups, state.step),
        }

    def _entries(self, whole: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the saved state of each parameter, by its place in the groups, from the core's state."""
        state, optimizer = self.core_state, self._in_use()
        names = dict(zip(map(id, self._tensors), self._names, strict=True))
        every = [p for group in self.param_groups for p in group["params"]]
        kinds = [kind for kind, arrays in _kinds(state).items() if arrays]
        entries = nested(
            {n: (names[id(p)], kinds) for n, p in enumerate(every) if id(p) in names},
            whole,
            optimizer.own_kinds(state.stage),
            dict(zip(self._names, self._values(), strict=True)) if optimizer.apart(state.stage) else {},
            bucketed=self._overlapped is not None,
        )
        entries[min(entries)] |= of_ranks(self._saves.gathered, bucketed=self._overlapped is not None)
        return entries

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        lost: Literal["raise", "drop"] = "raise",
    ) -> None:
        """Continue from a saved state.

        Parameters
        ----------
        state_dict : mapping, or sequence of mappings
            The dict that `state_dict` returned on this rank, or that torch.distributed.checkpoint has read with a
            `qcomp.torch.LoadPlanner`. Or a list with the dicts of all ranks that saved, of any number. If no rank had
            residuals or other arrays of its own, as in the exact warm-up, the dict of any one rank fits all, on any
            number of ranks.
        lost : {"raise", "drop"}
            What to do if the state of a rank that had arrays of its own is missing. With ``"drop"`` these arrays are
            lost, see `qcomp.OneBitAdam.load_state_dict`; all else is kept.

        Raises
        ------
        ValueError
            If the state belongs to another rank, model or optimizer, or a rank's state is missing. The optimizer is
            left unchanged.
        MismatchError
            On the other ranks, with the reason, if some rank raises ValueError or one of its hooks raises.

        Warns
        -----
        UserWarning
            On every rank, if ``lost="drop"`` has dropped something.

        Notes
        -----
        Between synchronisations of 0/1 Adam, the parameters differ between ranks. Each rank's state includes its own
        parameters, and loading puts them back. So load the model first.

        Hooks run as in torch. If a list is loaded, pre-hooks run for each of its dicts. If a pre-hook raises, nothing
        has changed on any rank. If a post-hook raises, all ranks have loaded the state.
        """
        with self._on_every_rank("run the hooks before it loads its state"):
            state_dict = self._hooked(state_dict)
        self._load(state_dict, lost)
        with self._on_every_rank("run the hooks after it has loaded its state"):
            for hook in hooks_of_loading(self)[1]:
                hook(self)

    def _hooked(self, state_dict: Any) -> Any:
        """Return saved states after the pre-hooks of `load_state_dict`, each of which gets a shallow copy."""
        found = list(state_dict) if isinstance(state_dict, Sequence) else [state_dict]
        for number, saved in enumerate(found):
            found[number] = copy(saved)
            for hook in hooks_of_loading(self)[0]:
                returned = hook(self, found[number])
                found[number] = found[number] if returned is None else returned
        return found if isinstance(state_dict, Sequence) else found[0]

    @contextmanager
    def _on_every_rank(self, what: str) -> Iterator[None]:
        """Raise on every rank if the block raises on any; ``what`` says what the block does."""
        problem = None
        try:
            yield
        except Exception as error:  # perhaps of this rank alone
            problem = error
        self._agree(problem, doing="load_state_dict", what=what)

    def _load(
        self,
        state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        lost: Literal["raise", "drop"] = "raise",
    ) -> None:
        """Continue from a saved state, without hooks."""
        states, own, groups = self._agree_on(state_dict)
        settings = self._settings.anew()
        last_rate: float | None = None
        problem = optimizer = None
        try:
            groups, last_rate = split_last_rate(groups)
            groups = groups_to_load(groups, self.param_groups, self._fixed)
            optimizer = settings.optimizer(groups, 0)
        except Exception as error:  # perhaps of this rank alone
            problem = ValueError(f"state_dict does not fit: {error}")
        self._agree(problem, doing="load_state_dict", what="load its state")
        assert optimizer is not None
        if self._overlapped is not None:
            self._overlapped.adopt(states, optimizer, lost)
            loaded = self._overlapped.state
        else:
            loaded = optimizer.load_state_dict(states, self._values(), self._comm, self._names, lost=lost)
        first = state_dict if isinstance(state_dict, Mapping) else next(iter(state_dict), None)
        others = {} if first is None else of_no_parameter(first)
        self.__setstate__({"state": defaultdict(dict, others), "param_groups": groups})
        self._settings = settings.anew(last_rate)
        self._take(loaded)
        if own is None or not own.parameters or not optimizer.apart(loaded.stage):
            return
        # If a rank has loaded means over all ranks' arrays, its saved parameters no longer belong to its arrays.
        if (isinstance(states, Mapping) and lost == "raise") or _has_arrays_of(own.state, loaded, optimizer):
            with torch.no_grad():
                for name, p in zip(self._names, self._tensors, strict=True):
                    p.copy_(own.parameters[name])

    def _agree_on(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any] | list[dict[str, Any]], OfRank | None, Any]:
        """Return the state or states for the core to load, this rank's own part, and the groups.

        The core loads one state: this rank's own, or the only state that was saved, which may fit every rank. But if
        any rank has neither, or was given a list, or a state whose ranks served other elements than now, every rank
        returns all states that it has, and the core distributes them. A rank without groups gets the groups of the
        first rank that has any.

        Raises ValueError if a state does not fit, and MismatchError on the other ranks.
        """
        is_list = isinstance(state_dict, Sequence)
        saved = list(state_dict) if isinstance(state_dict, Sequence) else [state_dict]
        groups, several, text, problem = None, True, "", None
        found: list[OfRank] = []
        own: OfRank | None = None
        known = dict(zip(map(id, self._tensors), self._names, strict=True))
        names = [known.get(id(p)) for group in self.param_groups for p in group["params"]]
        sizes = [len(group["params"]) for group in self.param_groups]
        try:
            self._require_own_groups()
            read_ones = [self._read(one, names, sizes) for one in saved]
            found = list(chain.from_iterable(of_each for of_each, _ in read_ones))
            groups = read_ones[0][1] if read_ones else None
            for each in found:
                self._require_parameters(each.parameters)
            scalars = [read_scalars(each.state) for each in found]
            places = [(one["rank"], one["size"]) for one in scalars]
            here = (self._comm.rank, self._comm.size)
            own = found[places.index(here)] if here in places else None
            if not is_list and own is None and [size for _, size in places] == [here[1]]:
                own = found[0]
            several = is_list or own is None or own.bucketed != (self._overlapped is not None)
            text = json.dumps(
                [groups, several], default=lambda x: out_of_arrays(x) if hasattr(x, "reshape") else None
            )
        except Exception as error:  # of this rank alone, perhaps
            problem = ValueError(f"state_dict does not fit: {error}")
        self._agree(problem, doing="load_state_dict", what="load its state")
        told = self._drive(gather_texts(text, self._comm.size, self._values()[0]), "load_state_dict")
        for their_groups, others in map(json.loads, told):
            groups, several = groups or their_groups, several or others
        if groups is None:
            raise ValueError(
                "state_dict is an empty list on every rank; expected the states of all ranks that saved"
            )
        states = own.state if own is not None and not several else [one.state for one in found]
        return states, own, groups

    def _read(
        self, saved: Mapping[str, Any], names: Sequence[str | None], sizes: Sequence[int]
    ) -> tuple[list[OfRank], Any]:
        """Return each rank's part of a saved state, and the saved groups; names and sizes are as for `flattened`."""
        return flattened(saved, names, sizes), saved["param_groups"]

    def _require_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Raise ValueError unless a state has exactly this optimizer's parameters, or no parameters."""
        if parameters and parameters.keys() != set(self._names):
            raise ValueError(
                f"it has {len(parameters)} parameters, {some(parameters)}; expected {some(self._names)}"
            )
        for name, p in zip(self._names, self._tensors, strict=True):
            if parameters and (found := read(parameters, name, NumericArray(), "it").shape) != p.shape:
                raise ValueError(
                    f"it has the parameter {name!r} of shape {tuple(found)}; expected {tuple(p.shape)}"
                )

    def _in_use(self) -> Optimizer:
        """Return the core's optimizer that the last step used."""
        self._require_own_groups()
        if self._overlapped is not None:
            return self._overlapped.in_use
        return self._settings.optimizer(self.param_groups, self.core_state.step)

    def _values(self) -> list[Any]:
        return [p.detach() for p in self._tensors]

    def _require_own_groups(self) -> None:
        """Raise RuntimeError unless the groups have the parameters that the optimizer was made with."""
        if [[(id(p), p.shape) for p in group["params"]] for group in self.param_groups] != self._given:
            raise RuntimeError(
                "the parameters in param_groups, or their shapes, have changed since the optimizer was made, so its "
                "moments belong to the old parameters: make the optimizer again, or another optimizer for new "
                "parameters"
            )

    def _take(self, state: OptimizerState) -> None:
        """Make a state the current one, and show its arrays for each parameter in torch's own ``state``."""
        self._state = state
        self._saves.forget()
        kinds = {kind: arrays for kind, arrays in _kinds(state).items() if arrays}
        of_each = zip(*kinds.values(), strict=True) if kinds else ((),) * len(self._tensors)
        self._shown = [dict(zip(kinds, own, strict=True)) for own in of_each]
        for p, shown in zip(self._tensors, self._shown, strict=True):
            self.state[p] = dict(shown)


def _has_arrays_of(own: Mapping[str, Any], loaded: OptimizerState, optimizer: Optimizer) -> bool:
    """Return whether the arrays that differ between ranks are equal in a loaded state and in one rank's saved state."""
    return all(
        torch.equal(own[f"{kind}.{name}"].to(x.device), x)
        for kind in optimizer.own_kinds(loaded.stage)
        for name, x in zip(loaded.names, _kinds(loaded)[kind], strict=True)
    )


def _kinds(state: OptimizerState) -> dict[str, Any]:
    """Return the arrays that a state has for each parameter, by kind."""
    return {"momentum": state.momentum, "variance": state.variance, **state.arrays}
