"""What DeepSpeed 0.19.6's 1-bit Adam, 0/1 Adam and 1-bit LAMB do, in NumPy, for all ranks at once.

The first axis of every array of parameters, gradients, momenta and errors counts the ranks. Recordings of DeepSpeed
show that it does the same; qcomp's optimizers are compared with it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def sign_mean(x: Array, errors: dict[str, Array], bucket: int = 0) -> Array:
    """Return the mean over the ranks in each row, padding included, by ``compressed_allreduce``; updates the errors.

    One scale for each bucket, or with 0 for all elements of a rank, and for its shard.
    """
    ranks, unit = len(x), len(x) * math.lcm(len(x), 8)
    if ranks == 1:
        return x.reshape(1, -1)
    flat = x.reshape(ranks, -1)
    values = np.pad(flat, ((0, 0), (0, -flat.shape[1] % unit)))
    values = values + errors.get("worker_error", 0)
    sent = signs(values, bucket)
    shards = sent.mean(axis=0).reshape(ranks, -1) + errors.get("server_error", 0)
    returned = signs(shards, bucket)
    errors |= {"worker_error": values - sent, "server_error": shards - returned}
    return np.broadcast_to(returned.reshape(1, -1), values.shape)


def signs(values: Array, bucket: int) -> Array:
    """Return plus or minus the root mean square of each bucket."""
    buckets = values.reshape(len(values), -1, bucket or values.shape[1])
    scale = np.sqrt(np.square(buckets).mean(axis=2, keepdims=True))
    return np.where(buckets < 0, -scale, scale).reshape(values.shape)


class Adam:
    """What the three have in common; ``masks`` and ``weight_decay`` have an entry for each tensor."""

    bucket = 0
    betas: tuple[float, float]
    eps: float
    weight_decay: Sequence[float]
    masks: Sequence[Any]

    def __init__(self, params: Sequence[Array], ranks: int, **options: Any) -> None:
        self.x = [np.stack([p] * ranks) for p in params]
        self.m, self.v = ([np.zeros_like(x) for x in self.x] for _ in range(2))
        self.errors: list[dict[str, Array]] = [{} for _ in params]
        self.calls, self.frozen = 0, False
        self.__dict__ |= options
        self.start()

    def start(self) -> None:
        """Set what an optimizer has of its own."""

    def step(self, grads: Sequence[Array], rate: float) -> None:
        """Make a call; the first one only sets up DeepSpeed's buffers."""
        self.calls += 1
        if self.calls > 1:
            (self.frozen_step if self.frozen else self.exact_step)(grads, rate)

    def exact_step(self, grads: Sequence[Array], rate: float) -> None:
        """Make a step before the variance is constant."""
        raise NotImplementedError

    def frozen_step(self, grads: Sequence[Array], rate: float) -> None:
        """Make a step with a constant variance."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Go on with a constant variance."""
        self.frozen = True

    def directions(self) -> list[Array]:
        """Return m / (sqrt(v) + eps) + decay x of every tensor, without bias correction."""
        tensors = zip(self.m, self.v, self.x, self.weight_decay, strict=True)
        return [m / (np.sqrt(v) + self.eps) + decay * x for m, v, x, decay in tensors]

    def blended(self, grads: Sequence[Array]) -> list[Array]:
        """Return the momenta after gradients."""
        beta1, _ = self.betas
        return [beta1 * m + (1 - beta1) * g for m, g in zip(self.m, grads, strict=True)]

    def varied(self, variances: Sequence[Array], grads: Sequence[Array]) -> list[Array]:
        """Return variances after gradients."""
        _, beta2 = self.betas
        return [beta2 * v + (1 - beta2) * g * g for v, g in zip(variances, grads, strict=True)]

    def set_moments(self, grads: Sequence[Array]) -> None:
        """Blend the exact mean gradients into momentum and variance."""
        means = [np.broadcast_to(g.mean(axis=0), g.shape) for g in grads]
        self.m, self.v = self.blended(means), self.varied(self.v, means)

    def means(self, values: Sequence[Array]) -> list[Array]:
        """Return the compressed mean of each tensor, times its mask."""
        tensors = zip(values, self.errors, self.masks, strict=True)
        return [
            sign_mean(x, e, self.bucket)[:, : x[0].size].reshape(x.shape) * mask for x, e, mask in tensors
        ]

    def move(self, rate: float) -> None:
        """Make a step with the present moments."""
        self.x = [x - rate * d for x, d in zip(self.x, self.directions(), strict=True)]

    def held(self, rank: int) -> dict[str, Array]:
        """Return what a rank has, under DeepSpeed's names."""
        kinds = {"exp_avg": self.m, "exp_avg_sq": self.v, **self.others()}
        found = {f"{kind}.{i}": x[rank] for kind, arrays in kinds.items() for i, x in enumerate(arrays)}
        for i, errors in enumerate(self.errors):
            found |= {f"{kind}.{i}": x[rank] for kind, x in errors.items()}
        return found

    def others(self) -> dict[str, list[Array]]:
        """Return the arrays that an optimizer has of its own."""
        return {}


class OneBitAdam(Adam):
    """Call ``freeze_step`` is the last exact one, though not before call 2."""

    freeze_step: int

    def exact_step(self, grads: Sequence[Array], rate: float) -> None:
        self.set_moments(grads)
        self.move(rate)
        if self.calls >= self.freeze_step:
            self.freeze()

    def frozen_step(self, grads: Sequence[Array], rate: float) -> None:
        self.m = self.means(self.blended(grads))
        self.move(rate)


class ZeroOneAdam(Adam):
    """The intervals double after as many updates as the scalers say."""

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def start(self) -> None:
        self.interval, self.counter = 1, 0

    def count(self, scaler: int, longest: float = math.inf) -> None:
        self.counter += 1
        if self.counter == scaler:
            self.interval, self.counter = int(min(2 * self.interval, longest)), 0

    def freeze(self) -> None:
        super().freeze()
        self.start()
        self.errors = [{} for _ in self.x]
        self.begin_round()

    def begin_round(self) -> None:
        self.rates, self.moved = 0.0, [np.zeros_like(x) for x in self.x]

    def others(self) -> dict[str, list[Array]]:
        return {"momentum_accumulator": self.moved} if self.frozen else {}

    def exact_step(self, grads: Sequence[Array], rate: float) -> None:
        if self.calls % self.interval == 0:
            self.set_moments(grads)
            self.count(self.var_update_scaler)
        elif len(self.x[0]) > 1:  # a single rank ignores the gradient
            self.m = self.blended(self.means(grads))
        self.move(rate)
        if self.calls > self.var_freeze_step:
            self.freeze()

    def frozen_step(self, grads: Sequence[Array], rate: float) -> None:
        """Make a step of each rank alone, and in every ``interval``-th call replace these steps by a common one."""
        self.m, self.rates = self.blended(grads), self.rates + rate
        moved = [rate * d for d in self.directions()]
        self.x = [x - d for x, d in zip(self.x, moved, strict=True)]
        self.moved = [u - d for u, d in zip(self.moved, moved, strict=True)]
        if self.calls % self.interval == 0:
            divisors = [np.sqrt(v) + self.eps for v in self.v]
            scaled = [u * d for u, d in zip(self.moved, divisors, strict=True)]
            means = self.means(scaled) if len(self.x[0]) > 1 else scaled
            self.m = [-mean / np.float32(self.rates) for mean in means]
            tensors = zip(self.x, self.moved, means, divisors, strict=True)
            self.x = [(x - u) + mean / d for x, u, mean, d in tensors]
            self.begin_round()
        self.count(self.local_step_scaler, self.local_step_clipper)


class OneBitLamb(Adam):
    """All tensors are sent as one, and the padding of the mean is averaged again."""

    freeze_step: int
    coeff_beta: float
    min_coeff: float
    max_coeff: float
    factor_min: float
    factor_max: float
    factor_threshold: float

    def start(self) -> None:
        self.coeffs, self.factors = [0.0] * len(self.x), [1.0] * len(self.x)
        self.padding = np.zeros((len(self.x[0]), 0), np.float32)
        self.fresh: list[Array] = []

    def others(self) -> dict[str, list[Array]]:
        return {"exp_avg_sq_fresh": self.fresh}

    def exact_step(self, grads: Sequence[Array], rate: float) -> None:
        self.set_moments(grads)
        for i, update in enumerate(self.directions()):
            ratio = float(np.linalg.norm(self.x[i][0]) / np.linalg.norm(update[0]))
            coeff = min(max(ratio, self.min_coeff), self.max_coeff)
            self.coeffs[i] = self.coeff_beta * self.coeffs[i] + (1 - self.coeff_beta) * coeff
            self.x[i] = self.x[i] - rate * coeff * update
        if self.calls >= self.freeze_step:
            self.freeze()
            self.fresh = [v.copy() for v in self.v]
            sizes = [float(np.sqrt(np.square(m[0]).mean())) for m in self.m]
            self.scaling = [np.float32(np.mean(sizes) / size) for size in sizes]

    def frozen_step(self, grads: Sequence[Array], rate: float) -> None:
        last, cuts = self.m, np.cumsum([x[0].size for x in self.x])
        scaled = [m * s for m, s in zip(self.blended(grads), self.scaling, strict=True)]
        united = np.concatenate([x.reshape(len(x), -1) for x in [*scaled, self.padding]], axis=1)
        *parts, self.padding = np.split(sign_mean(united, self.errors[0]), cuts, axis=1)
        tensors = zip(parts, self.x, self.scaling, self.masks, strict=True)
        self.m = [part.reshape(x.shape) / s * mask for part, x, s, mask in tensors]
        beta1, _ = self.betas
        rebuilt = [(new - beta1 * old) / (1 - beta1) for new, old in zip(self.m, last, strict=True)]
        self.fresh = self.varied(self.fresh, rebuilt)
        for i, update in enumerate(self.directions()):
            divisor = np.sqrt(self.v[i]) + self.eps
            factor = float((divisor / (np.sqrt(self.fresh[i]) + self.eps)).max())
            if self.weight_decay[i]:
                ratio = np.linalg.norm((self.m[i] / divisor)[0]) / np.linalg.norm(update[0])
                factor = factor * min(1.0, float(ratio)) + 1 - min(1.0, float(ratio))
            factor, near = min(max(factor, self.factor_min), self.factor_max), self.factor_threshold
            self.factors[i] *= min(max(factor / self.factors[i], 1 - near), 1 + near)
            self.x[i] = self.x[i] - rate * self.coeffs[i] * self.factors[i] * update
