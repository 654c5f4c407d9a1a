"""Optimizer state as a flat dict of named arrays and scalars, for any file format."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qcomp.core.arrays import Array, array_namespace, device, dtype_name
from qcomp.core.exchange import CompressedMean
from qcomp.core.state import OptimizerState

__all__ = ["from_state_dict", "to_state_dict"]

_SCHEMA = 1
_NUMBER = "number."
_SCALARS = ("step", "stage", "rank", "size", "skipped")


def to_state_dict(state: OptimizerState, mean: CompressedMean) -> dict[str, Any]:
    """Return a state as a flat dict: scalars, and arrays keyed by the names of the parameters.

    Residuals are this rank's own; so every rank has a dict of its own to keep.
    """
    scalars = {name: getattr(state, name) for name in _SCALARS}
    return {
        "schema": _SCHEMA,
        **scalars,
        "history": list(state.history),
        **{f"{_NUMBER}{name}": value for name, value in state.numbers.items()},
        **dict(_named_arrays(state, mean)),
    }


def from_state_dict(
    saved: Mapping[str, Any], begin: Callable[[Any], OptimizerState], mean: CompressedMean
) -> OptimizerState:
    """Return the state that a dict describes, like the one that ``begin`` returns for its stage.

    Raises
    ------
    ValueError
        If the dict is of another schema, rank, number of ranks, or of other parameters.
    """
    if int(saved.get("schema", 0)) != _SCHEMA:
        raise ValueError(f"the state has schema {saved.get('schema')}; this release reads schema {_SCHEMA}")
    template = begin(str(saved["stage"]))  # a str also where a file format has made an array of it
    if (int(saved["rank"]), int(saved["size"])) != (template.rank, template.size):
        raise ValueError(
            f"the state is of rank {saved['rank']} of {saved['size']}; this is rank {template.rank} of "
            f"{template.size}: its residuals belong to that rank alone"
        )
    expected = {f"{_NUMBER}{name}": value for name, value in template.numbers.items()}
    expected |= dict(_named_arrays(template, mean))
    present = {key for key in saved if key not in ("schema", "history", *_SCALARS)}
    if present != expected.keys():
        missing, unknown = sorted(expected.keys() - present), sorted(present - expected.keys())
        raise ValueError(
            f"the state lacks {missing[:5]} and has {unknown[:5]} too many: another model or optimizer"
        )
    loaded = iter([_like(saved[key], like, key) for key, like in _named_arrays(template, mean)])
    momentum, variance, worker, server, *others = (
        tuple(next(loaded) for _ in group)
        for group in (
            template.momentum,
            template.variance,
            template.exchange.worker,
            template.exchange.server,
            *template.arrays.values(),
        )
    )
    return template._replace(
        step=int(saved["step"]),
        skipped=int(saved["skipped"]),
        momentum=momentum,
        variance=variance,
        exchange=template.exchange._replace(worker=worker, server=server),
        history=tuple(float(value) for value in saved["history"]),
        arrays=dict(zip(template.arrays, others, strict=True)),
        numbers={name: float(saved[f"{_NUMBER}{name}"]) for name in template.numbers},
    )


def _named_arrays(state: OptimizerState, mean: CompressedMean) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a state with their keys; server residuals are named by tensor and offset."""
    yield from zip((f"momentum.{name}" for name in state.names), state.momentum, strict=False)
    yield from zip((f"variance.{name}" for name in state.names), state.variance, strict=False)
    compressed = [name for name, exact in zip(state.names, state.exact, strict=True) if not exact]
    yield from zip((f"worker_residual.{name}" for name in compressed), state.exchange.worker, strict=False)
    if state.exchange.server:
        own = mean.segments(state.exchange.worker, state.size)[state.rank]
        keys = (f"server_residual.{compressed[s.tensor]}@{s.start}" for s in own)
        yield from zip(keys, state.exchange.server, strict=True)
    for kind, arrays in state.arrays.items():
        yield from zip((f"{kind}.{name}" for name in state.names), arrays, strict=True)


def _like(value: Any, like: Array, key: str) -> Array:
    """Return a saved array in the library, dtype and on the device of another, whose shape it must have."""
    if tuple(value.shape) != tuple(like.shape):
        raise ValueError(f"the state has {key} of shape {tuple(value.shape)}; expected {tuple(like.shape)}")
    if dtype_name(value.dtype) != dtype_name(like.dtype):
        raise ValueError(f"the state has {key} of dtype {value.dtype}; expected {like.dtype}")
    return array_namespace(like).asarray(value, dtype=like.dtype, device=device(like))
