"""`Lamb`: LAMB on the exact mean gradient: the baseline for 1-bit LAMB, and the warm-up of 1-bit LAMB."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qcomp.core import primitives
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.numbers import Number, choose, clamp, factor_of, root
from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.compression import Means
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.state import OptimizerState


class Change(NamedTuple):
    """What a step of LAMB changes for a tensor."""

    direction: Array
    """This array times the rate is subtracted from the tensor."""
    rate: Number
    """The learning rate times the trust ratio."""
    trust: Number
    """The trust ratio."""
    momentum: Array
    variance: Array


@dataclass(frozen=True, kw_only=True)
class Lamb(Adam):
    """LAMB: Adam with steps scaled to the norm of each tensor, for large batches.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. If the norm is larger, every rank
        multiplies its gradients by the same factor. Costs an exchange of 8 bytes per step. None, the default, never
        clips.
    seed : int, default 0
        Seed of random draws, 0 to 2**64 - 1. Exact averaging draws nothing, so only stochastic rounding uses the seed.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `Optimizer`.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates b1 of the momentum and b2 of the variance, each from 0 to below 1.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0.
    decoupled_weight_decay : bool, default True
        True: weight_decay * x is added to the direction, before the trust ratio, as in LAMB. False: it is added to the
        mean gradient after clipping.
    trust_bounds : tuple of two floats, default (0.01, 10.0)
        Smallest and largest trust ratio, the first above 0.

    Notes
    -----
    d = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay x, and for each tensor x' = x - rate c d with the
    trust ratio c = |x|_2 / |d|_2 within its bounds, and 1 if either norm is 0. ``state.numbers["trust.NAME"]`` holds c.
    The norms are sums in a fixed order, so all ranks make the same step. Sends as much as `Adam`. Source: You et al.,
    ICLR 2020, algorithm 2; the bounds come from 1-bit LAMB (Li et al., 2021).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.Lamb(learning_rate=0.1)
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = np.asarray([4.0, -4.0])
    >>> state = opt.init(params, comm)
    >>> params, state = opt.step(params, params, state, comm)
    >>> params.round(3), round(state.numbers["trust.0"], 3)
    (array([ 3.6, -3.6]), 4.0)
    """

    trust_bounds: tuple[float, float] = (0.01, 10.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_bounds("trust_bounds", self.trust_bounds)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero and trust ratios of 1."""
        state = super().initial_state(params, names, rank, size)
        return state._replace(numbers={**state.numbers, **{trust_key(name): 1.0 for name in names}})

    def exact_step(
        self, params: Any, means: Means, state: OptimizerState, *, corrections: Sequence[float]
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step of LAMB with given bias corrections of the variance, and record the trust ratios in the state."""
        tensors = as_tensors(params, "params")
        changes = self.changes(tensors, means, state, corrections=corrections)
        rooms = tensors if means.donate else primitives.empty_likes(tensors)
        of_each = zip(tensors, changes, rooms, strict=True)
        moved = [primitives.descend(p, c.direction, c.rate, 0.0, out=room) for p, c, room in of_each]
        trust = {trust_key(name): c.trust for name, c in zip(state.names, changes, strict=True)}
        return moved, state._replace(
            step=state.step + 1,
            momentum=tuple([c.momentum for c in changes]),
            variance=tuple([c.variance for c in changes]),
            numbers={**state.numbers, **trust},
        )

    def changes(
        self, tensors: Sequence[Array], means: Means, state: OptimizerState, *, corrections: Sequence[float]
    ) -> list[Change]:
        """Return what an exact step changes for each tensor.

        Parameters
        ----------
        tensors : sequence of arrays
            The parameters.
        means, state, corrections
            As for `exact_step`.
        """
        numbers = self._adam_numbers(state, corrections)
        found = primitives.adam_directions(
            tensors, state.momentum, state.variance, means.values, numbers, donate=means.donate
        )
        trust = self._trust(tensors, [d for d, _, _ in found])
        return [
            Change(d, factor_of(d, n.step.rate * c), c, m, v)
            for (d, m, v), n, c in zip(found, numbers, trust, strict=True)
        ]

    def _trust(self, params: Sequence[Array], directions: Sequence[Array]) -> list[Number]:
        """Return the trust ratio of each tensor."""
        found = []
        for pair in zip(*map(primitives.sums_of_squares, (params, directions)), strict=True):
            own, length = map(root, pair)
            moves = (own > 0) & (length > 0)
            found.append(choose(moves, clamp(own / choose(moves, length, 1.0), *self.trust_bounds), 1.0))
        return found


def trust_key(name: str) -> str:
    """Return the key of a parameter's trust ratio in the ``numbers`` of a state."""
    return f"trust.{name}"


def require_bounds(argument: str, bounds: tuple[float, float]) -> None:
    """Raise ValueError unless ``bounds`` are two numbers above 0, the smaller first."""
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
        raise ValueError(f"{argument} is {bounds!r}; expected two numbers above 0, the smaller first")
