"""Packed codes to levels and signs: the layout is that of the compressors, and compiled loops return the same bytes."""

import numpy as np
import pytest

import qcomp
from qcomp.backends import registry
from qcomp.core import coding, feedback
from qcomp.core.coding import PURE
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.kernels import use_kernels
from qcomp.core.numeric import bitplanes
from qcomp.core.numeric.buckets import blocks

WIDTHS = range(2, 17)
BUCKETS = (8, 64, 512)
SIZES = (0, 1, 7, 8, 9, 64, 65, 513, 1100)


def drawn(size, bits):
    """Draw levels and signs as arrays; both ends of the range occur."""
    rng = np.random.default_rng([size, bits])
    largest = (1 << bits - 1) - 1
    levels = np.where(rng.random(size) < 0.2, largest, rng.integers(0, largest + 1, size)).astype("<u2")
    return levels, ((rng.random(size) < 0.5) & (levels > 0)).astype(np.uint8)


def packed_by_definition(levels, negative, bits, bucket_size):
    codes = levels.astype(np.int32) + (negative.astype(np.int32) << bits - 1)
    codes = codes.astype(np.uint8 if bits <= 8 else np.int32)
    return b"".join(
        bitplanes.pack(block.read(codes), bits).tobytes() for block in blocks(codes.size, bucket_size)
    )


def compare(loops):
    """Raise AssertionError unless loops pack as `bitplanes` does, and unpacking inverts packing."""
    for bits in WIDTHS:
        for bucket_size in BUCKETS:
            for size in SIZES:
                levels, negative = drawn(size, bits)
                expected = packed_by_definition(levels, negative, bits, bucket_size)
                k, signs = memoryview(levels.tobytes()), memoryview(negative.tobytes())
                where = f"{size} elements of {bits} bits in buckets of {bucket_size}"
                assert loops.pack(k, signs, bits, bucket_size) == expected, where
                assert loops.unpack(memoryview(expected), size, bits, bucket_size) == (k, signs), where


def test_pure():
    compare(PURE)


@pytest.mark.slow
def test_compiled():
    pytest.importorskip("numba")
    compare(registry.load_coders())


@pytest.mark.parametrize(
    "broken",
    [
        {"pack": lambda k, signs, bits, b: PURE.pack(k, memoryview(bytes(len(signs))), bits, b)},
        {"pack": lambda k, signs, bits, b: PURE.pack(k, signs, bits, max(b, 16))},
        {"pack": lambda *of: PURE.pack(*of)[:-1]},
        {"unpack": lambda data, size, bits, b: PURE.unpack(data, size, bits, max(b, 16))},
        {"unpack": lambda *of: (PURE.unpack(*of)[0], bytearray(of[1]))},
        {"unpack": lambda *of: (bytearray(x & 0x7F for x in PURE.unpack(*of)[0]), PURE.unpack(*of)[1])},
    ],
    ids=["no signs", "other buckets", "a byte short", "reads other buckets", "reads no signs", "levels cut"],
)
def test_broken_loops_are_found(broken):
    with pytest.raises(AssertionError):
        compare(PURE._replace(**broken))


def test_padding_is_left_out(coders):
    data = bytes([0xFF]) * 8  # eight codes of eight bits, three of which are elements
    levels, negative = coding.unpack(data, size=3, bits=8, bucket_size=8)
    assert (levels.hex(), negative.hex()) == ("7f007f007f00", "010101")


@pytest.mark.slow
@pytest.mark.parametrize("name", coding.CODINGS)
@pytest.mark.parametrize("levels", [128, 1000, 32767])
def test_payloads_of_wide_codes_are_the_same_with_kernels(numba_coders, name, levels):
    """Kernels for arrays and compiled loops for bytes, against neither of them."""
    compressor = qcomp.QSGD(levels=levels, bucket_size=64, norm="l2", coding=name)
    x = np.random.default_rng(levels).standard_normal(1001).astype(np.float32)
    key = qcomp.Key(step=3)

    def everything():
        payload, residual = feedback.compensated(compressor, x, x[::-1].copy(), key=key)
        added = compressor.add(payload, x.copy())
        parts = residual, compressor.decompress(payload, like=x), added
        return [payload.data.tobytes(), *(part.tobytes() for part in parts)]

    found = everything()
    with use_kernels(None):
        assert everything() == found
    assert type(compressor.coder.plain) is WideQSGD
