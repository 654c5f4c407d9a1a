"""Reuse of buffers: by whom, when, and how many are kept."""

import gc
import os
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest

import qcomp

pytest.importorskip("numba")

from qcomp.backends import numba_cpu
from qcomp.backends.numba_cpu import memory

empty = partial(memory.empty, dtype=np.dtype(np.float32))

LARGE = 1 << 18
"""The number of float32 elements in the smallest buffer that is reused."""


@pytest.fixture(autouse=True)
def stock(monkeypatch):
    monkeypatch.setattr(memory, "_stock", memory._Stock())
    return memory._stock


def address(x):
    return x.__array_interface__["data"][0]


def idle(stock):
    """Return the number of idle bytes after another buffer was requested."""
    empty((LARGE + 1,))
    return sum(block.nbytes for block in stock._idle)


def test_memory_is_used_again_when_nobody_refers_to_it():
    x = empty((3, LARGE))
    assert (x.shape, x.dtype, x.flags.c_contiguous, x.flags.writeable) == ((3, LARGE), np.float32, True, True)
    before = address(x)
    del x
    y = empty((3 * LARGE,))
    assert address(y) == before


@pytest.mark.parametrize(
    "keep", [lambda x: x[5:], lambda x: x.reshape(2, -1).T, lambda x: x.view(np.uint8), memoryview]
)
def test_a_view_of_a_part_keeps_the_whole_buffer(keep):
    x = empty((2 * LARGE,))
    before, part = address(x), keep(x)
    del x
    assert address(empty((2 * LARGE,))) != before
    del part
    assert address(empty((2 * LARGE,))) == before


def test_a_tensor_keeps_its_memory():
    torch = pytest.importorskip("torch")
    x = empty((LARGE,))
    before, tensor = address(x), torch.from_numpy(x)[3:]
    del x
    assert address(empty((LARGE,))) != before
    del tensor
    assert address(empty((LARGE,))) == before


def test_two_buffers_in_use_are_distinct():
    buffers = [empty((LARGE,)) for _ in range(5)]
    for number, x in enumerate(buffers):
        x[:] = number
    assert [float(x[0]) for x in buffers] == [0, 1, 2, 3, 4]
    assert len({address(x) for x in buffers}) == 5


def test_small_buffers_and_other_sizes_are_not_reused():
    x, y = empty((LARGE - 1,)), empty((LARGE,))
    before = address(y)
    assert type(x.base) is type(None)
    del x, y
    assert address(empty((LARGE + 8,))) != before
    assert empty((0,)).shape == (0,)
    assert empty(()).shape == ()


def test_idle_memory_is_limited_to_the_memory_in_use_or_a_constant(stock, monkeypatch):
    monkeypatch.setattr(memory, "_KEPT", 5 * 4 * LARGE)
    buffers = [empty((LARGE,)) for _ in range(20)]
    del buffers[:8]
    assert idle(stock) == 8 * 4 * LARGE  # 12 are in use
    buffers.clear()
    assert idle(stock) <= 5 * 4 * LARGE
    memory.release_memory()
    assert stock._idle == []
    assert address(empty((LARGE,)))


def test_the_oldest_idle_buffer_is_freed_first(stock, monkeypatch):
    monkeypatch.setattr(memory, "_KEPT", 8 * LARGE + 100)
    for size in (LARGE, LARGE + 8, LARGE + 16):
        x = empty((size,))
        del x
    empty((LARGE - 1,))
    assert idle(stock) <= memory._KEPT
    assert [block.nbytes for block in stock._idle] == [4 * (LARGE + 8), 4 * (LARGE + 16)]


def test_several_threads_may_allocate_at_once():
    seen = []

    def work(number):
        for _ in range(200):
            x = empty((LARGE,))
            x[:8] = number
            y = empty((LARGE,))
            y[:8] = -number
            if not ((x[:8] == number).all() and (y[:8] == -number).all()):
                seen.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not seen


@pytest.mark.slow
def test_a_buffer_in_a_reference_cycle_may_be_collected_at_any_time():
    """This very thread may hold the lock then: a buffer must come back without taking it."""
    for _ in range(50):
        knot = [empty((LARGE,))]
        knot.append(knot)
        del knot
    gc.collect()
    assert empty((LARGE,)).size == LARGE


FORK = """
import os
from qcomp.backends.numba_cpu import memory
with memory._stock._lock:
    child = os.fork()
    if child == 0:
        os._exit(0 if memory.empty((1 << 20,), memory.np.dtype("f4")).size == 1 << 20 else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_wait_for_a_lock():
    """Run in a process of its own: the child must be forked from a process without other threads."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["0"]


def test_results_of_a_mean_survive_later_means():
    """Means and residuals of older steps that a caller keeps do not change."""
    mean = qcomp.CompressedMean(qcomp.ScaledSign(), topology="two_phase")
    comm = qcomp.comm.LocalCommunicator.alone()
    x = np.random.default_rng(0).standard_normal(2 * LARGE, dtype=np.float32)
    state = mean.init(x, comm)
    kept = []
    with qcomp.backends.use("numba"):
        for _ in range(4):
            result, state = mean(x, state, comm)
            kept.append((result, result.copy(), state.worker[0], state.worker[0].copy()))
    for result, copy, residual, copy_of_residual in kept:
        assert result.tobytes() == copy.tobytes()
        assert residual.tobytes() == copy_of_residual.tobytes()
    assert len({address(result) for result, *_ in kept}) == 4


def test_idle_memory_is_freed_on_request(stock):
    del_me = empty((LARGE,))
    del del_me
    numba_cpu.release_memory()
    assert stock._idle == []
