"""Measure the loss of a model in bfloat16, rounded to nearest and stochastically, beside its training in float32.

    python benchmarks/half_precision.py

Writes half_precision.json after each training, skips trainings that are in it, and writes a table of
docs/benchmarks/README.md. The model predicts the next byte of Python's library from 16 bytes: an embedding, three
layers, and LayerNorms, whose gains of 1 are too coarse for the steps. Two ranks train it with qcomp.torch.OneBitAdam.
"""

import argparse
import json
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import page
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import qcomp
import qcomp.torch

RANKS = 2
STEPS = 1200
RATE = 6e-4
CONTEXT, BATCH = 16, 16
HELD_OUT = 10_000
METHODS = {"exact": 1.0, "1-bit": 0.25}
"""The share of the steps after which the variance is frozen, and momenta have one bit."""
KINDS: dict[str, tuple[torch.dtype, Literal["nearest", "stochastic"]]] = {
    "float32": (torch.float32, "nearest"),
    "bfloat16, nearest": (torch.bfloat16, "nearest"),
    "bfloat16, stochastic": (torch.bfloat16, "stochastic"),
}


class Model(nn.Module):
    """Predicts a byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(n) for n in (16 * CONTEXT, 64, 64))
        self.layers = nn.ModuleList(nn.Linear(*n) for n in ((16 * CONTEXT, 64), (64, 64), (64, 128)))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits, in float32."""
        first, second, third = self.norms
        x = second(F.gelu(self.layers[0](first(self.embedding(text).flatten(1)))))
        logits: torch.Tensor = self.layers[2](third(x + F.gelu(self.layers[1](x))))
        return logits.float()


def main() -> None:
    """Train, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of weights that rest, which are measured here, and of an early freeze
    results = options.out / "half_precision.json"
    runs = json.loads(results.read_text()) if results.exists() else []
    for seed in range(options.seeds):
        for method in METHODS:
            for kind in KINDS:
                which = {"method": method, "parameters": kind, "seed": seed, "steps": options.steps}
                if any(which.items() <= run.items() for run in runs):
                    continue
                runs.append(which | {"loss": train(method, kind, options.steps, seed)})
                results.write_text(json.dumps(runs, indent=1) + "\n")
                print(runs[-1], flush=True)
    page.rewrite(options.out, blocks(runs))


def train(method: str, kind: str, steps: int, seed: int) -> float:
    """Return the loss on held-out text after a training."""
    dtype, rounding = KINDS[kind]
    folder = Path(sysconfig.get_path("stdlib"))
    code = b"".join((folder / f"{name}.py").read_bytes() for name in ("argparse", "ast", "typing"))
    text = torch.tensor(list(code)).clamp(max=127).unfold(0, CONTEXT + 1, 1)
    torch.manual_seed(seed)
    models = [Model() for _ in range(RANKS)]  # ranks begin with the parameters of rank 0

    def rank_main(comm: qcomp.comm.Communicator) -> float:
        model = models[comm.rank].to(dtype)
        optimizer = qcomp.torch.OneBitAdam(
            model.parameters(),
            lr=RATE,
            freeze=max(2, int(METHODS[method] * steps)),
            exact=qcomp.ExactBelow(1000),
            watch=None,
            rounding=rounding,
            seed=seed,
            comm=comm,
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        draws = torch.Generator().manual_seed(RANKS * seed + comm.rank)

        def loss_of(examples: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(examples[:, :-1]), examples[:, -1])

        for _ in range(steps):
            loss = loss_of(text[torch.randint(len(text) - HELD_OUT - CONTEXT, (BATCH,), generator=draws)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        with torch.no_grad():
            return round(float(loss_of(text[-HELD_OUT:])), 4)

    found: Sequence[float] = qcomp.comm.run_local(RANKS, rank_main)
    assert len(set(found)) == 1, "the ranks hold different parameters"
    return found[0]


def blocks(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the table of the page: the mean loss of the seeds, and its distance from that of float32."""
    losses = {
        (method, kind): mean(r["loss"] for r in runs if (r["method"], r["parameters"]) == (method, kind))
        for method in METHODS
        for kind in KINDS
    }
    rows = [
        [kind]
        + [
            text
            for method in METHODS
            for text in (
                f"{losses[method, kind]:.4f}",
                f"{100 * (losses[method, kind] / losses[method, 'float32'] - 1):+.2f} %",
            )
        ]
        for kind in KINDS
    ]
    head = ["parameters", "exact", "beside float32", "1-bit", "beside float32"]
    seeds = len({run["seed"] for run in runs})
    told = f"{RANKS} ranks, {runs[0]['steps']} steps, {seeds} {'seeds' if seeds > 1 else 'seed'}."
    return {"half_precision": f"{told}\n\n{page.table(head, rows)}"}


if __name__ == "__main__":
    main()
