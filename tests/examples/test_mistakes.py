"""Mistakes made as scripts are converted end right, or in an error that names the cure on every rank."""

import re

import pytest

pytest.importorskip("torch")

HEAD = """
import os, warnings
warnings.simplefilter("always")
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import qcomp, qcomp.torch
from qcomp.integrations import ddp

rank = int(os.environ["RANK"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(rank)
draws = torch.Generator().manual_seed(rank)
EXACT = qcomp.ExactBelow(1000)
SETTINGS = {"lr": 2e-3, "betas": (0.9, 0.9), "freeze": 3, "exact": EXACT}

def net():
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64))

def loss_of(model, scale=1.0):
    x = torch.randn(8, 64, generator=draws)
    return scale * (model(x) - torch.tanh(x)).square().mean()

def train(model, optimizer, steps=6, between=lambda step: None, scale=1.0):
    for step in range(steps):
        loss_of(model, scale).backward()
        between(step)
        optimizer.step()
        optimizer.zero_grad()

def alike(model):
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(others, own)
    assert torch.equal(*others)
    print("alike")
"""
MAKE = {
    "hook": """
model = DistributedDataParallel(net())
model.register_comm_hook(*ddp.hook(qcomp.QSGD(levels=7), model, exact=EXACT))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
""",
    "model": """
model = DistributedDataParallel(net())
optimizer = qcomp.torch.OneBitAdam(model.parameters(), model=model, **SETTINGS)
""",
    "plain": """
model = net()
optimizer = qcomp.torch.OneBitAdam(model.parameters(), **SETTINGS)
""",
}
SAME_DATA = (
    r"UserWarning: all 2 ranks have the same gradients.*DistributedSampler or a seed that depends on the rank"
)
CLIP = "train(model, optimizer, between=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 1.0), scale=1000)"
SETS_RATES = """
def set_rates(step):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (step + 1)
train(model, optimizer, between=set_rates)
"""
CANCELS = """
def cancel(step):
    for p in list(model.parameters())[-2:]:
        p.grad = None
train(model, optimizer, between=cancel)
"""
EVERY_MICRO_BATCH = "train(model, optimizer, between=lambda step: loss_of(model).backward())"
RANK_0_LOADS = """
train(model, optimizer)
saved = optimizer.state_dict()
if rank == 0:
    optimizer.load_state_dict(saved)
train(model, optimizer)
"""
RANK_0_LOADS_THE_MODEL = """
if rank == 0:
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
train(model, optimizer)
"""
RANK_0_GATHERS = """
train(model, optimizer)
if rank == 0:
    optimizer.gather_states()
train(model, optimizer)
"""
RANK_0_EVALUATES = """
def evaluate(step):
    if rank == 0:
        model.eval()
        with torch.no_grad():
            loss_of(model)
        model.train()
for step in range(6):
    evaluate(step)
    train(model, optimizer, 1)
"""
TWO = """
other = type(model)(net()) if isinstance(model, DistributedDataParallel) else net()
second = qcomp.torch.OneBitAdam(
    other.parameters(), **({"model": other} if isinstance(model, DistributedDataParallel) else {}), **SETTINGS)
"""
TOGETHER = """
for _ in range(6):
    (loss_of(model) + loss_of(other)).backward()
    for each in {order}:
        each.step()
        each.zero_grad()
alike(other)
"""

GAN = """
other = type(model)(net()) if isinstance(model, DistributedDataParallel) else net()
if "sign" in {how!r}:
    other.register_comm_hook(*ddp.hook(qcomp.ScaledSign(), other, exact=EXACT))
    second = torch.optim.SGD(other.parameters(), 0.01)
else:
    second = qcomp.torch.OneBitAdam(
        other.parameters(), **({{"model": other}} if isinstance(model, DistributedDataParallel) else {{}}), **SETTINGS)
for _ in range(8):
    fake = model(torch.randn(8, 64, generator=draws))
    second.zero_grad()
    if "no_sync" in {how!r}:
        with other.no_sync():
            loss_of(other).backward()
    other(fake.detach()).square().mean().backward()
    second.step()
    optimizer.zero_grad()
    if "kept out" in {how!r}:
        other.requires_grad_(False)
        other.module(fake).square().mean().backward()
        other.requires_grad_(True)
    else:
        other(fake).square().mean().backward()
    optimizer.step()
alike(other)
"""
TWO_IN_ONE = """
both = DistributedDataParallel(nn.ModuleList([net(), net()]))
qcomp.torch.OneBitAdam(both.module[0].parameters(), model=both, **SETTINGS)
"""
UNUSED = "no optimizer has used the last mean gradients of 2 parameters, such as '0.weight'.*call model.requires_grad_"

RIGHT = [
    ("hook", CLIP),
    ("plain", CLIP),
    ("hook", SETS_RATES),
    ("plain", SETS_RATES),
    ("hook", CANCELS),
    ("plain", CANCELS),
    ("hook", EVERY_MICRO_BATCH),
    ("plain", EVERY_MICRO_BATCH),
    *((way, RANK_0_EVALUATES) for way in MAKE),
    *((way, TWO + TOGETHER.format(order="(optimizer, second)")) for way in ("model", "plain")),
    ("plain", GAN.format(how="through")),
    ("model", GAN.format(how="kept out, no_sync")),
    (
        "hook",
        f"warnings.filterwarnings('error', 'no optimizer')\n{GAN.format(how='sign, kept out, no_sync')}",
    ),
]
WRONG = [
    ("model", CLIP, "was changed after the backward pass.*To clip, pass clip_norm= to the optimizer"),
    ("model", SETS_RATES, r"in the backward pass, which has used them.*change them before the backward pass"),
    ("model", CANCELS, "the gradient of '3.weight', '3.bias' is None"),
    ("model", EVERY_MICRO_BATCH, r"accumulate gradients in model.no_sync\(\)"),
    (
        "model",
        GAN.format(how="through"),
        r"call model.requires_grad_\(False\).*use model.module in that pass",
    ),
    ("plain", TWO_IN_ONE, "params lacks '1.0.weight'.*need a DistributedDataParallel each"),
    *(
        (way, RANK_0_LOADS, "rank 0: load_state_dict.*rank 1: step 7.*all ranks must")
        for way in ("model", "plain")
    ),
    *(
        (way, RANK_0_LOADS_THE_MODEL, "load weights on every rank, or before the opt")
        for way in ("model", "plain")
    ),
    *(
        (way, RANK_0_GATHERS, "rank 0: gather_states.*rank 1: step 7.*all ranks must")
        for way in ("model", "plain")
    ),
    (
        "plain",
        TWO + TOGETHER.format(order="((optimizer, second) if rank else (second, optimizer))"),
        "all ranks must make the same steps of the same optimizers in the same order",
    ),
    (
        "plain",
        "optimizer.step(); torch.save(optimizer, os.devnull)",
        r"load_state_dict\(optimizer.state_dict\(\)\)",
    ),
    ("plain", "optimizer.attach(model)", "expected a torch.nn.parallel.DistributedDataParallel"),
    ("hook", "qcomp.torch.OneBitAdam(model.parameters(), model=model)", "leave out the hook, or model="),
    ("plain", "qcomp.torch.OneBitAdam(model.parameters(), comm='gloo')", "expected a communicator of qcomp"),
]
WARNED = [
    ("hook", GAN.format(how="sign"), UNUSED),
    *((way, "draws.manual_seed(0)\ntrain(model, optimizer)", SAME_DATA) for way in MAKE),
    (
        "plain",
        "train(DistributedDataParallel(model), optimizer)",
        "Do not wrap the model in DistributedDataParallel",
    ),
    (
        "plain",
        "train(model, optimizer, between=lambda step: optimizer.zero_grad())",
        "call backward before step, and zero_grad after step",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "code"), RIGHT)
def test_what_ends_right(torch_ranks, way, code):
    for rank in torch_ranks(2, HEAD + MAKE[way] + code + "\nalike(model)", timeout=90, check=False):
        assert rank.status == 0, rank.err
        assert "alike" in rank.out


@pytest.mark.slow
@pytest.mark.parametrize(("way", "code", "cure"), WRONG)
def test_what_ends_in_an_error_on_every_rank(torch_ranks, way, code, cure):
    for rank in torch_ranks(2, HEAD + MAKE[way] + code, timeout=90, check=False):
        assert rank.status == 1
        assert re.search(cure, rank.err), rank.err


@pytest.mark.slow
@pytest.mark.parametrize(("way", "code", "cure"), WARNED)
def test_what_ends_with_a_warning_on_every_rank(torch_ranks, way, code, cure):
    for rank in torch_ranks(2, HEAD + MAKE[way] + code + "\nalike(model)", timeout=90, check=False):
        assert rank.status == 0, rank.err
        assert re.search(cure, rank.err), rank.err
