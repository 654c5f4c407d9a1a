"""An optimizer of qcomp under DistributedDataParallel, whose exchange overlaps with the backward pass."""

# DistributedDataParallel looks at the annotations of a hook, so they are not postponed here.
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from qcomp.comm.verbs import Verbs
from qcomp.core.optimizers.compression import CompressingOptimizer
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.buckets import Bucket, BucketedStep

__all__ = ["OverlappedOptimizer"]


class OverlappedOptimizer:
    """1-bit Adam, or another optimizer that compresses, for a model under DistributedDataParallel.

    It registers a communication hook: what the optimizer asks for, gradients in the warm-up and momenta later, is
    averaged bucket by bucket while the backward pass goes on. `step` then moves the parameters. The steps are those
    of ``optimizer.step`` on all gradients at once, bit for bit.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        Without a communication hook; best with ``gradient_as_bucket_view=True``. Gradients stay this rank's own.
    optimizer : CompressingOptimizer
        `qcomp.OneBitAdam`, `qcomp.QAdam`, `qcomp.CompressedSGD`, ...; without ``clip_norm`` and ``watch``, which
        need all gradients before the first is sent.
    comm : communicator, optional
        By default a `TorchCommunicator` of the model's process group.

    Raises
    ------
    MismatchError
        On every rank, if the ranks differ in the optimizer's settings or in the model.
    ValueError
        If the optimizer needs all gradients before it can exchange any.

    Examples
    --------
    >>> import qcomp, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 128))
    >>> optimizer = OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=1e-3, freeze=1000))
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.state.step, optimizer.state.stage
    (1, 'warmup')
    >>> dist.destroy_process_group()
    """

    def __init__(self, model: Any, optimizer: CompressingOptimizer, comm: Verbs | None = None) -> None:
        self._step = BucketedStep(optimizer, model, comm)
        model.register_comm_hook(self._step, _exchange)

    @property
    def state(self) -> OptimizerState:
        """The optimizer's state after the last step."""
        return self._step.state

    def step(self) -> None:
        """Move the parameters by what was averaged in the backward pass.

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank was not finite, unless the optimizer skips such steps. Parameters
            and state are as before.
        RuntimeError
            If there was no backward pass since the last step, or it did not come to its end.
        """
        step = self._step
        if not step.is_complete:
            raise RuntimeError("step was called without a whole backward pass since the last one")
        refusal = step.refusal
        if refusal is not None:
            step.discard()
            if step.optimizer.nonfinite == "raise":
                raise refusal
            step.state = step.state._replace(skipped=step.state.skipped + 1)
            return
        with torch.no_grad():
            params = [p.detach() for p in step.params]
            moved, step.state = step.optimizer.apply(params, step.take(), step.state)
            for param, new in zip(params, moved, strict=True):
                param.copy_(new)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as optimizers of torch do."""
        for param in self._step.params:
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a flat dict of tensors and scalars, this rank's own; see `Optimizer.state_dict`."""
        return self._step.optimizer.state_dict(self._step.state)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a saved state, also of another number of ranks; see `Optimizer.load_state_dict`."""
        step = self._step
        params = [p.detach() for p in step.params]
        step.state = step.optimizer.load_state_dict(saved, params, step.comm, step.names)


def _exchange(state: BucketedStep, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = state.exchange(bucket, _leave)
    return future


def _leave(bucket: Bucket) -> None:
    """Leave the gradients as they are; what was averaged waits for the step."""
