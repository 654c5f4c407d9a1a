"""JAX's kernels for use inside a compiled program, with the same rounding as the core.

XLA contracts a product and a sum into one operation, which rounds once instead of twice. Compression amplifies this
difference: a momentum that is off by an ulp may have another sign, which changes its whole bucket. The programs of
`qcomp.backends.jax_xla` prevent contraction with an integer whose value the compiler does not know. Here that integer
must come from the surrounding program. Kernels are also traced once for each shape instead of once for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from qcomp.backends.jax_xla.arithmetic import adam_step, frozen_step, momentum, rounded
from qcomp.backends.jax_xla.kernel_set import JaxKernels
from qcomp.core.kernels import AdamNumbers, StepNumbers
from qcomp.core.numeric.arrays import divide, is_traced, to_compute_dtype
from qcomp.core.numeric.numbers import as_number
from qcomp.core.numeric.sums import power_of_two_below, total

__all__ = ["FromTable", "TracedKernels"]

Array = Any  # as the functions of JAX take it
Result = TypeVar("Result")


class FromTable:
    """A number that a program reads from a table; Python arithmetic on it computes a new table, in 64 bits.

    Parameters
    ----------
    table : sequence of float
    index : array of int32, shape ()
        An index beyond the end of the table reads its last entry.
    """

    def __init__(self, table: Sequence[float] | np.ndarray, index: Array) -> None:
        self._table = np.asarray(table)
        self._index = index

    def __rsub__(self, other: float) -> FromTable:
        return FromTable(other - self._table, self._index)

    def __mul__(self, other: float) -> FromTable:
        return FromTable(self._table * other, self._index)

    def __jax_array__(self) -> Array:
        return jnp.asarray(self._table)[jnp.minimum(self._index, len(self._table) - 1)]


class TracedKernels(JaxKernels):
    """The kernels for traced arrays.

    Parameters
    ----------
    step : array of int32, shape ()
        A number >= 0 whose value the compiler does not know.
    """

    name = "jax, traced"

    def __init__(self, step: Array) -> None:
        self._nothing = jnp.minimum(step, 0)

    def takes(self, x: Array) -> bool:
        """Return whether x is traced."""
        return is_traced(x)

    def apart(
        self, compute: Callable[[], Result], numbers: Sequence[int] = (), like: Array | None = None
    ) -> tuple[Result, list[Array]]:
        """Return the arrays that a function computes, and the given numbers as values that the compiler does not know.

        The function runs in a branch of its own. So the compiler does not copy the function into each use of its
        results, and it compiles operations only once if they differ only in such numbers.

        Parameters
        ----------
        compute : callable
            Returns a pytree of arrays.
        numbers : sequence of int
            From 0 to 2**32 - 1.
        like : array, optional
            An array that differs between devices if the results do.
        """
        shapes = jax.eval_shape(compute)

        def never() -> tuple[Result, list[Array]]:
            other = jnp.float32(0) if like is None else jnp.ravel(like)[0]
            return jax.tree.map(lambda x: jnp.full(x.shape, other.astype(x.dtype)), shapes), [
                jnp.uint32(0) for _ in numbers
            ]

        def always() -> tuple[Result, list[Array]]:
            return compute(), [jnp.uint32(number) for number in numbers]

        found: tuple[Result, list[Array]] = jax.lax.cond(self._nothing < 0, never, always)
        return found

    def rounded(self, x: Array) -> Array | None:
        """Return x unchanged, but make the compiler round it before it is used."""
        return rounded(x, self._numbers(x)) if x.dtype in (jnp.float32, jnp.float64) else None

    def sums_of_squares(self, arrays: Sequence[Array]) -> list[Array | float]:
        """Return sums of squares as float64 scalars; the caller has enabled float64."""
        return [self._sum_of_squares(to_compute_dtype(x)) if x.size else 0.0 for x in arrays]

    def _sum_of_squares(self, x: Array) -> Array:
        flat = jnp.ravel(x)
        power = power_of_two_below(jnp.max(jnp.abs(flat)))
        scaled = divide(flat, power)
        wide = [total(rounded(scaled * scaled, self._numbers(x))), power]
        found, factor = map(as_number, wide)
        return jnp.where(jnp.all(jnp.isfinite(flat)), jnp.asarray(found * factor * factor), jnp.inf)

    def momentum(self, m: Array, g: Array, beta1: float, scale: float) -> Array | None:
        """Return ``beta1 * m + (1 - beta1) * scale * g``."""
        if g.dtype != m.dtype:
            return None
        return momentum(m, g, self._numbers(m, beta1=beta1, weight=(1 - beta1) * scale))

    def frozen_step(self, p: Array, m: Array, v: Array, numbers: StepNumbers) -> tuple[Array, Array] | None:
        """Return the parameters after a step with a frozen variance, and the masked momentum."""
        if p.dtype != m.dtype:
            return None
        moved: tuple[Array, Array] = frozen_step(p, m, v, self._of_step(m, numbers))
        return moved

    def adam_steps(
        self,
        params: Sequence[Array],
        momenta: Sequence[Array],
        variances: Sequence[Array],
        gradients: Sequence[Array],
        numbers: Sequence[AdamNumbers],
        *,
        donate: bool,  # noqa: ARG002 - no buffer of a compiled program can be written to
    ) -> list[tuple[Array, Array, Array]]:
        """Return parameters and moments of each tensor after a step of Adam."""
        moved = []
        for p, m, v, g, of_adam in zip(params, momenta, variances, gradients, numbers, strict=True):
            beta1, beta2 = of_adam.betas
            named = self._of_step(m, of_adam.step) | self._numbers(
                m,
                beta1=beta1,
                weight=1 - beta1,
                beta2=beta2,
                weight2=1 - beta2,
                variance_correction=of_adam.variance_correction,
            )
            decay = of_adam.coupled_decay
            of_coupled = momentum(p, g, self._numbers(m, beta1=decay, weight=1.0)) if decay else g
            moved.append(adam_step(p, m, v, of_coupled, named))
        return moved

    def _of_step(self, like: Array, numbers: StepNumbers) -> dict[str, Array]:
        named = numbers._asdict()
        if not numbers.weight_decay:
            del named["weight_decay"]
        return self._numbers(like, **named)

    def _numbers(self, like: Array, **values: Any) -> dict[str, Array]:
        """Return numbers in an array's dtype, and a zero as an integer whose value the compiler does not know."""
        integer = jnp.int64 if like.dtype == jnp.float64 else jnp.int32
        return {"nothing": self._nothing.astype(integer)} | {
            name: jnp.asarray(value, like.dtype) for name, value in values.items()
        }
