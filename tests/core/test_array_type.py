"""What type checkers take for an array. Mypy reads the functions here, and reports a comment that ignores nothing."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import qcomp
from qcomp.core.numeric.array_type import Array, Mutable, Namespace
from qcomp.core.numeric.arrays import array_namespace, is_mutable

if TYPE_CHECKING:
    import jax
    import torch

BUCKETS = qcomp.ScaledSign(bucket_size=8)


def of_numpy(single: NDArray[np.float32], codes: NDArray[np.uint8], flags: NDArray[np.bool]) -> list[Array]:
    return [single, codes, flags, single[0:1], single.T]


def of_others(x: "torch.Tensor", parameter: "torch.nn.Parameter", y: "jax.Array") -> list[Array]:
    return [x, parameter, y, x.detach(), y[0]]


def refused(name: str, numbers: list[float]) -> list[Array]:
    return [name, numbers, 1.0, None]  # type: ignore[list-item]  # wrong on purpose


def of_no_array(x: Array) -> Array:
    return x.size  # type: ignore[attr-defined]  # torch's is a function


def written_to(x: Array) -> Mutable:
    if is_mutable(x):
        x[0] = 1
        return x
    x[0] = 1  # type: ignore[index]  # wrong on purpose
    return x  # type: ignore[return-value]  # wrong on purpose


def computed(x: Array) -> Array:
    xp: Namespace = array_namespace(x)
    return xp.where(x > 0, -x, 2 * x) + xp.sqrt(x)


def like_numpy(x: NDArray[np.float32]) -> NDArray[np.float32]:
    payload, residual = qcomp.feedback.compress(BUCKETS, x, np.zeros_like(x))
    return BUCKETS.decompress(payload, like=residual)


def like_torch(x: "torch.Tensor") -> "torch.Tensor":
    return BUCKETS.add(BUCKETS.compress(x), x)


def test_results_are_arrays_of_the_same_library():
    x = np.ones(8, dtype=np.float32)
    assert all(isinstance(y, np.ndarray) for y in (computed(x), like_numpy(x), *of_numpy(x, x, x)))
