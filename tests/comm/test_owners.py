"""Every exchange tells whose it is: ranks that exchange for different optimizers or steps raise on every rank."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.comm import AuthenticatedCommunicator
from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.core.errors import CommunicatorError, MismatchError
from qcomp.core.mean.framing import joined_size
from qcomp.core.mean.stages import AllGather, AllToAll, Owner, drive, owned, pipeline
from qcomp.core.outer.overlapped import Overlapped
from qcomp.extend import Verbs

EXACTLY: dict[str, Any] = {"learning_rate": 1.0, "compressor": qcomp.Identity(), "exact": None}
PLAIN: dict[str, Any] = {"learning_rate": 1.0}


def full(value, rank):
    return np.full(8, value + rank, dtype=np.float32)


class Given:
    """A communicator of another package: it has the two verbs alone, and compares nothing."""

    def __init__(self, comm):
        self._comm = comm
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host

    def all_to_all(self, send, receive):
        return self._comm.all_to_all(send, receive)

    def all_gather(self, send, receive):
        return self._comm.all_gather(send, receive)


class GivenWithStart(Given):
    def start(self, request):
        return self._comm.start(request)


class OfVerbs(Verbs):
    """A communicator of another package that derives both verbs from one exchange, and knows nothing of owners."""

    def __init__(self, comm):
        self._comm = comm
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host

    def _exchange(self, verb, send, receive, owner=None):
        return self._comm.all_to_all(send, receive)


authenticated: Any = partial(AuthenticatedCommunicator, key=bytes(16))
KINDS = {
    "local": lambda comm: comm,
    "given": Given,
    "given with start": GivenWithStart,
    "given with Verbs": OfVerbs,
    "authenticated": authenticated,
    "authenticated given": lambda comm: authenticated(Given(comm)),
}


def of_arrays(optimizer, comm):
    """Return a step of an optimizer, which returns the first parameter."""
    held = [[np.zeros(8, np.float32)], None]
    held[1] = optimizer.init(held[0], comm)

    def step(value):
        held[:] = optimizer.step(held[0], [full(value, comm.rank)], held[1], comm)
        return float(held[0][0][0])

    return step


def of_outer_loop(comm):
    loop = qcomp.OuterLoop(every=1, compressor=qcomp.Identity(), exact=None)
    held = [[np.zeros(8, np.float32)], None]
    held[1] = loop.init(held[0], comm)

    def step(value):
        held[:] = loop.step([held[0][0] - full(value, comm.rank)], held[1], comm)
        return float(held[0][0][0])

    return step


def of_mean(comm):
    mean = qcomp.CompressedMean(qcomp.Identity())
    state = mean.init(full(0, 0), comm)
    return lambda value: -float(mean(full(value, comm.rank), state, comm, key=qcomp.Key())[0][0])


def of_torch(comm):
    torch = pytest.importorskip("torch")
    import qcomp.torch

    p = torch.nn.Parameter(torch.zeros(8))
    optimizer = qcomp.torch.CompressedSGD(
        [("weight", p)], lr=1.0, compressor=qcomp.Identity(), exact=None, comm=comm
    )

    def step(value):
        p.grad = torch.from_numpy(full(value, comm.rank))
        optimizer.step()
        return float(p[0])

    return step


def of_pytree(comm):
    jnp = pytest.importorskip("jax.numpy")
    import qcomp.jax

    optimizer = qcomp.jax.PytreeOptimizer(qcomp.SGD(**PLAIN))
    held = [{"w": jnp.zeros(8)}, None]
    held[1] = optimizer.init(held[0], comm)

    def step(value):
        held[:] = optimizer.step(held[0], {"w": jnp.asarray(full(value, comm.rank))}, held[1], comm)
        return float(held[0]["w"][0])

    return step


STEPS = {
    "SGD": partial(of_arrays, qcomp.SGD(**PLAIN)),
    "CompressedSGD": partial(of_arrays, qcomp.CompressedSGD(**EXACTLY)),
    "CompressedSGD of torch": of_torch,
    "SGD of a pytree": of_pytree,
    "OuterLoop": of_outer_loop,
    "CompressedMean": of_mean,
}


def two_of(make, order, comm):
    """Make two of a kind, step them in an order of this rank, and return both results, or the error's text."""
    steps = make(comm), make(comm)
    found = {}
    try:
        for which in order(comm.rank):
            found[which] = steps[which]((1, 100)[which])
    except MismatchError as error:
        return str(error)
    return found[0], found[1]


def crossed(rank):
    return (0, 1) if rank == 0 else (1, 0)


@pytest.mark.parametrize("name", ["SGD", "CompressedSGD", "OuterLoop", "CompressedMean"])
def test_the_same_order_averages_each(name):
    found = run_local(2, partial(two_of, STEPS[name], lambda _: (0, 1)))
    assert found == [(-1.5, -100.5)] * 2


@pytest.mark.parametrize("name", STEPS)
def test_two_of_a_kind_in_another_order_are_named_on_every_rank(name):
    found = run_local(3, partial(two_of, STEPS[name], crossed))
    assert all("different optimizers or steps" in text for text in found), found
    assert all(f"{name.split()[0]} number {number}" in text for text in found for number in (1, 2)), found


@pytest.mark.parametrize("kind", KINDS)
def test_every_communicator_compares(kind):
    def rank_main(comm):
        return two_of(STEPS["CompressedSGD"], crossed, KINDS[kind](comm))

    found = run_local(3, rank_main)
    assert all("different optimizers or steps" in text for text in found), found


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_difference_every_communicator_averages_as_before(kind):
    def rank_main(comm):
        return two_of(STEPS["CompressedSGD"], lambda _: (0, 1), KINDS[kind](comm))

    assert run_local(2, rank_main) == [(-1.5, -100.5)] * 2


@pytest.mark.parametrize("kind", ["local", "given with start"])
def test_outer_exchanges_under_way_are_compared(kind):
    def rank_main(comm):
        comm = KINDS[kind](comm)
        loop = qcomp.OuterLoop(every=2, delay=1, compressor=qcomp.Identity(), exact=None)
        running = [Overlapped(loop, comm) for _ in range(2)]
        held = [([full(0, 0)], loop.init([full(0, 0)], comm)) for _ in range(2)]
        try:
            for which in crossed(comm.rank) * 4:
                params, state = held[which]
                held[which] = running[which].step([params[0] - full(which, comm.rank)], state)
        except MismatchError as error:
            return str(error)

    for text in run_local(2, rank_main, timeout=20):
        assert "fragment 0 after step 2" in str(text), text


def test_a_digest_that_does_not_tell_owners_apart_swaps_their_gradients(monkeypatch):
    monkeypatch.setattr(Owner, "digest", property(lambda _: 7))

    def swapped(comm):
        given = Given(comm)
        steps = of_arrays(qcomp.SGD(**PLAIN), given), of_arrays(qcomp.SGD(**PLAIN), given)
        return [steps[which]((1, 100)[which]) for which in crossed(comm.rank)]

    assert run_local(2, swapped) == [[-51.0, -51.0]] * 2  # right are -1.5 and -100.5


@pytest.mark.parametrize(
    "optimizer",
    [qcomp.SGD(**PLAIN), qcomp.CompressedSGD(**EXACTLY)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_rank_that_continues_from_an_old_state_is_named(optimizer):
    def rank_main(comm):
        p = [np.ones(64, np.float32)]
        states = [optimizer.init(p, comm)]
        try:
            for t in range(4):
                state = states[1 if (t, comm.rank) == (3, 1) else t]
                grads = [np.full(64, comm.rank + t, np.float32)]
                p, new = optimizer.step(p, grads, state, comm)
                states.append(new)
        except MismatchError as error:
            return str(error)
        return "nothing was noticed"

    for text in run_local(2, rank_main):
        assert "rank 0: step 4 " in text, text
        assert "rank 1: step 2 " in text, text


FIELDS = Owner("SGD", 1, ("w",), 5, "step 1 (warmup)")


@pytest.mark.parametrize(
    "change", [{"kind": "Lion"}, {"number": 2}, {"stream": 6}, {"doing": "step 1 (compressed)"}], ids=str
)
def test_a_digest_depends_on_all_that_tells_owners_apart(change):
    assert FIELDS._replace(**change).digest != FIELDS.digest
    assert 0 < FIELDS.digest < 2**63


def test_the_text_of_an_owner_is_short_with_many_parameters():
    owner = FIELDS._replace(names=tuple(f"layer.{i}" for i in range(1000)))
    assert str(owner) == "step 1 (warmup) of SGD number 1 with 'layer.0', 'layer.1', 'layer.2' and 997 more"


def exchanges(comm, size=3):
    mine = np.full(size, comm.rank, np.uint8)
    first = yield AllToAll((mine,) * comm.size, (size,) * comm.size)
    second = yield AllGather(mine, (size,) * comm.size)
    return [[int(x[0]) for x in parts] for parts in (first, second)]


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "authenticated given"])
def test_owned_computations_receive_the_same_buffers_and_count_the_same_bytes(kind):
    def rank_main(comm):
        through = KINDS[kind](comm)
        counts = []
        for stages in (exchanges(comm), owned(exchanges(comm), FIELDS)):
            before = comm.bytes_sent
            assert drive(stages, through) == [[0, 1], [0, 1]]
            counts.append(comm.bytes_sent - before)
        both = drive(owned(pipeline([exchanges(comm), exchanges(comm)]), FIELDS), through)
        assert both == [[[0, 1], [0, 1]]] * 2
        return counts[1] - counts[0]

    extra = run_local(2, rank_main)
    assert extra == [2 * (joined_size([3, 8]) - 3) if kind.startswith("given") else 0] * 2


def test_an_owned_exchange_that_meets_one_without_owner_is_refused():
    def rank_main(comm):
        stages = exchanges(comm)
        try:
            drive(owned(stages, FIELDS) if comm.rank else stages, comm)
        except MismatchError as error:
            return str(error)

    for text in run_local(2, rank_main):
        assert "rank 0: no optimizer; rank 1: step 1 (warmup) of SGD number 1 with 'w'" in text


def test_a_communicator_that_has_seen_a_difference_stays_closed():
    def rank_main(comm):
        two_of(STEPS["SGD"], crossed, comm)
        with pytest.raises(CommunicatorError, match="closed"):
            comm.all_gather(np.zeros(1, np.uint8), [1] * comm.size)

    run_local(2, rank_main)


def test_a_lone_rank_may_step_in_any_order():
    comm = LocalCommunicator.alone()
    assert two_of(STEPS["SGD"], lambda _: (1, 0), comm) == (-1.0, -100.0)


GLOO = """
import os, time
import torch
import torch.distributed as dist
import qcomp, qcomp.torch
from qcomp.core.errors import MismatchError

torch.set_num_threads(1)
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=store, rank=me, world_size=n)
comm = qcomp.comm.TorchCommunicator(timeout=60)
"""
TWO = """
import numpy as np
import qcomp

def full(value):
    return [np.full(8, value + me, np.float32)]

def two_steps(order):
    optimizers = qcomp.SGD(learning_rate=1.0), qcomp.CompressedSGD(learning_rate=1.0, exact=None)
    params = [np.zeros(8, np.float32)]
    states = [one.init(params, comm, [name]) for one, name in zip(optimizers, ("enc", "dec"))]
    start = time.monotonic()
    try:
        for which in order:
            optimizers[which].step(params, full(which), states[which], comm)
        print("done", flush=True)
    except qcomp.MismatchError as error:
        print(time.monotonic() - start < 5, error, flush=True)
"""
BOTH = (
    "step 1 (warmup) of SGD number 1 with 'enc'",
    "step 1 (compressed) of CompressedSGD number 2 with 'dec'",
)


def test_over_gloo_every_rank_names_both(torch_ranks):
    body = "two_steps((0, 1) if me == 0 else (1, 0))"
    for rank in torch_ranks(3, GLOO + TWO + body):
        assert "True the ranks exchange for different optimizers or steps" in rank.out, rank
        assert f"(rank 0: {BOTH[0]}; ranks 1 and 2: {BOTH[1]})" in rank.out, rank


def test_over_gloo_ranks_that_wait_in_another_order_name_both(torch_ranks):
    body = """
from qcomp.core.mean.stages import AllGather, Owner

def start(number):
    owner = Owner("Test", number, (), 0, "step")
    return comm.start(AllGather(torch.zeros(3, dtype=torch.uint8), (3, 3), owner=owner))

same, first, second = start(0), start(1 + me), start(3 + me)
for pending in (second, first) if me else (first, second):
    try:
        pending.wait()
    except MismatchError as error:
        print(error, flush=True)
    except qcomp.CommunicatorError as error:
        print("closed" in str(error), flush=True)
"""
    for rank, (found, later) in enumerate(r.out.splitlines() for r in torch_ranks(2, GLOO + body)):
        assert f"rank {rank}: step of Test number {(1, 4)[rank]}; " in found or found.startswith(
            "the ranks"
        ), found
        assert later == "True"


@pytest.mark.mpi
def test_over_mpi_every_rank_names_both(mpirun):
    head = "import time\nimport qcomp\ncomm = qcomp.comm.world()\nme = comm.rank\n"
    end = "\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"  # the first to end aborts the job
    job = mpirun(3, ["-c", head + TWO + "two_steps((0, 1) if me == 0 else (1, 0))" + end], check=False)
    lines = [line for line in job.stdout.splitlines() if "different optimizers or steps" in line]
    assert len(lines) == 3, job
    for line in lines:
        assert line.startswith("True ")
        assert f"(rank 0: {BOTH[0]}; ranks 1 and 2: {BOTH[1]})" in line
