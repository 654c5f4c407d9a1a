"""Contributions to a round of an asynchronous outer loop: compressed on one rank, averaged on all."""

from collections.abc import Sequence

from qcomp.core import feedback, primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.tensorwise import TensorwiseMean
from qcomp.core.mean.weights import factor_of, product
from qcomp.core.numeric.arrays import Array, array_namespace
from qcomp.core.numeric.random import Key
from qcomp.core.outer.asynchronous_state import AsynchronousState
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.outer.mailbox import Contribution
from qcomp.core.outer.settings import ANCHOR
from qcomp.core.payload import Payload
from qcomp.core.state import OptimizerState


def compressed(
    loop: OuterLoop, moved: Sequence[Array], state: AsynchronousState
) -> tuple[tuple[Payload, ...], tuple[Array, ...]]:
    """Return the payloads of a rank's inner steps, and the residuals to keep once a round has merged the payloads."""
    shared = state.shared
    mean = loop.mean_of(shared)
    assert isinstance(mean, TensorwiseMean)
    shapes = [tuple(x.shape) for x, exact in zip(moved, shared.exact, strict=True) if not exact]
    buckets = iter(mean.bucket_numbers(shapes) if shapes else ())
    key = Key(seed=loop.seed, step=state.step, tensor=shared.stream, rank=state.rank)
    payloads, owed = [], list[Array]()
    for name, w, e, compressor in zip(
        shared.names, moved, state.owed, _compressors(loop, shared), strict=True
    ):
        is_exact = shared.exact[len(owed)]
        own = key if is_exact else key.at(bucket=next(buckets))
        x = w if is_exact or loop.scale == 1 else primitives.scale(w, loop.scale)
        try:
            if is_exact or not mean.keeps_residuals:
                payload, after = compressor.compress(x, key=own), e
            else:
                before = e if loop.decay == 1 else primitives.scale(e, loop.decay)
                payload, after = feedback.compensated(compressor, x, before, key=own)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"the outer gradient of {name!r} on rank {state.rank} is not finite, or too large to compress, in "
                f"step {state.step}: {error}"
            ) from error
        payloads.append(payload)
        owed.append(after)
    return tuple(payloads), tuple(owed)


def means_of(
    loop: OuterLoop, shared: OptimizerState, contributions: Sequence[Contribution]
) -> tuple[Array, ...]:
    """Return the weighted mean of some contributions, which are added in the given order."""
    weights = [each.weight for each in contributions]
    factors = [factor_of(weight, weights) for weight in weights]
    means = []
    for number, (x, compressor) in enumerate(
        zip(shared.arrays[ANCHOR], _compressors(loop, shared), strict=True)
    ):
        payloads = [each.payloads[number] for each in contributions]
        for payload in payloads:
            compressor.require_own(payload, x, f"the parameter {shared.names[number]!r}")
        counts_senders = loop.averaging.divisor == "senders"
        average = primitives.average_of_senders if counts_senders else primitives.average
        if set(factors) == {1.0}:
            means.append(average(compressor, payloads, x))
        else:
            means.append(_weighted_mean(compressor, payloads, factors, x, counts_senders=counts_senders))
    return tuple(means)


def _compressors(loop: OuterLoop, shared: OptimizerState) -> list[Compressor]:
    """Return each tensor's compressor, which may depend on the tensor's shape."""
    shapes = [tuple(x.shape) for x in shared.arrays[ANCHOR]]
    compressed = [shape for shape, exact in zip(shapes, shared.exact, strict=True) if not exact]
    chosen = iter(loop.mean_of(shared).compressors_of(compressed) if compressed else ())
    return [Identity() if exact else next(chosen) for exact in shared.exact]


def _weighted_mean(
    compressor: Compressor,
    payloads: Sequence[Payload],
    factors: Sequence[float],
    like: Array,
    *,
    counts_senders: bool,
) -> Array:
    """Return the mean of decompressed payloads times factors.

    With ``counts_senders``, each element is divided by the number of ranks that sent it, if the compressor is sparse.
    """
    xp = array_namespace(like)
    total, senders = xp.zeros_like(like), xp.zeros_like(like)
    for payload, factor in zip(payloads, factors, strict=True):
        value = primitives.decode(compressor, payload, like)
        total = total + product(value, factor)
        senders = senders + xp.astype(value != 0, value.dtype)
    if counts_senders and compressor.traits.kept is not None:
        return primitives.finish_senders(total, senders)
    return primitives.finish_mean(total, len(payloads))
