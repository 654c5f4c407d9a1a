"""The laws of an optimizer's settings, each a function that raises AssertionError if a case breaks it."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from qcomp.core.checkpoint.format import DIGESTS, MAKER
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.numeric.random import Key, replace_draws
from qcomp.core.optimizers.groups import Group
from qcomp.testing.jobs import (
    NAMES,
    SHAPES,
    STEPS,
    Job,
    OptimizerCase,
    Vector,
    bytes_of,
    difference,
)
from qcomp.testing.libraries import to_numpy

__all__ = [
    "clipping_scales_gradients",
    "draws_have_keys_of_their_own",
    "equal_ranks_move_as_one",
    "gradients_are_averaged",
    "groups_select_by_name",
    "rates_scale_the_step",
    "schedules_count_completed_steps",
    "weight_decay_shrinks",
]

_NORM = 640.0
"""The global norm of the gradients of `_of_known_norm`."""


def rates_scale_the_step(case: OptimizerCase) -> None:
    """A rate of 0 moves nothing, and a constant schedule has the same effect as its number."""
    still = OptimizerCase(replace(case.optimizer, learning_rate=0.0), case.xp)
    job = still.start(1)
    first = _params(job)
    for step in range(STEPS):
        job.step(step)
        assert _params(job) == first, f"with a rate of 0, step {step} moves parameters"
    rate = case.optimizer.learning_rate
    if callable(rate):
        return
    job = OptimizerCase(replace(case.optimizer, learning_rate=lambda _: rate), case.xp).start(2)
    for step, expected in enumerate(case.whole_run[1:]):
        job.step(step)
        same = [list(map(bytes_of, p)) for p in job.params] == [
            list(map(bytes_of, p)) for p in expected.params
        ]
        assert same, f"with a schedule that always returns {rate}, step {step} differs"


def schedules_count_completed_steps(case: OptimizerCase) -> None:
    """With a schedule that is 0 until step k, nothing moves before step k, and step k moves what it always moves."""
    steady = _steady(case)
    rate: Any = steady.optimizer.learning_rate
    for k in (0, 1, 5):
        late = partial(_from, k, rate)
        job = OptimizerCase(replace(steady.optimizer, learning_rate=late), case.xp).start(2)
        for step in range(k + 1):
            before = _params(job)
            job.step(step)
            moves = step == k and _params(steady.whole_run[k]) != _params(steady.whole_run[k + 1])
            assert (_params(job) != before) == moves, (
                f"with a schedule that is 0 until step {k}, step {step} {'moves no' if moves else 'moves'} parameters"
            )


def groups_select_by_name(case: OptimizerCase) -> None:
    """Rates and decays of groups have the effects of the optimizer's own; a factor of 0 keeps tensors unchanged."""
    case = _steady(case)
    rate: Any = case.optimizer.learning_rate
    others = tuple(name for name in NAMES if not name.startswith("layer."))
    pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "learning_rate_factor": (
            {"groups": (Group("layer.*", 0.5),)},
            {"groups": (Group(others, 2.0),), "learning_rate": rate / 2},
        ),
        "weight_decay": (
            {"groups": (Group("layer.*", weight_decay=0.25),), "weight_decay": 0.5},
            {"groups": (Group(others, weight_decay=0.5),), "weight_decay": 0.25},
        ),
    }
    for what, (one, other) in pairs.items():
        step, differing = _first_difference(case.having(**one), case.having(**other))
        assert differing is None, (
            f"the {what} of a group and that of the optimizer differ in their effect: after {step + 1} steps, the same "
            f"numbers for {differing!r} in both ways give other parameters"
        )
    resting = case.having(groups=(Group("layer.*", 0.0),))
    if resting is None:
        return
    job = resting.start(1)
    first = _params(job)
    for step in range(STEPS):
        job.step(step)
    for name, shape, before, after in zip(NAMES, SHAPES, first, _params(job), strict=True):
        rests = name.startswith("layer.") or 0 in shape
        assert (before == after) == rests, (
            f"with a group for 'layer.*' of learning_rate_factor 0, {name!r} {'moves' if rests else 'does not move'}"
        )


def weight_decay_shrinks(case: OptimizerCase) -> None:
    """Weight decay makes positive parameters smaller than without it; not single ones, of which LAMB sees the signs."""
    case = _steady(case)
    plain, decayed = case.having(weight_decay=0.0), case.having(weight_decay=0.5)
    if plain is None or decayed is None:
        return
    one, other = plain.start(2), decayed.start(2)
    for step in range(3):
        one.step(step)
        other.step(step)
    for name, without, after in zip(NAMES, one.params[0], other.params[0], strict=True):
        assert to_numpy(after).size <= 1 or to_numpy(after).sum() < to_numpy(without).sum(), (
            f"with a weight decay of 0.5, {name!r} does not become smaller than without"
        )


def clipping_scales_gradients(case: OptimizerCase) -> None:
    """Clipping to half the global norm halves all gradients, and clipping to twice the norm changes nothing."""
    plain, drawn = case.having(clip_norm=None), [_of_known_norm(rank) for rank in range(2)]
    for clip_norm, factor in ((_NORM / 2, 0.5), (2 * _NORM, 1.0)):
        clipped = case.having(clip_norm=clip_norm)
        if plain is None or clipped is None:
            return
        jobs = clipped.start(2), plain.start(2)
        for step in range(STEPS):
            if not jobs[1].exchanges([case.arrays(grads) for grads in drawn]):
                break  # a step that sends nothing: each rank clips by its own norm
            for job, scale in zip(jobs, (1.0, factor), strict=True):
                job.take(job.stages([case.arrays([g * np.float32(scale) for g in grads]) for grads in drawn]))
            for rank, held in enumerate(zip(*(job.held() for job in jobs), strict=True)):
                key = difference(*({k: v for k, v in h.items() if k not in (DIGESTS, MAKER)} for h in held))
                assert key is None, (
                    f"clip_norm={clip_norm} with gradients of norm {_NORM} should scale them by {factor}: after "
                    f"{step + 1} steps, {key!r} of rank {rank} differs"
                )


def _of_known_norm(rank: int) -> list[Vector]:
    """Return gradients of rank 0 or 1, of norms 7 * 128 and 128: as 49 + 1 = 2 * 25, both have the norm `_NORM`."""
    rng = np.random.default_rng([12, rank])
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    values = np.ones(sum(sizes), np.float32)
    values[0], values[1:1401] = 3, 2  # the squares add up to 128**2
    values = rng.permuted(values) * rng.choice(np.asarray([-1, 1], np.float32), values.shape)
    parts = np.split(values * np.float32(1 if rank else 7), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def gradients_are_averaged(case: OptimizerCase) -> None:
    """Without a loss by compression, two ranks begin with the step of one rank with the mean of their gradients."""
    exact = _without_loss(case)
    if exact is None:
        return
    two, alone = exact.start(2), exact.start(1)
    if exact.optimizer.apart(two.states[0].stage):
        return
    grads = two.grads(0)
    two.take(two.stages(grads))
    pairs = zip(*(map(to_numpy, of_rank) for of_rank in grads), strict=True)
    alone.take(alone.stages([exact.arrays([((g + h) / 2).astype(g.dtype) for g, h in pairs])]))
    for name, p, one, other in zip(
        NAMES, exact.start(1).params[0], alone.params[0], two.params[0], strict=True
    ):
        moved, distance = to_numpy(one) - to_numpy(p), to_numpy(other) - to_numpy(one)
        assert np.linalg.norm(distance) <= 1e-3 * np.linalg.norm(moved), (
            f"the first step of two ranks without compression moves {name!r} otherwise than that of one rank with the "
            "mean of their gradients"
        )


def equal_ranks_move_as_one(case: OptimizerCase) -> None:
    """Without a loss by compression, two ranks with the same gradients move like one rank alone."""
    exact = _without_loss(case)
    if exact is None:
        return
    alone, two = exact.start(1), exact.start(2)
    for step in range(STEPS):
        alone.step(step)
        (grads,) = alone.grads(step)
        two.take(two.stages([grads, grads]))
        for name, one, other in zip(NAMES, _params(alone), _params(two), strict=True):
            assert one == other, (
                f"after {step + 1} steps without compression, {name!r} of two ranks with the same gradients is not "
                "that of one rank alone; average over the ranks"
            )


def draws_have_keys_of_their_own(case: OptimizerCase) -> None:
    """No two buckets are rounded with the same draws, whatever their steps, tensors and ranks; the seed selects all."""
    seed = case.optimizer.seed or 1
    seeded = case.having(seed=seed)
    if seeded is None:
        return
    seen: set[Key] = set()

    def source(key: Key, block: Any) -> int:
        first = key.bucket + block.first_bucket
        for bucket in range(first, first + block.rows):
            own = key._replace(bucket=bucket)
            if own._replace(bucket=0) == Key():
                continue  # sizes of payloads are found with this key
            assert key.seed == seed, f"with seed={seed}, a bucket is rounded with the draws of {own}"
            assert own not in seen, (
                f"two buckets are rounded with the draws of {own}; use the key of the step"
            )
            seen.add(own)
        return 0

    job = seeded.start(2)
    with replace_draws(source):
        for step in range(STEPS):
            job.step(step)


def _from(k: int, rate: float, step: int) -> float:
    return rate if step >= k else 0.0


def _steady(case: OptimizerCase) -> OptimizerCase:
    """Return the case with the largest rate of its schedule in every step, and without groups."""
    rate: Any = case.optimizer.learning_rate
    largest = max(map(rate, range(STEPS))) if callable(rate) else rate
    return OptimizerCase(replace(case.optimizer, learning_rate=largest, groups=()), case.xp)


def _without_loss(case: OptimizerCase) -> OptimizerCase | None:
    """Return the case with compressors that lose nothing; None if the optimizer compresses in a way of its own."""
    settings = {field.name: getattr(case.optimizer, field.name) for field in fields(case.optimizer)}
    lossless: dict[str, Any] = {
        n: Identity() for n, value in settings.items() if isinstance(value, Compressor)
    }
    if "compressors" in settings:
        lossless["compressors"] = None
    return case.having(**lossless) if lossless or all(case.start(1).states[0].exact) else None


def _params(job: Job) -> list[bytes]:
    return list(map(bytes_of, job.params[0]))


def _first_difference(one: OptimizerCase | None, other: OptimizerCase | None) -> tuple[int, str | None]:
    """Return the first step after which two cases have other parameters, and the first of these."""
    if one is None or other is None:
        return 0, None
    jobs = one.start(2), other.start(2)
    for step in range(STEPS):
        for job in jobs:
            job.step(step)
        for name, a, b in zip(NAMES, *map(_params, jobs), strict=True):
            if a != b:
                return step, name
    return STEPS, None
