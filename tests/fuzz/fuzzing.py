"""Feeds inputs to a target; records the errors, the time, and the memory."""

import time
import tracemalloc
from dataclasses import dataclass, field

import numpy as np

LEAST_BYTES, TIMES = 1 << 19, 64
"""A reader may allocate LEAST_BYTES plus TIMES times the bytes of its input and of the expected vectors."""


@dataclass
class Report:
    """The results of the tries."""

    inputs: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    """The longest reading in seconds, and the name of its input."""
    largest: tuple[int, str] = (0, "")
    """The most bytes allocated at the same time, and the name of the input."""

    def add(self, other):
        """Add the results of another report."""
        self.inputs += other.inputs
        self.refused += other.refused
        self.faults += other.faults
        self.slowest = max(self.slowest, other.slowest)
        self.largest = max(self.largest, other.largest)

    def __str__(self):
        seconds, slow = self.slowest
        size, large = self.largest
        lines = [
            f"{self.inputs} inputs, {self.refused} of them refused, {len(self.faults)} faults",
            f"slowest: {seconds * 1000:.1f} ms, {slow}",
            f"largest allocation: {size} bytes, {large}",
        ]
        return "\n".join([*lines, *self.faults])


def fuzz(target, numbers):
    """Read the inputs with these numbers; a number always makes the same input."""
    report = Report()
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        for number in numbers:
            try_one(target, number, report)
    finally:
        if started:
            tracemalloc.stop()
    return report


def try_one(target, number, report):
    name = f"input {number} of {target.name}"
    data, vector_bytes, read = target.make(np.random.default_rng(number))
    most = LEAST_BYTES + TIMES * (len(data) + vector_bytes)
    report.inputs += 1
    error, seconds, size = measured(read)
    if size > most:  # the first reading may have compiled something
        error, seconds, size = measured(read)
    if isinstance(error, target.errors):
        report.refused += 1
    elif error is not None:
        report.faults.append(f"{name}: {type(error).__name__}: {error} ({data[:64].hex()})")
    if size > most:
        report.faults.append(f"{name}: allocates {size} bytes for {len(data)} ({data[:64].hex()})")
    report.slowest = max(report.slowest, (seconds, name))
    report.largest = max(report.largest, (size, name))


def measured(read):
    """Return the error of a reading, its seconds, and the most bytes that it allocates at once."""
    error = None
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    start = time.perf_counter()
    try:
        with np.errstate(all="ignore"):  # a damaged scale may be any number
            read()
    except Exception as caught:
        error = caught.with_traceback(None)
    return error, time.perf_counter() - start, tracemalloc.get_traced_memory()[1] - before
