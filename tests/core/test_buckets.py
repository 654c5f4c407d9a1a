"""How a vector is cut into buckets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcomp.core.numeric.buckets import (
    Block,
    blocks,
    bucket_count,
    join_blocks,
    padded_size,
    tail_length,
    validate_bucket_size,
)

SIZES = st.integers(0, 300)
BUCKETS = st.sampled_from([8, 16, 64, 256])


@settings(derandomize=True, deadline=None, max_examples=200)
@given(SIZES, BUCKETS)
def test_blocks_hold_every_element_once_in_order(size, bucket_size):
    cut = list(blocks(size, bucket_size))
    elements, buckets = 0, 0
    for block in cut:
        assert (block.start, block.first_bucket) == (elements, buckets)
        assert block.length == bucket_size or block.rows == 1
        assert 1 <= block.filled <= block.length <= bucket_size
        elements += block.rows * block.filled
        buckets += block.rows
    assert elements == size
    assert buckets == bucket_count(size, bucket_size) == -(-size // bucket_size)
    assert sum(block.rows * block.length for block in cut) == padded_size(size, bucket_size)
    assert all(block.filled == block.length for block in cut[:-1])


@settings(derandomize=True, deadline=None, max_examples=200)
@given(SIZES, BUCKETS)
def test_read_and_flat_are_inverse_and_padding_is_zero(size, bucket_size):
    x = np.arange(1, size + 1, dtype=np.float32)
    parts = []
    for block in blocks(size, bucket_size):
        rows = block.read(x)
        assert rows.shape == (block.rows, block.length)
        assert (rows[:, block.filled :] == 0).all()
        assert (rows[:, : block.filled] != 0).all()
        parts.append(block.flat(rows))
    assert join_blocks(parts, dtype=np.float32, like=x).tolist() == x.tolist()


def test_read_in_every_library(library):
    x = np.arange(13, dtype=np.float32)
    got = [library.numpy(block.read(library.array(x))).tolist() for block in blocks(13, 8)]
    assert got == [[list(range(8))], [[8, 9, 10, 11, 12, 0, 0, 0]]]


@pytest.mark.parametrize(
    ("count", "length"),
    [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (4095, 4096), (4096, 4096), (4097, 8192)],
)
def test_tail_has_the_smallest_legal_length(count, length):
    assert tail_length(count) == length


def test_by_hand():
    assert list(blocks(70, 32)) == [Block(0, 2, 32, 32, 0), Block(64, 1, 8, 6, 2)]
    assert list(blocks(0, 32)) == []
    assert padded_size(70, 32) == 72
    assert padded_size(0, 32) == 0


@pytest.mark.parametrize("good", [8, 16, 4096, 1 << 20])
def test_legal_bucket_sizes(good):
    validate_bucket_size(good)


@pytest.mark.parametrize("bad", [0, -8, 4, 7, 12, 1 << 21, 8.0, "8", None])
def test_illegal_bucket_sizes(bad):
    with pytest.raises(ValueError, match=r"bucket_size is .*; expected a power of two from 8 to 1048576"):
        validate_bucket_size(bad)
