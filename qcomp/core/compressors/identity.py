"""`Identity`: the compressor that leaves values as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, cast

from qcomp.core.compressor import Compressor
from qcomp.core.numeric.arrays import Array, Kind, array_namespace
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Field, Payload, PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits


@register
@dataclass(frozen=True)
class Identity(Compressor):
    """C(v) = v, so that an exact mean has the same interface as a compressed one.

    Notes
    -----
    Sends 64 bits per element in float64 and 32 bits in every other dtype. Since there are no scales in float32, float64
    magnitudes need only be below 2^996, and count as 0 only below 2^-1022. Payloads and decompressed arrays hold copies
    of the values. Inside a mean, where nobody else can see the arrays, values are not copied.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.asarray([0.1, -0.2], dtype=np.float32)
    >>> Identity().decompress(Identity().compress(x), like=x)
    array([ 0.1, -0.2], dtype=float32)
    """

    name: ClassVar[str] = "identity"

    @property
    def traits(self) -> Traits:
        """Lossless."""
        return Traits(1, unbiased=True, omega=0.0, delta=1.0, lossless=True, keeps_zero=True)

    def compress(self, x: Array, *, key: Key | None = None) -> Payload:
        """Return a payload with a copy of the values; see `Compressor.compress`."""
        return super().compress(_copied(x), key=key)

    def decompress(self, payload: Payload, *, like: Kind, out: Kind | None = None) -> Kind:
        """Return a copy of the values; see `Compressor.decompress`."""
        values = super().decompress(payload, like=like, out=out)
        return values if out is not None else cast("Kind", _copied(values))

    @property
    def fields_by_bucket(self) -> bool:
        """True, since elements are independent."""
        return True

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:
        """Return the layout: the values."""
        return _layout(size, dtype)

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:  # noqa: ARG002
        """Return the values."""
        return {"values": x}

    def decode(self, parts: Mapping[str, Array], size: int, dtype: object) -> Array:  # noqa: ARG002
        """Return the values."""
        return array_namespace(parts["values"]).astype(parts["values"], dtype, copy=False)


def _copied(x: Array) -> Array:
    return array_namespace(x).asarray(x, copy=True)


@lru_cache(1024)  # a step needs the layout of each small tensor several times
def _layout(size: int, dtype: str) -> PayloadSpec:
    return PayloadSpec((Field("values", dtype, size),))
