"""The step of an optimizer for torch under DistributedDataParallel, whose exchange overlaps with the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from qcomp.comm.verbs import Verbs
from qcomp.core.errors import MismatchError
from qcomp.core.mean.stages import Stages
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.unused import same_settings, settings_since
from qcomp.integrations.ddp.optimizer import OverlappedOptimizer

__all__ = ["LiveOverlapped"]


class LiveOverlapped(OverlappedOptimizer):
    """An `OverlappedOptimizer` whose settings may change between steps.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        A model without a communication hook.
    live : callable
        Returns the optimizer with the current settings, and those settings as text.
    comm : communicator, optional
        By default a `TorchCommunicator` of the model's process group. Models in one backward pass need one each.
    """

    def __init__(self, model: Any, live: Callable[[], tuple[Optimizer, str]], comm: Verbs | None) -> None:
        self._live = live
        self._told = ""
        self._agreed = threading.Event()
        self._disagreement: MismatchError | None = None
        optimizer, _ = live()
        super().__init__(model, optimizer, comm)
        self._used: Optimizer | None = optimizer

    @property
    def comm(self) -> Any:
        """The communicator over which the ranks average."""
        return self._step.comm

    @property
    def parameters(self) -> tuple[tuple[str, ...], list[Any]]:
        """The names of the parameters that DistributedDataParallel averages, and these."""
        return self._step.params.names, self._step.params.tensors

    @property
    def in_use(self) -> Optimizer:
        """The optimizer of the core, as the last backward pass used it."""
        return self._step.optimizer

    def exchange(self, bucket: Any) -> Any:
        """Start to average a bucket; before the first of a backward pass, read the current settings."""
        if self._step.is_idle:
            optimizer, self._told = self._live()
            if optimizer is not self._used:
                self._step.use(optimizer)
                self._used = optimizer
            self._agreed.clear()
            self._step.run_beside(self._compared(), done=self._note)
        return super().exchange(bucket)

    def step(self) -> None:
        """Update the parameters; see `OverlappedOptimizer.step`.

        Raises
        ------
        MismatchError
            On every rank, if the settings differed between ranks in the backward pass.
        RuntimeError
            Also if the settings have changed since the backward pass.
        """
        if self._step.running.ended:
            self._agreed.wait()
            if self._disagreement is not None:
                self._step.discard()
                raise self._disagreement
            _, now = self._live()
            if now != self._told:
                raise RuntimeError(
                    f"the settings of param_groups were {self._told} in the backward pass, which has used them, and "
                    f"are {now} now: change them before the backward pass, or after step(), as scheduler.step() does"
                )
        super().step()

    def adopt(self, saved: Any, optimizer: Optimizer, lost: Literal["raise", "drop"]) -> None:
        """Continue from a saved state of the core, with an optimizer that has its settings."""
        before, self._used = self._step.optimizer, None  # the next backward pass reads the settings anew
        self._step.use(optimizer)
        try:
            self.load_state_dict(saved, lost=lost)
        except Exception:
            self._step.use(before)
            raise

    def _compared(self) -> Stages[MismatchError | None]:
        """Return how the settings differ between ranks; an error would end all later exchanges."""
        try:
            settings = settings_since(self._told, self._step.optimizer, self.state)
            yield from same_settings(settings, self.state, self._step.params.tensors[0])
        except MismatchError as error:
            return error
        return None

    def _note(self, outcome: Any) -> None:
        """Record the outcome of the comparison; the buckets report an error of the communicator."""
        self._disagreement = outcome if isinstance(outcome, MismatchError) else None
        self._agreed.set()
