"""Byte planes against their element-by-element definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcomp.core.numeric.bitplanes import pack, unpack


def reference_pack(codes: list[int], bits: int) -> list[int]:
    """Pack one bucket by the definition of which element owns which bits of which byte."""
    size = len(codes)
    data = [0] * (size * bits // 8)
    for element, code in enumerate(codes):
        if bits <= 8 and 8 % bits == 0:
            plane, byte = divmod(element, size * bits // 8)
            data[byte] |= code << plane * bits
        else:
            position, byte = divmod(element, size // 8)
            for q in range(bits):
                data[q * (size // 8) + byte] |= (code >> q & 1) << position
    return data


def random_codes(bits: int, rows: int, length: int) -> np.ndarray:
    dtype = np.uint8 if bits <= 8 else np.int32
    return np.random.default_rng(bits).integers(0, 1 << bits, (rows, length)).astype(dtype)


@pytest.mark.parametrize("bits", range(1, 17))
def test_equals_the_definition_in_every_library(float64_library, bits):
    check_definition(float64_library, bits)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "bits", [*(pytest.param(bits, marks=pytest.mark.exhaustive) for bits in (1, 4, 7)), 11]
)
def test_equals_the_definition_in_jax(libraries, bits):
    """In both layouts, in codes of one byte and of more."""
    check_definition(libraries["jax"], bits)


def check_definition(library, bits):
    codes = random_codes(bits, 3, 32)
    packed = pack(library.array(codes), bits)
    assert library.numpy(packed).dtype == np.uint8
    assert library.numpy(packed).tolist() == [reference_pack(row, bits) for row in codes.tolist()]
    restored = unpack(library.seal(packed), bits)
    assert library.numpy(restored).dtype == codes.dtype
    assert library.numpy(restored).tolist() == codes.tolist()


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_equals_the_definition_for_every_width_and_length(data):
    bits = data.draw(st.integers(1, 8))
    length = 8 << data.draw(st.integers(0, 4))
    rows = data.draw(st.integers(1, 3))
    flat = data.draw(st.binary(min_size=rows * length, max_size=rows * length))
    codes = (np.frombuffer(flat, dtype=np.uint8) >> (8 - bits)).reshape(rows, length)
    packed = pack(codes, bits)
    assert packed.tolist() == [reference_pack(row, bits) for row in codes.tolist()]
    assert unpack(packed, bits).tolist() == codes.tolist()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 8), st.integers(1, 4), st.binary(min_size=1, max_size=8))
def test_every_byte_string_is_a_packing_of_codes(bits, width, seed):
    """pack is onto: the bytes hold nothing but the codes."""
    data = np.resize(np.frombuffer(seed, dtype=np.uint8), (1, (8 << width) * bits // 8))
    codes = unpack(data, bits)
    assert codes.max() < 1 << bits
    assert pack(codes, bits).tolist() == data.tolist()


def test_by_hand():
    one_bit = np.array([[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]], dtype=np.uint8)
    assert pack(one_bit, 1).tolist() == [[0b00000001, 0b10000000]]
    four_bit = np.array([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=np.uint8)
    assert pack(four_bit, 4).tolist() == [[0x51, 0x62, 0x73, 0x84]]
    three_bit = np.array([[4, 2, 1, 0, 0, 0, 0, 7]], dtype=np.uint8)
    assert pack(three_bit, 3).tolist() == [[0b10000100, 0b10000010, 0b10000001]]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_consecutive_packing_is_caught(bits):
    """Packing neighbours into one byte, as numpy.packbits does, gives another format."""
    codes = random_codes(bits, 1, 32)
    neighbours = codes.reshape(-1, 8 // bits) << np.arange(0, 8, bits, dtype=np.uint8)
    assert neighbours.sum(axis=1).tolist() != pack(codes, bits)[0].tolist()
