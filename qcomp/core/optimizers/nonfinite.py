"""The exchange of the names of gradients that are not finite, after a step was refused."""

import json
from collections.abc import Sequence

from qcomp.core.errors import NonFiniteError
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.stages import Stages
from qcomp.core.numeric.arrays import LIMIT, Array, all_below, to_compute_dtype
from qcomp.core.state import OptimizerState

__all__ = ["name_gradients"]

_NAMED = 3


def name_gradients(
    error: NonFiniteError,
    grads: Sequence[Array],
    names: Sequence[str],
    state: OptimizerState,
    *,
    what: str = "gradient",
) -> Stages[NonFiniteError]:
    """Return an error that names the gradients and ranks that caused ``error``, which all ranks have.

    Sends 8 bytes and a few names to every other rank.

    Parameters
    ----------
    error : NonFiniteError
        Returned unchanged if all gradients are finite: then another value is too large.
    grads : sequence of arrays
        This rank's gradients.
    names : sequence of str
        Names of the gradients.
    state : OptimizerState
        The state before the step.
    what : str
        What the error calls the gradients.
    """
    bad = [name for name, g in zip(names, grads, strict=True) if not _is_fine(g)]
    texts = yield from gather_texts(json.dumps([bad[:_NAMED], len(bad)]), state.size, grads[0])
    blamed = [
        f"{_named(*json.loads(text))} on rank {rank}"
        for rank, text in enumerate(texts)
        if json.loads(text)[1]
    ]
    if not blamed:
        return error
    return NonFiniteError(
        f"the {what} of {'; of '.join(blamed)} is not finite, or too large to compress, in step {state.step + 1}"
    )


def _is_fine(gradient: Array) -> bool:
    return 0 in gradient.shape or bool(all_below(to_compute_dtype(gradient), LIMIT))


def _named(first: list[str], count: int) -> str:
    names = ", ".join(map(repr, first))
    return f"{names} and {count - len(first)} more" if count > len(first) else names
