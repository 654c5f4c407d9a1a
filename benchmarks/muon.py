"""Muon against AdamW, and how much of its gain is left with a few bits: trains the demo's model on two ranks.

    python benchmarks/muon.py --seeds 3

Writes muon.json after each training, and leaves out those that it has already; about four minutes each on one core. The
ranks take turns in one process, through the stages of the core, so their losses do not depend on the machine's load.
Gradients in 2 bits have a code that is defined here and is not part of the package: of its own compressors of 2 bits,
`QSGD` keeps less of a vector than signs do.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import page
import torch
from convergence.language_model import LanguageModelTask

import qcomp
from qcomp import extend
from qcomp.core.mean.stages import AllToAll
from qcomp.core.numeric.sums import rms
from qcomp.testing.turns import lockstep

RANKS = 2
STEPS = 480
OTHERS = ("*embedding*", "head*")
PEAK = {"AdamW": 0.002, "Muon": 0.02}
"""The largest learning rate."""
SIGN, EXACT = qcomp.ScaledSign(scale="rms"), qcomp.Identity()
FOUR = qcomp.QSGD(levels=7, bucket_size=128)


@dataclass(frozen=True)
class FourLevels(extend.BucketedCompressor):
    """Two bits: the sign, and whether the magnitude is above that of the root mean square, after Max (1960)."""

    name: ClassVar[str] = "four_levels"
    scales: ClassVar[tuple[str, ...]] = ("rms",)

    bucket_size: int = 128

    @property
    def traits(self) -> extend.Traits:
        """No promise: it fits values of a normal distribution."""
        return extend.Traits(self.bucket_size)

    @property
    def bits(self) -> int:
        """A sign and a magnitude."""
        return 2

    def encode_block(self, rows: Any, block: extend.Block, key: Any) -> tuple[Any, tuple[Any, ...]]:  # noqa: ARG002
        """Return 2 for each large magnitude, plus 1 if it is negative, and the root mean square."""
        scale = rms(rows, block.filled)
        codes = 2 * (rows.abs() > 0.9816 * scale[:, None]).to(torch.uint8) + (rows < 0).to(torch.uint8)
        return codes, (scale,)

    def decode_block(self, codes: Any, scales: tuple[Any, ...]) -> Any:
        """Return .4528 or 1.51 times the root mean square, with the sign."""
        (scale,) = scales
        magnitudes = torch.where(codes >= 2, 1.51 * scale, 0.4528 * scale)
        return torch.where(codes % 2 == 1, -magnitudes, magnitudes)


METHODS: dict[str, dict[str, Any]] = {
    "AdamW, exact": {},
    "Muon, exact": {"compressor": EXACT, "update_compressor": EXACT},
    "Muon, 4 + 1 bits": {"compressor": FOUR, "update_compressor": SIGN},
    "Muon without Nesterov, 4 + 1 bits": {"compressor": FOUR, "update_compressor": SIGN, "nesterov": False},
    "Muon, 2 + 2 bits": {"compressor": FourLevels(), "update_compressor": FourLevels()},
    "Muon, 2 + 1 bits": {"compressor": FourLevels(), "update_compressor": SIGN},
    "Muon, 1 + 1 bits": {"compressor": SIGN, "update_compressor": SIGN},
    "Muon, mean gradient in 4 + 4 bits": {"compressor": EXACT, "update_compressor": EXACT, "mean": FOUR},
}


def main() -> None:
    """Train, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = options.out / "muon.json"
    document = json.loads(results.read_text()) if results.exists() else {"runs": []}
    document |= {"machine": {"python": platform.python_version(), "torch": torch.__version__}, "ranks": RANKS}
    for seed in range(options.seeds):
        for name in options.methods:
            which = {"method": name, "seed": seed, "steps": options.steps}
            if any(which.items() <= run.items() for run in document["runs"]):
                continue
            found = which | train(METHODS[name], options.steps, seed)
            document["runs"].append(found)
            results.write_text(json.dumps(document, indent=1) + "\n")
            print(found, flush=True)
    page.rewrite(options.out, blocks(document))


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the table of the page: the mean loss of the seeds of each method."""
    rows = []
    for name in METHODS:
        runs = [run for run in document["runs"] if run["method"] == name]
        if not runs:
            continue
        losses = [run["loss"] for run in runs]
        bits = f"{runs[0]['bits']:.3g}" if "Muon" in name else ""
        sent = f"{runs[0]['bytes_a_step'] / 1e6:.2f} MB"
        rows.append([name, bits, sent, f"{sum(losses) / len(losses):.3f}", str(len(runs))])
    steps = sorted({run["steps"] for run in document["runs"]})
    head = ["method", "bits of a matrix, both ways", "sent by a rank in a step", "validation loss", "seeds"]
    told = f"{document['ranks']} ranks, {', '.join(map(str, steps))} steps."
    return {"muon": f"{told}\n\n{page.table(head, rows)}"}


def train(settings: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Return the loss after a training, and what a rank has sent for each element of a matrix between hidden layers."""
    settings = dict(settings)
    compressed = settings.pop("mean", None)
    mean = None if compressed is None else qcomp.CompressedMean(compressed)
    rate = schedule(PEAK["Muon" if settings else "AdamW"], steps)
    opt: qcomp.Optimizer = (
        qcomp.Muon(learning_rate=rate, others=OTHERS, betas=LanguageModelTask.betas, seed=seed, **settings)
        if settings
        else qcomp.Adam(learning_rate=rate, betas=LanguageModelTask.betas)
    )
    tasks = [LanguageModelTask(seed, rank) for rank in range(RANKS)]
    names = [name for name, _ in tasks[0].model.named_parameters()]
    params = [[p.detach() for p in task.model.parameters()] for task in tasks]
    states = lockstep(
        [opt.init_stages(p, rank=rank, size=RANKS, host="one", names=names) for rank, p in enumerate(params)]
    )
    hidden = [i for i, name in enumerate(names) if params[0][i].ndim == 2 and name.startswith("blocks")]
    elements = sum(params[0][i].numel() for i in range(len(names)))
    of_mean = [
        (mean or qcomp.CompressedMean(EXACT)).zeros([p[i] for i in hidden], rank=rank, size=RANKS)
        for rank, p in enumerate(params)
    ]
    began, sent = time.perf_counter(), [0] * RANKS
    for step in range(steps):
        grads = []
        for task in tasks:
            loss = task.loss("transformer", step)
            grads.append(list(torch.autograd.grad(loss, list(task.model.parameters()))))
        if mean is not None:
            key = qcomp.Key(seed=seed, step=step)
            averages = lockstep(
                [
                    counted(mean.stages([g[i] for i in hidden], state, key=key), rank, sent)
                    for rank, (g, state) in enumerate(zip(grads, of_mean, strict=True))
                ]
            )
            of_mean = [state for _, state in averages]
            for g, (values, _) in zip(grads, averages, strict=True):
                for i, value in zip(hidden, values, strict=True):
                    g[i] = value
        moved = lockstep(
            [
                counted(opt.stages(p, g, s), rank, sent)
                for rank, (p, g, s) in enumerate(zip(params, grads, states, strict=True))
            ]
        )
        states = [state for _, state in moved]
        for old, (new, _) in zip(params, moved, strict=True):
            for p, value in zip(old, new, strict=True):
                p.copy_(value)
    apart = {b"".join(np.asarray(x).tobytes() for x in p) for p in params}
    assert len(apart) == 1, "the ranks hold different parameters"
    return {
        "loss": round(tasks[0].judge(), 4),
        "bytes_a_step": round(sum(sent) / RANKS / steps),
        "elements": elements,
        "bits": bits(settings, compressed, [params[0][i].numel() for i in hidden]),
        "seconds": round(time.perf_counter() - began),
    }


def bits(settings: dict[str, Any], mean: Any, sizes: list[int]) -> float:
    """Return the bits of the payloads of both ways for each element of a matrix between hidden layers."""
    ways = (mean, mean) if mean else (settings.get(f"{way}compressor", EXACT) for way in ("", "update_"))
    total: int = sum(way.payload_spec(size).nbytes for way in ways for size in sizes)
    return round(8 * total / sum(sizes), 3)


def schedule(peak: float, steps: int) -> Callable[[int], float]:
    """Return a rise over 5 % of the steps, then a cosine down to a tenth."""

    def rate(step: int) -> float:
        rise = min(1.0, (step + 1) / (0.05 * steps))
        return peak * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))

    return rate


def counted(stages: Any, rank: int, sent: list[int]) -> Any:
    """Run stages, and add the bytes that go to other ranks."""
    arrived = None
    while True:
        try:
            request = next(stages) if arrived is None else stages.send(arrived)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, AllToAll):
            sent[rank] += sum(int(m.shape[0]) for peer, m in enumerate(request.send) if peer != rank)
        else:
            sent[rank] += int(request.send.shape[0]) * (len(request.receive) - 1)
        arrived = yield request


if __name__ == "__main__":
    main()
