"""Train scripts like public ones beside their conversions to qcomp, and resume both: losses, times, changed lines.

    python benchmarks/conversions.py                        # all scripts; takes half an hour
    python benchmarks/conversions.py --scripts nanogpt dino # some, whose rows are replaced
    python benchmarks/conversions.py --table                # only writes the table, from the JSON

The scripts are in examples/like/. A conversion is a unified diff beside its script. A script and its conversions run on
two ranks each and take turns of a second, during which the others are stopped, so that disturbances meet all. Each also
resumes from what it had saved after 220 steps, between two checkpoints, as if it had been killed there: on as many
ranks, and on another number. Writes conversions.json, and the table of README.md.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import page
import psutil
from timing import machine, rounded

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "like"
FROM_PAGE = "../../../examples/like"
RANKS, OTHER_RANKS = 2, 1
ORIGINAL = "original"
FREEZE = 100
"""The last exact step in the conversions that freeze a variance."""
TURN = 1.0
"""Seconds after which a script stops for the other."""
LIMIT = 1800
"""Seconds after which a job is killed."""
LOSS = re.compile(r"^(?!.*(?:eval_loss|train_runtime)).*loss\W+(\d[\d.]*(?:e-?\d+)?)", re.IGNORECASE)
VALIDATION = re.compile(r"\bval (?:loss|error)\W+([\d.]+)")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}")
MPIRUN = (str(Path(sys.executable).parent / "mpirun"), "-n", "{ranks}", sys.executable, "-m", "mpi4py")


@dataclass(frozen=True)
class Script:
    """How a script is started and resumed."""

    like: str
    """What it is like."""
    options: tuple[str, ...]
    """Options of each run, with the folder of its files as ``{out}``."""
    resume: tuple[str, ...] = ()
    """Further options of a run that resumes."""
    launcher: tuple[str, ...] = TORCHRUN
    dies: int = 220
    """The step after which it is as if it had been killed."""
    of_one_size: tuple[str, ...] = ()
    """Conversions whose states fit only the number of ranks that they were made for."""


SCRIPT = {
    "nanogpt": Script("nanoGPT, `train.py`", ("--out_dir={out}",), ("--init_from=resume",)),
    "torchvision_reference": Script(
        "torchvision, `references/classification`",
        ("--output-dir", "{out}"),
        ("--resume", "{out}/checkpoint.pth"),
    ),
    "dino": Script("DINO, `main_dino.py`", ("--output_dir", "{out}")),
    "mae_finetune": Script(
        "MAE, `main_finetune.py`", ("--output_dir", "{out}"), ("--resume", "{out}/checkpoint.pth")
    ),
    "mingpt": Script("minGPT, `Trainer`", ("--snapshot_path", "{out}/snapshot.pt")),
    "muon_speedrun": Script(
        "Muon, Keller Jordan's groups", ("--out", "{out}"), ("--resume", "{out}/state.pt")
    ),
    "hf_trainer": Script(
        "Hugging Face, `Trainer`",
        ("--output_dir", "{out}"),
        ("--resume_from_checkpoint", "{out}/checkpoint-150"),
    ),
    "accelerate_loop": Script(
        "Accelerate, complete example",
        ("--output_dir", "{out}"),
        ("--resume_from_checkpoint", "{out}/step_200"),
    ),
    "lightning_module": Script(
        "Lightning, automatic optimization", ("--root", "{out}"), ("--ckpt_path", "{out}/last.ckpt")
    ),
    "optax_loop": Script(
        "optax on a mesh, `pmean`",
        ("--out", "{out}", "--devices", "{ranks}"),
        ("--resume", "{out}/checkpoint.pkl"),
        (sys.executable,),
        of_one_size=("compressed", "onebit"),
    ),
    "mpi_adam": Script(
        "NumPy under MPI, `Allreduce`", ("--out", "{out}"), ("--resume", "{out}/checkpoint.npz"), MPIRUN
    ),
}


def conversions(name: str) -> dict[str, str]:
    """Return the diffs of a script by the name of the conversion."""
    return {path.name.split(".")[1]: path.read_text() for path in sorted(SCRIPTS.glob(f"{name}.*.diff"))}


def changed_lines(diff: str) -> int:
    """Return how many lines a diff changes: of those that it removes and adds in one place, the larger number.

    Empty lines do not count.
    """
    total = removed = added = 0
    for line in [*diff.splitlines()[2:], " "]:
        removed += line.startswith("-") and line[1:].strip() != ""
        added += line.startswith("+") and line[1:].strip() != ""
        if line.startswith((" ", "@")):
            total, removed, added = total + max(removed, added), 0, 0
    return total


def applied(diff: str, text: str) -> str:
    """Return a text as a unified diff changes it.

    Raises
    ------
    ValueError
        If the diff was made from another text.
    """
    old, new, at = text.splitlines(), [], 0
    for line in diff.splitlines()[2:]:
        if line.startswith("@@"):
            start = int(line.split()[1].partition(",")[0][1:]) - 1
            new += old[at:start]
            at = start
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            if old[at] != line[1:]:
                raise ValueError(f"line {at + 1} is {old[at]!r}; the diff expected {line[1:]!r}")
            new += [] if line.startswith("-") else [old[at]]
            at += 1
    return "\n".join([*new, *old[at:]]) + "\n"


def loss_in(line: str) -> float | None:
    """Return the loss of a step, if a script has printed one on this line."""
    found = LOSS.search(line)
    return None if found is None or VALIDATION.search(line) else float(found[1])


class Job:
    """A script on its ranks, which can be stopped for a while.

    Parameters
    ----------
    name : str
        The script.
    code : Path
        The file that runs: the script, or a conversion.
    out : Path
        The folder of its files.
    ranks : int
    resume : bool
        Whether it goes on from what an earlier run has saved there.
    """

    def __init__(self, name: str, code: Path, out: Path, ranks: int = RANKS, *, resume: bool = False) -> None:
        script = SCRIPT[name]
        command = [*script.launcher, str(code), *script.options, *(script.resume if resume else ())]
        self._popen = subprocess.Popen(
            [part.format(ranks=ranks, out=out) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
        self.out, self.saved = out, out.with_name(f"{out.name}-saved")
        self._whole = False
        self._began = time.monotonic()
        self.output: list[str] = []
        self.losses: list[float] = []
        self.seconds: list[tuple[int, float]] = []
        """The number of a step, and its seconds, of steps during which the job was not stopped."""
        self.validation: list[float] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        last = 0.0
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            now = time.monotonic()
            self.output.append(line)
            if found := VALIDATION.search(line):
                self.validation.append(float(found[1]))
            elif (loss := loss_in(line)) is not None:
                if self._whole:
                    self.seconds.append((len(self.losses), now - last))
                self.losses.append(loss)
                last, self._whole = now, True

    @property
    def ended(self) -> bool:
        """Whether it has ended.

        Raises
        ------
        RuntimeError
            If it has failed, or takes too long.
        """
        if time.monotonic() - self._began > LIMIT:
            self.kill()
            raise RuntimeError(f"the job took more than {LIMIT} s:\n{''.join(self.output[-40:])}")
        status = self._popen.poll()
        if status:
            self._reader.join()
            raise RuntimeError(f"the job ended with status {status}:\n{''.join(self.output[-40:])}")
        return status is not None

    def _send(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._popen.pid)
            for process in [*parent.children(recursive=True), parent]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def stop(self) -> None:
        """Stop all its processes."""
        self._whole = False
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let all its processes go on."""
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """End all its processes, as a machine that fails."""
        self._send(signal.SIGKILL)
        self._popen.wait(60)
        self._reader.join(60)

    def run(self, steps: float = float("inf")) -> "Job":
        """Wait until it ends, or has made some steps."""
        while not self.ended and len(self.losses) < steps:
            time.sleep(0.05)
        return self

    def end(self) -> "Job":
        """Wait until it ends and all its output is read."""
        self.run()
        self._reader.join()
        return self


def side_by_side(jobs: Sequence[Job], dies: int) -> None:
    """Run jobs to their ends, in turns; keep a copy of what each has saved when it has made some steps."""
    for job in jobs:
        job.run(2)
        job.stop()
    try:
        while waiting := [job for job in jobs if not job.ended]:
            for job in waiting:
                job.go_on()
                end = time.monotonic() + TURN
                while not job.ended and time.monotonic() < end:
                    if len(job.losses) >= dies and not job.saved.exists():
                        job.stop()
                        shutil.copytree(job.out, job.saved)
                        job.go_on()
                    time.sleep(0.02)
                job.stop()
    finally:
        for job in jobs:
            job.go_on()
    for job in jobs:
        job.end()


def resumed(name: str, way: str, code: Path, saved: Path) -> dict[str, Any]:
    """Return the last validation losses of runs that resume from a folder, on as many ranks and on another number."""
    jobs = {}
    try:
        for ranks in (RANKS,) if way in SCRIPT[name].of_one_size else (RANKS, OTHER_RANKS):
            copy = shutil.copytree(saved, saved.with_name(f"{saved.name}-on{ranks}"))
            jobs[str(ranks)] = Job(name, code, copy, ranks, resume=True)
        return {ranks: job.end().validation[-1] for ranks, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()


def measured(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return what each conversion of a script does beside it."""
    original, diffs = SCRIPTS / f"{name}.py", conversions(name)
    code = {ORIGINAL: original}
    for way, diff in diffs.items():
        code[way] = folder / f"{name}.{way}.py"
        code[way].write_text(applied(diff, original.read_text()))
    jobs: dict[str, Job] = {}
    try:
        for way, path in code.items():
            (folder / way).mkdir()
            jobs[way] = Job(name, path, folder / way)
        side_by_side(list(jobs.values()), SCRIPT[name].dies)
    finally:
        for job in jobs.values():
            job.kill()
    rows = []
    for way, path in code.items():
        job = jobs[way]
        later = [seconds for step, seconds in job.seconds if step > FREEZE + 10]
        rows.append(
            {
                "script": name,
                "way": way,
                "steps": len(job.losses),
                "losses": [rounded(fmean(job.losses[k : k + 50])) for k in range(0, len(job.losses), 50)],
                "validation": job.validation[-1],
                "seconds": rounded(median(later)),
                "resumed": resumed(name, way, path, job.saved),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Train, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks/conversions"), help="(default: %(default)s)"
    )
    parser.add_argument("--scripts", nargs="+", choices=SCRIPT, default=list(SCRIPT), help="(default: all)")
    parser.add_argument("--table", action="store_true", help="only write the table, from the JSON")
    options = parser.parse_args()
    path = options.out / "conversions.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text())["results"] if path.exists() else []
        found = {name: [row for row in known if row["script"] == name] for name in SCRIPT}
        for name in options.scripts:
            with tempfile.TemporaryDirectory() as folder:
                found[name] = measured(name, Path(folder))
            results = [row for each in SCRIPT for row in found.get(each, [])]
            path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    page.rewrite(options.out, blocks(json.loads(path.read_text())))


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the table of the page."""
    head = [
        *(
            "like",
            "conversion",
            "changed lines",
            "validation loss",
            "resumed",
            f"resumed on {OTHER_RANKS} rank",
        ),
        *("ms a step", "over the script's"),
    ]
    rows, seconds = [], 1.0
    for row in document["results"]:
        name, way = row["script"], row["way"]
        if way == ORIGINAL:
            seconds = row["seconds"]
        place = f"{FROM_PAGE}/{name}.py" if way == ORIGINAL else f"{FROM_PAGE}/{name}.{way}.diff"
        rows.append(
            [
                SCRIPT[name].like if way == ORIGINAL else "",
                f"[{way}]({place})",
                "" if way == ORIGINAL else str(changed_lines(conversions(name)[way])),
                f"{row['validation']:.3f}",
                *(
                    f"{row['resumed'][n]:.3f}" if n in row["resumed"] else "-"
                    for n in map(str, (RANKS, OTHER_RANKS))
                ),
                f"{1e3 * row['seconds']:.1f}",
                f"{row['seconds'] / seconds:.2f}",
            ]
        )
    return {"conversions": page.table(head, rows)}


if __name__ == "__main__":
    main()
