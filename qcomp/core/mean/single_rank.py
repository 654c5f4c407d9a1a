"""`alone`: the exact mean on a single rank, which sends nothing."""

from collections.abc import Sequence

from qcomp.core import primitives
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import chosen
from qcomp.core.mean.codec import Verdicts, refused_by
from qcomp.core.mean.stages import Stages
from qcomp.core.mean.topologies.base import Averaged
from qcomp.core.numeric.arrays import Array, concat, cut_like, is_mutable

SMALL = 1 << 14
"""Tensors with fewer elements on average are joined: a call for each would take longer than copying them twice."""


def alone(
    values: Sequence[Array], what: str, *, shares: bool = False, donate: bool = False
) -> Stages[Averaged]:
    """Return the result of an exchange on one rank: the values, with zeros for too small values; see `exact_bounds`.

    The result is in new arrays. With ``shares`` it may be the values themselves where nothing changes, and with
    ``donate`` it may overwrite them. Raises NonFiniteError if a value is not finite, or too large to compress; ``what``
    names the compressor in error texts.
    """
    # One joined vector is faster than many small ones and, without kernels, than many of any size.
    sizes = [x.shape[0] for x in values]
    vectors = values
    if len({x.dtype for x in values}) == 1 and (sum(sizes) < SMALL * len(sizes) or chosen(values[0]) is None):
        vectors = [concat(list(values))]
    donate = donate or len(vectors) < len(values)
    verdicts = Verdicts(at_once=False)
    means = []
    for x in vectors:
        if (shares or donate) and primitives.in_range(x):
            means.append(x)
            continue
        try:
            mean, refused = primitives.compensate(
                x, None, what=what, out=x if donate and is_mutable(x) else None
            )
        except NonFiniteError as found:
            raise refused_by([0]) from found
        means.append(mean)
        if refused is not None:
            verdicts.add([refused], None)
    unread = verdicts.require_accepted(None)
    if len(means) < len(values):
        means = cut_like(means[0], sizes)
    yield from ()  # makes this a generator, as every mean is
    return Averaged(means, (), (), unread)
