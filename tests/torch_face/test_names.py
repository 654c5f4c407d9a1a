"""Saved states find their parameters by name: in wrapped models, in another order, and with and without ``model=``."""

import copy
import json

import pytest
import torch

import qcomp
import qcomp.torch
from qcomp.torch.state_format import _inside_wrappers

pytestmark = pytest.mark.filterwarnings("ignore:the variance is frozen after")
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.9), "freeze": 2, "compressor": qcomp.ScaledSign(64), "exact": None}


class Named(torch.nn.Module):
    """Square layers with these names, in this order."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(7)
        layers = {name: torch.nn.Linear(12, 12, bias=False) for name in sorted(names)}
        for name in names:
            setattr(self, name, layers[name])

    def forward(self, x):
        for _, layer in sorted(self.named_children()):
            x = torch.tanh(layer(x))
        return x


def made(model, *, named=True, name="OneBitAdam", **changes):
    params = model.named_parameters() if named else model.parameters()
    return getattr(qcomp.torch, name)(params, **{**SETTINGS, **changes})


def train(model, optimizer, steps):
    for step in steps:
        model(torch.randn(4, 12, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(names, *, named=True, steps=4, **settings):
    model = Named(names)
    optimizer = made(model, named=named, **settings)
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.module.b"], ["a", "module.b"]),
        (["layers.0._orig_mod.w", "head"], ["layers.0.w", "head"]),
        (["module.a", None, "head"], ["module.a", None, "head"]),  # a module of the user's
        (["module.a", None], ["a", None]),
        (["my_orig_mod.a", "modules.b"], ["my_orig_mod.a", "modules.b"]),
        ([], []),
    ],
)
def test_prefixes_of_wrappers_are_no_part_of_a_name(names, expected):
    assert _inside_wrappers(names) == expected
    assert _inside_wrappers([name and f"module._orig_mod.{name}" for name in names]) == expected


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("steps", [1, 4], ids=["warm-up", "compressed"])
@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_parameters_in_another_order_continue_as_before(name, steps):
    """By position they would get the moments of others, which have the same shape."""
    changes = {"sync_steps": lambda step: step % 3 == 0} if name == "ZeroOneAdam" else {}
    model, optimizer = trained("abc", name=name, steps=steps, **changes)
    again = Named("bca")
    other = made(again, name=name, **changes)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(steps, 8))
    train(again, other, range(steps, 8))
    for key, p in model.named_parameters():
        assert torch.equal(again.get_parameter(key), p)
    assert other.param_groups[0]["param_names"] == ["b.weight", "c.weight", "a.weight"]


@pytest.mark.parametrize("steps", [1, 4], ids=["warm-up", "compressed"])
def test_other_names_are_named_and_change_nothing(steps):
    _, optimizer = trained("abc", steps=steps)
    again, other = trained("abd", steps=2)
    before = str(other.state_dict())
    with pytest.raises(ValueError, match=r"has 'c.weight', which this optimizer does not train") as caught:
        other.load_state_dict(optimizer.state_dict())
    assert "and lacks 'd.weight'. Parameters are matched by name" in str(caught.value)
    assert str(other.state_dict()) == before
    train(again, other, range(2, 4))


def test_parameters_in_other_groups_are_refused():
    optimizer, other = (
        qcomp.torch.OneBitAdam(groups_of(Named("abc"), first), **SETTINGS)
        for first in ("a.weight", "b.weight")
    )
    with pytest.raises(ValueError, match=r"state of param_groups\[0\] has 'a.weight', .* lacks 'b.weight'"):
        other.load_state_dict(optimizer.state_dict())


def groups_of(model, first):
    named = list(model.named_parameters())
    return [
        {"params": [pair for pair in named if (pair[0] == first) == is_first]} for is_first in (True, False)
    ]


def test_renamed_parameters_load_by_position_through_an_optimizer_without_names():
    model, optimizer = trained("abc")
    between = made(Named("abc"), named=False)
    between.load_state_dict(optimizer.state_dict())
    again = Named("def")
    other = made(again)
    again.load_state_dict(dict(zip(again.state_dict(), model.state_dict().values(), strict=True)))
    other.load_state_dict(between.state_dict())
    train(model, optimizer, range(4, 8))
    train(again, other, range(4, 8))
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_a_parameter_that_is_frozen_now_is_named():
    _, optimizer = trained("abc")
    other = Named("abc")
    other.b.requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match=r"has 'b.weight', which this optimizer does not train"):
        made(other).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="at position 1 a parameter that required a gradient when"):
        made(other, named=False).load_state_dict(optimizer.state_dict())


def test_damage_is_still_detected_after_a_change_of_names():
    _, optimizer = trained("abc")
    saved = optimizer.state_dict()
    saved["state"][1]["shared"][0]["momentum"][3, 4] += 1
    with pytest.raises(ValueError, match=r"changed since it was saved: 'momentum\.1' differ"):
        made(Named("abc"), named=False).load_state_dict(saved)


def test_damage_is_still_detected_in_the_record_without_its_groups():
    _, optimizer = trained("abc")
    saved = optimizer.state_dict()
    own = saved["state"][0]["rank 0 of 1"][0]
    record = json.loads(own["made_by"])
    record["settings"]["groups"] += " "
    own["made_by"] = json.dumps(record)
    with pytest.raises(ValueError, match=r"changed since it was saved: 'made_by' differ"):
        made(Named("abc")).load_state_dict(saved)


WRAPPED = """
import logging, os, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import qcomp, qcomp.torch
from qcomp.integrations import ddp

torch._logging.set_logs(all=logging.ERROR)  # torch.compile tells of DistributedDataParallel's profiling
warnings.simplefilter("error", UserWarning)
warnings.filterwarnings("ignore", "the variance is frozen after|the variance of .* no longer fits")
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=me, world_size=n)

def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(20, 31), torch.nn.Tanh(), torch.nn.Linear(31, 9, bias=False))

def compiled(model):
    return torch.compile(model, backend="eager")

WAYS = {
    "plain": (network, False),
    "compiled": (lambda: compiled(network()), False),
    "wrapped": (lambda: DistributedDataParallel(network()), True),
    "compiled, wrapped": (lambda: DistributedDataParallel(compiled(network())), True),
    "wrapped, compiled": (lambda: compiled(DistributedDataParallel(network())), True),
}

def inside(model):
    while not isinstance(model, torch.nn.Sequential):
        model = getattr(model, "_orig_mod", None) or model.module
    return model

def loss(model, step):
    draws = torch.Generator().manual_seed(1000 * step + me)
    return model(torch.randn(6, 20, generator=draws)).square().sum()

def train(model, optimizer, steps):
    for step in steps:
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_states_survive_wrapping_and_unwrapping(torch_ranks):
    """By torch.compile, by DistributedDataParallel or by both, in either order."""
    torch_ranks(
        2,
        WRAPPED
        + """
def made(way):
    make, has_model = WAYS[way]
    model = make()
    optimizer = qcomp.torch.CompressedSGD(
        model.named_parameters(), lr=0.01, compressor=qcomp.ScaledSign(64), exact=qcomp.ExactBelow(100),
        averaging=qcomp.Averaging(feedback=True, topology="two_phase", tensorwise=True),
        model=model if has_model else None)
    return model, optimizer

def content(model, optimizer):
    state = optimizer.core_state
    plain = [name.replace("_orig_mod.", "") for name in state.names]
    by_name = dict(zip(plain, state.momentum, strict=True))
    owed = torch.stack([x.square().sum() for x in state.exchange.worker]) if state.exchange.worker else torch.ones(1)
    assert owed.sum() > 0
    return [*inside(model).parameters(), *(by_name[k] for k, _ in inside(model).named_parameters())]

saved, results = {}, {}
for way in WAYS:
    model, optimizer = made(way)
    train(model, optimizer, range(3))
    saved[way] = optimizer.state_dict(), {k: x.clone() for k, x in inside(model).state_dict().items()}
    train(model, optimizer, range(3, 6))
    results[way] = content(model, optimizer)
    assert all(map(torch.equal, results[way], results["plain"])), way
for one, other in zip([*WAYS] + ["plain", "wrapped"], [*WAYS][1:] + ["plain", "wrapped", "compiled"], strict=True):
    model, optimizer = made(other)
    inside(model).load_state_dict(saved[one][1])
    optimizer.load_state_dict(saved[one][0])
    train(model, optimizer, range(3, 6))
    assert all(map(torch.equal, content(model, optimizer), results["plain"])), (one, other)
""",
        timeout=150.0,
    )


@pytest.mark.slow
def test_residuals_stay_with_their_ranks_when_other_ranks_serve(torch_ranks):
    """With ``model=`` each tensor is cut on its own, so a restart with or without it changes who serves what."""
    torch_ranks(
        2,
        WRAPPED
        + """
def made(model, way):
    wrapped = DistributedDataParallel(model) if way else model
    return wrapped, qcomp.torch.OneBitAdam(
        model.named_parameters(), lr=0.01, betas=(0.9, 0.9), freeze=2, compressor=qcomp.ScaledSign(64), exact=None,
        model=wrapped if way else None)

def owed(optimizer):
    own = optimizer.state_dict()["state"][0][f"rank {me} of {n}"][0]
    workers = {key: x for key, x in own.items() if key.startswith("worker_residual")}
    whole = {k: torch.zeros(p.numel()) for k, p in network().named_parameters()}
    for key, x in own.items():
        if key.startswith("server_residual"):
            name, start = key.removeprefix("server_residual.").split("@")
            whole[name][int(start) : int(start) + len(x)] = x
    for x in whole.values():
        dist.all_reduce(x)
    return workers | whole

for way in (True, False):
    model, optimizer = made(network(), way)
    train(model, optimizer, range(4))
    again, other = made(network(), not way)
    other.load_state_dict(optimizer.state_dict())
    before, after = owed(optimizer), owed(other)
    assert before.keys() == after.keys() and any(x.any() for x in before.values())
    assert all(torch.equal(before[key], after[key]) for key in before)
    inside(again).load_state_dict(inside(model).state_dict())
    train(again, other, range(4, 6))
""",
    )


def test_an_outer_loop_refuses_a_compiled_model_that_averages(torch_ranks):
    torch_ranks(
        2,
        WRAPPED
        + """
model = WAYS["wrapped, compiled"][0]()
try:
    qcomp.torch.OuterLoop(model, torch.optim.SGD(model.parameters(), lr=0.01), qcomp.outer.diloco(2))
except ValueError as error:
    assert "model averages over all 2 ranks of the loop in every step" in str(error)
else:
    raise AssertionError("the model averages")
""",
    )


NET = [torch.nn.Linear(12, 12, bias=False), torch.nn.Tanh(), torch.nn.Linear(12, 12, bias=False)]


def compiled(model):
    return torch.compile(model, backend="eager")


def inner_compiled(model):
    model[0] = compiled(model[0])
    return model


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("wrap", [compiled, inner_compiled])
class TestCompiledModels:
    """torch.compile changes the names of parameters, but nothing that depends on names."""

    def model(self, wrap=None):
        model = torch.nn.Sequential(*copy.deepcopy(NET))
        return model if wrap is None else wrap(model)

    def test_draws_and_policies_are_the_same(self, wrap):
        def trained(model):
            exact = qcomp.ExactBelow(0, names=("0.weight",))
            optimizer = qcomp.torch.CompressedSGD(
                model.named_parameters(), lr=0.01, compressor=qcomp.QSGD(64), exact=exact
            )
            train(model, optimizer, range(3))
            assert optimizer.core_state.exact == (True, False)
            return [p.detach() for p in model.parameters()]

        assert all(map(torch.equal, trained(self.model(wrap)), trained(self.model())))

    @pytest.mark.parametrize("then", ["plain", "compiled"])
    def test_an_outer_loop_resumes(self, wrap, then):
        """A state of the same names, or of plain ones."""

        def begun(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loop = qcomp.outer.sparse_loco(2, compressor=qcomp.ScaledSign(64), exact=None)
            return optimizer, qcomp.torch.OuterLoop(model, optimizer, loop)

        model = self.model(wrap if then == "compiled" else None)
        optimizer, loop = begun(model)
        train(model, optimizer, range(3))
        saved = loop.state_dict()
        train(model, optimizer, range(3, 6))
        other = self.model(wrap)
        optimizer, loop = begun(other)
        loop.load_state_dict([saved])
        loop.load_state_dict(saved)
        train(other, optimizer, range(3, 6))
        assert all(map(torch.equal, other.parameters(), model.parameters()))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_states_of_hooks_survive_compilation(torch_ranks):
    """Of a hook and of an optimizer under DistributedDataParallel, from a plain model to a compiled one and back."""
    torch_ranks(
        2,
        WRAPPED
        + """
def hooked(model):
    state, hook = ddp.hook(qcomp.ScaledSign(64), model, exact=None, exact_iterations=1)
    model.register_comm_hook(state, hook)
    sgd = torch.optim.SGD(model.parameters(), 0.01)
    return state, sgd

def overlapped(model):
    optimizer = ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=0.01, freeze=1, exact=None))
    return optimizer, optimizer

for make in (hooked, overlapped):
    saved, results = {}, {}
    for way in ("wrapped", "compiled, wrapped"):
        model = WAYS[way][0]()
        state, optimizer = make(model)
        train(model, optimizer, range(3))
        saved[way] = state.state_dict(), {k: x.clone() for k, x in inside(model).state_dict().items()}
        assert any("worker_residual" in key for key in saved[way][0]) and "_orig_mod" not in str([*saved[way][0]])
        train(model, optimizer, range(3, 6))
        results[way] = [p.detach() for p in model.parameters()]
    for one, other in [("wrapped", "compiled, wrapped"), ("compiled, wrapped", "wrapped")]:
        model = WAYS[other][0]()
        state, optimizer = make(model)
        inside(model).load_state_dict(saved[one][1])
        state.load_state_dict(saved[one][0])
        train(model, optimizer, range(3, 6))
        assert all(map(torch.equal, model.parameters(), results[one])), (make, one)
    assert all(map(torch.equal, *results.values()))
""",
        timeout=150.0,
    )
