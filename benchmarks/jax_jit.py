"""Time of compression in JAX relative to a copy in JAX, for the pure version eagerly and compiled.

    python benchmarks/jax_jit.py

Runs in one process with all threads that XLA uses. Writes jax.json and jax.png.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import page
import pictures
from matplotlib.figure import Figure
from timing import Candidate, interleaved, machine, rounded, timer

import qcomp

Array = Any

COMPRESSORS: dict[str, qcomp.Compressor] = {
    "sign l1": qcomp.ScaledSign(bucket_size=4096),
    "QSGD 4-bit": qcomp.QSGD(levels=7, bucket_size=512),
    "min-max 8-bit": qcomp.MinMaxUInt8(bucket_size=2048),
}
EXPONENTS = (12, 16, 20, 24)
EAGER_LIMIT = 1 << 20
"""Elements above which the eager pure version is not timed, since it takes seconds."""
STYLES = {"pure": ":", "jax": "-"}
COLOURS = {"encode with feedback": "#d1495b", "decode": "#2e86ab"}


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="(default: %(default)s)")
    parser.add_argument(
        "--largest", type=int, default=EXPONENTS[-1], help="log2 of the most elements (default: %(default)s)"
    )
    parser.add_argument("--picture", action="store_true", help="only draw, from the JSON")
    options = parser.parse_args()
    path = options.out / "jax.json"
    if not options.picture:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(options.largest, options.rounds), indent=1) + "\n")
    draw(json.loads(path.read_text())["results"], options.out / "jax.png")


def measure(largest: int, rounds: int) -> dict[str, Any]:
    """Return all results for sizes up to 2**largest, and print them."""
    results = []
    for exponent in (e for e in EXPONENTS if e <= largest):
        for row in interleaved(candidates(1 << exponent), rounds, f"2^{exponent} elements"):
            # The time to move the bytes, over that of the copy, which reads and writes 4 bytes per element.
            least = row["bytes"] / (8 * row["elements"])
            over_bytes = {
                "median": rounded(row["over_copy"]["median"] / least),
                "quartiles": [rounded(value / least) for value in row["over_copy"]["quartiles"]],
            }
            results.append(row | {"over_bytes": over_bytes})
            names = f"{row['subject']}, {row['what']}, {row['kernels']}"
            ratios = f"over_copy {page.cell(row['over_copy'])}  over_bytes {page.cell(over_bytes)}"
            print(f"{row['elements']:>11,}  {names:<44} {ratios}", flush=True)
    versions = {"jax": jax.__version__, "device": jax.devices()[0].platform}
    return {"machine": machine() | versions, "rounds": rounds, "results": results}


def candidates(size: int) -> list[Candidate]:
    """Return all candidates for one size, compared with a compiled copy."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(size, dtype=np.float32))
    residual = jnp.zeros_like(x)
    compiled_copy = jax.jit(lambda values: values + 0)
    copy = timer(waiting(lambda: compiled_copy(x)))
    found = []
    for kernels in ("pure", "jax"):
        if kernels == "pure" and size > EAGER_LIMIT:
            continue
        for subject, compressor in COMPRESSORS.items():
            for what, (call, nbytes) in calls_of(compressor, x, residual).items():
                row = {
                    "subject": subject,
                    "what": what,
                    "kernels": kernels,
                    "elements": size,
                    "bytes": nbytes,
                }
                context = lambda kernels=kernels: qcomp.backends.use(kernels)  # noqa: E731
                found.append(Candidate(row, timer(waiting(call), context), {"over_copy": copy}))
    return found


def calls_of(
    compressor: qcomp.Compressor, x: Array, residual: Array
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the timed calls of a compressor, and the bytes that each must read and write."""
    key = qcomp.Key()
    with qcomp.backends.use("jax"):
        payload = compressor.compress(x, key=key)

    def encode() -> object:
        made, new = qcomp.feedback.compress(compressor, x, residual, key=key)
        return made.data, new

    return {
        "encode with feedback": (encode, 3 * x.nbytes + payload.nbytes),
        "decode": (lambda: compressor.decompress(payload, like=x), x.nbytes + payload.nbytes),
    }


def waiting(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call that waits for its results."""
    wait: Callable[[object], object] = jax.block_until_ready
    return lambda: wait(call())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time relative to a copy against size, with a panel for each compressor."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    panels = figure.subplots(1, len(COMPRESSORS), sharex=True, sharey=True)
    for panel, subject in zip(panels, COMPRESSORS, strict=True):
        for kernels, style in STYLES.items():
            for what, colour in COLOURS.items():
                chosen = [
                    r for r in rows if (r["subject"], r["what"], r["kernels"]) == (subject, what, kernels)
                ]
                points = [(r["elements"], r["over_copy"]) for r in chosen]
                pictures.line(panel, points, style=style, color=colour, label=f"{what} ({kernels})")
        panel.set(xscale="log", yscale="log", xlabel="float32 elements", title=subject)
        panel.axhline(1, color="0.6", lw=1)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time over a copy in JAX")
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
