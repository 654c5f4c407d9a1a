"""Means over the ranks that sent an element, instead of all ranks."""

import numpy as np
import pytest

import qcomp
from qcomp.testing import lockstep

SPARSE = qcomp.TopK(k=3, bucket_size=16)
SIZE = 70


def values_of(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(SIZE).astype(np.float32)


def averaged(compressor, make, count, divisor="senders"):
    mean = qcomp.CompressedMean(compressor, "all_gather", feedback=False, divisor=divisor)
    tensors = [[make(values_of(rank)), make(values_of(rank)[:5])] for rank in range(count)]
    states = lockstep([mean.init_stages(x, rank=r, size=count) for r, x in enumerate(tensors)])
    found = lockstep([mean.stages(x, s, key=qcomp.Key()) for x, s in zip(tensors, states, strict=True)])
    return [of_rank[0] for of_rank in found]


@pytest.mark.parametrize("count", [1, 3])
def test_each_element_is_divided_by_its_senders(library, count):
    found = averaged(SPARSE, library.array, count)
    sent = [
        SPARSE.decompress(SPARSE.compress(values_of(rank)), like=values_of(rank)) for rank in range(count)
    ]
    total, senders = sum(sent), sum(x != 0 for x in sent)
    expected = np.where(senders > 0, total / np.maximum(senders, 1).astype(np.float32), np.float32(0))
    assert set(senders.tolist()) == set(range(count + 1))
    for whole, _ in found:
        assert library.numpy(whole).tobytes() == expected.astype(np.float32).tobytes()


def test_kernels_give_the_same_bits():
    pytest.importorskip("numba")
    pure = averaged(SPARSE, np.array, 3)
    with qcomp.backends.use("numba"):
        found = averaged(SPARSE, np.array, 3)
    assert [x.tobytes() for x in found[0]] == [x.tobytes() for x in pure[0]]


def test_long_vectors_are_averaged_as_short_ones(monkeypatch):
    """In blocks, and in rounds."""
    from qcomp.core.mean import rounds
    from qcomp.core.numeric import cache_blocks

    whole = averaged(SPARSE, np.array, 3)
    monkeypatch.setattr(cache_blocks, "_BLOCK", 16)
    monkeypatch.setattr(rounds, "count_rounds", lambda *_: 2)
    found = averaged(SPARSE, np.array, 3)
    assert [x.tobytes() for x in found[0]] == [x.tobytes() for x in whole[0]]


@pytest.mark.parametrize("compressor", [qcomp.ScaledSign(16), qcomp.QSGD(2, 16), qcomp.Identity()])
def test_it_is_the_mean_over_all_ranks_if_no_element_is_dropped(compressor):
    """Not for code 0 of a compressor that sends every element either."""
    found, plain = averaged(compressor, np.array, 3), averaged(compressor, np.array, 3, divisor="ranks")
    assert [x.tobytes() for x in found[0]] == [x.tobytes() for x in plain[0]]


def test_unknown_divisors_and_other_topologies_are_refused():
    with pytest.raises(ValueError, match="divisor is 'workers'; expected 'ranks' or 'senders'"):
        qcomp.Averaging(divisor="workers")
    for topology in ("two_phase", "ring", "hierarchical", "auto"):
        with pytest.raises(ValueError, match=f"divisor is 'senders' with topology='{topology}'; expected"):
            qcomp.Averaging(topology, divisor="senders")
        with pytest.raises(ValueError, match="expected topology='all_gather'"):
            qcomp.CompressedMean(SPARSE, topology, divisor="senders")


def test_ranks_with_other_divisors_are_an_error():
    def rank_main(comm):
        mean = qcomp.CompressedMean(SPARSE, "all_gather", divisor=("ranks", "senders")[comm.rank])
        mean.init(values_of(0), comm)

    with pytest.raises(qcomp.MismatchError, match="divisor is 'ranks' on rank 0, but 'senders' on rank 1"):
        qcomp.comm.run_local(2, rank_main, timeout=20)
