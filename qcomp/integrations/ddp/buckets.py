"""The step of an optimizer whose gradients come bucket by bucket, as DistributedDataParallel brings them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.comm.verbs import Verbs
from qcomp.core.errors import NonFiniteError
from qcomp.core.exchange import MeanState
from qcomp.core.optimizers.average import Average, Means
from qcomp.core.optimizers.compression import CompressingOptimizer
from qcomp.core.state import OptimizerState
from qcomp.core.tensorwise import TensorwiseMean
from qcomp.core.transport import Stages
from qcomp.integrations.ddp.conveyor import Conveyor, Job
from qcomp.integrations.ddp.stream import SideStream

__all__ = ["Bucket", "BucketedStep", "Part"]

PART_BYTES = 8 << 20
"""The least bytes of gradients that are exchanged by themselves, while the next are compressed."""


@dataclass(eq=False)
class Part:
    """Some tensors of a bucket, and what has become of them in this step."""

    tensors: tuple[int, ...]
    """Their numbers among the parameters, in rising order."""
    gradients: tuple[Any, ...]
    means: Means | None = None
    over: bool = False


@dataclass(eq=False)
class Bucket:
    """Some of a model's tensors."""

    parts: tuple[Part, ...]
    buffer: Any
    last: bool
    future: Any
    refused: bool = False
    """Whether a value on some rank was not finite."""
    error: BaseException | None = None
    """What else went wrong."""

    @property
    def over(self) -> bool:
        """Whether nothing more becomes of it."""
        return all(part.over for part in self.parts)


class BucketedStep:
    """Averages what an optimizer asks for in each bucket, beside the backward pass, and puts the answers together.

    The step is that of the optimizer on all gradients at once, bit for bit, whatever the buckets are, because the
    optimizer cuts every tensor for the ranks by itself.

    Parameters
    ----------
    optimizer : CompressingOptimizer
        Without ``clip_norm`` and ``watch``: these need all gradients before the first is sent.
    model : torch.nn.parallel.DistributedDataParallel
    comm : Verbs, optional
        By default a `TorchCommunicator` of the model's process group.

    Attributes
    ----------
    optimizer : CompressingOptimizer
    comm : Verbs
    names : tuple of str
        Of the parameters that require a gradient, as in ``model.module``.
    params : list of torch.nn.Parameter
    state : OptimizerState
        After the last step.
    """

    def __init__(self, optimizer: CompressingOptimizer, model: Any, comm: Verbs | None) -> None:
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"model is a {type(model).__name__}; expected a torch.nn.parallel.DistributedDataParallel"
            )
        self.optimizer = _separable(optimizer)
        self.comm = TorchCommunicator(model.process_group) if comm is None else comm
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        self.names = tuple(name for name, _ in named)
        self.params: list[Any] = [p for _, p in named]
        self.state = self.optimizer.init([p.detach() for p in self.params], self.comm, self.names)
        self._number = {id(p): i for i, p in enumerate(self.params)}
        shapes = [tuple(p.shape) for p, exact in zip(self.params, self.state.exact, strict=True) if not exact]
        self._draws = self._mean_of(self.state).bucket_numbers(shapes) if shapes else ()
        # A tensor's number among those that are compressed.
        self._compressed = [sum(not exact for exact in self.state.exact[:i]) for i in range(len(self.params))]
        # The residuals of a state, and those of each tensor in it, which takes time to find out.
        self._known: tuple[MeanState | None, Sequence[MeanState]] = (None, ())
        self._conveyor = Conveyor(self.comm)
        self._stream = SideStream(self.params[0].device)
        self._buckets: list[Bucket] = []
        self.refusal: NonFiniteError | None = None
        """The first error of this step about a value that is not finite, on any rank."""

    @property
    def is_complete(self) -> bool:
        """Whether all buckets of a backward pass have come and are over."""
        return bool(self._buckets) and self._buckets[-1].last and all(b.over for b in self._buckets)

    def exchange(self, bucket: Any, deliver: Callable[[Bucket], None]) -> Any:
        """Start to average a bucket.

        Parameters
        ----------
        bucket : torch.distributed.GradBucket
        deliver : callable
            Is given the bucket when it is over, with means of all its parts unless a value was not finite; what it
            raises, the backward pass raises. Called in the conveyor's thread.

        Returns
        -------
        torch.futures.Future
            Of the buffer of the bucket.
        """
        if bucket.index() == 0 and self._buckets:
            raise RuntimeError(
                "a backward pass begins, and the one before did not come to its end or its gradients were not used by "
                "a step: call step() after each backward pass, and accumulate gradients in model.no_sync()"
            )
        pairs = sorted(
            zip((self._number[id(p)] for p in bucket.parameters()), bucket.gradients(), strict=True),
            key=lambda pair: pair[0],
        )
        record = Bucket(_parts(pairs), bucket.buffer(), bucket.is_last(), self._stream.future())
        self._buckets.append(record)
        context = partial(self._stream.after, self._stream.mark())
        jobs = []
        for part in record.parts:
            over = partial(self._over, record, part, deliver)
            jobs.append(Job(self._stages(part), done=over, failed=over, context=context))
        self._conveyor.put(jobs, last=record.last)
        return record.future

    def take(self) -> Means:
        """Return what was averaged of all tensors, as `Average.stages` does; the next step can begin."""
        buckets, self._buckets, self.refusal = self._buckets, [], None
        count = len(self.params)
        values: dict[int, Any] = {}
        own: dict[int, Any] = {}
        kept: dict[int, MeanState] = {}
        for part in (part for bucket in buckets for part in bucket.parts):
            means = part.means
            assert means is not None
            # What is averaged besides has numbers behind those of the parameters, in the order of these.
            places = [i + rest for rest in range(0, 2 * count, count) for i in part.tensors]
            values.update(zip(places, means.values, strict=False))
            own.update(zip(part.tensors, means.own, strict=False))
            kept.update(self._split(means.exchange, part.tensors))
        exchange = self.state.exchange
        if kept:
            residuals = [kept[i] for i in sorted(kept)]
            exchange = TensorwiseMean.join(residuals)
            self._known = exchange, residuals
        in_order = (tuple(found[i] for i in sorted(found)) for found in (values, own))
        means = Means(next(in_order), exchange, next(in_order))
        self._stream.hand_over([*means.values, *means.own, *exchange.worker, *exchange.server])
        return means

    def discard(self) -> None:
        """Forget what was averaged; the state stays as it was, and the next step can begin."""
        self._buckets, self.refusal = [], None

    def _over(
        self,
        bucket: Bucket,
        part: Part,
        deliver: Callable[[Bucket], None],
        outcome: Means | BaseException,
    ) -> None:
        if isinstance(outcome, NonFiniteError):
            self.refusal = self.refusal or outcome
            bucket.refused = True
        elif isinstance(outcome, BaseException):
            bucket.error = bucket.error or outcome
        else:
            part.means = outcome
        part.over = True
        if not bucket.over:
            return
        try:
            if bucket.error is not None:
                raise bucket.error
            deliver(bucket)
        except BaseException as error:
            bucket.future.set_exception(error)
        else:
            bucket.future.set_result(bucket.buffer)

    def _stages(self, part: Part) -> Stages[Means]:
        """Ask the optimizer what it wants of these gradients, and average that."""
        average: Average = self.optimizer.prepare(list(part.gradients), self._part(part.tensors))
        numbers = tuple(self._draws[self._compressed[i]] for i in self._exchanged(part.tensors))
        parts = tuple(
            p._replace(mean=replace(p.mean, numbers=numbers)) if isinstance(p.mean, TensorwiseMean) else p
            for p in average.parts
        )
        return (yield from average._replace(parts=parts).stages())

    def _part(self, tensors: Sequence[int]) -> OptimizerState:
        """Return the state of some tensors alone."""
        state = self.state

        def some(arrays: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(arrays[i] for i in tensors) if arrays else ()

        exchanged = self._exchanged(tensors)
        exchange = state.exchange
        if exchange.worker:
            residuals = self._residuals()
            chosen = [residuals[self._compressed[i]] for i in exchanged]
            empty = exchange._replace(worker=(), server=(), shapes=())
            exchange = TensorwiseMean.join(chosen) if chosen else empty
        compressors = state.compressors
        return state._replace(
            names=some(state.names),
            exact=some(state.exact),
            momentum=some(state.momentum),
            variance=some(state.variance),
            exchange=exchange,
            arrays={kind: some(arrays) for kind, arrays in state.arrays.items()},
            compressors=tuple(compressors[self._compressed[i]] for i in exchanged) if compressors else (),
        )

    def _residuals(self) -> Sequence[MeanState]:
        """Return the residuals of each tensor that is compressed."""
        exchange, residuals = self._known
        if exchange is not self.state.exchange:  # others than those of the last step
            exchange = self.state.exchange
            residuals = self._mean_of(self.state).split(exchange, len(self._draws))
            self._known = exchange, residuals
        return residuals

    def _split(self, exchange: MeanState, tensors: Sequence[int]) -> dict[int, MeanState]:
        """Return the new residuals of each of some tensors, if any are kept; there are as many as of the old."""
        if not exchange.worker:
            return {}
        worker, server, residuals = iter(exchange.worker), iter(exchange.server), self._residuals()
        return {
            i: old._replace(
                worker=tuple(islice(worker, len(old.worker))), server=tuple(islice(server, len(old.server)))
            )
            for i in self._exchanged(tensors)
            for old in [residuals[self._compressed[i]]]
        }

    def _exchanged(self, tensors: Sequence[int]) -> list[int]:
        return [i for i in tensors if not self.state.exact[i]]

    def _mean_of(self, state: OptimizerState) -> TensorwiseMean:
        mean = self.optimizer.mean_of(state)
        assert isinstance(mean, TensorwiseMean)
        return mean


def _parts(pairs: Sequence[tuple[int, Any]]) -> tuple[Part, ...]:
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
    return tuple(
        Part(tuple(number for number, _ in part), tuple(gradient for _, gradient in part)) for part in parts
    )


def _separable(optimizer: CompressingOptimizer) -> CompressingOptimizer:
    """Return an optimizer as it must be for buckets; raise unless it can be that."""
    if not isinstance(optimizer, CompressingOptimizer):
        raise TypeError(
            f"optimizer is {optimizer!r}; expected one that compresses, such as qcomp.OneBitAdam(...)"
        )
    for argument in ("clip_norm", "watch"):
        if getattr(optimizer, argument, None) is not None:
            raise ValueError(
                f"{argument} is {getattr(optimizer, argument)!r}; expected None: it needs the gradients of all "
                "parameters before the first is sent"
            )
    tensorwise = replace(optimizer, tensorwise=True)
    if not isinstance(tensorwise.mean, TensorwiseMean):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, which keeps {type(tensorwise.mean).__name__}; expected one "
            "that averages by a CompressedMean"
        )
    return tensorwise
