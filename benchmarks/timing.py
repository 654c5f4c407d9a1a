"""Interleaved timing: every round times every candidate once, next to its baselines.

A disturbance of the machine then affects both alike. A figure is the median over the rounds, its spread the quartiles.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from tqdm import tqdm

__all__ = ["Candidate", "Timer", "interleaved", "machine", "rounded", "spread", "timer"]

Timer = Callable[[], float]
"""Makes a timed call, and returns its seconds."""


LEAST_SECONDS = 2e-3
MOST_REPEATS = 1000


@dataclass(frozen=True)
class Candidate:
    """A timed call and its baselines."""

    row: dict[str, Any]
    """The entries that identify it in the results."""
    time: Timer
    over: dict[str, Timer] = field(default_factory=dict)
    """The timers whose time divides the candidate's, by the name of the ratio."""


def interleaved(candidates: Sequence[Candidate], rounds: int, title: str) -> list[dict[str, Any]]:
    """Return a row for each candidate: the `spread` of its seconds and of its ratios."""
    for candidate in candidates:  # compiles, and touches all memory
        candidate.time()
        for baseline in candidate.over.values():
            baseline()
    samples: list[dict[str, list[float]]] = [{"seconds": [], **{k: [] for k in c.over}} for c in candidates]
    for _ in tqdm(range(rounds), desc=title, unit="round"):
        for candidate, sample in zip(candidates, samples, strict=True):
            seconds = candidate.time()
            sample["seconds"].append(seconds)
            for name, baseline in candidate.over.items():
                sample[name].append(seconds / baseline())
    return [
        candidate.row | {name: spread(values) for name, values in sample.items()}
        for candidate, sample in zip(candidates, samples, strict=True)
    ]


def wall_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one call, averaged over repeats."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def timer(
    call: Callable[[], object],
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    seconds: Callable[[Callable[[], object], int], float] = wall_seconds,
    least: float = LEAST_SECONDS,
) -> Timer:
    """Return a function that returns the seconds of one call.

    Parameters
    ----------
    call : callable
        The timed call.
    context : callable
        Makes the context of the call; entering and leaving it is not timed.
    seconds : callable
        Returns the mean seconds of a number of calls.
    least : float
        The least seconds of a timing; short calls are repeated. The number of repetitions is determined in the first
        timing, after a call that compiles.
    """
    repeats = 0

    def run() -> float:
        nonlocal repeats
        with context():
            if not repeats:
                call()
                once = seconds(call, 1)
                if once < least:
                    once = min(once, seconds(call, 1), seconds(call, 1))
                repeats = max(1, min(MOST_REPEATS, math.ceil(least / once)))
            return seconds(call, repeats)

    return run


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median and the quartiles, to four digits."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return {"median": rounded(median(values)), "quartiles": [rounded(low), rounded(high)]}


def rounded(value: float) -> float:
    """Return a number to four digits."""
    return float(f"{value:.4g}")


EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Extensions of x86-64 on which the time of a matrix product depends."""


def machine() -> dict[str, Any]:
    """Describe the machine in general terms."""
    about = Path("/proc/cpuinfo")
    known = set(about.read_text().split()) if about.exists() else set()
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "extensions": [name for name in EXTENSIONS if name in known],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
