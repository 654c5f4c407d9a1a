"""A qcomp optimizer under DistributedDataParallel whose exchange overlaps with the backward pass."""

# DistributedDataParallel reads the annotations of a hook, so they are not postponed here.
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.distributed import GradBucket
from torch.distributed.algorithms.join import Joinable, JoinHook

from qcomp.checkpoint.saves import Saves
from qcomp.comm.verbs import Verbs
from qcomp.core.errors import MismatchError, NonFiniteError
from qcomp.core.mean.stages import Stages, drive, owned
from qcomp.core.numeric.arrays import to_compute_dtype
from qcomp.core.optimizers.agreement import compare_new_stage
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.optimizers.unused import same_settings, settings_since
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.backward import BackwardPass, Bucket, Piece, put_means
from qcomp.integrations.ddp.buckets import BucketedStep, SavesState, with_own_moments
from qcomp.integrations.ddp.changed_gradients import GradientRecord, shared_verdict
from qcomp.integrations.ddp.parameters import inside
from qcomp.private_names.torch import hooks_of, is_joined_without

_CLIP = (
    "To clip, pass clip_norm= to the optimizer, and turn off what else clips: clip_grad_norm_, gradient_clip_val of "
    "Lightning, or max_grad_norm of the Trainer of Hugging Face, which clips unless it is 0"
)


class OverlappedOptimizer(SavesState, Joinable):
    """1-bit Adam, or another optimizer that compresses, for a model under DistributedDataParallel.

    It registers a communication hook that averages gradients in the warm-up and momenta later, bucket by bucket during
    the backward pass. `step` then updates the parameters. The steps equal ``optimizer.step`` on all gradients at once,
    bit for bit.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        A model without a communication hook, preferably with ``gradient_as_bucket_view=True``. A parameter that no rank
        used in a step counts as having a gradient of zero.
    optimizer : Optimizer or callable
        `qcomp.OneBitAdam`, `qcomp.QAdam`, `qcomp.Muon`, `qcomp.CompressedSGD`, ... With ``clip_norm`` the exchange
        starts when the last gradient has arrived, since the norm needs all of them. If settings change between steps: a
        callable that returns the optimizer of the next backward pass, and its settings as text, which the ranks
        compare.
    comm : communicator, optional
        By default a `TorchCommunicator` of the model's process group. Models in one backward pass must not share a
        communicator.

    Raises
    ------
    MismatchError
        On every rank, if the ranks differ in the optimizer's settings or in the model.
    ValueError
        If the optimizer needs all gradients before it can exchange any, as `qcomp.Muon` with ``whiten_steps`` does, or
        needs two gradients of each parameter.

    Notes
    -----
    While the optimizer averages gradients (in the exact warm-up; always with `qcomp.CompressedSGD`), ``p.grad`` is the
    mean over the ranks after the backward pass, and `step` uses its current value: ``clip_grad_norm_`` and the like
    work as with any optimizer under DistributedDataParallel. While it averages momenta, and always with `qcomp.Muon`,
    ``p.grad`` is this rank's own gradient, which has been exchanged already; `step` raises if it was changed. In the
    warm-up, `step` only warns of a change.

    With uneven inputs, use ``Join([model, optimizer])`` with the model first: a rank without inputs then takes part in
    the steps of the others.

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

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer | Callable[[], tuple[Optimizer, str]],
        comm: Verbs | None = None,
    ) -> None:
        super().__init__()
        model = inside(model)
        self._live = optimizer if callable(optimizer) and not isinstance(optimizer, type) else None
        first: Any = optimizer
        self._used: Any = first if self._live is None else self._live()[0]
        self._told = ""
        self._agreed = threading.Event()
        self._disagreement: MismatchError | None = None
        self._step = BucketedStep(
            self._used, model, comm, deliver=self._deliver, finish=self._finish, leaves_out_unused=False
        )
        self._model = model
        self._saves = Saves()
        self._record: GradientRecord | None = None
        self._is_written_to: bool | None = None
        """Whether something writes to gradients between backward pass and step, perhaps without changing them. None
        before the first step, which after a restart may be a step that averages momenta."""
        self._some_write: bool | None = None
        """Whether something writes to gradients on any rank; None before the first step that averages momenta."""
        self._may_change = False
        """Whether gradients were changed in an exact step, which is warned of once."""
        try:
            model.register_comm_hook(self, _exchange)
        except RuntimeError as error:
            self._step.close()
            known = [f", {hook.__module__}.{hook.__qualname__}," for hook in hooks_of(model)]
            raise RuntimeError(
                f"model has a communication hook already{', '.join(known[:1])} and DistributedDataParallel takes only "
                "one; expected a model without a hook, since the optimizer averages: leave out the hook, or model="
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled, even as a part of the model: a copy would share the communicator."""
        raise TypeError(
            "a DistributedDataParallel whose gradients an optimizer averages cannot be copied or pickled, because the "
            "optimizer has a communicator: copy model.module, or save state_dict() of model and optimizer"
        )

    @property
    def state(self) -> OptimizerState:
        """The optimizer's state after the last step; the next step overwrites its arrays."""
        return self._step.state

    @property
    def _running(self) -> BucketedStep:
        return self._step

    @property
    def comm(self) -> Any:
        """The communicator over which the ranks average."""
        return self._step.comm

    @property
    def parameters(self) -> tuple[tuple[str, ...], list[Any]]:
        """The names of the parameters that DistributedDataParallel averages, and the parameters."""
        return self._step.params.names, self._step.params.tensors

    @property
    def in_use(self) -> Optimizer:
        """The optimizer with the settings of the last backward pass."""
        return self._step.optimizer

    def step(self) -> None:
        """Update the parameters with the averages of the backward pass.

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank was not finite, unless the optimizer skips such steps. Parameters
            and state do not change.
        MismatchError
            On every rank, if settings that may change differed between ranks in the backward pass.
        RuntimeError
            If there was no backward pass since the last step, or it did not finish, or settings have changed since. On
            every rank, if a gradient was changed on any rank after its momentum was averaged; only on that rank, if no
            rank had written to gradients before the first step that averages momenta.

        Warns
        -----
        UserWarning
            Once, if a gradient was changed in the warm-up.
        """
        self._saves.forget()
        step, running = self._step, self._step.running
        if not running.ended:
            raise RuntimeError(
                "step was called, but since the last step no backward pass has averaged the gradient of "
                f"{step.params.named(running.missing)}. If a forward pass does not use all parameters, create "
                "DistributedDataParallel with find_unused_parameters=True"
            )
        self._require_told()
        if running.refusal is not None:
            if step.optimizer.nonfinite == "raise":
                step.discard()
                raise running.refusal
            step.skip()
            return
        gradients = self._gradients_of(running)
        with torch.no_grad():
            means = step.take()
            values = list(means.values)
            for number, gradient in gradients.items():
                values[number] = to_compute_dtype(gradient)
            old = step.values()
            before = step.state
            moved, step.state = step.optimizer.finish(
                old, means._replace(values=tuple(values), donate=True), before
            )
            for param, value, new in zip(step.params.tensors, old, moved, strict=True):
                if new.data_ptr() != value.data_ptr():
                    param.copy_(new)
            compared = compare_new_stage(step.optimizer, before, step.state, old[0])
            drive(owned(compared, owner_of(step.optimizer, before)), step.comm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch's optimizers do."""
        for param in self._step.params.tensors:
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.zero_()

    def adopt(self, saved: Any, optimizer: Optimizer, lost: Literal["raise", "drop"]) -> None:
        """Continue from a saved state, with an optimizer of the saved settings. The next pass reads settings anew."""
        before, self._used = self._step.optimizer, None
        self._step.use(optimizer)
        try:
            self.load_state_dict(saved, lost=lost)
        except Exception:
            self._step.use(before)
            raise

    def exchange(self, bucket: Any) -> Any:
        """Start to average a bucket, for `step`. The first bucket of a backward pass also reads changed settings."""
        if is_joined_without(self._model, self):
            use = "torch.distributed.algorithms.Join([model, optimizer]), with the model first"
            if self._live is not None:  # torch's Join cannot make steps of an optimizer of torch
                use = "a hook, qcomp.integrations.ddp.hook, or an OverlappedOptimizer, which Join can take"
            raise RuntimeError(
                "a rank without inputs must take part in the steps of the others, so model.join() is not enough: use "
                + use
            )
        if self._live is not None and self._step.is_idle:
            optimizer, self._told = self._live()
            if optimizer is not self._used:
                self._step.use(optimizer)
                self._used = optimizer
            self._agreed.clear()
            self._step.run_beside(self._compared(), done=self._note)
        return self._step.exchange(bucket)

    def step_if_averaged(self) -> None:
        """Make a step if a complete backward pass has been averaged since the last one."""
        if self._step.running.ended:
            self.step()

    def join_hook(self, **_: Any) -> JoinHook:
        """Return the hook that makes the steps of a rank without inputs, for torch's ``Join``."""
        return _StepsOfOthers(self)

    @property
    def join_device(self) -> Any:
        """The device of the model, for torch's ``Join``."""
        return self._model.join_device

    @property
    def join_process_group(self) -> Any:
        """The process group of the model, for torch's ``Join``."""
        return self._model.join_process_group

    def _go_on_from(self, loaded: OptimizerState) -> None:
        self._step.discard()  # its averages belong to another state
        self._step.state = with_own_moments(loaded)

    def _compared(self) -> Stages[MismatchError | None]:
        """Return how the settings differ between ranks; raising an error here would end all later exchanges."""
        try:
            settings = settings_since(self._told, self._step.optimizer, self.state)
            yield from same_settings(settings, self.state, self._step.params.tensors[0])
        except MismatchError as error:
            return error
        return None

    def _note(self, outcome: Any) -> None:
        """Record the outcome of the comparison; errors of the communicator are reported by the buckets."""
        self._disagreement = outcome if isinstance(outcome, MismatchError) else None
        self._agreed.set()

    def _require_told(self) -> None:
        """Raise unless the settings are still as they were in the backward pass, on all ranks."""
        if self._live is None:
            return
        self._agreed.wait()
        if self._disagreement is not None:
            self._step.discard()
            raise self._disagreement
        _, now = self._live()
        if now != self._told:
            raise RuntimeError(
                f"the settings of param_groups were {self._told} in the backward pass, which has used them, but are "
                f"{now} now: change them before the backward pass, or after step(), as scheduler.step() does"
            )

    def _deliver(self, bucket: Bucket) -> None:
        """Replace gradients with their means; means of momenta wait for the step."""
        for part in bucket.parts:
            if part.of_gradients and not part.refused:
                put_means(part)

    def _finish(self, running: BackwardPass) -> None:
        """Record the gradients at the end of the backward pass."""
        self._record = None
        if running.refusal is not None or not running.in_backward:
            return
        for part in running.parts:
            if part.of_gradients:
                self._fill_in(part)
        self._record = GradientRecord(
            [p.grad for p in self._step.params.tensors], sums=self._is_written_to is not False
        )

    def _fill_in(self, part: Piece) -> None:
        """Set the gradients of parameters that this rank did not use to the means.

        DistributedDataParallel sets no gradient of parameters that no rank used, but these may still have residuals.
        """
        params = self._step.params
        assert part.means is not None
        for number, mean in zip(part.numbers, part.means.values, strict=False):
            if not params.used(number):
                p = params.tensors[number]
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                p.grad.copy_(mean)

    def _gradients_of(self, running: BackwardPass) -> dict[int, Any]:
        """Return the result of `_gradients_to_use`, or raise what it raises on any rank.

        Ranks compare only in steps that average momenta, since only in these each rank has its own gradients, and only
        if some rank has ever written to its gradients. To compare, each rank sends a byte to all others.
        """
        problem, found = None, {}
        try:
            found = self._gradients_to_use(running)
        except RuntimeError as error:
            problem = error
        if self._some_write is not False and not all(part.of_gradients for part in running.parts):
            step = self._step
            verdict = shared_verdict(problem, self._is_written_to is True, self.state.size, step.values()[0])
            self._some_write, problem = drive(owned(verdict, owner_of(step.optimizer, self.state)), step.comm)
        if problem is not None:
            raise problem
        return found

    def _gradients_to_use(self, running: BackwardPass) -> dict[int, Any]:
        """Return the gradients to use instead of the means, because they may have been changed.

        Raises RuntimeError if the change would have no effect, because momenta were averaged, or if a gradient is gone;
        NonFiniteError if a gradient was changed to a value that is not finite.
        """
        if self._record is None:
            return {}  # gradients come only from other ranks' inputs, and this rank cannot have changed them
        params = self._step.params
        now = [p.grad for p in params.tensors]
        changed = self._record.changed(now)
        self._is_written_to = bool(self._is_written_to) or self._record.written_to(now)
        gone = [number for number in changed if params.tensors[number].grad is None]
        if gone:
            raise RuntimeError(
                f"the gradient of {params.named(gone)} is None: call zero_grad() after step(), not before it. A script "
                "that sets gradients to None to leave layers out needs an optimizer without model=, or a hook"
            )
        if changed and not all(part.of_gradients for part in running.parts):
            raise RuntimeError(
                f"the gradient of {params.named(changed)} was changed after the backward pass, but has been "
                f"exchanged already (stage {self.state.stage!r}), so the change would have no effect. {_CLIP}; to "
                "scale, scale the loss; to change gradients between backward pass and step, compress gradients "
                "instead: qcomp.integrations.ddp.hook, or qcomp.CompressedSGD"
            )
        bad = [number for number in changed if not params.tensors[number].grad.isfinite().all()]
        if bad:
            raise NonFiniteError(
                f"the gradient of {params.named(bad)} was changed after the backward pass to infinity or NaN"
            )
        if changed and self.state.stage in ("warmup", "rewarm") and not self._may_change:
            self._may_change = True
            warn_caller(
                f"the gradient of {params.named(changed)} was changed after the backward pass, as clip_grad_norm_ does"
                f". That works in exact steps only: once momenta are averaged, step raises. {_CLIP}"
            )
        return {
            number: params.tensors[number].grad.detach()
            for part in running.parts
            if part.of_gradients and part.means is not None
            for number, mean in zip(part.numbers, part.means.values, strict=False)
            # A gradient of lower precision is the rounded mean, which the step uses only if it was changed.
            if number in changed or params.tensors[number].grad.dtype == mean.dtype
        }


class _StepsOfOthers(JoinHook):
    """The work of a rank without inputs after the model has taken part in the averaging."""

    def __init__(self, optimizer: OverlappedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Make the step whose averages the other ranks have computed."""
        self._optimizer.step_if_averaged()


def _exchange(state: OverlappedOptimizer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = state.exchange(bucket)
    return future
