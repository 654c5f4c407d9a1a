"""Every optimizer: the table for all tests that apply to every optimizer.

A new optimizer needs one line in `EVERY`; a test checks that it has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

import qcomp

SHAPES = [(40,), (7, 5), (3,)]
"""Two tensors that are compressed, and one that stays exact."""
SIGN, QSGD = qcomp.ScaledSign(16), qcomp.QSGD(7, 16)
FIRST: dict[str, Any] = {"learning_rate": 0.1, "exact": qcomp.ExactBelow(10)}
BETAS: dict[str, Any] = {"betas": (0.9, 0.9)}
WATCH = qcomp.VarianceWatch(largest=1.1, rewarm_steps=3, sample=8)


@dataclass(frozen=True)
class Entry:
    """An optimizer and the facts that tests need about it."""

    opt: qcomp.Optimizer
    stages: tuple[str, ...]
    """The stages that fourteen steps with `growing` gradients reach."""

    @property
    def compresses(self) -> bool:
        return hasattr(self.opt, "compressors")

    @property
    def pairs(self) -> bool:
        """Return whether a step takes two gradients."""
        return isinstance(self.opt, qcomp.QSVRG)

    @property
    def alike(self) -> bool:
        """Return whether after every step the ranks differ in nothing but residuals."""
        return not isinstance(self.opt, qcomp.QSVRG | qcomp.EF21SGD | qcomp.ZeroOneAdam)

    def make(self, **changes: Any) -> qcomp.Optimizer:
        """Return the optimizer with other options, ignoring those that it does not have."""
        known = {field.name for field in fields(self.opt)}
        return replace(self.opt, **{name: value for name, value in changes.items() if name in known})


def _entry(opt: qcomp.Optimizer, *stages: str) -> Entry:
    return Entry(opt, stages)


EVERY = {
    "Adam": _entry(qcomp.Adam(learning_rate=0.1), "warmup"),
    "Adam, clipped": _entry(qcomp.Adam(learning_rate=lambda step: 0.1 / (step + 1), clip_norm=1.0), "warmup"),
    "SGD, exact": _entry(qcomp.SGD(learning_rate=0.1, momentum=0.9, nesterov=True), "warmup"),
    "Lion": _entry(qcomp.Lion(learning_rate=0.01, weight_decay=0.1), "warmup"),
    "LAMB": _entry(qcomp.Lamb(learning_rate=0.01), "warmup"),
    "1-bit": _entry(qcomp.OneBitAdam(**FIRST, **BETAS, freeze=5, compressor=SIGN), "warmup", "compressed"),
    "1-bit, clipped": _entry(
        qcomp.OneBitAdam(**FIRST, **BETAS, freeze=5, compressor=SIGN, clip_norm=1.0), "warmup", "compressed"
    ),
    "1-bit, watched": _entry(
        qcomp.OneBitAdam(
            **FIRST,
            betas=(0.9, 0.5),
            freeze=3,
            compressor=SIGN,
            watch=WATCH,
            averaging=qcomp.Averaging(topology="all_gather"),
        ),
        "warmup",
        "compressed",
        "rewarm",
    ),
    "1-bit, measured again": _entry(
        qcomp.OneBitAdam(
            **FIRST, **BETAS, freeze=3, compressor=SIGN, variance_steps=qcomp.DoublingIntervals(2)
        ),
        "warmup",
        "compressed",
    ),
    "1-bit, automatic": _entry(
        qcomp.OneBitAdam(
            **FIRST,
            betas=(0.9, 0.7),
            freeze=qcomp.VarianceStable(0.3),
            compressor=qcomp.QSGD(3, 16),
            averaging=qcomp.Averaging(feedback=False),
        ),
        "warmup",
        "compressed",
    ),
    "1-bit, ring": _entry(
        qcomp.OneBitAdam(
            **FIRST, **BETAS, freeze=5, compressor=SIGN, averaging=qcomp.Averaging(topology="ring")
        ),
        "warmup",
        "compressed",
    ),
    "QAdam": _entry(
        qcomp.QAdam(**FIRST, **BETAS, freeze=5, compressor=qcomp.MinMaxUInt8(16), variance_steps=None),
        "warmup",
        "compressed",
    ),
    "1-bit LAMB": _entry(
        qcomp.OneBitLamb(**FIRST | {"learning_rate": 0.01}, **BETAS, freeze=5, compressor=SIGN),
        "warmup",
        "compressed",
    ),
    "0/1": _entry(
        qcomp.ZeroOneAdam(
            **FIRST,
            **BETAS,
            compressor=SIGN,
            freeze=4,
            variance_steps=qcomp.DoublingIntervals(2),
            sync_steps=qcomp.LocalSteps(2, 3),
        ),
        "warmup",
        "compressed",
        "local",
    ),
    "SGD": _entry(qcomp.CompressedSGD(**FIRST, compressor=QSGD), "compressed"),
    "SGD, plain": _entry(qcomp.CompressedSGD(**FIRST, compressor=SIGN, momentum=0.0), "compressed"),
    "SGD, automatic": _entry(
        qcomp.CompressedSGD(**FIRST, compressor=SIGN, averaging=qcomp.Averaging(topology="auto")),
        "compressed",
    ),
    "SGD, PowerSGD": _entry(
        qcomp.CompressedSGD(
            **FIRST,
            compressor=qcomp.Cast("bfloat16"),
            averaging=qcomp.PowerSGD(rank=2, min_compression=1),
        ),
        "compressed",
    ),
    "EF21": _entry(qcomp.EF21SGD(**FIRST, compressor=qcomp.TopK(k=2, bucket_size=16), eta=0.5), "compressed"),
    "Muon": _entry(
        qcomp.Muon(learning_rate=0.05, compressor=QSGD, update_compressor=qcomp.ScaledSign(16, "rms")),
        "compressed",
    ),
    "Muon, whitened": _entry(
        qcomp.Muon(
            learning_rate=0.05,
            compressor=QSGD,
            update_compressor=qcomp.ScaledSign(16, "rms"),
            whiten_steps=qcomp.DoublingIntervals(1),
        ),
        "compressed",
    ),
    "Muon, clipped": _entry(
        qcomp.Muon(
            learning_rate=lambda step: 0.05 / (step + 1),
            compressor=qcomp.Identity(),
            update_compressor=qcomp.QSGD(7, 16, coding="elias"),
            clip_norm=1.0,
            adjust_lr_fn="match_rms_adamw",
        ),
        "compressed",
    ),
    "QSVRG": _entry(qcomp.QSVRG(**FIRST, compressor=QSGD), "start", "epoch"),
}
COMPRESSING = [name for name, entry in EVERY.items() if entry.compresses and not entry.pairs]
"""Optimizers that compress; without QSVRG, whose step takes two gradients."""


def growing(rank: int, step: int) -> list[np.ndarray]:
    """Return gradients that grow, so that a watch of the variance has something to find."""
    rng = np.random.default_rng([11, rank, step])
    return [((1 + step / 4) * (rng.standard_normal(s) + 0.5)).astype(np.float32) for s in SHAPES]


def advance(
    opt: Any, params: Any, state: Any, comm: Any, step: int, *, grads: Callable[[int, int], list] = growing
) -> tuple[Any, Any]:
    """Take a step; for QSVRG, within epochs of four steps."""
    if not isinstance(opt, qcomp.QSVRG):
        return opt.step(params, grads(comm.rank, step), state, comm)
    if step % 4 == 0:
        params = opt.next_snapshot(params, state) if step else params
        state = opt.begin_epoch(params, grads(comm.rank, 100 + step), state, comm)
    pair = (grads(comm.rank, step), grads(comm.rank, 200 + step))
    return opt.step(params, pair, state, comm)
