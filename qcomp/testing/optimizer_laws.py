"""The laws of an optimizer's steps and states, each a function that raises AssertionError if a case breaks it."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np

from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.core.checkpoint.format import DIGESTS
from qcomp.core.errors import MismatchError, NonFiniteError
from qcomp.core.numeric.arrays import is_mutable
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.state import OptimizerState
from qcomp.testing.environments import in_another_process
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
    require_same,
    resumed,
)
from qcomp.testing.libraries import to_numpy
from qcomp.testing.one_thread import lockstep

_SECONDS = 60.0
"""Seconds within which ranks in threads must end; a law takes a second or two."""


def ranks_agree(case: OptimizerCase) -> None:
    """After each step all ranks hold the same, except for residuals and what `own_kinds` and `apart` declare."""
    for size in (1, 2, 3, 4):
        job = case.start(size)
        for step in range(STEPS):
            assert [s.step for s in job.states] == [step] * size, (
                f"after {step} steps, states count another number of steps"
            )
            places = [(s.rank, s.size) for s in job.states]
            assert places == [(rank, size) for rank in range(size)], f"states have the places {places}"
            job.step(step)
            first, *others = job.held()
            stages = {s.stage for s in job.states}
            assert len(stages) == 1, f"after {step + 1} steps the ranks are in stages {sorted(stages)}"
            stage = job.states[0].stage
            own = {"rank", DIGESTS, *case.optimizer.own_kinds(stage), *case.optimizer.mean.kinds}
            own |= {"parameter"} if case.optimizer.apart(stage) else set()
            for rank, held in enumerate(others, start=1):
                shared = [
                    {k: v for k, v in one.items() if k.partition(".")[0].partition(" ")[0] not in own}
                    for one in (first, held)
                ]
                key = difference(*shared)
                assert key is None, (
                    f"after {step + 1} steps in stage {stage!r}, {key!r} differs on rank {rank}"
                )


def compresses_soon(case: OptimizerCase) -> None:
    """An optimizer with an averaging compresses something soon; otherwise the other laws would not test compression."""
    if not hasattr(case.optimizer, "averaging"):
        return
    states = [job.states[0] for job in case.whole_run]
    assert not all(all(state.exact) for state in states), (
        f"all tensors stay exact, of {SHAPES[0][0] * SHAPES[0][1]} elements and fewer; check it with another policy, "
        "such as exact=qcomp.ExactBelow(100)"
    )
    assert any(state.stage != "warmup" for state in states), (
        f"it is still in its warm-up after {STEPS} steps; check it with another setting, such as freeze=5"
    )


def shapes_and_dtypes(case: OptimizerCase) -> None:
    """New parameters have the shapes and dtypes of old ones; an array stays an array, a list stays a list."""
    for dtype in ("float32", "float64", "float16"):
        if getattr(case.xp, dtype, None) is None:
            continue
        job = case.start(1, dtype)
        if str(to_numpy(job.params[0][0]).dtype) != dtype:  # JAX may have no 64-bit numbers
            continue
        for step in range(3):
            job.step(step)
        found = [(tuple(p.shape), str(to_numpy(p).dtype)) for p in job.params[0]]
        expected = [(shape, dtype) for shape in SHAPES]
        assert found == expected, f"parameters of {dtype} become {found}; expected {expected}"
    comm = LocalCommunicator.alone()
    (x,) = case.arrays([np.ones(7, np.float32)])
    for given, kind in ((x, type(x)), ([x], list), ((x,), list)):
        state = case.optimizer.init(given, comm)
        params, _ = case.optimizer.step(given, given, state, comm)
        assert isinstance(params, kind), (
            f"parameters in a {type(given).__name__} become a {type(params).__name__}"
        )


def against_the_gradient(case: OptimizerCase) -> None:
    """If all gradients are positive on all ranks, parameters fall."""
    job = case.start(2)
    ones = [case.arrays([np.ones(shape, np.float32) for shape in SHAPES]) for _ in range(2)]
    for _ in range(3):
        job.take(job.stages(ones))
    for name, p in zip(NAMES, job.params[0], strict=True):
        values = to_numpy(p)
        assert not values.size or values.sum() < values.size, (
            f"with positive gradients, {name!r} does not fall"
        )


def only_results_are_new(case: OptimizerCase) -> None:
    """A step does not write to the parameters, gradients and state that it is given."""
    for job in case.whole_run[:-1]:
        step = job.states[0].step
        before, grads = job.held(), job.grads(step)
        job.copy().take(job.stages(grads))
        for rank, (one, other) in enumerate(zip(before, job.held(), strict=True)):
            key = difference(one, other)
            assert key is None, f"step {step} writes to {key!r} of rank {rank}"
        _require_drawn(grads, job, step)


def _require_drawn(grads: Sequence[Any], job: Ranks, step: int) -> None:
    """Raise AssertionError unless gradients still equal those that a job draws for a step."""
    for given, drawn in zip(grads, job.grads(step), strict=True):
        same = list(map(bytes_of, given)) == list(map(bytes_of, drawn))
        assert same, f"step {step} writes to gradients"


def keeps_no_gradients(case: OptimizerCase) -> None:
    """The results of a step do not change if the gradients are overwritten later, as frameworks do."""
    for size in (1, 2):
        job = case.start(size)
        for step in range(STEPS):
            grads = job.grads(step)
            job.take(job.stages(grads))
            held = job.held()
            for x in chain.from_iterable(grads):
                if is_mutable(x):
                    x[...] = 7.0
            for rank, (one, other) in enumerate(zip(held, job.held(), strict=True)):
                key = difference(one, other)
                assert key is None, (
                    f"overwriting the gradients after step {step} changes {key!r} of rank {rank} of {size}: copy them"
                )


def same_again(case: OptimizerCase) -> None:
    """Another run, with an equal optimizer, gives the same results."""
    again = OptimizerCase(replace(case.optimizer), case.xp).start(2)
    for step, expected in enumerate(case.whole_run):
        require_same(again, expected, f"after {step} steps of another run")
        if step < STEPS:
            again.step(step)


def donation_changes_nothing(case: OptimizerCase) -> None:
    """Steps that may overwrite the old parameters and moments give the same results, and leave gradients alone."""
    job = case.start(2)
    for step, expected in enumerate(case.whole_run[1:]):
        grads = job.grads(step)
        job.take(job.stages(grads, donate=True))
        require_same(job, expected, f"after {step + 1} steps with donate=True")
        _require_drawn(grads, job, step)


def saved_after_any_step(case: OptimizerCase) -> None:
    """A job that is saved after any step and loaded goes on as if it had never stopped."""
    for stop, saved in enumerate(case.whole_run[:-1]):
        dicts = [_through_a_file(case.optimizer.state_dict(state)) for state in saved.states]
        stages = [
            case.optimizer.load_stages(own, p, rank=rank, size=2, host="one", names=NAMES)
            for rank, (own, p) in enumerate(zip(dicts, saved.params, strict=True))
        ]
        job = Ranks(case, list(saved.params), lockstep(stages))
        require_same(job, saved, f"saved after {stop} steps and loaded")
        for step in range(stop, min(stop + 2, STEPS)):
            job.step(step)
            require_same(job, case.whole_run[step + 1], f"saved after {stop} steps, after {step + 1}")


def goes_on_in_another_process(case: OptimizerCase) -> None:
    """A saved job goes on with the same results in a new process with another hash seed, date, host and environment."""
    on_numpy = OptimizerCase(case.optimizer, np)
    for saved in (case.whole_run[0], case.whole_run[STEPS // 2]):
        dicts = [_through_a_file(case.optimizer.state_dict(state)) for state in saved.states]
        params = [[to_numpy(p) for p in of_rank] for of_rank in saved.params]
        found = in_another_process(case.optimizer, "qcomp.testing.jobs:resumed", (dicts, params, 3))
        expected = resumed(on_numpy.optimizer, (dicts, params, 3))
        for rank, (one, other) in enumerate(zip(found or expected, expected, strict=True)):
            key = difference(one, other)
            where = f"saved after {saved.states[0].step} steps, and going on in another process"
            assert key is None, f"{where}, {key!r} of rank {rank} differs"


def counts_are_kept(case: OptimizerCase) -> None:
    """Large counts of completed and skipped steps continue, and are saved and loaded, correctly."""
    last = case.whole_run[-1]
    for step, skipped in ((255, 3), (65_535, 300), (2**31 - 1, 1), (2**32, 70_000)):
        states = [s._replace(step=step, skipped=skipped) for s in last.states]
        job = Ranks(case, list(last.params), states)
        dicts = [_through_a_file(case.optimizer.state_dict(state)) for state in states]
        loaded = lockstep(
            [
                case.optimizer.load_stages(own, p, rank=rank, size=2, host="one", names=NAMES)
                for rank, (own, p) in enumerate(zip(dicts, last.params, strict=True))
            ]
        )
        found = [(s.step, s.skipped) for s in loaded]
        assert found == [(step, skipped)] * 2, (
            f"states of {step} completed and {skipped} skipped steps load as {found}"
        )
        job.step(STEPS)
        found = [(s.step, s.skipped) for s in job.states]
        assert found == [(step + 1, skipped)] * 2, (
            f"a step after {step} completed and {skipped} skipped ones counts {found}"
        )


def _through_a_file(saved: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    arrays: dict[str, Any] = {k: to_numpy(v) if hasattr(v, "shape") else v for k, v in saved.items()}
    np.savez(file, **arrays)
    archive = np.load(io.BytesIO(file.getvalue()), allow_pickle=False)
    return {key: archive[key] for key in archive}


def refusals_are_shared(case: OptimizerCase) -> None:
    """A non-finite gradient on one rank stops all ranks in the same stage, and changes nothing, even if donated."""
    raising = OptimizerCase(replace(case.optimizer, nonfinite="raise"), case.xp)
    skipping = case.having(nonfinite="skip")
    for job in case.whole_run[:-1]:
        stage, step = job.states[0].stage, job.states[0].step
        after = case.whole_run[step + 1].states[0].stage
        alone = case.optimizer.apart(stage) or case.optimizer.apart(after)
        if alone or not job.exchanges(job.grads(step)):
            continue  # no rank can tell the others
        before = job.held()
        for tensor, bad in ((0, np.nan), (1, np.inf), (2, -np.inf)):
            drawn = [gradients(rank, step) for rank in range(2)]
            drawn[1][tensor].flat[3] = bad
            grads = [case.arrays(x) for x in drawn]
            where = f"{bad} in {NAMES[tensor]!r} on rank 1 after {step} steps"
            raised = Ranks(raising, list(job.params), list(job.states))
            stopped = raised.stages(grads, donate=tensor % 2 == step % 2)
            for rank, error in enumerate(lockstep(stopped, catch=NonFiniteError)):
                assert isinstance(error, NonFiniteError), (
                    f"{where}: rank {rank} makes its step without an error"
                )
            key = next(filter(None, map(difference, before, job.held())), None)
            assert key is None, f"{where}: {key!r} has changed"
            if skipping is None:
                continue
            skipped = Ranks(skipping, list(job.params), list(job.states))
            skipped.take(skipped.stages(grads))
            counts = [s.skipped for s in skipped.states]
            assert counts == [1, 1], f"{where}, with nonfinite='skip': states count {counts} skipped steps"
            unmoved = Ranks(case, skipped.params, [s._replace(skipped=0) for s in skipped.states])
            require_same(unmoved, job, f"{where}, with nonfinite='skip'")


def starts_alike(case: OptimizerCase) -> None:
    """If ranks differ in parameters, shapes, names, seeds or rates, all of them raise MismatchError."""
    first = [np.ones(shape, np.float32) for shape in SHAPES]
    optimizer, other = case.optimizer, [x + np.float32(1) for x in first]
    rate = optimizer.learning_rate
    faster = (lambda step: 2 * rate(step)) if callable(rate) else 2 * rate + 1
    starts: dict[str, tuple[Optimizer, list[Vector], Sequence[str]]] = {
        "parameters": (optimizer, other, NAMES),
        "shapes": (optimizer, [x.reshape(-1) for x in first], NAMES),
        "names": (optimizer, first, NAMES[::-1]),
        "seed": (replace(optimizer, seed=optimizer.seed + 1), first, NAMES),
        "learning rate": (replace(optimizer, learning_rate=faster), first, NAMES),
    }
    for what, odd in starts.items():
        each = [(optimizer, first, NAMES), odd, (optimizer, first, NAMES)]
        stages = [
            o.init_stages(case.arrays(p), rank=rank, size=3, host="one", names=names)
            for rank, (o, p, names) in enumerate(each)
        ]
        for rank, error in enumerate(lockstep(stages, catch=MismatchError)):
            assert isinstance(error, MismatchError), f"rank {rank} starts though rank 1 has another {what}"


def over_a_communicator(case: OptimizerCase) -> None:
    """`init` and `step` return the same as `init_stages` and `stages`."""
    expected, size = case.whole_run[4], 2
    first = [np.ones(shape, np.float32) for shape in SHAPES]

    def rank_main(comm: LocalCommunicator) -> tuple[list[Any], OptimizerState]:
        params = case.arrays(first)
        state = case.optimizer.init(params, comm, NAMES)
        for step in range(4):
            grads = case.arrays(gradients(comm.rank, step))
            params, state = case.optimizer.step(params, grads, state, comm)
        return params, state

    results = run_local(size, rank_main, timeout=_SECONDS, hosts=["one"] * size)
    found = Ranks(case, [params for params, _ in results], [state for _, state in results])
    require_same(found, expected, "after 4 steps over a communicator")


def keeps_new_residuals(case: OptimizerCase) -> None:
    """`apply` takes the residuals that the exchange returned into the state, perhaps converted, as Muon does.

    Old residuals or zeros would lose what was not sent.
    """
    for job in case.whole_run[:-1]:
        step = job.states[0].step
        asked = [case.optimizer.prepare(g, s) for g, s in zip(job.grads(step), job.states, strict=True)]
        means = lockstep([average.stages() for average in asked])
        for rank, (p, m, state) in enumerate(zip(job.params, means, job.states, strict=True)):
            _, after = case.optimizer.apply(p, m, state)
            residuals = ((*s.worker, *s.server) for s in (state.exchange, m.exchange, after.exchange))
            for old, new, kept in zip(*residuals, strict=True):
                converted = bytes_of(kept) != bytes_of(old) and np.any(to_numpy(kept))
                assert bytes_of(kept) == bytes_of(new) or converted, (
                    f"step {step} of rank {rank} loses the residuals in means.exchange"
                )


def weights_scale_gradients(case: OptimizerCase) -> None:
    """With a weight, `step` returns the same as for gradients times N w / (w_1 + ... + w_N)."""
    factors, size = (1.5, 0.5), 2

    def rank_main(comm: LocalCommunicator, *, weighs: bool) -> tuple[list[Any], OptimizerState]:
        params = case.arrays([np.ones(shape, np.float32) for shape in SHAPES])
        state = case.optimizer.init(params, comm, NAMES)
        factor = np.float32(1 if weighs else factors[comm.rank])
        weight = 8 * factors[comm.rank] if weighs else None
        for step in range(4):
            grads = case.arrays([np.asarray(factor * g) for g in gradients(comm.rank, step)])
            params, state = case.optimizer.step(params, grads, state, comm, weight=weight)
        return params, state

    found, expected = (
        Ranks(case, [params for params, _ in results], [state for _, state in results])
        for results in (
            run_local(size, partial(rank_main, weighs=weighs), timeout=_SECONDS, hosts=["one"] * size)
            for weighs in (True, False)
        )
    )
    require_same(found, expected, "after 4 steps with weights of 12 and 4")


def another_world_goes_on(case: OptimizerCase) -> None:
    """Jobs of three ranks and of one load dicts of two ranks, keep mean moments and residuals, and agree; or refuse."""
    for saved, size in product(case.whole_run[::3], (3, 1)):
        dicts = [_through_a_file(case.optimizer.state_dict(state)) for state in saved.states]
        stages = [
            case.optimizer.load_stages(
                dicts[rank::size], list(saved.params[0]), rank=rank, size=size, host="one", names=NAMES
            )
            for rank in range(size)
        ]
        states = lockstep(stages, catch=(ValueError, MismatchError))
        refused = [isinstance(state, Exception) for state in states]
        assert len(set(refused)) == 1, "some ranks load the dicts of another world, and others refuse them"
        if refused[0]:
            continue
        job, step = Ranks(case, [list(saved.params[0]) for _ in range(size)], states), saved.states[0].step
        assert [s.step for s in states] == [step] * size, (
            f"dicts of step {step} load as steps {[s.step for s in states]}"
        )
        _require_kept(job, saved)
        job.step(step)
        if case.optimizer.apart(job.states[0].stage):
            continue
        held = [list(map(bytes_of, p)) for p in job.params]
        assert held == held[:1] * size, (
            f"loaded after {step} steps on {size} ranks, the ranks have different parameters after a step"
        )


def _require_kept(loaded: Ranks, saved: Ranks) -> None:
    """Raise AssertionError unless the means over ranks of moments and residuals are the same as when saved."""
    where = f"loaded after {saved.states[0].step} steps on {loaded.size} ranks"
    after = _of_all_ranks(loaded)
    for kind, (before, largest) in _of_all_ranks(saved).items():
        found, _ = after[kind]
        # Sums over the ranks in any order, and three scalings.
        tolerance = (saved.size + loaded.size + 6) * 2.0**-24 * largest
        same = all(np.all(np.abs(x - y) <= tolerance) for x, y in zip(found, before, strict=True))
        assert same, (
            f"{where}, the mean of {kind} over the ranks differs from the mean over the ranks that saved"
        )


def _of_all_ranks(job: Ranks) -> dict[str, tuple[list[Vector], float]]:
    """Return the means over the ranks of each kind of array, and what residuals owe, with the largest magnitudes."""
    of_ranks = [{"momentum": s.momentum, "variance": s.variance, **s.arrays} for s in job.states]
    drawn = {
        kind: [[to_numpy(x).astype(np.float64) for x in of_rank[kind]] for of_rank in of_ranks]
        for kind in of_ranks[0]
    }
    found = {
        kind: ([np.mean(same, axis=0) for same in zip(*each, strict=True)], _largest(chain(*each)))
        for kind, each in drawn.items()
    }
    residuals = [to_numpy(r) for s in job.states for r in (*s.exchange.worker, *s.exchange.server)]
    return {**found, "residuals": (job.owed(), _largest(residuals))}


def _largest(arrays: Iterable[Vector]) -> float:
    return max((float(np.abs(x).max(initial=0)) for x in arrays), default=0.0)
