"""Startup costs of a process with kernels: imports, and compiling them or reading them from numba's cache."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from timing import spread
from tqdm import tqdm

__all__ = ["measure"]

PROGRAM = """
import json, time

def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

def import_numpy():
    global np
    import numpy as np

def import_qcomp():
    global qcomp
    import qcomp
    qcomp.ScaledSign, qcomp.feedback, qcomp.backends

def import_kernels():
    import qcomp.backends.numba_cpu.kernel_set

found = {"import numpy": seconds(import_numpy), "import qcomp": seconds(import_qcomp)}
found["import the kernels, and numba"] = seconds(import_kernels)
x, residual = np.ones(10_000, np.float32), np.zeros(10_000, np.float32)
for c in qcomp.ScaledSign(), qcomp.QSGD(levels=7, bucket_size=512):
    def compress():
        global payload
        payload, _ = qcomp.feedback.compress(c, x, residual, key=qcomp.Key(), donate=True)

    def decompress():
        c.decompress(payload, like=x, out=x)

    with qcomp.backends.use("numba"):
        found[f"first compress, {c.name}"] = seconds(compress)
        found[f"first decompress, {c.name}"] = seconds(decompress)
print(json.dumps(found))
"""


def measure(starts: int) -> dict[str, dict[str, Any]]:
    """Return seconds by action: imports in all processes, first calls separately for cold and warm caches."""
    samples: dict[str, list[float]] = {}
    for _ in tqdm(range(starts), desc="starting processes", unit="pair"):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                for name, seconds in one_process(NUMBA_CACHE_DIR=cache).items():
                    label = f"{name}, {state} cache" if name.startswith("first") else name
                    samples.setdefault(label, []).append(seconds)
    return {name: spread(values) for name, values in samples.items()}


def one_process(**environment: str) -> dict[str, float]:
    """Run the program in a new process, with these additions to its environment."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(run.stdout)
    return found
