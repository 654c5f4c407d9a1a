"""Kill, stop and unplug ranks while they exchange or train, and time how long the others take to notice.

    sudo python benchmarks/fault_times.py                  # all cases, about an hour
    python benchmarks/fault_times.py --faults SIGKILL --cases 20   # a trial of about 20 cases, spread over all

Writes a row for each case to docs/reliability/faults.jsonl, in place of that case's earlier row, and the tables of
the page beside it. Only unplugging needs root.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import page
from faults.rank import PHASES, SILENCE, TIMEOUT, UNPLUG, Case
from network.launch import RankError, launch
from timing import machine

from qcomp.comm import patience

RANKS = 3
MOMENTS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
CASES = [
    Case(*case)
    for case in (
        *itertools.product(("gloo", "mpi"), PHASES, ("SIGKILL", "SIGSTOP"), (0, 2), MOMENTS),
        *itertools.product(("gloo",), PHASES, (UNPLUG,), (0, 2), MOMENTS[::3]),
        *itertools.product(("gloo",), PHASES, (UNPLUG,), (0, 2), MOMENTS[::3], (None,)),
    )
]
LATEST = {
    ("SIGKILL", SILENCE): 1.0,
    ("SIGSTOP", SILENCE): SILENCE * 1.5,
    (UNPLUG, SILENCE): SILENCE * 1.5,
    (UNPLUG, None): patience.SILENCE + 1.0,
}
"""Seconds within which every survivor must notice a fault, with a silence; an unplugged rank must, too."""
FAULTS = ["SIGKILL", "SIGSTOP", UNPLUG]
PATIENCE = 60.0
"""Seconds after the fault from which on a survivor counts as hung."""
LONGEST_START = 300.0


def main() -> int:
    """Run the cases, and write the rows and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/reliability"), help="default: %(default)s")
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many (default: all)")
    parser.add_argument("--transports", nargs="+", choices=("gloo", "mpi"), default=["gloo", "mpi"])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--page", action="store_true", help="only write the tables, from the file")
    options = parser.parse_args()
    if options.cases < 1:
        parser.error(f"--cases is {options.cases}; expected at least 1, or --page to write only the tables")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "faults.jsonl"
    if not options.page:
        chosen = [c for c in CASES if c.transport in options.transports and c.fault in options.faults]
        chosen = chosen[:: max(1, len(chosen) // options.cases)]
        rows = [
            row for row in _read(path) if not any(case._asdict().items() <= row.items() for case in chosen)
        ]
        for number, case in enumerate(chosen):
            rows.append({**case._asdict(), **judged(case)})
            print(f"{number + 1} of {len(chosen)}", json.dumps(rows[-1]), flush=True)
        about = json.dumps({"machine": machine(), "timeout": TIMEOUT, "ranks": RANKS})
        path.write_text("".join(line + "\n" for line in [about, *map(json.dumps, rows)]))
    rows = _read(path)
    page.rewrite(options.out, {"faults": summary(rows)})
    print(summary(rows))
    return 1 if any(row["outcome"] in ("hung", "broken") for row in rows) else 0


def judged(case: Case) -> dict[str, Any]:
    """Run a case, and return its outcome for the survivors."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = _unplugged if case.fault == UNPLUG else _gloo if case.transport == "gloo" else _mpi
        ended = run(case, folder)
        diaries = [_diary(folder / f"{rank}.jsonl") for rank in range(RANKS)]
    struck = [line["time"] for line in diaries[case.victim] if line["event"] == "struck"]
    survivors = [diary for rank, diary in enumerate(diaries) if rank != case.victim or case.fault == UNPLUG]
    ends = [diary[-1] if diary else {"event": "hung"} for diary in survivors]
    broken = [end for end in ends if end["event"] != "noticed"]
    if struck and ended is not None and broken and all(end["event"] == "hung" for end in broken):
        return {"outcome": "ended by the launcher", "seconds": round(ended - struck[0], 3)}
    if broken:
        return {"outcome": "broken" if broken[0]["event"] == "broke" else "hung", "text": str(broken)[:2000]}
    if not struck:
        return {"outcome": "broken", "text": f"the victim was never struck: {diaries}"[:2000]}
    late = max(end["time"] for end in ends) - struck[0]
    return {"outcome": "noticed", "seconds": round(late, 3), "text": ends[0]["text"]}


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, none if it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _diary(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _wait(case: Case, folder: Path, ended: Callable[[], bool]) -> None:
    """Wait until the survivors have ended, at most `PATIENCE` seconds after the fault."""
    start, was_struck = time.monotonic(), False
    while not ended():
        struck = bool(_diary(folder / f"{case.victim}.jsonl"))
        if struck and not was_struck:
            start, was_struck = time.monotonic(), True
        if time.monotonic() > start + (PATIENCE if struck else LONGEST_START):
            return
        time.sleep(0.02)


def _gloo(case: Case, folder: Path) -> None:
    """Run a case over gloo."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "faults.over_gloo"])
    from faults.over_gloo import rank_main  # noqa: PLC0415  (torch only where it is needed)

    ranks = [context.Process(target=rank_main, args=(case, rank, RANKS, folder)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    survivors = [process for rank, process in enumerate(ranks) if rank != case.victim]
    _wait(case, folder, lambda: not any(process.is_alive() for process in survivors))
    for process in ranks:
        process.kill()
        process.join()


def _unplugged(case: Case, folder: Path) -> None:
    """Run a case over gloo, with a network node for each rank."""
    program = ["-m", "faults.over_gloo", json.dumps(case._asdict()), str(folder)]
    with suppress(RankError):  # the diary of a rank that hangs shows it
        launch(case.transport, RANKS, program, limit_seconds=PATIENCE)


def _mpi(case: Case, folder: Path) -> float | None:
    """Run a case over MPI; return when the launcher ended, if it did by itself."""
    launcher = Path(sys.executable).parent / "mpiexec"
    # MPICH's launcher would end the survivors of a killed rank itself.
    command = [str(launcher), "-disable-auto-cleanup", "-n", str(RANKS), sys.executable]
    command += ["-m", "faults.rank", json.dumps(case._asdict()), str(folder)]
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    survivors = [folder / f"{rank}.jsonl" for rank in range(RANKS) if rank != case.victim]
    _wait(case, folder, lambda: job.poll() is not None or all(map(_diary, survivors)))
    ended = None if job.poll() is None else time.monotonic()
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    subprocess.run(["pkill", "-KILL", "-f", str(folder)], check=False)  # ranks may have sessions of their own
    job.wait()
    return ended


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of how many cases were noticed, and how soon."""
    lines = []
    for transport, (kind, silence) in itertools.product(("gloo", "mpi"), LATEST):
        for phase in PHASES:
            about = transport, kind, silence, phase
            own = [
                row for row in rows if (row["transport"], row["fault"], row["silence"], row["phase"]) == about
            ]
            if not own:
                continue
            seconds = [row["seconds"] for row in own if "seconds" in row]
            by_launcher = sum(row["outcome"] == "ended by the launcher" for row in own)
            in_time = sum(value <= LATEST[kind, silence] for value in seconds)
            counts = [len(own), len(seconds) - by_launcher, by_launcher, in_time]
            times = [f"{median(seconds):.2f}", f"{max(seconds):.2f}"] if seconds else ["", ""]
            limit = "default" if silence is None else f"{silence:g} s"
            lines.append([transport, kind, limit, phase, *map(str, counts), *times])
    head = [
        "over",
        "fault",
        "`silence`",
        "during",
        "faults",
        "noticed by all",
        "ended by the launcher",
        "in time",
    ]
    head += ["median, s", "slowest, s"]
    return page.table(head, lines)


if __name__ == "__main__":
    sys.exit(main())
