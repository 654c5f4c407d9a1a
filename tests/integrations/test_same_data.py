"""Ranks under DistributedDataParallel warn if all have the same gradients: probably they train on the same data."""

import pytest

pytest.importorskip("torch")

RUN = """
import qcomp.torch
text = "ranks have the same gradients in the first backward pass"
def optimizers():
    yield "hook", lambda model: model.register_comm_hook(*ddp.hook(qcomp.ScaledSign(), model, exact=None))
    yield "momenta", lambda model: ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=1e-3, exact=None))
    yield "clipped", lambda model: ddp.OverlappedOptimizer(
        model, qcomp.CompressedSGD(learning_rate=1e-3, compressor=qcomp.ScaledSign(), exact=None, clip_norm=1.0)
    )
    yield "torch", lambda model: qcomp.torch.CompressedSGD(
        model.parameters(), lr=1e-3, compressor=qcomp.ScaledSign(), exact=None, model=model
    )
def told(begin, seed, bucket_bytes=4000, steps=2):
    model = wrapped(bucket_bytes)
    optimizer = begin(model)
    counts = []
    for step in range(steps):
        draws = torch.Generator().manual_seed(seed(step))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(torch.randn(3, 33, generator=draws)).square().sum().backward()
        counts.append(sum(text in str(one.message) for one in found))
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    return counts
"""


@pytest.mark.slow
def test_every_rank_warns_once_whatever_the_buckets(said):
    body = f"""{RUN}
for name, begin in optimizers():
    for bucket_bytes in (1, 4000, 10**6):
        assert told(begin, lambda step: step, bucket_bytes) == [1, 0], (name, bucket_bytes)
        assert told(begin, lambda step: step if step else me, bucket_bytes) == [0, 0], (name, bucket_bytes)
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


def test_one_rank_with_other_data_prevents_the_warning(said):
    body = f"""{RUN}
for name, begin in optimizers():
    assert told(begin, lambda step: int(me == 2)) == [0, 0], name
say("ok")
"""
    assert said(3, body) == [["ok"]] * 3


def test_a_warning_turned_into_an_error_leaves_the_state_unchanged(said):
    body = f"""{RUN}
model = wrapped()
state, averaged = ddp.hook(qcomp.ScaledSign(), model, exact=None)
model.register_comm_hook(state, averaged)
for attempt in range(2):
    try:
        model(torch.ones(3, 33)).square().sum().backward()
    except UserWarning as error:
        assert text in str(error)
    else:
        raise AssertionError("expected the warning")
    assert state.iterations == 0 and all(p.grad is None for p in model.parameters())
loss(model, 1).backward()
assert state.iterations == 1
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


@pytest.mark.slow
def test_means_that_arrive_early_are_not_compared(said):
    """Before the last bucket arrives, early ones already hold means, equal on all ranks; here of unused layers."""
    body = f"""{RUN}
for name, begin in optimizers():
    layers = torch.nn.Sequential(*(torch.nn.Linear(9, 9, bias=False) for _ in range(12)))
    layers.forward = lambda x: layers[11](x)
    torch.manual_seed(7)
    torch.nn.init.normal_(layers[11].weight)
    model = DistributedDataParallel(
        layers, bucket_cap_mb=1 / 2**20, gradient_as_bucket_view=True, find_unused_parameters=True
    )
    begin(model)
    model(torch.full((3, 9), 1.0 + me)).square().sum().backward()
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


def test_first_compressed_pass_names_rows_of_zeros_that_move(said):
    """Of a layer without a bias: its gradient is zero for inputs and outputs that no rank uses."""
    body = """
text = "elements whose gradients are 0 on all ranks still move, because sign"
def told(begin, steps=4, idle=lambda step: True):
    torch.manual_seed(7)
    layer = torch.nn.Linear(33, 65, bias=False)
    model = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    optimizer = begin(model)
    counts = []
    for step in range(steps):
        draws = torch.Generator().manual_seed(10 * step + me)
        inputs = torch.randn(3, 33, generator=draws)
        inputs[:, 4] *= not idle(step)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(inputs)[:, 1:].square().sum().backward()
        said = [str(one.message) for one in found if text in str(one.message)]
        assert all("'weight' (1 of 65 slices along the first axis, 1 of 33 slices along the last" in s for s in said)
        counts.append(len(said))
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    return counts
hook = lambda model: model.register_comm_hook(*ddp.hook(qcomp.ScaledSign(), model, exact=None))
keeps = lambda model: model.register_comm_hook(*ddp.hook(qcomp.QSGD(7), model, exact=None))
sgd = lambda model: ddp.OverlappedOptimizer(
    model, qcomp.CompressedSGD(learning_rate=1e-3, compressor=qcomp.ScaledSign(), exact=None)
)
adam = lambda model: ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=1e-3, exact=None, freeze=2))
assert told(hook) == [0, 0, 1, 0]
assert told(sgd) == [1, 0, 0, 0]
assert told(keeps) == told(adam) == [0] * 4
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2
