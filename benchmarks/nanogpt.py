"""Race to a loss in a script of others: nanoGPT's train.py, with methods of torch, torchft and qcomp.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt.py nanoGPT --parts curves        # trains; needs no root
    sudo python benchmarks/nanogpt.py nanoGPT --parts seconds  # times steps on links; needs root and iproute2
    python benchmarks/nanogpt.py --page                        # only writes the tables

The command line is the one of nanoGPT's README for processors, with fewer steps; the text is Python's standard library.
Appends a row to docs/benchmarks/loss/nanogpt.jsonl as soon as a run is done, and skips runs that have a row.
"""

import argparse
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import page
from network.journeys import seconds_to
from network.launch import launch, launch_here
from network.shaped import require_rights
from network.tables import NAMES, NOTHING
from race import plan
from race.script import AS_WRITTEN, printed
from race.standings import label
from timing import machine, spread

from qcomp.cli.corpus import Corpus

TASK, RANKS, STEPS, EVERY, SEEDS = "nanogpt", 2, 600, 30, 2
CHOSEN: tuple[str, ...] = (
    AS_WRITTEN,
    "ddp_muon",
    "bf16_adamw",
    "bf16_muon",
    "powersgd2_muon",
    "torchft_muon",
)
CHOSEN += ("qsgd4_adamw", "muon_4_1", "sparse_muon", "sparse_often_blocks")
"""The script's optimizer under DistributedDataParallel, other methods of torch and torchft, and methods of qcomp."""
SMALL = "--device=cpu --compile=False --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
FIRST, TIMED = 6, 30
"""Steps that are not timed, and steps whose mean is: whole outer rounds."""
ROUNDS = 3
LIMIT = 3600
LINKS = ("10mbit", "100mbit", "1gbit", "10gbit")


def main() -> int:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("repository", type=Path, nargs="?", help="a clone of nanoGPT")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/loss"))
    parser.add_argument("--parts", nargs="+", choices=("curves", "seconds"), default=("curves", "seconds"))
    parser.add_argument("--methods", nargs="+", choices=CHOSEN, default=CHOSEN, metavar="METHOD")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS, metavar="LINK")
    parser.add_argument("--page", action="store_true", help="only write the tables")
    options = parser.parse_args()
    path = options.out / "nanogpt.jsonl"
    if not options.page:
        if "seconds" in options.parts:
            require_rights()
        with prepared(options.repository) as (folder, commit):
            about = {"task": TASK, "ranks": RANKS, "commit": commit, "machine": machine()}
            for row in missing(path, options):
                print(row, flush=True)
                measured = timed if "link" in row else trained
                plan.append(path, json.dumps(row | measured(folder, **row) | about) + "\n")
    page.rewrite(options.out, {"nanogpt": tables(plan.read(path))})
    return 0


@contextmanager
def prepared(repository: Path) -> Iterator[tuple[Path, str]]:
    """Yield a copy of the repository in which the standard library is a data set, and its commit."""
    commit = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "nanoGPT"
        shutil.copytree(repository, folder, ignore=shutil.ignore_patterns(".git"))
        data, corpus = folder / "data" / "library", Corpus.of_standard_library()
        data.mkdir()
        for part, values in (("train", corpus.train), ("val", corpus.validation)):
            values.astype(np.uint16).tofile(data / f"{part}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
        yield folder, commit.stdout.strip()


def missing(path: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what identifies each row that is missing; rows that are appended meanwhile decide about the next ones."""
    for method in options.methods if "curves" in options.parts else ():
        while (rate := plan.next_rate(plan.read(path), TASK, method)) is not None:
            yield {"method": method, "rate": rate, "seed": 0, "steps": STEPS}
    for seed in range(1, SEEDS):
        for method in options.methods if "curves" in options.parts else ():
            row = {"method": method, "rate": plan.best_rate(plan.read(path), TASK, method), "seed": seed}
            if not plan.of(plan.read(path), **row):
                yield row | {"steps": STEPS}
    for link in options.links if "seconds" in options.parts else ():
        for number in range(ROUNDS):
            for method in options.methods:
                row = {"method": method, "link": link, "round": number}
                if not plan.of(plan.read(path), **row):
                    yield row


def trained(folder: Path, method: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Return the validation losses that the script prints."""
    shown, start = ["--eval_iters=50", f"--eval_interval={STEPS // 20}"], time.monotonic()
    losses = ran(folder, method, rate, seed, steps, *shown)["losses"]
    return {"losses": losses, "wall": round(time.monotonic() - start, 1)}


def timed(folder: Path, method: str, link: str, **_: int) -> dict[str, Any]:
    """Return the seconds of a step on a link: the mean over outer rounds."""
    found = ran(folder, method, 1e-3, 0, FIRST + TIMED, "--eval_iters=1", "--log_interval=1", link=link)
    return {"seconds": fmean(seconds for step, seconds in found["seconds"] if step > FIRST)}


def ran(
    folder: Path, method: str, rate: float, seed: int, steps: int, *shown: str, link: str | None = None
) -> dict[str, Any]:
    """Run the script on every rank, and return what it `printed`."""
    schedule = [f"--learning_rate={rate}", f"--min_lr={rate / 10}", f"--warmup_iters={steps // 10}"]
    schedule += [f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
    clip = [] if method == AS_WRITTEN else ["--grad_clip=0.0"]
    place = ["--backend=gloo", "--dataset=library", "--gradient_accumulation_steps=2"]
    own = [
        "--method",
        method,
        "--rate",
        str(rate),
        "--seed",
        str(seed),
        "--steps",
        str(steps),
        "--every",
        str(EVERY),
    ]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "printed"
        program = ["-W", "ignore", "-m", "race.script", *own, "--folder", str(folder), "--out", str(out)]
        program += ["config/train_shakespeare_char.py", *SMALL.split(), *schedule, *clip, *place, *shown]
        if link is None:
            launch_here(RANKS, program, limit_seconds=LIMIT)
        else:
            launch("gloo", RANKS, program, link=link, limit_seconds=LIMIT)
        return printed(out.read_text())


def tables(rows: plan.Rows) -> str:
    """Return the steps to the loss of the script as written, and how much sooner that loss is reached on each link."""
    runs = {method: found for method in CHOSEN if (found := at_best_rate(rows, method))}
    if AS_WRITTEN not in runs:
        return NOTHING
    target = fmean(plan.final(row) for row in runs[AS_WRITTEN])
    head = ["", "rate", "loss after all steps", "steps to the target", *(NAMES[link] for link in LINKS)]
    lines = []
    for method, found in runs.items():
        losses = plan.mean([row["losses"] for row in found])
        steps = seconds_to(target, losses, list(range(STEPS + 1)))
        gains = [gain(rows, method, link, steps) for link in LINKS]
        ends = ", ".join(f"{plan.final(row):.3f}" for row in found)
        name = "the script as it is" if method == AS_WRITTEN else label(method)
        lines.append(
            [name, f"{found[0]['rate']:g}", ends, f"{steps:.0f}" if steps else "not reached", *gains]
        )
    sentence = f"The target is {target:.3f}. nanoGPT at {rows[0]['commit'][:8]}."
    for row in [row for row in rows if "link" in row][:1]:
        words = ", ".join(f"{name} {value}" for name, value in row["machine"].items())
        sentence += f" Steps were timed with {words}."
    return f"{page.table(head, lines)}\n\n{sentence}"


def at_best_rate(rows: plan.Rows, method: str) -> Sequence[Mapping[str, Any]]:
    """Return the trainings of a method at its best rate, a row for each seed; none while that rate is not known."""
    return plan.of(rows, method=method, rate=plan.best_rate(rows, TASK, method))


def gain(rows: plan.Rows, method: str, link: str, steps: float | None) -> str:
    """Return how many times as fast as the script as written a method reaches the target, and seconds of a step."""
    own, written = (
        [row["seconds"] for row in plan.of(rows, method=m, link=link)] for m in (method, AS_WRITTEN)
    )
    if len(own) < 2 or len(written) < 2:
        return ""
    seconds, of_written = spread(own)["median"], spread(written)["median"]
    text = f"{seconds:.3g} s ({min(own):.3g} to {max(own):.3g})"
    return f"{STEPS * of_written / (steps * seconds):.3g}: {text}" if steps else text


if __name__ == "__main__":
    sys.exit(main())
