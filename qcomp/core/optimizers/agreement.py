"""Checks that all ranks have equal settings, parameters and states, but different gradients in the first step."""

import hashlib
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from qcomp.core.checkpoint.format import named_arrays, some, to_state_dict
from qcomp.core.checkpoint.manifest import Described, describe, shared_entries
from qcomp.core.compressor import Compressor
from qcomp.core.errors import MismatchError
from qcomp.core.handshake import gather_texts, handshake_stages
from qcomp.core.mean.averaging import Averaging
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.numeric.arrays import (
    Array,
    bytes_of,
    concat,
    digest,
    flat,
    from_host_bytes,
    host_bytes,
)
from qcomp.core.reporting import name_ranks, warn_caller
from qcomp.core.state import OptimizerState

GIVE_OWN_DATA = (
    "Give each rank data of its own, for instance by a DistributedSampler or a seed that depends on the rank"
)
"""The advice to ranks that train on the same data."""

_BYTES = 4
"""The bytes of a fingerprint. Of runs with different data, one in four billion gets a false warning."""
_NOTHING = bytes(_BYTES)
_STATE_BYTES = 8
_SAMPLE = 4096
"""How many elements of each gradient are compared: gradients of different data differ in most elements."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""An address in a text, which differs between the processes of ranks."""
UNTOLD = {"rounding": "nearest"}
"""Settings that older releases lack, each with the value that describes these releases and is not recorded."""
_EXACT_STAGES = {"warmup", "rewarm"}
"""The stages with exact steps. When such a stage begins or ends, the ranks compare their states."""


def settings_of(replica: Any) -> dict[str, str]:
    """Return the settings of a replica, a dataclass, as text, including the settings of its averaging."""
    settings: dict[str, str] = {}
    for name, value in ((f.name, getattr(replica, f.name)) for f in fields(replica)):
        if isinstance(value, Averaging):
            settings |= settings_of(value)
        elif is_dataclass(value) and hasattr(value, "learning_rate"):  # an optimizer inside another
            of_inner = settings_of(value)
            settings |= {name: type(value).__name__, **{f"{name}.{key}": of_inner[key] for key in of_inner}}
        elif name not in UNTOLD or value != UNTOLD[name]:
            settings[name] = _describe(value)
    return settings


def digests(names: Sequence[str], params: Sequence[Array]) -> list[tuple[str, str]]:
    """Return each parameter's name, with its shape and a digest of its elements, which is the same in all libraries."""
    return [(name, f"shape {tuple(p.shape)}: {digest(p)}") for name, p in zip(names, params, strict=True)]


def explain_values(held: Sequence[Any]) -> str | None:
    """Return a text about the first parameter that differs between the ranks, given each rank's `digests`."""
    if len({len(of_rank) for of_rank in held}) > 1:
        return None  # the ranks have different numbers of parameters, which another message reports
    for of_ranks in zip(*held, strict=True):
        ranks_of = defaultdict(list)
        for rank, (_, found) in enumerate(of_ranks):
            ranks_of[found].append(rank)
        if len(ranks_of) > 1:
            name, shape = of_ranks[0][0], of_ranks[0][1].partition(":")[0]
            groups = [name_ranks(ranks) for ranks in ranks_of.values()]
            return (
                f"the parameter {name!r} of {shape} has one value on {groups[0]}, and others on "
                f"{'; '.join(groups[1:])}: load the same file on every rank, or begin with the values of one, by "
                "params = qcomp.comm.broadcast(params, comm)"
            )
    return None


def difference_in_values(
    names: Sequence[str], params: Sequence[Array], size: int
) -> Stages[MismatchError | None]:
    """Return, on every rank, an error that names a parameter which differs between the ranks; None if all are equal."""
    told = {"values": digests(names, params)}
    try:
        yield from handshake_stages(told, size=size, like=params[0], explain={"values": explain_values})
    except MismatchError as error:
        return error
    return None


def compare_states(replica: Described, state: OptimizerState, like: Array, when: str) -> Stages[None]:
    """Raise MismatchError on every rank unless all have the same step, stage, moments, variances and counters.

    Residuals, and all other arrays that belong to one rank, are not compared. The error names ``when`` the states are
    compared, such as "after step 5".

    Reads all compared arrays on the host. Sends 8 bytes to every other rank and, if those bytes differ, a digest of
    each array.
    """
    if state.size == 1:
        return
    own = json.dumps(shared_by_ranks(replica, state))
    mark = hashlib.sha256(own.encode()).digest()[:_STATE_BYTES]
    marks = yield AllGather(from_host_bytes(mark, like), (_STATE_BYTES,) * state.size)
    if all(bytes(host_bytes(other)) == mark for other in marks):
        return
    held = [json.loads(text) for text in (yield from gather_texts(own, state.size, like))]
    for rank, other in enumerate(held):
        differing = [key for key in sorted({*held[0], *other}) if held[0].get(key) != other.get(key)]
        if differing:
            raise MismatchError(
                f"{when}, the states of ranks 0 and {rank} differ in [{some(differing)}], which must be the same on "
                "all ranks: one has the state of another step or another job. Resume all ranks from the same job and "
                "step"
            )


def shared_by_ranks(replica: Described, state: OptimizerState) -> dict[str, str]:
    """Return by name what must be equal in the states of all ranks: numbers, and digests of arrays."""
    mean = replica.mean_of(state)
    arrays = dict(named_arrays(state, mean))
    apart = (*mean.owned_kinds, *mean.part_kinds)
    described = describe(to_state_dict(state, mean), arrays, (*replica.own_kinds(state.stage), *apart))
    return shared_entries(described, apart)


def compare_new_stage(
    replica: Described, before: OptimizerState, after: OptimizerState, like: Array
) -> Stages[None]:
    """If a step has begun or ended a warm-up, compare the states of all ranks as `compare_states` does."""
    if before.stage != after.stage and not _EXACT_STAGES.isdisjoint((before.stage, after.stage)):
        yield from compare_states(replica, after, like, f"after step {after.step}")


def stream_of(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> int:
    """Return a number, equal on all ranks, by which this model's random draws differ from other models' draws."""
    return zlib.crc32(repr(list(zip(names, shapes, strict=True))).encode())


def compare_gradients(
    gradients: Sequence[Array | None],
    size: int,
    like: Array,
    who: str,
    what: str = "gradients in the first step",
) -> Stages[None]:
    """Warn on every rank if all ranks have the same gradients. Each rank sends 4 bytes to every other rank.

    For a parameter without a gradient, the entry is None. The warning names ``who`` averages, and ``what`` it compares.
    """
    if (yield from same_gradients(gradients, size, like)):
        warn_caller(
            f"all {size} ranks have the same {what}, so {who} averages in vain: either the ranks train on the same "
            f"data, or something else averages first, such as DistributedDataParallel. {GIVE_OWN_DATA}. Do not wrap "
            "the model in DistributedDataParallel, unless you pass that model to the optimizer: as model=, or by "
            "attach(model), in Accelerate and the Trainer by optimizer.optimizer.attach(model)"
        )


def same_gradients(gradients: Sequence[Array | None], size: int, like: Array) -> Stages[bool]:
    """Return whether several ranks all have the same nonzero gradients. Each rank sends 4 bytes to every other rank.

    Only the `first_elements` of each gradient are compared. The arguments are as for `compare_gradients`.
    """
    if size == 1:
        return False
    arrived = yield AllGather(from_host_bytes(_fingerprint(gradients), like), (_BYTES,) * size)
    found = {bytes(host_bytes(part)) for part in arrived}
    return len(found) == 1 and found != {_NOTHING}


def first_elements(gradient: Array) -> Array:
    """Return the elements of a gradient that are compared, as a vector."""
    return flat(gradient)[: min(_SAMPLE, math.prod(gradient.shape))]


def choices(state: OptimizerState) -> list[object]:
    """Return the policies' choice for each tensor: its compressor's spec string, or whether it is compressed at all."""
    if not state.compressors:
        return [not is_exact for is_exact in state.exact]
    compressors = iter(state.compressors)
    return [None if is_exact else next(compressors).spec for is_exact in state.exact]


def _fingerprint(gradients: Sequence[Array | None]) -> bytes:
    """Return bytes that are equal if the first elements of all tensors are equal; zeros if those elements are zero."""
    parts = [bytes_of(first_elements(x)) for x in gradients if x is not None]
    sample = host_bytes(concat(parts)) if parts else b""
    return hashlib.sha256(sample).digest()[:_BYTES] if sample.strip(b"\0") else _NOTHING


def _describe(value: object) -> str:
    """Return a text that describes a setting; ranks with equal settings get equal texts."""
    if isinstance(value, Compressor):
        return value.spec
    if hasattr(value, "__qualname__"):  # a function; its repr has an address
        return str(value.__qualname__)
    if type(value).__repr__ is object.__repr__:
        return type(value).__qualname__
    return _ADDRESS.sub("", repr(value))  # such as the address of a function in a functools.partial
