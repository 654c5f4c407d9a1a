"""A gradient scaler around the hook: no setting is needed, and residuals are in units of its scale."""

import pytest

pytest.importorskip("torch")

TRAINING = """
def hooked(model, **options):
    state, averaged = ddp.hook(
        qcomp.ScaledSign(bucket_size=64), model, exact=None, exact_iterations=1, nonfinite="propagate", **options)
    model.register_comm_hook(state, averaged)
    return state, torch.optim.SGD(model.parameters(), lr=0.01)
def scaled_steps(topology, *, rescale):
    model = wrapped()
    state, optimizer = hooked(model, topology=topology)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**6, growth_interval=2)
    scales, moved = [], []
    for step in range(8):
        optimizer.zero_grad()
        bad = float("inf") if step == 4 and me == 1 else 1.0
        scaler.scale(loss(model, step) * bad).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if rescale:
            state.rescale(scaler.get_scale() / before)
        scales.append(before)
        moved.append([p.detach().clone() for p in model.parameters()])
    assert len(set(scales)) > 2, scales
    assert state.skipped == 1
    return moved
def plain_steps(topology):
    model = wrapped()
    state, optimizer = hooked(model, topology=topology)
    moved = []
    for step in range(8):
        optimizer.zero_grad()
        if step != 4:
            loss(model, step).backward()
            optimizer.step()
        moved.append([p.detach().clone() for p in model.parameters()])
    return moved
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
def test_training_equals_training_without_a_scaler_bit_for_bit(said, topology):
    """Scales are powers of two, so nothing is rounded; a step with an infinity on one rank is skipped on all."""
    body = f"""
{TRAINING}
expected = plain_steps("{topology}")
found = scaled_steps("{topology}", rescale=True)
assert all(same(x, y) for x, y in zip(found, expected, strict=True))
owing = scaled_steps("{topology}", rescale=False)
assert not same(owing[-1], expected[-1])
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


def test_a_factor_that_is_not_finite_and_positive_is_refused(said):
    body = """
state, averaged = ddp.hook(qcomp.ScaledSign(), wrapped(), exact=None)
for factor in (0.0, -1.0, float("inf"), float("nan")):
    try:
        state.rescale(factor)
    except ValueError as error:
        assert f"factor is {factor!r}; expected a finite number above 0" in str(error)
        say("refused")
"""
    assert said(1, body) == [["refused"] * 4]


SCRIPT = """
inputs = torch.randn(64, 33, generator=torch.Generator().manual_seed(me)).to(device)
wanted = torch.tanh(inputs[:, :5])
def trained(compressor, make=torch.optim.Adam, **options):
    model, state = wrapped(), None
    if compressor is not None:
        state, averaged = ddp.hook(compressor, model, exact=None, exact_iterations=1)
        model.register_comm_hook(state, averaged)
    optimizer = make(model.parameters(), lr=0.003, **options)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1000)
    for step in range(60):
        optimizer.zero_grad()
        part = slice(8 * (step % 8), 8 * (step % 8) + 8)
        value = (model(inputs[part]) - wanted[part]).square().mean()
        overflows = step == 20
        scaler.scale(value * (float("inf") if overflows and me == 1 else 1.0)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        owed = state and owed_by(state)
        scaler.step(optimizer)
        stayed = same(before, [p.detach() for p in model.parameters()])
        assert stayed == overflows, step
        scale = scaler.get_scale()
        scaler.update()
        if overflows:
            assert scaler.get_scale() == scale / 2 == 2.0**9
            assert state is None or (state.skipped == 1 and state.iterations == step)
        assert state is None or same(owed_by(state), owed)
    final = (model(inputs) - wanted).square().mean().detach()
    dist.all_reduce(final)
    return float(final / n), [p.detach() for p in model.parameters()]
def owed_by(state):
    return [x.clone() for key, x in sorted(state.state_dict().items()) if "residual" in key]
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["unscaled before", "unscaled in the step"])
def test_a_script_with_a_scaler_needs_nothing_else(said, options):
    """An overflow on one rank skips the step on both, lowers both scales, and leaves what is owed as it was.

    Training reaches the loss of exact averaging.
    """
    body = f"""
{SCRIPT}
exact, _ = trained(None, **{options!r})
found, params = trained(qcomp.QSGD(levels=7, bucket_size=64), **{options!r})
assert abs(found / exact - 1) < 0.05, (found, exact)
mine = torch.cat([p.flatten() for p in params])
others = mine.clone()
dist.broadcast(others, 0)
assert torch.equal(mine, others)
trained(qcomp.ScaledSign(bucket_size=64), torch.optim.SGD, **{options!r})
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


def test_without_a_scaler_no_optimizer_steps_and_another_update_is_noticed(said):
    """An error on every rank, before parameters change; a step that a script itself leaves out is none."""
    body = """
def hooked():
    model = wrapped()
    state, averaged = ddp.hook(qcomp.ScaledSign(bucket_size=64), model, exact=None, exact_iterations=1)
    model.register_comm_hook(state, averaged)
    return model, state
def backward(model, step, spoiled):
    (loss(model, step) * (float("nan") if spoiled and me == 1 else 1.0)).backward()
def refusal(do):
    try:
        do()
    except qcomp.NonFiniteError as error:
        return str(error)
    return "nothing"

model, state = hooked()
bias = [p for p in model.parameters() if p.ndim == 1]
weights = [p for p in model.parameters() if p.ndim == 2]
optimizers = [torch.optim.SGD(bias, lr=0.01), torch.optim.AdamW(weights, lr=0.01)]
other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
for step in range(4):
    model.zero_grad()
    backward(model, step, spoiled=step == 2)
    other.step()
    before = [p.detach().clone() for p in model.parameters()]
    told = [refusal(optimizer.step) for optimizer in optimizers]
    if step == 2:
        assert all("on rank 1 is not finite, or too large to compress, in step 3" in text for text in told), told
        assert same(before, [p.detach() for p in model.parameters()])
        scaler = torch.amp.GradScaler(device, enabled=False)
        assert "in step 3" in refusal(lambda: scaler.step(optimizers[0]))
        model.zero_grad()
        assert refusal(optimizers[1].step) == "nothing"
    else:
        assert told == ["nothing"] * 2, told
backward(model, 4, spoiled=True)
with torch.no_grad():
    for p in model.parameters():
        p -= 0.01 * p.grad
model.zero_grad()
assert "is not finite" in refusal(lambda: backward(model, 5, spoiled=False))
assert "is not finite" in refusal(lambda: backward(model, 6, spoiled=False))
say(state.iterations, state.skipped)
"""
    assert said(2, body) == [["3 4"]] * 2


def test_propagate_lets_optimizers_step(said):
    body = """
model = wrapped()
state, averaged = ddp.hook(qcomp.ScaledSign(), model, exact=None, exact_iterations=0, nonfinite="propagate")
model.register_comm_hook(state, averaged)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
(loss(model, 0) * (float("nan") if me == 1 else 1.0)).backward()
optimizer.step()
say(all(p.isnan().any().item() for p in model.parameters()))
"""
    assert said(2, body) == [["True"]] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("call", ["optimizer.step(closure)", "optimizer.step(closure=closure)"])
def test_gradients_of_a_closure_are_refused_before_the_step_uses_them(said, call):
    """As Lightning calls optimizers."""
    body = f"""
model = wrapped()
model.register_comm_hook(*ddp.hook(qcomp.QSGD(7, 64), model, exact=None, exact_iterations=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(4):
    def closure():
        optimizer.zero_grad()
        value = loss(model, step) * (float("inf") if (step, me) == (2, 1) else 1.0)
        value.backward()
        return value
    before = [p.detach().clone() for p in model.parameters()]
    try:
        assert torch.is_tensor({call})
    except qcomp.NonFiniteError as error:
        say(step, "on rank 1" in str(error), same(before, [p.detach() for p in model.parameters()]))
"""
    assert said(2, body) == [["2 True True"]] * 2
