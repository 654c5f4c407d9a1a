"""With ``model=``, the optimizers for torch make the steps of an OverlappedOptimizer, and settings may change."""

import pytest

from tests.torch_face.every import FACES

pytest.importorskip("torch")

HEAD = """
import copy, io, os, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import qcomp
import qcomp.torch
from qcomp.integrations import ddp
from tests.torch_face.every import FACES

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "the variance is frozen after|the variance of .* no longer fits")
warnings.filterwarnings("ignore", "the gradient of .* was changed after the backward pass, as clip_grad_norm_ does")
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=me, world_size=n)
FREEZE = 3
SMALL = {"exact": qcomp.ExactBelow(100)}
COMMON = {"freeze": FREEZE, "compressor": qcomp.ScaledSign(bucket_size=64), **SMALL}
OF = {
    "CompressedSGD": {"compressor": qcomp.QSGD(15, 64), **SMALL},
    "Muon": {"others": ["3.*"], "compressor": qcomp.LloydMax(bits=2), "whiten_steps": qcomp.DoublingIntervals(1)},
    "OneBitAdam": COMMON,
    "OneBitLamb": COMMON,
    "QAdam": COMMON | {"compressor": qcomp.MinMaxUInt8(64), "variance_steps": None},
    "ZeroOneAdam": COMMON,
}
for name, (_, settings) in FACES.items():
    OF.setdefault(name, {key: value for key, value in settings.items() if key != "lr"} | SMALL)

def wrapped():
    torch.manual_seed(7)
    network = torch.nn.Sequential(
        torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 41, bias=False), torch.nn.Linear(41, 5)
    )
    return DistributedDataParallel(network, bucket_cap_mb=4000 / 2**20, gradient_as_bucket_view=True)

def backward(model, step):
    draws = torch.Generator().manual_seed(1000 * step + me)
    model(torch.randn(6, 33, generator=draws)).square().sum().backward()

def face(name, model, params=None, **changes):
    params = model.parameters() if params is None else params
    return getattr(qcomp.torch, name)(params, model=model, **{"lr": 0.01, **OF[name], **changes})

def same(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))

def refusal(do):
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
"""


@pytest.fixture
def said(torch_ranks):
    """Run a script on ranks with a process group."""

    def run(n, body):
        return [rank.out.splitlines() for rank in torch_ranks(n, HEAD + body)]

    return run


@pytest.mark.slow
def test_steps_equal_those_of_an_overlapped_optimizer(said):
    """With a schedule, accumulation, groups, a restart, and a restart without DistributedDataParallel's buckets."""
    said(
        2,
        """
for name, settings in OF.items():
    ours, theirs = wrapped(), wrapped()
    weights, vectors = ([p for p in ours.parameters() if (p.ndim == 1) == flat] for flat in (False, True))
    optimizer = face(name, ours, [{"params": vectors, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    flat = qcomp.Group([k for k, p in theirs.module.named_parameters() if p.ndim == 1], weight_decay=0.0)
    other = ddp.OverlappedOptimizer(theirs, getattr(qcomp, name)(
        learning_rate=lambda step: 0.01 * 0.9**step, weight_decay=0.1, groups=[flat], **settings))
    def train(model, made, steps, scheduler=None):
        for step in steps:
            with model.no_sync():
                backward(model, 100 + step)
            backward(model, step)
            made.step()
            made.zero_grad()
            if scheduler is not None:
                scheduler.step()
    train(ours, optimizer, range(5), scheduler)
    train(theirs, other, range(5))
    assert same(ours, theirs), name
    file = io.BytesIO()
    torch.save([ours.module.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    train(ours, optimizer, range(5, 8), scheduler)
    again = wrapped()
    weights, vectors = ([p for p in again.parameters() if (p.ndim == 1) == flat] for flat in (False, True))
    later = face(name, again, [{"params": vectors}, {"params": weights}], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(later, 0.9)
    again.module.load_state_dict(saved[0])
    later.load_state_dict(saved[1])
    schedule.load_state_dict(saved[2])
    train(again, later, range(5, 8), schedule)
    assert same(again, ours), name
    assert optimizer.core_state.stage != "warmup", name
    if name == "Muon":
        assert optimizer.core_state.exact == (False, True, False, True, True)
""",
    )


def test_settings_that_differ_between_ranks_are_an_error_and_change_nothing(said):
    said(
        2,
        """
for steps in (1, FREEZE + 1):
    model, twin = wrapped(), wrapped()
    optimizer, other = face("OneBitAdam", model), face("OneBitAdam", twin)
    for step in range(steps):
        for net, made in ((model, optimizer), (twin, other)):
            backward(net, step)
            made.step()
            made.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.01 + me
    backward(model, steps)
    text = refusal(optimizer.step)
    assert text.startswith(f"MismatchError: the settings of step {steps + 1} differ between rank 0, and rank 1"), text
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.01
    for net, made in ((model, optimizer), (twin, other)):
        backward(net, steps)
        made.step()
    assert same(model, twin)
""",
    )


def test_settings_that_change_after_the_backward_pass_are_refused(said):
    said(
        2,
        """
model = wrapped()
optimizer = face("OneBitAdam", model)
backward(model, 0)
optimizer.param_groups[0]["lr"] = 0.02
assert refusal(optimizer.step).startswith("RuntimeError: the settings of param_groups were lr=(0.01,)")
optimizer.param_groups[0]["lr"] = 0.01
optimizer.step()
assert optimizer.core_state.step == 1
""",
    )


ATTACH = """
OF["ZeroOneAdam"] = COMMON | {"sync_steps": lambda step: step % 3 == 0}

def alone(name, model, steps):
    optimizer = getattr(qcomp.torch, name)(model.module.named_parameters(), lr=0.01, **OF[name])
    for step in range(steps):
        with model.no_sync():
            backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
"""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "ZeroOneAdam" else pytest.mark.slow) for name in FACES],
)
def test_an_optimizer_may_attach_a_model_between_any_two_steps(said, name):
    """It continues like one made with the model that loads its state, also where ranks have different parameters."""
    said(
        2,
        f"name = {name!r}"
        + ATTACH
        + """
for steps in (0, 2, FREEZE + 2):
    model, twin = wrapped(), wrapped()
    optimizer, other = alone(name, model, steps), face(name, twin)
    assert other.core_state.step == 0
    stage = optimizer.core_state.stage
    assert (stage == "local") == (name == "ZeroOneAdam" and steps == FREEZE + 2), (name, steps, stage)
    twin.module.load_state_dict(model.module.state_dict())
    if steps:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.attach(model)
    assert same(model, twin), (name, steps)
    for step in range(steps, steps + 4):
        for net, made in ((model, optimizer), (twin, other)):
            backward(net, step)
            made.step()
            made.zero_grad()
    assert same(model, twin), (name, steps)
    assert optimizer.core_state.step == other.core_state.step == steps + 4
    text = refusal(lambda: optimizer.attach(model))
    assert text.startswith("RuntimeError: this optimizer has a model already: call attach only once"), text
""",
    )


def test_a_framework_may_wrap_model_and_optimizer_once_more(said):
    """As Fabric does: its optimizer inherits all methods of the one inside, and keeps attributes of its own."""
    said(
        2,
        """
class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})
    def __getattr__(self, name):
        return getattr(self.optimizer, name)

model, twin = wrapped(), wrapped()
outside = torch.nn.Sequential(model)
assert ddp.inside(outside) is ddp.inside(model) is model
*first, last = outside.parameters()
made = qcomp.torch.OneBitAdam(first, lr=0.01, **COMMON)
*ahead, end = twin.parameters()
optimizer, other = Wrapper(made), face("OneBitAdam", twin, [{"params": ahead}, {"params": [end]}])
optimizer.add_param_group({"params": [last]})
optimizer.attach(outside)
for step in range(FREEZE + 2):
    for net, each in ((outside, made), (twin, other)):
        backward(net, step)
        each.step()
        each.zero_grad()
assert same(model, twin) and made.core_state.stage == "compressed"
hooked = torch.nn.Sequential(wrapped())
ddp.inside(hooked).register_comm_hook(*ddp.hook(qcomp.QSGD(15, 64), hooked, **SMALL))
backward(hooked, 0)
""",
    )


@pytest.mark.slow
def test_a_model_that_cannot_be_attached_changes_nothing(said):
    said(
        2,
        ATTACH
        + """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock
groups = [dist.new_group([rank]) for rank in range(n)]
for steps in (2, FREEZE + 2):
    model, twin = wrapped(), wrapped()
    optimizer, other = alone("ZeroOneAdam", model, steps), alone("ZeroOneAdam", twin, steps)
    of_one = DistributedDataParallel(model.module, process_group=groups[me])
    hooked = DistributedDataParallel(model.module, init_sync=False)  # else rank 0 gives all its parameters
    hooked.register_comm_hook(None, stock.allreduce_hook)
    for wrong, expected in (
        (of_one, "ValueError: model averages over 1 ranks, of which this is rank 0; this optimizer has made"),
        (wrapped(), "ValueError: param_groups[0] has a parameter of shape (65, 33) that model does not average"),
        (model.module, "TypeError: model is a Sequential; expected a torch.nn.parallel.DistributedDataParallel"),
        (hooked, "RuntimeError: model has a communication hook already"),  # noticed late: everything is put back
    ):
        text = refusal(lambda: optimizer.attach(wrong))
        assert text.startswith(expected), text
        assert same(model, twin) and optimizer.core_state.step == steps
    for step in range(steps, steps + 2):
        for net, made in ((model, optimizer), (twin, other)):
            with net.no_sync():
                backward(net, step)
            made.step()
            made.zero_grad()
    assert same(model, twin)
    assert refusal(lambda: optimizer.attach(model)) == "nothing"
""",
    )


@pytest.mark.slow
def test_a_norm_may_be_computed_by_clipping_to_infinity(said):
    """This multiplies all gradients by 1: training loops do it to log the norm."""
    said(
        2,
        """
model, twin = wrapped(), wrapped()
optimizer, other = face("OneBitAdam", model), face("OneBitAdam", twin)
for step in range(FREEZE + 3):
    for net, made in ((model, optimizer), (twin, other)):
        backward(net, step)
        if net is model:
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        made.step()
        made.zero_grad()
assert same(model, twin) and optimizer.core_state.stage == "compressed"
backward(model, 9)
model.module[2].weight.grad[3, 4] += 1
assert refusal(optimizer.step).startswith("RuntimeError: the gradient of '2.weight' was changed")
""",
    )


REFUSALS = {
    "of another model": (
        "face('OneBitAdam', wrapped(), wrapped().parameters())",
        "ValueError: param_groups[0] has a parameter of shape (65, 33) that model does not average",
    ),
    "too few": (
        "model = wrapped(); face('OneBitAdam', model, list(model.parameters())[:2])",
        "ValueError: params lacks '2.weight', '3.weight', '3.bias', which model averages",
    ),
    "not wrapped": (
        "face('OneBitAdam', wrapped().module)",
        "TypeError: model is a Sequential; expected a torch.nn.parallel.DistributedDataParallel",
    ),
    "more groups": (
        "model = wrapped(); face('OneBitAdam', model).add_param_group({'params': [torch.nn.Parameter(torch.ones(3))]})",
        "RuntimeError: add_param_group was called on an optimizer that was made with model=",
    ),
    "no backward pass": (
        "face('OneBitAdam', wrapped()).step()",
        "RuntimeError: step was called, but since the last step no backward pass",
    ),
    "a scaler": (
        "model = wrapped(); optimizer = face('OneBitAdam', model); scaler = torch.amp.GradScaler('cpu'); "
        "scaler.scale(model(torch.full((2, 33), 1.0 + me)).sum()).backward(); scaler.step(optimizer)",
        "RuntimeError: a GradScaler scales the loss, but with model= momenta are averaged",
    ),
    "a hook": (
        "model = wrapped(); face('OneBitAdam', model); face('OneBitAdam', model)",
        "RuntimeError: model has a communication hook already, qcomp.integrations.ddp.optimizer._exchange, and "
        "DistributedDataParallel takes only one",
    ),
    "a hook of gradients": (
        "model = wrapped(); hook = qcomp.integrations.ddp.hook(qcomp.ScaledSign(), model, exact=None); "
        "model.register_comm_hook(*hook); face('OneBitAdam', model)",
        "RuntimeError: model has a communication hook already, qcomp.integrations.ddp.hook.compress_gradients, and",
    ),
    "a copy": (
        "import copy; model = wrapped(); face('OneBitAdam', model); copy.deepcopy(model.module); copy.deepcopy(model)",
        "TypeError: a DistributedDataParallel whose gradients an optimizer averages cannot be copied or pickled",
    ),
    "Muon, a rate of Muon for AdamW": (
        "model = wrapped(); *first, last = model.parameters(); "
        "face('Muon', model, [{'params': first, 'use_muon': True}, {'params': [last], 'use_muon': False}])",
        "ValueError: AdamW moves '0.bias' of shape (65,), but its group has the learning rate of Muon",
    ),
    "Muon, clipped": (
        "model = wrapped(); optimizer = face('Muon', model)\\n"
        "    backward(model, 0); torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1); optimizer.step()",
        "RuntimeError: the gradient of '0.weight', '0.bias', '2.weight' and 2 more was changed after the backward pass",
    ),
    "clipped": (
        "model = wrapped(); optimizer = face('OneBitAdam', model)\\n"
        "    for step in range(FREEZE + 1):\\n"
        "        backward(model, step); torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1); optimizer.step()\\n"
        "        optimizer.zero_grad()",
        "RuntimeError: the gradient of '0.weight', '0.bias', '2.weight' and 2 more was changed after the backward pass",
    ),
}


def test_bad_arguments_are_refused_on_every_rank(said):
    said(
        2,
        "".join(
            f"""
def case():
    {code}
text = refusal(case)
assert text.startswith({expected!r}), text
"""
            for code, expected in REFUSALS.values()
        ).replace("\\n", "\n"),
    )


@pytest.mark.slow
def test_hooks_of_states_run_once_and_not_for_attach(said):
    """A hook that raises on one rank is an error on both; one that returns another state is heard."""
    out = said(
        2,
        """
model, seen = wrapped(), []
optimizer = qcomp.torch.OneBitAdam(model.parameters(), lr=0.01, **COMMON)
def train(steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
model.require_backward_grad_sync = False
train(range(1))
model.require_backward_grad_sync = True
optimizer.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
optimizer.register_state_dict_post_hook(lambda o, s: seen.append("after saving"))
optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(len(s["state"])))
optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.core_state.step))
optimizer.attach(model)
train(range(1, 5))
print(seen)
saved = copy.deepcopy(optimizer.state_dict())
train(range(5, 7))
before = str(optimizer._saved())
def refuse(o, s):
    raise KeyError("mine")
if me == 1:
    handle = optimizer.register_load_state_dict_pre_hook(refuse)
print(refusal(lambda: optimizer.load_state_dict(saved)))
print(str(optimizer._saved()) == before)
if me == 1:
    handle.remove()
seen.clear()
optimizer.register_load_state_dict_pre_hook(
    lambda o, s: s | {"param_groups": [{**group, "lr": 0.5} for group in s["param_groups"]]}
)
optimizer.load_state_dict(saved)
print(seen, optimizer.param_groups[0]["lr"])
train(range(5, 7))
print(optimizer.core_state.step)
""",
    )
    for rank, lines in enumerate(out):
        error = "KeyError: 'mine'"
        told = f"MismatchError: rank 1 cannot run the hooks before it loads its state: {error}"
        assert lines == ["[]", error if rank else told, "True", "[5, 5] 0.5", "7"]
