"""Damage to one rank's state of a sharded model: both ranks refuse it and keep their state, or both load it."""

import pytest

pytest.importorskip("torch")

BODY = """
import os, random, warnings
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import qcomp
from qcomp.torch.fsdp import compress
from tests.fuzz.damage import damaged

me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=me, world_size=n)
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(7, 18), torch.nn.Linear(18, 5))
if BETWEEN:
    mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("replicas", "shard"))
    options, shard = {"replicas": mesh["replicas"]}, mesh["shard"]
else:
    options, shard = {}, dist.init_device_mesh("cpu", (n,))
fully_shard(model[0], mesh=shard)
fully_shard(model, mesh=shard)
compression = compress(model, qcomp.ScaledSign(bucket_size=64), exact=None, **options)

def backward():
    model(torch.ones(3, 7) + me).square().sum().backward()
    model.zero_grad()

def kinds(own):
    found = [None] * n
    dist.all_gather_object(found, own)
    return found

backward()
backward()
saved = compression.state_dict()
everything = kinds(saved)
refused = 0
for number in range(INPUTS):
    rng = random.Random(number)
    victim = rng.randrange(n)
    given = saved if number % 3 else list(everything)
    if victim == me:
        given = damaged(saved, rng) if number % 3 else [damaged(everything[0], rng), *everything[1:]]
    before, kind = repr(compression.state_dict()), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compression.load_state_dict(given)
        except Exception as error:
            kind = type(error).__name__
            assert kind in ("ValueError", "MismatchError"), (number, kind, str(error)[:300])
            assert len(str(error)) < 4000
    found = kinds(kind)
    assert (None in found) == (found == [None] * n), (number, found)
    refused += kind is not None
    if kind is not None:
        assert repr(compression.state_dict()) == before, number
    else:
        backward()
        compression.load_state_dict(saved)
assert refused > INPUTS // 2, refused
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_both_ranks_refuse_or_load(torch_ranks, between, count):
    torch_ranks(2, BODY.replace("BETWEEN", str(between)).replace("INPUTS", str(count)), timeout=100)
