"""`weighted`: multiplies each rank's values by a factor, so that their plain mean is the weighted mean."""

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

from qcomp.core import primitives
from qcomp.core.mean.stages import AllGather, Owner, Stages, Transport, drive, owned, require_communicator
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    as_list,
    detached,
    from_host_bytes,
    host_bytes,
    to_compute_dtype,
)
from qcomp.core.reporting import name_ranks

_ADVICE = "pass a weight on all ranks in the same steps, or on none; a rank without data passes weight=0"


def weighted(values: Any, weight: float, comm: Transport) -> Any:
    """Return this rank's values times N w / (w_1 + ... + w_N), with its weight w and the weights of all N ranks.

    The plain mean of these products over the ranks is the weighted mean, whatever averages them: an optimizer of qcomp,
    a `CompressedMean`, or something else. All ranks must call this.

    Parameters
    ----------
    values : array or sequence of arrays
        This rank's values, such as gradients; not written to. With a weight of 0, the values count as zeros, even if
        they are not finite, like the mean loss over no tokens.
    weight : float
        How much the values count in this step, such as the number of this rank's valid tokens: finite and >= 0. Weights
        may differ between ranks and between steps.
    comm : Communicator
        Sends 8 bytes to every other rank.

    Returns
    -------
    array or list of arrays
        New arrays, in the dtype in which the values are computed: float32 for half precision. The result has no
        gradient. To weight a loss, multiply it by ``weighted(torch.ones(()), weight, comm)``.

    Raises
    ------
    ValueError
        On every rank, if the weight of any rank is not a finite number >= 0, or all are 0.
    MismatchError
        On every rank, if some ranks make a different call, such as a step without a weight.

    Notes
    -----
    If all weights are equal the factor is exactly 1. A compressor gets the products. So with an unbiased compressor the
    weighted mean is unbiased, and the sum identity of error feedback (see `CompressedMean`) holds for the weighted
    means, even if weights change in every step.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> def rank_main(comm):
    ...     gradient, tokens = np.float32([[1, 1], [3, 5]][comm.rank]), [300, 100][comm.rank]
    ...     return qcomp.weighted(gradient, tokens, comm).tolist()
    >>> qcomp.comm.run_local(2, rank_main)  # the mean is (300 * [1, 1] + 100 * [3, 5]) / 400
    [[1.5, 1.5], [1.5, 2.5]]
    """
    require_communicator(comm)
    tensors = detached(as_list(values))
    owner = Owner("weights", 0, (), 0, "the exchange", _ADVICE)
    factor = drive(owned(weight_stages(weight, comm.size, tensors[0]), owner), comm)
    results = [product(to_compute_dtype(x), factor) for x in tensors]
    return results if isinstance(values, list | tuple) else results[0]


def weight_stages(weight: float, size: int, like: Array) -> Stages[float]:
    """Return N w / (w_1 + ... + w_N) for this rank's weight w, as a generator of pure stages; see `weighted`."""
    given: Any = weight
    own = math.nan
    if isinstance(given, Real):
        with suppress(OverflowError):  # a Python int may be larger than any float
            own = float(given)
    fits = 0 <= own < math.inf
    own = own if fits else math.nan
    arrived = yield AllGather(from_host_bytes(struct.pack("<d", own), like), (8,) * size)
    weights = [struct.unpack("<d", host_bytes(part))[0] for part in arrived]
    bad = [rank for rank, each in enumerate(weights) if math.isnan(each)]
    if bad:
        here = "" if fits else f": here it is {given!r}"
        if hasattr(given, "shape") and not isinstance(given, Real):
            here += ", an array: convert it to a number with float()"
        raise ValueError(f"weight of {name_ranks(bad)} is not a finite number >= 0{here}")
    return factor_of(own, weights)


def product(x: Array, factor: float) -> Array:
    """Return an array times the factor of its rank's weight: zeros for a factor of 0, even if x is not finite."""
    return primitives.scale(x, factor) if factor else array_namespace(x).zeros_like(x)


def factor_of(own: float, weights: Sequence[float]) -> float:
    """Return the factor of this rank's weight; exactly 1 if all weights are equal."""
    largest = max(weights)
    if not largest:
        raise ValueError(
            "weight is 0 on all ranks; expected a weight > 0 on at least one rank: skip a step for which no rank has "
            "data"
        )
    total = math.fsum(each / largest for each in weights)
    return len(weights) * (own / largest) / total
