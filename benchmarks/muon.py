"""Compare Muon, exact and with a few bits, with AdamW: trains the demo's model on two ranks.

    python benchmarks/muon.py --seeds 3

Writes muon.json after each training, and skips trainings that are in it; each takes about four minutes on one core. The
ranks take turns in one process, through the stages of the core, so their losses do not depend on the machine's load.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import page
import torch
from convergence.language_model import LanguageModelTask

import qcomp
from qcomp.testing.one_thread import bytes_to_others, lockstep, watched

RANKS = 2
STEPS = 480
OTHERS = ("*embedding*", "head*")
PEAK = {"AdamW": 0.002, "Muon": 0.02}
"""The largest learning rate."""
SIGN, EXACT = qcomp.ScaledSign(scale="rms"), qcomp.Identity()
BLOCKS: dict[str, Any] = {"block_rows": 32, "newton_schulz_steps": 3}
"""A block has the rows of one head of attention."""
FOUR = {"compressor": qcomp.LloydMax(4, coding="range"), "update_compressor": SIGN}
TWO = {"compressor": qcomp.LloydMax(2, 256, coding="range"), "update_compressor": SIGN}
WHITENED: dict[str, Any] = {"update_compressor": SIGN, "whiten_steps": qcomp.DoublingIntervals(4)}

METHODS: dict[str, dict[str, Any]] = {
    "AdamW, exact": {},
    "Muon, exact": {"compressor": EXACT, "update_compressor": EXACT},
    "Muon, 4 + 1 bits": FOUR,
    "Muon, 2 + 1 bits": TWO,
    "Muon, 1 + 1 bits": {"compressor": SIGN, "update_compressor": SIGN},
    "Muon, 4 + 1 bits, whitened": WHITENED | {"compressor": qcomp.LloydMax(4, 4096, coding="range")},
    "Muon, 2 + 1 bits, whitened": WHITENED | {"compressor": qcomp.LloydMax(2, 4096, coding="range")},
    "Muon, 4 + 1 bits at random": {"compressor": qcomp.QSGD(7, 128), "update_compressor": SIGN},
    "Muon in blocks, exact": BLOCKS | {"compressor": EXACT, "update_compressor": EXACT},
    "Muon in blocks, 4 + 1 bits": BLOCKS | FOUR,
    "Muon in blocks, 2 + 1 bits": BLOCKS | TWO,
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
    """Return the loss after a training, the bytes sent in a step, and the bits of an element of a hidden matrix."""
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
    elements = [sum(params[0][i].numel() for i in hidden), sum(p.numel() for p in params[0])]
    began, sent = time.perf_counter(), [0] * RANKS

    def count(rank: int, request: Any) -> None:
        sent[rank] += bytes_to_others(request, rank)

    for step in range(steps):
        grads = []
        for task in tasks:
            loss = task.loss("transformer", step)
            grads.append(list(torch.autograd.grad(loss, list(task.model.parameters()))))
        moved = lockstep(
            [
                watched(opt.stages(p, g, s), partial(count, rank))
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
        "elements": elements[1],
        "bits": bits(sum(sent) / RANKS / steps, *elements),
        "seconds": round(time.perf_counter() - began),
    }


def bits(sent: float, hidden: int, elements: int) -> float:
    """Return the bits of an element of a matrix between hidden layers, both ways together; other tensors are exact.

    A rank sends (N - 1) / N of these bits, and 2 (N - 1) / N of the 32 bits of each element of an exact tensor.
    """
    share = (RANKS - 1) / RANKS
    return round((8 * sent / share - 2 * 32 * (elements - hidden)) / hidden, 3)


def schedule(peak: float, steps: int) -> Callable[[int], float]:
    """Return a rise over 5 % of the steps, then a cosine down to a tenth."""

    def rate(step: int) -> float:
        rise = min(1.0, (step + 1) / (0.05 * steps))
        return peak * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))

    return rate


if __name__ == "__main__":
    main()
