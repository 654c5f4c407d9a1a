"""Kill, stop, cut off and start replicas at random while they train under torchft's quorums; measure the effects.

    sudo python benchmarks/churn.py --cut --seconds 1800      # half an hour of qcomp
    sudo python benchmarks/churn.py --cut --faces torchft     # two minutes of torchft
    python benchmarks/churn.py                                # without root: no cable is pulled

Writes docs/reliability/churn.json, which keeps its figures of libraries that did not run, and the table of the page
beside it. Exits with 1 if replicas of qcomp had different parameters.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import page
from network.shaped import connect, shaped_network
from timing import machine

HEARTBEAT_SECONDS = 0.5
"""Time without a heartbeat after which the lighthouse counts a replica as dead."""
JOIN_SECONDS = 2.0
"""Time that the lighthouse waits for a replica that sends heartbeats but does not ask for a quorum."""
LONGEST_START = 120.0
FEWEST = 0.5
"""At least this fraction of the replicas is left alive."""

Line = dict[str, Any]


def main() -> int:
    """Run without faults and with them, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/reliability"), help="default: %(default)s")
    parser.add_argument("--peers", type=int, default=8, help="replicas (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="with faults, for each library (default: %(default)s)"
    )
    parser.add_argument("--calm", type=float, default=15.0, help="without faults (default: %(default)s)")
    parser.add_argument(
        "--every", type=float, default=5.0, help="seconds between faults (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: %(default)s)")
    parser.add_argument(
        "--cut",
        action="store_true",
        help="put each replica on a network node, and also pull its cable; needs root",
    )
    parser.add_argument(
        "--faces",
        nargs="+",
        choices=("qcomp", "torchft"),
        default=["qcomp"],
        help="libraries; default: qcomp",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "churn.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    settings = {name: getattr(options, name) for name in ("peers", "seconds", "calm", "every", "seed", "cut")}
    for face in options.faces:
        runs = []
        for seconds, every in ((options.calm, None), (options.seconds, options.every)):
            # In a process of its own, since a process cannot leave a network.
            with (
                shaped_network(options.peers + 1, None) if options.cut else nullcontext() as network,
                ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
            ):
                runs.append(pool.submit(one_run, options, face, network, seconds, every).result())
        results[face] = {"settings": settings, **figures(*runs)}
        print(face, json.dumps(results[face]), flush=True)
        document = {"machine": machine(), "results": results}
        path.write_text(json.dumps(document, indent=1) + "\n")
        page.rewrite(options.out, {"churn": summary(document)})
    return 1 if "qcomp" in options.faces and results["qcomp"]["mismatches"] else 0


def one_run(
    options: argparse.Namespace, face: str, network: str | None, seconds: float, every: float | None
) -> dict[str, Any]:
    """Train replicas in a network with `Run.train`."""
    return Run(face, options.peers, network).train(seconds, every=every, seed=options.seed)


class Run:
    """Replicas of one library as processes of this machine, and their lighthouse; on nodes of a network, if given."""

    def __init__(self, face: str, peers: int, network: str | None) -> None:
        os.environ.setdefault("RUST_LOG", "error")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("QCOMP_KERNELS", "pure")
        from churning.replica import Node, replica_main  # noqa: PLC0415
        from torchft.coordination import LighthouseServer  # noqa: PLC0415  (after RUST_LOG)

        self._face, self._peers, self._main = face, peers, replica_main
        self._network = network
        self._nodes = [Node(network, number) for number in range(peers + 1)]
        self._context = multiprocessing.get_context("forkserver")
        # DistributedDataParallel imports torch._dynamo when it is first used, which takes seconds.
        self._context.set_forkserver_preload(["churning.replica", "torch._dynamo"])
        self._nodes[-1].enter()
        self._lighthouse = LighthouseServer(
            bind=f"{self._nodes[-1].address}:0",
            min_replicas=1,
            join_timeout_ms=round(1000 * JOIN_SECONDS),
            quorum_tick_ms=20,
            heartbeat_timeout_ms=round(1000 * HEARTBEAT_SECONDS),
        )
        port = self._lighthouse.address().rsplit(":", 1)[1]
        self._address = f"http://{self._nodes[-1].address}:{port}"
        self._live: dict[int, Any] = {}
        self._stopped: set[int] = set()
        self._cut: set[int] = set()
        self._paths: dict[int, Path] = {}
        self._started = 0
        self.faults: list[Line] = []

    def train(self, seconds: float, *, every: float | None, seed: int) -> dict[str, Any]:
        """Wait until all replicas share a quorum, then train for ``seconds``, with a fault every ``every`` seconds.

        Returns the events of the replicas, the faults, and when the training began and ended.
        """
        chance = random.Random(seed)
        with tempfile.TemporaryDirectory() as name:
            self._folder = Path(name)
            try:
                for peer in range(self._peers):
                    self._start(peer)
                self._await_all()
                begin = time.monotonic()
                due = begin + (every or seconds)
                while time.monotonic() < begin + seconds:
                    if time.monotonic() >= due:
                        due += every or seconds
                        self._strike(chance)
                    self._restart_ended()
                    time.sleep(0.02)
                end = time.monotonic()
            finally:
                for process in self._live.values():
                    process.kill()
                    process.join()
                self._lighthouse.shutdown()
            diaries = {path.stem: _lines(path) for path in sorted(self._folder.iterdir())}
        return {"begin": begin, "end": end, "diaries": diaries, "faults": self.faults}

    def _start(self, peer: int) -> None:
        path = self._folder / f"{self._started}.jsonl"
        self._started += 1
        process = self._context.Process(
            target=self._main,
            args=(self._face, f"replica{peer}", self._address, self._nodes[peer], path),
            daemon=True,
        )
        process.start()
        self._live[peer] = process
        self._paths[peer] = path

    def _await_all(self) -> None:
        deadline = time.monotonic() + LONGEST_START
        while time.monotonic() < deadline:
            last = [_lines(path)[-1:] for path in self._paths.values() if path.exists()]
            if len(last) == self._peers and all(x and x[0].get("size") == self._peers for x in last):
                return
            time.sleep(0.05)
        raise TimeoutError(f"{self._peers} replicas did not come together within {LONGEST_START:g} s")

    def _strike(self, chance: random.Random) -> None:
        """Resume the replica that was last stopped or cut off, then kill, stop, cut off or start one."""
        while self._stopped:
            peer = self._stopped.pop()
            os.kill(self._live[peer].pid, signal.SIGCONT)
            self._note("continue", peer)
        while self._cut:
            peer = self._cut.pop()
            self._connect(peer, up=True)
            self._note("mend", peer)
        missing = sorted(set(range(self._peers)) - set(self._live))
        few = len(self._live) - 1 < FEWEST * self._peers
        strikes = ["kill", "stop", *(["cut"] if self._network else [])]
        kind = chance.choice([*(["join"] if missing else []), *([] if few else strikes)])
        peer = chance.choice(missing if kind == "join" else sorted(self._live))
        self._note(kind, peer)
        if kind == "join":
            self._start(peer)
        elif kind == "stop":
            os.kill(self._live[peer].pid, signal.SIGSTOP)
            self._stopped.add(peer)
        elif kind == "cut":
            self._connect(peer, up=False)
            self._cut.add(peer)
        else:
            self._live[peer].kill()
            self._live.pop(peer).join()

    def _connect(self, peer: int, *, up: bool) -> None:
        assert self._network is not None
        connect(self._network, peer, up=up)

    def _restart_ended(self) -> None:
        """Restart replicas that ended with an error."""
        for peer, process in list(self._live.items()):
            if not process.is_alive():
                self._note("ended", peer)
                self._start(peer)

    def _note(self, kind: str, peer: int) -> None:
        self.faults.append({"kind": kind, "time": time.monotonic(), "diary": self._paths[peer].stem})


def _lines(path: Path) -> list[Line]:
    """Return the lines that a replica has written, without the last one if it is incomplete."""
    found = []
    for text in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(text))
    return found


def figures(calm: Mapping[str, Any], stormy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a library."""
    kinds = [fault["kind"] for fault in stormy["faults"]]
    recovered, resumed, mended = _recoveries(stormy)
    return {
        **{kind: kinds.count(kind) for kind in ("kill", "stop", "cut", "join", "ended")},
        "committed": len(_committed(stormy)),
        "mismatches": mismatches(stormy["diaries"].values()),
        "longest_pause_seconds": round(_longest_pause(stormy), 2),
        "longest_wait_seconds": round(_longest_wait(stormy), 2),
        "longest_pause_without_faults_seconds": round(_longest_pause(calm), 2),
        "steps_per_second": round(_rate(stormy), 3),
        "steps_per_second_without_faults": round(_rate(calm), 3),
        "goodput": round(_rate(stormy) / _rate(calm), 3),
        "recoveries": len(recovered),
        "median_recovery_seconds": round(median(recovered), 2) if recovered else None,
        "longest_recovery_seconds": round(max(recovered), 2) if recovered else None,
        "longest_after_a_stop_seconds": round(max(resumed), 2) if resumed else None,
        "longest_after_a_cut_seconds": round(max(mended), 2) if mended else None,
    }


def mismatches(diaries: Any) -> int:
    """Return the number of steps that replicas of one quorum committed with different parameters."""
    digests = defaultdict(set)
    for diary in diaries:
        for line in diary:
            if line["event"] == "committed":
                digests[line["quorum"], line["step"]].add(line["digest"])
    return sum(len(found) > 1 for found in digests.values())


def _committed(run: Mapping[str, Any]) -> list[Line]:
    """Return the commits of all replicas between begin and end, in order."""
    every = [
        line
        for diary in run["diaries"].values()
        for line in diary
        if line["event"] == "committed" and run["begin"] <= line["time"] <= run["end"]
    ]
    return sorted(every, key=lambda line: line["time"])


def _longest_pause(run: Mapping[str, Any]) -> float:
    """Return the longest time in which no replica committed a step."""
    times = [run["begin"], *(line["time"] for line in _committed(run)), run["end"]]
    return float(max(after - before for before, after in pairwise(times)))


def _longest_wait(run: Mapping[str, Any]) -> float:
    """Return the longest time between commits of a replica, or from the last to its end, without a stop or cut."""
    longest = 0.0
    for name, diary in run["diaries"].items():
        own = [fault for fault in run["faults"] if fault["diary"] == name]
        end = min([run["end"], *(fault["time"] for fault in own if fault["kind"] in ("kill", "ended"))])
        begins = [fault["time"] for fault in own if fault["kind"] in ("stop", "cut")]
        ends = [fault["time"] for fault in own if fault["kind"] in ("continue", "mend")]
        stops = list(zip_longest(begins, ends, fillvalue=run["end"]))
        times = [line["time"] for line in diary if line["event"] == "committed" and line["time"] < end]
        for before, after in pairwise([*times, end]):
            if after > run["begin"] and not any(stop < after and before < go for stop, go in stops):
                longest = max(longest, after - before)
    return longest


def _rate(run: Mapping[str, Any]) -> float:
    """Return the steps per second of the job; a repeated step counts once."""
    lines = _committed(run)
    return float((lines[-1]["step"] - lines[0]["step"]) / (run["end"] - run["begin"]))


def _recoveries(run: Mapping[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds to the next commit: after a new replica is ready, after a stop ends, and after a cut ends."""
    new: list[float] = []
    resumed: dict[str, list[float]] = {"continue": [], "mend": []}
    for diary in run["diaries"].values():
        ready = [line["time"] for line in diary if line["event"] == "ready"]
        first = [line["time"] for line in diary if line["event"] == "committed"]
        if ready and first and ready[0] > run["begin"]:
            new.append(first[0] - ready[0])
    for fault in run["faults"]:
        if fault["kind"] in resumed:
            later = [
                line["time"]
                for line in run["diaries"].get(fault["diary"], [])  # it may have died before it wrote one
                if line["event"] == "committed" and line["time"] > fault["time"]
            ]
            if later:
                resumed[fault["kind"]].append(later[0] - fault["time"])
    return new, resumed["continue"], resumed["mend"]


def summary(document: Mapping[str, Any]) -> str:
    """Return the table."""
    names = list(document["results"])
    rows: Sequence[tuple[str, str]] = [
        ("kill", "replicas killed"),
        ("stop", "replicas stopped for a while"),
        ("cut", "replicas cut off for a while"),
        ("join", "replicas started"),
        ("ended", "replicas that ended by an error of their own"),
        ("committed", "steps committed, of all replicas"),
        ("mismatches", "steps in which replicas had different parameters"),
        ("longest_pause_seconds", "longest time without a step, s"),
        (
            "longest_wait_seconds",
            "longest time without a step of a replica that lives and was not stopped or cut off, s",
        ),
        ("longest_pause_without_faults_seconds", "longest time without a step if there are no faults, s"),
        ("goodput", "steps over those without faults in the same time"),
        ("median_recovery_seconds", "from the start-up of a replica to its first step, median, s"),
        ("longest_recovery_seconds", "the same, longest, s"),
        ("longest_after_a_stop_seconds", "from the end of a stop to the next step, longest, s"),
        ("longest_after_a_cut_seconds", "from the end of a cut to the next step, longest, s"),
    ]
    found = document["results"]
    times = ["seconds with faults", *(f"{found[name]['settings']['seconds']:g}" for name in names)]
    lines = [
        [text, *("" if found[name][key] is None else f"{found[name][key]:g}" for name in names)]
        for key, text in rows
    ]
    return page.table(["", *names], [times, *lines])


if __name__ == "__main__":
    sys.exit(main())
