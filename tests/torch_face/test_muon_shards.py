"""Muon takes what FSDP2 has sharded: equal to Muon on whole parameters without loss, on every mesh, after a restart."""

import pytest

pytest.importorskip("torch")

HEAD = """
import os, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
import qcomp
import qcomp.torch

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "a state of|.*TypedStorage|.*deprecated")
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=me, world_size=n)
alone = qcomp.comm.LocalCommunicator.alone()
line = dist.init_device_mesh("cpu", (n,))
OTHERS = {"lr": 0.05, "weight_decay": 0.1, "others": ("0.*", "4.*")}
EXACT = {**OTHERS, "compressor": qcomp.Identity(), "update_compressor": qcomp.Identity()}

def network(dtype=torch.float32):
    torch.manual_seed(3)
    of = [torch.nn.Embedding(11, 6), torch.nn.Linear(6, 3), torch.nn.Tanh(), torch.nn.Linear(3, 40)]
    return torch.nn.Sequential(*of, torch.nn.Linear(40, 11)).to(dtype)

def sharded(mesh, dtype=torch.float32, **options):
    model = network(dtype)
    fully_shard(model[1], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)

def columns(n):
    # Of the matrices whose columns torch can cut into n equal parts.
    return lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % n == 0 else None

def muon(model, **options):
    return qcomp.torch.Muon(model.named_parameters(), **options)

def give(models, step, of=0):
    draws = torch.Generator().manual_seed(100 * of + step)
    for one, *others in zip(*(model.parameters() for model in models)):
        g = ((torch.randn(one.shape, generator=draws) * 64).round() / 64).to(one.dtype)
        for p in (one, *others):
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if hasattr(p, "placements") else g.clone()

def whole(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]

def require_equal(one, other):
    for x, y in zip(whole(one), whole(other), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)

def refusal(do):
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
"""


@pytest.fixture
def said(torch_ranks):
    """Run a script on ranks with a process group; return the lines of each."""

    def run(n, body):
        return [rank.out.splitlines() for rank in torch_ranks(n, HEAD + body, timeout=300.0)]

    return run


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_without_loss_it_equals_muon_on_whole_parameters(said, n):
    """3 rows on 4 ranks are uneven, and leave one empty; a checkpoint goes on with the same bits, in columns too."""
    said(
        n,
        """
shapes = [(n,), (n, 1), *([(2, 2)] if n == 4 else [])]
for dtype in (torch.float32, torch.bfloat16):
    for shape in shapes:
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape):])
        along = {"shard_placement_fn": columns(shape[-1])}
        model, ours, others = network(dtype), sharded(mesh, dtype), sharded(mesh, dtype, **along)
        assert sum(p.placements[-1] == Shard(1) for p in others.parameters()) == {1: 4, 2: 3, 3: 3, 4: 1}[shape[-1]]
        stock, muons = muon(model, comm=alone, **EXACT), muon(ours, **EXACT)
        for step in range(4):
            if step == 2:
                saved, muons = muons.state_dict(), muon(others, **EXACT)
                muons.load_state_dict(saved)
                for p, q in zip(ours.parameters(), others.parameters()):
                    with torch.no_grad():
                        q.copy_(distribute_tensor(p.full_tensor(), mesh, q.placements))
                ours = others
            give((model, ours), step)
            stock.step()
            muons.step()
        require_equal(model, ours)
        assert sorted(muons.core_state.exact) == [False] * 2 + [True] * 5
""",
    )


@pytest.mark.slow
def test_between_replicas_muon_averages(said):
    """A mesh of one dimension and a communicator of all ranks."""
    said(
        4,
        """
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
replica = mesh["replicas"].get_local_rank()
model, ours = network(), sharded(mesh["shards"])
stock = muon(model, comm=mesh["replicas"].get_group(), **EXACT)
muons = muon(ours, **EXACT)
for step in range(3):
    give((model, ours), step, of=replica)
    stock.step()
    muons.step()
require_equal(model, ours)
""",
    )


@pytest.mark.slow
def test_in_a_few_bits_it_learns_what_exact_muon_learns(said):
    """Within .03 of its loss, by real backward passes."""
    said(
        2,
        """
def trained(options):
    model = sharded(line)
    optimizer = muon(model, **options)
    for step in range(60):
        x = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(1000 * step + me))
        loss = torch.nn.functional.cross_entropy(model(x), (3 * x + 1) % 11)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss_of(model)

def loss_of(model):
    x = torch.arange(11)
    return float(torch.nn.functional.cross_entropy(model(x), (3 * x + 1) % 11).detach())

exact, coded = trained(EXACT), trained(OTHERS)
assert exact < 0.5 * loss_of(network()), exact
assert 0 < abs(coded - exact) < 0.03, (coded, exact)
""",
    )


@pytest.mark.slow
def test_a_checkpoint_of_4_ranks_goes_on_with_2_and_3(said, tmp_path):
    """Through torch.distributed.checkpoint and its planner, as one rank alone would have gone on; also in columns."""
    for number, n in enumerate((4, 2, 2, 3)):
        said(
            n,
            f"""
first, where = {2 * number}, {str(tmp_path)!r}
along = {{"shard_placement_fn": columns(n)}} if first in (2, 6) else {{}}
model, ours = network(), sharded(line, **along)
stock, muons = muon(model, comm=alone, **EXACT), muon(ours, **EXACT)
state = {{"model": ours, "optimizer": muons}}
if first:
    dcp.load(state, checkpoint_id=f"{{where}}/{{first}}", planner=qcomp.torch.LoadPlanner())
for step in range(first + 2):
    give((model, ours), step)
    stock.step()
    if step >= first:
        muons.step()
require_equal(model, ours)
dcp.save(state, checkpoint_id=f"{{where}}/{{first + 2}}")
""",
        )


def test_what_does_not_fit_is_refused_on_every_rank(said):
    texts = said(
        2,
        """
plain = torch.nn.Parameter(torch.ones(3, 3))
square = dist.init_device_mesh("cpu", (2, 1))
tiles = torch.nn.Parameter(distribute_tensor(torch.ones(8, 8), square, [Shard(0), Shard(1)]))
extra = [("plain", plain)]
self = dist.new_group([0]), dist.new_group([1])
for make in (
    lambda: qcomp.torch.Muon([*sharded(line).named_parameters(), *extra], **OTHERS),
    lambda: qcomp.torch.Muon([*sharded(line).named_parameters(), *(extra if me else [])], **OTHERS),
    lambda: qcomp.torch.Muon([("tiles", tiles)], lr=0.05),
    lambda: muon(sharded(line), **OTHERS, momentum=0.9 if me else 0.8),
    lambda: muon(sharded(line), **OTHERS, whiten_steps=qcomp.DoublingIntervals(1)),
    lambda: muon(sharded(line), **OTHERS, comm=self[me]),
):
    print(refusal(make), flush=True)
ours = sharded(line)
muons = muon(ours, **OTHERS)
before = whole(ours)
give((ours,), 0)
if me:
    ours[3].weight.grad.to_local()[0] = torch.nan
print(refusal(muons.step), flush=True)
ours.zero_grad()
give((ours,), 0)
muons.param_groups[0]["lr"] = 0.01 if me else 0.02
print(refusal(muons.step), flush=True)
assert all(torch.equal(x, y) for x, y in zip(before, whole(ours)))
""",
    )
    mixed, one, tiles, settings, whiten, comm, nan, rate = zip(*texts, strict=True)
    assert all(
        text.startswith("TypeError: the parameter 'plain' is whole, and others are sharded") for text in mixed
    )
    assert "MismatchError: rank 1 cannot make an optimizer for shards: TypeError" in one[0]
    assert one[1].startswith("TypeError: the parameter 'plain' is whole")
    assert all("ValueError: the parameter 'tiles' has the placements" in text for text in tiles)
    assert all("MismatchError" in text and "momentum" in text for text in settings)
    assert all("ValueError: whiten_steps is" in text for text in whiten)
    assert all("ValueError: comm has 1 ranks" in text for text in comm)
    assert all("NonFiniteError" in text and "'3.weight' on rank 1" in text for text in nan)
    assert all("MismatchError: the settings of step 1 differ" in text for text in rate)
