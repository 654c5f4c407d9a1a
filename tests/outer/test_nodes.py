"""Nodes of several ranks: data-parallel training inside, an outer loop between them."""

import pytest

import qcomp
from qcomp.comm import run_local
from tests.outer.jobs import Group, begun, loop_of, moves

START = """
import os, torch, torch.distributed as dist, qcomp.torch
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], dist.TCPStore(host, port, is_master=False))
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
"""


TWO_BY_TWO = (
    START
    + """
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "place"))
torch.manual_seed(0)
"""
)
"""Four ranks: two nodes with two places each."""


def train(comm, inner, outer, loop, steps=9):
    """Data-parallel SGD with momentum over ``inner``, and the loop over ``outer``."""
    opt = qcomp.SGD(learning_rate=0.25, momentum=0.5)
    params = begun()
    state, own = loop.init(params, outer), opt.init(params, inner)
    for step in range(steps):
        params, own = opt.step(params, moves(comm.rank, step), own, inner)
        params, state = loop.step(params, state, outer)
    return [p.tobytes() for p in params], [x.tobytes() for x in state.arrays["anchor"]]


def of_four(topology, hosts=None):
    """Two nodes of two ranks: inner ranks share a machine; outer ranks have the same place, or are all ranks."""
    loop = loop_of(averaging=qcomp.Averaging(topology=topology))

    def rank_main(comm):
        machine, place = divmod(comm.rank, 2)
        inner = Group(comm, [2 * machine, 2 * machine + 1])
        outer = comm if topology == "hierarchical" else Group(comm, [place, 2 + place])
        return train(comm, inner, outer, loop)

    return run_local(4, rank_main, hosts=hosts, timeout=30)


@pytest.fixture(scope="module")
def of_two():
    """The same gradients on two ranks, each with the gradients of one node."""
    loop = loop_of()

    def rank_main(comm):
        alone = qcomp.comm.LocalCommunicator.alone()
        opt = qcomp.SGD(learning_rate=0.25, momentum=0.5)
        params = begun()
        state, own = loop.init(params, comm), opt.init(params, alone)
        for step in range(9):
            pairs = zip(*(moves(2 * comm.rank + place, step) for place in range(2)), strict=True)
            params, own = opt.step(params, [(a + b) / 2 for a, b in pairs], own, alone)
            params, state = loop.step(params, state, comm)
        return [p.tobytes() for p in params], [x.tobytes() for x in state.arrays["anchor"]]

    return run_local(2, rank_main, timeout=30)


def test_ranks_of_the_same_place_exchange(of_two):
    """Ranks of a node compute the same, so nothing more is exchanged within it."""
    found = of_four("two_phase")
    assert found[0] == found[1] == of_two[0]
    assert found[2] == found[3] == of_two[1]


def test_all_ranks_may_exchange_in_a_hierarchy(of_two):
    """The payload then crosses the network once per node; the same bytes are averaged."""
    found = of_four("hierarchical", ["a", "a", "b", "b"])
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert all(anchor == of_two[0][1] for _, anchor in found)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_groups_of_mpi(mpirun, tmp_path):
    script = tmp_path / "nodes.py"
    script.write_text(
        """
import numpy as np
from mpi4py import MPI
import qcomp
from qcomp.comm import MPICommunicator

world = MPI.COMM_WORLD
machine, place = divmod(world.rank, 2)
inner, outer = MPICommunicator(world.Split(machine)), MPICommunicator(world.Split(place))
loop = qcomp.OuterLoop(every=3, delay=1, compressor=qcomp.ScaledSign(16), exact=None)
opt = qcomp.SGD(learning_rate=0.25)
params = [np.ones((8, 5), np.float32)]
running = qcomp.outer.Overlapped(loop, outer)
state, own = loop.init(params, outer), opt.init(params, inner)
for step in range(10):
    rng = np.random.default_rng([world.rank, step])
    grads = [rng.standard_normal((8, 5)).astype(np.float32)]
    params, own = opt.step(params, grads, own, inner)
    params, state = running.step(params, state)
anchors = world.allgather(state.arrays["anchor"][0].tobytes())
assert len(set(anchors)) == 1 and state.numbers["rounds.0"] == 3.0
assert world.allgather(params[0].tobytes())[2 * machine] == params[0].tobytes()
print("done")
"""
    )
    assert mpirun(4, ["-m", "mpi4py", script], timeout=90).stdout.count("done") == 4


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_of_torch_hide_exchanges_behind_inner_steps(torch_ranks):
    pytest.importorskip("torch")
    torch_ranks(
        2,
        START
        + """
loop = qcomp.OuterLoop(every=4, fragments=2, delay=2, mixing=0.5, compressor=qcomp.ScaledSign(16), exact=None)
found = []
for again in range(2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = qcomp.torch.OuterLoop(model, optimizer, loop)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(14):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
    digest = torch.cat([p.flatten() for p in outer.shared_parameters().values()])
    both = [torch.empty_like(digest) for _ in range(2)]
    dist.all_gather(both, digest)
    assert torch.equal(both[0], both[1])
    found.append(digest)
assert torch.equal(*found)
dist.destroy_process_group()
""",
        timeout=100,
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_nodes_that_shard_their_model(torch_ranks):
    """Two nodes of two ranks: each rank exchanges its shards with the rank in the same place."""
    pytest.importorskip("torch")
    torch_ranks(
        4,
        TWO_BY_TWO
        + """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 6))
fully_shard(model, mesh=mesh["place"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
comm = qcomp.comm.TorchCommunicator(mesh["nodes"].get_group())
try:
    inside = qcomp.comm.TorchCommunicator(mesh["place"].get_group())
    qcomp.torch.OuterLoop(model, optimizer, qcomp.OuterLoop(every=3), comm=inside)
    raise AssertionError("not refused")
except ValueError as error:
    assert "model, being sharded, averages over all 2 ranks of the loop" in str(error), error
loop = qcomp.OuterLoop(every=3, compressor=qcomp.ScaledSign(16), exact=None, warmup=2)
outer = qcomp.torch.OuterLoop(model, optimizer, loop, comm=comm)
torch.manual_seed(1 + dist.get_rank())
apart = []
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(8, 30)).square().mean().backward()
    optimizer.step()
    whole = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    of_all = [torch.empty_like(whole) for _ in range(4)]
    dist.all_gather(of_all, whole)
    apart.append([not torch.equal(of_all[0], other) for other in of_all[1:]])
assert all(not a[0] for a in apart)  # the ranks of a node have one model
assert [a[1] for a in apart] == [False, False, True, True, False, True, True, False]
dist.destroy_process_group()
""",
        timeout=150,
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_nodes_under_ddp(torch_ranks):
    """Two nodes of two ranks, each with a DistributedDataParallel; a single one over all four ranks is refused."""
    pytest.importorskip("torch")
    torch_ranks(
        4,
        TWO_BY_TWO
        + """
from torch.nn.parallel import DistributedDataParallel
network = torch.nn.Linear(30, 40)
model = DistributedDataParallel(network, process_group=mesh["place"].get_group())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loop = qcomp.OuterLoop(every=3)
try:
    qcomp.torch.OuterLoop(DistributedDataParallel(network), optimizer, loop)
    raise AssertionError("not refused")
except ValueError as error:
    assert "model averages over all 4 ranks of the loop in every step" in str(error), error
try:
    qcomp.torch.OuterLoop(model, optimizer, loop, comm=qcomp.comm.TorchCommunicator(mesh["place"].get_group()))
    raise AssertionError("not refused")
except ValueError as error:
    assert "model averages over all 2 ranks of the loop in every step" in str(error), error
outer = qcomp.torch.OuterLoop(model, optimizer, loop, comm=qcomp.comm.TorchCommunicator(mesh["nodes"].get_group()))
torch.manual_seed(1 + dist.get_rank())
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 30)).square().mean().backward()
    optimizer.step()
    own = network.weight.detach()
    of_all = [torch.empty_like(own) for _ in range(4)]
    dist.all_gather(of_all, own)
    assert torch.equal(of_all[0], of_all[1])
    assert torch.equal(of_all[0], of_all[2]) == (step % 3 == 2)
dist.destroy_process_group()
""",
        timeout=150,
    )
