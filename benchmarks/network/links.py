"""One process that measures the inputs of the cost model: each link, and the speed of each compressor.

network_times.py starts it on every rank. It does the same as ``qcomp plan --measure``, and writes the same format, for
one link after the other.
"""

import argparse
import os
from importlib import import_module
from pathlib import Path

import numpy as np

import qcomp
from network.methods import METHODS
from network.shaped import VARIABLE, limit
from qcomp.planning import measure

ELEMENTS = 10_500_000


def main() -> None:
    """Measure all links, and write a file for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--out", nargs="+", type=Path, required=True, help="a file for each of the links")
    options = parser.parse_args()
    comm = qcomp.comm.world()
    torch = import_module("torch")
    values = np.random.default_rng(comm.rank).standard_normal(options.elements, dtype=np.float32)
    specs = dict.fromkeys(m.compressor for m in METHODS.values() if m.compressor is not None)
    compressors = [qcomp.compressor(spec) for spec in specs]
    like = torch.from_numpy(values)
    for link, path in zip(options.links, options.out, strict=True):
        if comm.rank == 0 and link != "loopback":
            limit(os.environ[VARIABLE], comm.size, link)
        measured = measure(comm, compressors, like=like, rounds=options.rounds)
        if comm.rank == 0:
            measured.save(path)


if __name__ == "__main__":
    main()
