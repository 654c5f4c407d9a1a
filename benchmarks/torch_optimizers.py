"""CPU time of a step of the optimizers for torch, relative to torch's AdamW.

    python benchmarks/torch_optimizers.py

Steps are timed in a world of one, where qcomp sends nothing, and on two ranks over gloo, where the share of the
communicator is also given. Every round times each optimizer, and AdamW fused, foreach and by default, on one thread.
Writes torch_optimizer.json, and the table of README.md.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import page
import torch
import torch.distributed as dist
from timing import Timer, machine, spread
from torch import nn

import qcomp
import qcomp.torch
from qcomp.backends import numba_cpu

RATE = 1e-6
PEERS: dict[str, Any] = {
    "torch, fused": {"fused": True},
    "torch, foreach": {"foreach": True},
    "torch, default": {},
}
OPTIMIZERS = ("CompressedSGD", "OneBitAdam", "OneBitLamb", "QAdam", "ZeroOneAdam")
STAGES = ("exact", "compressed")
RANKS = 2
TURN = 3
"""Steps of one timing."""


def network() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


def shapes_of_network() -> list[tuple[int, ...]]:
    """Return the shapes of its parameters, for images of 32 by 32."""
    model = network()
    model(torch.zeros(2, 3, 32, 32))
    return [tuple(p.shape) for p in model.parameters()]


MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "1 x 10,000,000": lambda: [(10_000_000,)],
    "100 x 100,000": lambda: [(250, 400)] * 100,  # matrices: a vector among other tensors stays exact
    "a small CNN": shapes_of_network,
}


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--table", action="store_true", help="only write the table, from the JSON")
    options = parser.parse_args()
    path = options.out / "torch_optimizer.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine() | {"torch": torch.__version__}, "rounds": options.rounds}
        document["results"] = [
            row for ranks in (1, RANKS) for row in measured(ranks, options.models, options.rounds)
        ]
        path.write_text(json.dumps(document, indent=1) + "\n")
    page.rewrite(options.out, blocks(json.loads(path.read_text())))


def measured(ranks: int, models: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Return the results of rank 0 in a world of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]  # not exported by name
        spawn(run_rank, (ranks, folder, models, rounds), nprocs=ranks)
        found: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return found


def run_rank(rank: int, ranks: int, folder: str, models: Sequence[str], rounds: int) -> None:
    """Measure on one rank; rank 0 writes the results."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numba_cpu.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = [row for model in models for row in of_model(model, ranks, rounds)]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


class Timed(qcomp.comm.TorchCommunicator):
    """A communicator that counts the CPU seconds of its exchanges."""

    seconds = 0.0

    def start(self, request: Any) -> Any:
        """Start an exchange, and count both the start and the wait."""
        pending = self._counted(super().start, request)
        return Waited(lambda: self._counted(pending.wait))

    def run(self, request: Any) -> Any:
        """Exchange, and count."""
        return self._counted(super().run, request)

    def _counted(self, exchange: Callable[..., Any], *args: Any) -> Any:
        start, before = time.process_time(), self.seconds
        try:
            return exchange(*args)
        finally:
            self.seconds = before + time.process_time() - start  # even if one of these calls another


class Waited(NamedTuple):
    """A started exchange."""

    wait: Callable[[], Any]


def of_model(model: str, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Return the results of one model."""
    shapes = MODELS[model]()
    timers: dict[str, Timer] = {}
    comms: dict[str, Timed] = {}
    for name, way in PEERS.items():
        timers[name] = cpu_timer(torch.optim.AdamW(drawn(shapes), lr=RATE, **way).step)
    for kind in OPTIMIZERS:
        for stage in STAGES:
            name, comm = f"{kind}, {stage}", Timed() if ranks > 1 else None
            timers[name] = cpu_timer(optimizer(kind, stage, drawn(shapes), comm).step)
            if comm is not None:
                comms[name] = comm
    samples: dict[str, list[float]] = {name: [] for name in timers}
    shares: dict[str, list[float]] = {name: [] for name in comms}
    for turn in range(rounds + 1):
        for name, each in timers.items():
            before = comms[name].seconds if name in comms else 0.0
            seconds = each()
            if not turn:  # compiles, and touches all memory
                continue
            samples[name].append(seconds)
            if name in comms:
                shares[name].append((comms[name].seconds - before) / (TURN * seconds))
    best = min(PEERS, key=lambda name: median(samples[name]))
    return [
        {
            "model": model,
            "ranks": ranks,
            "by": name,
            "peer": best,
            "seconds": spread(seconds),
            "over_torch": spread([own / peer for own, peer in zip(seconds, samples[best], strict=True)]),
            **({"share_of_exchange": spread(shares[name])} if name in shares else {}),
        }
        for name, seconds in samples.items()
    ]


def drawn(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    """Return parameters with gradients, the same on all ranks."""
    draws = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=draws)
    return params


def optimizer(kind: str, stage: str, params: list[nn.Parameter], comm: Any) -> qcomp.torch.AveragingOptimizer:
    """Return an optimizer that has reached a stage and stays there."""
    if kind == "CompressedSGD":
        settings: dict[str, Any] = {"exact": stage == "exact"}
    else:
        settings = {"freeze": 10**9 if stage == "exact" else 1}
        settings |= {"variance_steps": None} if kind == "QAdam" else {}
    made: qcomp.torch.AveragingOptimizer = getattr(qcomp.torch, kind)(params, lr=RATE, comm=comm, **settings)
    for _ in range(2):
        made.step()
    return made


def cpu_timer(call: Callable[[], object]) -> Timer:
    """Return a timer of the CPU seconds of one call.

    A fixed number of calls, unlike `timing.timer`: all ranks must make the same steps.
    """

    def run() -> float:
        start = time.process_time()
        for _ in range(TURN):
            call()
        return (time.process_time() - start) / TURN

    return run


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the part of the page made from these results."""
    found = {(row["by"], row["model"], row["ranks"]): row for row in document["results"]}
    kinds = dict.fromkeys((model, ranks) for _, model, ranks in found)
    cells = []
    for name in dict.fromkeys(row["by"] for row in document["results"]):
        rows = [found[name, *kind] for kind in kinds]
        shares = [
            f"; {100 * row['share_of_exchange']['median']:.0f}%" if "share_of_exchange" in row else ""
            for row in rows
        ]
        cells.append(
            [name, *(page.cell(row["over_torch"]) + share for row, share in zip(rows, shares, strict=True))]
        )
    head = ["", *(f"{model}, {ranks} rank{'s' * (ranks > 1)}" for model, ranks in kinds)]
    text = (
        "CPU time of a step over that of torch's AdamW, fused, foreach or by default, whichever is the "
        "fastest; on several ranks also "
        f"the share of the communicator. {page.made(document)}"
    )
    return {"torch optimizer": f"{text}\n\n{page.table(head, cells)}"}


if __name__ == "__main__":
    main()
