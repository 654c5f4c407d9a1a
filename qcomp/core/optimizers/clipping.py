"""`clip_scale`: the factor that clips gradients by their global norm over all ranks."""

import math
import struct
from collections.abc import Sequence

from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.numeric.arrays import Array, array_namespace, device, host_bytes, to_compute_dtype
from qcomp.core.numeric.sums import sum_of_squares


def clip_scale(
    clip_norm: float, grads: Sequence[Array], size: int, replicas: int | None = None
) -> Stages[float]:
    """Return the factor, equal on all ranks, that brings sqrt(mean_i |g_i|^2) over ``size`` ranks down to a norm.

    With ``replicas``, the number of replicas, each rank holds a shard of one replica's gradients, and the mean is over
    the replicas. Raises NonFiniteError on every rank, if the norm of any rank's gradients is not finite.
    """
    xp = array_namespace(grads[0])
    square = math.fsum(sum_of_squares(to_compute_dtype(g)) for g in grads)
    message = xp.asarray(list(struct.pack("<d", square)), dtype=xp.uint8, device=device(grads[0]))
    arrived = yield AllGather(message, (8,) * size)
    squares = [struct.unpack("<d", host_bytes(part))[0] for part in arrived]
    norm = math.sqrt(math.fsum(squares) / (replicas or size))
    if not math.isfinite(norm):
        bad = ", ".join(str(rank) for rank, value in enumerate(squares) if not math.isfinite(value))
        raise NonFiniteError(f"the norm of the gradients on rank {bad} is not finite")
    return min(1.0, clip_norm / norm) if norm > 0 else 1.0
