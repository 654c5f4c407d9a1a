"""The laws of optimizers, each a function that raises AssertionError if an `OptimizerCase` breaks it."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.core.checkpoint.format import DIGESTS
from qcomp.core.errors import MismatchError, NonFiniteError
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.state import OptimizerState
from qcomp.testing.libraries import Namespace, library_name, to_library, to_numpy
from qcomp.testing.turns import lockstep

__all__ = ["OPTIMIZER_LAWS", "Job", "OptimizerCase", "OptimizerLaw"]

SHAPES = ((110, 110), (40,), (7, 5), (), (0, 3))
"""A tensor that the default policy compresses, small ones, a scalar, and one without elements."""
NAMES = ("layer.weight", "layer.bias", "small", "scale", "empty")
STEPS = 12
_SECONDS = 60.0
"""Time in which ranks in threads must end; a law takes a second or two."""

Vector = np.ndarray[Any, Any]


def gradients(rank: int, step: int, dtype: str = "float32") -> list[Vector]:
    """Return gradients that grow slowly and have a direction, the same in every call with this rank and step."""
    rng = np.random.default_rng([11, rank, step])
    return [((1 + step / 4) * (np.asarray(rng.standard_normal(s)) + 0.5)).astype(dtype) for s in SHAPES]


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer and an array library."""

    optimizer: Optimizer
    xp: Namespace

    def __repr__(self) -> str:
        return f"{type(self.optimizer).__name__} on {library_name(self.xp)}"

    def arrays(self, values: Sequence[Vector]) -> list[Any]:
        """Return NumPy arrays in the library."""
        return [to_library(self.xp, x) for x in values]

    def start(self, size: int, dtype: str = "float32") -> "Job":
        """Return a job of ``size`` ranks before its first step."""
        first = [np.ones(shape, dtype) for shape in SHAPES]
        params = [self.arrays(first) for _ in range(size)]
        states = lockstep(
            [
                self.optimizer.init_stages(p, rank=rank, size=size, host="one", names=NAMES)
                for rank, p in enumerate(params)
            ]
        )
        return Job(self, params, states)

    @cached_property
    def whole_run(self) -> "list[Job]":
        """A run of two ranks: the job at the start and after each step."""
        jobs = [self.start(2)]
        for step in range(STEPS):
            jobs.append(jobs[-1].copy())
            jobs[-1].step(step)
        return jobs


@dataclass
class Job:
    """The parameters and states of all ranks of a job."""

    case: OptimizerCase
    params: list[list[Any]]
    states: list[OptimizerState]

    def copy(self) -> "Job":
        """Return a copy that can go on independently."""
        return Job(self.case, list(self.params), list(self.states))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.states)

    def grads(self, step: int) -> list[list[Any]]:
        """Return the gradients of every rank."""
        dtype = str(to_numpy(self.params[0][0]).dtype)
        return [self.case.arrays(gradients(rank, step, dtype)) for rank in range(self.size)]

    def step(self, step: int, *, donate: bool = False) -> None:
        """Make a step on all ranks."""
        self.take(self.stages(self.grads(step), donate=donate))

    def stages(self, grads: Sequence[Any], *, donate: bool = False) -> list[Any]:
        """Return a step of every rank in stages."""
        optimizer, ranks = self.case.optimizer, zip(self.params, grads, self.states, strict=True)
        return [optimizer.stages(p, g, s, donate=donate) for p, g, s in ranks]

    def take(self, stages: Sequence[Any]) -> None:
        """Run a step in stages, and keep its results."""
        results = lockstep(stages)
        self.params = [params for params, _ in results]
        self.states = [state for _, state in results]

    def held(self) -> list[dict[str, bytes]]:
        """Return everything that each rank holds, by name."""
        return [self._held_by(p, s) for p, s in zip(self.params, self.states, strict=True)]

    def _held_by(self, params: Sequence[Any], state: OptimizerState) -> dict[str, bytes]:
        saved = self.case.optimizer.state_dict(state)
        entries = {f"parameter {name}": p for name, p in zip(NAMES, params, strict=True)} | saved
        return {key: _bytes(value) for key, value in entries.items()}


def _bytes(value: Any) -> bytes:
    if hasattr(value, "dtype") and not isinstance(value, np.ndarray | np.generic):
        value = to_numpy(value)
    array = np.asarray(value)
    return f"{array.dtype} {array.shape} ".encode() + array.tobytes()


def _difference(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> str | None:
    """Return the key of the first entry in which two dicts differ; None if they are equal."""
    keys = [*one, *(key for key in other if key not in one)]
    return next((key for key in keys if one.get(key) != other.get(key)), None)


def _require_same(found: Job, expected: Job, when: str) -> None:
    for rank, (one, other) in enumerate(zip(found.held(), expected.held(), strict=True)):
        key = _difference(one, other)
        assert key is None, f"{when}, {key!r} of rank {rank} differs"


def ranks_agree(case: OptimizerCase) -> None:
    """After each step all ranks hold the same, except for residuals and what `own_kinds` and `apart` declare."""
    for size in (1, 2, 3):
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
                key = _difference(*shared)
                assert key is None, (
                    f"after {step + 1} steps in stage {stage!r}, {key!r} differs on rank {rank}"
                )


def compresses_soon(case: OptimizerCase) -> None:
    """If it has an averaging, it compresses something soon; otherwise the other laws would not test compression."""
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
            key = _difference(one, other)
            assert key is None, f"step {step} writes to {key!r} of rank {rank}"
        for given, drawn in zip(grads, job.grads(step), strict=True):
            same = list(map(_bytes, given)) == list(map(_bytes, drawn))
            assert same, f"step {step} writes to gradients"


def same_again(case: OptimizerCase) -> None:
    """Another run, with an equal optimizer, gives the same results."""
    again = OptimizerCase(replace(case.optimizer), case.xp).start(2)
    for step, expected in enumerate(case.whole_run):
        _require_same(again, expected, f"after {step} steps of another run")
        if step < STEPS:
            again.step(step)


def donation_changes_nothing(case: OptimizerCase) -> None:
    """Steps that may overwrite the old parameters and moments give the same results."""
    job = case.start(2)
    for step, expected in enumerate(case.whole_run[1:]):
        job.step(step, donate=True)
        _require_same(job, expected, f"after {step + 1} steps with donate=True")


def saved_after_any_step(case: OptimizerCase) -> None:
    """A job that is saved after any step and loaded goes on as if it had never stopped."""
    for stop, saved in enumerate(case.whole_run[:-1]):
        dicts = [_through_a_file(case.optimizer.state_dict(state)) for state in saved.states]
        stages = [
            case.optimizer.load_stages(own, p, rank=rank, size=2, host="one", names=NAMES)
            for rank, (own, p) in enumerate(zip(dicts, saved.params, strict=True))
        ]
        job = Job(case, list(saved.params), lockstep(stages))
        _require_same(job, saved, f"saved after {stop} steps and loaded")
        for step in range(stop, min(stop + 2, STEPS)):
            job.step(step)
            _require_same(job, case.whole_run[step + 1], f"saved after {stop} steps, after {step + 1}")


def _through_a_file(saved: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    arrays: dict[str, Any] = {k: to_numpy(v) if hasattr(v, "shape") else v for k, v in saved.items()}
    np.savez(file, **arrays)
    archive = np.load(io.BytesIO(file.getvalue()), allow_pickle=False)
    return {key: archive[key] for key in archive}


def refusals_are_shared(case: OptimizerCase) -> None:
    """A non-finite gradient on one rank stops all ranks in the same stage, and changes nothing."""
    raising = OptimizerCase(replace(case.optimizer, nonfinite="raise"), case.xp)
    skipping = _that_skips(case)
    for job in case.whole_run[:-1]:
        stage, step = job.states[0].stage, job.states[0].step
        after = case.whole_run[step + 1].states[0].stage
        alone = case.optimizer.apart(stage) or case.optimizer.apart(after)
        if alone or not _exchanges(job, step):
            continue  # no rank can tell the others
        before = job.held()
        for tensor, bad in ((0, np.nan), (1, np.inf), (2, -np.inf)):
            drawn = [gradients(rank, step) for rank in range(2)]
            drawn[1][tensor].flat[3] = bad
            grads = [case.arrays(x) for x in drawn]
            where = f"{bad} in {NAMES[tensor]!r} on rank 1 after {step} steps"
            raised = Job(raising, list(job.params), list(job.states))
            for rank, error in enumerate(lockstep(raised.stages(grads), catch=NonFiniteError)):
                assert isinstance(error, NonFiniteError), f"{where}: rank {rank} makes its step"
            key = next(filter(None, map(_difference, before, job.held())), None)
            assert key is None, f"{where}: {key!r} has changed"
            if skipping is None:
                continue
            skipped = Job(skipping, list(job.params), list(job.states))
            skipped.take(skipped.stages(grads))
            counts = [s.skipped for s in skipped.states]
            assert counts == [1, 1], f"{where}, with nonfinite='skip': states count {counts} skipped steps"
            unmoved = Job(case, skipped.params, [s._replace(skipped=0) for s in skipped.states])
            _require_same(unmoved, job, f"{where}, with nonfinite='skip'")


def _exchanges(job: Job, step: int) -> bool:
    """Return whether the ranks exchange anything in a step."""
    first, *_ = job.stages(job.grads(step))
    return next(first, None) is not None


def _that_skips(case: OptimizerCase) -> OptimizerCase | None:
    """Return the optimizer with nonfinite="skip"; None if it refuses that setting, which is allowed."""
    try:
        return OptimizerCase(replace(case.optimizer, nonfinite="skip"), case.xp)
    except ValueError:
        return None


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


def rates_scale_the_step(case: OptimizerCase) -> None:
    """A rate of 0 moves nothing, and a constant schedule has the same effect as its number."""
    still = OptimizerCase(replace(case.optimizer, learning_rate=0.0), case.xp)
    job = still.start(1)
    first = list(map(_bytes, job.params[0]))
    for step in range(STEPS):
        job.step(step)
        assert list(map(_bytes, job.params[0])) == first, f"with a rate of 0, step {step} moves parameters"
    rate = case.optimizer.learning_rate
    if callable(rate):
        return
    job = OptimizerCase(replace(case.optimizer, learning_rate=lambda _: rate), case.xp).start(2)
    for step, expected in enumerate(case.whole_run[1:]):
        job.step(step)
        same = [list(map(_bytes, p)) for p in job.params] == [list(map(_bytes, p)) for p in expected.params]
        assert same, f"with a schedule that always returns {rate}, step {step} differs"


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
    found = Job(case, [params for params, _ in results], [state for _, state in results])
    _require_same(found, expected, "after 4 steps over a communicator")


def another_world_goes_on(case: OptimizerCase) -> None:
    """Three ranks can load the dicts of two, and then agree; or all three refuse them."""
    for saved in case.whole_run[::3]:
        dicts = [_through_a_file(case.optimizer.state_dict(state)) for state in saved.states]
        stages = [
            case.optimizer.load_stages(
                dicts[rank : rank + 1], list(saved.params[0]), rank=rank, size=3, host="one", names=NAMES
            )
            for rank in range(3)
        ]
        states = lockstep(stages, catch=(ValueError, MismatchError))
        refused = [isinstance(state, Exception) for state in states]
        assert len(set(refused)) == 1, "some ranks load the dicts of another world, and others refuse them"
        if refused[0]:
            continue
        job, step = Job(case, [list(saved.params[0]) for _ in range(3)], states), saved.states[0].step
        assert [s.step for s in states] == [step] * 3, (
            f"dicts of step {step} load as steps {[s.step for s in states]}"
        )
        job.step(step)
        if case.optimizer.apart(job.states[0].stage):
            continue
        held = [list(map(_bytes, p)) for p in job.params]
        assert held[0] == held[1] == held[2], f"loaded after {step} steps on three ranks, these then differ"


OptimizerLaw = Callable[[OptimizerCase], None]

OPTIMIZER_LAWS: tuple[tuple[OptimizerLaw, ...], ...] = (
    (ranks_agree, shapes_and_dtypes, compresses_soon),
    (
        against_the_gradient,
        same_again,
        only_results_are_new,
        donation_changes_nothing,
        saved_after_any_step,
        another_world_goes_on,
        refusals_are_shared,
        starts_alike,
        rates_scale_the_step,
        over_a_communicator,
    ),
)
"""The laws about an optimizer, in groups; later ones rely on earlier ones."""
