"""The laws of an optimizer's settings, each a function that raises AssertionError if a case breaks it."""

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from qcomp.core.checkpoint.format import DIGESTS, MAKER
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.numeric.random import Key, replace_draws
from qcomp.core.optimizers.groups import Group
from qcomp.testing.jobs import (
    NAMES,
    SHAPES,
    STEPS,
    OptimizerCase,
    Ranks,
    Vector,
    bytes_of,
    difference,
    gradients,
)
from qcomp.testing.libraries import to_numpy
from qcomp.testing.one_thread import lockstep

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
    """With a schedule that is 0 until step k, no parameters move before step k, and step k moves them as usual.

    A step that is skipped is not completed.
    """
    steady = _steady(case)
    rate: Any = steady.optimizer.learning_rate
    for k, nonfinite in ((0, "raise"), (1, "raise"), (5, "raise"), (2, "skip")):
        late = steady.having(learning_rate=partial(_from, k, rate), nonfinite=nonfinite)
        if late is None:
            continue
        job = late.start(2)
        bad = [late.arrays([x * np.float32(np.nan) for x in gradients(rank, 0)]) for rank in range(2)]
        if nonfinite == "skip" and not case.optimizer.apart(job.states[0].stage) and job.exchanges(bad):
            job.take(job.stages(bad))
        for step in range(k + 1):
            before = _params(job)
            job.step(step)
            moves = step == k and _params(steady.whole_run[k]) != _params(steady.whole_run[k + 1])
            assert (_params(job) != before) == moves, (
                f"with a schedule that is 0 until step {k}, step {step} {'moves no' if moves else 'moves'} parameters, "
                f"after {job.states[0].skipped} skipped steps"
            )


def groups_select_by_name(case: OptimizerCase) -> None:
    """A group's rate and decay have the same effects as the optimizer's; a factor of 0 leaves tensors unchanged."""
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
            f"the {what} of a group and the optimizer's {what} differ in their effect: after {step + 1} steps, the "
            f"same numbers for {differing!r} in both ways give other parameters"
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


def switches_act(case: OptimizerCase) -> None:
    """A boolean setting of qcomp's optimizers, such as ``nesterov``, changes the parameters, or is refused."""
    decayed = case.having(weight_decay=0.5) or case
    bases = [base for base in type(case.optimizer).__mro__ if base.__module__.startswith("qcomp.")]
    names = {field.name for base in bases if is_dataclass(base) for field in fields(base)}
    for name in sorted(names):
        value = getattr(case.optimizer, name)
        other = decayed.having(**{name: not value}) if isinstance(value, bool) else None
        assert other is None or _first_difference(decayed, other)[1] is not None, (
            f"{name}={not value} changes nothing; raise ValueError for settings that apply does not obey"
        )


def weight_decay_shrinks(case: OptimizerCase) -> None:
    """Weight decay makes positive parameters smaller.

    Tensors of one element are not checked, since LAMB uses only the sign of their update.
    """
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
    """Return gradients with norm 7 * 128 on rank 0, 128 on rank 1; as (49 + 1) / 2 = 5^2, both make `_NORM`."""
    rng = np.random.default_rng([12, rank])
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    values = np.ones(sum(sizes), np.float32)
    values[0], values[1:1401] = 3, 2  # the squares add up to 128**2
    values = rng.permuted(values) * rng.choice(np.asarray([-1, 1], np.float32), values.shape)
    parts = np.split(values * np.float32(1 if rank else 7), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def gradients_are_averaged(case: OptimizerCase) -> None:
    """With lossless compression, three or four ranks begin with the same step as one rank with their mean gradient."""
    exact = _without_loss(case)
    if exact is None:
        return
    for size in (3, 4):
        several, alone = exact.start(size), exact.start(1)
        if exact.optimizer.apart(several.states[0].stage):
            return
        grads = several.grads(0)
        several.take(several.stages(grads))
        of_tensors = zip(*(map(to_numpy, of_rank) for of_rank in grads), strict=True)
        alone.take(alone.stages([exact.arrays([np.asarray(np.mean(each, axis=0)) for each in of_tensors])]))
        for name, p, one, other in zip(
            NAMES, exact.start(1).params[0], alone.params[0], several.params[0], strict=True
        ):
            moved, distance = to_numpy(one) - to_numpy(p), to_numpy(other) - to_numpy(one)
            assert np.linalg.norm(distance) <= 1e-3 * np.linalg.norm(moved), (
                f"the first step of {size} ranks without compression moves {name!r} otherwise than the first step of "
                "one rank with the mean of their gradients"
            )


def long_tensors_move_to_the_end(case: OptimizerCase) -> None:
    """With lossless compression, all of 70,003 parameters with the same gradient fall, including the last ones."""
    exact = _without_loss(_steady(case))
    if exact is None:
        return
    ranks = range(2)
    (first,) = exact.arrays([np.ones(70_003, np.float32)])
    stages = [
        exact.optimizer.init_stages([first], rank=rank, size=2, host="one", names=NAMES[:1]) for rank in ranks
    ]
    job = Ranks(exact, [[first], [first]], lockstep(stages))
    for _ in range(3):
        job.take(job.stages([exact.arrays([np.full(70_003, 1 + rank, np.float32)]) for rank in ranks]))
    still = np.flatnonzero(to_numpy(job.params[0][0]) >= 1)
    assert still.size in (0, 70_003), (
        f"with positive gradients, {still.size} of 70,003 parameters do not fall, such as number {still[0]}"
    )


def equal_ranks_move_as_one(case: OptimizerCase) -> None:
    """With lossless compression, two ranks with the same gradients move like one rank alone, even with decay."""
    for each in (case, case.having(weight_decay=0.5)):
        exact = None if each is None else _without_loss(each)
        if exact is not None:
            _require_moves_as_one(exact)


def _require_moves_as_one(exact: OptimizerCase) -> None:
    """Raise AssertionError unless two ranks with the same gradients move like one."""
    alone, two = exact.start(1), exact.start(2)
    for step in range(STEPS):
        alone.step(step)
        (grads,) = alone.grads(step)
        two.take(two.stages([grads, grads]))
        for name, one, other in zip(NAMES, _params(alone), _params(two), strict=True):
            assert one == other, (
                f"after {step + 1} steps without compression, {name!r} of two ranks with the same gradients is not "
                "the steps of a single rank; average over the ranks"
            )


def nothing_is_lost(case: OptimizerCase) -> None:
    """If the optimizer is SGD, its moves plus what its residuals owe add up to the mean gradients."""
    known = {field.name for field in fields(case.optimizer)}
    plain = case.having(**{name: value for name, value in _PLAIN.items() if name in known})
    exact = None if plain is None else _without_loss(plain)
    if plain is None or exact is None or not plain.optimizer.mean.feedback:
        return
    if plain.optimizer.mean.kinds != CompressedMean.kinds or _lost(exact, 2) is not None:
        return  # residuals of another kind, or other moves than SGD's
    found = _lost(plain, STEPS)
    assert found is None, f"with a rate of 1 and without momentum, {found}; keep the residuals of the mean"


_PLAIN: dict[str, Any] = {
    "learning_rate": 1.0,
    "momentum": 0.0,
    "nesterov": False,
    "weight_decay": 0.0,
    "clip_norm": None,
    "groups": (),
}
"""Settings in which SGD moves by the mean gradients."""


def _lost(case: OptimizerCase, steps: int) -> str | None:
    """Describe the first tensor whose moves plus residuals are not the mean gradients; None if there is none.

    For the tolerance: a step rounds an element fewer than 100 times, each time by half an ulp, at values of at most a
    few times the largest magnitude.
    """
    job = case.start(2)
    left = [to_numpy(p).astype(np.float64) for p in job.params[0]]
    largest = 0.0
    for step in range(steps):
        job.step(step)
        left = [
            x - sum(g.astype(np.float64) for g in each) / 2
            for x, *each in zip(left, *(gradients(rank, step) for rank in range(2)), strict=True)
        ]
        unpaid, due = iter(job.owed()), [np.zeros(x.shape) for x in left]
        for i, is_exact in enumerate(job.states[0].exact):
            due[i] = due[i] if is_exact else next(unpaid)
        largest = max([largest, *(float(np.abs(x).max(initial=0)) for x in (*left, *due))])
        for name, p, x, owed in zip(NAMES, job.params[0], left, due, strict=True):
            off = np.abs(to_numpy(p) - x - owed).max(initial=0)
            if off > 2.0**-14 * largest:
                return (
                    f"the moves of {name!r} in {step + 1} steps and what is owed are not the mean gradients, "
                    f"off by {off:.3g}"
                )
    return None


def draws_have_keys_of_their_own(case: OptimizerCase) -> None:
    """No two buckets are rounded with the same draws, whatever their steps, tensors and ranks; the seed changes all."""
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
            assert key.seed == seed, f"with seed={seed}, a bucket is rounded with the random draws of {own}"
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
    """Return the case without groups, and with its schedule's largest rate in every step."""
    rate: Any = case.optimizer.learning_rate
    largest = max(map(rate, range(STEPS))) if callable(rate) else rate
    return OptimizerCase(replace(case.optimizer, learning_rate=largest, groups=()), case.xp)


def _without_loss(case: OptimizerCase) -> OptimizerCase | None:
    """Return the case with lossless compressors; None if the optimizer compresses in its own way."""
    settings = {field.name: getattr(case.optimizer, field.name) for field in fields(case.optimizer)}
    lossless: dict[str, Any] = {
        n: Identity() for n, value in settings.items() if isinstance(value, Compressor)
    }
    if "compressors" in settings:
        lossless["compressors"] = None
    return case.having(**lossless) if lossless or all(case.start(1).states[0].exact) else None


def _params(job: Ranks) -> list[bytes]:
    return list(map(bytes_of, job.params[0]))


def _first_difference(one: OptimizerCase | None, other: OptimizerCase | None) -> tuple[int, str | None]:
    """Return the first step after which the parameters of two cases differ, and the first parameter that differs."""
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
