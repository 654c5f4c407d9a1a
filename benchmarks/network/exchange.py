"""One process of the exchange benchmark: the 1-bit payloads of a gradient of 100 MB, over gloo or MPI.

network_times.py starts it on every rank. It alternately times the exchanges of the payloads alone and the whole mean,
which also encodes and decodes; both in the topology that the mean selects.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from timing import machine, spread
from tqdm import tqdm

import qcomp
from network.shaped import VARIABLE, limit
from qcomp.core.numeric.arrays import from_host_bytes
from qcomp.planning.network import agreed

ELEMENTS = 25_000_000
COMPRESSOR = qcomp.ScaledSign()
WARM = 2


class Exchanges:
    """The timed calls on this rank."""

    def __init__(self, comm: Any, elements: int, arrays: str) -> None:
        values = np.random.default_rng(comm.rank).standard_normal(elements, dtype=np.float32)
        self.comm = comm
        self.source: Any = import_module("torch").from_numpy(values) if arrays == "torch" else values
        # A donated gradient holds the residual afterwards, so the next one needs another buffer.
        self.buffers_of_gradients: list[Any] = [self.source + 0, self.source + 0]
        self.mean = qcomp.CompressedMean(COMPRESSOR, "auto")
        self.state = self.mean.init(self.source, comm)
        self.in_two_phases = self.state.topology == "two_phase"
        chunks = self.mean.layout([(elements,)], rank=comm.rank, size=comm.size).chunks
        sizes = [sum(segment.size for segment in chunk) for chunk in chunks]
        self.shares = [COMPRESSOR.payload_spec(size).nbytes for size in sizes]
        self.buffers = [from_host_bytes(bytes(share), self.source) for share in self.shares]
        self.step = 0

    def exchange(self) -> Callable[[], object]:
        """Return a call that sends payloads of the right lengths."""
        comm = self.comm

        def two_phases() -> None:
            comm.all_to_all(self.buffers, [self.shares[comm.rank]] * comm.size)
            comm.all_gather(self.buffers[comm.rank], self.shares)

        def gather() -> None:
            comm.all_gather(self.buffers[0], self.shares * comm.size)

        return two_phases if self.in_two_phases else gather

    def whole(self) -> Callable[[], object]:
        """Return a call that averages a new gradient."""
        self.step += 1
        own = self.buffers_of_gradients[self.step % 2]
        own[:] = self.source
        key = qcomp.Key(step=self.step, rank=self.comm.rank)

        def run() -> None:
            _, self.state = self.mean(own, self.state, self.comm, key=key, donate=True)

        return run

    def timed(self, run: Callable[[], object]) -> tuple[float, int]:
        """Return the seconds of the slowest rank, and the bytes that this rank sent."""
        self.comm.all_gather(self.buffers[0][:1], [1] * self.comm.size)
        before, start = self.comm.bytes_sent, time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        sent = self.comm.bytes_sent - before
        return max(value for (value,) in agreed(self.comm, [seconds], self.source)), sent


def main() -> None:
    """Run all links, and write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", choices=("gloo", "mpi"), required=True)
    parser.add_argument("--links", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    comm = qcomp.comm.world()
    kinds = {"gloo": "torch", "mpi": "numpy"}
    exchanges = Exchanges(comm, options.elements, kinds[options.transport])
    kinds_of_run = {"exchange": exchanges.exchange, "mean": exchanges.whole}
    results = {}
    for link in [None, *options.links]:
        if comm.rank == 0 and link is not None:
            limit(os.environ[VARIABLE], comm.size, link)
        rounds, title = (WARM, "warm-up, no limit") if link is None else (options.rounds, link)
        samples: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds_of_run}
        described = f"{options.transport}, {comm.size} ranks, {title}"
        for _ in tqdm(range(rounds), desc=described, unit="round", disable=comm.rank != 0):
            for kind, make in kinds_of_run.items():
                samples[kind].append(exchanges.timed(make()))
        if link is not None:
            results[link] = {
                kind: {"seconds": spread([s for s, _ in values]), "sent": values[-1][1]}
                for kind, values in samples.items()
            }
    if comm.rank == 0:
        document = {
            "transport": options.transport,
            "ranks": comm.size,
            "elements": options.elements,
            "rounds": options.rounds,
            "machine": machine(),
            "links": results,
        }
        options.out.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
