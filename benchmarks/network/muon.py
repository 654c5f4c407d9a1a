"""One process that times steps of Muon, beside the forward and backward pass alone and the work of its owners alone.

muon_times.py starts it on every rank. All take turns, so that they are measured over the same period.
"""

import argparse
import itertools
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from race.methods import ALL, BLOCKS, ONE
from race.peers import data_parallel
from race.settings import BETAS, DECAY, others
from race.tasks import TASKS, loss_of
from timing import machine, rounded, spread

import qcomp.torch
from network.launch import RATES
from network.shaped import VARIABLE, limit

__all__ = ["COMPUTED", "PHASES"]

TASK = TASKS["transformer"]
WARM = 2
"""Turns that are not counted: DistributedDataParallel rebuilds its buckets, and kernels are compiled."""
COMPUTED, OWNERS = "forward and backward pass alone", "orthogonalisation alone"
AFTER, DURING = "after the backward pass", "during the backward pass"
PHASES = ("encode", "to owners", "orthogonalise", "to all", "decode and move")
"""The parts of a step without its forward and backward pass; the second and the fourth wait for bytes."""
EXACT: dict[str, Any] = {"compressor": ALL, "update_compressor": ALL}
FEW: dict[str, Any] = {"compressor": qcomp.LloydMax(4), "update_compressor": ONE}
VARIANTS = {"32 + 32 bits": EXACT, "4 + 1 bits": FEW, "4 + 1 bits, in blocks": FEW | BLOCKS}


class Span:
    """An exchange under way, which notes when it began and ended, and its bytes."""

    def __init__(
        self, request: Any, pending: Callable[[], Any], spans: list[tuple[int, float, float]]
    ) -> None:
        sent = request.send if isinstance(request.send, Sequence) else [request.send]
        self.nbytes = sum(x.nbytes for x in sent)
        self.began = time.perf_counter()
        self.pending, self.spans = pending(), spans

    def wait(self) -> Any:
        """Return what arrived."""
        arrived = self.pending.wait()
        self.spans.append((self.nbytes, self.began, time.perf_counter()))
        return arrived


class Watched(qcomp.comm.TorchCommunicator):
    """A communicator that notes its exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[int, float, float]] = []

    def start(self, request: Any) -> Any:
        """Start an exchange."""
        return Span(request, lambda: super(Watched, self).start(request), self.spans)

    def run(self, request: Any) -> Any:
        """Complete an exchange."""
        return self.start(request).wait()

    def longest(self) -> list[float]:
        """Return when the two exchanges with the most bytes began and ended, and forget all."""
        longest = sorted(sorted(self.spans, reverse=True)[:2], key=lambda span: span[1])
        self.spans.clear()
        return [when for _, *both in longest for when in both]


class Training:
    """A model that only computes gradients, or that Muon trains too."""

    def __init__(self, settings: dict[str, Any] | None = None, *, overlapped: bool = False) -> None:
        self.model: Any = TASK.model(0)
        self.done, self.optimizer, self.comm = 0, None, None
        if settings is None:
            return
        names, outside = list(self.model.named_parameters()), others(self.model)
        if overlapped:
            self.model = data_parallel(self.model)
            own: dict[str, Any] = {"model": self.model}
        else:
            self.comm = Watched()
            own = {"comm": self.comm}
        self.optimizer = qcomp.torch.Muon(
            names,
            lr=1e-4,
            weight_decay=DECAY,
            betas=BETAS,
            others=outside,
            adjust_lr_fn="match_rms_adamw",
            **own,
            **settings,
        )

    def step(self) -> list[float]:
        """Make a step, and return this rank's seconds, and those of its phases if they are known."""
        inputs, wanted = TASK.draw(0, dist.get_rank(), self.done)
        self.done += 1
        dist.barrier()
        start = time.perf_counter()
        torch.autograd.backward(loss_of(self.model(inputs), wanted))
        computed = time.perf_counter()
        if self.optimizer is not None:
            self.optimizer.step()
        end = time.perf_counter()
        self.model.zero_grad()
        marks = [] if self.comm is None else [computed, *self.comm.longest(), end]
        phases = [after - before for before, after in itertools.pairwise(marks)]
        return [end - start, *phases]

    def orthogonalise(self) -> list[float]:
        """Return the seconds in which this rank makes the updates of the matrices that it owns."""
        assert self.optimizer is not None
        state = self.optimizer.core_state
        mean: Any = self.optimizer._core(state).mean_of(state)
        shapes = state.exchange.shapes
        owned = [s.tensor for s in mean.layout(shapes, rank=state.rank, size=state.size).own.chunk]
        momenta: Any = state.exchange.server[: len(owned)]
        means = [torch.randn_like(m) for m in momenta]
        dist.barrier()
        start = time.perf_counter()
        mean.rule.updates(means, momenta, owned, [shapes[i] for i in owned])
        return [time.perf_counter() - start]


def timed(link: str, rounds: int, variants: Sequence[str]) -> dict[str, Any]:
    """Return for each variant the seconds of the slowest rank, and their ratios to what the same round has computed."""
    calls: dict[str, Callable[[], list[float]]] = {COMPUTED: Training().step}
    for name in variants:
        after = Training(VARIANTS[name])
        calls[f"{name}, {AFTER}"] = after.step
        calls[f"{name}, {DURING}"] = Training(VARIANTS[name], overlapped=True).step
        calls[f"{name}, {OWNERS}"] = after.orthogonalise
    found: dict[str, list[list[float]]] = defaultdict(list)
    order = list(calls)
    for number in range(-WARM, rounds):
        if number == 0 and dist.get_rank() == 0 and link in RATES:
            limit(os.environ[VARIABLE], dist.get_world_size(), link)
        dist.barrier()
        random.Random(number).shuffle(order)
        for name in order:
            calls[name]()  # the step before it is of the same kind, as in training
            seconds = torch.tensor(calls[name](), dtype=torch.float64)
            own = seconds.tolist()
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if number >= 0:
                found[name].append([seconds[0].item(), *own[1:]])
    computed = [of_round[0] for of_round in found[COMPUTED]]
    results: dict[str, Any] = {COMPUTED: {"seconds": spread(computed)}}
    for name in variants:
        owners = [of_round[0] for of_round in found[f"{name}, {OWNERS}"]]
        for when in (AFTER, DURING, OWNERS):
            steps = [of_round[0] for of_round in found[f"{name}, {when}"]]
            rows = list(zip(steps, computed, owners, strict=True))
            results[f"{name}, {when}"] = {
                "seconds": spread(steps),
                "over computed": spread([step / alone for step, alone, _ in rows]),
                "over computed and orthogonalised": spread(
                    [step / (alone + own) for step, alone, own in rows]
                ),
            }
        phases = zip(*(of_round[1:] for of_round in found[f"{name}, {AFTER}"]), strict=True)
        results[f"{name}, {AFTER}"]["phases"] = {
            phase: rounded(median(values)) for phase, values in zip(PHASES, phases, strict=True)
        }
    return {"link": link, "ranks": dist.get_world_size(), "rounds": rounds, "results": results}


def main() -> None:
    """Time, and write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    document = timed(options.link, options.rounds, options.variants)
    if dist.get_rank() == 0:
        document["machine"] = machine() | {"torch": torch.__version__}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
