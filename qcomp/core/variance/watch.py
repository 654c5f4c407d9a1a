"""`VarianceWatch`: compares a frozen variance with the gradients on a few elements of each tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from qcomp.core.checkpoint.format import NUMBER
from qcomp.core.checkpoint.schema import Number
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    concat,
    cut_like,
    divide,
    flat,
    host_numbers,
    to_compute_dtype,
)
from qcomp.core.numeric.sums import totals
from qcomp.core.settings import plain_numbers
from qcomp.core.state import OptimizerState
from qcomp.core.variance.late import EXACT_STEPS, late_tensors

WATCHED = "watched_variance"
"""The kind of arrays that a watch keeps: the averages of the squares of each tensor's sampled gradients."""

_RATIO, _OVERLAP, _STUCK = "variance_ratio", "variance_overlap", "variance_stuck"
_FELT, _MEASURED = "watch_felt", "watch_measured"
_QUIET_UNTIL, _INTERVAL, _REPORTED = "watch_quiet_until", "watch_interval", "watch_reported."
_FROZEN, _LEVEL = "watch_frozen.", "watch_level."
_KINDS = ("jump", "growth", "shrinkage", "overlap", "stuck", "outgrown")

_PER_TENSOR, _ALL_TENSORS, _MOST = 16, 64, 4096
"""The fewest elements of an automatic sample for each tensor and for all together, and the most for all together."""
_ELEMENTS_A_STEP = 4000
"""On average, an automatic sample sends one of this many elements per step: 4 bytes, beside 500 bytes of codes of one
bit per element."""
_ONE_TENSOR = 4.0
"""The ratio of a single tensor may exceed the limit for all tensors together by this factor."""
_OUTGROWN = 1e4
"""An element whose variance grew by this factor would step a hundred times too far."""
_FELT_PER_TENSOR = 16
"""Number of elements that are sampled from the compressed momentum of a tensor."""
_FELT_EVERY = 2
"""Steps from one measurement of the momentum to the next."""
_LEARNING = 16
"""Measurements after the freeze from which the usual size of the compressed momentum is learned."""
_FEEDBACK = 16.0
"""Feedback makes the momentum up to four times as long as the exact momentum; this is the square of that factor."""
_WORSE, _FAR_WORSE = 4.0, 100.0
"""The factors by which an excursion must be worse to be reported again: normally, and in the quiet time."""
_OVER = 0.5
"""An excursion is over when it is below this share of its limit."""


class _Finding(NamedTuple):
    """What was found about one way in which the frozen variance may not fit."""

    excess: float
    """Above 1 if the variance does not fit."""
    says: str


@dataclass(frozen=True)
class VarianceWatch:
    """Compares the frozen variance with its current value, and warns when it no longer fits.

    The watch makes two measurements, equal on all ranks:

    - In every second step, the norm of the compressed momentum on a few elements of each compressed tensor. While
      gradients stay as they were at the freeze, sum m^2 <= sum v except for what feedback adds. The norm shows a jump
      of the gradients within a few steps, and nothing is sent for it.
    - Every ``every`` steps, some elements of the mean gradient of each compressed tensor, sent exactly in the same
      messages as the compressed momentum. Their squares are averaged to w as in Adam.

    With v the frozen variance of the same elements, ``state.numbers`` has ``"variance_ratio"``, sum w / sum v, and
    ``"variance_overlap"``, sum min(w, v) / sum max(w, v), from 0 to 1. Both are NaN until the average is 1 / (1 - b2)
    steps old. ``"variance_stuck"`` is the share of elements with v = 0 and a current gradient, which cannot move.
    Clipping keeps the ratio near one, whatever happens to single elements. The overlap detects such changes, but even
    noise in the two averages keeps it below 1.

    When a measured value passes its limit, an excursion begins, and the watch reports it. The excursion ends when the
    value is below half of its limit. Each report starts a quiet time of 1 / (1 - b2) steps, which doubles with each
    report. In the quiet time, an excursion of a kind that was reported before is reported again only if it is 100 times
    worse. After the quiet time, it is reported if it is a new one, or four times worse.

    Parameters
    ----------
    largest : float
        Report when the ratio exceeds this, when the ratio of one tensor exceeds four times this, or when the momentum
        norm predicts such a ratio. Above 1; `math.inf` disables this report. Default 4.
    smallest : float
        Report when the ratio is below this, from 0 to below 1: steps are then much shorter than Adam's. 0 disables this
        report. Default 0.01.
    overlap : float
        Report when the overlap is below this, from 0 to below 1. 0, the default, disables this report.
    stuck : float
        Report when more than this share of the elements cannot move, or when more have a variance 10 000 times the
        frozen one, so that their steps are a hundred times too long. Above 0 and at most 1; 1 disables this report.
        Default 0.001.
    rewarm_steps : int
        If above 0, each report also starts that many exact Adam steps, which continue from the frozen variance and then
        freeze it again. 3 / (1 - b2) steps renew the variance; fewer than 1 / (1 - b2) steps keep most of the old
        variance. 0, the default, only warns.
    sample : int, optional
        The largest number of elements to sample from all compressed tensors together; at least one is sampled from
        each. None, the default, adds 0.8% to the bytes of one bit per element. It samples at least 16 elements of each
        tensor and 64 in all, and at most 4096 in all.
    every : int
        Number of steps from one sample to the next, at most 1 / (1 - b2). Default 8.

    Notes
    -----
    A step that measures sends 2 (N - 1) / N * 4 bytes for each element of the sample (in topology "two_phase"), without
    additional messages. Residuals are kept through the exact steps of a re-warm and fed back after them, so nothing is
    lost.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.OneBitAdam(
    ...     learning_rate=0.01, betas=(0.9, 0.9), freeze=20, exact=None, watch=qcomp.VarianceWatch(smallest=0)
    ... )
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = np.zeros(100, dtype=np.float32)
    >>> state = opt.init(params, comm)
    >>> for step in range(100):  # gradients that halve after the freeze
    ...     params, state = opt.step(params, np.full_like(params, 2 if step < 20 else 1), state, comm)
    >>> round(state.numbers["variance_ratio"], 3)
    0.25
    """

    largest: float = 4.0
    smallest: float = 0.01
    overlap: float = 0.0
    stuck: float = 0.001
    rewarm_steps: int = 0
    sample: int | None = None
    every: int = 8

    def __post_init__(self) -> None:
        plain_numbers(self)
        if not self.largest > 1:
            raise ValueError(f"largest is {self.largest!r}; expected a number above 1")
        for name in ("smallest", "overlap"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected from 0 to below 1")
        if not 0 < self.stuck <= 1:
            raise ValueError(f"stuck is {self.stuck!r}; expected above 0 and at most 1")
        for name, least in (("rewarm_steps", 0), ("sample", 1), ("every", 1)):
            value = getattr(self, name)
            if (value is None and name == "sample") or (type(value) is int and value >= least):
                continue
            raise ValueError(f"{name} is {value!r}; expected an integer, at least {least}")

    def begin(self, state: OptimizerState) -> OptimizerState:
        """Return a state without measurements, for the start of a compressed stage.

        The end of the quiet time is kept, even through a re-warm.

        Parameters
        ----------
        state : OptimizerState
            The state right after a freeze.
        """
        sizes = [
            0 if exact else math.prod(v.shape) for v, exact in zip(state.variance, state.exact, strict=True)
        ]
        counts = zip(state.variance, self._counts(sizes), strict=True)
        nothing = tuple(array_namespace(v).zeros_like(flat(v)[:count]) for v, count in counts)
        fresh = {_RATIO: math.nan, _OVERLAP: math.nan, _STUCK: 0.0, _MEASURED: 0.0, _FELT: 0.0}
        fresh |= {_REPORTED + kind: 0.0 for kind in _KINDS}
        for name, exact in zip(state.names, state.exact, strict=True):
            if not exact:
                fresh |= {_FROZEN + name: 0.0, _LEVEL + name: 0.0}
        lasting = {key: state.numbers.get(key, 0.0) for key in (_QUIET_UNTIL, _INTERVAL)}
        return state._replace(
            arrays={**state.arrays, WATCHED: nothing}, numbers={**state.numbers, **lasting, **fresh}
        )

    def measured(self, state: OptimizerState) -> OptimizerState:
        """Return a state in which the sizes of momenta are learned anew, since the variance has changed.

        Parameters
        ----------
        state : OptimizerState
            The state right after the variance was measured in a compressed stage.
        """
        return state._replace(numbers={**state.numbers, _FELT: 0.0})

    def due(self, state: OptimizerState, beta2: float) -> bool:
        """Return whether the next step sends a sample; equal on all ranks and for all tensors.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        beta2 : float
            The decay rate of the variance.
        """
        return state.step % self._every(beta2) == 0

    def take(
        self, tensors: Sequence[Array], state: OptimizerState, factors: Sequence[float] | None = None
    ) -> list[Array]:
        """Return the sample of each tensor, times a factor if there is one. Samples of exact tensors are empty.

        Parameters
        ----------
        tensors : sequence of arrays
            The tensors to sample.
        state : OptimizerState
            The state of the last step.
        factors : sequence of float, optional
            A factor for each tensor; 1 by default.
        """
        pairs = zip(tensors, state.arrays[WATCHED], strict=True)
        parts = [to_compute_dtype(_spread(t, w.shape[0])) for t, w in pairs]
        if factors is None:
            return parts
        return [factor * part for factor, part in zip(factors, parts, strict=True)]

    def observe(
        self, state: OptimizerState, gradients: Sequence[Array], beta2: float, eps: Sequence[float]
    ) -> tuple[OptimizerState, list[str]]:
        """Return the state after the watch has seen a compressed step, and its reports.

        Parameters
        ----------
        state : OptimizerState
            The state after the step.
        gradients : sequence of arrays
            The samples of the mean gradients; empty in steps that are not `due`.
        beta2 : float
            The decay rate of the variance.
        eps : sequence of float
            ``eps`` of each tensor.
        """
        if all(state.exact):
            return state, []
        window = round(1 / (1 - beta2))
        found: dict[str, _Finding] = {}
        if gradients:
            state, found = self._measured(state, gradients, beta2, eps)
        if state.step % _FELT_EVERY == 0:
            state, found["jump"] = self._felt(state)
        return self._news(state, found, window) if found else (state, [])

    def _felt(self, state: OptimizerState) -> tuple[OptimizerState, _Finding]:
        """Return the state, and the finding from the sizes of the compressed momenta."""
        numbers = state.numbers
        changes: dict[str, float] = {}
        late = late_tensors(state) if EXACT_STEPS in numbers else []
        chosen = [i for i, exact in enumerate(state.exact) if not (exact or i in late)]
        if not chosen:
            return state, _Finding(0.0, "")
        if not numbers[_FELT]:
            sums = totals([state.variance[i] for i in chosen])
            sizes = [max(1, math.prod(state.variance[i].shape)) for i in chosen]
            settled = zip(chosen, sums, sizes, strict=True)
            changes |= {_FROZEN + state.names[i]: total / size for i, total, size in settled}
        learning = numbers[_FELT] < _LEARNING
        if learning:
            changes[_FELT] = numbers[_FELT] + 1
        samples = [_spread(state.momentum[i], _FELT_PER_TENSOR) for i in chosen]
        excess = {}
        momentum = concat(samples)
        for i, squares in zip(chosen, _to_host(momentum * momentum, samples), strict=True):
            name = state.names[i]
            square = math.fsum(squares) / max(1, len(squares))
            level, frozen = numbers[_LEVEL + name], changes.get(_FROZEN + name, numbers[_FROZEN + name])
            usual = max(_FEEDBACK * self.largest * frozen if learning else level, self.largest * frozen)
            if frozen > 0:  # an element with a variance of 0 is stuck instead
                excess[name] = square / (_FEEDBACK * usual)
            if learning:
                changes[_LEVEL + name] = max(level, square)
        if changes:
            state = state._replace(numbers={**numbers, **changes})
        says = f"the momentum of {_worst(excess)} is far longer than the frozen variance allows"
        return state, _Finding(max(excess.values(), default=0.0), says)

    def _measured(
        self, state: OptimizerState, gradients: Sequence[Array], beta2: float, eps: Sequence[float]
    ) -> tuple[OptimizerState, dict[str, _Finding]]:
        """Return the state with the samples of the mean gradients added to their averages, and the findings by kind."""
        parts = state.arrays[WATCHED]
        decay = beta2 ** self._every(beta2)
        gradient = concat(list(gradients))
        joined = decay * concat(list(parts)) + (1 - decay) * (gradient * gradient)
        count = int(state.numbers[_MEASURED]) + 1
        averages = tuple(
            array_namespace(w).astype(average, w.dtype, copy=False)
            for w, average in zip(parts, cut_like(joined, [w.shape[0] for w in parts]), strict=True)
        )

        # The values are equal on all ranks, and summed exactly on the host, so that all ranks decide the same.
        xp = array_namespace(joined)
        now = divide(joined, 1 - decay**count)
        spread = [_spread(v, w.shape[0]) for v, w in zip(state.variance, parts, strict=True)]
        frozen, hardly = concat(spread), concat([v + x**2 for v, x in zip(spread, eps, strict=True)])
        facts = (
            now,
            frozen,
            xp.where(now < frozen, now, frozen),
            xp.astype((frozen == 0) & (now > 0), now.dtype),
            xp.astype((frozen > 0) & (now > _OUTGROWN * hardly), now.dtype),
        )
        of_parts = iter(_to_host(concat(list(facts)), [*parts] * len(facts)))
        by_fact = [[math.fsum(next(of_parts)) for _ in parts] for _ in facts]
        late = late_tensors(state)  # their variance is not frozen yet
        seen = [
            _Seen(part.shape[0], *([0.0] * len(sums) if number in late else sums))
            for number, (part, *sums) in enumerate(zip(parts, *by_fact, strict=True))
        ]
        total = _Seen(*map(math.fsum, zip(*seen, strict=True)))
        whole = count * self._every(beta2) >= round(1 / (1 - beta2))
        ratio, overlap = (total.ratio, total.overlap) if whole else (math.nan, math.nan)
        stuck, outgrown = total.stuck / total.size, total.outgrown / total.size
        numbers = {_RATIO: ratio, _OVERLAP: overlap, _STUCK: stuck, _MEASURED: float(count)}
        state = state._replace(
            arrays={**state.arrays, WATCHED: averages}, numbers={**state.numbers, **numbers}
        )
        by_name = dict(zip(state.names, seen, strict=True))
        findings = {
            "stuck": _Finding(
                stuck / self.stuck,
                f"{stuck:.2g} of the elements, of {_worst({n: s.stuck for n, s in by_name.items()})}, cannot move: "
                "they had no gradient before the freeze and have one now",
            ),
            "outgrown": _Finding(
                outgrown / self.stuck,
                f"{outgrown:.2g} of the elements, of {_worst({n: s.outgrown for n, s in by_name.items()})}, step "
                "a hundred times too far: they had hardly any gradient before the freeze",
            ),
        }
        if not whole:
            return state, findings
        ratios = {n: s.ratio for n, s in by_name.items() if s.frozen > 0 and s.size >= _PER_TENSOR}
        shrunk = {n: _quotient(1.0, r) for n, r in ratios.items()}
        largest = max(ratios.values(), default=0.0)
        excess = max(total.ratio, largest / _ONE_TENSOR) / self.largest
        size = f"the current variance is {ratio:.3g} times the frozen one"
        return state, findings | {
            "growth": _Finding(
                excess, size + (f", for {_worst(ratios)} {largest:.3g} times" if ratios else "")
            ),
            "shrinkage": _Finding(
                _quotient(self.smallest, ratio),
                size + (f", with the smallest ratio for {_worst(shrunk)}" if shrunk else ""),
            ),
            "overlap": _Finding(
                _quotient(self.overlap, overlap),
                f"the overlap of the frozen and the current variance is {overlap:.3g}",
            ),
        }

    def _news(
        self, state: OptimizerState, findings: dict[str, _Finding], window: int
    ) -> tuple[OptimizerState, list[str]]:
        """Return the state, and the texts of those findings that are new."""
        numbers, says = dict(state.numbers), []
        for kind, (excess, text) in findings.items():
            # The excess in the last report of this kind: 0 without a report, and negated once that excursion has ended.
            last = numbers[_REPORTED + kind]
            quiet = state.step < numbers[_QUIET_UNTIL]
            limit = abs(last) * _FAR_WORSE if quiet else last * _WORSE
            if excess > max(1.0, limit):
                says.append(text)
                numbers[_REPORTED + kind] = excess
            elif excess <= _OVER and last > 0:
                numbers[_REPORTED + kind] = -last
        if says:
            numbers[_INTERVAL] = max(float(window), 2 * numbers[_INTERVAL])
            numbers[_QUIET_UNTIL] = state.step + numbers[_INTERVAL]
        return state._replace(numbers=numbers), says

    def _every(self, beta2: float) -> int:
        return min(self.every, round(1 / (1 - beta2)))

    def _counts(self, sizes: Sequence[int]) -> list[int]:
        """Return how many elements of each tensor are sampled."""
        total = sum(sizes)
        if self.sample is not None:
            return [min(n, max(1, self.sample * n // total)) if n else 0 for n in sizes]
        wanted = min(_MOST, max(_ALL_TENSORS, total * self.every // _ELEMENTS_A_STEP))
        return [min(n, max(_PER_TENSOR, wanted * n // total)) if n else 0 for n in sizes]


class _Seen(NamedTuple):
    """Sums over the sample of a tensor, or of all tensors."""

    size: float
    now: float
    frozen: float
    smaller: float
    stuck: float
    outgrown: float

    @property
    def ratio(self) -> float:
        """The factor by which the variance has grown."""
        return _quotient(self.now, self.frozen)

    @property
    def overlap(self) -> float:
        """The sum of the smaller variances over the sum of the larger ones."""
        return _quotient(self.smaller, self.now + self.frozen - self.smaller)


def is_of_watch(key: str) -> bool:
    """Return whether an entry of a saved state belongs to a watch."""
    numbers = [NUMBER + name for name in (_RATIO, _OVERLAP, _STUCK, "watch_")]
    return key.startswith((f"{WATCHED}.", *numbers))


def watch_limits(numbers: Mapping[str, float]) -> dict[str, Number]:
    """Return the limits of the numbers of a state that belong to a watch."""
    counts = dict.fromkeys((_FELT, _MEASURED), Number(least=0, whole=True))
    quotients = [name for name in numbers if name.startswith((_REPORTED, _FROZEN, _LEVEL))]
    return counts | dict.fromkeys((_RATIO, _OVERLAP, *quotients), Number(finite=False))


def _spread(tensor: Array, count: int) -> Array:
    """Return ``count`` equally spaced elements of a tensor, or all if it has fewer."""
    size = math.prod(tensor.shape)
    stride = size // max(1, count) or 1
    stride -= stride % 2 == 0  # odd: an even stride would often stay in a few columns of a matrix
    return flat(tensor)[: min(size, stride * count) : stride]


def _to_host(joined: Array, parts: Sequence[Array]) -> list[Sequence[float]]:
    """Return the elements of a vector as numbers, in one group for each of the parts that were joined to it."""
    values = host_numbers(joined)
    stops = accumulate(part.shape[0] for part in parts)
    return [values[start:stop] for start, stop in pairwise([0, *stops])]


def _worst(by_name: Mapping[str, float]) -> str:
    """Return the names with the largest values, the largest first, down to half of the largest."""
    least = max(by_name.values(), default=0.0) / 2
    names = [
        name for name in sorted(by_name, key=lambda n: by_name[n], reverse=True) if by_name[name] >= least
    ]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _quotient(x: float, y: float) -> float:
    return x / y if y > 0 else math.inf if x > 0 else 1.0
