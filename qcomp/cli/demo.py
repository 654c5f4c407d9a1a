"""``qcomp demo``: trains a small model with four optimizers on ranks that are threads. It needs only NumPy."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qcomp.cli.corpus import Corpus, training_batch, validation_windows
from qcomp.cli.output import UsageError, print_json, say, table
from qcomp.comm.base import Communicator
from qcomp.comm.local import run_local
from qcomp.core.compressors.qsgd import QSGD
from qcomp.core.diagnostics import Diagnostics
from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.onebit_adam import OneBitAdam
from qcomp.core.optimizers.qadam import QAdam
from qcomp.core.optimizers.sgd import CompressedSGD

EPILOG = """
A small network learns to predict the next byte of Python's standard library. Each optimizer starts from the same
parameters and sees the same data. The ranks are threads of this process, so the demo compares losses and bytes, not
times. It takes about a minute.

examples:
  qcomp demo
  qcomp demo --ranks 4 --steps 100
  qcomp demo --json
"""

_CONTEXT, _FEATURES, _HIDDEN, _BYTES = 8, 16, 256, 256
_BATCH = 128
"""Windows per rank and step."""
_VALIDATION_WINDOWS = 4096
_VALIDATIONS = 15
"""Number of validation losses of a run, its end included."""

_Parameters = Sequence[npt.NDArray[np.float32]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``qcomp demo``."""
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of each training (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the parameters and the data (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Train with each optimizer, and print their losses and bytes."""
    for name, least in (("ranks", 1), ("steps", 50), ("seed", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} is {getattr(options, name)}; expected at least {least}")
    corpus = Corpus.of_standard_library()
    runs = []
    for name, optimizer in _optimizers(options.steps).items():
        if not options.json:
            say(f"training with {name} ...")
        runs.append(_train(name, optimizer, corpus, options))
    if options.json:
        print_json(runs)
        return 0
    say("\n" + "\n".join(table(_rows(runs), right=True)))
    return 0


def _optimizers(steps: int) -> dict[str, Optimizer]:
    """Return the optimizers by name; the variance is frozen after a fifth of the steps."""

    def rate(peak: float) -> Callable[[int], float]:
        return lambda step: peak * min((step + 1) / (0.1 * steps), 1.1 - step / steps)

    adam: dict[str, Any] = {"learning_rate": rate(4e-3), "betas": (0.9, 0.99)}
    freeze = steps // 5
    return {
        "Adam, exact": Adam(**adam),
        "1-bit Adam": OneBitAdam(**adam, freeze=freeze),
        "QAdam, 8-bit": QAdam(**adam, freeze=freeze, variance_steps=None),
        "SGD, 4-bit QSGD": CompressedSGD(
            learning_rate=rate(0.5), compressor=QSGD(levels=7, bucket_size=128), momentum=0.9
        ),
    }


def _train(name: str, optimizer: Optimizer, corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return losses, bytes and seconds."""
    judged = {round(options.steps * part / _VALIDATIONS) for part in range(1, _VALIDATIONS + 1)}
    held_out = validation_windows(corpus.validation, _VALIDATION_WINDOWS, _CONTEXT)

    def rank_main(comm: Communicator) -> tuple[list[dict[str, float]], float]:
        params: Any = _initial(options.seed)
        diagnostics = Diagnostics(optimizer, sample=1024)
        state = optimizer.init(params, comm)
        losses: list[dict[str, float]] = []
        sent = 0.0
        for step in range(options.steps + 1):
            if step in judged and comm.rank == 0:
                losses.append({"step": step, "loss": _loss_and_gradients(params, held_out)[0]})
            if step == options.steps:
                break
            key = (options.seed, comm.rank, step)
            windows = training_batch(corpus.train, _BATCH, _CONTEXT, key)
            _, grads = _loss_and_gradients(params, windows)
            params, state, report = diagnostics.step(params, grads, state, comm)
            sent += report["bytes_sent"]
        return losses, sent

    start = time.perf_counter()
    losses, sent = run_local(options.ranks, rank_main)[0]
    size = sum(p.size for p in _initial(options.seed))
    ring = 2 * (options.ranks - 1) / options.ranks * 4 * size * options.steps
    return {
        "optimizer": name,
        "steps": options.steps,
        "bytes_sent_per_rank": sent,
        "ranks": options.ranks,
        "parameters": size,
        "validation_loss": losses[-1]["loss"],
        "compression_ratio": ring / sent if sent else None,
        "seconds": round(time.perf_counter() - start, 1),
        "validation": losses,
    }


def _rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    first = runs[0]["validation_loss"]
    rows = [["optimizer", "validation loss", "against Adam", "MB sent by each rank", "reduction", "seconds"]]
    for each in runs:
        loss, ratio = each["validation_loss"], each["compression_ratio"]
        rows.append(
            [
                each["optimizer"],
                f"{loss:.3f}",
                f"{loss / first - 1:+.1%}",
                f"{each['bytes_sent_per_rank'] / 1e6:.1f}",
                "-" if ratio is None else f"{ratio:.1f}x",
                f"{each['seconds']:.0f}",
            ]
        )
    return rows


def _initial(seed: int) -> _Parameters:
    """Return the parameters of the network: a table of features, and two layers with biases."""
    random = np.random.default_rng(seed)
    inputs = _CONTEXT * _FEATURES
    return [
        random.standard_normal((_BYTES, _FEATURES), np.float32),
        random.standard_normal((inputs, _HIDDEN), np.float32) / np.float32(inputs**0.5),
        np.zeros(_HIDDEN, np.float32),
        random.standard_normal((_HIDDEN, _BYTES), np.float32) / np.float32(_HIDDEN**0.5),
        np.zeros(_BYTES, np.float32),
    ]


def _loss_and_gradients(
    params: _Parameters, windows: npt.NDArray[np.int64]
) -> tuple[float, list[npt.NDArray[np.float32]]]:
    """Return the mean cross-entropy of the last byte of each window, in nats, and its gradients."""
    table, weights, bias, out_weights, out_bias = params
    count, given, wanted = len(windows), windows[:, :-1], windows[:, -1]
    features = table[given].reshape(count, -1)
    hidden = np.tanh(features @ weights + bias)
    logits = hidden @ out_weights + out_bias
    logits -= logits.max(axis=1, keepdims=True)
    likely = np.exp(logits)
    likely /= likely.sum(axis=1, keepdims=True)
    right = np.arange(count), wanted
    loss = -float(np.mean(np.log(likely[right])))

    d_logits = likely
    d_logits[right] -= 1
    d_logits /= np.float32(count)
    d_hidden = (d_logits @ out_weights.T) * (1 - hidden * hidden)
    d_features = (d_hidden @ weights.T).reshape(count, _CONTEXT, _FEATURES)
    d_table = np.zeros_like(table)
    np.add.at(d_table, given, d_features)
    return loss, [
        d_table,
        features.T @ d_hidden,
        d_hidden.sum(axis=0),
        hidden.T @ d_logits,
        d_logits.sum(axis=0),
    ]
