"""Small trainings in NumPy: a convex one, a classifier, a language model, and some whose gradients change."""

import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

__all__ = ["TASKS", "Task", "drifts"]

Arrays = list[NDArray[Any]]
BATCH = 32
DIMENSIONS = 2000


class Task(NamedTuple):
    """A training task."""

    start: Callable[[int], Arrays]
    """Returns the first parameters for a seed."""
    gradients: Callable[[Arrays, np.random.Generator, int], Arrays]
    """Returns the gradients of a batch at a step."""
    loss: Callable[[Arrays], float]
    """Returns the loss on all data."""


@cache
def digits() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the handwritten digits of scikit-learn, and their labels."""
    inputs, labels = load_digits(return_X_y=True)
    return (inputs / 16).astype(np.float32), labels


@cache
def measurements() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return points, and a linear function of them with noise."""
    draws = np.random.default_rng(5)
    inputs = draws.standard_normal((4000, 100)) * np.linspace(0.1, 3, 100)
    outputs = inputs @ draws.standard_normal((100, 10)) + draws.standard_normal((4000, 10))
    return inputs.astype(np.float32), outputs.astype(np.float32)


@cache
def text() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return windows of eight bytes of sources of the standard library, and the byte after each."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join((folder / f"{name}.py").read_bytes()[:20_000] for name in ("argparse", "ast", "typing"))
    codes = np.minimum(np.frombuffer(data, np.uint8), 127)
    return np.stack([codes[i : len(codes) - 8 + i] for i in range(8)], axis=1), codes[8:].astype(np.int64)


def _matrices(seed: int, *shapes: tuple[int, int]) -> Arrays:
    draws = np.random.default_rng(seed)
    return [(draws.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for s in shapes]


def _softmax(scores: NDArray[Any], labels: NDArray[Any]) -> tuple[float, NDArray[Any]]:
    """Return the mean cross-entropy and its derivative with respect to the scores."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    derivative = np.exp(logs)
    rows = np.arange(len(labels))
    derivative[rows, labels] -= 1
    return float(-logs[rows, labels].mean()), derivative / len(labels)


def _classifier(params: Arrays, inputs: NDArray[Any], labels: NDArray[Any]) -> tuple[float, Arrays]:
    """Return loss and gradients of a network with at most one hidden layer."""
    *hidden, last = params
    inside = np.tanh(inputs @ hidden[0]) if hidden else inputs
    loss, derivative = _softmax(inside @ last, labels)
    gradients = [inside.T @ derivative]
    if hidden:
        gradients.insert(0, inputs.T @ ((derivative @ last.T) * (1 - inside**2)))
    return loss, [g.astype(np.float32) for g in gradients]


def _language_model(params: Arrays, inputs: NDArray[Any], labels: NDArray[Any]) -> tuple[float, Arrays]:
    """Return loss and gradients of a model that predicts the next byte from eight embedded ones, by a hidden layer."""
    embedding, hidden, last = params
    joined = embedding[inputs].reshape(len(inputs), -1)
    loss, gradients = _classifier([hidden, last], joined, labels)
    inside = np.tanh(joined @ hidden)
    _, derivative = _softmax(inside @ last, labels)
    back = ((derivative @ last.T) * (1 - inside**2)) @ hidden.T
    of_embedding = np.zeros_like(embedding)
    np.add.at(of_embedding, inputs, back.reshape(len(inputs), 8, -1))
    return loss, [of_embedding.astype(np.float32), *gradients]


def _regression(params: Arrays, inputs: NDArray[Any], outputs: NDArray[Any]) -> tuple[float, Arrays]:
    """Return half the mean squared error of a linear function, and its gradient."""
    errors = inputs @ params[0] - outputs
    return float((errors**2).mean() / 2), [(inputs.T @ errors / errors.size).astype(np.float32)]


def _on(data: Callable[[], tuple[Any, Any]], shapes: Any, model: Callable[..., tuple[float, Arrays]]) -> Task:
    def gradients(params: Arrays, draws: np.random.Generator, _: int) -> Arrays:
        inputs, labels = data()
        chosen = draws.integers(len(labels), size=BATCH)
        return model(params, inputs[chosen], labels[chosen])[1]

    def loss(params: Arrays) -> float:
        inputs, labels = data()
        return model(params, inputs[:6000], labels[:6000])[0]

    return Task(lambda seed: _matrices(seed, *shapes), gradients, loss)


TASKS = {
    "linear regression": _on(measurements, [(100, 10)], _regression),
    "digits, a hidden layer": _on(digits, [(64, 64), (64, 10)], _classifier),
    "language model of bytes": _on(text, [(128, 16), (128, 96), (96, 128)], _language_model),
}

Drift = tuple[Task, Mapping[str, Any], int, int]


def drifts() -> dict[str, Drift]:
    """Return tasks that change after a freeze, with settings, the step of the freeze and the number of steps."""
    target = np.random.default_rng(9).standard_normal(DIMENSIONS).astype(np.float32)
    late = np.arange(DIMENSIONS) % 10 == 0

    def quadratic(change: Callable[[int], Any]) -> Task:
        def gradients(params: Arrays, draws: np.random.Generator, step: int) -> Arrays:
            noisy = params[0] - target + 0.1 * draws.standard_normal(DIMENSIONS)
            return [(change(step) * noisy).astype(np.float32)]

        def loss(params: Arrays) -> float:
            return float(np.sqrt(np.mean((params[0].astype(np.float64) - target) ** 2)))

        return Task(lambda _: [np.zeros(DIMENSIONS, np.float32)], gradients, loss)

    constant = {"learning_rate": 0.01}
    rises = {"learning_rate": lambda step: 0.01 * min(1.0, (step + 1) / 600)}
    return {
        "curvature times 100 at step 300": (
            quadratic(lambda t: 100.0 if t >= 300 else 1.0),
            constant,
            200,
            1000,
        ),
        "curvature over 100 at step 300": (
            quadratic(lambda t: 0.01 if t >= 300 else 1.0),
            constant,
            200,
            2000,
        ),
        "a tenth of the elements begins at step 250": (
            quadratic(lambda t: 1.0 if t >= 250 else np.where(late, 0.0, 1.0)),
            constant,
            200,
            1000,
        ),
        "the rate rises until step 600, frozen at 50": (TASKS["language model of bytes"], rises, 50, 2000),
    }
