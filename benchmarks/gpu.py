"""Bytes per second of the kernels for CUDA devices, relative to a copy on the device that moves as many bytes.

    python benchmarks/gpu.py

Times are measured on the device, by CUDA events. Writes gpu.json and gpu.png, and the tables of README.md. Without a
CUDA device it exits with status 2; ``--dry-run`` runs the whole program at tiny sizes on the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import baselines
import page
import pictures
import torch
from cases import COMPRESSORS, has_kernels, under
from devices import Cpu, Cuda, Device
from matplotlib.figure import Figure
from timing import Candidate, Timer, interleaved, rounded

import qcomp
from qcomp.core import primitives
from qcomp.core.primitives import empty_like

SUBJECTS = ["sign l1", "QSGD 4-bit", "LloydMax 4-bit", "min-max 8-bit"]
DEEPSPEED = "DeepSpeed's operations"
WHATS = ["encode with feedback", "encode, no feedback", "decode", "decode and add"]
WITH_FEEDBACK, NO_FEEDBACK, DECODE, ADD = WHATS
PUBLIC = "encode with feedback, waiting"
FLOATS = {WITH_FEEDBACK: 3, PUBLIC: 3, NO_FEEDBACK: 1, DECODE: 1, ADD: 2}
"""Float32 values read or written per element, besides the payload."""

SMALLEST, LARGEST, STRIDE = 20, 28, 2
DRY_SMALLEST, DRY_LARGEST, DRY_ROUNDS = 10, 12, 2

Case = tuple[dict[str, Any], int, Callable[[], object], str]
"""The names of a row, the bytes to move, the call, and its kernels."""


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="(default: %(default)s)")
    parser.add_argument(
        "--largest", type=int, default=LARGEST, help="log2 of the most elements (default: %(default)s)"
    )
    parser.add_argument("--table", action="store_true", help="only draw and write the tables, from the JSON")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny sizes on the CPU; give another --out, the figures mean nothing",
    )
    options = parser.parse_args()
    path = options.out / "gpu.json"
    if not options.table:
        if options.dry_run:
            document = measure(Cpu(), range(DRY_SMALLEST, DRY_LARGEST + 1), DRY_ROUNDS)
        elif torch.cuda.is_available():
            document = measure(Cuda(), range(SMALLEST, options.largest + 1, STRIDE), options.rounds)
        else:
            parser.exit(2, "gpu.py: torch finds no CUDA device; --dry-run runs the program on the CPU\n")
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
    document = json.loads(path.read_text())
    draw(document["results"], options.out / "gpu.png")
    page.rewrite(options.out, blocks(document))


def measure(device: Device, exponents: range, rounds: int) -> dict[str, Any]:
    """Return all results."""
    missing = without_kernels(device)
    if not device.libraries:
        raise SystemExit("gpu.py: there are no kernels to time")
    results: list[dict[str, Any]] = []
    for exponent in exponents:
        for row in interleaved(candidates(device, 1 << exponent), rounds, f"2^{exponent} elements"):
            row["bytes_per_second"] = rounded(row["bytes"] / row["seconds"]["median"])
            results.append(row)
            names = f"{row['subject']}, {row['what']}, {row['kernels']}"
            speed = f"{row['bytes_per_second'] / 1e9:8.1f} GB/s"
            print(f"{row['elements']:>11,}  {names:<60} {speed}  {page.cell(row['over_copy'])}", flush=True)
    return {"machine": device.describe(), "rounds": rounds, "missing": missing, "results": results}


def without_kernels(device: Device) -> list[str]:
    """Remove and report libraries whose kernels are not available; return the names of these kernels."""
    missing = []
    for library, kernels in list(device.libraries.items()):
        try:
            with qcomp.backends.use(kernels):
                pass
        except (ImportError, ValueError) as error:
            print(f"left out: {kernels}: {error}")
            missing.append(kernels)
            del device.libraries[library]
    return missing


def candidates(device: Device, size: int) -> list[Candidate]:
    """Return all candidates for one size, each compared with a copy that moves as many bytes."""
    found = list(cases(device, size))
    room = max(moved for _, moved, _, _ in found) // 2
    source, target = (device.tensor(room // 4 + 1).view(torch.uint8) for _ in range(2))

    def copy_of(moved: int) -> Timer:
        half = moved // 2  # every byte is read and written
        return device.timer(lambda: target[:half].copy_(source[:half]), nullcontext)

    return [
        Candidate(
            names | {"kernels": kernels, "elements": size, "bytes": moved},
            device.timer(call, under(kernels) if kernels != "none" else nullcontext),
            {"over_copy": copy_of(moved)},
        )
        for names, moved, call, kernels in found
    ]


def cases(device: Device, size: int) -> Iterator[Case]:
    """Yield all candidates of one size."""
    x, residual, out = device.tensor(size), device.tensor(size).zero_(), device.tensor(size).zero_()
    for subject in SUBJECTS:
        compressor = COMPRESSORS[subject]
        payload = compressor.payload_spec(size).nbytes
        for library, kernels in device.libraries.items():
            arrays = [device.array(library, values) for values in (x, residual, out)]
            if not has_kernels(compressor, kernels, arrays[0]):
                print(f"left out: {kernels} has no kernels for {subject}")
                continue
            for what, call in calls_of(compressor, kernels, *arrays).items():
                names = {"subject": subject, "what": what, "arrays": library}
                yield names, 4 * FLOATS[what] * size + payload, call, kernels
    if device.packs:
        yield from deepspeed_cases(device, x, residual)


def calls_of(
    compressor: qcomp.Compressor, kernels: str, x: Any, residual: Any, out: Any
) -> dict[str, Callable[[], object]]:
    """Return the timed calls of a compressor; primitives do not wait for the device, the public call does."""
    key = qcomp.Key()
    with qcomp.backends.use(kernels):
        payload = compressor.compress(x, key=key)
        room = empty_like(residual)
    return {
        WITH_FEEDBACK: lambda: primitives.encode(compressor, x, residual, key, out=room),
        PUBLIC: lambda: qcomp.feedback.compress(compressor, x, residual, key=key, donate=True),
        NO_FEEDBACK: lambda: primitives.encode(compressor, x, None, key),
        DECODE: lambda: primitives.decode(compressor, payload, x, out=out),
        ADD: lambda: primitives.decode(compressor, payload, out, out=out, accumulate=True),
    }


def deepspeed_cases(device: Device, x: torch.Tensor, residual: torch.Tensor) -> Iterator[Case]:
    """Yield DeepSpeed's operations, with the bytes that a sign step must move."""
    momentum, error, size = x.clone(), torch.zeros_like(residual), x.numel()
    codes, scale = baselines.deepspeed_encode(momentum, error, device.packbits)
    calls: dict[str, Callable[[], object]] = {
        WITH_FEEDBACK: lambda: baselines.deepspeed_encode(momentum, error, device.packbits),
        DECODE: lambda: baselines.deepspeed_decode(codes, scale, device.unpackbits),
    }
    for what, call in calls.items():
        names = {"subject": DEEPSPEED, "what": what, "arrays": "torch"}
        yield names, 4 * FLOATS[what] * size + size // 8, call, "none"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time relative to a copy of the same bytes against size, with a panel for each call."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    panels = figure.subplots(1, len(WHATS), sharex=True, sharey=True)
    colours = dict(
        zip([*SUBJECTS, DEEPSPEED], ["#d1495b", "#2e86ab", "#8e6bbf", "#3d9970", "0.4"], strict=True)
    )
    styles = {"torch": "-", "cupy": "--"}
    for panel, what in zip(panels, WHATS, strict=True):
        for subject, colour in colours.items():
            for library, style in styles.items():
                chosen = [
                    r for r in rows if (r["subject"], r["what"], r["arrays"]) == (subject, what, library)
                ]
                points = [(row["elements"], row["over_copy"]) for row in chosen]
                label = f"{subject} ({library})"
                pictures.line(panel, points, style=style, color=colour, label=label)
        pictures.finish(panel, what)
    panels[0].set_ylabel("time over a copy of the same bytes")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the part of the page made from these results."""
    largest = max(row["elements"] for row in document["results"])
    rows = [
        [
            row["subject"],
            row["what"],
            row["kernels"],
            f"{row['bytes_per_second'] / 1e9:.4g}",
            page.cell(row["over_copy"]),
        ]
        for row in document["results"]
        if row["elements"] == largest
    ]
    head = ["", "", "kernels", "GB/s", "time over a copy of the same bytes"]
    left_out = f" Not installed there: {', '.join(document['missing'])}." if document["missing"] else ""
    text = f"{largest:,} elements. {page.made(document)}{left_out}"
    return {"gpu": f"![Time over a copy of the same bytes](gpu.png)\n\n{text}\n\n{page.table(head, rows)}"}


if __name__ == "__main__":
    main()
