"""`Scaled`: makes an unbiased compressor a contraction, which error feedback requires, by scaling its results."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from qcomp.core.compressor import Compressor, require_compressor
from qcomp.core.numeric.arrays import Array, flush, truncate_last_bit
from qcomp.core.numeric.random import Key
from qcomp.core.payload import PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Coder, Traits


@register
@dataclass(frozen=True)
class Scaled(Compressor):
    """C(v) = Q(v) / (1 + omega) for an unbiased compressor Q, a contraction with delta = 1 / (1 + omega).

    Parameters
    ----------
    compressor : Compressor
        Unbiased, with a known omega.

    Notes
    -----
    The payload is Q's; decompression applies the factor. Source: Beznosikov et al., JMLR 2023, lemma 8; E ||c Q -
    v||^2 <= (c^2 (1 + omega) - 2 c + 1) ||v||^2 is smallest at c = 1 / (1 + omega).

    Examples
    --------
    >>> import qcomp
    >>> c = Scaled(qcomp.QSGD(levels=7, bucket_size=512))
    >>> c.spec
    'scaled(qsgd:levels=7,bucket_size=512,norm=max)'
    """

    name: ClassVar[str] = "scaled"

    compressor: Compressor

    def __post_init__(self) -> None:
        require_compressor("compressor", self.compressor)
        traits = self.compressor.traits
        if not traits.unbiased or traits.omega is None:
            raise ValueError(
                f"compressor is {self.compressor.spec}; expected an unbiased compressor with a known omega"
            )

    @property
    def factor(self) -> float:
        """The factor of decompressed values, 1 / (1 + omega)."""
        omega = self.compressor.traits.omega
        assert omega is not None  # checked at construction
        return 1 / (1 + omega)

    @property
    def traits(self) -> Traits:
        """A contraction with delta 1 / (1 + omega), minus the rounding error of the product."""
        inner = self.compressor.traits
        return Traits(
            inner.bucket_size,
            random=inner.random,
            delta=self.factor * (1 - 2**-12),
            keeps_zero=inner.keeps_zero,
            kept=inner.kept,
        )

    @cached_property
    def coder(self) -> Coder | None:
        """The coder of the wrapped compressor."""
        inner = self.compressor.coder
        if inner is None:
            return None
        assert isinstance(inner.plain, Compressor)
        return inner.around(Scaled(inner.plain))

    @property
    def fields_by_bucket(self) -> bool:
        """As for the wrapped compressor."""
        return self.compressor.fields_by_bucket

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:
        """Return the layout of the wrapped compressor."""
        return self.compressor.payload_spec(size, dtype)

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        """Return the payload fields of the wrapped compressor."""
        return self.compressor.encode(x, key)

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return the result of the wrapped compressor times the factor."""
        return flush(truncate_last_bit(self.compressor.decode(parts, size, dtype) * self.factor))
