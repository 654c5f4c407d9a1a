"""NCCLCommunicator: its logic with stand-ins for CuPy and NCCL in this process; NCCL itself where there is a GPU."""

import ctypes
import sys
import threading
import types

import numpy as np
import pytest

from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.comm.nccl import NCCLCommunicator
from qcomp.core.errors import CommunicatorError

LONG = 30.0


class DeviceArray(np.ndarray):
    """A stand-in for cupy.ndarray: NumPy cannot read its memory, only `get` copies it to the host."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)

    def get(self):
        return np.array(self, subok=False)


class NcclError(Exception):
    pass


class FakeNccl(types.ModuleType):
    """NCCL's calls among threads: the messages queued in a group move when all ranks have ended their groups."""

    NCCL_UINT8 = 1
    available = True
    NcclError = NcclError

    def __init__(self):
        super().__init__("cupy.cuda.nccl")
        self.ids = []
        self.aborted = []
        self.worlds = {}
        self.queued = threading.local()
        self.fails = False

        fake = self

        class NcclCommunicator:
            def __init__(self, size, identity, rank):
                assert isinstance(identity, bytes)
                assert identity in fake.ids
                world = fake.worlds.setdefault(identity, (threading.Barrier(size, timeout=LONG), {}))
                (self.barrier, self.mail), self.rank = world, rank

            def recv(self, pointer, count, datatype, peer, stream):
                fake.queued.calls.append((self, "recv", pointer, count, datatype, peer, stream))

            def send(self, pointer, count, datatype, peer, stream):
                fake.queued.calls.append((self, "send", pointer, count, datatype, peer, stream))

            def abort(self):
                fake.aborted.append(self.rank)

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self):
        self.ids.append(bytes((7 * i + len(self.ids)) % 256 for i in range(128)))
        return self.ids[-1]

    def groupStart(self):  # noqa: N802
        self.queued.calls = []

    def groupEnd(self):  # noqa: N802
        calls, self.queued.calls = self.queued.calls, None
        if self.fails:
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR")
        assert {(datatype, stream) for *_, datatype, _, stream in calls} <= {(self.NCCL_UINT8, 1234)}
        for me, verb, pointer, count, _, peer, _ in calls:
            if verb == "send":
                me.mail[me.rank, peer] = ctypes.string_at(pointer, count)
        if not calls:
            return
        # Only ranks with messages meet at the barrier: in these tests all have some, or none has.
        me = calls[0][0]
        me.barrier.wait()
        for _, verb, pointer, count, _, peer, _ in calls:
            if verb == "recv":
                message = me.mail[peer, me.rank]
                assert len(message) == count
                ctypes.memmove(pointer, message, count)
        me.barrier.wait()


@pytest.fixture
def nccl(monkeypatch):
    fake = FakeNccl()
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.ndarray, cupy.uint8, cupy.cuda, cuda.nccl = DeviceArray, np.uint8, cuda, fake
    cupy.__version__ = "14.2.0"
    cupy.asarray = lambda x: np.array(x).view(DeviceArray)
    cupy.ascontiguousarray = lambda x: np.array(x, order="C").view(DeviceArray)
    cupy.asnumpy = lambda x: x.get()
    cupy.empty = lambda shape, dtype: np.full(shape, 238, dtype=dtype).view(DeviceArray)
    cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=1234)
    for module in (cupy, cuda, fake):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    fake.make = NCCLCommunicator
    return fake


def share(sender, receiver):
    size = (sender * 7 + receiver * 3) % 5 * 3
    return np.resize(np.array([sender, receiver, 255, 0, 17], dtype=np.uint8), size)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("device", [True, False], ids=["device", "host"])
def test_both_verbs_deliver_every_share(nccl, n, device):
    def rank_main(local):
        comm = nccl.make(local)
        me = comm.rank
        put = (lambda x: x.view(DeviceArray)) if device else (lambda x: x)
        received = comm.all_to_all(
            [put(share(me, r)) for r in range(n)], [share(r, me).size for r in range(n)]
        )
        assert {type(x) for x in received} == {DeviceArray if device else np.ndarray}
        assert [np.asarray(x).tolist() for x in received] == [share(r, me).tolist() for r in range(n)]
        assert comm.bytes_sent == sum(share(me, r).size for r in range(n) if r != me)
        mine = put(np.full(me + 1, me, dtype=np.uint8))
        received = comm.all_gather(mine, [r + 1 for r in range(n)])
        assert [np.asarray(x).tolist() for x in received] == [[r] * (r + 1) for r in range(n)]
        assert not any(np.shares_memory(x, mine) for x in received)
        return comm.host == local.host, str(comm), len(comm.all_gather(put(share(0, 0)), [0] * n))

    expected = [(True, f"NCCLCommunicator(rank={rank}, size={n})", n) for rank in range(n)]
    assert run_local(n, rank_main, timeout=LONG) == expected
    assert len(nccl.ids) == 1


def collect(nccl, n, work):
    """Return the error of each rank's exchange, after checking that the communicator stays closed."""

    def rank_main(local):
        comm = nccl.make(local)
        with pytest.raises(CommunicatorError) as caught:
            work(comm)
        text = str(caught.value)
        with pytest.raises(CommunicatorError, match="all_gather: this communicator is closed: ") as again:
            comm.all_gather(np.zeros(1, dtype=np.uint8), [1] * n)
        assert str(again.value).endswith(text)
        return text

    texts = run_local(n, rank_main, timeout=LONG)
    assert sorted(nccl.aborted) == list(range(n))
    return texts


def test_another_size_is_named_on_every_rank_before_nccl_is_called(nccl):
    def work(comm):
        send, receive = [np.zeros(2, dtype=np.uint8)] * 3, [2] * 3
        if comm.rank == 1:
            send[2] = np.zeros(4, dtype=np.uint8)
        if comm.rank == 2:
            receive[1] = 5
        comm.all_to_all(send, receive)

    assert collect(nccl, 3, work) == ["all_to_all: rank 1 sent 4 bytes to rank 2, which expected 5 bytes"] * 3
    assert not any(mail for _, mail in nccl.worlds.values())


def test_another_verb_is_named_on_every_rank(nccl):
    def work(comm):
        if comm.rank == 2:
            comm.all_gather(np.zeros(2, dtype=np.uint8), [2] * 3)
        else:
            comm.all_to_all([np.zeros(2, dtype=np.uint8)] * 3, [2] * 3)

    assert collect(nccl, 3, work) == ["rank 0 called all_to_all where rank 2 called all_gather"] * 3


def test_an_error_of_nccl_is_a_communicator_error(nccl):
    nccl.fails = True
    texts = collect(nccl, 2, lambda comm: comm.all_gather(np.zeros(1, dtype=np.uint8), [1, 1]))
    assert texts == ["all_gather: NCCL failed: NCCL_ERROR_SYSTEM_ERROR"] * 2


def test_wrong_arguments_are_the_callers_error_and_close_nothing(nccl):
    def rank_main(local):
        comm = nccl.make(local)
        with pytest.raises(TypeError, match="send must have dtype uint8, got float64"):
            comm.all_gather(np.zeros(1).view(DeviceArray), [1])
        return len(comm.all_gather(np.zeros(1, dtype=np.uint8), [1]))

    assert run_local(1, rank_main, timeout=LONG) == [1]


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        ImportError, match=r"an NCCL communicator needs CuPy 14 with NCCL: pip install 'qcomp\[cuda\]'"
    ):
        NCCLCommunicator(LocalCommunicator.alone())


def test_cupy_without_nccl_says_what_is_missing(nccl):
    nccl.available = False
    with pytest.raises(ImportError, match="an NCCL communicator needs CuPy 14 with NCCL"):
        nccl.make(LocalCommunicator.alone())


def test_an_older_cupy_is_refused_by_name(nccl, monkeypatch):
    monkeypatch.setattr(sys.modules["cupy"], "__version__", "13.6.0")
    with pytest.raises(ImportError, match="an NCCL communicator needs CuPy 14") as caught:
        nccl.make(LocalCommunicator.alone())
    assert str(caught.value.__cause__) == "this is CuPy 13.6.0"


@pytest.mark.gpu
def test_one_rank_over_real_nccl():
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("cupy_backends.cuda.libs.nccl")
    comm = NCCLCommunicator(LocalCommunicator.alone())
    mine = cupy.arange(5, dtype=cupy.uint8)
    [received] = comm.all_gather(mine, [5])
    assert isinstance(received, cupy.ndarray)
    assert received.get().tolist() == [0, 1, 2, 3, 4]
    assert received.data.ptr != mine.data.ptr
    assert comm.bytes_sent == 0
