"""Time how long ranks take to keep copies in the memory of nodes, and to get the newest one back.

    python benchmarks/copies_times.py

Two processes over gloo, as if on one node and on two, keep parts of several sizes and ask for the newest copy. With
two nodes, the second then loses its files, and both ask again. Writes docs/reliability/copies.json and the table of the
page beside it.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
import page
from timing import machine

RANKS = 2
MIB = (1, 16)
MEMORY = Path("/dev/shm")


def main() -> int:
    """Time all cases, and write the file and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/reliability"), help="default: %(default)s")
    parser.add_argument(
        "--mib", type=int, nargs="+", default=MIB, help="sizes of a part, in MiB (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    options = parser.parse_args()
    rows = []
    for nodes in (1, 2):
        for mib in options.mib:
            rows.append({"nodes": nodes, "MiB": mib, **timed(nodes, mib, options.rounds)})
            print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "rounds": options.rounds, "rows": rows}
    (options.out / "copies.json").write_text(json.dumps(document, indent=1) + "\n")
    page.rewrite(options.out, {"copies": table(rows)})
    return 0


def timed(nodes: int, mib: int, rounds: int) -> dict[str, float]:
    """Return the seconds of one case: the medians over rounds of the slower rank's times."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, nodes, mib, rounds, Path(folder)))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(600)
            if process.exitcode != 0:
                raise RuntimeError(f"a rank ended with exit code {process.exitcode}")
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {
        name: round(median(max(pair) for pair in zip(*(each[name] for each in told), strict=True)), 5)
        for name in told[0]
    }


def rank_main(rank: int, nodes: int, mib: int, rounds: int, folder: Path) -> None:
    """Run one rank, and write its seconds to a file."""
    os.environ["QCOMP_HOST"] = f"node{rank % nodes}"
    import torch.distributed as dist  # noqa: PLC0415  (imported by ranks only)

    import qcomp  # noqa: PLC0415

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    comm = qcomp.comm.TorchCommunicator()
    own = folder / f"node{rank % nodes}"
    own.mkdir(exist_ok=True)
    content = np.random.default_rng(rank).bytes(mib << 20)
    seconds: dict[str, list[float]] = {"write": [], "keep": [], "newest": [], "newest, a node lost": []}

    def write(file: IO[bytes]) -> None:
        file.write(content)

    def ready() -> None:
        comm.all_gather(np.zeros(1, np.uint8), [1] * RANKS)

    def took(what: str, action: Any) -> Any:
        ready()
        start = time.perf_counter()
        result = action()
        seconds[what].append(time.perf_counter() - start)
        return result

    copies = qcomp.checkpoint.Copies(comm, every=1, folder=own, job="times")
    for step in range(1, rounds + 1):
        took("write", lambda: (own / f"plain{rank}").write_bytes(content))
        took("keep", lambda step=step: copies.keep(step, write))
        if took("newest", copies.newest).parts != [content]:
            raise RuntimeError("a part has changed")
        if nodes > 1:
            if rank == 1:
                for path in own.glob("qcomp-*/*"):
                    path.unlink()
            if took("newest, a node lost", copies.newest).parts != [content]:
                raise RuntimeError("a part has changed")
    (folder / f"{rank}.json").write_text(
        json.dumps({name: times for name, times in seconds.items() if times})
    )
    ready()
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    head = ["nodes", "MiB of a rank", "write a file, s", "`keep`, s", "ms per MiB", "`newest`, s"]
    head.append("`newest` when a node is lost, s")
    lines = []
    for row in rows:
        lost = row.get("newest, a node lost")
        cells = [str(row["nodes"]), str(row["MiB"]), page.number(row["write"]), page.number(row["keep"])]
        cells += [page.number(1000 * row["keep"] / row["MiB"]), page.number(row["newest"])]
        lines.append([*cells, "" if lost is None else page.number(lost)])
    return page.table(head, lines)


if __name__ == "__main__":
    sys.exit(main())
