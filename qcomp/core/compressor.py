"""The compressor's contract: what every compressor takes, returns and promises."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Protocol

from qcomp.core import primitives
from qcomp.core.errors import PayloadError
from qcomp.core.numeric.arrays import Array, compute_dtype_name, dtype_name, require_like
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload, PayloadSpec

__all__ = ["Coder", "Compressor", "Traits"]


@dataclass(frozen=True)
class Traits:
    """What a compressor C promises of its result, for every finite input v.

    `qcomp.testing.check_compressor` tests each promise that is made.

    Parameters
    ----------
    bucket_size : int
        The vector may be cut at multiples of this without a change of the result; 1 where elements are
        independent.
    random : bool
        Whether it draws random numbers, and so needs a key.
    unbiased : bool
        E C(v) = v, up to the 2**-17 of a level that 16-bit draws leave.
    omega : float or None
        With ``unbiased``: E ||C(v) - v||^2 <= omega ||v||^2.
    delta : float or None
        Contraction: E ||C(v) - v||^2 <= (1 - delta) ||v||^2, 0 < delta <= 1.
    lossless : bool
        C(v) = v bit for bit.
    keeps_zero : bool
        An element that is 0 stays 0.
    kept : int or None
        At most so many elements of a bucket are other than 0.
    """

    bucket_size: int
    random: bool = False
    unbiased: bool = False
    omega: float | None = None
    delta: float | None = None
    lossless: bool = False
    keeps_zero: bool = False
    kept: int | None = None


class Coder(Protocol):
    """What shortens the payloads of a compressor without loss, on the host."""

    @property
    def plain(self) -> "Compressor":
        """The compressor of the same results whose payloads are shortened."""
        ...

    def around(self, plain: "Compressor") -> "Coder":
        """Return this coder for another compressor with the same payloads."""
        ...

    def shorten(self, data: Array, size: int) -> Array:
        """Return the data of a payload from that of the plain compressor."""
        ...

    def restore(self, data: Array, size: int) -> Array:
        """Return what was shortened; `PayloadError` if these bytes are of nothing."""
        ...


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of all compressors: a frozen dataclass whose fields are its whole configuration.

    A subclass names itself, states its `traits` and the layout of its payload, and implements `encode` and
    `decode` on flat arrays. Everything else (shapes, dtypes, keys, buffers, spec strings) is here.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> c = qcomp.QSGD(levels=7, bucket_size=512)
    >>> x = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(10, 100)
    >>> payload = c.compress(x, key=qcomp.Key(seed=1))
    >>> y = c.decompress(payload, like=x)
    >>> y.shape, y.dtype.name, payload.nbytes
    ((10, 100), 'float32', 520)
    """

    name: ClassVar[str]
    """The first word of the spec string."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What this compressor promises."""

    @abstractmethod
    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:
        """Return the layout, and so the exact number of bytes, of the payload of ``size`` elements.

        The layout of the longest one where the length depends on the values.
        """

    @abstractmethod
    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        """Return the fields of the payload of x, float32 or float64 of shape (n,), all magnitudes below 2^100.

        Raises
        ------
        NonFiniteError
            If a value is too large for this compressor all the same.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return the vector, of shape (size,) and dtype float32 or float64, from the fields of its payload."""

    def for_shape(self, shape: tuple[int, ...]) -> "Compressor":  # noqa: ARG002
        """Return the compressor of tensors of this shape: this one, unless it takes its buckets from the shape.

        What it returns must return itself for a shape of one axis, as which it sees the tensor. `compress`,
        `decompress` and `CompressedMean` ask this of every tensor.
        """
        return self

    @cached_property
    def variable_length(self) -> bool:
        """Whether the length of a payload depends on the values; `payload_spec` then says the longest."""
        return self.payload_spec(1).variable_length

    @property
    def coder(self) -> Coder | None:
        """What shortens payloads before they are sent, None if nothing does.

        `encode`, `decode` and all kernels are those of ``coder.plain`` then, and know nothing of the coder.
        """
        return None

    @cached_property
    def spec(self) -> str:
        """The spec string, from which `qcomp.compressor` makes an equal compressor."""
        inner = [str(v) for f in fields(self) if isinstance(v := getattr(self, f.name), Compressor)]
        options = [
            f"{f.name}={v}" for f in fields(self) if not isinstance(v := getattr(self, f.name), Compressor)
        ]
        nested = f"({inner[0]})" if inner else ""
        return f"{self.name}{nested}" + (":" + ",".join(options) if options else "")

    def __str__(self) -> str:
        return self.spec

    def compress(self, x: Array, *, key: Key | None = None) -> Payload:
        """Compress an array.

        Parameters
        ----------
        x : array of float16, bfloat16, float32 or float64, any shape
            What to compress; arithmetic is in float64 for float64 and in float32 otherwise.
        key : Key, optional
            Names the random draws; required by compressors that draw.

        Returns
        -------
        Payload
            ``payload_spec(n, dtype).nbytes`` bytes, or fewer with `variable_length`, on the device of x.

        Raises
        ------
        NonFiniteError
            If x holds an infinity, a NaN or a magnitude of 2^100 or more. Not while a compiler traces, when there
            are no values to look at.
        """
        own = self.for_shape(tuple(x.shape))
        encoded = primitives.encode(own, x, None, key)
        primitives.require_accepted(own, encoded)
        return own.payload(x, encoded.data)

    def payload(self, x: Array, data: Array) -> Payload:
        """Return the payload of x with this data."""
        return Payload(self.spec, math.prod(x.shape), compute_dtype_name(dtype_name(x.dtype)), data)

    def decompress(self, payload: Payload, *, like: Array, out: Array | None = None) -> Array:
        """Decompress a payload.

        Parameters
        ----------
        payload : Payload
            What `compress` of an equal compressor returned, on any rank, in any library.
        like : array
            Gives the shape, the dtype and the device of the result, which is rounded to it once; what is beyond the
            range of float16 becomes an infinity there.
        out : array, optional
            A buffer of that shape and dtype to write the result into (not for immutable arrays).

        Raises
        ------
        PayloadError
            If the payload is of another compressor or another number of elements, or cannot be one.
        """
        own = self.for_shape(tuple(like.shape))
        own.require_own(payload, like, "like")
        if out is not None:
            require_like(out, like)
        return primitives.decode(own, payload, like, out=out)

    def add(self, payload: Payload, total: Array) -> Array:
        """Return ``total`` plus what a payload decompresses to; its buffer is reused if it can be written to.

        Parameters
        ----------
        payload : Payload
            As for `decompress`.
        total : array
            Of as many elements as the payload has.
        """
        own = self.for_shape(tuple(total.shape))
        own.require_own(payload, total, "total")
        return primitives.decode(own, payload, total, out=total, accumulate=True)

    def require_own(self, payload: Payload, like: Array, argument: str) -> None:
        """Raise `PayloadError` unless this compressor makes such payloads of arrays like this one."""
        if payload.compressor != self.spec:
            raise PayloadError(
                f"the payload was made by {payload.compressor}; this compressor is {self.spec}"
            )
        size = math.prod(like.shape)
        if payload.size != size:
            raise PayloadError(f"the payload has {payload.size} elements; {argument} has {size}")
        self.payload_spec(size, payload.dtype).check(payload.data)
