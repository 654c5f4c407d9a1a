"""Elias's codes for positive integers: gamma and omega (IEEE Trans. Information Theory 21, 1975).

The codes are prefix-free: consecutive codewords need no separator. With L(k) the number of bits of k:

- gamma: L - 1 zeros, then k; 2L - 1 bits.
- omega: starts with a 0 and prepends k, then L(k) - 1 as the new k, and so on until k is 1. The QSGD paper calls this
  the recursive Elias code.
"""

from typing import NamedTuple

from qcomp.core.coding.bits import BitReader
from qcomp.core.errors import PayloadError

LARGEST_BITS = 64
"""The most bits of a number. Without this bound, a few damaged bytes could announce a number of any size."""


class Codeword(NamedTuple):
    """Some bits, as an integer whose highest bit comes first."""

    bits: int
    length: int

    def __str__(self) -> str:
        return f"{self.bits:0{self.length}b}"


def gamma(number: int) -> Codeword:
    """Return the gamma codeword of a positive integer.

    Examples
    --------
    >>> print(gamma(9))
    0001001
    """
    _require(number)
    return Codeword(number, 2 * number.bit_length() - 1)


def omega(number: int) -> Codeword:
    """Return the omega codeword of a positive integer.

    Examples
    --------
    >>> print(omega(9))
    1110010
    """
    _require(number)
    bits, count = 0, 1
    while number > 1:
        bits |= number << count
        count += number.bit_length()
        number = number.bit_length() - 1
    return Codeword(bits, count)


def take_gamma(bits: BitReader) -> int:
    """Return the number whose gamma codeword comes next.

    Raises PayloadError if the bits end early, or the number has more than 64 bits. So does `take_omega`.
    """
    zeros = 0
    while not bits.take(1):
        zeros += 1
        _require_length(zeros + 1)
    return 1 << zeros | bits.take(zeros)


def take_omega(bits: BitReader) -> int:
    """Return the number whose omega codeword comes next."""
    number = 1
    while bits.take(1):
        _require_length(number + 1)
        number = 1 << number | bits.take(number)
    return number


def length(number: int) -> int:
    """Return by a formula how many bits the omega codeword of a positive integer has.

    Examples
    --------
    >>> [length(k) for k in (1, 2, 4, 16, 65536)]
    [1, 3, 6, 11, 28]
    """
    _require(number)
    size = number.bit_length()
    return 1 if number == 1 else size + length(size - 1)


def _require(number: int) -> None:
    if not 1 <= number < 1 << LARGEST_BITS:
        raise ValueError(f"number is {number}; expected an integer from 1 to 2**{LARGEST_BITS} - 1")


def _require_length(size: int) -> None:
    if size > LARGEST_BITS:
        raise PayloadError(f"a codeword announces a number of more than {LARGEST_BITS} bits")
