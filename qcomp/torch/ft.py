"""Training that survives replicas, with the quorums of torchft: they die, come back and join, and the others go on.

torchft finds out who is alive, and when; what the replicas then agree on, and what becomes of residuals, is up to
`qcomp.elastic.Elastic`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from qcomp.comm.lifelines import SILENCE
from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.core import elastic
from qcomp.core.broadcast import broadcast_stages
from qcomp.core.errors import CommunicatorError
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.stages import drive
from qcomp.core.state import OptimizerState
from qcomp.torch.optimizer import AveragingOptimizer

try:
    from torchft import process_group
except ImportError as error:
    raise ImportError("qcomp.torch.ft needs torchft: pip install 'qcomp[ft]'") from error

__all__ = ["Elastic", "ProcessGroup"]


class ProcessGroup(process_group.ProcessGroup):  # type: ignore[misc]
    """The process group of a ``torchft.Manager``: it connects the replicas of each quorum by gloo.

    It has no collectives of its own, so ``manager.allreduce`` and torchft's DistributedDataParallel do not work on it.

    Parameters
    ----------
    timeout : float, default 60
        Seconds in which all replicas of a quorum must have connected, and that one waits for the others in an exchange.
        If a replica dies while they connect, the others wait that long.
    silence : float, default 20
        Seconds without a sign of life after which a replica counts as lost, as for `qcomp.comm.TorchCommunicator`.

    Attributes
    ----------
    comm : TorchCommunicator or None
        That of the last quorum, None if it could not be made.
    quorum : int
        Number of the last quorum; -1 before the first.
    """

    def __init__(self, *, timeout: float = 60.0, silence: float = SILENCE) -> None:
        for name, value in (("timeout", timeout), ("silence", silence)):
            if not value > 0:
                raise ValueError(f"{name} is {value!r}; expected a positive number of seconds")
        super().__init__(0, 1)
        self._timeout, self._silence = timeout, silence
        self.comm: TorchCommunicator | None = None
        self.quorum = -1

    def configure(  # noqa: PLR0917  (as torchft calls it)
        self,
        store_addr: str,
        replica_id: str,  # noqa: ARG002  (torchft passes it)
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,  # noqa: ARG002
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,  # noqa: ARG002
    ) -> None:
        """Connect the replicas of a quorum; the manager calls it.

        Parameters
        ----------
        store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
            As for every process group of torchft.
        """
        self.abort()
        self.quorum = self.quorum + 1 if quorum_id is None else quorum_id
        if group_world_size not in (None, 1):
            raise ValueError(
                f"the manager has world_size={group_world_size}; expected 1: a replica is one process"
            )
        store = process_group.create_store_client(store_addr, timedelta(seconds=self._timeout))
        self.comm = TorchCommunicator.from_store(
            store, rank=rank, size=world_size, timeout=self._timeout, silence=self._silence
        )

    def abort(self) -> None:
        """Close the connections, so that nobody waits for this replica."""
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.close()

    def shutdown(self) -> None:
        """Close the connections."""
        self.abort()

    def errored(self) -> None:
        """Return None: an exchange raises its errors."""

    def size(self) -> int:
        """Return the number of replicas in the quorum."""
        return 0 if self.comm is None else self.comm.size

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return the name of this kind of process group."""
        return "qcomp"


class Elastic:
    """The steps of an optimizer for torch, among replicas of torchft that may die, stop and join.

    It takes the place of ``torchft.Optimizer``: `zero_grad` asks for a quorum, and if that is a new one, the replicas
    go back to the last step that all of them completed, and those that are new get everything from the others; `step`
    averages. A replica is one process. It may begin with any parameters, and the first quorum with those of one
    replica.

    Parameters
    ----------
    optimizer : AveragingOptimizer
        One of `qcomp.torch` on this replica alone. From now on only this object makes its steps.
    manager : torchft.Manager
        Made with ``group`` as its ``pg`` and ``use_async_quorum=False``. What else is registered with it heals as ever,
        before qcomp's own state: so parameters and optimizer need not be.
    group : ProcessGroup
        The manager's process group.
    lost : {"drop", "restore"}, default "drop"
        What becomes of what a dead replica owed, as for `qcomp.elastic.Elastic`.
    every : int, default 100
        As there.

    Attributes
    ----------
    optimizer : AveragingOptimizer
    report : dict of str to float
        Of the last new quorum, as `qcomp.elastic.Elastic.resume` returns it; empty after the first.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these.

    Notes
    -----
    `step` may return True on a replica while on others the exchange failed, and the next quorum then takes that step
    back. So take the batch and the learning rate from `state` after each `zero_grad`; schedulers of torch, which count
    for themselves, do not fit. A replica that missed a quorum, since it was stopped or cut off, has been given up
    meanwhile: it drops what it owed, and joins as a new one does.

    Examples
    --------
    Skipped, since it needs torchft and a lighthouse: ``torchft_lighthouse --min_replicas 1``.

    >>> import torch, torchft, qcomp.torch.ft  # doctest: +SKIP
    >>> model = torch.nn.Linear(8, 8)  # doctest: +SKIP
    >>> group = qcomp.torch.ft.ProcessGroup()  # doctest: +SKIP
    >>> manager = torchft.Manager(  # doctest: +SKIP
    ...     pg=group, load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False
    ... )
    >>> optimizer = qcomp.torch.ft.Elastic(  # doctest: +SKIP
    ...     qcomp.torch.OneBitAdam(model.parameters()), manager, group, lost="restore"
    ... )
    >>> while manager.current_step() < 1000:  # doctest: +SKIP
    ...     optimizer.zero_grad()
    ...     model(torch.randn(4, 8)).square().mean().backward()
    ...     optimizer.step()
    """

    def __init__(
        self,
        optimizer: AveragingOptimizer,
        manager: Any,
        group: ProcessGroup,
        *,
        lost: Literal["drop", "restore"] = "drop",
        every: int = 100,
    ) -> None:
        if not isinstance(optimizer, AveragingOptimizer):
            raise TypeError(f"optimizer is {optimizer!r}; expected one of qcomp.torch, such as OneBitAdam")
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"group is {group!r}; expected the qcomp.torch.ft.ProcessGroup of the manager")
        if optimizer.comm.size != 1 or optimizer._overlapped is not None or optimizer.core_state.step:
            raise ValueError(
                f"optimizer has made {optimizer.core_state.step} steps over {optimizer.comm!r}; expected a new one on "
                "this process alone and without model=: make it with comm=qcomp.comm.LocalCommunicator.alone()"
            )
        if manager._use_async_quorum:
            raise ValueError(
                "manager has use_async_quorum=True; expected False, since gradients are of the parameters that the "
                "quorum agrees on"
            )
        self.optimizer = optimizer
        self.report: dict[str, float] = {}
        self._manager, self._group = manager, group
        self._lost, self._every = lost, every
        self._elastic()  # raises if the settings are wrong
        self._comm: TorchCommunicator | None = None
        self._held: elastic.ElasticState | None = None
        self._last_quorum = -1
        self._is_ready = False
        # torchft serves nothing to a new replica unless something is registered.
        manager.register_state_dict_fn("qcomp", lambda _: None, dict)
        optimizer.register_step_pre_hook(_refuse)

    @property
    def state(self) -> OptimizerState:
        """The state of the optimizer of the core; its ``step`` counts the steps that are made."""
        return self.optimizer.core_state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Agree with the other replicas on who takes part and from where to go on, then clear the gradients.

        If a replica dies meanwhile, the others ask for another quorum.

        Parameters
        ----------
        set_to_none : bool, default True
            As for every optimizer of torch.

        Raises
        ------
        ValueError, MismatchError
            On every replica, if they do not belong together.
        RuntimeError
            From the manager, if there is no quorum in time, or after its ``max_retries``.
        """
        while True:
            self._manager.start_quorum()
            self._manager.wait_quorum()
            before, self._last_quorum = self._last_quorum, self._group.quorum
            if self._manager.errored() is None and self._meet(before):
                break
            self._group.abort()
            self._manager.should_commit()  # it does not, and so the next quorum is a new one
        self._is_ready = True
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> bool:
        """Average over the replicas, and update the parameters.

        Returns
        -------
        bool
            Whether it was done. If not, parameters and state are as before, and so is the next step's batch to be.

        Raises
        ------
        RuntimeError
            If `zero_grad` was not called since the last step.
        NonFiniteError, MismatchError, ValueError
            As the step of the optimizer, on every replica; nothing has changed then.
        """
        if not self._is_ready:
            raise RuntimeError(
                "step was called without zero_grad before it, which asks for the quorum of the step"
            )
        self._is_ready = False
        held, new = self._held, None
        assert held is not None
        assert self._comm is not None
        if self._manager.errored() is None:
            stages = self._elastic().run_stages(self.optimizer._stages, held)
            try:
                new = drive(stages, self._comm)
            except CommunicatorError as error:
                self._manager.report_error(error)
        else:
            self._group.abort()
        if not self._manager.should_commit() or new is None:
            return False
        self._take(new)
        return True

    def _elastic(self) -> elastic.Elastic:
        optimizer = self.optimizer
        return elastic.Elastic(optimizer._core(optimizer.core_state.step), self._lost, self._every)

    def _take(self, held: elastic.ElasticState) -> None:
        self._held = held
        self.optimizer._adopt(held.params, held.state)

    def _meet(self, before: int) -> bool:
        """Go on with the replicas of the quorum; return whether that was possible.

        Parameters
        ----------
        before : int
            The quorum in which this replica was last.
        """
        comm = self._group.comm
        if comm is None or comm is self._comm:
            return comm is not None
        self.optimizer._move(comm)
        try:
            held, report = self._agree(comm, before)
        except CommunicatorError as error:
            self._manager.report_error(error)
            return False
        self._comm, self.report = comm, report
        self._take(held)
        counts = {"step": held.state.step, "batches_committed": self._manager.batches_committed()}
        self._manager.load_state_dict(counts)
        return True

    def _agree(self, comm: TorchCommunicator, before: int) -> tuple[elastic.ElasticState, dict[str, float]]:
        """Return what all go on from, and the report."""
        values, names = self.optimizer._values(), self.optimizer._names
        here = self._elastic()
        quorums = _quorums_of_those_with_a_state(comm, None if self._held is None else before, values)
        if not quorums:
            values = drive(broadcast_stages(values, root=0, rank=comm.rank, size=comm.size), comm)
            return here.begin(values, here.optimizer.init(values, comm, names)), {}
        # Others have gone on without whoever was not in their last quorum.
        held = self._held if before == max(quorums) else None
        return here.resume(held, comm, params=values, names=names)


def _quorums_of_those_with_a_state(
    comm: TorchCommunicator, own: int | None, like: Sequence[Any]
) -> list[int]:
    """Return in which quorum each replica was last, of those that have a state."""
    told = drive(gather_texts(json.dumps(own), comm.size, like[0]), comm)
    return [quorum for quorum in map(json.loads, told) if quorum is not None]


def _refuse(optimizer: Any, *_: Any) -> None:
    """Keep a step from being made that the other replicas do not make."""
    raise RuntimeError(
        f"step was called on the {type(optimizer).__name__} that a qcomp.torch.ft.Elastic was given; expected on that"
    )
