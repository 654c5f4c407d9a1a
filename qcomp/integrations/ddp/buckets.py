"""The step of an optimizer whose gradients arrive bucket by bucket from DistributedDataParallel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from qcomp.checkpoint.saves import Saves
from qcomp.comm.torch_dist import over_ranks
from qcomp.comm.verbs import Verbs
from qcomp.core.checkpoint.gathering import states_in
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.stages import AllGather, Stages, fuse, owned
from qcomp.core.mean.tensorwise import SeparableMean
from qcomp.core.numeric.arrays import host_bytes
from qcomp.core.optimizers.agreement import GIVE_OWN_DATA, first_elements, same_gradients
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.moved_zeros import look_at, moved_zeros, warn_of_moved_zeros
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState
from qcomp.core.variance.late import of_tensors
from qcomp.integrations.ddp.backward import BackwardPass, Bucket, Piece
from qcomp.integrations.ddp.before_steps import NOT_FOR_THIS_MODEL
from qcomp.integrations.ddp.exchange_thread import ExchangeThread, ThreadJob
from qcomp.integrations.ddp.parameters import AveragedParameters, inside
from qcomp.integrations.ddp.stream import SideStream
from qcomp.private_names.torch import call_at_end, counts_ranks_with_inputs

PART_BYTES = 8 << 20
"""The smallest part, in bytes of gradients, that is exchanged while the next one is compressed."""


class BucketedStep:
    """Averages what an optimizer requests for each bucket during the backward pass, and combines the results.

    The step equals the optimizer's step on all gradients at once, bit for bit, whatever the buckets, because the
    optimizer cuts every tensor into chunks separately. With ``clip_norm`` the exchange starts when the last gradient
    has arrived, since the norm needs all of them.

    By default, ``comm`` is a `TorchCommunicator` of the model's process group. ``deliver`` is called in the exchange
    thread with each bucket once its parts have been averaged or have failed, before DistributedDataParallel reads its
    buffer. ``finish`` is called with each backward pass at its end, after DistributedDataParallel has set ``p.grad``;
    its exceptions propagate from the backward pass. With ``leaves_out_unused`` a parameter that no rank used keeps its
    residuals, and its gradient must not be delivered.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: Any,
        comm: Verbs | None,
        *,
        deliver: Callable[[Bucket], None],
        finish: Callable[[BackwardPass], None],
        leaves_out_unused: bool,
    ) -> None:
        model = inside(model)
        self._model = model
        self.params = AveragedParameters(model)
        self.optimizer = _separable(optimizer)
        self.comm = over_ranks(model.process_group if comm is None else comm)
        self._deliver = deliver
        self._finish = finish
        self._call_at_end = call_at_end()
        self._leaves_out_unused = leaves_out_unused and self.params.some_may_be_unused
        self.state = self.optimizer.init(self.values(), self.comm, self.params.names)
        exacts = self.state.exact
        shapes = [tuple(p.shape) for p, exact in zip(self.params.tensors, exacts, strict=True) if not exact]
        self._places = self._mean_of(self.state).places(shapes, self.state.size) if shapes else ()
        # Each tensor's index among the compressed tensors.
        self._compressed = [sum(not exact for exact in exacts[:i]) for i in range(len(exacts))]
        # A cache: the residuals of a state, and the same residuals split by tensor.
        self._known: tuple[MeanState | None, Sequence[MeanState]] = (None, ())
        self._exchange_thread = ExchangeThread(self.comm)
        self._stream = SideStream(self.params.tensors[0].device)
        self.running = self._new_pass()
        """The current backward pass, or the last one until `take` or `discard`."""

    def values(self) -> list[Any]:
        """Return the parameters outside automatic differentiation."""
        return [p.detach() for p in self.params.tensors]

    def exchange(self, bucket: Any) -> Any:
        """Start to average a bucket.

        Parameters
        ----------
        bucket : torch.distributed.GradBucket

        Returns
        -------
        torch.futures.Future
            Resolves to the bucket's buffer.
        """
        if counts_ranks_with_inputs(self._model):
            raise RuntimeError(
                "divide_by_initial_world_size is False, but means are over all ranks, also over those without inputs: "
                "leave it out of Join or model.join(), which makes it True. If the Join has ended already, torch keeps "
                "its settings: reset them first: with Join([model], enable=False): pass"
            )
        gradients = self.params.gradients_in(bucket)
        if not self.running.expects([number for number, _ in gradients]):
            raise RuntimeError(
                "a backward pass starts, but the previous one did not finish or no step used its gradients: call "
                "step() after each backward pass, and accumulate gradients in model.no_sync(). If the loss of "
                "another model goes through this one, as a generator's through its discriminator, "
                f"{NOT_FOR_THIS_MODEL}"
            )
        self._exchange_thread.occupy()
        running = self.running
        parts = [gradients] if self._low_rank else _cut(gradients)
        record = Bucket(tuple(map(self._part_of, parts)), bucket.buffer(), self._stream.future())
        running.add(record)
        end = partial(self._end, running)
        try:
            # DistributedDataParallel queues the callback that sets p.grad later. A callback that is queued while
            # callbacks run comes after that one.
            self._call_at_end(lambda: self._call_at_end(end))
        except RuntimeError:
            running.in_backward = False  # Join runs the hook on a rank without inputs
        if not self.state.step:
            self._compare(running, gradients)
        if self.optimizer.clip_norm is None:
            self._put([record], scale=1.0)
        elif running.is_complete:
            self._put_clipped()
        if not running.in_backward:
            end()
        return record.future

    @property
    def is_idle(self) -> bool:
        """Whether no bucket of the next backward pass has arrived yet."""
        return not self.running.buckets

    def close(self) -> None:
        """End the thread that averages; no backward pass may follow."""
        self._exchange_thread.close()

    def use(self, optimizer: Optimizer) -> None:
        """Make the next steps with an optimizer that differs only in settings of the update."""
        self.optimizer = _separable(optimizer)

    def run_beside(self, stages: Stages[Any], *, done: Callable[[Any], None]) -> None:
        """Run a computation in stages beside the first bucket of a backward pass; ``done`` gets its result or error."""
        self._exchange_thread.occupy()
        context = partial(self._stream.after, self._stream.mark())
        owned_stages = self._owned(stages, "before the first bucket")
        self._exchange_thread.put(
            [ThreadJob(owned_stages, done=done, failed=done, context=context)], last=False
        )

    def take(self) -> Means:
        """Return the averages of all tensors, as `Average.stages` does; the next step can start afterwards."""
        parts, self.running = self.running.parts, self._new_pass()
        count = len(self.params.tensors)
        values: dict[int, Any] = {}
        own: dict[int, Any] = {}
        kept: dict[int, MeanState] = {}
        for part in parts:
            means = part.means
            assert means is not None
            # Further averages are numbered after the parameters, in the same order.
            rounds = range(len(means.values) // len(part.numbers))
            places = [i + number * count for number in rounds for i in part.numbers]
            values.update(zip(places, means.values, strict=True))
            own.update(zip(part.numbers, means.own, strict=False))
            kept.update(self._split(means.exchange, part))
        exchange = self.state.exchange
        if kept:
            residuals = [kept[i] for i in sorted(kept)]
            exchange = self._mean_of(self.state).join(residuals)
            self._known = exchange, residuals
        in_order = (tuple(found[i] for i in sorted(found)) for found in (values, own))
        means = Means(next(in_order), exchange, next(in_order))
        self._stream.hand_over([*means.values, *means.own, *exchange.worker, *exchange.server])
        return means

    def discard(self) -> None:
        """Drop the averages without changing the state, so that the next step can start."""
        self._exchange_thread.release()
        self.running = self._new_pass()

    def skip(self) -> None:
        """Skip this step, because a value was not finite."""
        self.discard()
        self.state = self.state._replace(skipped=self.state.skipped + 1)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor."""
        rescaled = self._mean_of(self.state).rescaled(self.state.exchange, factor)
        self.state = self.state._replace(exchange=rescaled)

    def _owned(self, stages: Stages[Any], what: str) -> Stages[Any]:
        """Label the exchanges of a computation with their step and their purpose."""
        owner = owner_of(self.optimizer, self.state)
        return owned(stages, owner._replace(doing=f"{owner.doing}, {what},"))

    def _new_pass(self) -> BackwardPass:
        return BackwardPass(len(self.params.tensors))

    def _part_of(self, pairs: Sequence[tuple[int, Any]]) -> Piece:
        numbers, gradients = zip(*pairs, strict=True)
        # Means may overwrite what is sent, but not the gradient of a parameter that nobody used.
        sent = tuple(
            gradient if self.params.used(number) or not self._leaves_out_unused else gradient.clone()
            for number, gradient in pairs
        )
        return Piece(numbers, gradients, sent)

    def _compare(self, running: BackwardPass, gradients: Sequence[tuple[int, Any]]) -> None:
        """Copy a bucket's sample before means overwrite it; compare the samples once all buckets have arrived."""
        samples: list[Any] = [first_elements(gradient) for _, gradient in gradients]
        running.samples += [sample.clone() for sample in samples]
        if not running.is_complete:
            return

        def compared(are_same: bool) -> None:
            running.same_everywhere = are_same

        def fail(error: BaseException) -> None:
            running.error = running.error or error

        same = same_gradients(running.samples, self.state.size, running.samples[0])
        stages = self._owned(same, "comparison of gradients")
        context = partial(self._stream.after, self._stream.mark())
        self._exchange_thread.put(
            [ThreadJob(stages, done=compared, failed=fail, context=context)], last=False
        )

    def _put(self, buckets: Sequence[Bucket], *, scale: float) -> None:
        """Start to average some buckets."""
        running = self.running
        context = partial(self._stream.after, self._stream.mark())
        jobs = []
        for bucket in buckets:
            for part in bucket.parts:
                over = partial(self._part_is_over, running, bucket, part)
                first = self.params.names[part.numbers[0]]
                stages = self._owned(self._stages(part, scale), f"gradients from {first!r} on")
                jobs.append(ThreadJob(stages, done=over, failed=over, context=context, joins=self._low_rank))
        self._exchange_thread.put(jobs, last=running.is_complete)

    def _put_clipped(self) -> None:
        """Start to average all buckets, once the ranks know the global norm."""
        running = self.running
        gradients = [gradient for part in running.parts for gradient in part.gradients]

        def fail(error: BaseException) -> None:
            for bucket in running.buckets:
                for part in bucket.parts:
                    self._part_is_over(running, bucket, part, error)

        self._exchange_thread.put(
            [
                ThreadJob(
                    self._owned(self.optimizer.clip_scale(gradients, self.state), "global norm"),
                    done=lambda scale: self._put(running.buckets, scale=scale),
                    failed=fail,
                    context=partial(self._stream.after, self._stream.mark()),
                )
            ],
            last=True,
        )

    def _part_is_over(
        self, running: BackwardPass, bucket: Bucket, part: Piece, outcome: Means | BaseException
    ) -> None:
        if isinstance(outcome, NonFiniteError):
            running.refusal = running.refusal or outcome
            part.refused = True
            part.gradients = tuple(map(_largest, part.gradients))  # enough to name them later
        elif isinstance(outcome, BaseException):
            running.error = running.error or outcome
        else:
            part.means = outcome
        part.over = True
        if not bucket.over:
            return
        try:
            if running.error is None:
                self._deliver(bucket)
        except BaseException as error:
            running.error = error
        if running.is_complete and all(b.over for b in running.buckets):
            self._settle(running)
        # Errors are raised at the end of the backward pass, since torch changes the type of a future's error.
        bucket.future.set_result(bucket.buffer)

    def _settle(self, running: BackwardPass) -> None:
        """Let the backward pass end, after the ranks have told each other which gradients are not finite."""
        if running.refusal is None or running.error is not None:
            running.settle()
            return
        refused = {
            number: gradient
            for part in running.parts
            if part.refused
            for number, gradient in zip(part.numbers, part.gradients, strict=True)
        }
        numbers = sorted(refused)

        def told(outcome: NonFiniteError | BaseException) -> None:
            if isinstance(outcome, NonFiniteError):
                running.refusal = outcome
            else:
                running.error = outcome
            running.settle()

        names = name_gradients(
            running.refusal,
            [refused[number] for number in numbers],
            [self.params.names[number] for number in numbers],
            self.state,
        )
        stages = self._owned(names, "gradients that are not finite")
        context = partial(self._stream.after, self._stream.mark())
        self._exchange_thread.put([ThreadJob(stages, done=told, failed=told, context=context)], last=True)

    def _end(self, running: BackwardPass) -> None:
        """Report the outcome of a backward pass to the hook or optimizer, once all its buckets have arrived."""
        if running.ended or not running.is_complete:
            return
        running.ended = True
        running.wait()
        self._exchange_thread.release()
        try:
            self.params.require_frozen()
            if running.error is not None:
                raise running.error
            if running.same_everywhere:
                warn_caller(
                    f"all {self.state.size} ranks have the same gradients in the first backward pass, so averaging "
                    f"changes nothing: most likely they train on the same data. {GIVE_OWN_DATA}"
                )
            found = [text for part in running.parts for text in part.moved_zeros]
            warn_of_moved_zeros(found, self.optimizer.mean_of(self.state))
            self._finish(running)
        except BaseException:
            if self.running is running:
                self.discard()
            for p in self.params.tensors:  # no optimizer may step with gradients that were not averaged
                p.grad = None
            raise
        finally:
            self.params.forget_uses()

    def _stages(self, part: Piece, scale: float) -> Stages[Means]:
        """Average what the optimizer requests for these gradients."""
        state = self._part(part.numbers)
        sample = not self.optimizer.mixes_elements
        zeros = (
            look_at(part.sent, state.exact, sample=sample) if self.optimizer.may_move_zeros(state) else None
        )
        average: Average = self.optimizer.prepare(list(part.sent), state, scale=scale)
        places = self._places_of(part.numbers)
        parts = tuple(
            p._replace(mean=p.mean.numbered(places)) if isinstance(p.mean, SeparableMean) else p
            for p in average.parts
        )
        part.of_gradients = average.of_gradients
        overwrite = average.overwrite or average.of_gradients
        average = average._replace(parts=parts, overwrite=overwrite)
        if self._leaves_out_unused:
            results: list[Any] = yield from fuse([average.stages(), self._unused_by_all(part)])
            means, part.unused = results
        else:
            means = yield from average.stages()
        assert isinstance(means, Means)
        if zeros is not None:
            looked = look_at(means.values, state.exact, sample=sample)
            part.moved_zeros = yield from moved_zeros(zeros, looked, state, part.gradients[0])
        return means

    def _unused_by_all(self, part: Piece) -> Stages[frozenset[int]]:
        """Return the parameters of a part that no rank used; sends a byte for each parameter."""
        flags = [self.params.used(number) for number in part.numbers]
        message = torch.tensor(flags, dtype=torch.uint8, device=part.gradients[0].device)
        arrived = yield AllGather(message, (len(flags),) * self.state.size)
        of_ranks = list(map(host_bytes, arrived))
        used = [any(of_tensor) for of_tensor in zip(*of_ranks, strict=True)]
        return frozenset(number for number, is_used in zip(part.numbers, used, strict=True) if not is_used)

    def _part(self, tensors: Sequence[int]) -> OptimizerState:
        """Return a state of only some tensors."""
        state = self.state
        exchanged = self._exchanged(tensors)
        exchange = state.exchange
        if exchange.shapes:
            residuals = self._residuals()
            chosen = [residuals[self._compressed[i]] for i in exchanged]
            empty = exchange._replace(worker=(), server=(), shapes=())
            exchange = self._mean_of(state).join(chosen) if chosen else empty
        compressors = state.compressors
        return of_tensors(state, tensors)._replace(
            exchange=exchange,
            compressors=tuple(compressors[self._compressed[i]] for i in exchanged) if compressors else (),
        )

    def _residuals(self) -> Sequence[MeanState]:
        """Return the residuals of each tensor that is compressed."""
        exchange, residuals = self._known
        if exchange is not self.state.exchange:  # the cache belongs to another state
            exchange = self.state.exchange
            residuals = self._mean_of(self.state).split(exchange, len(self._places))
            self._known = exchange, residuals
        return residuals

    def _split(self, exchange: MeanState, part: Piece) -> dict[int, MeanState]:
        """Return the new residuals of each tensor of a part, if any, cut as the old ones are."""
        if not exchange.shapes:
            return {}
        exchanged, residuals = self._exchanged(part.numbers), self._residuals()
        mean = self._mean_of(self._part(part.numbers)).numbered(self._places_of(part.numbers))
        return {
            i: residuals[self._compressed[i]] if i in part.unused else new
            for i, new in zip(exchanged, mean.split(exchange, len(exchanged)), strict=True)
        }

    def _exchanged(self, tensors: Sequence[int]) -> list[int]:
        return [i for i in tensors if not self.state.exact[i]]

    def _places_of(self, tensors: Sequence[int]) -> tuple[Any, ...]:
        """Return the places of some tensors in the compressed mean, without the tensors that are not compressed."""
        return tuple(self._places[self._compressed[i]] for i in self._exchanged(tensors))

    @property
    def _low_rank(self) -> bool:
        """Whether ranks exchange thin factors. They travel so fast that an exchange for each part would not pay."""
        return self._mean_of(self.state).low_rank

    def _mean_of(self, state: OptimizerState) -> SeparableMean:
        mean = self.optimizer.mean_of(state)
        assert isinstance(mean, SeparableMean)
        return mean


class SavesState(ABC):
    """Base of classes that keep, save and load the state of a `BucketedStep`."""

    _saves: Saves

    @property
    @abstractmethod
    def _running(self) -> BucketedStep:
        """The step whose state is kept."""

    def _go_on_from(self, loaded: OptimizerState) -> None:
        """Make a loaded state the current one."""
        self._running.state = loaded

    def gather_states(self, to: int = 0) -> None:
        """Give one rank the states of all, so that its `state_dict` has them until the state changes. Collective.

        For scripts and frameworks in which one rank saves for all; every rank loads that dict.

        Parameters
        ----------
        to : int
            The rank that will save; it needs memory for the residuals of all ranks.
        """
        step = self._running
        own, like = step.optimizer.state_dict(step.state), step.values()[0]
        self._saves.gather(own, step.optimizer, step.state, step.comm, like=like, root=to)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state as a flat dict of tensors and scalars; see `Optimizer.state_dict`.

        After `gather_states`, the rank that received them returns the states of all ranks, under keys such as "rank 0
        of 2".

        Warns
        -----
        UserWarning
            Once, if only some ranks save their residuals; see ``state_dict`` of the optimizers in `qcomp.torch`.
        """
        step = self._running
        own = step.optimizer.state_dict(with_own_moments(step.state))
        self._saves.note(step.optimizer, step.state, own, step.comm)
        return self._saves.of_all or own

    def load_state_dict(
        self,
        saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        strict: bool = True,
        lost: Literal["raise", "drop"] = "raise",
    ) -> None:
        """Continue from a saved state, possibly of another number of ranks; see `Optimizer.load_state_dict`."""
        step = self._running
        states = states_in(saved, step.comm.rank, step.comm.size)
        loaded = step.optimizer.load_state_dict(
            states, step.values(), step.comm, step.params.names, strict=strict, lost=lost
        )
        self._saves.forget()
        self._go_on_from(loaded)


def with_own_moments(state: OptimizerState) -> OptimizerState:
    """Return a state with its own copies of the moments, since a step overwrites them."""
    moments: tuple[Any, Any] = state.momentum, state.variance
    momentum, variance = (tuple(m.clone() for m in of_kind) for of_kind in moments)
    return state._replace(momentum=momentum, variance=variance)


def _cut(pairs: Sequence[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
    """Cut numbers and gradients of tensors into parts of at least `PART_BYTES`; a tensor is never cut."""
    parts: list[list[tuple[int, Any]]] = [[]]
    filled, left = 0, sum(gradient.nbytes for _, gradient in pairs)
    for number, gradient in pairs:
        if filled >= PART_BYTES <= left:
            parts.append([])
            filled = 0
        parts[-1].append((number, gradient))
        filled += gradient.nbytes
        left -= gradient.nbytes
    return parts


def _largest(gradient: Any) -> Any:
    """Return the largest magnitude in a gradient, which is finite if all elements of the gradient are."""
    return gradient.abs().amax().reshape(1) if gradient.numel() else gradient.clone()


def _separable(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer in the form that buckets need; raise if there is none."""
    averaging: Any = getattr(optimizer, "averaging", None)
    in_parts = isinstance(optimizer, Optimizer) and isinstance(optimizer.compression.mean, SeparableMean)
    if not isinstance(optimizer, Optimizer) or not (in_parts or averaging):
        raise TypeError(
            f"optimizer is {optimizer!r}; expected one that averages with a CompressedMean, such as "
            "qcomp.OneBitAdam(...)"
        )
    if optimizer.two_gradients:
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}; expected one that steps with one gradient: "
            f"{optimizer.two_gradients}, and a backward pass has one. Call its own step, without "
            "DistributedDataParallel"
        )
    if in_parts:
        return optimizer
    changes: dict[str, Any] = {"averaging": replace(averaging, tensorwise=True)}
    return replace(optimizer, **changes)
