"""Whether a frozen variance still fits, from a few elements of the exact mean gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qcomp.core.arrays import Array, array_namespace, concat, to_compute_dtype
from qcomp.core.assembly import cut_like
from qcomp.core.state import OptimizerState
from qcomp.core.sums import total

__all__ = ["VarianceWatch"]

_AVERAGES = "watched_variance"
_RATIO, _OVERLAP = "variance_ratio", "variance_overlap"
_MEASURED, _WARNED = "watch_measured", "watch_warned"


@dataclass(frozen=True)
class VarianceWatch:
    """Compare the frozen variance with what it would be now.

    A few elements of every compressed tensor travel exactly, beside the compressed momentum and in the same messages.
    The squares of their mean gradient are averaged to w as Adam would. Once that average is 1 / (1 - b2) steps old,
    ``state.numbers`` has (NaN before), with v the frozen variance of the same elements, ``"variance_ratio"``,
    sum w / sum v, and ``"variance_overlap"``, sum min(w, v) / sum max(w, v), from 0 to 1. Clipping holds the first near
    one, whatever happens to the elements; the second sees them, and is below 1 by the noise of both averages alone.

    Parameters
    ----------
    threshold : float
        Below 1: warn once when the ratio r has min(r, 1 / r) < threshold. 0 never does.
    overlap : float
        Below 1: warn once also when the overlap is less. 0 never does.
    rewarm_steps : int
        With more than 0, do not only warn, but make so many exact steps of Adam, in which the variance goes on from the
        frozen one, and freeze it again. Fewer than 1 / (1 - b2) leave most of the old variance in.
    sample : int
        At most so many elements of all compressed tensors together.
    every : int
        Measure in every so many steps; at most 1 / (1 - b2).

    Notes
    -----
    Sends 2 (N - 1) / N * 4 * sample bytes in a step that measures (by the topology "two_phase"), in no further message.
    The residuals are kept through the exact steps, and fed back after them: nothing that compression owes is lost.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.OneBitAdam(
    ...     learning_rate=0.01, betas=(0.9, 0.9), freeze=20, exact=None, watch=qcomp.VarianceWatch(0.1)
    ... )
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = np.zeros(100, dtype=np.float32)
    >>> state = opt.init(params, comm)
    >>> for step in range(60):  # gradients that halve after the freeze
    ...     params, state = opt.step(params, np.full_like(params, 2 if step < 20 else 1), state, comm)
    >>> round(state.numbers["variance_ratio"], 3)
    0.25
    """

    threshold: float = 0.5
    overlap: float = 0.0
    rewarm_steps: int = 0
    sample: int = 4096
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("threshold", "overlap"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected from 0 to below 1")
        for name, least in (("rewarm_steps", 0), ("sample", 1), ("every", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; expected an integer, at least {least}")

    def begin(self, state: OptimizerState) -> OptimizerState:
        """Return a state in which nothing has been measured since the freeze."""
        nothing = tuple(array_namespace(v).zeros_like(v) for v in self._parts(state.variance, state.exact))
        numbers = {_RATIO: math.nan, _OVERLAP: math.nan, _MEASURED: 0.0, _WARNED: 0.0}
        return state._replace(
            arrays={**state.arrays, _AVERAGES: nothing}, numbers={**state.numbers, **numbers}
        )

    def due(self, state: OptimizerState) -> bool:
        """Return whether the next step measures: the same on all ranks."""
        return state.step % self.every == 0 and not all(state.exact)

    def take(
        self, tensors: Sequence[Array], exact: Sequence[bool], factors: Sequence[float] | None = None
    ) -> Array:
        """Return the sample of some tensors, or of these times a factor each, as one vector."""
        parts = [to_compute_dtype(part) for part in self._parts(tensors, exact)]
        if factors is not None:
            parts = [factor * part for factor, part in zip(factors, parts, strict=True)]
        return concat([part for part in parts if part.shape[0]])

    def observe(self, state: OptimizerState, gradient: Array, beta2: float) -> OptimizerState:
        """Return the state after the sample of a mean gradient has been averaged in."""
        parts = state.arrays[_AVERAGES]
        decay = beta2**self.every
        joined = decay * concat([p for p in parts if p.shape[0]]) + (1 - decay) * (gradient * gradient)
        measured = int(state.numbers[_MEASURED]) + 1
        ratio = overlap = math.nan
        if measured * self.every >= round(1 / (1 - beta2)):
            # Fixed sums of what is the same on all ranks, so that all of them see the same numbers.
            now, frozen = joined / (1 - decay**measured), self.take(state.variance, state.exact)
            smaller = array_namespace(now).where(now < frozen, now, frozen)
            sums = [float(total(x)) for x in (now, frozen, smaller)]
            ratio = _quotient(sums[0], sums[1])
            overlap = _quotient(sums[2], sums[0] + sums[1] - sums[2])
        return state._replace(
            arrays={**state.arrays, _AVERAGES: tuple(cut_like(joined, parts))},
            numbers={**state.numbers, _RATIO: ratio, _OVERLAP: overlap, _MEASURED: float(measured)},
        )

    def drifted(self, state: OptimizerState) -> bool:
        """Return whether the variance is no longer the frozen one, and nobody has been told."""
        ratio, overlap = state.numbers[_RATIO], state.numbers[_OVERLAP]
        if math.isnan(ratio) or state.numbers[_WARNED]:
            return False
        return min(ratio, 1.0) < self.threshold * max(ratio, 1.0) or overlap < self.overlap

    def told(self, state: OptimizerState) -> OptimizerState:
        """Return a state that does not warn again before the next freeze."""
        return state._replace(numbers={**state.numbers, _WARNED: 1.0})

    def _parts(self, tensors: Sequence[Array], exact: Sequence[bool]) -> list[Array]:
        """Return the sample of each tensor, of size 0 for exact ones: equal steps through all of them."""
        sizes = [0 if is_exact else math.prod(t.shape) for t, is_exact in zip(tensors, exact, strict=True)]
        stride = -(-sum(sizes) // self.sample)
        stride += stride % 2 == 0  # odd: an even one would often stay in a few columns of a matrix
        parts, start = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            flat = array_namespace(tensor).reshape(tensor, (-1,))
            first = min(-start % stride, size)
            parts.append(flat[first:size:stride])
            start += size
        return parts


def _quotient(x: float, y: float) -> float:
    return x / y if y > 0 else math.inf if x > 0 else 1.0
