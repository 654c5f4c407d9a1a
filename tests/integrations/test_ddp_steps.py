"""Steps under DistributedDataParallel are those of the optimizer alone, bit for bit."""

import pytest

from tests.integrations.cases import OPTIMIZERS, SERVERS_DRAW

pytest.importorskip("torch")


STEPPED = OPTIMIZERS | {
    "muon, parts": "qcomp.Muon(learning_rate=0.01, splits={'0.*': 5}, block_rows=8)",
}
REPEATED = {"onebit_adam", "qadam", "draws", "all_gather"}
"""The quick run tests these with harder settings, or `test_ddp_hook` tests what they average."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in STEPPED]
)
def test_a_step_is_that_of_the_optimizer_on_all_gradients(said, name):
    stages = said(3, compared(name))
    assert stages[0] != ["warmup"]
    assert stages[1:] == stages[:-1]


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (1, "nccl")])
@pytest.mark.parametrize("name", ["onebit_adam", "qadam", "draws"])
def test_on_a_gpu_as_well(said, name, ranks, backend):
    stages = said(ranks, compared(name), device="cuda", backend=backend)
    assert stages == [["compressed"]] * ranks


def compared(name):
    """Return a script that steps an optimizer alone and under DistributedDataParallel, and prints its last stage."""
    return f"""
policy = qcomp.ExactBelow(100)
make = lambda: {STEPPED[name]}
alone, model = network(), wrapped(bucket_bytes=800)  # one matrix in each bucket
optimizer = ddp.OverlappedOptimizer(model, make())
plain = tensorwise(make(), {name in SERVERS_DRAW})
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
    for kind, arrays in state.arrays.items():
        assert same(optimizer.state.arrays[kind], arrays), kind
    if not hasattr(plain, "averaging") or plain.averaging.tensorwise:
        assert same(optimizer.state.exchange.server, state.exchange.server)
        assert same(optimizer.state.exchange.worker, state.exchange.worker)
say(state.stage)
"""


def test_an_optimizer_of_pairs_of_gradients_is_refused(said):
    """It would train without its correction, like plain compressed SGD."""
    body = """
try:
    ddp.OverlappedOptimizer(wrapped(), qcomp.QSVRG(learning_rate=0.1))
except ValueError as error:
    assert str(error).startswith("optimizer is a QSVRG; expected one that steps with one gradient")
    say("refused")
"""
    assert said(1, body) == [["refused"]]


def test_steps_do_not_change_saved_or_loaded_states(said):
    """Steps overwrite only the optimizer's own state."""
    pytest.importorskip("numba")
    said(
        1,
        """
model = wrapped()
with qcomp.backends.use("numba"):
    optimizer = ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=1e-3, freeze=9, exact=None))
    for step in range(6):
        if step == 2:
            saved = optimizer.state_dict()
            moments = [name for name in saved if name.startswith(("momentum", "variance"))]
            before = {name: saved[name].clone() for name in moments}
        if step == 4:
            assert all(torch.equal(saved[name], before[name]) for name in moments)
            optimizer.load_state_dict(saved)
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
assert moments and all(torch.equal(saved[name], before[name]) for name in moments)
say(True)
""",
    )


def test_a_loaded_state_discards_what_was_averaged_before(said):
    """Else a step would apply the averages of the state before, which may be of another stage."""
    said(
        2,
        """
policy = qcomp.ExactBelow(100)
opt = qcomp.OneBitAdam(learning_rate=0.1, betas=(0.9, 0.9), freeze=3, exact=policy)
model = wrapped()
optimizer = ddp.OverlappedOptimizer(model, opt)
saved = optimizer.state_dict()
loss(model, 0).backward()
optimizer.load_state_dict(saved)
try:
    optimizer.step()
except RuntimeError as error:
    assert "step was called, but since the last step no backward pass" in str(error), error
else:
    raise AssertionError("a step applied averages of before")
optimizer.zero_grad()
loss(model, 1).backward()
optimizer.step()
assert optimizer.state.step == 1
""",
    )
