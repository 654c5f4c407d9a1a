"""`ElasticOuterLoop`: an outer loop among replicas of torchft, which ask for a quorum only where they exchange."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qcomp import elastic
from qcomp.comm.local import LocalCommunicator
from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.core.broadcast import broadcast_stages
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.stages import Stages, drive
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.outer.settings import WARMUP
from qcomp.core.state import OptimizerState
from qcomp.torch.ft.group import ProcessGroup
from qcomp.torch.ft.replica import QuorumMember
from qcomp.torch.positions import Place
from qcomp.torch.trained_parameters import Trained


class ElasticOuterLoop(QuorumMember):
    """An outer loop among replicas of torchft that may die, stop and join.

    It takes the place of ``torchft.local_sgd.DiLoCo``. Replicas make their inner steps independently, and ask for a
    quorum only where they exchange. If the quorum is new, they return to the state before the last exchange that not
    all of them have completed, and repeat this exchange. A new replica waits for the next exchange of the others. There
    it gets their parameters, their mean displacement since the last exchange, and one replica's inner optimizer state.
    A replica is one process. It may begin with any parameters; the first quorum copies one replica's parameters to all.

    Parameters
    ----------
    model : Module, or iterable of Parameter or of pairs of names and parameters
        What is trained, as for `qcomp.torch.OuterLoop`.
    optimizer : torch.optim.Optimizer, or sequence of them
        The inner optimizers, in the order in which they step. From now on only this object makes their steps.
    loop : qcomp.OuterLoop
        The settings, for instance ``qcomp.outer.sparse_loco(30)``. A ``delay`` changes results as usual, but exchanges
        do not overlap with inner steps: bytes travel only when a result is applied.
    manager : torchft.Manager
        As for `Elastic`. Its ``current_step`` is the number of inner steps at the last exchange.
    group : ProcessGroup
        The manager's process group.
    buffers : bool, default True
        As for `qcomp.torch.OuterLoop`.
    every : int, default 1
        Number of outer rounds after which replicas exchange the norms of their residuals, for `report`.

    Attributes
    ----------
    report : dict of str to float
        The report of the last new quorum, as `qcomp.elastic.Elastic.resume` returns it; empty after the first quorum.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    A dead replica's inner steps since the last exchange are lost, and so are its residuals. The others repeat inner
    steps in one case only: if some of them had completed the last exchange and others had not, those that had completed
    it go back to this exchange, with the states of their inner optimizers. For that a replica keeps a copy of its
    parameters, buffers and inner states as they were before the last exchange, and a second copy while it exchanges. In
    the warm-up, gradients are averaged, each step has a quorum, and a failed step is made again. So take the batch and
    the learning rate from `state` after each `zero_grad`; schedulers of torch cannot be used, since they count steps
    themselves.

    A new replica receives inner states as ``torch.save`` writes them, and reads them with ``weights_only=True``. When
    the replicas have changed, parameters and outer gradients under way are averaged in full precision.

    Examples
    --------
    Skipped, since it needs torchft and a lighthouse: ``torchft_lighthouse --min_replicas 1``.

    >>> import torch, torchft, qcomp.torch.ft  # doctest: +SKIP
    >>> model = torch.nn.Linear(8, 8)  # doctest: +SKIP
    >>> group = qcomp.torch.ft.ProcessGroup()  # doctest: +SKIP
    >>> manager = torchft.Manager(  # doctest: +SKIP
    ...     pg=group, load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False
    ... )
    >>> outer = qcomp.torch.ft.ElasticOuterLoop(  # doctest: +SKIP
    ...     model, torch.optim.AdamW(model.parameters()), qcomp.outer.sparse_loco(30), manager, group
    ... )
    >>> while outer.state.step < 1000:  # doctest: +SKIP
    ...     outer.zero_grad()
    ...     model(torch.randn(4, 8)).square().mean().backward()
    ...     outer.step()
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loop: OuterLoop,
        manager: Any,
        group: ProcessGroup,
        *,
        buffers: bool = True,
        every: int = 1,
    ) -> None:
        if not isinstance(loop, OuterLoop):
            raise TypeError(f"loop is {loop!r}; expected a qcomp.OuterLoop, such as qcomp.outer.diloco(100)")
        self._loop, self._every = loop, every
        self._trained = Trained(model, optimizer, buffers=buffers)
        self._kept: dict[int, _Kept] = {}
        super().__init__(manager, group)
        self._state = loop.init(self._trained.values(), LocalCommunicator.alone(), self._trained.names)
        for one in self._trained.optimizers:
            one.register_step_pre_hook(self._refuse)

    @property
    def state(self) -> OptimizerState:
        """The state of the core's loop, whose ``step`` counts the inner steps made."""
        return self._state

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the shared parameters by name, as of the last exchange, to evaluate or save."""
        values, names = self._named_values()
        return dict(zip(names, self._loop.shared(values, self._state), strict=True))

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; in the first call and in the warm-up, agree on the members and the step to go on from.

        Parameters
        ----------
        set_to_none : bool, default True
            As for every optimizer of torch.

        Raises
        ------
        ValueError, MismatchError
            On every replica, if the replicas do not belong together.
        RuntimeError
            From the manager, if there is no quorum in time, or after its ``max_retries``.
        """
        if self._held is None:
            self._ask_for_quorum()
            while self.report and not self._exchange():  # the others are at an exchange
                self._ask_for_quorum()
        elif self._state.stage == WARMUP:
            self._ask_for_quorum()
        if self._state.stage == WARMUP:
            assert self._held is not None
            self._keep(self._held)  # before the forward pass, which changes buffers
        self._is_ready = True
        for one in self._trained.optimizers:
            one.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> bool:
        """Make an inner step. If a fragment is due, ask for quorums and exchange until an exchange succeeds.

        Returns
        -------
        bool
            Whether `state` is one step further. If not, `state` is unchanged, or back at an earlier exchange: choose
            the next batch by ``state.step``.

        Raises
        ------
        RuntimeError
            If `zero_grad` was not called since the last step; or from the manager, as in `zero_grad`.
        NonFiniteError, MismatchError, ValueError
            As for `qcomp.OuterLoop.step`, on every replica. An error in the warm-up changes nothing; after the warm-up,
            the inner step is kept.

        Warns
        -----
        UserWarning
            If no parameter has a gradient on this replica.
        """
        held, before = self._require_ready(), self._state
        self._trained.begin_step()
        if before.stage == WARMUP:
            done = False
            try:
                done = self._run(self._warmup_stages)
            finally:
                if not done:
                    self._go_back()
            return done
        self._inner_steps(before)
        moved = held.moved(self._trained.values())
        if not self._loop.exchanges(before):
            assert self._comm is not None
            self._take(drive(self._elastic().run_stages(self._loop.stages, moved), self._comm))
            return True
        self._keep(moved)
        self._ask_for_quorum()
        while not self._exchange():
            self._ask_for_quorum()
        return self._state.step == before.step + 1

    def _exchange(self) -> bool:
        """Make the exchange that all replicas have reached, except in the warm-up; return False if it has failed."""
        if self._state.stage == WARMUP:
            return True
        if not self._run(self._loop_stages):
            self._go_back()
            return False
        self._count(self._state.step)
        return True

    def _warmup_stages(self, _: Any, state: OptimizerState) -> Stages[tuple[Any, OptimizerState]]:
        yield from self._trained.average_stages(self._loop, state, self._trained.optimizers)
        self._inner_steps(state)
        return (yield from self._loop_stages(self._trained.values(), state))

    def _loop_stages(self, params: Any, state: OptimizerState) -> Stages[tuple[Any, OptimizerState]]:
        params, after = yield from self._loop.stages(params, state)
        yield from self._trained.buffer_stages(self._loop, state, after)
        return params, after

    def _inner_steps(self, before: OptimizerState) -> None:
        self._is_stepping = True
        try:
            for one in self._trained.optimizers:
                one.step()
        finally:
            self._is_stepping = False
        self._trained.look(self._loop.every, exchanges=self._loop.exchanges(before))

    def _elastic(self) -> elastic.Elastic:
        return elastic.Elastic(self._loop, every=self._every)

    def _named_values(self) -> tuple[list[Any], tuple[str, ...]]:
        return self._trained.values(), self._trained.names

    def _take(self, held: elastic.ElasticState) -> None:
        self._held, self._state = held, held.state
        self._kept = {s.label: self._kept[s.label] for s in held.history if s.label in self._kept}
        self._trained.write(held.params)

    def _keep(self, held: elastic.ElasticState) -> None:
        """Keep everything as it is before an exchange, in memory that inner steps do not write to."""
        self._held = held.moved([p.clone() for p in held.params])
        self._kept[held.history[-1].label] = self._now()

    def _now(self) -> _Kept:
        trained = self._trained
        positions = trained.positions
        with positions.relative(trained.tensors):  # another replica may continue from other parameters
            states = [copy.deepcopy(one.state_dict()) for one in trained.optimizers]
        return _Kept(states, [buffer.clone() for buffer in trained.buffers], sorted(positions.known, key=str))

    def _go_back(self) -> None:
        """Undo what a failed exchange has done to the model and the inner optimizers."""
        held = self._held
        assert held is not None
        self._take(held)
        self._restore(self._kept[held.history[-1].label])

    def _restore(self, kept: _Kept) -> None:
        for one, state in zip(self._trained.optimizers, kept.optimizers, strict=True):
            one.load_state_dict(copy.deepcopy(state))
        self._trained.positions.place(self._trained.tensors, kept.positions)
        for buffer, value in zip(self._trained.buffers, kept.buffers, strict=True):
            buffer.copy_(value)

    def _hand_over(
        self, held: elastic.ElasticState, members: Sequence[bool], comm: TorchCommunicator
    ) -> None:
        """Restore inner states and buffers of the step that all replicas went back to; a new replica gets copies."""
        is_member = members[comm.rank]
        # In the warm-up this runs before the current step is kept, but also before its forward pass.
        kept = (self._kept.get(held.history[-2].label) if is_member else None) or self._now()
        if not all(members):
            root = members.index(True) if any(members) else 0
            sent = _written(kept) if comm.rank == root else torch.zeros(0, dtype=torch.uint8)
            lengths = drive(gather_texts(str(len(sent)), comm.size, sent), comm)
            if comm.rank != root:
                sent = torch.zeros(int(lengths[root]), dtype=torch.uint8)
            arrived: Any
            (arrived,) = drive(broadcast_stages([sent], root=root, rank=comm.rank, size=comm.size), comm)
            kept = kept if is_member else _read(arrived)
        self._kept = {snapshot.label: kept for snapshot in held.history}
        self._restore(kept)


class _Kept(NamedTuple):
    """The part of a snapshot that is not exchanged."""

    optimizers: list[dict[str, Any]]
    """The states of the inner optimizers, with positions relative to parameters."""
    buffers: list[torch.Tensor]
    positions: list[Place]
    """Which entries of these states are positions, see `Positions`."""


def _written(kept: _Kept) -> torch.Tensor:
    """Return a `_Kept` as bytes. They are a copy, for the reason given at `_content` of `qcomp.checkpoint.copies`."""
    file = io.BytesIO()
    torch.save(kept._asdict(), file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _read(data: torch.Tensor) -> _Kept:
    """Read a `_Kept` from bytes; nothing in them is executed."""
    return _Kept(**torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True))
