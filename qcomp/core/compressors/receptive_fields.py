"""`WholeFields`: makes the buckets of a compressor hold whole receptive fields of convolutions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import ClassVar

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.numeric.arrays import Array, array_namespace, concat, device, dtype_name
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload, PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits


@register
@dataclass(frozen=True)
class WholeFields(Compressor):
    """Wraps a compressor so that its buckets hold whole receptive fields of a convolution.

    A field is the slice of a tensor at one index of its first two axes: kernel height * width consecutive elements of
    torch's ``Conv2d.weight``. A bucket holds as many whole fields as fit, padded with zeros: 512 elements hold 56
    fields of 9 and 8 zeros. If a tensor has at most two axes, or its field divides a bucket or exceeds it, the wrapped
    compressor is used directly.

    Parameters
    ----------
    compressor : Compressor
        The compressor to wrap. It must have payloads of fixed length and keep zeros, as `QSGD` and `TopK` do.
    field : int
        Elements of a field. Leave the default; `for_shape` sets it.

    Notes
    -----
    All promises of the wrapped compressor hold, since the zeros are ordinary elements to it. The padding of a bucket,
    which is shorter than a field, is sent too: for fields of 9 in buckets of 512, a payload has 512 / 504 of the bytes.
    Around QSGD, the numba kernels pad the buckets while encoding. All other versions copy the values to and from padded
    buckets, which takes longer than a kernel. Source: Alistarh et al., NeurIPS 2017, section 5, which reshapes tensors
    so that no receptive field is split over two buckets.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> c = WholeFields(qcomp.QSGD(levels=7, bucket_size=512))
    >>> weight = np.ones((64, 32, 3, 3), dtype=np.float32)
    >>> c.for_shape(weight.shape).traits.bucket_size
    504
    >>> payload = c.compress(weight, key=qcomp.Key())
    >>> payload.compressor, payload.nbytes, c.compressor.payload_spec(weight.size).nbytes
    ('whole_fields(qsgd:levels=7,bucket_size=512,norm=max):field=9', 9620, 9360)
    """

    name: ClassVar[str] = "whole_fields"

    compressor: Compressor
    field: int = 1

    def __post_init__(self) -> None:
        inner = self.compressor
        if not inner.traits.keeps_zero:
            raise ValueError(f"compressor is {inner.spec}; expected one that keeps zeros, such as QSGD")
        if inner.variable_length:
            raise ValueError(f"compressor is {inner.spec}; expected one whose payloads have a fixed length")
        if type(self.field) is not int or not 1 <= self.field <= inner.traits.bucket_size:
            raise ValueError(
                f"field is {self.field!r}; expected an integer from 1 to {inner.traits.bucket_size}, the elements of "
                "a bucket"
            )

    def for_shape(self, shape: tuple[int, ...]) -> Compressor:
        """Return the compressor whose buckets hold whole fields of tensors of this shape."""
        field, room = prod(shape[2:]), self.compressor.traits.bucket_size
        if len(shape) <= 1 and self.field > 1:  # the flat view of a tensor whose shape is already known
            return self
        if not 1 < field <= room or room % field == 0:
            return self.compressor.for_shape(shape)
        return replace(self, field=field)

    @cached_property
    def traits(self) -> Traits:
        """The promises of the wrapped compressor, with buckets of whole fields."""
        inner = self.compressor.traits
        return replace(inner, bucket_size=inner.bucket_size // self.field * self.field)

    @property
    def fields_by_bucket(self) -> bool:
        """As for the wrapped compressor."""
        return self.compressor.fields_by_bucket

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:
        """Return the layout of the wrapped compressor, for the elements and the zeros."""
        return self.compressor.payload_spec(self._filled(size), dtype)

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        """Return the payload fields of the wrapped compressor."""
        xp, held = array_namespace(x), self.traits.bucket_size
        rows = x.shape[0] // held
        zeros = self.compressor.traits.bucket_size - held
        padding = xp.zeros((rows, zeros), dtype=x.dtype, device=device(x))
        full = xp.concat([xp.reshape(x[: rows * held], (rows, held)), padding], axis=1)
        filled = concat([xp.reshape(full, (-1,)), x[rows * held :]])
        data = primitives.encode(self.compressor, filled, None, key).data
        return self.payload_spec(x.shape[0], dtype_name(x.dtype)).split(data)

    def decode(self, parts: Mapping[str, Array], size: int, dtype: object) -> Array:
        """Return the result of the wrapped compressor without the zeros."""
        some = next(iter(parts.values()))
        xp, held = array_namespace(some), self.traits.bucket_size
        like = xp.empty((self._filled(size),), dtype=dtype, device=device(some))
        spec = self.payload_spec(size, dtype_name(dtype))
        payload = Payload(self.compressor.spec, like.shape[0], dtype_name(dtype), spec.join(parts))
        filled = primitives.decode(self.compressor, payload, like)
        rows, room = size // held, self.compressor.traits.bucket_size
        full = xp.reshape(filled[: rows * room], (rows, room))[:, :held]
        return concat([xp.reshape(full, (-1,)), filled[rows * room :]])

    def _filled(self, size: int) -> int:
        """Return the number of elements of a vector, zeros included."""
        rows, rest = divmod(size, self.traits.bucket_size)
        return rows * self.compressor.traits.bucket_size + rest
