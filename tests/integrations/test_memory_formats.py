"""Averaging under DistributedDataParallel does not depend on the memory format of the parameters."""

import pytest

from tests.integrations.cases import OPTIMIZERS

pytest.importorskip("torch")

MODEL = """
class Mixed(torch.nn.Module):
    # Parameters of every layout: channels last, transposed, with gaps, of no axes, and empty.
    def __init__(self, formats):
        super().__init__()
        torch.manual_seed(3)
        flat = torch.nn.Conv2d(3, 6, 3)
        self.deep = torch.nn.Conv3d(2, 4, (1, 2, 2))
        self.turned = torch.nn.Parameter(torch.randn(40, 17))
        self.gaps = torch.nn.Parameter(torch.randn(13, 9))
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.empty = torch.nn.Parameter(torch.ones(0, 4))
        if formats:
            flat.to(memory_format=torch.channels_last)
            self.deep.to(memory_format=torch.channels_last_3d)
            self.turned = torch.nn.Parameter(self.turned.detach().t().contiguous().t())
            wide = torch.zeros(13, 18)
            wide[:, ::2] = self.gaps.detach()
            self.gaps = torch.nn.Parameter(wide[:, ::2])
        self.add_module("0", flat)
    def forward(self, step):
        draws = torch.Generator().manual_seed(100 * step + me)
        make = lambda *shape: torch.randn(shape, generator=draws)
        parts = [
            self._modules["0"](make(2, 3, 6, 6)), self.deep(make(1, 2, 2, 4, 4)), make(2, 40) @ self.turned,
            make(2, 13) @ self.gaps, self.scale * make(4), self.empty.sum(),
        ]
        return sum(part.square().sum() for part in parts)
def contiguous(xs):
    return all(x.is_contiguous() for x in xs)
def kept(state):
    return [*state.momentum, *state.variance, *(x for xs in state.arrays.values() for x in xs),
            *state.exchange.worker, *state.exchange.server]
def averaging(formats, view):
    return DistributedDataParallel(Mixed(formats), bucket_cap_mb=2000 / 2**20, gradient_as_bucket_view=view)
def gradients_of(model, step):
    found = torch.autograd.grad(model.module(step), list(model.module.parameters()))
    return [g.contiguous() for g in found]
def compare(model, optimizer, plain, steps):
    # Steps under DistributedDataParallel beside those of the plain optimizer on contiguous copies.
    names = [name for name, _ in model.module.named_parameters()]
    params = [p.detach().clone(memory_format=torch.contiguous_format) for p in model.module.parameters()]
    state = plain.init(params, comm, names)
    for step in range(steps):
        own = gradients_of(model, step)
        params, state = plain.step(params, own, state, comm)
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert same(params, [p.detach() for p in model.module.parameters()]), step
        assert same(kept(state), kept(optimizer.state)), step
        assert contiguous(kept(optimizer.state)), step
    return state.stage
"""


@pytest.mark.slow
@pytest.mark.parametrize("view", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_equal_those_on_contiguous_copies_bit_for_bit(said, view):
    made = ", ".join(f"{name!r}: lambda: {text}" for name, text in OPTIMIZERS.items())
    body = f"""
{MODEL}
policy = qcomp.ExactBelow(20)
for name, make in {{{made}}}.items():
    for formats in (True, False):
        model = averaging(formats, {view})
        alone = tensorwise(make(), True)
        say(name, compare(model, ddp.OverlappedOptimizer(model, make()), alone, steps=4))
"""
    first, second = said(2, body)
    assert first == second
    assert len(first) == 2 * len(OPTIMIZERS)
    assert not [line for line in first if line.endswith("warmup")]


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "compressor",
    ["qcomp.ScaledSign(bucket_size=64)", "qcomp.OneBitSGD()", "qcomp.QSGD(levels=7, bucket_size=64)"],
)
def test_means_of_a_hook_are_those_of_contiguous_gradients(said, compressor):
    body = f"""
{MODEL}
from qcomp.core.mean.tensorwise import TensorwiseMean
mean = TensorwiseMean({compressor}, feedback=True) if "QSGD" not in {compressor!r} else TensorwiseMean(
    {compressor}, feedback=False)
for view in (True, False):
    for formats in (True, False):
        model = averaging(formats, view)
        state, averaged = ddp.hook({compressor}, model, topology="two_phase", exact=None, exact_iterations=0, seed=3)
        model.register_comm_hook(state, averaged)
        of_mean = mean.init([p.detach().contiguous() for p in model.module.parameters()], comm)
        for step in range(3):
            own = gradients_of(model, step)
            model(step).backward()
            key = qcomp.Key(seed=3, step=step, tensor=state._step.state.stream)
            expected, of_mean = mean(own, of_mean, comm, key=key)
            assert same(expected, gradients(model)), (view, formats, step)
            kept_here = state._step.state.exchange
            assert same(of_mean.worker, kept_here.worker) and same(of_mean.server, kept_here.server)
            model.zero_grad()
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("hook", [True, False])
def test_a_checkpoint_moves_between_memory_formats(said, hook):
    """A contiguous model resumes, bit for bit, from a checkpoint of a model in other memory formats."""
    body = f"""
{MODEL}
hook = {hook}
opt = qcomp.OneBitAdam(learning_rate=0.01, freeze=2, exact=None)
def make(formats):
    model = averaging(formats, True)
    if not hook:
        return model, ddp.OverlappedOptimizer(model, opt)
    state, averaged = ddp.hook(qcomp.ScaledSign(bucket_size=64), model, exact=None, exact_iterations=1)
    model.register_comm_hook(state, averaged)
    return model, state
def step_on(model, kept, gradients):
    # DistributedDataParallel averages in a backward pass after a forward pass.
    model.module.forward = lambda _: sum(
        (p * g).sum() for p, g in zip(model.module.parameters(), gradients, strict=True))
    model(0).backward()
    if not hook:
        kept.step()
    found = [p.grad.clone() for p in model.parameters()] if hook else [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    return found
def gradients_at(step):
    draws = torch.Generator().manual_seed(100 * step + me)
    return [torch.randn(p.shape, generator=draws) for p in Mixed(False).parameters()]
mixed, kept = make(True)
for step in range(4):
    step_on(mixed, kept, gradients_at(step))
plain, again = make(False)
plain.module.load_state_dict(mixed.module.state_dict())
again.load_state_dict(copy.deepcopy(kept.state_dict()))
for step in range(4, 7):
    assert same(step_on(mixed, kept, gradients_at(step)), step_on(plain, again, gradients_at(step))), step
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2
