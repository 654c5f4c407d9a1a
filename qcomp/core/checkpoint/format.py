"""Optimizer state as a flat dict of named arrays and scalars, for any file format."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.numeric.arrays import Array, array_namespace, device, dtype_name, host_bytes
from qcomp.core.state import OptimizerState

__all__ = [
    "MAKER",
    "NUMBER",
    "SCHEMA",
    "SERVER",
    "TOPOLOGY",
    "WORKER",
    "array_keys",
    "from_state_dict",
    "named_arrays",
    "owned_keys",
    "plain",
    "require_dtype",
    "require_fit",
    "require_keys",
    "require_schema",
    "to_arrays",
    "to_state_dict",
]

SCHEMA = 1
"""Version of the format."""

_SCALARS = ("step", "stage", "rank", "size", "skipped")

TOPOLOGY = "topology"
"""The key of the topology that "auto" has selected."""

MAKER = "made_by"
"""The key of the optimizer that made a state: its class and settings, as JSON text."""

NUMBER = "number."
"""Prefix of the names in `OptimizerState.numbers`."""

WORKER, SERVER = CompressedMean.kinds
"""Kinds of arrays that belong to one rank in every optimizer."""


def to_state_dict(state: OptimizerState, mean: CompressedMean) -> dict[str, Any]:
    """Return a state as a flat dict: scalars, and arrays keyed by the names of the parameters.

    Residuals differ between ranks, so every rank must save its own dict.
    """
    scalars = {name: getattr(state, name) for name in _SCALARS}
    return {
        "schema": SCHEMA,
        **scalars,
        "history": list(state.history),
        **{f"{NUMBER}{name}": value for name, value in state.numbers.items()},
        **dict(named_arrays(state, mean)),
    }


def to_arrays(saved: Mapping[str, Any], like: Array) -> dict[str, Array]:
    """Convert the result of `Optimizer.state_dict` to a dict of arrays only, for formats that hold nothing else.

    Parameters
    ----------
    saved : mapping of str to array or scalar
        From ``state_dict``.
    like : array
        Gives the library and the device of the arrays made from scalars.

    Returns
    -------
    dict of str to array
        Numbers, texts and lists become their JSON text in uint8, exact in every library. Arrays become contiguous
        copies that share no memory. `Optimizer.load_state_dict` reads the result like the original dict.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt, comm = qcomp.Adam(learning_rate=0.1), qcomp.comm.LocalCommunicator.alone()
    >>> params = np.ones(4)
    >>> arrays = qcomp.checkpoint.to_arrays(opt.state_dict(opt.init(params, comm)), like=params)
    >>> arrays["momentum.0"], bytes(arrays["stage"])  # ready for safetensors.numpy.save_file
    (array([0., 0., 0., 0.]), b'"warmup"')
    >>> opt.load_state_dict(arrays, params, comm).stage
    'warmup'
    """
    return {
        key: _own_copy(value) if hasattr(value, "shape") else _encoded(value, like)
        for key, value in saved.items()
    }


def from_state_dict(
    saved: Mapping[str, Any], begin: Callable[[Any], OptimizerState], mean: CompressedMean
) -> OptimizerState:
    """Return the state in a dict, in the form that ``begin`` returns for its stage.

    Raises
    ------
    ValueError
        If the dict has another schema, rank, number of ranks, or other parameters.
    """
    require_schema(saved)
    template = begin(str(plain(saved["stage"])))
    rank, size = int(plain(saved["rank"])), int(plain(saved["size"]))
    if (rank, size) != (template.rank, template.size):
        raise ValueError(
            f"the state belongs to rank {rank} of {size}; this is rank {template.rank} of "
            f"{template.size}: its residuals belong to that rank alone; pass a list with the dicts of all {size} "
            f"ranks to resume with another number of ranks"
        )
    expected = dict(named_arrays(template, mean))
    require_keys(saved.keys(), {*expected, *(f"{NUMBER}{name}" for name in template.numbers)})
    loaded = iter([_like(saved[key], like, key) for key, like in expected.items()])
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
        step=int(plain(saved["step"])),
        skipped=int(plain(saved["skipped"])),
        momentum=momentum,
        variance=variance,
        exchange=template.exchange._replace(worker=worker, server=server),
        history=tuple(float(value) for value in plain(saved["history"])),
        arrays=dict(zip(template.arrays, others, strict=True)),
        numbers={name: float(plain(saved[f"{NUMBER}{name}"])) for name in template.numbers},
    )


def named_arrays(state: OptimizerState, mean: CompressedMean) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a state with their keys; residuals of parts are named by tensor and offset."""
    yield from zip((f"momentum.{name}" for name in state.names), state.momentum, strict=False)
    yield from zip((f"variance.{name}" for name in state.names), state.variance, strict=False)
    compressed = [name for name, exact in zip(state.names, state.exact, strict=True) if not exact]
    kept = state.exchange
    if kept.worker or kept.server:
        worker, server = mean.layout(kept.shapes, rank=kept.rank, size=kept.size, nodes=kept.nodes).residuals
        of_worker, *of_server = mean.kinds
        keys = (f"{of_worker}.{compressed[s.tensor]}{f'@{s.start}' if s.start else ''}" for s in worker)
        yield from zip(keys, kept.worker, strict=True)
        keys = (f"{kind}.{compressed[s.tensor]}@{s.start}" for kind in of_server for s in server)
        yield from zip(keys, kept.server, strict=True)
    for kind, arrays in state.arrays.items():
        yield from zip((f"{kind}.{name}" for name in state.names), arrays, strict=True)


def owned_keys(state: OptimizerState, mean: CompressedMean) -> tuple[str, ...]:
    """Return the keys of the arrays that exist once in the world, each on some rank; the same on all ranks."""
    return tuple(
        f"{kind}.{name}@0"
        for kind in mean.owned_kinds
        for name, exact in zip(state.names, state.exact, strict=True)
        if not exact
    )


def array_keys(saved: Mapping[str, Any]) -> list[str]:
    """Return the keys of the arrays in a saved dict, also after `to_arrays`."""
    return [key for key in saved if key not in _plain_keys() and not key.startswith(NUMBER)]


def plain(value: Any) -> Any:
    """Return an entry that is not an array in its original form, also after `to_arrays`."""
    if hasattr(value, "shape") and len(value.shape) == 1 and dtype_name(value.dtype) == "uint8":
        return json.loads(host_bytes(value))
    return value


def require_schema(saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless this release reads the schema of a dict, and all scalars exist."""
    missing = [key for key in sorted(_plain_keys() - {MAKER, TOPOLOGY}) if key not in saved]
    if missing:
        raise ValueError(
            f"saved has the keys {_some(saved) or '(none)'}, but not {_some(missing)}; expected a dict from the "
            "state_dict of one of qcomp's optimizers"
        )
    schema = int(plain(saved["schema"]))
    if schema != SCHEMA:
        raise ValueError(
            f"the state has schema {schema}, the format of another release of qcomp; this one reads schema {SCHEMA}"
        )


def require_keys(present: Any, expected: Any) -> None:
    """Raise ValueError unless a dict has the expected keys besides its scalars."""
    present = {key for key in present if key not in _plain_keys()}
    if present != set(expected):
        missing, unknown = sorted(set(expected) - present), sorted(present - set(expected))
        found = f"it lacks {_some(missing)}" if missing else ""
        found += " and " if missing and unknown else ""
        found += f"it has {_some(unknown)}, which this optimizer does not keep" if unknown else ""
        raise ValueError(
            f"the state does not fit: {found}. It was saved by another optimizer, or with another "
            "model, policy or topology"
        )


def require_fit(shape: Any, dtype: Any, like: Array, key: str) -> None:
    """Raise ValueError unless a saved array has the shape and dtype of another."""
    if tuple(shape) != tuple(like.shape):
        raise ValueError(f"the state has {key} of shape {tuple(shape)}; expected {tuple(like.shape)}")
    require_dtype(dtype, like, key)


def require_dtype(dtype: Any, like: Array, key: str) -> None:
    """Raise ValueError unless a saved array has the dtype of another."""
    if dtype_name(dtype) != dtype_name(like.dtype):
        raise ValueError(f"the state has {key} of dtype {dtype}; expected {like.dtype}")


def _some(keys: Iterable[str]) -> str:
    """Name the first of some keys, and count the others."""
    names = [repr(key) for key in keys]
    listed = ", ".join(names[:5])
    return f"{listed} and {len(names) - 5} more" if len(names) > 5 else listed


def _plain_keys() -> set[str]:
    return {"schema", "history", MAKER, TOPOLOGY, *_SCALARS}


def _like(value: Any, like: Array, key: str) -> Array:
    """Return a saved array in the library and dtype, and on the device, of another of the same shape."""
    require_fit(value.shape, value.dtype, like, key)
    return array_namespace(like).asarray(value, dtype=like.dtype, device=device(like))


def _own_copy(x: Array) -> Array:
    """Return a contiguous copy, since a file may hold the whole array behind a view, and safetensors refuses views."""
    xp = array_namespace(x)
    return xp.reshape(xp.asarray(xp.reshape(x, (-1,)), copy=True), tuple(x.shape))


def _encoded(value: Any, like: Array) -> Array:
    xp = array_namespace(like)
    return xp.asarray(bytearray(json.dumps(value).encode()), dtype=xp.uint8, device=device(like))
