"""The steps under DistributedDataParallel are those of the optimizer alone, bit for bit."""

import pytest

pytest.importorskip("torch")

HEAD = """
import copy, dataclasses, os, pickle, warnings
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import qcomp
from qcomp.core.optimizers.average import EXACT
from qcomp.integrations import ddp

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "the variance is frozen after")
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=me, world_size=n)
os.environ["QCOMP_HOST"] = f"host{me % 2}"
comm = qcomp.comm.TorchCommunicator(timeout=30)

def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 41, bias=False), torch.nn.Tanh(),
        torch.nn.Linear(41, 5),
    )

def loss(model, step):
    draws = torch.Generator().manual_seed(1000 * step + me)
    return model(torch.randn(3, 33, generator=draws)).square().sum()

def wrapped(bucket_bytes=4000, **options):
    options = {"gradient_as_bucket_view": True} | options
    return DistributedDataParallel(network(), bucket_cap_mb=bucket_bytes / 2**20, **options)

def gradients(model):
    return [p.grad.clone() for p in model.parameters()]

def same(xs, ys):
    return len(xs) == len(ys) and all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))

def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def said(torch_ranks):
    """Run a script on ranks that have a process group; return the lines that each said."""

    def run(n, body, *, check=True):
        return [rank.out.splitlines() for rank in torch_ranks(n, HEAD + body, check=check)]

    return run


OPTIMIZERS = {
    "onebit_adam": "qcomp.OneBitAdam(learning_rate=0.01, freeze=3, exact=policy)",
    "onebit_adam, coupled decay, groups": (
        "qcomp.OneBitAdam(learning_rate=lambda step: 0.01 / (step + 1), freeze=2, weight_decay=0.1, exact=policy,"
        " decoupled_weight_decay=False, groups=[qcomp.Group('0.*', learning_rate_factor=0.5)])"
    ),
    "onebit_adam, freezes itself": (
        "qcomp.OneBitAdam(learning_rate=0.01, freeze=qcomp.VarianceStable(threshold=0.2), betas=(0.9, 0.7),"
        " exact=policy)"
    ),
    "qadam": "qcomp.QAdam(learning_rate=0.01, freeze=3, exact=policy)",
    "draws": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128), exact=policy)"
    ),
    "rescaled": (
        "qcomp.CompressedSGD(learning_rate=lambda step: 0.01 / (step + 1), compressor=qcomp.TopK(),"
        " rescale_feedback=True, exact=None)"
    ),
    "by name": (
        "qcomp.CompressedSGD(learning_rate=0.01, exact=policy, compressors=qcomp.ByName("
        "{'0.*': qcomp.ScaledSign(), '*': qcomp.QSGD(levels=7, bucket_size=64)}))"
    ),
    "all_gather": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128), feedback=False,"
        " topology='all_gather', exact=policy)"
    ),
    "coded": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128, coding='elias'),"
        " exact=policy)"
    ),
    "hierarchical": "qcomp.QAdam(learning_rate=0.01, freeze=2, exact=policy, topology='hierarchical')",
    "zero_one_adam": (
        "qcomp.ZeroOneAdam(learning_rate=0.01, variance_steps=qcomp.DoublingIntervals(1), exact=policy)"
    ),
    "onebit_lamb": "qcomp.OneBitLamb(learning_rate=0.01, freeze=3, exact=policy)",
}


SERVERS_DRAW = ("draws", "by name", "coded")
"""Which rank is the server of a bucket, and so whose draws it gets, depends on how tensors are cut for the ranks."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_the_optimizer_on_all_gradients(said, name):
    body = f"""
policy = qcomp.ExactBelow(100)
make = lambda: {OPTIMIZERS[name]}
alone, model = network(), wrapped()
optimizer = ddp.OverlappedOptimizer(model, make())
plain = dataclasses.replace(make(), tensorwise={name in SERVERS_DRAW})
names = [name for name, _ in alone.named_parameters()]
params = [p.detach() for p in alone.parameters()]
state = plain.init(params, comm, names)
for step in range(7):
    own = torch.autograd.grad(loss(alone, step), list(alone.parameters()))
    moved, state = plain.step(params, list(own), state, comm)
    for p, new in zip(params, moved, strict=True):
        p.copy_(new)
    loss(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert same(params, [p.detach() for p in model.parameters()]), step
    assert (optimizer.state.step, optimizer.state.stage) == (state.step, state.stage), step
    assert same(optimizer.state.momentum, state.momentum)
say(state.stage)
"""
    stages = said(3, body)
    assert stages[0] != ["warmup"]
    assert stages[1:] == stages[:-1]
