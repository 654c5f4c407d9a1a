"""Elias codes: the tables, the lengths, and refusal of all bytes that no encoder writes."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcomp.core.coding import elias
from qcomp.core.coding.bits import BitReader, BitWriter
from qcomp.core.errors import PayloadError

TABLE = """
1 1 0
2 010 100
3 011 110
4 00100 101000
5 00101 101010
6 00110 101100
7 00111 101110
8 0001000 1110000
9 0001001 1110010
10 0001010 1110100
11 0001011 1110110
12 0001100 1111000
13 0001101 1111010
14 0001110 1111100
15 0001111 1111110
16 000010000 10100100000
17 000010001 10100100010
18 000010010 10100100100
19 000010011 10100100110
20 000010100 10100101000
"""
"""Number, gamma, omega: the codewords as printed in the literature."""

LENGTHS = {
    31: (9, 11),
    32: (11, 12),
    64: (13, 13),
    127: (13, 13),
    128: (15, 14),
    255: (15, 14),
    256: (17, 16),
    1000: (19, 17),
    1024: (21, 18),
    65535: (31, 23),
    65536: (33, 28),
}
CODES = {"gamma": (elias.gamma, elias.take_gamma), "omega": (elias.omega, elias.take_omega)}
NUMBERS = st.integers(1, 2**64 - 1) | st.integers(1, 40)
EDGES = sorted({max(1, (1 << e) + d) for e in range(40) for d in (-1, 0, 1)})


def codeword(code, number):
    return CODES[code][0](number)


def encode(code, numbers):
    bits = BitWriter()
    for number in numbers:
        bits.put(*codeword(code, number))
    return bits.finish()


def decode(code, data, count):
    bits = BitReader(data)
    numbers = [CODES[code][1](bits) for _ in range(count)]
    bits.finish()
    return numbers


@pytest.mark.parametrize("row", TABLE.split("\n")[1:-1])
def test_codewords_are_those_of_the_literature(row):
    number, *expected = row.split()
    assert [str(codeword(code, int(number))) for code in CODES] == expected


@pytest.mark.parametrize("number", LENGTHS)
def test_lengths_are_those_of_the_literature(number):
    assert (elias.gamma(number).length, elias.length(number)) == LENGTHS[number]


@pytest.mark.parametrize("code", CODES)
class TestCodes:
    def test_the_length_formula_is_the_length_of_the_codeword(self, code):
        for number in [*range(1, 5000), *EDGES]:
            word = codeword(code, number)
            assert word.length == len(str(word))
            assert code == "gamma" or elias.length(number) == word.length

    def test_round_trip_around_every_power_of_two(self, code):
        data = encode(code, EDGES)
        assert decode(code, data, len(EDGES)) == EDGES
        assert len(data) == -(-sum(codeword(code, number).length for number in EDGES) // 8)

    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(numbers=st.lists(NUMBERS, max_size=30))
    def test_round_trip(self, code, numbers):
        assert decode(code, encode(code, numbers), len(numbers)) == numbers

    def test_no_codeword_is_a_prefix_of_another(self, code):
        words = sorted(str(codeword(code, number)) for number in range(1, 3000))
        assert not any(b.startswith(a) for a, b in itertools.pairwise(words))
        assert sum(Fraction(1, 2 ** len(word)) for word in words) < 1

    def test_truncated_or_longer_data_is_refused(self, code):
        data = encode(code, [5, 1, 70_000])
        for end in range(len(data)):
            with pytest.raises(PayloadError):
                decode(code, data[:end], 3)
        with pytest.raises(
            PayloadError, match=f"ends after {len(data)} bytes; expected it to fill all {len(data) + 1} bytes"
        ):
            decode(code, data + b"\0", 3)

    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(data=st.binary(max_size=20), count=st.integers(0, 40))
    def test_any_bytes_decode_to_numbers_or_are_an_error(self, code, data, count):
        """And if they decode to numbers, they are the only bytes for these numbers."""
        try:
            numbers = decode(code, data, count)
        except PayloadError:
            return
        assert len(numbers) == count
        assert encode(code, numbers) == data

    def test_numbers_out_of_range_are_refused(self, code):
        for number in (0, -3, 2**64):
            with pytest.raises(ValueError, match=f"number is {number}; expected an integer from 1 to"):
                encode(code, [number])
            with pytest.raises(ValueError, match=f"number is {number}"):
                elias.length(number)
        assert decode(code, encode(code, [2**64 - 1]), 1) == [2**64 - 1]


@pytest.mark.parametrize(
    ("code", "data"),
    [("gamma", bytes(9) + b"\xff" * 9), ("omega", b"\xff" * 5000)],
)
def test_a_number_of_more_than_64_bits_is_refused_at_once(code, data):
    with pytest.raises(PayloadError, match="announces a number of more than 64 bits"):
        decode(code, data, 1)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 70).flatmap(lambda n: st.tuples(st.integers(0, 2**n - 1), st.just(n)))))
def test_bits_come_back_most_significant_first(parts):
    bits = BitWriter()
    for value, length in parts:
        bits.put(value, length)
    data = bits.finish()
    text = "".join(f"{value:0{length}b}" if length else "" for value, length in parts)
    assert "".join(f"{byte:08b}" for byte in data) == text + "0" * (-len(text) % 8)
    reader = BitReader(data)
    assert [(reader.take(length), length) for _, length in parts] == parts
    reader.finish()


def test_padding_with_ones_is_refused():
    reader = BitReader(b"\xa1")
    reader.take(3)
    with pytest.raises(PayloadError, match="padded with ones"):
        reader.finish()
