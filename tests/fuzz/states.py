"""Loads damaged states into every optimizer, mean and outer loop: each is properly refused, or is a valid state.

    python -m tests.fuzz.states --inputs 20000

prints the number of inputs, the faults, the slowest input and the largest allocation.
"""

import argparse
import io
import time
import traceback
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from random import Random
from typing import Any, NamedTuple

import numpy as np

import qcomp
from qcomp import MismatchError, NonFiniteError
from qcomp.core.checkpoint.format import read_arrays, read_scalars
from qcomp.testing import lockstep
from tests.fuzz.damage import damaged
from tests.optimizers.every import EVERY, SHAPES, SIGN, advance, growing
from tests.outer import jobs

__all__ = ["TARGETS", "Outcome", "Target", "attempt", "targets"]

NAMES = ["embedding@0", "layer.0/weight", "bias"]
ALONE = qcomp.comm.LocalCommunicator.alone()
MOST_BYTES = 8 << 20
"""Bytes that loading a state of some kilobytes may allocate; a JSON text of 100 kB is read as a whole."""
MOST_SECONDS = 5.0
LONGEST_MESSAGE = 4000


class Target(NamedTuple):
    """States to damage, and the functions that load and use them."""

    saved: Sequence[dict[str, Any]]
    """The dict of each rank."""
    load: Callable[[list[Any]], Any]
    """Loads dicts on all ranks; returns what each rank holds then, or the error of each."""
    use: Callable[[Any], None]
    """Saves again what a rank has loaded, and takes a step with it."""


class Outcome(NamedTuple):
    """The outcome of loading an input."""

    fault: str | None
    refused: bool
    seconds: float
    bytes: int


def _first() -> list[np.ndarray]:
    return [np.ones(shape, np.float32) for shape in SHAPES]


def _trained(opt: Any, size: int, steps: int) -> list[dict[str, Any]]:
    """Return the dict of each rank after some steps."""

    def rank_main(comm: Any) -> dict[str, Any]:
        params = _first()
        state = opt.init(params, comm, NAMES)
        for step in range(steps):
            params, state = advance(opt, params, state, comm, step, grads=growing)
        saved: dict[str, Any] = opt.state_dict(state)
        return saved

    return qcomp.comm.run_local(size, rank_main, timeout=60)


def _own(opt: Any, size: int, steps: int) -> Target:
    """Each rank loads its own dict."""

    def load(saved: list[Any]) -> list[Any]:
        stages = [
            opt.load_stages(one, _first(), rank=rank, size=size, host="one", names=NAMES)
            for rank, one in enumerate(saved)
        ]
        return lockstep(stages, catch=(ValueError, MismatchError))

    return Target(_trained(opt, size, steps), load, lambda state: _step(opt, state))


def _in_stage(opt: Any, stage: str, size: int = 1) -> Target:
    """As `_own`, after the first step that ends in the stage."""
    found = (_own(opt, size, steps) for steps in range(1, 15))
    return next(target for target in found if target.saved[0]["stage"] == stage)


def _regrouped(opt: Any, old: int, new: int, steps: int) -> Target:
    """Resume on a new number of ranks from the list of all dicts."""

    def load(saved: list[Any]) -> list[Any]:
        stages = [
            opt.load_stages(
                saved if rank == 0 else [], _first(), rank=rank, size=new, host="one", names=NAMES
            )
            for rank in range(new)
        ]
        return lockstep(stages, catch=(ValueError, MismatchError))

    return Target(_trained(opt, old, steps), load, lambda state: _step(opt, state))


def _step(opt: Any, state: Any) -> None:
    """Save the loaded state again and, if that needs no other rank, take a step."""
    opt.state_dict(state)
    if state.size > 1 or state.stage == "start":
        return
    grads = growing(0, 3)
    opt.step(_first(), (grads, grads) if isinstance(opt, qcomp.QSVRG) else grads, state, ALONE)


def _outer(loop: qcomp.OuterLoop, size: int, steps: int) -> Target:
    job = jobs.Job(loop, size).run(steps)

    def load(saved: list[Any]) -> list[Any]:
        stages = [
            loop.load_stages(one, jobs.begun(), rank=rank, size=size, host="a")
            for rank, one in enumerate(saved)
        ]
        return lockstep(stages, catch=(ValueError, MismatchError))

    def use(found: tuple[Any, Any]) -> None:
        params, state = found
        loop.state_dict(params, state)
        for _ in range(loop.every if size == 1 else 0):
            params, state = loop.step(params, state, ALONE)

    return Target(job.saved(), load, use)


STREAMING = jobs.loop_of(
    every=6, fragments=3, delay=3, mixing=0.5, decay=0.5, outer=qcomp.Adam(learning_rate=0.1)
)


def _torch(name: str, steps: int, **settings: Any) -> Target:
    """An optimizer for torch, which keeps its state and groups if it refuses to load others."""
    import torch

    import qcomp.torch

    def made() -> tuple[list[Any], Any]:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        named = list(zip(NAMES, params, strict=True))
        groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.05}]
        return params, getattr(qcomp.torch, name)(groups, lr=0.1, comm=ALONE, **settings)

    def train(params: list[Any], optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            for p, g in zip(params, growing(0, step), strict=True):
                p.grad = torch.from_numpy(g)
            optimizer.step()

    def held(params: list[Any], optimizer: Any) -> str:
        parts = [x.tolist() for x in params], optimizer.core_state, optimizer.state_dict()
        return repr(parts)

    params, optimizer = made()
    train(params, optimizer, 0, steps)

    def load(saved: list[Any]) -> list[Any]:
        params, optimizer = made()
        before = held(params, optimizer)
        error: Exception | None = None
        try:
            optimizer.load_state_dict(saved[0])
        except (ValueError, MismatchError) as refusal:
            error = refusal
        assert error is None or held(params, optimizer) == before, f"it has changed, and raises {error}"
        return [error or (params, optimizer)]

    return Target([optimizer.state_dict()], load, lambda found: train(found[0], found[1], steps, steps + 1))


TARGETS: dict[str, Callable[[], Target]] = {
    **{
        f"{name}, after {steps} steps": lambda opt=entry.opt, steps=steps: _own(opt, 1, steps)  # type: ignore[misc]  # a lambda's default
        for name, entry in EVERY.items()
        for steps in ((1,) if len(entry.stages) == 1 else (1, 4, 6))
    },
    **{
        f"{name}, of 2 ranks": lambda opt=EVERY[name].opt: _own(opt, 2, 6)  # type: ignore[misc]  # a lambda's default
        for name in ("1-bit", "0/1", "SGD, automatic", "SGD, PowerSGD", "EF21", "Muon")
    },
    **{
        f"{name}, of {old} ranks on {new}": lambda opt=EVERY[name].opt, old=old, new=new: _regrouped(  # type: ignore[misc]  # a lambda's default
            opt, old, new, 6
        )
        for name in ("1-bit", "1-bit, watched", "1-bit, ring", "0/1", "SGD, PowerSGD", "Muon")
        for old, new in ((2, 1), (2, 2), (1, 2))
    },
    "0/1, while ranks are apart": lambda: _in_stage(EVERY["0/1"].opt, "local"),
    "0/1 of 2 ranks, while they are apart": lambda: _in_stage(EVERY["0/1"].opt, "local", 2),
    "1-bit, watched, in a re-warm": lambda: _in_stage(EVERY["1-bit, watched"].opt, "rewarm"),
    **(
        {
            f"torch, {name}, after {steps} steps": lambda name=name, steps=steps, settings=settings: _torch(  # type: ignore[misc]  # a lambda's default
                name, steps, **settings
            )
            for name, settings in {
                "OneBitAdam": {"freeze": 2, "compressor": SIGN, "exact": qcomp.ExactBelow(10)},
                "ZeroOneAdam": {
                    "freeze": 2,
                    "compressor": SIGN,
                    "exact": None,
                    "sync_steps": qcomp.LocalSteps(1, 8),
                },
                "Muon": {},
            }.items()
            for steps in (1, 5)
        }
        if find_spec("torch")
        else {}
    ),
    "outer loop": lambda: _outer(jobs.loop_of(), 1, 5),
    "outer loop, under way": lambda: _outer(STREAMING, 1, 5),
    "outer loop of 2 ranks": lambda: _outer(STREAMING, 2, 5),
}


@cache
def targets(name: str) -> Target:
    """Return a target by name, made once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TARGETS[name]()


def attempt(target: Target, seed: object) -> Outcome:
    """Damage the dict of one rank, load it, and judge the outcome."""
    rng = Random(repr(seed))
    given: list[Any] = [dict(one) for one in target.saved]
    victim = rng.randrange(len(given))
    given[victim] = damaged(given[victim], rng)
    held = [_fingerprint(one) for one in target.saved]
    tracemalloc.start()
    start, results = time.perf_counter(), []
    fault: str | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = target.load(given)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__} in {where.filename.rpartition('/')[2]}:{where.lineno}: {str(error)[:200]}"
        seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        fault = fault or _judged(target, given, victim, results, held)
    if seconds > MOST_SECONDS:
        fault = fault or f"takes {seconds:.1f} s"
    if peak > MOST_BYTES:
        fault = fault or f"allocates {peak:,} bytes"
    return Outcome(fault, any(isinstance(x, Exception) for x in results), seconds, peak)


def _judged(
    target: Target, given: list[Any], victim: int, results: list[Any], held: list[bytes]
) -> str | None:
    """Return what is wrong with the results, or None."""
    if held != [_fingerprint(one) for one in target.saved]:
        return "loading has written to what it was given"
    errors = [x for x in results if isinstance(x, Exception)]
    return (
        _judged_errors(errors, len(results))
        if errors
        else _judged_states(target, given[victim], victim, results)
    )


def _judged_errors(errors: list[Exception], size: int) -> str | None:
    if len(errors) < size:
        return f"some ranks load what others refuse: {errors[0]}"
    for text in map(str, errors):
        if (
            not text
            or len(text) > LONGEST_MESSAGE
            or text.startswith(("'", "expected", "Expecting", "invalid"))
        ):
            return f"an unclear message: {text[:200]}"
    return None


def _judged_states(target: Target, given: Any, victim: int, results: list[Any]) -> str | None:
    digests, whole = given.get("digests"), target.saved[victim]
    if digests and digests == whole.get("digests") and _content(given) != _content(whole):
        return "a state loads that differs from its digests"
    try:
        for found in results:
            target.use(found)
    except NonFiniteError:
        return None  # NaN in an array without a digest
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"what was loaded fails with {type(error).__name__} in {where.filename}:{where.lineno}: {error}"
        )
    return None


def _content(saved: dict[str, Any]) -> str:
    """Return the entries in a form that is equal for equal values of all formats."""
    arrays = {key: (x.shape, x.dtype, np.asarray(x).tobytes()) for key, x in read_arrays(saved).items()}
    return repr(sorted({**read_scalars(saved), **arrays}.items()))


def _fingerprint(saved: dict[str, Any]) -> bytes:
    return b"".join(v.tobytes() if hasattr(v, "tobytes") else repr(v).encode() for v in saved.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Try inputs and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of targets")
    options = parser.parse_args(arguments)
    names = [name for name in TARGETS if options.only in name]
    faults: Counter[str] = Counter()
    examples: dict[str, str] = {}
    refused, slowest, largest = 0, (0.0, ""), (0, "")
    for number in range(options.inputs):
        name, seed = names[number % len(names)], (options.seed, number)
        with redirect_stdout(io.StringIO()):
            found = attempt(targets(name), seed)
        refused, where = refused + found.refused, f"{name}, {seed}"
        slowest, largest = max(slowest, (found.seconds, where)), max(largest, (found.bytes, where))
        if found.fault:
            faults[found.fault[:120]] += 1
            examples.setdefault(found.fault[:120], where)
    lines = [
        f"{options.inputs} inputs, {refused} refused, {sum(faults.values())} faults",
        f"slowest: {slowest[0]:.3f} s ({slowest[1]}); largest allocation: {largest[0]:,} bytes ({largest[1]})",
        *(f"{count} times, such as {examples[fault]}: {fault}" for fault, count in faults.most_common()),
    ]
    print("\n".join(lines))  # noqa: T201 - a program
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
