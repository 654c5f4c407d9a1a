"""`qcomp.comm.broadcast`: the arrays of one rank on all ranks, bit for bit."""

import numpy as np
import pytest

from qcomp import MismatchError
from qcomp.comm import broadcast, run_local
from qcomp.core import broadcast as stages_of

SHAPES = [(4, 5), (), (0, 3), (7,), (1000,)]


def of_rank(rank: int) -> list[np.ndarray]:
    """Return arrays that differ on every rank."""
    draws = np.random.default_rng(rank)
    return [draws.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("root", [0, 2])
def test_all_ranks_get_the_arrays_of_the_root(library, root):
    def rank_main(comm):
        own = library.seal([library.array(x) for x in of_rank(comm.rank)])
        copies = broadcast(own, comm, root=root)
        assert [type(c) for c in copies] == [type(x) for x in own]
        assert [library.numpy(x).tobytes() for x in own] == [x.tobytes() for x in of_rank(comm.rank)]
        return [(library.numpy(c).shape, library.numpy(c).tobytes()) for c in copies]

    expected = [(x.shape, x.tobytes()) for x in of_rank(root)]
    assert run_local(3, rank_main, timeout=30) == [expected] * 3


@pytest.mark.slow
def test_ranks_of_different_libraries(libraries):
    names = list(libraries)
    given = [[libraries[name].array(x) for x in of_rank(rank)] for rank, name in enumerate(names)]

    def rank_main(comm):
        library = libraries[names[comm.rank]]
        return [library.numpy(c).tobytes() for c in broadcast(given[comm.rank], comm)]

    assert run_local(len(names), rank_main, timeout=30) == [[x.tobytes() for x in of_rank(0)]] * len(names)


@pytest.mark.parametrize("dtype", ["int64", "bool", "float16", "float64", "uint8", "complex64"])
def test_any_dtype_and_layout(dtype):
    def rank_main(comm):
        x = (np.arange(24).reshape(4, 6) % 5 + comm.rank).astype(dtype)
        turned, thinned, whole = broadcast([x.T, x[::2, ::3], x], comm)
        return [turned.tolist(), thinned.tolist(), whole.tolist(), str(turned.dtype)]

    x = (np.arange(24).reshape(4, 6) % 5).astype(dtype)
    assert run_local(2, rank_main) == [[x.T.tolist(), x[::2, ::3].tolist(), x.tolist(), dtype]] * 2


def test_torch_parameters_and_bfloat16():
    torch = pytest.importorskip("torch")

    def rank_main(comm):
        weight = torch.nn.Parameter(torch.full((3, 2), 1.5 + comm.rank, dtype=torch.bfloat16))
        image = torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last) + comm.rank
        first, second = broadcast([weight, image], comm)
        assert not first.requires_grad
        assert weight.requires_grad
        return first.tolist(), second.tolist()

    expected = [[1.5] * 2] * 3, np.arange(48.0).reshape(1, 3, 4, 4).tolist()
    assert run_local(2, rank_main) == [expected] * 2


def test_one_array_is_returned_as_a_copy():
    def rank_main(comm):
        x = np.full(3, float(comm.rank))
        copy = broadcast(x, comm)
        copy += 1
        return x.tolist(), copy.tolist()

    assert run_local(2, rank_main) == [([0.0] * 3, [1.0] * 3), ([1.0] * 3, [1.0] * 3)]
    assert run_local(1, rank_main) == [([0.0] * 3, [1.0] * 3)]


def test_small_arrays_share_messages_and_large_ones_do_not(monkeypatch):
    monkeypatch.setattr(stages_of, "_MESSAGE_BYTES", 1 << 10)
    arrays = [np.full(n, float(n)) for n in (4, 5, 200, 6, 300, 1)]

    def rank_main(comm):
        zeros = [x * (comm.rank == 0) for x in arrays]
        return [c.tobytes() for c in broadcast(zeros, comm)]

    assert run_local(3, rank_main) == [[x.tobytes() for x in arrays]] * 3


def test_no_rank_sends_much_more_than_twice_the_bytes():
    """The root sends a part to each rank, and every rank its part to all: (n - 1) / n of the bytes each time."""
    n, nbytes = 8, 8 * 100_000

    def rank_main(comm):
        broadcast(np.zeros(100_000), comm)
        return comm.bytes_sent

    root, *others = run_local(n, rank_main)
    share = nbytes * (n - 1) / n
    assert 2 * share <= root <= 2 * share + 2000
    assert all(share <= sent <= share + 2000 for sent in others)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: x[:2], "shapes"),
        (lambda x: x.astype(np.float64), "dtypes"),
        (lambda x: [x, x], "shapes"),
    ],
)
def test_mismatched_arrays_are_an_error_on_every_rank(other, message):
    def rank_main(comm):
        x = np.zeros(3, np.float32)
        with pytest.raises(MismatchError, match=message):
            broadcast(other(x) if comm.rank else x, comm)

    run_local(2, rank_main)


def test_arguments():
    def rank_main(comm):
        for root in (-1, 2, 0.0, True):
            with pytest.raises(ValueError, match=f"root is {root!r}; expected a rank from 0 to 1"):
                broadcast(np.zeros(3), comm, root=root)
        with pytest.raises(ValueError, match="x is empty"):
            broadcast([], comm)
        with pytest.raises(MismatchError, match="root is 0 on rank 0, but 1 on rank 1"):
            broadcast(np.zeros(3), comm, root=comm.rank)

    run_local(2, rank_main)
