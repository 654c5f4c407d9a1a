"""Where the codes of a payload end."""

from qcomp.core.numeric.buckets import padded_size

__all__ = ["code_bytes"]


def code_bytes(size: int, bucket_size: int, bits: int) -> int:
    """Return the bytes of the packed codes of ``size`` elements."""
    return padded_size(size, bucket_size) * bits // 8
