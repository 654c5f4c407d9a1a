"""Common parts of the checks of compressed means: values, first states, a mean of all ranks, and what it owes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.topologies.base import Topology
from qcomp.core.mean.topologies.registry import register, topology
from qcomp.core.numeric.buckets import Block
from qcomp.core.numeric.random import Key, replace_draws
from qcomp.core.registry import compressor as from_spec
from qcomp.testing.libraries import to_numpy
from qcomp.testing.one_thread import lockstep

Shapes = Sequence[tuple[int, ...]]

SHAPES: Shapes = [(3, 11), (0,), (), (170,), (2, 0, 4)]
"""Odd sizes, a scalar, and tensors without elements: 3, 0, 1, 11 and 0 buckets of 16, more buckets than ranks."""
SPECS = ("sign:bucket_size=16", "qsgd:levels=7,bucket_size=16", "minmax:bucket_size=16", "cast", "identity")
NODES = {
    "pairs": (0, 0, 1, 1),
    "alternating": (0, 1, 0, 1),
    "3 and 2": (0, 0, 0, 1, 1),
    "3 and 1": (0, 1, 1, 1),
    "1, 2 and 3": (0, 1, 1, 2, 2, 2),
    "scattered": (0, 1, 2, 1, 0, 2, 1),
    "one": (0, 0, 0),
}
"""The node of each rank, in worlds whose ranks share nodes."""


@dataclass(frozen=True)
class Peers:
    """A registered topology, and the node of each rank."""

    topology: str
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.topology} {''.join(map(str, self.nodes))}"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def ranks(self) -> range:
        """The numbers of the ranks."""
        return range(self.size)

    @property
    def hosts(self) -> list[str]:
        """The name of each rank's machine."""
        return [str(node) for node in self.nodes]

    @property
    def is_exact(self) -> bool:
        """Whether the topology compresses nothing in this world."""
        known = topology(self.topology)
        return known.wants_nodes and known.is_exact_on(Nodes(self.nodes))

    def mean(self, c: str | Compressor = SPECS[0], **options: Any) -> CompressedMean:
        """Return a compressed mean in this topology."""
        return CompressedMean(from_spec(c) if isinstance(c, str) else c, self.topology, **options)

    def values(self, step: int, **options: Any) -> list[list[np.ndarray[Any, Any]]]:
        """Return the `inputs` of every rank."""
        return [inputs(rank, step, **options) for rank in self.ranks]

    def start(self, mean: CompressedMean, tensors: Any) -> list[MeanState]:
        """Return the first state of every rank."""
        return start(mean, tensors, self.nodes)


def inputs(
    rank: int, step: int, dtype: Any = np.float32, shapes: Shapes = SHAPES
) -> list[np.ndarray[Any, Any]]:
    """Return normally distributed values, the same in every call with this rank and step."""
    rng = np.random.default_rng([rank, step])
    return [np.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes]


def start(mean: CompressedMean, tensors: Any, world: int | Sequence[int]) -> list[MeanState]:
    """Return the first state of every rank; ``world`` is the number of ranks, or the node of each."""
    nodes = () if isinstance(world, int) else tuple(world)
    size = world if isinstance(world, int) else len(nodes)
    return [mean.zeros(tensors, rank=rank, size=size, nodes=nodes) for rank in range(size)]


class Outcome(NamedTuple):
    """The result of a mean: the means, which are equal on all ranks, and the new state of each rank."""

    means: Any
    states: list[MeanState]


def average(
    mean: CompressedMean,
    values: Sequence[Any],
    states: Sequence[MeanState],
    key: Key | None = None,
    **options: Any,
) -> Outcome:
    """Average the values of all ranks once; the result must have the same bits on all ranks."""
    results = lockstep([mean.stages(x, s, key=key, **options) for x, s in zip(values, states, strict=True)])
    assert len({bits(means) for means, _ in results}) == 1, "the ranks hold different means"
    return Outcome(results[0][0], [state for _, state in results])


def means_of(world: Peers, inputs_of: Sequence[tuple[str, int]]) -> list[bytes]:
    """Return the bytes of means and residuals, for each pair of a compressor and a step."""
    found = []
    for spec, step in inputs_of:
        mean = world.mean(spec)
        values = world.values(step)
        means, states = average(mean, values, world.start(mean, values[0]), Key(seed=5, step=step))
        found.append(b"|".join([bits(means), *map(held_by, states)]))
    return found


def of_registered(topology: Topology, arguments: tuple[Peers, Sequence[tuple[str, int]]]) -> list[bytes]:
    """Register a topology that this process does not know, and return its `means_of`."""
    register(topology)
    return means_of(*arguments)


def refused(
    mean: CompressedMean, values: Sequence[Any], states: Sequence[MeanState], **options: Any
) -> list[Exception]:
    """Return the error that each rank raises; all must raise in the same stage."""
    running = [mean.stages(x, s, **options) for x, s in zip(values, states, strict=True)]
    errors = lockstep(running, catch=NonFiniteError)
    for rank, error in enumerate(errors):
        assert isinstance(error, NonFiniteError), f"rank {rank} does not raise NonFiniteError"
    return errors


def bits(arrays: Any) -> bytes:
    """Return the bytes of an array or a list of arrays."""
    return b"|".join(to_numpy(a).tobytes() for a in (arrays if isinstance(arrays, list) else [arrays]))


def held_by(state: MeanState) -> bytes:
    """Return the bytes of all residuals of a rank."""
    return b"|".join(to_numpy(r).tobytes() for r in (*state.worker, *state.server))


def owed(
    mean: CompressedMean, states: Sequence[MeanState], tensors: Sequence[Any]
) -> list[np.ndarray[Any, Any]]:
    """Return mean_i e_i + e_s of every element, from the residuals of all ranks.

    If the topology depends on nodes, the workers i are the nodes, as in `qcomp.core.checkpoint.reshard`.
    """
    whole = [np.zeros(math.prod(t.shape)) for t in tensors]
    by_node = topology(mean.topology).wants_nodes
    for state in states:
        if not state.shapes:
            continue
        workers = len(set(state.nodes)) if by_node and state.nodes else len(states)
        ranges = mean.layout(state.shapes, rank=state.rank, size=state.size, nodes=state.nodes).residuals
        kinds = [(workers, ranges.worker, state.worker)]
        if mean.kinds[1] == "server_residual":
            kinds.append((1, ranges.server, state.server))
        for weight, of_kind, residuals in kinds:
            for part, residual in zip(of_kind, residuals, strict=True):
                whole[part.tensor][part.start : part.stop] += to_numpy(residual) / weight
    return [kept.reshape(t.shape) for kept, t in zip(whole, tensors, strict=True)]


def require_sum_identity(
    mean: CompressedMean,
    world: int | Sequence[int],
    *,
    shapes: Shapes = SHAPES,
    dtype: Any = np.float64,
    owes: Callable[..., list[np.ndarray[Any, Any]]] = owed,
) -> None:
    """Require that after every step the means add up to the sum of the exact means, minus (mean_i e_i + e_s).

    For the tolerance: a step rounds an element fewer than 1000 times, each time by half an ulp, at values of at most a
    few times the largest magnitude.
    """
    tolerance = 2**12 * float(np.finfo(dtype).eps)
    tensors = inputs(0, 0, dtype, shapes)
    states = start(mean, tensors, world)
    sums, exact = ([np.zeros(t.shape) for t in tensors] for _ in range(2))
    magnitude = 0.0
    for step in range(6):
        values = [inputs(rank, step, dtype, shapes) for rank in range(len(states))]
        means, states = average(mean, values, states, Key(step=step))
        kept = owes(mean, states, tensors)
        for i, m in enumerate(means):
            sums[i] += m
            exact[i] += sum(v[i].astype(np.float64) for v in values) / len(states)
            magnitude = max([magnitude, *np.abs(exact[i]).flat, *np.abs(kept[i]).flat])
            off = np.abs(sums[i] - (exact[i] - kept[i])).max(initial=0)
            assert off <= tolerance * magnitude, (
                f"after {step + 1} steps of {mean.compressors[0]} in {np.dtype(dtype)}, the means of tensor {i} do not "
                f"add up to the exact means less what the residuals hold; off by {off:.3g}"
            )
    assert magnitude > 1
    if states[0].shapes:
        assert max(np.abs(k).max(initial=0) for k in kept) > 1e-3, "no residual is kept"


def draws_of(
    mean: CompressedMean, values: Sequence[Any], states: Sequence[MeanState], step: int = 4
) -> list[Key]:
    """Return a key for every bucket that a step's mean rounds; the key's ``bucket`` is the bucket's number."""
    seen: list[Key] = []

    def source(key: Key, block: Block) -> int:
        first = key.bucket + block.first_bucket
        seen.extend(key._replace(bucket=first + row) for row in range(block.rows))
        return 0

    with replace_draws(source):
        average(mean, values, states, Key(seed=9, step=step, tensor=2))
    return seen
