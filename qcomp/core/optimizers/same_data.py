"""The check that ranks learn from different data, made once: averaging what all ranks have gains nothing."""

import hashlib
from collections.abc import Sequence

from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.numeric.arrays import Array, array_namespace, digest, from_host_bytes, host_bytes
from qcomp.core.reporting import warn_caller

__all__ = ["compare_gradients"]

_BYTES = 4
"""Of a fingerprint. Of four billion runs with different data one is warned in vain."""
_NOTHING = bytes(_BYTES)


def compare_gradients(gradients: Sequence[Array | None], size: int, like: Array, who: str) -> Stages[None]:
    """Warn on every rank if all have the same gradients; sends 4 bytes to all others.

    Parameters
    ----------
    gradients : sequence of arrays or None
        This rank's; None where there is none.
    size : int
        Number of ranks.
    like : array
        Gives the library and the device of the buffers.
    who : str
        Who averages over the ranks.
    """
    arrived = yield AllGather(from_host_bytes(_fingerprint(gradients), like), (_BYTES,) * size)
    found = {bytes(host_bytes(part)) for part in arrived}
    if size > 1 and len(found) == 1 and found != {_NOTHING}:
        warn_caller(
            f"all {size} ranks have the same gradients in the first step, so {who} averages in vain: either they train "
            "on the same data, or something averages before, such as DistributedDataParallel. Give each rank data of "
            "its own, for instance by a DistributedSampler or a seed that depends on the rank. Do not wrap the model, "
            "or pass it as model= to an optimizer that takes it"
        )


def _fingerprint(gradients: Sequence[Array | None]) -> bytes:
    """Return bytes that are equal where all elements are; zeros if all elements are."""
    held = [x for x in gradients if x is not None]
    if not any(bool(array_namespace(x).any(x != 0)) for x in held):
        return _NOTHING
    return hashlib.sha256("".join(map(digest, held)).encode()).digest()[:_BYTES]
