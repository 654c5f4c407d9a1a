"""A member of torchft's quorums: the base of every kind of training under torchft."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from qcomp import elastic
from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.core.broadcast import broadcast_stages
from qcomp.core.errors import CommunicatorError
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.stages import Stages, drive
from qcomp.core.state import OptimizerState
from qcomp.private_names.torchft import asks_in_background
from qcomp.torch.ft.group import ProcessGroup
from qcomp.torch.parameters import plain_products


class QuorumMember(ABC):
    """Requests quorums, and connects to the replicas of each new quorum."""

    def __init__(self, manager: Any, group: ProcessGroup) -> None:
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"group is {group!r}; expected the qcomp.torch.ft.ProcessGroup of the manager")
        if asks_in_background(manager):
            raise ValueError(
                "manager has use_async_quorum=True; expected False, since gradients must be computed with the "
                "parameters that the quorum agrees on"
            )
        self.report: dict[str, float] = {}
        self._manager, self._group = manager, group
        self._elastic()  # raises if the settings are wrong
        self._comm: TorchCommunicator | None = None
        self._held: elastic.ElasticState | None = None
        self._reached = self._known = -1
        """The last quorum in which this replica agreed on its state, and the last in which it counted as up to date."""
        self._is_ready = False
        self._has_quorum = False
        self._is_stepping = False
        # torchft lets a new replica fetch only from a manager with which some state is registered.
        manager.register_state_dict_fn("qcomp", lambda _: None, dict)

    @abstractmethod
    def _elastic(self) -> elastic.Elastic:
        """Return the `qcomp.elastic.Elastic` that makes the steps, with the current settings."""

    @abstractmethod
    def _named_values(self) -> tuple[list[Any], tuple[str, ...]]:
        """Return the parameters of this replica, and their names."""

    @abstractmethod
    def _take(self, held: elastic.ElasticState) -> None:
        """Adopt a new state: the result of a step, or the state on which the replicas agreed."""

    @abstractmethod
    def _hand_over(
        self, held: elastic.ElasticState, members: Sequence[bool], comm: TorchCommunicator
    ) -> None:
        """Bring the rest of a replica's state to the agreed step; ``members`` tells which ranks are up to date."""

    def _ask_for_quorum(self) -> None:
        """Agree with the other replicas on the members and on the step to go on from, unless that is done already."""
        while not self._has_quorum:
            self._manager.start_quorum()
            self._manager.wait_quorum()
            self._has_quorum = self._manager.errored() is None and self._meet()
            if self._has_quorum:
                return
            self._group.abort()
            self._manager.should_commit()  # this attempt fails, so the next quorum is a new one

    def _require_ready(self) -> elastic.ElasticState:
        """Return the current state; raise unless ``zero_grad`` was called since the last step."""
        if not self._is_ready:
            raise RuntimeError(
                "step was called without zero_grad, which requests the quorum for the step: call zero_grad before step"
            )
        self._is_ready = False
        assert self._held is not None
        return self._held

    def _run(self, computation: Callable[[Any, OptimizerState], Stages[Any]]) -> bool:
        """Run a computation with the replicas of the quorum; return whether they committed its result."""
        held, new, self._has_quorum = self._held, None, False
        assert held is not None
        assert self._comm is not None
        if self._manager.errored() is None:
            try:
                with plain_products(held.params[0]):
                    new = drive(self._elastic().run_stages(computation, held), self._comm)
            except CommunicatorError as error:
                self._manager.report_error(error)
        else:
            self._group.abort()
        if not self._manager.should_commit() or new is None:
            return False
        self._take(new)
        return True

    def _refuse(self, optimizer: Any, *_: Any) -> None:
        """Refuse a direct step of the optimizer: other replicas would not make it, or nobody would count it."""
        if not self._is_stepping:
            raise RuntimeError(
                f"call step on the qcomp.torch.ft.{type(self).__name__}, not on the {type(optimizer).__name__} that "
                "it was made with"
            )

    def _meet(self) -> bool:
        """Go on with the replicas of the quorum; return whether that was possible."""
        comm = self._group.comm
        if comm is None or comm is self._comm:
            return comm is not None
        try:
            held, report = self._agree(comm)
        except CommunicatorError as error:
            self._manager.report_error(error)
            return False
        self._comm, self.report = comm, report
        self._reached = self._known = self._group.quorum
        self._take(held)
        self._count(held.state.step)
        return True

    def _count(self, step: int) -> None:
        """Tell the manager how many steps have been made."""
        counts = {"step": step, "batches_committed": self._manager.batches_committed()}
        self._manager.load_state_dict(counts)

    def _agree(self, comm: TorchCommunicator) -> tuple[elastic.ElasticState, dict[str, float]]:
        """Return the state from which all replicas go on, and the report.

        Replicas may differ in the last quorum in which they agreed, since some may have failed while others went on. A
        replica counts as up to date if it also counted as up to date in the latest quorum in which any replica agreed.
        If that quorum then failed for this replica, all go back to the state before that quorum.
        """
        values, names = self._named_values()
        here, report = self._elastic(), dict[str, float]()
        own = None if self._held is None else [self._reached, self._known]
        told = [*map(json.loads, drive(gather_texts(json.dumps(own), comm.size, values[0]), comm))]
        last = max([quorums[0] for quorums in told if quorums is not None], default=None)
        members = [quorums is not None and quorums[1] >= last for quorums in told]
        if last is None:
            values = drive(broadcast_stages(values, root=0, rank=comm.rank, size=comm.size), comm)
            held = here.begin(values, here.optimizer.init(values, comm, names))
        else:
            with_us = None
            if members[comm.rank]:
                with_us, self._known = self._held, self._group.quorum
            held, report = here.resume(with_us, comm, params=values, names=names)
        self._hand_over(held, members, comm)
        return held, report
