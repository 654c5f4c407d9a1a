"""How tensors are cut into one chunk per rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcomp.core.mean.chunks import Segment, cut

SIZES = st.lists(st.integers(0, 200), min_size=1, max_size=5)
BUCKETS = st.sampled_from([1, 8, 16, 64])
RANKS = st.integers(1, 9)


def reference_cut(sizes: list[int], bucket_size: int, count: int) -> list[dict[int, list[int]]]:
    """Return the elements of each chunk by tensor, assigned bucket by bucket."""
    buckets = [
        (tensor, list(range(start, min(size, start + bucket_size))))
        for tensor, size in enumerate(sizes)
        for start in range(0, size, bucket_size)
    ]
    share = -(-len(buckets) // count)
    chunks: list[dict[int, list[int]]] = [{} for _ in range(count)]
    for index, (tensor, elements) in enumerate(buckets):
        chunks[index // share].setdefault(tensor, []).extend(elements)
    return chunks


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=300)
@given(SIZES, BUCKETS, RANKS)
def test_every_bucket_goes_where_it_belongs(sizes, bucket_size, count):
    chunks = cut(sizes, bucket_size, count)
    got = [{s.tensor: list(range(s.start, s.stop)) for s in chunk} for chunk in chunks]
    assert got == reference_cut(sizes, bucket_size, count)
    assert all(len(chunk) == len(found) for chunk, found in zip(chunks, got, strict=True))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(SIZES, BUCKETS, RANKS)
def test_laws(sizes, bucket_size, count):
    chunks = cut(sizes, bucket_size, count)
    assert len(chunks) == count
    seen = [[0] * size for size in sizes]
    first_bucket = [sum(-(-size // bucket_size) for size in sizes[:i]) for i in range(len(sizes))]
    held = []
    for chunk in chunks:
        held.append(0)
        for segment in chunk:
            assert segment.size > 0
            assert segment.start % bucket_size == 0
            assert segment.stop % bucket_size == 0 or segment.stop == sizes[segment.tensor]
            # Bucket numbers are global: they name random draws and must not depend on the number of ranks.
            assert segment.bucket == first_bucket[segment.tensor] + segment.start // bucket_size
            held[-1] += -(-segment.size // bucket_size)
            for element in range(segment.start, segment.stop):
                seen[segment.tensor][element] += 1
    assert all(times == 1 for tensor in seen for times in tensor)
    total = sum(held)
    share = -(-total // count)
    assert held == [max(0, min(share, total - rank * share)) for rank in range(count)]


def test_more_ranks_than_buckets():
    assert cut([20], 8, 5) == (
        (Segment(0, 0, 8, 0),),
        (Segment(0, 8, 16, 1),),
        (Segment(0, 16, 20, 2),),
        (),
        (),
    )


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_nothing_gives_empty_chunks(sizes):
    assert cut(sizes, 8, 3) == ((), (), ())


def test_empty_tensors_take_no_bucket():
    assert cut([0, 9, 0, 8], 8, 2) == (
        (Segment(1, 0, 9, 0),),
        (Segment(3, 0, 8, 2),),
    )
