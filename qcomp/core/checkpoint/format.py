"""Converts an optimizer's state to and from a flat dict of named arrays and scalars, for any file format."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from qcomp.core.checkpoint.schema import (
    Kind,
    Number,
    Numbers,
    NumericArray,
    Text,
    Whole,
    from_json,
    read,
    shown,
)
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.numeric.arrays import Array, array_namespace, device, digest, dtype_name, from_host_bytes
from qcomp.core.state import OptimizerState

SCHEMA = 1
"""Version of the format."""

_SCALARS = ("step", "stage", "rank", "size", "skipped")

DIGESTS = "digests"
"""The key of the digests of all other entries, as JSON text."""

TOPOLOGY = "topology"
"""The key of the topology that "auto" has selected."""

MAKER = "made_by"
"""The key of the optimizer that made a state: its class and settings, as JSON text."""

NUMBER = "number."
"""Prefix of the names in `OptimizerState.numbers`."""

_KINDS: Mapping[str, Kind] = {
    "schema": Whole(),
    "step": Whole(),
    "stage": Text(),
    "rank": Whole(most=(1 << 32) - 1),
    "size": Whole(least=1, most=1 << 32),
    "skipped": Whole(),
    "history": Numbers(),
    MAKER: Text(),
    TOPOLOGY: Text(),
    DIGESTS: Text(),
}
"""The accepted values of all entries except an optimizer's arrays and numbers. The last three may be missing."""

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
        "history": [float(value) for value in state.history],
        **{f"{NUMBER}{name}": float(value) for name, value in state.numbers.items()},
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


def read_scalars(saved: Any) -> dict[str, Any]:
    """Return the entries of a saved dict that are not arrays, in their original types, whatever the file format.

    Raises ValueError if ``saved`` is not such a dict, lacks an entry, or has a value that no optimizer saves.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"saved contains a {type(saved).__name__}; expected dicts from state_dict")
    strange = [key for key in saved if not isinstance(key, str)]
    if strange:
        raise ValueError(
            f"saved has the key {shown(strange[0])}; expected only str keys, as in a dict from state_dict"
        )
    missing = [key for key in sorted(_KINDS.keys() - {MAKER, TOPOLOGY, DIGESTS}) if key not in saved]
    if missing:
        raise ValueError(
            f"saved has the keys {some(saved) or '(none)'}, but not {some(missing)}; expected a dict from state_dict "
            "of an optimizer of qcomp"
        )
    schema = read(saved, "schema", _KINDS["schema"])
    if schema != SCHEMA:
        raise ValueError(
            f"the state has schema {schema}, the format of another release of qcomp; this release reads schema "
            f"{SCHEMA}"
        )
    numbers = {key: read(saved, key, Number(finite=False)) for key in saved if key.startswith(NUMBER)}
    return {key: read(saved, key, kind) for key, kind in _KINDS.items() if key in saved} | numbers


def read_arrays(saved: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays of a saved dict; raise ValueError if any of them is not an array of numbers."""
    return {key: read(saved, key, NumericArray()) for key in array_keys(saved)}


def sealed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Add the digests of a dict's entries, which stay valid in any file format."""
    return {**entries, DIGESTS: json.dumps(_digests(entries))}


def require_intact(entries: Mapping[str, Any]) -> None:
    """Raise ValueError if entries, in their original types, differ from their digests; dicts without digests pass."""
    if DIGESTS not in entries:
        return
    now = _digests(entries)
    try:
        then = dict(from_json(entries[DIGESTS]))
    except (TypeError, ValueError):  # not the JSON text of a dict: every entry counts as changed
        then = {}
    changed = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    if changed:
        raise ValueError(
            f"the state was changed since it was saved: {some(changed)} differ from their digests. Load an earlier "
            f"state; or if you have changed this one on purpose, remove its entry {DIGESTS!r}"
        )


def renamed(saved: Mapping[str, Any], name_now: Callable[[str], str | None]) -> dict[str, Any]:
    """Return a dict with the parameters renamed; digests that were valid stay valid.

    ``name_now`` returns the new name, or None if no parameter has the old name.
    """

    def key_now(key: Any) -> Any:
        number = NUMBER if str(key).startswith(NUMBER) else ""
        kind, dot, name = str(key).removeprefix(number).partition(".")
        at = start = ""
        if name_now(name) is None:  # the name of a part
            name, at, start = name.rpartition("@")
        now = name_now(name)
        return f"{number}{kind}{dot}{now}{at}{start}" if dot and now else key

    found = {key_now(key): value for key, value in saved.items()}
    if DIGESTS in saved:
        found[DIGESTS] = _changed(saved[DIGESTS], lambda told: {key_now(key): told[key] for key in told})
    return found


def replaced(saved: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a dict with a new value of an entry; a digest that was valid stays valid."""

    def told_now(told: dict[str, Any]) -> dict[str, Any]:
        fits = told.get(key) == _digest_of(key, saved[key])
        return {**told, key: _digest_of(key, value)} if fits else told

    changed = {DIGESTS: _changed(saved[DIGESTS], told_now)} if DIGESTS in saved else {}
    return {**saved, key: value, **changed}


def _changed(digests: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return the text of the digests after a change; return invalid text unchanged, for `require_intact` to report."""
    try:
        return json.dumps(change(dict(from_json(digests))))
    except (AttributeError, TypeError, ValueError):
        return digests


def _digests(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each entry but `DIGESTS`; equal entries have equal digests in every library and format."""
    return {key: _digest_of(key, entries[key]) for key in sorted(entries) if key != DIGESTS}


def _digest_of(key: str, value: Any) -> str:
    if not hasattr(value, "shape"):
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
    try:
        content = [dtype_name(value.dtype), list(value.shape), digest(value)]
    except Exception as error:  # any error of the array's library
        raise ValueError(f"the state has {key}, which cannot be read: {error}") from error
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def from_state_dict(
    saved: Mapping[str, Any],
    begin: Callable[[int, str], OptimizerState],
    mean: CompressedMean,
    limits: Callable[[OptimizerState], Mapping[str, Number]],
) -> OptimizerState:
    """Return the state that is in a dict, with the arrays and numbers of the state from ``begin``.

    ``saved`` joins this rank's results of `read_scalars` and `read_arrays`. ``begin`` takes the dict's step and stage,
    and returns a state with the arrays that the dict must have. ``limits`` returns the accepted values of a state's
    numbers, by name; a number without limits must be finite if it is finite in the state from ``begin``. Raises
    ValueError if the dict belongs to another model, or has a number that is not accepted.
    """
    template = begin(saved["step"], saved["stage"])
    expected = dict(named_arrays(template, mean))
    numbers = {f"{NUMBER}{name}": name for name in template.numbers}
    require_keys(saved, {*expected, *numbers})
    for key, like in expected.items():
        require_fit(saved[key].shape, saved[key].dtype, like, key)
    kinds = {name: Number(finite=math.isfinite(x)) for name, x in template.numbers.items()}
    kinds |= limits(template)
    found = {name: read(saved, key, kinds[name]) for key, name in numbers.items()}
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
        skipped=saved["skipped"],
        momentum=momentum,
        variance=variance,
        exchange=template.exchange._replace(worker=worker, server=server),
        history=tuple(saved["history"]),
        arrays=dict(zip(template.arrays, others, strict=True)),
        numbers=found,
    )


def named_arrays(state: OptimizerState, mean: CompressedMean) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a state with their keys; a part of a tensor is named by the tensor and its first element."""
    starts = dict(zip(state.names, mean.starts(state.rank), strict=False))
    places = [f"{name}@{start}" for name, start in starts.items()] if starts else state.names
    yield from zip((f"momentum.{place}" for place in places), state.momentum, strict=False)
    yield from zip((f"variance.{place}" for place in places), state.variance, strict=False)
    compressed = [name for name, exact in zip(state.names, state.exact, strict=True) if not exact]
    kept = state.exchange
    if kept.worker or kept.server:
        worker, server = mean.layout(kept.shapes, rank=kept.rank, size=kept.size, nodes=kept.nodes).residuals
        of_worker, *of_server = mean.kinds
        parts = [(name, starts.get(name, f"{s.start}")) for s in worker for name in (compressed[s.tensor],)]
        keys = (f"{of_worker}.{name}{'' if start == '0' else f'@{start}'}" for name, start in parts)
        yield from zip(keys, kept.worker, strict=True)
        keys = (f"{kind}.{compressed[s.tensor]}@{s.start}" for kind in of_server for s in server)
        yield from zip(keys, kept.server, strict=True)
    for kind, arrays in state.arrays.items():
        yield from zip((f"{kind}.{name}" for name in state.names), arrays, strict=True)


def owned_keys(state: OptimizerState, mean: CompressedMean) -> tuple[str, ...]:
    """Return the keys of the arrays that only the owners of tensors have; the keys are the same on all ranks."""
    return tuple(
        f"{kind}.{name}@0"
        for kind in mean.owned_kinds
        for name, exact in zip(state.names, state.exact, strict=True)
        if not exact
    )


def array_keys(saved: Mapping[str, Any]) -> list[str]:
    """Return the keys of the arrays in a saved dict, even in one from `to_arrays`."""
    return [key for key in saved if key not in _KINDS and not key.startswith(NUMBER)]


def require_keys(present: Any, expected: Any) -> None:
    """Raise ValueError unless a dict has exactly the expected keys besides its scalars."""
    present = {key for key in present if key not in _KINDS}
    if present != set(expected):
        missing, unknown = sorted(set(expected) - present), sorted(present - set(expected))
        found = f"it lacks {some(missing)}" if missing else ""
        found += " and " if missing and unknown else ""
        found += f"it has {some(unknown)}, which this optimizer does not keep" if unknown else ""
        raise ValueError(
            f"the state does not fit: {found}. It was saved by another optimizer, or with another model, other "
            "parameter names, another policy or another topology"
        )


def require_fit(shape: Any, dtype: Any, like: Array, key: str) -> None:
    """Raise ValueError unless a saved array has the shape and the dtype of ``like``."""
    if tuple(shape) != tuple(like.shape):
        raise ValueError(f"the state has {key} of shape {tuple(shape)}; expected {tuple(like.shape)}")
    require_dtype(dtype, like, key)


def require_sizes(saved: Mapping[str, Any], sizes: Iterable[int], template: Iterable[Array]) -> None:
    """Raise ValueError if a saved array is larger than any valid one, before its bytes are read.

    ``sizes`` holds the number of elements of each parameter. A state of a different world may have arrays that
    ``template`` lacks. But each of these is at most as large as the largest array of ``template``, or as all parameters
    together.
    """
    most = max(sum(sizes), *(math.prod(like.shape) for like in template), 0)
    for key, value in saved.items():
        if math.prod(getattr(value, "shape", ())) > most:
            raise ValueError(
                f"the state has {shown(key)} of shape {tuple(value.shape)}; expected at most {most} elements"
            )


def require_dtype(dtype: Any, like: Array, key: str) -> None:
    """Raise ValueError unless a saved array has the dtype of ``like``."""
    if dtype_name(dtype) != dtype_name(like.dtype):
        raise ValueError(f"the state has {key} of dtype {dtype}; expected {like.dtype}")


def some(keys: Iterable[str]) -> str:
    """Return a text that names the first keys and counts the others."""
    names = [shown(key) for key in keys]
    listed = ", ".join(names[:5])
    return f"{listed} and {len(names) - 5} more" if len(names) > 5 else listed


def _like(value: Any, like: Array, key: str) -> Array:
    """Return a saved array in the library and on the device of ``like``, which has its shape and dtype."""
    try:
        return array_namespace(like).asarray(value, dtype=like.dtype, device=device(like))
    except Exception as error:  # any error of either library
        raise ValueError(f"the state has {key}, which cannot be read: {error}") from error


def _own_copy(x: Array) -> Array:
    """Return a contiguous copy, since a file may hold the whole array behind a view, and safetensors refuses views."""
    xp = array_namespace(x)
    return xp.reshape(xp.asarray(xp.reshape(x, (-1,)), copy=True), tuple(x.shape))


def _encoded(value: Any, like: Array) -> Array:
    return from_host_bytes(json.dumps(value).encode(), like)
