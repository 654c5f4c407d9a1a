"""The inputs of both the original and its steps in NumPy: parameters, gradients, learning rates, options."""

from typing import Any

import numpy as np

STEPS = 40
WORLDS = (1, 2, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit_adam": {"freeze_step": 10},
    "zero_one_adam": {
        "var_freeze_step": 20,
        "var_update_scaler": 3,
        "local_step_scaler": 3,
        "local_step_clipper": 4,
    },
    "onebit_lamb": {
        "freeze_step": 10,
        "max_coeff": 2.7,
        "min_coeff": 2.0,
        "coeff_beta": 0.8,
        "factor_max": 1.2,
        "factor_min": 1.03,
        "factor_threshold": 0.02,
    },
}
COMMON = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.02}
SNAPSHOTS = (2, 10, 11, 23, 26, 29, 40)
"""After these steps not only the parameters are compared: around each change of stage, between two synchronisations of
0/1 Adam, and after the last step."""
MASK = np.asarray([1.0, 0.0, 1.0], dtype=np.float32)


def shapes(world: int) -> list[tuple[int, ...]]:
    """Return two tensors that need padding, and between them one that needs none."""
    return [(7, 5), (world * np.lcm(world, 8),), (3,)]


def parameters(world: int) -> list[np.ndarray]:
    rng = np.random.default_rng(17)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes(world)]


def gradients(world: int, rank: int, step: int) -> list[np.ndarray]:
    """Return this rank's own gradients in call ``step``, counted from 1; a masked element never has one."""
    rng = np.random.default_rng([23, rank, step])
    drawn = [rng.standard_normal(shape) * rng.uniform(0.1, 2.0) + 0.3 for shape in shapes(world)]
    drawn[2] = drawn[2] * MASK
    return [g.astype(np.float32) for g in drawn]


def mean_gradients(world: int, step: int) -> list[np.ndarray]:
    """Return the gradients that the engine passes to the optimizer while the engine averages them itself."""
    of_ranks = [gradients(world, rank, step) for rank in range(world)]
    return [np.stack(of_tensor).sum(axis=0) / np.float32(world) for of_tensor in zip(*of_ranks, strict=True)]


def rate(completed: int) -> float:
    """Return the learning rate after this many calls."""
    return 0.01 * (1 + completed % 3)
