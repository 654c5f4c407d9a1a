"""A frozen variance that is measured again, while the momentum still holds codes."""

from collections.abc import Sequence

from qcomp.core import primitives
from qcomp.core.kernels import StepNumbers
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers.floor import floored

__all__ = ["kept_after", "measured", "step_on_codes"]

LARGEST_WEIGHT = 0.25
"""The largest weight of one measurement: with it, the average is as steady as the mean of seven squares. A single
square is often near zero, and its element would make long steps."""


def kept_after(beta2: float, steps: int) -> float:
    """Return the weight that a variance keeps when it is measured again: b2^steps, but at least 3/4, or b2 if smaller.

    Parameters
    ----------
    beta2 : float
        The decay rate of the variance.
    steps : int
        Number of steps since the last measurement.

    Examples
    --------
    >>> kept_after(0.99, 1), kept_after(0.99, 1000), kept_after(0.5, 1)
    (0.99, 0.75, 0.5)
    """
    return max(beta2**steps, min(beta2, 1 - LARGEST_WEIGHT))


def measured(
    variance: Sequence[Array],
    gradients: Sequence[Array],
    exact: Sequence[bool],
    *,
    kept: Sequence[float],
    floor: float,
) -> tuple[Array, ...]:
    """Return the variance updated with the squares of exact mean gradients, not below its floor.

    Parameters
    ----------
    variance, gradients : sequence of arrays
        The variance measured so far, and the mean gradients of this step.
    exact : sequence of bool
        Which tensors stay exact, and have no floor.
    kept : sequence of float
        The weight of the variance measured so far, of each tensor.
    floor : float
        See `floored`.
    """
    of_each = zip(variance, gradients, kept, strict=True)
    return floored([primitives.momentum(v, g * g, weight, 1.0) for v, g, weight in of_each], exact, floor)


def step_on_codes(
    params: Sequence[Array],
    gradients: Sequence[Array],
    momenta: Sequence[Array],
    variance: Sequence[Array],
    numbers: Sequence[StepNumbers],
    *,
    betas: Sequence[tuple[float, float]],
    donate: bool,
) -> tuple[list[Array], tuple[Array, ...]]:
    """Return the parameters and momenta after a step of exact mean gradients.

    It divides as a compressed step does: until exact gradients have replaced them, the codes in the momentum are as
    large for elements with a tiny variance as for all others.
    """
    of_each = zip(momenta, gradients, betas, strict=True)
    blended = [primitives.momentum(m, g, beta1, 1.0) for m, g, (beta1, _) in of_each]
    moved = primitives.frozen_steps(params, blended, variance, numbers, donate=donate)
    return [p for p, _ in moved], tuple(m for _, m in moved)
