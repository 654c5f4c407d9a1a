"""Draw the pictures of docs/how-it-works.md, each from a small computation that this program repeats.

    python benchmarks/explanations.py

Feedback: the sum of the vectors that one rank sends, with and without feedback. Freezing: Adam on one-bit gradients,
and 1-bit Adam, on an ill-conditioned regression. Bits: the error of each compressor on a real gradient, the late one
of docs/benchmarks/gradients/sample.npz, beside the least error that any code with as many bits could have. Takes about
half a minute.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import qcomp

Floats = npt.NDArray[np.floating[Any]]

EXACT, NAIVE, MENDED = "black", "#d1495b", "#2e86ab"
RANKS, FEATURES, STEPS, FREEZE = 4, 64, 1500, 300
BUCKET = 512
TENSOR = "late/blocks.1.mlp_in.weight"
SAMPLE = Path("docs/benchmarks/gradients/sample.npz")


def main() -> None:
    """Compute and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="(default: %(default)s)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rcParams["svg.hashsalt"] = "qcomp"  # so that the files are reproducible
    for draw, name in ((draw_feedback, "feedback"), (draw_freezing, "freezing"), (draw_bits, "bits")):
        figure = draw()
        figure.savefig(out / f"{name}.svg", metadata={"Date": None})


def sums(*, feedback: bool, steps: int) -> tuple[Floats, Floats]:
    """Return the running sums of a gradient of 64 elements, exact and as sent with one bit, of shape (steps, 64)."""
    rng = np.random.default_rng(1)
    direction = rng.standard_normal(64)
    c, residual = qcomp.ScaledSign(bucket_size=64), np.zeros(64)
    exact, sent = [], []
    for _ in range(steps):
        g = direction + 0.5 * rng.standard_normal(64)
        payload, new = qcomp.feedback.compress(c, g, residual)
        residual = np.asarray(new) if feedback else residual
        exact.append(g)
        sent.append(c.decompress(payload, like=g))
    return np.cumsum(exact, axis=0), np.cumsum(sent, axis=0)


def draw_feedback() -> Figure:
    """Draw the sum of one element, and the relative error of the sums of all elements."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, 101)
    exact, with_feedback = sums(feedback=True, steps=100)
    _, without = sums(feedback=False, steps=100)
    element = int(np.argsort(np.abs(exact[-1]))[20])  # small, but one bit sends it as large as others
    left.plot(steps, exact[:, element], color=EXACT, label="exact")
    left.plot(steps, without[:, element], color=NAIVE, label="1 bit, no feedback")
    left.plot(steps, with_feedback[:, element], color=MENDED, label="1 bit, feedback")
    left.set(xlabel="step", title="sum of one element")
    left.legend(fontsize=8)
    for sent, colour in ((without, NAIVE), (with_feedback, MENDED)):
        error = np.linalg.norm(sent - exact, axis=1) / np.linalg.norm(exact, axis=1)
        right.plot(steps, error, color=colour)
    right.set(xlabel="step", title="relative error of the sum of all", ylim=(0, None))
    for panel in (left, right):
        panel.grid(alpha=0.3)
    return figure


@dataclass(frozen=True)
class Regression:
    """A linear regression whose features differ a thousandfold in size, and the rows that each rank draws."""

    scale: Floats
    target: Floats

    @classmethod
    def make(cls) -> "Regression":
        """Return the regression of the picture."""
        rng = np.random.default_rng(0)
        return cls(np.logspace(-1.5, 1.5, FEATURES)[rng.permutation(FEATURES)], np.ones(FEATURES))

    def gradient(self, x: Floats, rank: int, step: int) -> Floats:
        """Return a rank's gradient on the rows that it draws in a step, with noisy labels."""
        rng = np.random.default_rng((rank, step))
        rows = rng.standard_normal((8, FEATURES)) * self.scale
        noise = rng.standard_normal(8)
        gradient: Floats = rows.T @ (rows @ (x - self.target / self.scale) + noise) / 8
        return gradient

    def loss(self, x: Floats) -> float:
        """Return the expected loss, without the part of the noise."""
        return float(np.sum((self.scale * x - self.target) ** 2) / 2)


def adam_on_one_bit(problem: Regression) -> tuple[list[float], Floats]:
    """Return the losses of Adam on one-bit mean gradients with feedback, and the root of its variance at the end."""
    mean = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=FEATURES))
    adam = qcomp.Adam(learning_rate=rate, betas=(0.9, 0.99))

    def rank_main(comm: qcomp.comm.Communicator) -> tuple[list[float], Floats]:
        x = np.zeros(FEATURES)
        alone = qcomp.comm.LocalCommunicator.alone()
        state, residuals = adam.init(x, alone), mean.init(x, comm)
        losses = []
        for step in range(STEPS):
            g, residuals = mean(problem.gradient(x, comm.rank, step), residuals, comm)
            x, state = adam.step(x, g, state, alone)
            losses.append(problem.loss(x))
        return losses, corrected(state)

    return qcomp.comm.run_local(RANKS, rank_main)[0]


def trained(problem: Regression, optimizer: qcomp.Optimizer) -> tuple[list[float], Floats]:
    """Return the losses of an optimizer, and the root of its variance at the end."""

    def rank_main(comm: qcomp.comm.Communicator) -> tuple[list[float], Floats]:
        x = np.zeros(FEATURES)
        state = optimizer.init(x, comm)
        losses = []
        for step in range(STEPS):
            x, state = optimizer.step(x, problem.gradient(x, comm.rank, step), state, comm)
            losses.append(problem.loss(x))
        return losses, corrected(state)

    return qcomp.comm.run_local(RANKS, rank_main)[0]


def corrected(state: qcomp.OptimizerState) -> Floats:
    """Return the root of an optimizer's variance."""
    root: Floats = np.sqrt(state.variance[0])
    return root


def rate(step: int) -> float:
    """Return a learning rate that falls linearly to zero."""
    return 0.03 * (1 - step / STEPS)


def draw_freezing() -> Figure:
    """Draw the losses, and the root of each variance over the sizes of the features."""
    problem = Regression.make()
    onebit = qcomp.OneBitAdam(
        learning_rate=rate,
        betas=(0.9, 0.99),
        freeze=FREEZE,
        exact=None,
        watch=None,
        compressor=qcomp.ScaledSign(bucket_size=FEATURES, scale="rms"),
    )
    runs = {
        "Adam, exact": (EXACT, trained(problem, qcomp.Adam(learning_rate=rate, betas=(0.9, 0.99)))),
        "Adam on 1-bit gradients": (NAIVE, adam_on_one_bit(problem)),
        f"1-bit Adam, frozen at {FREEZE}": (MENDED, trained(problem, onebit)),
    }
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, (colour, (losses, root)) in runs.items():
        left.plot(range(1, STEPS + 1), losses, color=colour, label=label, lw=1.2)
        right.plot(problem.scale, root, ".", color=colour, ms=4)
    left.axvline(FREEZE, color=MENDED, lw=0.8, ls=":")
    left.set(xlabel="step", yscale="log", title="loss")
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    right.set(
        xscale="log",
        yscale="log",
        xlabel="size of a feature",
        title="sqrt(v) of its parameter, at the end",
    )
    for panel in (left, right):
        panel.grid(alpha=0.3)
    return figure


def of_buckets(values: Floats) -> Floats:
    """Return the sum of squares of each bucket."""
    squares: Floats = np.sum(values.reshape(-1, BUCKET) ** 2, axis=1)
    return squares


def error_and_bits(c: qcomp.Compressor, x: Floats) -> tuple[float, float]:
    """Return the mean over buckets of the relative squared error, and the bits per element."""
    payload = c.compress(x, key=qcomp.Key(seed=0))
    difference = x.astype(np.float64) - c.decompress(payload, like=x)
    return float(
        np.mean(of_buckets(difference) / of_buckets(x.astype(np.float64)))
    ), 8 * payload.nbytes / x.size


def bound(values: Floats, bits: Sequence[float]) -> list[float]:
    """Return the least mean squared error of any code with so many bits per element, for independent draws of values.

    The algorithm of Blahut and Arimoto on a histogram gives points for a range of slopes; the result interpolates them.
    """
    shares, edges = np.histogram(values, 500)
    centres = ((edges[:-1] + edges[1:]) / 2)[shares > 0]
    p = shares[shares > 0] / shares.sum()
    distance = (centres[:, None] - centres[None, :]) ** 2
    rates, errors = [], []
    for slope in np.logspace(-0.3, 3, 25):
        weight = np.exp(-slope * distance)
        q = np.full(len(p), 1 / len(p))
        for _ in range(300):
            q = q * ((p / (weight @ q)) @ weight)
        joint = weight * q * (p / (weight @ q))[:, None]
        errors.append(float(np.sum(joint * distance)))
        # Mutual information: log(joint / (p q)) is -slope * distance - log(weight @ q).
        rates.append(float(np.sum(joint * -slope * distance) - np.sum(p * np.log(weight @ q))) / np.log(2))
    found = np.interp(bits, rates, np.log(errors))
    return [float(value) for value in np.exp(found)]


FAMILIES: dict[str, tuple[str, str, Callable[[], list[qcomp.Compressor]]]] = {
    "ScaledSign": ("#d1495b", "D", lambda: [qcomp.ScaledSign(BUCKET)]),
    "TopK": ("#7b5ea7", "v", lambda: [qcomp.TopK(k, BUCKET) for k in (4, 16, 32, 64)]),
    "QSGD": (
        "#e0962b",
        "o",
        lambda: [qcomp.QSGD(2**b - 1, BUCKET) for b in range(1, 8)],
    ),
    "QSGD, range coder": (
        "#3d9970",
        "s",
        lambda: [
            qcomp.QSGD(levels, BUCKET, "l2", coding="range") for levels in (1, 3, 7, 15, 31, 63, 127, 300)
        ],
    ),
    "MinMaxUInt8": ("#2e86ab", "^", lambda: [qcomp.MinMaxUInt8(BUCKET)]),
}


def draw_bits() -> Figure:
    """Draw error over bits."""
    with np.load(SAMPLE) as sample:
        x = sample[TENSOR].reshape(-1)
    x = x[: x.size // BUCKET * BUCKET]
    root_mean_square = np.sqrt(of_buckets(x.astype(np.float64)) / BUCKET)
    normalised = (x.reshape(-1, BUCKET) / root_mean_square[:, None]).reshape(-1)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panel: Axes = figure.subplots()
    bits = np.linspace(0.15, 4.5, 50)
    panel.plot(bits, bound(normalised, bits.tolist()), color="black", lw=1.2, label="no code can be below")
    for label, (colour, marker, make) in FAMILIES.items():
        points = [error_and_bits(c, x) for c in make()]
        panel.plot(
            [b for _, b in points],
            [e for e, _ in points],
            marker + "-",
            color=colour,
            ms=5,
            lw=0.8,
            label=label,
        )
    panel.set(
        yscale="log",
        xlabel="bits per element, with all scales",
        title="squared error of one step, relative",
        xlim=(0, 9),
    )
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
