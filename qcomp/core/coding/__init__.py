"""Codes of variable length for quantised vectors, on host bytes.

``"elias"`` is the code of the QSGD paper, ``"range"`` a range coder; `qcomp.core.coding.model` says how close its code
comes to the entropy. Both code a level from 0 to 32767 and a sign for each element; the code does not include the
scales of buckets. `encode_gaps` codes the payloads of sparse compressors. The loops run in the kernels of
`qcomp.backends` if there are any; the pure versions here define every byte.
"""

from qcomp.core.coding import gaps, planes, qsgd_codes, range_coder, rans
from qcomp.core.coding.bits import numbers
from qcomp.core.kernels import Coders, chosen_coders

__all__ = ["CODINGS", "LARGEST", "PURE", "decode", "decode_gaps", "encode", "encode_gaps", "pack", "unpack"]

CODINGS = ("elias", "range")
LARGEST = 32767
"""The largest number of levels above zero."""

Bytes = bytes | bytearray | memoryview


def first_invalid(levels: memoryview, negative: memoryview, largest: int) -> int:
    """Return the index of the first element with an invalid level or sign, or -1."""
    for i, (level, sign) in enumerate(zip(numbers(levels), negative, strict=True)):
        if level > largest or sign > min(level, 1):
            return i
    return -1


PURE = Coders(
    name="pure",
    unpack=planes.unpack,
    pack=planes.pack,
    first_invalid=first_invalid,
    paper_encode=qsgd_codes.encode,
    paper_decode=qsgd_codes.decode,
    count_classes=rans.count_classes,
    push=rans.push,
    pop=rans.pop,
    gaps_encode=gaps.encode,
    gaps_decode=gaps.decode,
)


def unpack(packed: Bytes, *, size: int, bits: int, bucket_size: int) -> tuple[bytearray, bytearray]:
    """Return levels and signs, as `encode` takes them, from codes packed by `qcomp.core.numeric.bitplanes`.

    A code has ``bits`` bits, 2 to 16: a level with the sign bit on top. Padding is dropped.
    """
    return _loops().unpack(_view(packed), size, bits, bucket_size)


def pack(levels: Bytes, negative: Bytes, *, bits: int, bucket_size: int) -> bytearray:
    """Return packed codes, the inverse of `unpack`, with zeros as padding."""
    return _loops().pack(_view(levels), _view(negative), bits, bucket_size)


def encode(coding: str, levels: Bytes, negative: Bytes, *, largest: int) -> bytes:
    """Return the code of a vector of n elements.

    The levels, 0 to ``largest``, are 16-bit integers in little endian; a byte of ``negative`` is 1 for a negative
    element, else 0, and 0 if the level is 0. ``largest`` is the number of levels above zero, 1 to 32767. The code
    "range" has at most n*b/8 + 5 bytes, or + 17 from 2^14 elements on, where b is one more than the bits of
    ``largest``; "elias" has at most 24 bits per element, plus 1 byte. Raises ValueError for other arguments.

    Examples
    --------
    >>> levels, negative = bytes([0, 0, 3, 0, 0, 0]), bytes([0, 1, 0])  # 0, -3, 0
    >>> code = encode("elias", levels, negative, largest=7)
    >>> code.hex()
    '005100'
    >>> decode("elias", code, size=3, largest=7) == (levels, negative)
    True
    """
    _validate(coding, largest)
    levels, negative = _view(levels), _view(negative)
    if len(levels) != 2 * len(negative):
        raise ValueError(
            f"levels has {len(levels)} bytes; expected {2 * len(negative)}, two for each byte of negative"
        )
    coders = _loops()
    bad = coders.first_invalid(levels, negative, largest)
    if bad >= 0:
        level = int.from_bytes(levels[2 * bad : 2 * bad + 2], "little")
        raise ValueError(
            f"element {bad} has level {level} and negative {negative[bad]}; expected a level from 0 to {largest}, and "
            "negative 0 or 1, always 0 if the level is 0"
        )
    if coding == "elias":
        return coders.paper_encode(levels, negative)
    return range_coder.encode(coders, levels, negative, largest)


def decode(coding: str, data: Bytes, *, size: int, largest: int) -> tuple[bytearray, bytearray]:
    """Return levels and signs, the inverse of `encode`; memory and time are proportional to ``size``.

    Raises PayloadError if the bytes are not the code of a vector of ``size`` elements: truncated, too long, damaged.
    """
    _validate(coding, largest)
    if size < 0:
        raise ValueError(f"size is {size}; expected at least 0")
    view = _view(data)
    coders = _loops()
    if coding == "elias":
        return coders.paper_decode(view, size, largest)
    return range_coder.decode(coders, view, size, largest)


def encode_gaps(plain: Bytes, size: int, shape: gaps.Shape) -> bytes:
    """Return the code of a sparse payload of ``size`` elements; `qcomp.core.coding.gaps` describes both.

    Examples
    --------
    >>> import numpy as np
    >>> from qcomp import TopK
    >>> fixed = TopK(k=2, bucket_size=8, value_bits=1, coding="fixed")
    >>> plain = fixed.compress(np.asarray([0, 3, 0, 0, -3, 0, 0, 0], dtype=np.float32)).data.tobytes()
    >>> plain.hex()  # 1 and 4, the second negative; padding; 3.0, and no step
    '020900000000404000000000'
    >>> code = encode_gaps(plain, 8, gaps.Shape(2, 8, 1))
    >>> decode_gaps(code, 8, gaps.Shape(2, 8, 1)) == plain
    True
    """
    return _loops().gaps_encode(_view(plain), size, *shape)


def decode_gaps(code: Bytes, size: int, shape: gaps.Shape) -> bytearray:
    """Undo `encode_gaps`: return the plain sparse payload. Raises PayloadError if the bytes are not such a code."""
    return _loops().gaps_decode(_view(code), size, *shape)


def _loops() -> Coders:
    return chosen_coders() or PURE


def _view(data: Bytes) -> memoryview:
    """Return the bytes of a buffer. Python cannot cast empty buffers."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _validate(coding: str, largest: int) -> None:
    if coding not in CODINGS:
        raise ValueError(f"coding is {coding!r}; expected one of {', '.join(CODINGS)}")
    if not 1 <= largest <= LARGEST:
        raise ValueError(f"largest is {largest}; expected an integer from 1 to {LARGEST}")
