"""Small trainings: a convex one, classifiers, a language model, rare features, and some whose gradients change."""

import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

__all__ = ["TASKS", "Task", "drifts", "with_rare_activity"]

Arrays = list[NDArray[Any]]
BATCH = 32
DIMENSIONS = 2000
WORDS = 1000
RATE = 0.003
HELD_OUT = 400
"""The number of digits on which networks with ReLUs are tested, and do not learn from."""


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


@cache
def words() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return windows of four words and signs of sources of the standard library, and the one after each, shuffled."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = ("argparse", "ast", "datetime", "inspect", "subprocess", "tarfile", "typing")
    found = re.findall(
        r"\w+|[^\w\s]", "".join((folder / f"{name}.py").read_text()[:60_000] for name in sources)
    )
    numbers = {word: i for i, (word, _) in enumerate(Counter(found).most_common(WORDS - 1))}
    codes = np.asarray([numbers.get(word, WORDS - 1) for word in found])
    order = np.random.default_rng(6).permutation(len(codes) - 4)
    return np.stack([codes[order + i] for i in range(4)], axis=1), codes[order + 4]


def _matrices(seed: int, *shapes: tuple[int, int], gain: float = 1.0) -> Arrays:
    draws = np.random.default_rng(seed)
    return [(draws.standard_normal(s) * np.sqrt(gain / s[0])).astype(np.float32) for s in shapes]


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
    """Return loss and gradients of a model that predicts what follows some embedded bytes or words."""
    embedding, hidden, last = params
    joined = embedding[inputs].reshape(len(inputs), -1)
    loss, gradients = _classifier([hidden, last], joined, labels)
    inside = np.tanh(joined @ hidden)
    _, derivative = _softmax(inside @ last, labels)
    back = ((derivative @ last.T) * (1 - inside**2)) @ hidden.T
    of_embedding = np.zeros_like(embedding)
    np.add.at(of_embedding, inputs, back.reshape(*inputs.shape, -1))
    return loss, [of_embedding.astype(np.float32), *gradients]


def _regression(params: Arrays, inputs: NDArray[Any], outputs: NDArray[Any]) -> tuple[float, Arrays]:
    """Return half the mean squared error of a linear function, and its gradient."""
    errors = inputs @ params[0] - outputs
    return float((errors**2).mean() / 2), [(inputs.T @ errors / errors.size).astype(np.float32)]


def _on(
    data: Callable[[], tuple[Any, Any]],
    shapes: Any,
    model: Callable[..., tuple[float, Arrays]],
    tested: int = 6000,
) -> Task:
    def gradients(params: Arrays, draws: np.random.Generator, _: int) -> Arrays:
        inputs, labels = data()
        chosen = draws.integers(len(labels), size=BATCH)
        return model(params, inputs[chosen], labels[chosen])[1]

    def loss(params: Arrays) -> float:
        inputs, labels = data()
        return model(params, inputs[:tested], labels[:tested])[0]

    return Task(lambda seed: _matrices(seed, *shapes), gradients, loss)


TASKS = {
    "linear regression": _on(measurements, [(100, 10)], _regression),
    "digits, a hidden layer": _on(digits, [(64, 64), (64, 10)], _classifier),
    "language model of bytes": _on(text, [(128, 16), (128, 96), (96, 128)], _language_model),
}


def _relus(*widths: int, copies: int = 1) -> Task:
    """Return a classifier of digits with hidden layers of ReLUs, which sees copies of each pixel; others test it."""
    shapes = list(zip((64 * copies, *widths), (*widths, 10), strict=True))

    def model(params: Arrays, chosen: Any) -> tuple[float, Arrays]:
        inputs, labels = digits()
        inside = [np.repeat(inputs[chosen], copies, axis=1)]
        for matrix in params[:-1]:
            inside.append(np.maximum(inside[-1] @ matrix, 0))
        loss, derivative = _softmax(inside[-1] @ params[-1], labels[chosen])
        gradients: Arrays = []
        for matrix, before in zip(reversed(params), reversed(inside), strict=True):
            gradients.insert(0, (before.T @ derivative).astype(np.float32))
            derivative = (derivative @ matrix.T) * (before > 0)
        return loss, gradients

    return Task(
        lambda seed: _matrices(seed, *shapes, gain=2.0),
        lambda params, draws, _: model(params, draws.integers(HELD_OUT, 1797, size=BATCH))[1],
        lambda params: model(params, slice(HELD_OUT))[0],
    )


def _zipf(count: int) -> NDArray[Any]:
    """Return probabilities by the law of Zipf."""
    weights = 1 / np.arange(1, count + 1)
    shares: NDArray[Any] = weights / weights.sum()
    return shares


def _rare_tokens(tokens: int, width: int) -> Task:
    """Return a model with an embedding and a layer of ReLUs, which learns what follows each token."""
    frequency, following = _zipf(tokens), np.random.default_rng(3).permutation(tokens)
    tested = np.random.default_rng(4).choice(tokens, 5000, p=frequency)

    def gradients(params: Arrays, draws: np.random.Generator, _: int) -> Arrays:
        chosen = draws.choice(tokens, 2 * BATCH, p=frequency)
        embedding, hidden, last = params
        rows = embedding[chosen]
        inside = np.maximum(rows @ hidden, 0)
        derivative = _softmax(inside @ last, following[chosen])[1]
        back = (derivative @ last.T) * (inside > 0)
        of_embedding = np.zeros_like(embedding)
        np.add.at(of_embedding, chosen, (back @ hidden.T).astype(np.float32))
        return [of_embedding, (rows.T @ back).astype(np.float32), (inside.T @ derivative).astype(np.float32)]

    def loss(params: Arrays) -> float:
        scores = np.maximum(params[0] @ params[1], 0) @ params[2]
        return _softmax(scores[tested], following[tested])[0]

    def start(seed: int) -> Arrays:
        embedding = np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)
        return [embedding, *_matrices(seed, (width, 2 * width), (2 * width, tokens))]

    return Task(start, gradients, loss)


def _rare_features(features: int, classes: int) -> Task:
    """Return a logistic regression on twenty features of each example, most of which are rare."""
    frequency, truth = _zipf(features), np.random.default_rng(7).standard_normal((features, classes))

    def examples(draws: np.random.Generator, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        inputs = np.zeros((count, features), np.float32)
        np.put_along_axis(inputs, draws.choice(features, (count, 20), p=frequency), 1, 1)
        return inputs, (1.5 * inputs @ truth + draws.gumbel(size=(count, classes))).argmax(axis=1)

    tested = examples(np.random.default_rng(8), 500)
    return Task(
        lambda _: [np.zeros((features, classes), np.float32)],
        lambda params, draws, _: _classifier(params, *examples(draws, 2 * BATCH))[1],
        lambda params: _classifier(params, *tested)[0],
    )


def with_rare_activity() -> dict[str, tuple[Task, float, float, int]]:
    """Return tasks whose gradients differ much in size, with the rate, b2 and the step of the freeze.

    Some units of ReLUs, some words, tokens and features are rarely active.
    """
    two, three = _relus(128, 128), _relus(128, 128, 128)
    text_of_words = _on(words, [(WORDS, 32), (128, 128), (128, WORDS)], _language_model, tested=1000)
    return {
        "two layers of ReLUs, rate 0.003": (two, 3e-3, 0.95, 40),
        "three layers of ReLUs, rate 0.003": (three, 3e-3, 0.95, 40),
        "three layers of ReLUs, frozen later": (three, 3e-3, 0.99, 150),
        "32 ReLUs of 512 inputs": (_relus(32, copies=8), 3e-3, 0.95, 100),
        "64 ReLUs of 512 inputs": (_relus(64, copies=8), 3e-3, 0.95, 100),
        "language model of words": (text_of_words, RATE, 0.99, 150),
        "rare tokens": (_rare_tokens(1000, 32), RATE, 0.99, 150),
        "rare features": (_rare_features(4000, 5), 1e-1, 0.99, 150),
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
        "curvature divided by 100 at step 300": (
            quadratic(lambda t: 0.01 if t >= 300 else 1.0),
            constant,
            200,
            2000,
        ),
        "gradients of a tenth of the elements are 0 before step 250": (
            quadratic(lambda t: 1.0 if t >= 250 else np.where(late, 0.0, 1.0)),
            constant,
            200,
            1000,
        ),
        "the learning rate rises until step 600; the freeze is at step 50": (
            TASKS["language model of bytes"],
            rises,
            50,
            2000,
        ),
    }
