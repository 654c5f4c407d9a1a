"""A gradient scaler around the hook: residuals are in units of its scale."""

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
