"""`BucketedCompressor`: base of the compressors with a small code per element and a few scales per bucket."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from qcomp.core.compressor import Compressor
from qcomp.core.numeric import bitplanes
from qcomp.core.numeric.arrays import Array, array_namespace, flush, kind_of_array
from qcomp.core.numeric.buckets import Block, blocks, bucket_count, join_blocks, padded_size, tail_length
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Field, PayloadSpec


@dataclass(frozen=True)
class BucketedCompressor(Compressor):
    """A compressor with a code of ``bits`` bits per element and one or more float32 scales per bucket.

    A subclass encodes and decodes buckets of equal length; this class cuts, packs and joins them.
    """

    scales: ClassVar[tuple[str, ...]]
    """The names of the scales of a bucket, in the order of the payload."""

    @staticmethod
    def length_of(count: int) -> int:
        """Return the length to which a bucket of ``count`` elements is padded.

        Parameters
        ----------
        count : int
            Elements of a bucket without padding.
        """
        return tail_length(count)

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code."""

    @abstractmethod
    def encode_block(self, rows: Array, block: Block, key: Key | None) -> tuple[Array, tuple[Array, ...]]:
        """Return the codes, uint8 of shape (rows, length), and the scales, each of shape (rows,).

        Padding is 0 in ``rows`` and must get code 0, so that the wire has zeros there.

        Parameters
        ----------
        rows : array, shape (rows, length)
            The elements, one bucket per row.
        block : Block
            The position of the rows within the vector.
        key : Key or None
            Determines the random draws; None if the compressor draws nothing.
        """

    @abstractmethod
    def decode_block(self, codes: Array, scales: tuple[Array, ...]) -> Array:
        """Return the values, of shape (rows, length); scales have shape (rows, 1) and the dtype of the result.

        Parameters
        ----------
        codes : array of uint8, shape (rows, length)
            The codes, one bucket per row; int32 for codes of more than 8 bits.
        scales : tuple of arrays, each of shape (rows, 1)
            The scales of each bucket.
        """

    @property
    def fields_by_bucket(self) -> bool:
        """True without a coder; a coder mixes buckets."""
        return self.coder is None

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:  # noqa: ARG002
        """Return the layout: the packed codes of all buckets, then each of the scales."""
        return _layout(size, self.traits.bucket_size, self.bits, self.scales, self.length_of)

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        """Return the packed codes and the scales of a flat vector."""
        xp = array_namespace(x)
        codes: list[Array] = []
        scales: dict[str, list[Array]] = {name: [] for name in self.scales}
        for block in blocks(x.shape[0], self.traits.bucket_size, self.length_of):
            block_codes, block_scales = self.encode_block(flush(block.read(x)), block, key)
            if not isinstance(block_scales, tuple | list):
                raise TypeError(
                    f"{type(self).__name__}.encode_block returned {kind_of_array(block_scales)} for the scales; "
                    "expected a tuple, such as (scale,)"
                )
            codes.append(xp.reshape(bitplanes.pack(block_codes, self.bits), (-1,)))
            for name, values in zip(self.scales, block_scales, strict=True):
                scales[name].append(flush(xp.astype(values, xp.float32, copy=False)))
        parts = {name: join_blocks(values, dtype=xp.float32, like=x) for name, values in scales.items()}
        return {"codes": join_blocks(codes, dtype=xp.uint8, like=x), **parts}

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return the flat vector of the packed codes and scales."""
        xp = array_namespace(parts["codes"])
        values, offset, bits = [], 0, self.bits
        for block in blocks(size, self.traits.bucket_size, self.length_of):
            nbytes = block.rows * block.length * bits // 8
            packed = xp.reshape(parts["codes"][offset : offset + nbytes], (block.rows, -1))
            offset += nbytes
            buckets = slice(block.first_bucket, block.first_bucket + block.rows)
            scales = [xp.astype(parts[name][buckets][:, None], dtype, copy=False) for name in self.scales]
            values.append(block.flat(self.decode_block(bitplanes.unpack(packed, bits), tuple(scales))))
        return join_blocks(values, dtype=dtype, like=parts["codes"])


@lru_cache(1024)  # otherwise small calls spend more time here than on arithmetic
def _layout(
    size: int, bucket_size: int, bits: int, scales: tuple[str, ...], length_of: Callable[[int], int]
) -> PayloadSpec:
    codes = padded_size(size, bucket_size, length_of) * bits // 8
    count = bucket_count(size, bucket_size)
    return PayloadSpec((Field("codes", "uint8", codes), *(Field(name, "float32", count) for name in scales)))
