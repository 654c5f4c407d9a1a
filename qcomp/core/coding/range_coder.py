"""A range coder with a model fitted to each vector: asymmetric numeral systems (Duda, arXiv 1311.2540), as rANS.

The stream is the model (`qcomp.core.coding.model`), the states in 4 bytes each, and words of 2 bytes, in little endian.
Element i belongs to lane i mod `lanes(n)`. Each lane has a state x from 2^16 to 2^32 - 1.

To decode an element, let u = x mod 2^13. Its class has b <= u < b + f, where f is the share of the class and b the sum
of the shares before it; x becomes f * (x >> 13) + u - b. If r plain bits follow, they are the r lowest bits of x, and x
becomes x >> r. After each of these two steps, a state below 2^16 becomes x * 2^16 + the next word. At the end all
states are 2^16 and all words are used. Encoding is the inverse, from the last element to the first.

The stream exceeds codes of a fixed width by at most 1 + 4 * lanes(n) bytes, thanks to the method `FLAT`.
"""

from qcomp.core.coding.bits import BitReader
from qcomp.core.coding.model import FLAT, finest, fit, flat, read
from qcomp.core.kernels import Coders

_MANY = 1 << 14


def lanes(size: int) -> int:
    """Return the number of states for a vector: more are faster, but each lengthens the code by about 2 bytes.

    Examples
    --------
    >>> lanes(0), lanes(1), lanes(1 << 14)
    (0, 1, 4)
    """
    return 4 if size >= _MANY else min(size, 1)


def encode(coders: Coders, levels: memoryview, negative: memoryview, largest: int) -> bytes:
    """Return the stream of a vector."""
    size = len(negative)
    model, described = fit(coders.count_classes(levels, largest, finest(largest)), largest)
    coded = described + coders.push(levels, negative, model, lanes(size))
    if len(coded) > _most(size, largest):
        # The model's estimate was too low.
        coded = bytes([FLAT]) + coders.push(levels, negative, flat(largest), lanes(size))
    return coded


def decode(coders: Coders, data: memoryview, size: int, largest: int) -> tuple[bytearray, bytearray]:
    """Return levels and signs, the inverse of `encode`.

    Raises PayloadError if the bytes are not the stream of such a vector.
    """
    bits = BitReader(data)
    model = read(bits, size, largest)
    return coders.pop(data[bits.align() :], size, largest, model, lanes(size))


def _most(size: int, largest: int) -> int:
    """Return the most bytes of a vector without a model."""
    return 1 + 4 * lanes(size) + size * (largest.bit_length() + 1) // 8
