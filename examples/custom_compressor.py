"""A compressor of your own: TernGrad, checked against its promises and then trained with.

Start it with ``python examples/custom_compressor.py``, which trains on four ranks in this process. TernGrad sends -1, 0
or 1 for each element and the largest magnitude of each bucket. Source: Wen et al., NeurIPS 2017.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import qcomp
from qcomp import extend

FEATURES, SAMPLES, BATCH, STEPS, RANKS = 2_000, 4_000, 100, 150, 4


@extend.register_compressor
@dataclass(frozen=True)
class TernGrad(extend.BucketedCompressor):
    """Rounds each element at random to 0 or to the largest magnitude of its bucket, with its sign, without bias."""

    name: ClassVar[str] = "terngrad"
    scales: ClassVar[tuple[str, ...]] = ("largest",)

    bucket_size: int = 512

    def __post_init__(self) -> None:
        extend.validate_bucket_size(self.bucket_size)

    @property
    def traits(self) -> extend.Traits:
        """Unbiased; E |C(v) - v|^2 is at most omega |v|^2."""
        omega = (1 + self.bucket_size**0.5) / 2
        return extend.Traits(self.bucket_size, random=True, unbiased=True, omega=omega, keeps_zero=True)

    @property
    def bits(self) -> int:
        """One bit says whether the element is 0, and one has its sign."""
        return 2

    def encode_block(self, rows: Any, block: extend.Block, key: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return 0, 1 or 3 for each element, 3 being -1; and the largest magnitude of each bucket."""
        xp = extend.array_namespace(rows)
        largest = xp.max(xp.abs(rows), axis=1)
        chance = extend.divide(xp.abs(rows), xp.where(largest > 0, largest, xp.ones_like(largest))[:, None])
        draws = extend.draws16(key, block, bucket_size=self.bucket_size, like=rows)
        codes = xp.where(draws < xp.round(chance * 65536.0), xp.where(rows < 0, 3, 1), 0)
        return xp.astype(codes, xp.uint8), (largest,)

    def decode_block(self, codes: Any, scales: tuple[Any, ...]) -> Any:
        """Return 0, the largest magnitude, or minus that."""
        xp, (largest,) = extend.array_namespace(codes), scales
        return xp.where(codes == 0, 0 * largest, xp.where(codes == 1, largest, -largest))


def generate_data() -> tuple[Any, Any]:
    """Return rows (samples, features) and a target for each: noisy values of a hidden linear function."""
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((SAMPLES, FEATURES)) / np.sqrt(FEATURES)).astype(np.float32)
    targets = rows @ rng.standard_normal(FEATURES) + 0.1 * rng.standard_normal(SAMPLES)
    return rows, targets.astype(np.float32)


def train(comm: qcomp.comm.Communicator) -> tuple[float, float, int]:
    """Train on this rank's share of the rows; return the loss before and after, and the bytes that it sent."""
    rows, targets = generate_data()
    own_rows, own_targets = rows[comm.rank :: comm.size], targets[comm.rank :: comm.size]
    # TernGrad is unbiased, so it needs no error feedback. By default this small model would not be compressed at all.
    opt = qcomp.CompressedSGD(
        learning_rate=20.0,
        momentum=0.0,
        compressor=TernGrad(),
        averaging=qcomp.Averaging(feedback=False),
        exact=None,
    )
    weights = np.zeros(FEATURES, dtype=np.float32)
    state = opt.init(weights, comm)
    for step in range(STEPS):
        batch = np.random.default_rng((comm.rank, step)).integers(len(own_targets), size=BATCH)
        wrong = own_rows[batch] @ weights - own_targets[batch]
        weights, state = opt.step(weights, wrong @ own_rows[batch] / BATCH, state, comm)
    after = np.mean((rows @ weights - targets) ** 2)
    return float(np.mean(targets**2)), float(after), comm.bytes_sent


def main() -> None:
    """Check the compressor, then train with it."""
    qcomp.testing.check_compressor(TernGrad(bucket_size=64), max_examples=5)
    print("TernGrad keeps every promise")
    before, after, sent = qcomp.comm.run_local(RANKS, train)[0]
    exact = 2 * (RANKS - 1) / RANKS * 4 * FEATURES * STEPS
    print(f"loss {before:.3f} before and {after:.3f} after {STEPS} steps")
    print(f"{sent:,} bytes sent by each rank, {exact / sent:.1f} times less than float32 around a ring")


if __name__ == "__main__":
    main()
