"""`take`, which cuts a fragment's part out of a state for an exchange, and `put`, which puts it back afterwards."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from qcomp.core.compressor import Compressor
from qcomp.core.mean.tensorwise import TensorwiseMean
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers.compression import Compressing
from qcomp.core.state import OptimizerState

Item = TypeVar("Item")


def take(state: OptimizerState, members: tuple[int, ...], compression: Compressing) -> OptimizerState:
    """Return a state of only some tensors: their names, compressors, moments, residuals, and arrays of every kind.

    The numbers in ``members`` must ascend, and the mean of ``compression`` must be a `TensorwiseMean`.
    """
    own = _compressed(state, members)
    mean = _mean(compression, state)
    exchange = state.exchange
    if own:
        each = mean.split(exchange, state.exact.count(False))
        exchange = mean.join([each[i] for i in own])
    return state._replace(
        names=_chosen(state.names, members),
        exact=_chosen(state.exact, members),
        momentum=_chosen(state.momentum, members),
        variance=_chosen(state.variance, members),
        exchange=exchange,
        arrays={kind: _chosen(arrays, members) for kind, arrays in state.arrays.items()},
        compressors=_compressors(state.compressors, own) if own else (),
    )


def put(
    part: OptimizerState, state: OptimizerState, members: tuple[int, ...], compression: Compressing
) -> OptimizerState:
    """Return the state of all tensors, with the moments, residuals and arrays of a part from `take`."""
    own, exchange = _compressed(state, members), state.exchange
    if own:
        each = _mean(compression, state).split(exchange, state.exact.count(False))
        for i, found in zip(own, _mean(compression, part).split(part.exchange, len(own)), strict=True):
            each[i] = found
        exchange = TensorwiseMean.join(each)
    return state._replace(
        momentum=_replaced(state.momentum, part.momentum, members),
        variance=_replaced(state.variance, part.variance, members),
        exchange=exchange,
        arrays={kind: _replaced(arrays, part.arrays[kind], members) for kind, arrays in state.arrays.items()},
    )


def _compressed(state: OptimizerState, members: Sequence[int]) -> tuple[int, ...]:
    """Return the places of the compressed members in the list of all compressed tensors."""
    numbers = [i for i, exact in enumerate(state.exact) if not exact]
    return tuple(numbers.index(i) for i in members if not state.exact[i])


def _mean(compression: Compressing, state: OptimizerState) -> TensorwiseMean:
    mean = compression.mean_of(state)
    assert isinstance(mean, TensorwiseMean)
    return mean


@lru_cache(256)  # the same object each time, since a mean caches its layouts under this object
def _compressors(compressors: tuple[Compressor, ...], own: tuple[int, ...]) -> tuple[Compressor, ...]:
    return tuple(compressors[i] for i in own) if compressors else ()


def _chosen(values: tuple[Item, ...], members: Sequence[int]) -> tuple[Item, ...]:
    return tuple([values[i] for i in members]) if values else ()


def _replaced(values: tuple[Array, ...], new: Sequence[Array], members: Sequence[int]) -> tuple[Array, ...]:
    if not values:
        return ()
    changed = list(values)
    for i, value in zip(members, new, strict=True):
        changed[i] = value
    return tuple(changed)
