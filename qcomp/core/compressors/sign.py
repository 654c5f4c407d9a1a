"""`ScaledSign`: the sign of every element and the mean magnitude of every bucket, in one bit per element."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.numeric.arrays import Array, array_namespace
from qcomp.core.numeric.buckets import Block, validate_bucket_size
from qcomp.core.numeric.random import Key
from qcomp.core.numeric.sums import mean_abs, rms
from qcomp.core.registry import register
from qcomp.core.traits import Traits


@register
@dataclass(frozen=True)
class ScaledSign(BucketedCompressor):
    """C(v) = scale * sign(v) in every bucket, with sign(0) = +1.

    Parameters
    ----------
    bucket_size : int
        Elements that share a scale, a power of two from 8.
    scale : {"l1", "rms"}
        ``"l1"``, the mean magnitude ||v||_1 / n, gives the closest vector of this form, and a contraction: ||C(v) -
        v||^2 = (1 - ||v||_1^2 / (n ||v||_2^2)) ||v||^2 exactly. ``"rms"``, ||v||_2 / sqrt(n), is the scale in the 1-bit
        Adam paper: it keeps the norm, and residuals shrink faster, but the error of a sparse vector may exceed the
        vector.

    Notes
    -----
    Sends 1 bit per element and 32 bits per bucket. Source: Karimireddy et al., ICML 2019, section 3 (l1); Tang et al.,
    ICML 2021, section 4 (rms).

    Examples
    --------
    >>> import numpy as np
    >>> c = ScaledSign(bucket_size=8)
    >>> x = np.asarray([1.0, -2.0, 0.0, 5.0], dtype=np.float32)
    >>> c.decompress(c.compress(x), like=x)
    array([ 2., -2.,  2.,  2.], dtype=float32)
    """

    name: ClassVar[str] = "sign"
    scales: ClassVar[tuple[str, ...]] = ("scale",)

    bucket_size: int = 4096
    scale: Literal["l1", "rms"] = "l1"

    def __post_init__(self) -> None:
        validate_bucket_size(self.bucket_size)
        if self.scale not in ("l1", "rms"):
            raise ValueError(f"scale is {self.scale!r}; expected 'l1' or 'rms'")

    @cached_property
    def traits(self) -> Traits:
        """A contraction with delta 1 / bucket_size for scale "l1"; no promise for "rms"."""
        return Traits(self.bucket_size, delta=1 / self.bucket_size if self.scale == "l1" else None)

    @property
    def bits(self) -> int:
        """One bit: 1 for negative."""
        return 1

    def encode_block(
        self,
        rows: Array,
        block: Block,
        key: Key | None,  # noqa: ARG002
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return the sign bits and the scale of each bucket."""
        xp = array_namespace(rows)
        scale = mean_abs(rows, block.filled) if self.scale == "l1" else rms(rows, block.filled)
        return xp.astype(rows < 0, xp.uint8), (scale,)

    def decode_block(self, codes: Array, scales: tuple[Array, ...]) -> Array:
        """Return plus or minus the scale, by a product, since selecting takes NumPy three times as long."""
        (scale,) = scales
        return (1.0 - 2.0 * array_namespace(codes).astype(codes, scale.dtype)) * scale
