"""`GapCoder`: shortens the payloads of sparse compressors, on the host."""

from dataclasses import dataclass, replace

from qcomp.core import coding
from qcomp.core.coding import gaps
from qcomp.core.numeric.arrays import Array, from_host_bytes, host_bytes, is_traced
from qcomp.core.payload import Field, PayloadSpec
from qcomp.core.traits import AnyCompressor


@dataclass(frozen=True)
class GapCoder:
    """Codes the entries, lowest levels and steps in payloads of a sparse compressor; see `qcomp.core.coding.gaps`."""

    plain: AnyCompressor
    k: int
    bucket_size: int
    value_bits: int

    def around(self, plain: AnyCompressor) -> "GapCoder":
        """Return a coder like this one for a compressor with the same payloads."""
        return replace(self, plain=plain)

    def payload_spec(self, size: int) -> PayloadSpec:
        """Return the layout of the longest payload of ``size`` elements."""
        longest = gaps.longest(size, self._shape)
        return PayloadSpec((Field("gaps", "uint8", longest),), variable_length=True)

    def shorten(self, data: Array, size: int) -> Array:
        """Return the shortened data of a payload of the plain compressor."""
        if is_traced(data):
            raise TypeError(
                f"coding is None with value_bits={self.value_bits}, so the length of a payload depends on the values; "
                "expected coding='fixed', since a compiler such as jax.jit needs a fixed length"
            )
        return from_host_bytes(coding.encode_gaps(host_bytes(data), size, self._shape), data)

    def restore(self, data: Array, size: int) -> Array:
        """Return the data of the plain payload; raises PayloadError unless the bytes hold ``size`` elements."""
        return from_host_bytes(coding.decode_gaps(host_bytes(data), size, self._shape), data)

    @property
    def _shape(self) -> gaps.Shape:
        return gaps.Shape(self.k, self.bucket_size, self.value_bits)
