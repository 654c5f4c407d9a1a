"""What tests of compressed means share: values, first states, one mean of all ranks, and what is owed."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import qcomp
from qcomp import CompressedMean, Key
from qcomp.core.mean.codec import Codec
from qcomp.core.mean.topologies.registry import topology
from qcomp.core.numeric.random import replace_draws

SHAPES = [(3, 11), (0,), (), (70,), (2, 0, 4)]
"""Odd sizes, a scalar, and tensors with nothing in them: 3, 0, 1, 5 and 0 buckets of 16."""
SPECS = ["sign:bucket_size=16", "qsgd:levels=7,bucket_size=16", "minmax:bucket_size=16", "cast", "identity"]
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


def inputs(
    rank: int, step: int, dtype: Any = np.float32, shapes: Sequence[tuple] = SHAPES
) -> list[np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def start(mean: CompressedMean, tensors: Any, world: int | Sequence[int]) -> list[Any]:
    """The first state of every rank of a world: so many ranks, or the node of each."""
    nodes = () if isinstance(world, int) else tuple(world)
    size = len(nodes) or world
    return [mean.zeros(tensors, rank=rank, size=size, nodes=nodes) for rank in range(size)]


class Outcome(NamedTuple):
    means: Any
    states: list[Any]


def average(
    lockstep: Callable,
    mean: CompressedMean,
    values: Sequence,
    states: Sequence,
    key: Key | None = None,
    **options: Any,
) -> Outcome:
    """Average the values of all ranks once; all ranks must hold the same mean bit for bit."""
    results = lockstep([mean.stages(x, s, key=key, **options) for x, s in zip(values, states, strict=True)])
    assert len({bits(means) for means, _ in results}) == 1
    return Outcome(results[0][0], [state for _, state in results])


def refused(lockstep: Callable, mean: CompressedMean, values: Sequence, states: Sequence, **options) -> list:
    """The error that each rank raises, all in the same stage."""
    running = [mean.stages(x, s, **options) for x, s in zip(values, states, strict=True)]
    errors = lockstep(running, catch=qcomp.NonFiniteError)
    assert all(isinstance(error, qcomp.NonFiniteError) for error in errors)
    return errors


def bits(arrays: Any) -> bytes:
    return b"|".join(np.asarray(a).tobytes() for a in (arrays if isinstance(arrays, list) else [arrays]))


def held_by(state: Any) -> bytes:
    return b"|".join(np.asarray(r).tobytes() for r in (*state.worker, *state.server))


def owed(mean: CompressedMean, states: Sequence, tensors: Sequence) -> list[np.ndarray]:
    """mean_i e_i + e_s of every element, from the residuals of all ranks; i counts nodes where these share one."""
    whole = [np.zeros(math.prod(t.shape)) for t in tensors]
    by_node = topology(mean.topology).wants_nodes
    for state in states:
        if not state.shapes:
            continue
        workers = len(set(state.nodes)) if by_node and state.nodes else len(states)
        ranges = mean.layout(state.shapes, rank=state.rank, size=state.size, nodes=state.nodes).residuals
        for weight, of_kind, residuals in zip(
            (workers, 1), ranges, (state.worker, state.server), strict=True
        ):
            for part, residual in zip(of_kind, residuals, strict=True):
                whole[part.tensor][part.start : part.stop] += residual / weight
    return [kept.reshape(t.shape) for kept, t in zip(whole, tensors, strict=True)]


def check_sum_identity(
    lockstep: Callable,
    mean: CompressedMean,
    world: int | Sequence[int],
    *,
    shapes: Sequence[tuple] = SHAPES,
    owes: Callable = owed,
) -> None:
    """The sum of the means is the sum of the exact means less mean_i e_i + e_s; after every step."""
    tensors = inputs(0, 0, np.float64, shapes)
    states = start(mean, tensors, world)
    sums, exact = ([np.zeros(t.shape) for t in tensors] for _ in range(2))
    magnitude = 0.0
    for step in range(6):
        values = [inputs(rank, step, np.float64, shapes) for rank in range(len(states))]
        means, states = average(lockstep, mean, values, states, Key(step=step))
        kept = owes(mean, states, tensors)
        for i, m in enumerate(means):
            sums[i] += m
            exact[i] += sum(v[i] for v in values) / len(states)
            magnitude = max([magnitude, *np.abs(exact[i]).flat, *np.abs(kept[i]).flat])
            assert np.abs(sums[i] - (exact[i] - kept[i])).max(initial=0) <= 1e-12 * magnitude
    assert magnitude > 1
    if states[0].shapes:
        assert max(np.abs(k).max(initial=0) for k in kept) > 1e-3


def draws_of(lockstep: Callable, mean: CompressedMean, values: Sequence, states: Sequence) -> list[Key]:
    """The key of every bucket that is rounded in one mean, with its number."""
    seen = []

    def source(key, block):
        first = key.bucket + block.first_bucket
        seen.extend(key._replace(bucket=first + row) for row in range(block.rows))
        return 0

    with replace_draws(source):
        average(lockstep, mean, values, states, Key(seed=9, step=4, tensor=2))
    return seen


def forget_residuals(monkeypatch: Any, forgets: Callable[[Key], bool] = lambda _: True) -> set[int]:
    """Break feedback: drop the residuals where a key says so. Return the hops that had any, as they come."""
    hops: set[int] = set()

    def broken(encode):
        def forgetful(self, *arguments, **options):
            *values, residuals, key = arguments
            if len(residuals):
                hops.add(key.hop)
            if forgets(key):
                residuals = tuple(0 * r for r in residuals)
            return encode(self, *values, residuals, key, **options)

        return forgetful

    for name in ("encode", "encode_average"):
        monkeypatch.setattr(Codec, name, broken(getattr(Codec, name)))
    return hops
