"""Moves of bytes between messages and rows."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax

from qcomp.jax import moves


@pytest.fixture(params=["int32", "int64"])
def places(request, monkeypatch):
    """The dtype of places in vectors; those of long vectors need 64 bits."""
    if request.param == "int64":
        monkeypatch.setattr(moves, "_MOST_INT32", 0)


LENGTHS = [1, 3, 4, 7, 511, 512, 513, 1200, (1 << 16) + 5]


def moves_of(rng, lengths):
    """Return moves of ranges, from one order to another, with gaps."""
    targets = rng.permutation(len(lengths))
    found, source = [], 2
    for number, length in enumerate(lengths):
        target = 3 + sum(lengths[i] + 5 for i in targets[: list(targets).index(number)])
        found.append(moves.Range(source, int(target), length))
        source += length + 1
    return found


def expected(source, moves, size):
    moved = np.zeros(size, source.dtype)
    for first, target, length in moves:
        moved[target : target + length] = source[first : first + length]
    return moved


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_moves(rank):
    """The same for all devices, or each its own, of which one moves less."""
    rng = np.random.default_rng(0)
    of_devices = [moves_of(rng, LENGTHS), moves_of(rng, LENGTHS[:4])][: 1 if rank is None else 2]
    size = sum(LENGTHS) + 5 * len(LENGTHS) + 3
    source = rng.integers(1, 256, (2, size), np.uint8)

    def move(source, rank):
        return moves.moved(source, of_devices, size, rank)

    wanted = [expected(row, of_devices[rank or 0], size) for row in source]
    assert np.array_equal(jax.jit(move)(source, rank), wanted)
    assert np.array_equal(jax.jit(move)(source[0], rank), wanted[0])
