"""`name_gradients`: after all ranks have refused a step, finds by an exchange which gradients were the cause."""

import json
from collections.abc import Sequence

from qcomp.core.errors import NonFiniteError
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.stages import Stages
from qcomp.core.numeric.arrays import LIMIT, Array, all_below, exact_bounds, to_compute_dtype
from qcomp.core.state import OptimizerState

_NAMED = 3


def name_gradients(
    error: NonFiniteError,
    grads: Sequence[Array],
    names: Sequence[str],
    state: OptimizerState,
    *,
    what: str = "gradient",
) -> Stages[NonFiniteError]:
    """Return, on all ranks, an error that names the gradients and ranks that caused ``error``.

    Sends 8 bytes and a few names to every other rank. If every gradient can be sent, the cause is a value other than a
    gradient, and ``error`` is returned unchanged.
    """
    # First look for gradients that not even an exact exchange accepts: less large ones may have been sent exactly.
    own = [_refused(grads, names, exact=exact) for exact in (True, False)]
    texts = yield from gather_texts(
        json.dumps([[bad[:_NAMED], len(bad)] for bad in own]), state.size, grads[0]
    )
    for found in zip(*map(json.loads, texts), strict=True):
        blamed = [f"{_named(*bad)} on rank {rank}" for rank, bad in enumerate(found) if bad[1]]
        if blamed:
            named = "; of ".join(blamed)
            return NonFiniteError(
                f"the {what} of {named} is not finite, or too large to compress, in step {state.step + 1}"
            )
    return error


def _refused(grads: Sequence[Array], names: Sequence[str], *, exact: bool) -> list[str]:
    """Return the names of gradients that are too large to be sent exactly, or to be compressed."""
    values = map(to_compute_dtype, grads)
    return [
        name
        for name, g in zip(names, values, strict=True)
        if not (0 in g.shape or all_below(g, exact_bounds(g)[1] if exact else LIMIT))
    ]


def _named(first: list[str], count: int) -> str:
    names = ", ".join(map(repr, first))
    return f"{names} and {count - len(first)} more" if count > len(first) else names
