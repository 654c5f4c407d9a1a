"""What happens to gradients that are changed between the backward pass and the step, for instance clipped."""

import pytest

from tests.integrations.cases import OPTIMIZERS, SERVERS_DRAW

pytest.importorskip("torch")

SIDE_BY_SIDE = """
warnings.filterwarnings("ignore", "the gradient of .* was changed after the backward pass, as clip_grad_norm_ does")
def steps_of(model, optimizer, change, steps=3):
    moved = []
    for step in range(steps):
        loss(model, step).backward()
        change(model)
        optimizer.step()
        optimizer.zero_grad()
        moved.append([p.detach().clone() for p in model.parameters()])
    return moved
def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
def clamp(model):
    for p in model.parameters():
        p.grad.data.clamp_(-0.1, 0.1)
def replace_by_half(model):
    for p in model.parameters():
        p.grad = p.grad * 0.5
def nothing(model):
    pass
"""


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("change", ["clip", "clamp", "replace_by_half", "nothing"])
@pytest.mark.parametrize("view", [True, False])
def test_averaged_gradients_can_be_changed_as_under_stock_hooks(said, view, change):
    """In the exact warm-up, and with lossless compression."""
    body = f"""
{SIDE_BY_SIDE}
pairs = [
    (torch.optim.SGD, dict(lr=0.1), qcomp.CompressedSGD(
        learning_rate=0.1, momentum=0.0, compressor=qcomp.Identity(), exact=None)),
    (torch.optim.Adam, dict(lr=0.1), qcomp.OneBitAdam(learning_rate=0.1, freeze=99, exact=None)),
    (torch.optim.Adam, dict(lr=0.1), qcomp.ZeroOneAdam(learning_rate=0.1, exact=None)),
]
for make, options, own in pairs:
    stock, model = wrapped(gradient_as_bucket_view={view}), wrapped(gradient_as_bucket_view={view})
    expected = steps_of(stock, make(stock.parameters(), **options), {change})
    found = steps_of(model, ddp.OverlappedOptimizer(model, own), {change})
    for step, (xs, ys) in enumerate(zip(expected, found, strict=True)):
        for x, y in zip(xs, ys, strict=True):
            # Adam turns gradients of nearly zero into steps of any size up to the rate.
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


def test_half_precision_gradients_show_rounded_means_but_steps_use_unrounded_ones(said):
    body = f"""
{SIDE_BY_SIDE}
def small():
    return DistributedDataParallel(network().bfloat16())
def gradient_of(model, step):
    draws = torch.Generator().manual_seed(step + me)
    return [torch.randn(p.shape, generator=draws).bfloat16() for p in model.parameters()]
def backward(model, given):
    model.module.forward = lambda _: sum((p * g).sum() for p, g in zip(model.module.parameters(), given, strict=True))
    model(0).backward()
opt = qcomp.OneBitAdam(learning_rate=0.1, freeze=99, exact=None)
model = small()
optimizer = ddp.OverlappedOptimizer(model, opt)
params = [p.detach().clone() for p in model.parameters()]
state = dataclasses.replace(opt, averaging=qcomp.Averaging(tensorwise=True)).init(params, comm)
for step in range(3):
    given = gradient_of(model, step)
    params, state = opt.step(params, given, state, comm)
    backward(model, given)
    exact, _ = EXACT([g.float() for g in given], qcomp.MeanState(me, n, (), ()), comm)
    assert same([m.bfloat16() for m in exact], gradients(model))
    optimizer.step()
    optimizer.zero_grad()
    assert same(params, [p.detach() for p in model.parameters()])
    assert same(state.momentum, optimizer.state.momentum)
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


CHANGES = {
    "clipped": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)",
    "scaled": "next(model.parameters()).grad.mul_(0.5)",
    "scaled by foreach": "torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)",
    "replaced": "p = next(model.parameters()); p.grad = p.grad.clone()",
    "clamped": "[p.grad.data.clamp_(-0.01, 0.01) for p in model.parameters()]",
    "added to": "loss_of_one(model)",
}


@pytest.mark.slow
@pytest.mark.parametrize("view", [True, False])
def test_gradients_of_averaged_momenta_must_not_be_changed(said, view):
    body = f"""
def loss_of_one(model):
    with model.no_sync():
        loss(model, 9).backward()
changes = {CHANGES!r}
for name, change in changes.items():
    model = wrapped(gradient_as_bucket_view={view})
    optimizer = ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=0.1, freeze=2, exact=None))
    for step in range(4):
        before, state = [p.detach().clone() for p in model.parameters()], optimizer.state
        loss(model, step).backward()
        sum(p.grad.norm() for p in model.parameters())
        if step == 3:
            exec(change)
        try:
            optimizer.step()
        except RuntimeError as error:
            assert step == 3 and optimizer.state is state
            assert same(before, [p.detach() for p in model.parameters()])
            say(name, "|", error)
        optimizer.zero_grad()
"""
    for lines in said(2, body):
        assert [line.split(" |")[0] for line in lines] == list(CHANGES)
        for line in lines:
            assert "the gradient of '0.weight'" in line
            assert "was changed after the backward pass" in line
            assert "clip_norm" in line


def test_clipping_is_warned_of_in_the_warm_up_and_refused_on_all_ranks(said):
    """Also if the norm is above the limit on one rank only. Without a warm-up nothing is wrong."""
    body = """
for name in ("OneBitAdam", "QAdam", "ZeroOneAdam", "CompressedSGD"):
    settings = {} if name == "CompressedSGD" else {"freeze": 3}
    settings |= {"variance_steps": None} if name == "QAdam" else {}
    settings |= {"variance_steps": lambda step: step <= 3} if name == "ZeroOneAdam" else {}
    optimizer_of = getattr(qcomp, name)
    model = wrapped()
    optimizer = ddp.OverlappedOptimizer(model, optimizer_of(learning_rate=0.01, exact=None, **settings))
    warned = []
    for step in range(6):
        loss(model, step).backward()
        clips = step in (1, 2) or (step == 5 and me == 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01 if clips else 1e9)
        before, state = [p.detach().clone() for p in model.parameters()], optimizer.state
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                optimizer.step()
            except RuntimeError as error:
                say(step, error)
                assert same(before, [p.detach() for p in model.parameters()]) and optimizer.state is state
        warned += [step for each in told if "max_grad_norm of the Trainer" in str(each.message)]
        optimizer.zero_grad()
    assert warned == ([] if name == "CompressedSGD" else [1]), (name, warned)
"""
    zero, one = said(2, body)
    assert len(zero) == len(one) == 3
    for of_zero, of_one in zip(zero, one, strict=True):
        assert of_one.startswith("5 the gradient of '0.weight'")
        assert "pass clip_norm= to the optimizer" in of_one
        assert of_zero == "5 on rank 1, " + of_one.removeprefix("5 ")


def test_ranks_compare_changes_only_if_some_rank_writes_to_gradients(said):
    body = """
runs = []
run = type(comm).run
type(comm).run = lambda self, request: runs.append(request) or run(self, request)
for writer in (None, 1):
    model = wrapped()
    opt = qcomp.OneBitAdam(learning_rate=0.01, freeze=2, exact=None)
    optimizer = ddp.OverlappedOptimizer(model, opt)
    counts = []
    for step in range(6):
        loss(model, step).backward()
        if me == writer:
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        runs.clear()
        optimizer.step()
        counts.append(len(runs))
        optimizer.zero_grad()
    say(counts)
"""
    # One after the freeze compares moments.
    assert said(2, body) == [["[0, 1, 1, 0, 0, 0]", "[0, 1, 1, 1, 1, 1]"]] * 2


def test_gradients_that_are_missing_before_the_step_are_noticed(said):
    body = """
for freeze in (1, 9):
    model = wrapped()
    optimizer = ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=0.1, freeze=freeze, exact=None))
    for step in range(2):
        loss(model, step).backward()
        if step == 1:
            optimizer.zero_grad()
        try:
            optimizer.step()
        except RuntimeError as error:
            say(step, error)
        optimizer.zero_grad()
"""
    for lines in said(2, body):
        assert len(lines) == 2
        assert all(
            "1 the gradient of '0.weight', '0.bias', '2.weight' and 2 more is None" in x for x in lines
        )


def test_a_mean_that_is_changed_to_nan_is_refused(said):
    body = """
model = wrapped()
optimizer = ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=0.1, freeze=9, exact=None))
loss(model, 0).backward()
list(model.parameters())[2].grad.fill_(float("nan"))
try:
    optimizer.step()
except qcomp.NonFiniteError as error:
    say(error)
"""
    expected = "the gradient of '2.weight' was changed after the backward pass to infinity or NaN"
    assert said(2, body) == [[expected]] * 2


@pytest.mark.parametrize(
    ("names", "limit"),
    [
        (["onebit_adam"], 0.05),
        *(pytest.param(list(OPTIMIZERS), limit, marks=pytest.mark.slow) for limit in (0.05, 1e9)),
    ],
    ids=["one", "all", "all, not clipped"],
)
def test_clip_norm_is_that_of_the_optimizer_bit_for_bit(said, names, limit):
    made = ", ".join(f"{name!r}: lambda: {OPTIMIZERS[name]}" for name in names)
    body = f"""
policy = qcomp.ExactBelow(100)
for name, make in {{{made}}}.items():
    opt = dataclasses.replace(make(), clip_norm={limit})
    alone, model = network(), wrapped()
    optimizer = ddp.OverlappedOptimizer(model, opt)
    plain = tensorwise(opt, name in {SERVERS_DRAW!r})
    params = [p.detach() for p in alone.parameters()]
    state = plain.init(params, comm, [name for name, _ in alone.named_parameters()])
    for step in range(4):
        own = torch.autograd.grad(loss(alone, step), list(alone.parameters()))
        moved, state = plain.step(params, list(own), state, comm)
        for p, new in zip(params, moved, strict=True):
            p.copy_(new)
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert same(params, [p.detach() for p in model.parameters()]), (name, step)
        assert same(state.momentum, optimizer.state.momentum), (name, step)
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


def test_with_clip_norm_a_value_that_is_not_finite_raises_on_all_ranks(said):
    body = """
model = wrapped()
opt = qcomp.OneBitAdam(learning_rate=0.1, freeze=1, exact=None, clip_norm=1.0)
optimizer = ddp.OverlappedOptimizer(model, opt)
for step in range(3):
    total = loss(model, step)
    (total * float("nan") if step == 1 and me == 1 else total).backward()
    try:
        optimizer.step()
    except qcomp.NonFiniteError as error:
        say(step, error)
    optimizer.zero_grad()
say(optimizer.state.step)
"""
    for lines in said(2, body):
        assert len(lines) == 2
        assert "on rank 1" in lines[0]
        assert "'0.weight'" in lines[0]
        assert lines[1] == "2"
