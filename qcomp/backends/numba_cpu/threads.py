"""Runs kernels, which release the GIL, in the threads of this package's own pool, each on a run of buckets.

numba's ``parallel=True`` is no alternative: its default threading layer ends the process when two threads call it at
once, as the ranks of an in-process world do, and its OpenMP layer does not survive a fork.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import numba

_Result = TypeVar("_Result")

_LEAST_ELEMENTS = 1 << 16
"""Fewest elements that are worth a thread: about 20 microseconds of work, several times the cost of a hand-over."""

# The variables in which launchers store the number of ranks on this node.
_RANKS_ON_NODE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "LOCAL_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


class _Pool:
    """The threads besides the caller's: none until they are needed, and none after a fork."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.threads: int | None = None
        self.executor: ThreadPoolExecutor | None = None

    def submit(
        self, work: Callable[[int, int], _Result], bounds: Sequence[tuple[int, int]]
    ) -> list[Future[_Result]]:
        with self.lock:  # the number of threads must not change in between
            if self.executor is None:
                self.executor = ThreadPoolExecutor(
                    max(1, get_num_threads() - 1), thread_name_prefix="qcomp-numba"
                )
            return [self.executor.submit(work, first, last) for first, last in bounds]

    def resize(self, threads: int | None) -> None:
        with self.lock:
            self.threads, old, self.executor = threads, self.executor, None
        if old is not None:
            old.shutdown()

    def forget(self) -> None:
        """Reset the pool in a forked child, which has none of its parent's threads."""
        self.lock, self.executor = Lock(), None


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)


def default_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of cores that this process may use, divided by the number of ranks on this node.

    So ranks do not take each other's cores by default. ``NUMBA_NUM_THREADS`` limits the number of cores, as it does for
    numba's own threads.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    ranks = next((int(environment[name]) for name in _RANKS_ON_NODE if name in environment), 1)
    return max(1, min(cores, int(numba.config.NUMBA_NUM_THREADS)) // ranks)


def get_num_threads() -> int:
    """Return how many threads a kernel uses on a large array."""
    if _pool.threads is None:
        _pool.threads = default_threads()
    return _pool.threads


def set_num_threads(threads: int | None) -> None:
    """Set how many threads a kernel uses on a large array, in this process; None for `default_threads`."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads!r}; expected at least 1, or None")
    _pool.resize(threads)


def run(work: Callable[[int, int], _Result], buckets: int, bucket_size: int) -> list[_Result]:
    """Call ``work(first, last)`` on runs that together cover all buckets, in as many threads as are worthwhile.

    The bytes of a bucket do not depend on the thread that works on it.
    """
    threads = _pool.threads or get_num_threads()
    if threads > 1:
        threads = min(threads, buckets, buckets * bucket_size // _LEAST_ELEMENTS)
    if threads <= 1:
        return [work(0, buckets)]
    edges = [buckets * i // threads for i in range(threads + 1)]
    others = _pool.submit(work, list(itertools.pairwise(edges[1:])))
    return [work(0, edges[1]), *(other.result() for other in others)]
