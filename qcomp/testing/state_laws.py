"""Laws about state: a result depends only on vector, key and configuration."""

import builtins
import copy
import os
import platform
import random
import socket
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import numpy as np

import qcomp
from qcomp.core.numeric.arrays import is_mutable
from qcomp.core.numeric.random import Key
from qcomp.core.registry import compressor as from_spec
from qcomp.testing.case import Case
from qcomp.testing.inputs import vector
from qcomp.testing.libraries import to_numpy

__all__ = [
    "FilesOfAuthor",
    "first_calls",
    "independent_of_calls",
    "independent_of_the_environment",
    "independent_of_threads",
    "interrupted",
]

Array = np.ndarray[Any, Any]
Results = list[tuple[bytes, bytes]]

_SIZE_OF_INTERRUPTED = 5000
"""Elements of the vectors of concurrent calls: enough for code that treats larger vectors in another way."""
_VISITS = 2
"""Interruptions of a line."""
_MOST_INTERRUPTIONS = 400
"""Interruptions of a call, which bound the time for a package with many lines."""


def _sizes(case: Case) -> tuple[int, ...]:
    bucket = min(case.compressor.traits.bucket_size, 5000)
    return (1, 7, 9, bucket, bucket + 9, 1000, 4097, 20_000)


def _results(case: Case, sizes: tuple[int, ...], *, seed: int = 1) -> Results:
    """Return payloads and decompressed vectors, in each dtype."""
    found = []
    for size in sizes:
        for dtype in case.dtypes:
            x = case.array(vector("gaussian", size, 17).astype(dtype))
            payload = case.compressor.compress(x, key=Key(seed=seed, step=2, rank=1))
            decoded = case.compressor.decompress(payload, like=x)
            found.append((to_numpy(payload.data).tobytes(), to_numpy(decoded).tobytes()))
    return found


def _compare(expected: Results, got: Results, sizes: tuple[int, ...], why: str) -> None:
    count = max(1, len(expected) // len(sizes))
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        if a != b:
            what = "the payload" if a[0] != b[0] else "the decompressed vector"
            raise AssertionError(f"{why}, {what} of {sizes[index // count]} elements differs")


def first_calls(case: Case) -> Results:
    """Return the results of the very first calls, to compare with later ones."""
    with suppress(Exception):
        return [] if case.jit else _results(case, _sizes(case))
    return []


def independent_of_calls(case: Case) -> None:
    """The first call, later calls, calls after different ones, and calls of a copy give the same result."""
    if case.jit:
        return
    sizes = _sizes(case)
    first = case.first_calls or first_calls(case)
    _poison()
    _compare(first, _results(case, sizes), sizes, "called a second time")
    _compare(
        first,
        _results(Case(copy.deepcopy(case.compressor), case.xp), sizes),
        sizes,
        "by a copy of the compressor",
    )
    fresh = Case(from_spec(case.compressor.spec), case.xp)
    _results(fresh, (5,), seed=9)
    _compare(first, _results(fresh, sizes), sizes, "by another instance after different calls")
    small = (9,)
    expected = _results(case, small)
    for number in range(50):
        if number % 8 == 7:
            _results(case, (5, 130), seed=number)
        _compare(expected, _results(case, small), small, "after other calls")
    with suppress(Exception):
        case.compressor.compress(case.array(np.full(9, np.nan, dtype=np.float32)), key=Key(seed=1))
    _compare(expected, _results(case, small), small, "after an error")
    for size in reversed(sizes):
        count = len(case.dtypes)
        expected = first[sizes.index(size) * count :][:count]
        _compare(expected, _results(case, (size,)), (size,), "in another order of calls")
    for size in (9, 1000):
        _require_no_memory(case, size)


def _require_no_memory(case: Case, size: int) -> None:
    """Check that nothing is kept outside the payload, and that an array is known by its values, not as an object."""
    key = Key(seed=1, step=2, rank=1)
    x = case.array(vector("gaussian", size, 17))
    payload = case.compressor.compress(x, key=key)
    decoded = to_numpy(case.compressor.decompress(payload, like=x)).tobytes()
    other = case.array(vector("positive", size, 18))
    case.compressor.compress(other, key=Key(seed=2, step=3, rank=2))
    again = to_numpy(case.compressor.decompress(payload, like=x)).tobytes()
    assert again == decoded, (
        f"after another compress, a payload of {size} elements decompresses to something else"
    )
    if is_mutable(x):
        data = to_numpy(case.compressor.compress(other, key=key).data).tobytes()
        case.compressor.compress(x, key=key)
        x[...] = other
        changed = to_numpy(case.compressor.compress(x, key=key).data).tobytes()
        assert changed == data, (
            f"an array of {size} elements with new values gives the payload of its old ones"
        )


def _poison() -> None:
    """Fill free memory with improbable values, to detect results in uninitialised memory."""
    blocks = [np.full(1 << power, 0xC5, dtype=np.uint8) for power in range(3, 20) for _ in range(8)]
    blocks.clear()


def independent_of_threads(case: Case) -> None:
    """Concurrent calls in two threads do not disturb each other: they share no scratch memory.

    After lines of the author's code, another thread makes a complete call.
    """
    if case.jit:
        return
    x = case.array(vector("gaussian", _SIZE_OF_INTERRUPTED, 18))
    y = case.array(-2 * vector("positive", _SIZE_OF_INTERRUPTED, 19))
    key, other_key = Key(seed=1), Key(seed=77, step=5)

    def call(array: Any, chosen: Key) -> tuple[bytes, bytes]:
        payload = case.compressor.compress(array, key=chosen)
        decoded = case.compressor.decompress(payload, like=array)
        return to_numpy(payload.data).tobytes(), to_numpy(decoded).tobytes()

    expected, expected_other = call(x, key), call(y, other_key)
    files = FilesOfAuthor(type(case.compressor))
    got, others = interrupted(lambda: call(x, key), lambda: call(y, other_key), files)
    assert got == expected, "a call in another thread at the same time changes the result"
    assert all(other == expected_other for other in others), (
        "a call during another thread's call has another result"
    )


class FilesOfAuthor:
    """The files of an author's code: those of a class and its bases, of its package, and all that no library has."""

    def __init__(self, cls: type) -> None:
        self._bases = {getattr(sys.modules[base.__module__], "__file__", None) for base in cls.__mro__}
        self._package = cls.__module__.partition(".")[0]
        paths = sysconfig.get_paths()
        libraries = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        self._libraries = ("<frozen", str(Path(qcomp.__file__).parent), *libraries)

    def has(self, frame: FrameType) -> bool:
        """Return whether the code of a frame is the author's."""
        name = frame.f_code.co_filename
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if name in self._bases or package == self._package != "qcomp":
            return True
        return not name.startswith(self._libraries)


def interrupted(
    call: Callable[[], Any], other: Callable[[], Any], files: FilesOfAuthor
) -> tuple[Any, list[Any]]:
    """Return the results of a call and of others, which another thread makes after its lines in these files.

    Each line is interrupted a few times, so that a loop leaves interruptions for the lines behind it.
    """
    others: list[Any] = []
    threads: list[threading.Thread] = []
    visits: Counter[tuple[CodeType, int]] = Counter()
    waits = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal waits
        if not files.has(frame):
            return None
        line = (frame.f_code, frame.f_lineno)
        if event == "line" and visits[line] < _VISITS and len(threads) < _MOST_INTERRUPTIONS:
            visits[line] += 1
            # A thread that waits for a lock of the interrupted call is correct, so wait only briefly.
            thread = threading.Thread(target=lambda: others.append(other()), daemon=True)
            threads.append(thread)
            thread.start()
            thread.join(0.5 if waits < 3 else 0.01)
            waits += thread.is_alive()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    for thread in threads:
        thread.join(10)
    return result, others


def independent_of_the_environment(case: Case) -> None:
    """Results do not depend on global generators, hash seeds, threads, process ids, variables, the host or the date.

    Calls do not draw from global generators.
    """
    if case.jit:
        return
    sizes = (*_sizes(case), 100_000)  # torch gives smaller vectors to one thread

    def compare(contexts: Iterable[Any], why: str) -> None:
        results = []
        for number in (1, 2):
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context(number))
                results.append(_results(case, sizes))
        _compare(results[0], results[1], sizes, why)

    try:
        compare(_ENVIRONMENTS.values(), "in another environment")
    except AssertionError:
        for name, context in _ENVIRONMENTS.items():
            compare([context], f"with {name}")
        raise
    states = _generator_states()
    _results(case, sizes)
    for name, state in _generator_states().items():
        assert state == states[name], f"the global generator of {name} was drawn from"


def _numpy_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    return {
        "position": state["state"]["pos"],
        "words": state["state"]["key"].tobytes(),
        "gauss": state["gauss"],
    }


def _generator_states() -> dict[str, Any]:
    numpy_state = {name: repr(part) for name, part in _numpy_state().items()}
    states: dict[str, Any] = {"numpy": numpy_state, "random": random.getstate()}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = to_numpy(torch.get_rng_state()).tobytes()
    return states


@contextmanager
def _generators(number: int) -> Iterator[None]:
    """Seed the global generators."""
    before, before_numpy = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    before_torch = None if torch is None else torch.get_rng_state()
    random.seed(number)
    np.random.seed(number)
    if torch is not None:
        torch.manual_seed(number)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)
        if torch is not None:
            torch.set_rng_state(before_torch)


@contextmanager
def _hash_seed(number: int) -> Iterator[None]:
    """Make `hash` return other numbers for strings, as in a process with another hash seed."""
    real = builtins.hash

    def salted(value: Any) -> int:
        if isinstance(value, str | bytes):
            return real((number, real(value)))
        return real(tuple(map(salted, value))) if isinstance(value, tuple) else real(value)

    with mock.patch.object(builtins, "hash", salted):
        yield


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Simulate another number of processors and threads."""
    count = 3 * number - 2
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    with ExitStack() as stack:
        for name in ("cpu_count", "process_cpu_count"):
            if hasattr(os, name):
                stack.enter_context(mock.patch.object(os, name, return_value=count))
        if hasattr(os, "sched_getaffinity"):
            processors = set(range(count))
            stack.enter_context(mock.patch.object(os, "sched_getaffinity", return_value=processors))
        stack.enter_context(mock.patch.object(threading, "active_count", return_value=count))
        if torch is not None:
            torch.set_num_threads(number)
        try:
            yield
        finally:
            if torch is not None:
                torch.set_num_threads(before)


@contextmanager
def _variables(number: int) -> Iterator[None]:
    """Simulate other environment variables, program arguments and another process id."""
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "OMP_NUM_THREADS",
        "PYTHONHASHSEED",
        "SEED",
        "HOSTNAME",
        "USER",
    )
    with (
        mock.patch.dict(os.environ, {name: str(number) for name in names}),
        mock.patch.object(os, "getpid", return_value=1000 + number),
        mock.patch.object(sys, "argv", ["program", str(number)]),
    ):
        yield


@contextmanager
def _thread(number: int) -> Iterator[None]:
    """Give this thread another name."""
    thread = threading.current_thread()
    before = thread.name
    thread.name = f"worker-{number}"
    try:
        yield
    finally:
        thread.name = before


@contextmanager
def _host(number: int) -> Iterator[None]:
    """Give the host another name."""
    name = f"host-{number}"
    with (
        mock.patch.object(socket, "gethostname", return_value=name),
        mock.patch.object(platform, "node", return_value=name),
    ):
        yield


@contextmanager
def _day(number: int) -> Iterator[None]:
    """Set the clock to another day; `datetime.date.today` reads it by `time.time`."""
    seconds = 10**9 + 100_003 * number
    with (
        mock.patch.object(time, "time", return_value=float(seconds)),
        mock.patch.object(time, "time_ns", return_value=seconds * 10**9),
    ):
        yield


_ENVIRONMENTS: dict[str, Any] = {
    "another seed of the global generators": _generators,
    "another hash seed": _hash_seed,
    "another number of threads": _threads,
    "other environment variables": _variables,
    "another name of the thread": _thread,
    "another name of the host": _host,
    "another date": _day,
}
