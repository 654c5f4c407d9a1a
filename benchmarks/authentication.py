"""The cost of keyed checksums: CPU seconds for each MB of a message, relative to a copy of it.

    python benchmarks/authentication.py

One thread exchanges with itself: a message is copied to get its tag, hashed, and hashed again by its receiver. The
CPU time of the thread is measured, which does not include other programs. Writes authentication.json.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from timing import Candidate, Timer, interleaved, machine, rounded, timer

from qcomp.comm import AuthenticatedCommunicator, LocalCommunicator

SIZES = (1000, 10_000, 100_000, 1_000_000, 10_000_000)
KEY = bytes(range(32))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--largest", type=int, default=max(SIZES), help="bytes (default: %(default)s)")
    options = parser.parse_args()
    candidates = [candidate(size) for size in SIZES if size <= options.largest]
    results = interleaved(candidates, options.rounds, "authentication")
    for row in results:
        row["seconds_per_megabyte"] = rounded(row["seconds"]["median"] / row["bytes"] * 1e6)
    document = {"machine": machine(), "rounds": options.rounds, "results": results}
    (options.out / "authentication.json").write_text(json.dumps(document, indent=1) + "\n")


def candidate(size: int) -> Candidate:
    """Return an exchange of a rank with itself with tags, relative to one without tags and to a copy."""
    x = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    copy = np.empty_like(x)
    row: dict[str, Any] = {"bytes": size}
    plain = LocalCommunicator.alone()
    over = {
        "over_copy": timer(lambda: np.copyto(copy, x), seconds=processor_seconds),
        "over_plain": exchange(plain, x),
    }
    return Candidate(row, exchange(AuthenticatedCommunicator(plain, KEY), x), over)


def exchange(comm: Any, x: np.ndarray[Any, Any]) -> Timer:
    """Return the timer of a gather over a communicator."""
    return timer(lambda: comm.all_gather(x, [x.size]), seconds=processor_seconds)


def processor_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return this thread's CPU seconds for one call, averaged over repeats."""
    start = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - start) / repeats


if __name__ == "__main__":
    main()
