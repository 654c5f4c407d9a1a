"""Layers that begin to learn later and experts that are rarely used, beside torch's own optimizers; betas of groups."""

import copy

import pytest
import torch
from torch.nn.functional import mse_loss

import qcomp
import qcomp.torch
from qcomp.comm import LocalCommunicator, run_local

RARE, THAW, STEPS = 7, 300, 330


def model_of():
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {"first": torch.nn.Linear(6, 8), "expert": torch.nn.Linear(8, 8), "last": torch.nn.Linear(8, 4)}
    )


def backward(model, rank, step, size):
    """Compute gradients of this rank's batch; the first layer thaws, and the expert is used on the last rank alone."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(5, 6, generator=draw)
    hidden = torch.tanh(model["first"](x))
    if rank == size - 1 and step % RARE == 3:
        hidden = hidden + model["expert"](hidden)
    mse_loss(model["last"](hidden), x[:, :4].cos()).backward()
    if step < THAW:
        model["first"].zero_grad()


EXACT = {
    "OneBitAdam": ({"freeze": STEPS + 1}, torch.optim.AdamW, {}),
    "QAdam": ({"freeze": STEPS + 1}, torch.optim.AdamW, {}),
    "ZeroOneAdam": ({"variance_steps": lambda step: True}, torch.optim.AdamW, {}),
    "Muon": (
        {"others": True, "adam_learning_rate_factor": 1.0},
        torch.optim.AdamW,
        {},
    ),
    "coupled": ({"freeze": STEPS + 1, "decoupled_weight_decay": False}, torch.optim.Adam, {}),
    "CompressedSGD": (
        {"momentum": 0.9, "nesterov": True, "compressor": qcomp.Identity()},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
}
"""Settings with which each optimizer makes the steps of one of torch's."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(OneBitAdam|QAdam|ZeroOneAdam|CompressedSGD) compresses nothing")
@pytest.mark.filterwarnings("ignore:(AdamW moves all|Muon orthogonalises nothing)")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", EXACT)
def test_frozen_layers_and_rare_experts_move_as_in_torch(name, size):
    """A parameter of which no rank has a gradient has None in the mean, as under DistributedDataParallel."""
    settings, kind, of_torch = EXACT[name]
    common = {"lr": 0.01, "weight_decay": 0.1}
    twin = model_of()
    stock = kind(twin.parameters(), **common, **of_torch)
    for step in range(STEPS):
        models = [copy.deepcopy(twin) for _ in range(size)]
        for rank, model in enumerate(models):
            model.zero_grad()
            backward(model, rank, step, size)
        for p, *of_ranks in zip(twin.parameters(), *(m.parameters() for m in models), strict=True):
            given = [q.grad for q in of_ranks if q.grad is not None]
            p.grad = sum(given) / size if given else None
        stock.step()

    def main(comm):
        model = copy.deepcopy(start)
        face = qcomp.torch.OneBitAdam if name == "coupled" else getattr(qcomp.torch, name)
        optimizer = face(model.parameters(), **common, **settings, comm=comm)
        for step in range(STEPS):
            backward(model, comm.rank, step, size)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    start = model_of()
    for own in run_local(size, main, timeout=120):
        for found, p, before in zip(own, twin.parameters(), start.parameters(), strict=True):
            scale = (p.detach() - before.detach()).abs().max()
            assert scale > 1e-4
            assert (found - p.detach()).abs().max() < 1e-3 * scale


def train(optimizer, tensors, steps, before=None):
    for step in steps:
        for number, p in enumerate(tensors):
            draw = torch.Generator().manual_seed(100 * step + number)
            p.grad = torch.randn(p.shape, generator=draw)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:(OneBitAdam|QAdam) compresses nothing")
def test_a_saved_state_keeps_the_counts_by_name_and_by_position():
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    comm = LocalCommunicator.alone()
    optimizer = qcomp.torch.OneBitAdam([("p", p), ("q", q)], lr=0.1, comm=comm)
    train(optimizer, [p], range(5))
    q.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.core_state.numbers["missed_steps.q"] == 5
    saved = optimizer.state_dict()
    for params, name in (([("q", q), ("p", p)], "q"), ([p, q], "1")):
        other = qcomp.torch.OneBitAdam(params, lr=0.1, comm=comm)
        other.load_state_dict(saved)
        assert other.core_state.numbers[f"missed_steps.{name}"] == 5


KELLER_JORDAN = [
    {"use_muon": True, "lr": 0.02, "weight_decay": 0.01, "momentum": 0.95},
    {"use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.01},
    {"use_muon": False, "lr": 0.004, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0},
    {"use_muon": False, "lr": 0.2, "betas": (0.96, 0.95), "eps": 1e-10, "weight_decay": 0.0},
]
"""Groups as in scripts for MuonWithAuxAdam and for nanochat: AdamW's groups have betas of their own."""


def test_groups_of_muon_may_have_betas_of_their_own():
    shapes = [(8, 12), (12,), (6, 8), (3,)]
    ours, others = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    optimizer = qcomp.torch.Muon(
        [{"params": [p], **group} for p, group in zip(ours, KELLER_JORDAN, strict=True)],
        comm=LocalCommunicator.alone(),
    )
    keys = ("lr", "betas", "eps", "weight_decay")
    stock = torch.optim.AdamW(
        [
            {"params": [p], **{k: g[k] for k in keys}}
            for p, g in zip(others[1:], KELLER_JORDAN[1:], strict=True)
        ]
    )
    train(optimizer, ours, range(9))
    for step in range(9):
        for number, p in enumerate(others):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + number))
        stock.step()
    for p, q in zip(ours[1:], others[1:], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours[0], others[0])


@pytest.mark.filterwarnings("ignore:(OneBitAdam|QAdam|ZeroOneAdam|OneBitLamb) compresses nothing")
@pytest.mark.parametrize("name", ["OneBitAdam", "QAdam", "ZeroOneAdam"])
def test_groups_may_have_betas_and_eps_of_their_own(name):
    own = [{"betas": (0.8, 0.99)}, {"betas": [0.5, 0.9], "eps": 1e-3}, {"eps": 1e-5}]
    ours, others = ([torch.nn.Parameter(torch.ones(4)) for _ in own] for _ in range(2))
    groups, of_torch = ([{"params": [p], **g} for p, g in zip(ps, own, strict=True)] for ps in (ours, others))
    optimizer = getattr(qcomp.torch, name)(groups, lr=0.01, weight_decay=0.1, comm=LocalCommunicator.alone())
    stock = torch.optim.AdamW(of_torch, lr=0.01, weight_decay=0.1)
    for each, tensors in ((optimizer, ours), (stock, others)):
        train(each, tensors, range(12))
    for p, q in zip(ours, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_betas_of_groups_that_differ_between_ranks_are_found():
    def main(comm):
        p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        optimizer = qcomp.torch.OneBitAdam([{"params": [p]}, {"params": [q]}], lr=0.1, comm=comm)
        for x in (p, q):
            x.grad = torch.full((4,), 1.0 + comm.rank)
        optimizer.param_groups[1]["betas"] = (0.9, 0.99 + 0.001 * comm.rank)
        with pytest.raises(
            qcomp.MismatchError, match=r"betas of groups=\(\(0.9, 0.999\), \(0.9, 0.99\d*\)\)"
        ):
            optimizer.step()
        assert optimizer.core_state.step == 0

    with pytest.warns(UserWarning, match="compresses nothing"):
        run_local(2, main)


@pytest.mark.parametrize(
    ("name", "values", "error", "text"),
    [
        ("OneBitAdam", {"eps": None}, TypeError, r"param_groups\[1\] has eps=None; expected a value"),
        ("OneBitAdam", {"betas": (0.9, 1.5)}, ValueError, r"param_groups\[1\]: betas is \(0.9, 1.5\)"),
    ],
)
def test_what_groups_may_not_have(name, values, error, text):
    groups = [{"params": [torch.nn.Parameter(torch.ones(4))], **own} for own in ({}, values)]
    with pytest.raises(error, match=text):
        getattr(qcomp.torch, name)(groups, comm=LocalCommunicator.alone())


ATTACHED = """
import copy, warnings
import torch, torch.distributed as dist
import qcomp, qcomp.torch

def made(model, **settings):
    return qcomp.torch.OneBitAdam(
        model.parameters(),
        lr=0.01,
        betas=(0.8, 0.9),
        freeze=6,
        exact=None,
        watch=qcomp.VarianceWatch(every=1),
        **settings,
    )

def step(model, optimizer, number, frozen=()):
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    model(x).square().mean().backward()
    for p in frozen:
        p.grad = None
    optimizer.step()
    optimizer.zero_grad()

dist.init_process_group("gloo")
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40))
twin = copy.deepcopy(plain)
one, other = made(plain, averaging=qcomp.Averaging(tensorwise=True)), made(twin)
for number in range(8):
    step(plain, one, number, list(plain[0].parameters()))
    step(twin, other, number, list(twin[0].parameters()))
wrapped = torch.nn.parallel.DistributedDataParallel(twin, gradient_as_bucket_view=True, bucket_cap_mb=0.001)
other.attach(wrapped)
assert other.core_state.numbers["exact_steps"] == other.core_state.numbers["exact_steps.0.weight"] == 6
for number in range(8, 18):
    step(plain, one, number)
    step(wrapped, other, number)
    assert all(map(torch.equal, plain.parameters(), twin.parameters())), number
assert "exact_steps" not in other.core_state.numbers
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_model_in_buckets_goes_on_with_the_exact_steps_of_a_late_layer(torch_ranks):
    """The buckets with the layer, and those without, agree on where its exact gradients are among their means."""
    torch_ranks(2, ATTACHED, timeout=120)
