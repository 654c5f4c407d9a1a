"""Steps of an optimizer among replicas of torchft: each step asks for a quorum, and makes one exchange."""

from __future__ import annotations

from typing import Any, Literal

from qcomp import elastic
from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.core.state import OptimizerState
from qcomp.torch.ft.group import ProcessGroup
from qcomp.torch.ft.replica import QuorumMember
from qcomp.torch.optimizer import AveragingOptimizer


class Elastic(QuorumMember):
    """The steps of an optimizer for torch, among replicas of torchft that may die, stop and join.

    It takes the place of ``torchft.Optimizer``: `zero_grad` asks for a quorum. If the quorum is new, the replicas go
    back to the last step that all of them completed, and new replicas get everything from the others. `step` averages.
    A replica is one process. It may begin with any parameters; the first quorum copies one replica's parameters to all.

    Parameters
    ----------
    optimizer : AveragingOptimizer
        An optimizer of `qcomp.torch`, made for this process alone. From now on only this object makes its steps.
    manager : torchft.Manager
        Made with ``group`` as its ``pg`` and ``use_async_quorum=False``. Whatever else is registered with the manager
        heals as usual, before qcomp's own state. Parameters and optimizer need not be registered.
    group : ProcessGroup
        The manager's process group.
    lost : {"drop", "restore"}, default "drop"
        What becomes of the residuals of a dead replica, as for `qcomp.elastic.Elastic`.
    every : int, default 100
        As for `qcomp.elastic.Elastic`.

    Attributes
    ----------
    optimizer : AveragingOptimizer
    report : dict of str to float
        The report of the last new quorum, as `qcomp.elastic.Elastic.resume` returns it; empty after the first quorum.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    `step` may return True on one replica although the exchange failed on another; the next quorum then undoes that
    step. So choose the batch and the learning rate by ``state.step`` after each `zero_grad`. Schedulers of torch count
    steps themselves, so they cannot be used. A replica that was stopped or cut off during a quorum counts as lost: it
    drops its residuals, and joins as a new replica.

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
        if optimizer.comm.size != 1 or optimizer._overlapped is not None or optimizer.core_state.step:
            raise ValueError(
                f"optimizer has made {optimizer.core_state.step} steps over {optimizer.comm!r}; expected a new "
                "optimizer on this process alone and without model=: make it with "
                "comm=qcomp.comm.LocalCommunicator.alone()"
            )
        self.optimizer = optimizer
        self._lost, self._every = lost, every
        super().__init__(manager, group)
        optimizer.register_step_pre_hook(self._refuse)

    @property
    def state(self) -> OptimizerState:
        """The state of the core's optimizer, whose ``step`` counts the completed steps."""
        return self.optimizer.core_state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Agree with the other replicas on the members and on the step to go on from, then clear the gradients.

        If a replica dies meanwhile, the others ask for another quorum.

        Parameters
        ----------
        set_to_none : bool, default True
            As for every optimizer of torch.

        Raises
        ------
        ValueError, MismatchError
            On every replica, if parameters or settings differ between them.
        RuntimeError
            From the manager, if there is no quorum in time, or after its ``max_retries``.
        """
        self._ask_for_quorum()
        self._is_ready = True
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> bool:
        """Average over the replicas, and update the parameters.

        Returns
        -------
        bool
            Whether the step was done. If not, parameters and state are as before, and the next step must take the same
            batch.

        Raises
        ------
        RuntimeError
            If `zero_grad` was not called since the last step.
        NonFiniteError, MismatchError, ValueError
            As for the step of the optimizer, on every replica, before anything changes.
        """
        self._require_ready()
        return self._run(self.optimizer._stages)

    def _elastic(self) -> elastic.Elastic:
        optimizer = self.optimizer
        return elastic.Elastic(optimizer._core(optimizer.core_state), self._lost, self._every)

    def _named_values(self) -> tuple[list[Any], tuple[str, ...]]:
        return self.optimizer._values(), self.optimizer._names

    def _agree(self, comm: TorchCommunicator) -> tuple[elastic.ElasticState, dict[str, float]]:
        self.optimizer._move(comm)
        return super()._agree(comm)

    def _hand_over(self, *_: Any) -> None:
        """Do nothing, since a replica holds nothing besides the parameters and the state."""

    def _take(self, held: elastic.ElasticState) -> None:
        self._held = held
        self.optimizer._adopt(held.params, held.state)
