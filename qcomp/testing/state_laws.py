"""Laws about state: a result depends only on vector, key and configuration."""

import copy
import random
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from qcomp.core.numeric.arrays import is_mutable
from qcomp.core.numeric.random import Key
from qcomp.core.registry import compressor as from_spec
from qcomp.testing.compressor_case import Case
from qcomp.testing.environments import ENVIRONMENTS, in_another_process
from qcomp.testing.inputs import vector
from qcomp.testing.libraries import to_numpy

Results = list[tuple[bytes, bytes]]

_SIZE_OF_INTERRUPTED = 5000
"""The size of vectors in concurrent calls, enough for code that processes larger vectors in another way."""
_HELD = 70
"""The number of payloads kept at the same time, more than a small ring of buffers holds."""
_VISITS = 2
"""The most interruptions of each line."""
_MOST_INTERRUPTIONS = 400
"""The most interruptions of one call, which bounds the time for a package with many lines."""


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
    """The first call, later calls, calls after different calls, and calls of a copy give the same result."""
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
    _require_lasting_payloads(case)


def _require_no_memory(case: Case, size: int) -> None:
    """Check that nothing is kept outside the payload, and that results follow an array's values, not its identity."""
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
    _require_alike_in_any_order(case, size)
    if is_mutable(x):
        data = to_numpy(case.compressor.compress(other, key=key).data).tobytes()
        case.compressor.compress(x, key=key)
        x[...] = other
        changed = to_numpy(case.compressor.compress(x, key=key).data).tobytes()
        assert changed == data, (
            f"an array of {size} elements with new values gives the payload of its old ones"
        )


def _require_alike_in_any_order(case: Case, size: int) -> None:
    """Check that vectors of consecutive steps give the same payloads forwards and backwards."""
    steps = [
        (case.array(vector(family, size, 21)), Key(seed=1, step=step, rank=1))
        for step, family in enumerate(("positive", "gaussian", "heavy", "small", "sparse", "gaussian"))
    ]

    def payloads(order: list[tuple[Any, Key]]) -> list[bytes]:
        return [to_numpy(case.compressor.compress(x, key=key).data).tobytes() for x, key in order]

    assert payloads(steps) == payloads(steps[::-1])[::-1], (
        f"in another order of steps, vectors of {size} elements give other payloads"
    )


def _require_lasting_payloads(case: Case) -> None:
    """Check that payloads and results keep their values while many others are made."""
    made = []
    for number in range(_HELD):
        x = case.array(vector("gaussian", 40, number))
        payload = case.compressor.compress(x, key=Key(seed=1, step=number))
        decoded = case.compressor.decompress(payload, like=x)
        made.append((payload, x, decoded, to_numpy(payload.data).tobytes(), to_numpy(decoded).tobytes()))
    for payload, x, decoded, data, values in made:
        later = to_numpy(payload.data).tobytes(), to_numpy(decoded).tobytes()
        assert later == (data, values), f"a payload or a result changes while {_HELD} others are made"
        again = to_numpy(case.compressor.decompress(payload, like=x)).tobytes()
        assert again == values, f"a payload decompresses to something else after {_HELD} others"


def _poison() -> None:
    """Fill free memory with improbable values, to detect results in uninitialised memory."""
    blocks = [np.full(1 << power, 0xC5, dtype=np.uint8) for power in range(3, 20) for _ in range(8)]
    blocks.clear()


def independent_of_threads(case: Case) -> None:
    """Concurrent calls in two threads do not disturb each other: they share no scratch memory.

    Between lines of the author's code, another thread makes a complete call.
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
    """The files of an author's code: those of a class, its bases and its package, and files outside all libraries."""

    def __init__(self, cls: type) -> None:
        self._bases = {getattr(sys.modules[base.__module__], "__file__", None) for base in cls.__mro__}
        self._package = cls.__module__.partition(".")[0]
        paths = sysconfig.get_paths()
        libraries = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        self._libraries = ("<frozen", str(Path(__file__).parents[1]), *libraries)

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
    """Return the result of a call, and of the calls that other threads make between the call's lines in these files.

    Each line is interrupted only a few times, so that a loop does not use up the interruptions of later lines.
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
            # The thread may rightly wait for a lock that the interrupted call holds, so wait only briefly.
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
        compare(ENVIRONMENTS.values(), "in another environment")
    except AssertionError:
        for name, context in ENVIRONMENTS.items():
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


def same_in_another_process(case: Case) -> None:
    """A fresh process with another hash seed, date, host, number of processors and environment gives the same payloads.

    It also decompresses the payloads of this process, before it compresses anything. Classes that no other process can
    import, such as classes of a notebook, are not tried.
    """
    if case.jit:
        return
    inputs = []
    for number, size in enumerate((1, 9, *_sizes(case)[3:5], 5000, 5000, 5000, 70_001)):
        for dtype in case.dtypes:
            x, key = vector("gaussian", size, number).astype(dtype), Key(seed=1, step=number, rank=1)
            payload = case.on_numpy.compressor.compress(x, key=key)
            inputs.append(
                (x, key, payload, np.asarray(case.compressor.decompress(payload, like=x)).tobytes())
            )
    found = in_another_process(
        case.compressor,
        ":compress_and_decompress",
        [(x, key, payload.data.tobytes()) for x, key, payload, _ in reversed(inputs)],
        spec=case.compressor.spec,
    )
    for (x, _, payload, decoded), (data, there) in zip(reversed(inputs), found or ()):  # noqa: B905 - or nothing
        what = f"{x.size} elements of {x.dtype}"
        assert there == decoded, f"in another process, a payload of {what} decompresses to another vector"
        assert data == payload.data.tobytes(), f"in another process, {what} become another payload"
