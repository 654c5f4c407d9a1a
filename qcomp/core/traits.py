"""`Traits`, the promises of a compressor, and the protocols for the parts of compressors that the primitives use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.random import Key
from qcomp.core.payload import PayloadSpec


@dataclass(frozen=True)
class Traits:
    """The promises of a compressor C for every finite input v.

    The bounds ``omega`` and ``delta`` hold up to an error of 2^-119 in each element, since a scale below 2^-126 becomes
    zero, and an element may be up to 128 times a scale. `qcomp.testing.check_compressor` tests each promise.

    Parameters
    ----------
    bucket_size : int
        Cutting the vector at multiples of this size does not change the result; 1 if elements are independent.
    random : bool
        Whether C draws random numbers, and so needs a key.
    unbiased : bool
        E C(v) = v, up to 2^-17 of a level, the resolution of 16-bit draws.
    omega : float or None
        With ``unbiased``: E ||C(v) - v||^2 <= omega ||v||^2.
    delta : float or None
        Contraction: E ||C(v) - v||^2 <= (1 - delta) ||v||^2, 0 < delta <= 1.
    lossless : bool
        C(v) = v bit for bit.
    keeps_zero : bool
        An element that is 0 stays 0.
    kept : int or None
        The largest number of elements of a decompressed bucket that differ from 0.
    peak : float or None
        In every bucket max |C(v) - v| <= peak max |v|, whatever the draws. Below 1, the residual of error feedback
        stays bounded: with gradients up to g it is at most peak / (1 - peak) g.
    """

    bucket_size: int
    random: bool = False
    unbiased: bool = False
    omega: float | None = None
    delta: float | None = None
    lossless: bool = False
    keeps_zero: bool = False
    kept: int | None = None
    peak: float | None = None


class Coder(Protocol):
    """Shortens the payloads of a compressor without loss, on the host."""

    @property
    def plain(self) -> "AnyCompressor":
        """The compressor whose payloads are shortened; it has the same results."""
        ...

    def around(self, plain: "AnyCompressor") -> "Coder":
        """Return a coder like this one for a compressor with the same payloads."""
        ...

    def shorten(self, data: Array, size: int) -> Array:
        """Return the shortened data of a payload of the plain compressor."""
        ...

    def restore(self, data: Array, size: int) -> Array:
        """Return the plain data; raise `PayloadError` if the bytes are malformed."""
        ...


class AnyCompressor(Protocol):
    """The part of `qcomp.Compressor` that primitives and kernels use."""

    def __hash__(self) -> int: ...

    @property
    def spec(self) -> str:
        """The spec string."""
        ...

    @property
    def traits(self) -> Traits:
        """The promises."""
        ...

    @property
    def coder(self) -> Coder | None:
        """The coder that shortens payloads before they are sent, or None."""
        ...

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:
        """Return the layout of the payload of ``size`` elements."""
        ...

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        """Return the fields of the payload of x."""
        ...

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return the vector from the fields of its payload."""
        ...
