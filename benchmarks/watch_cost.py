"""The cost of the watch over the frozen variance: time and bytes of steps with it, relative to steps without.

    python benchmarks/watch_cost.py

Steps with and without the watch take turns in one process after the freeze, eight steps at a time, so that each turn
has one step that sends a sample. CPU time is measured: of the optimizer's step alone, including the exchange in memory,
and of training steps of small transformers on one core. A network would only add to these times.
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import page
import torch
from tqdm import tqdm

import qcomp
from qcomp.comm import LocalCommunicator, run_local

TURN = 8
MODELS: dict[str, list[tuple[int, int]]] = {
    "0.4 M in 10 tensors": [(256, 160)] * 10,
    "3 M in 50 tensors": [(256, 256)] * 48 + [(1000, 64)] * 2,
    "16 M in 26 tensors": [(768, 768)] * 24 + [(2048, 512)] * 2,
}
TRANSFORMERS = {"0.8 M in 48 tensors": 128, "3.2 M in 48 tensors": 256}
"""Four layers of this width; 4 sequences of 128."""
METHODS = {"1-bit Adam": qcomp.OneBitAdam, "QAdam": qcomp.QAdam}


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/freezing"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cases = [(model, method) for model in MODELS for method in METHODS]
    results = [
        {"model": model, "method": method, **measure(model, method, options.rounds)}
        for model, method in tqdm(cases, unit="case")
    ]
    trainings = [
        {"model": model, "method": method, **measure_training(width, method, options.rounds)}
        for model, width in TRANSFORMERS.items()
        for method in METHODS
    ]
    document = {"steps of optimizers": results, "training steps": trainings}
    (options.out / "watch_cost.json").write_text(json.dumps(document, indent=1) + "\n")
    texts = {"cost": table(results), "training-cost": training_table(trainings)}
    page.rewrite(options.out, texts)
    print("\n\n".join(texts.values()))


def optimizers(method: str) -> list[qcomp.OneBitAdam]:
    """Return the same optimizer without a watch and with the default one."""
    shared: dict[str, Any] = {
        "learning_rate": 1e-3,
        "freeze": 1,
        "betas": (0.9, 0.99),
        "variance_steps": None,
    }
    return [METHODS[method](**shared, watch=None), METHODS[method](**shared)]


def gradients(model: str) -> list[np.ndarray]:
    """Return gradients of the shapes of a model."""
    draws = np.random.default_rng(0)
    return [draws.standard_normal(shape, dtype=np.float32) for shape in MODELS[model]]


def measure(model: str, method: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of each turn, and the bytes of one turn."""
    grads, comm = gradients(model), LocalCommunicator.alone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jobs: list[list[Any]] = []
        for opt in optimizers(method):
            params = [np.zeros_like(g) for g in grads]
            jobs.append([opt, params, opt.init(params, comm)])
        seconds: list[list[float]] = [[], []]
        for turn in range(rounds + 1):
            for job, taken in zip(jobs, seconds, strict=True):
                start = time.process_time()
                for _ in range(TURN):
                    job[1], job[2] = job[0].step(job[1], grads, job[2], comm)
                if turn:
                    taken.append(time.process_time() - start)
        sent = [bytes_sent(opt, grads) for opt in optimizers(method)]
    return {"seconds": seconds, "bytes": sent}


def transformer(width: int) -> torch.nn.Module:
    """Return an encoder, the same for each call."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def measure_training(width: int, method: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of the passes and of the optimizer's steps in each turn."""
    torch.set_num_threads(1)
    comm, inputs = LocalCommunicator.alone(), torch.randn(4, 128, width)
    passes: list[list[float]] = [[], []]
    updates: list[list[float]] = [[], []]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformer(width)
        params = list(model.parameters())
        opts = optimizers(method)
        states = [opt.init(params, comm) for opt in opts]
        for turn in range(rounds + 1):
            for number, opt in enumerate(opts):
                in_passes = in_updates = 0.0
                for _ in range(TURN):
                    start = time.process_time()
                    grads = torch.autograd.grad(model(inputs).square().mean(), params)
                    between = time.process_time()
                    _, states[number] = opt.step(params, list(grads), states[number], comm)
                    in_passes += between - start
                    in_updates += time.process_time() - between
                if turn:
                    passes[number].append(in_passes)
                    updates[number].append(in_updates)
    return {"passes": passes, "updates": updates}


def bytes_sent(opt: qcomp.OneBitAdam, grads: list[np.ndarray]) -> int:
    """Return the bytes that each of two ranks sends in a turn of compressed steps."""

    def rank_main(comm: Any) -> int:
        params = [np.zeros_like(g) for g in grads]
        state = opt.init(params, comm)
        params, state = opt.step(params, grads, state, comm)
        before = comm.bytes_sent
        for _ in range(TURN):
            params, state = opt.step(params, grads, state, comm)
        return int(comm.bytes_sent - before)

    return run_local(2, rank_main, timeout=600)[0]


def table(results: list[dict[str, Any]]) -> str:
    """Return the cost of each case as a table."""
    rows = []
    for each in results:
        without, watched = each["seconds"]
        ratios = sorted(w / o for o, w in zip(without, watched, strict=True))
        middle, quarter = len(ratios) // 2, len(ratios) // 4
        low, high = ratios[quarter], ratios[-1 - quarter]
        less, more = each["bytes"]
        rows.append(
            [
                each["model"],
                each["method"],
                f"{1000 * sorted(without)[middle] / TURN:.3g}",
                f"{_percent(ratios[middle])} ({_percent(low)} to {_percent(high)})",
                _percent(more / less),
            ]
        )
    return page.table(["model", "method", "step without, ms", "more time (quartiles)", "more bytes"], rows)


def training_table(trainings: list[dict[str, Any]]) -> str:
    """Return the table of the time that the watch adds to the optimizer, relative to the whole training step."""
    rows = []
    for each in trainings:
        passes, (without, watched) = each["passes"][0], each["updates"]
        added = sorted((w - o) / (p + o) for p, o, w in zip(passes, without, watched, strict=True))
        middle, quarter = len(added) // 2, len(added) // 4
        whole = sorted(p + o for p, o in zip(passes, without, strict=True))[middle]
        low, high = added[quarter], added[-1 - quarter]
        rows.append(
            [
                each["model"],
                each["method"],
                f"{1000 * whole / TURN:.3g}",
                f"{_percent(1 + added[middle])} ({_percent(1 + low)} to {_percent(1 + high)})",
            ]
        )
    return page.table(["transformer", "method", "training step without, ms", "more time (quartiles)"], rows)


def _percent(ratio: float) -> str:
    return "" if math.isnan(ratio) else f"{100 * (ratio - 1):+.2f}%"


if __name__ == "__main__":
    main()
