"""The contract of compressors: their arguments, results and promises."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, cast

from qcomp.core import primitives
from qcomp.core.errors import PayloadError
from qcomp.core.numeric.arrays import (
    Array,
    Kind,
    compute_dtype_name,
    detached,
    dtype_name,
    require_dense,
    require_like,
)
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload, PayloadSpec
from qcomp.core.traits import Coder, Traits


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of all compressors: a frozen dataclass whose fields are its whole configuration.

    A subclass sets `name`, states its `traits` and the layout of its payload, and implements `encode` and `decode` on
    flat arrays. This class implements the rest: shapes, dtypes, keys, buffers, spec strings.

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
        """The promises of this compressor."""

    @abstractmethod
    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:
        """Return the layout, and so the exact number of bytes, of a payload of ``size`` elements.

        If the length depends on the values, this is the layout of the longest payload.

        Parameters
        ----------
        size : int
            Number of elements.
        dtype : str, default "float32"
            Name of the dtype of the computation, "float32" or "float64".
        """

    @abstractmethod
    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        """Return the fields of a vector's payload.

        Parameters
        ----------
        x : array of float32 or float64, shape (n,)
            The vector, with magnitudes below 2^100.
        key : Key or None
            Determines the random draws; None if the compressor draws nothing.

        Raises
        ------
        NonFiniteError
            If a value below 2^100 is still too large for this compressor.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return the vector that is encoded in the fields of a payload.

        Parameters
        ----------
        parts : mapping of str to array
            The fields that `encode` returned.
        size : int
            Number of elements.
        dtype : dtype
            float32 or float64, in the library of the fields.
        """

    def for_shape(self, shape: tuple[int, ...]) -> "Compressor":  # noqa: ARG002
        """Return the compressor for tensors of this shape: this compressor, unless the shape determines its buckets.

        The returned compressor sees the tensor as a vector, so its own ``for_shape`` must return itself for a shape of
        one axis. `compress`, `decompress` and `CompressedMean` call this for every tensor.

        Parameters
        ----------
        shape : tuple of int
            The shape of a tensor.
        """
        return self

    @cached_property
    def variable_length(self) -> bool:
        """Whether the length of a payload depends on the values; `payload_spec` then describes the longest."""
        return self.payload_spec(1).variable_length

    @property
    def fields_by_bucket(self) -> bool:
        """Whether each field of a payload has the first bucket's part first, then the second bucket's, and so on.

        If so, the payload of a vector can be made of its buckets' payloads, and `qcomp.jax` compresses the buckets of
        many tensors at once. The default, False, is always right.
        """
        return False

    @property
    def coder(self) -> Coder | None:
        """The coder that shortens payloads before they are sent, or None.

        With a coder, `encode`, `decode` and all kernels work on ``coder.plain`` and ignore the coder.
        """
        return None

    @cached_property
    def spec(self) -> str:
        """The spec string, from which `qcomp.compressor` makes an equal compressor."""
        inner = [str(v) for f in fields(self) if isinstance(v := getattr(self, f.name), Compressor)]
        if len(inner) > 1:
            raise TypeError(
                f"{type(self).__name__} has {len(inner)} compressors as fields; expected at most one, since a spec "
                "string can name only one: define spec in the class"
            )
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
            The array to compress; arithmetic is in float64 for float64 and in float32 otherwise.
        key : Key, optional
            Determines the random draws; required by compressors that draw.

        Returns
        -------
        Payload
            Holds ``payload_spec(n, dtype).nbytes`` bytes, or fewer with `variable_length`, on the device of x.

        Raises
        ------
        NonFiniteError
            If x holds an infinity, a NaN or a magnitude of 2^100 or more (2^996 or more for `Identity` in float64).
            Nothing is checked while a compiler traces, since there are no values yet.
        """
        require_dense(x, "x")
        own = self.for_shape(tuple(x.shape))
        (x,) = detached([x])
        encoded = primitives.encode(own, x, None, key)
        primitives.require_accepted(own, encoded)
        return own.payload(x, encoded.data)

    def payload(self, x: Array, data: Array) -> Payload:
        """Return the payload of x with this data.

        Parameters
        ----------
        x : array
            The compressed array; gives the number of elements and the dtype.
        data : array of uint8
            The bytes of the payload.
        """
        return Payload(self.spec, math.prod(x.shape), compute_dtype_name(dtype_name(x.dtype)), data)

    def decompress(self, payload: Payload, *, like: Kind, out: Kind | None = None) -> Kind:
        """Decompress a payload.

        Parameters
        ----------
        payload : Payload
            Returned by `compress` of an equal compressor, on any rank, in any library.
        like : array
            Gives the shape, dtype and device of the result. The result is rounded to the dtype once; values beyond the
            range of float16 become infinities.
        out : array, optional
            A buffer of that shape and dtype to write the result into (not for immutable arrays).

        Raises
        ------
        PayloadError
            If the payload was made by an unequal compressor, has a different number of elements from ``like``, or is
            malformed.
        """
        require_dense(like, "like")
        own = self.for_shape(tuple(like.shape))
        own.require_own(payload, like, "like")
        if out is not None:
            require_like(out, like)
        return cast("Kind", primitives.decode(own, payload, like, out=out))

    def add(self, payload: Payload, total: Kind) -> Kind:
        """Return ``total`` plus the decompressed payload; ``total`` is overwritten if it is mutable.

        Parameters
        ----------
        payload : Payload
            As for `decompress`.
        total : array
            Has as many elements as the payload.
        """
        require_dense(total, "total")
        own = self.for_shape(tuple(total.shape))
        own.require_own(payload, total, "total")
        return cast("Kind", primitives.decode(own, payload, total, out=total, accumulate=True))

    def require_own(self, payload: Payload, like: Array, argument: str) -> None:
        """Raise `PayloadError` unless this compressor makes such payloads from arrays like ``like``.

        Parameters
        ----------
        payload : Payload
            The payload to check.
        like : array
            An array of the expected size.
        argument : str
            The name of ``like`` in error texts.
        """
        if not isinstance(payload, Payload):
            raise TypeError(
                f"payload is {payload!r:.80}; expected a qcomp.Payload, such as Payload.from_bytes returns"
            )
        if payload.compressor != self.spec:
            raise PayloadError(
                f"the payload was made by {payload.compressor}; this compressor is {self.spec}"
            )
        size = math.prod(like.shape)
        if payload.size != size:
            raise PayloadError(f"the payload has {payload.size} elements; {argument} has {size}")
        self.payload_spec(size, payload.dtype).check(payload.data)


def require_compressor(argument: str, value: object) -> None:
    """Raise a TypeError that names an argument, unless its value is a compressor."""
    if not isinstance(value, Compressor):
        cure = f"; qcomp.compressor({value!r}) makes one from a spec string" if isinstance(value, str) else ""
        raise TypeError(f"{argument} is {value!r}; expected a qcomp.Compressor{cure}")
