"""The optimizers for torch make the steps of the core, and behave like torch optimizers otherwise."""

import copy
import inspect
import io
import pickle
import warnings
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import qcomp
import qcomp.torch
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.optimizers.unused import stages_of_used
from qcomp.torch import AveragingOptimizer
from qcomp.torch.optimizer import arguments
from tests.torch_face.every import FACES, FREEZE, SIGN, SMALL, settings_of

RULE = qcomp.VarianceStable()
EXPECTED = "the variance of .* no longer fits|the variance is frozen after|nothing is compressed yet"
every_face = pytest.mark.parametrize("name", FACES)


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(20, 31, bias=False), torch.nn.BatchNorm1d(31), torch.nn.Tanh(), torch.nn.Linear(31, 9)
    )


NETWORK = network()


def model_of(rank):
    return copy.deepcopy(NETWORK)


def backward(model, rank, step):
    draws = torch.Generator().manual_seed(1000 * step + rank)
    model(torch.randn(8, 20, generator=draws)).square().sum().backward()


def face(name, params, comm, **changes):
    return getattr(qcomp.torch, name)(params, **{**settings_of(name), **changes}, comm=comm)


def core(name, **changes):
    make, settings = FACES[name][0], settings_of(name)
    return make(learning_rate=settings.pop("lr"), **{**settings, **changes})


def content(optimizer):
    """Return the bits of parameters and state."""
    state = optimizer.core_state
    arrays = [*state.momentum, *state.variance, *state.exchange.worker, *state.exchange.server]
    arrays += [array for of_kind in state.arrays.values() for array in of_kind]
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return [np.asarray(x).tobytes() for x in params + arrays], state.numbers, state.step, state.stage


def train(optimizer, model, rank, steps, scheduler=None):
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "the variance of .* no longer fits|the variance is frozen after|nothing is compressed yet",
        )
        yield


def test_every_face_is_in_the_table():
    kinds = {key for key in qcomp.torch.__all__ if isinstance(getattr(qcomp.torch, key), type)}
    of_steps = {key for key in kinds if issubclass(getattr(qcomp.torch, key), AveragingOptimizer)}
    assert of_steps - {AveragingOptimizer.__name__} == FACES.keys()


# --- the steps -------------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(1)
@every_face
def test_steps_equal_those_of_the_core_bit_for_bit(name):
    def main(comm):
        model = model_of(comm.rank)
        optimizer = face(name, model.named_parameters(), comm)
        twin, opt = model_of(comm.rank), core(name)
        names = [key for key, _ in twin.named_parameters()]
        params = [p.detach().clone() for p in twin.parameters()]
        state = opt.init(params, comm, names)
        for step in range(2 * FREEZE + 2):
            backward(model, comm.rank, step)
            params, state = opt.step(params, [p.grad.clone() for p in model.parameters()], state, comm)
            optimizer.step()
            optimizer.zero_grad()
            assert all(map(torch.equal, params, (p.detach() for p in model.parameters())))
        assert state.stage == optimizer.core_state.stage != "warmup"
        return [p.sum().item() for p in params]

    results = run_local(2, main)
    assert name == "ZeroOneAdam" or results[0] == results[1]  # its ranks differ


@pytest.mark.skipif(not hasattr(torch.nn.Parameter(torch.ones(1)), "grad_dtype"), reason="an older torch")
@pytest.mark.parametrize(
    ("of_params", "of_grads"), [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str
)
@every_face
def test_gradients_may_be_more_or_less_precise_than_parameters(name, of_params, of_grads):
    """They count in the precision of the parameters; one rank has none of a parameter."""

    def main(comm, own):
        params = [torch.nn.Parameter(torch.zeros(8, 8, dtype=of_params)) for _ in range(2)]
        for p in params:
            p.grad_dtype = own
        changes = {} if name == "Muon" else {"exact": None}
        named = [(f"layer{i}.weight", p) for i, p in enumerate(params)]
        optimizer = face(name, named, comm, **changes)
        for step in range(2):
            for p in params[comm.rank :]:
                p.grad = torch.linspace(step, 1 + comm.rank, 64).reshape(8, 8).to(own)
            optimizer.step()
            optimizer.zero_grad()
        return [p.tolist() for p in params]

    found = run_local(2, lambda comm: main(comm, of_grads), timeout=20)
    assert found[0] == found[1]
    assert found == run_local(2, lambda comm: main(comm, of_params), timeout=20)


def test_the_warm_up_alone_equals_adamw():
    model, twin = model_of(0), model_of(0)
    optimizer = face(
        "OneBitAdam", model.parameters(), LocalCommunicator.alone(), weight_decay=0.1, freeze=100
    )
    stock = torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(20):
        for net, opt in ((model, optimizer), (twin, stock)):
            backward(net, 0, step)
            opt.step()
            opt.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_a_momentum_may_start_and_stop():
    """As in torch, but that a momentum which was 0 in between starts anew; also of a parameter without a gradient."""
    ours, others = ([torch.nn.Parameter(torch.ones(4)) for _ in range(2)] for _ in range(2))
    optimizer = face(
        "CompressedSGD",
        ours,
        LocalCommunicator.alone(),
        lr=0.1,
        momentum=0.0,
        exact=None,
        compressor=qcomp.Identity(),
    )
    for step, momentum in enumerate((0.0, 0.5, 0.5, 0.0, 0.5)):
        if step in (0, 4):
            stock = torch.optim.SGD(others, lr=0.1)
        optimizer.param_groups[0]["momentum"] = stock.param_groups[0]["momentum"] = momentum
        for tensors in (ours, others):
            for p, has_gradient in zip(tensors, (True, step not in (1, 3)), strict=True):
                p.grad = torch.full((4,), 1.0 + step) if has_gradient else None
        optimizer.step()
        stock.step()
        for p, q in zip(ours, others, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


def test_a_changed_momentum_reaches_the_owners():
    """Cached layouts are kept only if nothing in the exchange has changed."""
    model, comm = model_of(0), LocalCommunicator.alone()
    optimizer = face("Muon", model.named_parameters(), comm)
    for step, momentum in enumerate((0.85, 0.95, 0.95)):
        optimizer.param_groups[0]["momentum"] = momentum
        backward(model, 0, step)
        grads, params = (
            [p.grad.clone() for p in model.parameters()],
            [p.detach().clone() for p in model.parameters()],
        )
        own = optimizer.core_state._replace(
            momentum=tuple(m.clone() for m in optimizer.core_state.momentum),
            variance=tuple(v.clone() for v in optimizer.core_state.variance),
        )
        expected, _ = core("Muon", momentum=momentum).step(params, grads, own, comm)
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, expected, (p.detach() for p in model.parameters())))


def test_groups_choose_the_parameters_of_adamw():
    model, comm = model_of(0), LocalCommunicator.alone()
    first, *_ = weights = [pair for pair in model.named_parameters() if pair[1].ndim == 2]
    rest = [pair for pair in model.named_parameters() if pair[1].ndim == 1]
    for others, in_rest, exact in (
        ((), True, (False, False, True, True, True)),
        ((), (), (False, False, True, True, True)),
        (("0.*",), False, (True, False, True, True, True)),
        (True, (), (True, True, True, True, True)),
        (lambda tensors: [t.name == "3.weight" for t in tensors], (), (False, True, True, True, True)),
    ):
        groups = [{"params": weights, "others": others}, {"params": rest, "others": in_rest}]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Muon orthogonalises nothing")
            optimizer = face("Muon", groups, comm)
        assert optimizer.core_state.exact == exact
    with pytest.raises(TypeError, match=r"others is '0\.\*'; expected a sequence of patterns"):
        face("Muon", [first], comm, others="0.*")
    with pytest.raises(ValueError, match=r"others has the pattern 'embed\*'"):
        face("Muon", [first], comm, others=("embed*",))


def test_groups_have_rates_and_decays_of_their_own_that_a_scheduler_changes():
    """Compared with the core, whose schedule and groups serve the same purpose."""

    def main(comm):
        model, twin = model_of(comm.rank), model_of(comm.rank)
        *others, last = [pair for pair in model.named_parameters() if pair[1].ndim == 1]
        weights = [pair for pair in model.named_parameters() if pair[1].ndim == 2]
        groups = [
            {"params": weights, "weight_decay": 0.25},
            {"params": others, "lr": 0.005},
            {"params": [last], "weight_decay": 0.5},
        ]
        optimizer = face("OneBitAdam", groups, comm)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        order = [name for name, _ in [*weights, *others, last]]
        opt = core("OneBitAdam")
        opt = qcomp.OneBitAdam(
            learning_rate=lambda step: 0.01 * 0.5**step,
            weight_decay=0.25,
            groups=[qcomp.Group([name for name, _ in others], 0.5, 0.0), qcomp.Group([last[0]], 1.0, 0.5)],
            freeze=FREEZE,
            compressor=SIGN,
            exact=opt.exact,
        )
        named = dict(twin.named_parameters())
        params = [named[name].detach().clone() for name in order]
        state = opt.init(params, comm, order)
        for step in range(8):
            backward(model, comm.rank, step)
            grads = [dict(model.named_parameters())[name].grad.clone() for name in order]
            params, state = opt.step(params, grads, state, comm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            found = [dict(model.named_parameters())[name].detach() for name in order]
            assert all(map(torch.equal, params, found)), step

    run_local(2, main)


SCHEDULERS = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 4]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, total_iters=3),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 8),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.001, 0.01, step_size_up=3),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.02, total_steps=20),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [3]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
}


QUICK = ("LambdaLR", "CyclicLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau")
"""A scheduler of each kind: of the rate, of betas too, chained, and driven by the loss."""


LIKE_ONE_BIT_ADAM = {"OneBitLamb", "QAdam", "ZeroOneAdam"}
"""Optimizers whose groups have the same settings as those of OneBitAdam."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "scheduler",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SCHEDULERS],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "OneBitAdam" else pytest.mark.slow)
        for name in FACES
        if name not in {*LIKE_ONE_BIT_ADAM, "Muon"}  # a test above changes the momentum of Muon
    ],
)
def test_every_scheduler_changes_what_the_steps_use(name, scheduler):
    """Each step equals that of an optimizer made with the values of that moment, from the same state."""
    comm = LocalCommunicator.alone()
    model = model_of(0)
    optimizer = face(name, model.named_parameters(), comm)
    rates = SCHEDULERS[scheduler](optimizer)
    used = set()
    for step in range(8):
        group, state = optimizer.param_groups[0], optimizer.core_state
        backward(model, 0, step)
        now = {key: group[key] for key in ("betas", "momentum") if key in group}
        fresh = core(name, **now)
        fresh = type(fresh)(**{**vars_of(fresh), "learning_rate": group["lr"]})
        grads = [p.grad.clone() for p in model.parameters()]
        params = [p.detach().clone() for p in model.parameters()]
        own = state._replace(
            momentum=tuple(m.clone() for m in state.momentum),
            variance=tuple(v.clone() for v in state.variance),
        )
        expected, _ = fresh.step(params, grads, own, comm)
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, expected, (p.detach() for p in model.parameters())))
        used.add((float(group["lr"]), str(now)))
        rates.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
    assert len(used) > 1


def vars_of(optimizer):
    return {
        name: getattr(optimizer, name)
        for name in type(optimizer).__dataclass_fields__
        if name != "warmup_steps"
    }


def test_a_rising_rate_keeps_the_variance_from_freezing():
    """The freeze rule learns of the rise as it does with a schedule of the core."""
    stages = {}
    for factor in (1.0, 1.01):
        param = torch.nn.Parameter(torch.ones(200))
        optimizer = face("OneBitAdam", [param], LocalCommunicator.alone(), freeze=RULE, betas=(0.9, 0.9))
        scheduler = lr_scheduler.ExponentialLR(optimizer, factor)
        for _ in range(80):
            param.grad = torch.full((200,), 0.1)
            optimizer.step()
            scheduler.step()
        stages[factor] = optimizer.core_state.stage
    assert stages == {1.0: "compressed", 1.01: "warmup"}


WARM, FROZEN = 24, 45
RISING = {
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=WARM),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=WARM), lr_scheduler.ExponentialLR(opt, 0.9)], [WARM]
    ),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, 0.01, total_steps=96, pct_start=WARM / 96, cycle_momentum=False
    ),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / WARM)),
}


def resumable(scheduler, name="OneBitAdam"):
    """Return a parameter, an optimizer that freezes automatically, and a scheduler."""
    param = torch.nn.Parameter(torch.ones(200))
    optimizer = face(name, [param], LocalCommunicator.alone(), freeze=RULE, betas=(0.9, 0.9))
    return param, optimizer, RISING[scheduler](optimizer)


def one_step(param, optimizer):
    step = optimizer.core_state.step
    param.grad = torch.full((200,), 0.1) + 0.01 * torch.sin(torch.arange(200.0) + step)
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OneBitAdam", pytest.param("QAdam", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheduler", RISING)
@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step"
)  # torch has not seen the steps before the save
def test_a_run_that_resumes_near_the_end_of_a_warm_up_freezes_at_the_same_step(scheduler, name):
    """Saved before or after each step of the scheduler, whose state is loaded before or after the optimizer's."""
    param, optimizer, rates = resumable(scheduler, name)
    whole, saved = [], {}

    def save(step, when):
        of_all = param.detach().clone(), optimizer.state_dict(), rates.state_dict()
        saved[step, when] = copy.deepcopy(of_all)

    for step in range(FROZEN + 2):
        one_step(param, optimizer)
        whole.append(content(optimizer))
        if WARM - 4 < step < WARM + 3:
            save(step, "before")
        rates.step()
        if WARM - 4 < step < WARM + 3:
            save(step, "after")
    stages = [stage for *_, stage in whole]
    assert stages.index("compressed") in range(FROZEN - 3, FROZEN)

    wrong = []
    for (step, when), (value, of_optimizer, of_rates) in saved.items():
        for first in ("optimizer", "scheduler"):
            param, optimizer, rates = resumable(scheduler, name)
            with torch.no_grad():
                param.copy_(value)
            if first == "scheduler":
                rates.load_state_dict(copy.deepcopy(of_rates))
            optimizer.load_state_dict(of_optimizer)
            if first == "optimizer":
                rates.load_state_dict(copy.deepcopy(of_rates))
            if when == "before":
                rates.step()
            for expected in whole[step + 1 :]:
                one_step(param, optimizer)
                if content(optimizer) != expected:
                    wrong.append((step, when, first, optimizer.core_state.step))
                    break
                rates.step()
    assert wrong == []


# --- the settings ----------------------------------------------------------------------------------------------------

OTHER = {
    "freeze": qcomp.FreezeAt(77),
    "watch": None,
    "variance_floor": 0.0,
    "decoupled_weight_decay": False,
    "averaging": qcomp.Averaging("all_gather"),
    "clip_norm": 3.0,
    "seed": 5,
    "nonfinite": "skip",
    "rounding": "stochastic",
    "nesterov": True,
    "momentum": 0.5,
    "betas": (0.8, 0.9),
    "eps": 1e-3,
    "weight_decay": 0.5,
    "compressor": qcomp.QSGD(15, 64),
    "exact": qcomp.ExactBelow(7),
    "trust_bounds": (0.5, 2.0),
    "trust_decay": 0.5,
    "factor_bounds": (0.25, 2.0),
    "factor_change": 0.5,
    "variance_steps": qcomp.DoublingIntervals(3),
    "sync_steps": qcomp.LocalSteps(5, 3),
    "adjust_lr_fn": "match_rms_adamw",
    "others": ("3",),
    "splits": (("0", 1),),
    "output_axis": -1,
    "block_rows": 12,
    "whiten_steps": qcomp.DoublingIntervals(2),
    "newton_schulz_steps": 3,
    "newton_schulz_dtype": "bfloat16",
    "adam_learning_rate_factor": 0.5,
    "update_compressor": qcomp.QSGD(15, 64),
}
"""A value for each setting that no optimizer has as its default."""


@every_face
def test_every_setting_of_the_core_exists_and_takes_effect(name):
    """Except schedules and policies by name, which groups replace, and settings with a single possible value."""
    kind, _ = FACES[name]
    of_face = inspect.signature(getattr(qcomp.torch, name)).parameters
    of_core = {f.name: f.default for f in fields(kind)}
    instead = {"learning_rate", "groups", "compressors"}
    must_be = {"ZeroOneAdam": {"decoupled_weight_decay"}, "OneBitLamb": {"variance_steps"}}
    fixed = must_be.get(name, set())
    other = OTHER | ({"nesterov": False} if name == "Muon" else {})
    of_ranks = {"params", "lr", "comm", "model", "init_sync"}
    assert of_face.keys() - of_ranks == of_core.keys() - instead - fixed
    of_groups = {"betas", "eps", "momentum"} & of_core.keys()
    assert of_groups <= {*getattr(qcomp.torch, name).shared}, "shared lacks settings that groups may change"
    for setting in of_face.keys() - of_ranks - {"stacks"}:  # this model has no stack
        assert setting == "compressor" or of_face[setting].default == of_core[setting]
        params, comm = model_of(0).parameters(), LocalCommunicator.alone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some freeze early, or compress nothing
            optimizer = getattr(qcomp.torch, name)(params, comm=comm, **{setting: other[setting]})
            plain = getattr(qcomp.torch, name)(model_of(0).parameters(), comm=comm)
        reached = optimizer._settings.optimizer(optimizer.param_groups, 0)
        assert getattr(reached, setting) == other[setting] != of_core[setting]
        assert plain._settings.optimizer(plain.param_groups, 0).compressor == of_core["compressor"]


def test_shared_names_only_arguments():
    class Forgetful(AveragingOptimizer):
        def __init__(self, params, lr=0.1, *, momentum=0.9, comm=None, model=None, init_sync=True):
            super().__init__(**arguments(qcomp.CompressedSGD, locals()))

    with pytest.raises(
        TypeError, match=r"Forgetful\.shared has \['betas', 'eps'\], which are no arguments of"
    ):
        Forgetful(model_of(0).parameters())


# --- behaviour of a torch optimizer -----------------------------------------------------------------------------------


def test_a_closure_computes_what_the_step_uses():
    model, twin = model_of(0), model_of(0)
    comm = LocalCommunicator.alone()
    optimizer, other = (face("OneBitAdam", net.parameters(), comm) for net in (model, twin))

    def closure():
        optimizer.zero_grad()
        backward(model, 0, 0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    train(other, twin, 0, [0])
    assert content(optimizer) == content(other)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_a_compiled_model_makes_the_same_steps():
    model, twin = model_of(0), model_of(0)
    comm = LocalCommunicator.alone()
    optimizer, other = (face("OneBitAdam", net.parameters(), comm) for net in (model, twin))
    train(optimizer, torch.compile(model, backend="eager"), 0, range(FREEZE + 2))
    train(other, twin, 0, range(FREEZE + 2))
    assert content(optimizer) == content(other)


def test_hooks_run_around_a_step():
    model = model_of(0)
    optimizer = face("OneBitAdam", model.parameters(), LocalCommunicator.alone())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, model, 0, [0])
    assert seen == ["before", "after"]


def test_a_group_that_does_not_fit_is_not_added():
    model = model_of(0)
    first, *others = model.parameters()
    optimizer = face("OneBitAdam", [first], LocalCommunicator.alone())
    with pytest.raises(ValueError, match=r"param_groups\[1\]: betas is \(0.5, 1.0\)"):
        optimizer.add_param_group({"params": others, "betas": (0.5, 1.0)})
    train(optimizer, model, 0, range(2))
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.core_state.momentum) == 1


@pytest.mark.parametrize("of", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(of):
    optimizer = face("OneBitAdam", model_of(0).parameters(), LocalCommunicator.alone())
    with pytest.raises(
        TypeError, match="OneBitAdam cannot be copied or pickled, because it has a communicator"
    ):
        of(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    """Moments have the dtype in which steps compute."""

    def main(comm):
        model = model_of(comm.rank).to(dtype)
        optimizer = face("OneBitAdam", model.parameters(), comm)
        for step in range(FREEZE + 2):
            draws = torch.Generator().manual_seed(1000 * step + comm.rank)
            model(torch.randn(8, 20, generator=draws).to(dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        computed = torch.float64 if dtype == torch.float64 else torch.float32
        assert {m.dtype for m in optimizer.core_state.momentum} == {computed}
        assert {p.dtype for p in model.parameters()} == {dtype}
        return [p.double().sum().item() for p in model.parameters()]

    first, second = run_local(2, main)
    assert first == second


def test_strides_stay():
    """Also strides that are not in C order; the steps equal those of contiguous copies."""
    shapes = [torch.randn(10, 6).t(), torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)]
    params = [torch.nn.Parameter(x.clone()) for x in shapes]
    twins = [torch.nn.Parameter(x.contiguous()) for x in shapes]
    for own in (params, twins):
        optimizer = face("CompressedSGD", own, LocalCommunicator.alone(), exact=False)
        for _ in range(3):
            sum(p.square().sum() for p in own).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [p.stride() for p in params] == [x.stride() for x in shapes]
    assert all(map(torch.equal, params, twins))


def test_each_parameter_shows_its_state():
    model = model_of(0)
    optimizer = face("OneBitAdam", model.parameters(), LocalCommunicator.alone(), watch=None)
    train(optimizer, model, 0, range(2))
    for p in model.parameters():
        assert {key: x.shape for key, x in optimizer.state[p].items()} == {
            "momentum": p.shape,
            "variance": p.shape,
        }


def test_a_group_may_be_added_before_the_first_step_only():
    model = model_of(0)
    first, *others = model.parameters()
    optimizer = face("OneBitAdam", [first], LocalCommunicator.alone())
    optimizer.add_param_group({"params": others, "lr": 0.5})
    assert len(optimizer.core_state.momentum) == len(others) + 1
    train(optimizer, model, 0, [0])
    with pytest.raises(RuntimeError, match="add_param_group was called after 1 steps"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda p, c: face("OneBitAdam", [], c), ValueError, "empty parameter list"),
        (
            lambda p, c: face("OneBitAdam", [p[0].detach()], c),
            ValueError,
            "no parameter that requires a gradient",
        ),
        (lambda p, c: face("OneBitAdam", p, c, lr=-1.0), ValueError, "-1.0; expected a finite number >= 0"),
        (
            lambda p, c: face("OneBitAdam", p, c, lr=float("nan")),
            ValueError,
            "nan; expected a finite number >= 0",
        ),
        (lambda p, c: face("OneBitAdam", p, c, betas=(0.9, 1.0)), ValueError, "betas is"),
        (
            lambda p, c: face("OneBitAdam", p, c, weight_decay=-1.0),
            ValueError,
            "weight_decay=-1.0; expected a finite",
        ),
        (
            lambda p, c: face("OneBitAdam", p, c, compressor="sign"),
            TypeError,
            "compressor='sign'; expected a qcomp",
        ),
        (
            lambda p, c: face("CompressedSGD", [{"params": p[:1]}, {"params": p[1:], "momentum": 0.5}], c),
            ValueError,
            r"param_groups\[1\] has momentum=0.5, param_groups\[0\] has 0.9; expected one momentum",
        ),
    ],
)
def test_errors_say_what_is_wrong(make, error, text):
    with pytest.raises(error, match=text):
        make(list(model_of(0).parameters()), LocalCommunicator.alone())


@pytest.mark.parametrize(
    "key", ["lr", *(pytest.param(k, marks=pytest.mark.slow) for k in ("weight_decay", "betas"))]
)
@pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
@pytest.mark.parametrize("steps", [2, FREEZE + 2])
def test_ranks_with_different_settings_are_an_error(key, topology, steps):
    """For instance if a scheduler follows each rank's own validation loss. Nothing has changed then."""

    def main(comm):
        model = model_of(comm.rank)
        averaging = qcomp.Averaging(topology=topology)
        optimizer = face("OneBitAdam", model.named_parameters(), comm, averaging=averaging)
        train(optimizer, model, comm.rank, range(steps))
        before, value = content(optimizer), optimizer.param_groups[0][key]
        other = (0.8, 0.999) if key == "betas" else value + 0.01
        optimizer.param_groups[0][key] = other if comm.rank == 1 else value
        backward(model, comm.rank, steps)
        text = rf"differ between ranks 0 and 2, and rank 1: rank {comm.rank} has .*{key}="
        with pytest.raises(qcomp.MismatchError, match=text):
            optimizer.step()
        assert content(optimizer) == before
        optimizer.param_groups[0][key] = value
        optimizer.step()
        return content(optimizer)[0][:5]

    first, *others = run_local(3, main)
    assert all(found == first for found in others)


def test_different_settings_of_0_1_adam_are_found_at_the_synchronisation():
    def main(comm):
        model = model_of(comm.rank)
        optimizer = face(
            "ZeroOneAdam", model.named_parameters(), comm, sync_steps=lambda step: step % 3 == 0, freeze=1
        )
        train(optimizer, model, comm.rank, range(3))
        assert optimizer.core_state.stage == "local"
        optimizer.param_groups[0]["lr"] += 0.01 * comm.rank
        with pytest.raises(qcomp.MismatchError, match="differ between rank 0, and rank 1"):
            train(optimizer, model, comm.rank, range(3))

    run_local(2, main)


def test_a_rate_that_differed_in_a_silent_step_is_found_at_the_synchronisation():
    """Nobody compares it in that step, but it stays in the sums that the synchronisation divides by."""

    def main(comm):
        model = model_of(comm.rank)
        optimizer = face(
            "ZeroOneAdam", model.named_parameters(), comm, sync_steps=lambda step: step % 3 == 0, freeze=1
        )
        train(optimizer, model, comm.rank, range(1))
        (group,) = optimizer.param_groups
        group["lr"] += 0.01 * comm.rank
        train(optimizer, model, comm.rank, range(1, 2))
        group["lr"] -= 0.01 * comm.rank
        assert optimizer.core_state.stage == "local"
        with pytest.raises(
            qcomp.MismatchError, match=r"differ between rank 0, and rank 1.*in the state .*'rates'"
        ):
            train(optimizer, model, comm.rank, range(2, 5))

    run_local(2, main)


def test_a_rate_of_one_group_that_differed_in_a_silent_step_is_found():
    """It is not the largest, so only the sums of the group's tensors tell."""

    def main(comm):
        tensors = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        groups = [{"params": [p], "lr": rate} for p, rate in zip(tensors, (0.1, 0.05), strict=True)]
        optimizer = face(
            "ZeroOneAdam", groups, comm, freeze=1, sync_steps=lambda step: step % 3 == 0, exact=None
        )
        for step in range(4):
            for p in tensors:
                p.grad = torch.full((4,), 1.0 + comm.rank)
            optimizer.param_groups[1]["lr"] = 0.05 - 0.01 * (step == 1) * comm.rank
            if step < 3:
                optimizer.step()
        with pytest.raises(
            qcomp.MismatchError, match=r"differ between rank 0, and rank 1.*of single tensors"
        ):
            optimizer.step()

    run_local(2, main)


@pytest.mark.parametrize(
    ("rates", "decay"),
    [((0.1, 0.01), 0.0), ((0.1, 0.0), 0.0), ((0.0, 0.1), 0.0), ((0.1, 0.05), 0.5), ((0.0, 0.0), 0.5)],
)
def test_settings_of_groups_that_change_between_synchronisations(rates, decay):
    """One rank that loses nothing has after the synchronisation in step 6 what its local steps have made."""
    tensors = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = face(
        "ZeroOneAdam",
        [{"params": [p], "lr": rate} for p, rate in zip(tensors, (0.1, 0.05), strict=True)],
        LocalCommunicator.alone(),
        freeze=2,
        sync_steps=lambda step: step % 4 == 0,
        exact=None,
        compressor=qcomp.Identity(),
    )
    for step in range(7):
        if step == 4:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.param_groups[1]["weight_decay"] = decay
        if step == 6:
            assert optimizer.core_state.stage == "compressed"
        before = [p.detach().clone() for p in tensors]
        for p in tensors:
            p.grad = torch.ones(4)
        optimizer.step()
        if step in (4, 5):
            for p, old, rate, of_group in zip(tensors, before, rates, (0.0, decay), strict=True):
                expected = old - rate * (1 + of_group * old)
                # The decay acts on the parameters of the last synchronisation, at most 0.6 away.
                torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-6 + 0.6 * rate * of_group)


@pytest.mark.parametrize(
    ("name", "group", "cure"),
    [
        ("CompressedSGD", {"nesterov": True}, "nesterov=True, .* pass it to the optimizer"),
        ("OneBitAdam", {"clip_norm": 1.0}, "clip_norm=1.0, .* pass it to the optimizer"),
        ("QAdam", {"maximize": True}, "maximize=True, .* leave it out"),
        ("Muon", {"decoupled_weight_decay": False}, "decoupled_weight_decay=False, .* Leave it out"),
        (
            "ZeroOneAdam",
            {"weight_deacy": 0.1},
            "weight_deacy=0.1, which ZeroOneAdam .* did you mean 'weight_decay'",
        ),
        ("OneBitLamb", {"use_muon": False}, "use_muon=False, .* Known are lr, .* Leave it out; or"),
        (
            "Muon",
            {"algorithm": "adamw"},
            "algorithm='adamw', which Muon does not read .* Known are lr, .*use_muon",
        ),
    ],
)
def test_a_setting_of_a_group_that_has_no_effect_is_an_error(name, group, cure):
    first, *others = model_of(0).parameters()
    with pytest.raises(ValueError, match=rf"param_groups\[1\] has {cure}"):
        face(name, [{"params": [first]}, {"params": others, **group}], LocalCommunicator.alone())
    optimizer = face(name, [first], LocalCommunicator.alone())
    with pytest.raises(ValueError, match=rf"param_groups\[1\] has {cure}"):
        optimizer.add_param_group({"params": others, **group})
    assert len(optimizer.param_groups) == 1


@every_face
def test_keys_of_torch_and_of_schedulers_pass(name):
    first, *others = model_of(0).named_parameters()
    made = face(name, others, LocalCommunicator.alone())
    settings = inspect.signature(type(made)).parameters
    for other in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = other([first], lr=0.1)
        lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=other is torch.optim.SGD)
        lr_scheduler.OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False)
        torch.optim.swa_utils.SWALR(optimizer, 0.1)
        (group,) = optimizer.param_groups
        assert group.keys() >= {"initial_lr", "max_lr", "min_lr", "swa_lr", "foreach", "param_names"}
        own = {*settings, "betas", "decoupled_weight_decay", "eps", "momentum"}
        more = {k: v for k, v in group.items() if k not in own}
        face(name, [{"params": others, **more, "name": "a", "lr_scale": 0.5}], LocalCommunicator.alone())
        made.param_groups[0].update(more)
        made.load_state_dict(made.state_dict())


@pytest.mark.parametrize(("key", "value"), [("compressor", qcomp.QSGD(7, 64)), ("exact", True)])
def test_changing_a_fixed_setting_is_an_error(key, value):
    model = model_of(0)
    optimizer = face("OneBitAdam", model.parameters(), LocalCommunicator.alone())
    optimizer.param_groups[0][key] = value
    backward(model, 0, 0)
    with pytest.raises(ValueError, match=rf"param_groups\[0\] has {key}=.* now; expected"):
        optimizer.step()


def test_a_rate_that_goes_out_of_range_is_an_error_that_changes_nothing():
    model = model_of(0)
    optimizer = face("OneBitAdam", model.parameters(), LocalCommunicator.alone())
    train(optimizer, model, 0, range(2))
    before = content(optimizer)
    optimizer.param_groups[0]["lr"] = float("inf")
    backward(model, 0, 2)
    with pytest.raises(ValueError, match="expected a finite number"):
        optimizer.step()
    assert content(optimizer) == before
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    assert optimizer.core_state.step == 3


def test_groups_choose_what_is_compressed_and_how():
    model = model_of(0)
    weights = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": weights[:1], "exact": True},
        {"params": weights[1:], "compressor": qcomp.QSGD(7, 64), "exact": False},
        {"params": others},
    ]
    optimizer = face("OneBitAdam", groups, LocalCommunicator.alone())
    assert optimizer.core_state.exact == (True, False, True, True, True)
    assert optimizer.core_state.compressors == (qcomp.QSGD(7, 64),)


# --- parameters without gradients ------------------------------------------------------------------------------------


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", [n for n in FACES if n != "ZeroOneAdam"])
@pytest.mark.parametrize(
    ("kernels", "steps"),
    [
        ("numba", FREEZE + 2),
        ("pure", 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("numba", 2), ("pure", FREEZE + 2))),
    ],
    indirect=["kernels"],
)
def test_parameters_that_no_rank_uses_do_not_change(kernels, name, steps):  # kernels overwrite inputs
    def main(comm):
        model = model_of(comm.rank)
        optimizer = face(name, model.named_parameters(), comm, weight_decay=0.1)
        train(optimizer, model, comm.rank, range(steps))
        own = parts_of(optimizer, 0)
        before = {key: x.clone() for key, x in own.items()}
        others = [p.detach().clone() for p in model.parameters()]
        backward(model, comm.rank, steps)
        model[0].weight.grad = None
        optimizer.step()
        after = parts_of(optimizer, 0)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)
        assert not torch.equal(model[3].weight, others[-1])
        return len(before)

    kept = run_local(2, main)
    assert kept[0] >= (1 if name == "CompressedSGD" else 3)


@pytest.mark.parametrize("steps", [2, FREEZE, FREEZE + 2])
def test_a_step_without_any_gradient_changes_nothing(steps):
    def main(comm):
        model = model_of(comm.rank)
        optimizer = face("OneBitAdam", model.named_parameters(), comm, weight_decay=0.1)
        train(optimizer, model, comm.rank, range(steps))
        before = content(optimizer)
        optimizer.step()
        assert content(optimizer) == before

    with pytest.warns(
        UserWarning, match="no parameter has a gradient on any rank, so this optimizer step has changed"
    ):
        run_local(2, main)


@pytest.mark.parametrize("topology", ["all_gather", "ring", "hierarchical"])
def test_residuals_of_unused_parameters_stay_in_every_topology(topology):
    def main(comm):
        model = model_of(comm.rank)
        averaging = qcomp.Averaging(topology=topology)
        optimizer = face("OneBitAdam", model.named_parameters(), comm, averaging=averaging)
        train(optimizer, model, comm.rank, range(FREEZE + 2))
        before = {key: x.clone() for key, x in parts_of(optimizer, 0).items()}
        others = [x.clone() for x in optimizer.core_state.exchange.worker]
        backward(model, comm.rank, FREEZE + 2)
        model[0].weight.grad = None
        optimizer.step()
        after = parts_of(optimizer, 0)
        assert all(torch.equal(after[key], before[key]) for key in before)
        changed = not all(map(torch.equal, optimizer.core_state.exchange.worker, others))
        return changed, sum("residual" in key for key in before)

    changed, kept = zip(*run_local(4, main, hosts=list("aabb")), strict=True)
    assert any(changed)  # the residuals of other parameters
    assert sum(kept) > 0


def parts_of(optimizer, number):
    """Return the parameter with this number, its moments, and the residuals of its elements."""
    saved = optimizer.state_dict()
    name = optimizer.param_groups[0]["param_names"][number]
    residuals = {
        k: x for k, x in of_this_rank(saved).items() if ("residual" in k or "owner" in k) and f".{name}" in k
    }
    shared, _ = saved["state"][number]["shared"]
    moments = {k: x for k, x in shared.items() if k in ("momentum", "variance")}
    return {"parameter": optimizer.param_groups[0]["params"][number].detach(), **moments, **residuals}


def of_this_rank(saved):
    """Return the part of a saved state that belongs to this rank alone."""
    ((own, *_),) = (value for key, value in saved["state"][0].items() if key.startswith("rank "))
    return own


def test_parameters_that_one_rank_uses_move_by_its_share():
    """The other rank contributes zeros to the mean over all ranks."""

    def main(comm):
        model, twin = model_of(comm.rank), model_of(comm.rank)
        optimizer, other = (face("OneBitAdam", net.named_parameters(), comm) for net in (model, twin))
        for step in range(2 * FREEZE):
            for net, opt, empty in ((model, optimizer, lambda _: None), (twin, other, torch.zeros_like)):
                backward(net, comm.rank, step)
                if comm.rank == 1:
                    net[0].weight.grad = empty(net[0].weight)
                opt.step()
                opt.zero_grad()
            assert content(optimizer) == content(other)

    run_local(2, main)


def test_zeros_instead_of_missing_gradients_would_be_detected(monkeypatch):
    """If zeros replaced a gradient that no rank has, weight decay and momentum would move the parameter."""

    def zeros(optimizer, params, grads, state, *, settings, donate):
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
        return optimizer.stages(params, filled, state, donate=donate)

    monkeypatch.setattr(qcomp.torch.optimizer, "stages_of_used", zeros)
    with pytest.raises(AssertionError):
        test_parameters_that_no_rank_uses_do_not_change("pure", "OneBitAdam", FREEZE + 2)


def test_unused_parameters_are_synchronised_after_local_steps():
    """The ranks of 0/1 Adam moved it apart, so it must not keep its local values."""

    def main(comm):
        model = model_of(comm.rank)
        fifth = lambda step: step == 5  # noqa: E731, counted from the freeze on
        optimizer = face("ZeroOneAdam", model.named_parameters(), comm, sync_steps=fifth)
        train(optimizer, model, comm.rank, range(FREEZE + 4))
        apart = model[0].weight.detach().clone()
        backward(model, comm.rank, FREEZE + 4)
        model[0].weight.grad = None
        optimizer.step()
        return apart, model[0].weight.detach()

    (one, first), (other, second) = run_local(2, main)
    assert torch.equal(first, second)
    assert not torch.equal(one, other)


def test_frozen_parameters_are_left_out_until_they_require_a_gradient():
    model = model_of(0)
    model[0].weight.requires_grad_(False)
    optimizer = face("OneBitAdam", model.parameters(), LocalCommunicator.alone())
    before = model[0].weight.clone()
    train(optimizer, model, 0, range(2))
    assert torch.equal(model[0].weight, before)
    assert len(optimizer.core_state.momentum) == len(list(model.parameters())) - 1
    model[0].weight.requires_grad_(True)
    backward(model, 0, 2)
    with pytest.raises(
        RuntimeError, match="requires a gradient now, but did not when the optimizer was made"
    ):
        optimizer.step()


def test_bits_that_mark_used_parameters_travel_with_the_first_exchange(lockstep):
    """There are as many exchanges as without the bits, and all ranks start the same one together."""
    opt = core("OneBitAdam", exact=None)
    params = [torch.ones(200), torch.ones(3)]
    states = [opt.initial_state(params, ("a", "b"), rank, 2) for rank in range(2)]
    grads = [[torch.ones(200), None], [None, None]]
    results = lockstep([stages_of_used(opt, params, g, s) for g, s in zip(grads, states, strict=True)])
    for moved, state in results:
        assert not torch.equal(moved[0], params[0])
        assert torch.equal(moved[1], params[1])
        assert not state.momentum[1].any()


# --- saving ----------------------------------------------------------------------------------------------------------


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.quick_cases(1)
@every_face
@pytest.mark.parametrize(
    ("kernels", "stop"),
    [
        ("numba", FREEZE + 3),
        ("pure", 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("numba", 2), ("pure", FREEZE + 3))),
    ],
    indirect=["kernels"],
)
def test_a_restart_goes_on_bit_for_bit(kernels, name, stop):  # kernels overwrite inputs
    def main(comm):
        model = model_of(comm.rank)
        optimizer = face(name, model.named_parameters(), comm)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 20)
        train(optimizer, model, comm.rank, range(stop), scheduler)
        files = through_a_file([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
        train(optimizer, model, comm.rank, range(stop, stop + 4), scheduler)

        again = model_of(comm.rank)
        other = face(name, again.named_parameters(), comm, lr=0.3)
        later = lr_scheduler.CosineAnnealingLR(other, 20)
        again.load_state_dict(files[0])
        other.load_state_dict(files[1])
        later.load_state_dict(files[2])
        kept = copy.deepcopy(files[1])
        train(other, again, comm.rank, range(stop, stop + 4), later)
        assert content(other) == content(optimizer)
        for number, entries in kept["state"].items():  # the steps have not overwritten the loaded values
            for key, (arrays, *_) in entries.items():
                then = files[1]["state"][number][key][0]
                assert all(torch.equal(x, then[k]) for k, x in arrays.items() if isinstance(x, torch.Tensor))

    run_local(2, main)


def test_a_restart_with_other_ranks_keeps_what_is_owed():
    def first(comm):
        model = model_of(comm.rank)
        optimizer = face("OneBitAdam", model.named_parameters(), comm)
        train(optimizer, model, comm.rank, range(FREEZE + 3))
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    saved = run_local(3, first)

    def second(comm):
        model = model_of(comm.rank)
        model.load_state_dict(saved[0][0])
        optimizer = face("OneBitAdam", model.named_parameters(), comm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.load_state_dict([of_rank for _, of_rank in saved])
        assert (optimizer.core_state.step, optimizer.core_state.size) == (FREEZE + 3, 2)
        train(optimizer, model, comm.rank, range(FREEZE + 3, FREEZE + 6))
        return [p.sum().item() for p in model.parameters()]

    results = run_local(2, second)
    assert results[0] == results[1]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_state_that_one_rank_cannot_load_is_an_error_on_all(bad):
    def main(comm):
        model = model_of(comm.rank)
        optimizer = face("OneBitAdam", model.named_parameters(), comm)
        train(optimizer, model, comm.rank, range(FREEZE + 2))
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.5
        if comm.rank == bad:
            del saved["state"][0]
        before = content(optimizer)
        with pytest.raises(ValueError, match=f"no rank passes the dict of old rank {bad}"):
            optimizer.load_state_dict(saved)
        assert content(optimizer) == before
        assert optimizer.param_groups[0]["lr"] == 0.01
        train(optimizer, model, comm.rank, [9])

    run_local(2, main)


def test_ranks_without_files_get_the_groups_of_those_with_them():
    def first(comm):
        model = model_of(comm.rank)
        optimizer = face("OneBitAdam", model.named_parameters(), comm, lr=0.25, betas=(0.5, 0.999))
        train(optimizer, model, comm.rank, [0])
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    (weights, state), *_ = run_local(1, first)

    def second(comm):
        model = model_of(comm.rank)
        model.load_state_dict(weights)
        optimizer = face("OneBitAdam", model.named_parameters(), comm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.load_state_dict([] if comm.rank else [state])
        train(optimizer, model, comm.rank, [1])
        return optimizer.param_groups[0]["lr"], tuple(optimizer.param_groups[0]["betas"])

    assert run_local(3, second) == [(0.25, (0.5, 0.999))] * 3


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda saved: saved["state"].clear(), "not those of an optimizer of qcomp"),
        (lambda saved: saved["state"][0].pop("rank 0 of 1"), "saved is empty on every rank"),
        (lambda saved: of_this_rank(saved).update(size=3), "no rank passes the dict of old ranks 1 and 2"),
        (lambda saved: of_this_rank(saved).update(rank=1, size=2), "no rank passes the dict of old rank 0"),
        (lambda saved: of_this_rank(saved).pop("stage"), "but not 'stage'"),
        (lambda saved: saved["state"][0]["shared"][0].pop("momentum"), "it lacks 'momentum."),
        (
            lambda saved: saved["param_groups"][0]["params"].pop(),
            r"\[4\] parameters; this optimizer has \[5\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(damage, text):
    comm = LocalCommunicator.alone()
    model = model_of(0)
    optimizer = face("OneBitAdam", model.named_parameters(), comm)
    train(optimizer, model, 0, range(FREEZE + 2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 77.0
    damage(saved)
    before = content(optimizer)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    assert content(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(optimizer, model, 0, [9])


# --- values that are not finite --------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_is_an_error_on_every_rank():
    def main(comm):
        model = model_of(comm.rank)
        optimizer = face("OneBitAdam", model.named_parameters(), comm)
        train(optimizer, model, comm.rank, range(FREEZE + 1))
        before = content(optimizer)
        backward(model, comm.rank, 9)
        if comm.rank == 1:
            model[0].weight.grad[0, 0] = float("nan")
        with pytest.raises(
            qcomp.NonFiniteError, match=r"the gradient of '0\.weight' on rank 1 is not finite"
        ):
            optimizer.step()
        assert content(optimizer) == before

    run_local(2, main)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_skips_on_all_ranks_alike(unscales):
    """A scale changes no step, except for the skipped one; torch finds infinities on only one rank.

    Meanwhile the settings of the groups change.
    """

    def main(comm):
        model, twin = model_of(comm.rank), model_of(comm.rank)
        optimizer, plain = (face("OneBitAdam", net.named_parameters(), comm) for net in (model, twin))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for step in range(2 * FREEZE):
            overflows = step in (1, FREEZE + 1)
            for opt in (optimizer, plain):
                opt.param_groups[0].update(weight_decay=0.01 * step, betas=(0.9 - 0.01 * step, 0.999))
            draws = torch.Generator().manual_seed(1000 * step + comm.rank)
            scaler.scale(model(torch.randn(8, 20, generator=draws)).square().sum()).backward()
            if overflows and comm.rank == 1:
                model[0].weight.grad[0, 0] = float("inf")
            if unscales:
                scaler.unscale_(optimizer)
            before = content(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if overflows:
                assert content(optimizer) == before
            else:
                train(plain, twin, comm.rank, [step])
                assert content(optimizer)[0] == content(plain)[0]
        assert optimizer.core_state.skipped == 2
        return scaler.get_scale()

    assert len(set(run_local(2, main))) == 2  # scales may differ: each rank divides by its own scale


@pytest.mark.parametrize("whiten_steps", [None, qcomp.DoublingIntervals(1)])
def test_a_step_under_autocast_equals_one_outside(whiten_steps):
    """Autocast would orthogonalise and whiten in bfloat16."""
    found = []
    for enabled in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 96).reshape(8, 12).clone())
        optimizer = qcomp.torch.Muon([weight], lr=0.1, whiten_steps=whiten_steps)
        for step in range(4):
            weight.grad = torch.sin(torch.arange(96.0) * (step + 1)).reshape(8, 12)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                optimizer.step()
        found.append(weight.detach().clone())
    assert torch.equal(*found)


class TestUseMuon:
    """The key of groups that scripts for MuonWithAuxAdam have."""

    def groups(self, model, **changes):
        weights = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim == 1]
        by_adam = {"lr": 0.003, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.01, "use_muon": False}
        return [
            {"params": weights[1:], **by_adam},
            {"params": weights[:1], "lr": 0.02, "weight_decay": 0.1, "use_muon": True},
            {"params": rest, **by_adam, "lr": 0.004} | changes,
        ]

    @pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
    def test_it_moves_each_group_as_such_scripts_do(self, monkeypatch):
        """Muon and AdamW of torch side by side, with a momentum that changes in the groups of Muon alone."""
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        model, twin = model_of(0), model_of(0)
        exact = {"compressor": qcomp.Identity(), "update_compressor": qcomp.Identity()}
        optimizer = qcomp.torch.Muon(self.groups(model), **exact, comm=LocalCommunicator.alone())
        assert optimizer.core_state.exact == (True, False, True, True, True)
        a, b, c = ({k: v for k, v in g.items() if k != "use_muon"} for g in self.groups(twin))
        muon, adam = torch.optim.Muon([b]), torch.optim.AdamW([a, c])
        for step, momentum in enumerate((0.85, 0.95)):
            for group in optimizer.param_groups:
                if group["use_muon"]:
                    group["momentum"] = momentum
            muon.param_groups[0]["momentum"] = momentum
            for net, optimizers in ((model, [optimizer]), (twin, [muon, adam])):
                backward(net, 0, step)
                for one in optimizers:
                    one.step()
                    one.zero_grad()
        for p, q, start in zip(model.parameters(), twin.parameters(), model_of(0).parameters(), strict=True):
            assert (p - q).norm() <= 1e-3 * (q - start).norm()

    def test_matrices_marked_false_are_moved_by_adamw(self):
        params = list(model_of(0).parameters())
        optimizer = face(
            "Muon",
            [{"params": params[:1]}, {"params": params[1:], "use_muon": False}],
            LocalCommunicator.alone(),
        )
        assert optimizer.core_state.exact == (False, True, True, True, True)
        optimizer.param_groups[1]["use_muon"] = True
        for p in params:
            p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=r"param_groups\[1\] has use_muon=True now; expected False"):
            optimizer.step()

    @pytest.mark.parametrize(
        ("changes", "error", "text"),
        [
            (
                {"use_muon": True, "betas": (0.9, 0.9)},
                ValueError,
                r"AdamW moves '2' of shape \(31,\), but its group has",
            ),
            ({"use_muon": 1}, TypeError, r"param_groups\[2\] has use_muon=1; expected True or False"),
            (
                {"use_muon": True, "others": True},
                ValueError,
                r"param_groups\[2\] has use_muon=True and others=True",
            ),
            ({"eps": -1.0}, ValueError, r"param_groups\[2\]: eps is -1.0"),
        ],
    )
    def test_contradictions_are_errors(self, changes, error, text):
        with pytest.raises(error, match=text):
            qcomp.torch.Muon(self.groups(model_of(0), **changes), comm=LocalCommunicator.alone())

    def test_the_factor_of_the_rate_may_be_given(self):
        optimizer = qcomp.torch.Muon(
            self.groups(model_of(0), use_muon=True),
            comm=LocalCommunicator.alone(),
            adam_learning_rate_factor=0.5,
        )
        opt = optimizer._settings.optimizer(optimizer.param_groups, 0)
        assert opt.rates(optimizer.core_state) == pytest.approx((0.0015, 0.02, 0.002, 0.002, 0.002))

    def test_parts_are_named_as_in_the_core(self):
        stack = torch.nn.Parameter(torch.zeros(3, 8, 6))
        for grouped in (False, True):
            params = [("experts", stack), ("qkv", torch.nn.Parameter(torch.zeros(12, 6)))]
            optimizer = qcomp.torch.Muon(
                [{"params": params}] if grouped else params,
                lr=1.0,
                stacks=("experts",),
                splits={"qkv": 3},
                comm=LocalCommunicator.alone(),
            )
            core = optimizer._settings.optimizer(optimizer.param_groups, 0)
            forms = core.mean_of(optimizer.core_state).rule.forms
            assert [(form.stacked, form.parts) for form in forms] == [(True, 1), (False, 3)]


class TestMuonWithoutNames:
    """Without names, nothing distinguishes embeddings from other matrices."""

    WARNING = "Muon orthogonalises all 2 matrices, since no parameter has a name"

    def made(self, params, **settings):
        model = torch.nn.Sequential(torch.nn.Embedding(8, 6), torch.nn.Linear(6, 6))
        return qcomp.torch.Muon(params(model), comm=LocalCommunicator.alone(), **settings)

    def test_a_warning(self):
        with pytest.warns(UserWarning, match=self.WARNING):
            self.made(lambda model: model.parameters())
        with pytest.warns(UserWarning, match=self.WARNING):
            self.made(lambda model: [{"params": layer.parameters()} for layer in model])

    def test_no_warning_if_the_caller_has_decided(self):
        assert self.made(lambda model: model.parameters(), others=False).core_state.exact.count(False) == 2
        assert self.made(lambda model: model.parameters(), others=lambda every: [True, False, True])
        assert self.made(
            lambda model: [
                {"params": model[0].parameters(), "others": True},
                {"params": model[1].parameters()},
            ]
        ).core_state.exact == (True, False, True)
        assert self.made(lambda model: model.named_parameters(), others=["0.*"])
        assert self.made(lambda model: [model[1].weight])  # there is no other matrix to confuse it with


@pytest.mark.parametrize(("same", "told"), [(True, 2), (False, 0)])
def test_ranks_with_the_same_gradients_warn(same, told):
    def rank_main(comm):
        model = model_of(0)
        optimizer = face("CompressedSGD", model.named_parameters(), comm)
        for step in range(2):
            backward(model, 0 if same else comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_local(2, rank_main)
    texts = [str(one.message) for one in found]
    assert sum("all 2 ranks have the same gradients in the first step" in text for text in texts) == told


def test_half_precision_gradients_lose_the_scale_of_a_scaler_in_float32():
    """In half precision they would underflow, which is what the scale is for."""
    p = torch.nn.Parameter(torch.ones(128, dtype=torch.float16))
    optimizer = qcomp.torch.OneBitAdam([p], lr=0.1, eps=1e-12, **SMALL)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(65536.0), torch.tensor(0.0)
    p.grad = torch.full((128,), 6e-4, dtype=torch.float16)  # 9e-9 without the scale; the least half is 6e-8
    optimizer.step()
    assert (p < 1).all()


def test_the_parameters_in_a_state_of_0_1_adam_are_copies():
    model = network()
    local = qcomp.LocalSteps(double_every=2, longest=8)
    optimizer = qcomp.torch.ZeroOneAdam(model.parameters(), lr=0.01, freeze=2, sync_steps=local, **SMALL)
    while optimizer.core_state.stage != "local":
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    saved = optimizer.state_dict()
    kept = {p.data_ptr() for p in model.parameters()}
    _, parameters, _ = saved["state"][0]["rank 0 of 1"]
    found = [x.data_ptr() for x in parameters.values()]
    assert len(found) == len(kept)
    assert kept.isdisjoint(found)
