"""Time of each primitive over the time of a copy of its input, pure and with each set of kernels.

    python benchmarks/kernels.py --out docs/benchmarks

One process, one thread unless asked otherwise. Every round times every candidate once, the copy included, so that
what disturbs the machine disturbs all alike; the figure is the median of the ratios within a round, with the
quartiles as the spread. Writes kernels.json and kernels.png.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

import qcomp

Array = np.ndarray[Any, np.dtype[np.float32]]

COMPRESSORS = {
    "sign": qcomp.ScaledSign(bucket_size=4096),
    "qsgd 4-bit": qcomp.QSGD(levels=7, bucket_size=512),
    "min-max 8-bit": qcomp.MinMaxUInt8(bucket_size=2048),
}
PURE_LIMIT = 1 << 22
"""Elements above which the pure version is not timed: it takes some twenty copies, or hundreds with draws."""


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--rounds", type=int, default=11, help="(default: %(default)s)")
    parser.add_argument(
        "--largest", type=int, default=25, help="log2 of the most elements (default: %(default)s)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for exponent in range(10, options.largest + 1, 3):
        results += measure(1 << exponent, options.rounds)
    document = {"machine": machine(), "rounds": options.rounds, "results": results}
    (options.out / "kernels.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(results, options.out / "kernels.png")


def machine() -> dict[str, Any]:
    """Describe the machine in general terms."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def measure(size: int, rounds: int) -> list[dict[str, Any]]:
    """Return the ratios of all candidates for one size, and print them."""
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    copy = np.empty_like(x)
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, compressor in COMPRESSORS.items():
        for kernels in qcomp.backends.names():
            if kernels != "pure" or size <= PURE_LIMIT:
                calls |= candidates(name, compressor, kernels, x)
    repeats = max(1, (1 << 20) // size)
    baseline = timer(lambda: np.copyto(copy, x), repeats)
    timers = {key: timer(call, repeats) for key, call in calls.items()}
    baseline()
    for each in timers.values():
        each()  # compiles, and touches all memory
    ratios: dict[tuple[str, str], list[float]] = {key: [] for key in timers}
    for _ in range(rounds):
        for key, each in timers.items():
            ratios[key].append(each() / baseline())
    rows = []
    for (what, kernels), values in ratios.items():
        low, _, high = quantiles(values, n=4)
        rows.append(
            {
                "primitive": what,
                "kernels": kernels,
                "elements": size,
                "over_copy": median(values),
                "quartiles": [low, high],
            }
        )
        print(
            f"{size:>10,}  {what:<36} {kernels:<6} {median(values):8.2f}x  ({low:.2f} to {high:.2f})",
            flush=True,
        )
    return rows


def candidates(
    name: str, compressor: qcomp.Compressor, kernels: str, x: Array
) -> dict[tuple[str, str], Callable[[], object]]:
    """Return what is timed of one compressor under one set of kernels."""
    key = qcomp.Key()
    residual, total, out = np.zeros_like(x), np.zeros_like(x), np.empty_like(x)
    payload = compressor.compress(x, key=key)

    def under(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with qcomp.backends.use(kernels):
                return call()

        return run

    def encode_in_place() -> object:
        return qcomp.feedback.compress(compressor, x, residual, key=key, donate=True)

    return {
        (f"{name}: encode, residual donated", kernels): under(encode_in_place),
        (f"{name}: decode into a buffer", kernels): under(
            lambda: compressor.decompress(payload, like=x, out=out)
        ),
        (f"{name}: decode and add", kernels): under(lambda: compressor.add(payload, total)),
    }


def timer(call: Callable[[], object], repeats: int) -> Callable[[], float]:
    """Return a function that returns the seconds of one call, averaged over repeats."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    return run


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw ratio against size, a panel for each compressor."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(1, len(COMPRESSORS), figsize=(15, 5), sharey=True, layout="constrained")
    colors = {"encode, residual donated": "C3", "decode into a buffer": "C0", "decode and add": "C2"}
    for panel, name in zip(panels, COMPRESSORS, strict=True):
        for what, color in colors.items():
            for kernels, style in (("pure", ":"), ("numba", "-")):
                rows = [r for r in results if (r["primitive"], r["kernels"]) == (f"{name}: {what}", kernels)]
                if rows:
                    xs, ys = [r["elements"] for r in rows], [r["over_copy"] for r in rows]
                    panel.plot(xs, ys, style, color=color, marker="o", ms=4, label=f"{what} ({kernels})")
        panel.set(xscale="log", yscale="log", xlabel="float32 elements", title=name)
        panel.axhline(1, color="0.6", lw=1)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time over a copy of the input")
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
