"""The steps under DistributedDataParallel are those of the optimizer alone, bit for bit."""

import pytest

pytest.importorskip("torch")

OPTIMIZERS = {
    "onebit_adam": "qcomp.OneBitAdam(learning_rate=0.01, freeze=3, exact=policy)",
    "onebit_adam, coupled decay, groups": (
        "qcomp.OneBitAdam(learning_rate=lambda step: 0.01 / (step + 1), freeze=2, weight_decay=0.1, exact=policy,"
        " decoupled_weight_decay=False, groups=[qcomp.Group('0.*', learning_rate_factor=0.5)])"
    ),
    "onebit_adam, freezes itself": (
        "qcomp.OneBitAdam(learning_rate=0.01, freeze=qcomp.VarianceStable(threshold=0.2), betas=(0.9, 0.7),"
        " exact=policy)"
    ),
    "qadam": "qcomp.QAdam(learning_rate=0.01, freeze=3, exact=policy)",
    "draws": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128), exact=policy)"
    ),
    "rescaled": (
        "qcomp.CompressedSGD(learning_rate=lambda step: 0.01 / (step + 1), compressor=qcomp.TopK(),"
        " rescale_feedback=True, exact=None)"
    ),
    "by name": (
        "qcomp.CompressedSGD(learning_rate=0.01, exact=policy, compressors=qcomp.ByName("
        "{'0.*': qcomp.ScaledSign(), '*': qcomp.QSGD(levels=7, bucket_size=64)}))"
    ),
    "all_gather": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128), feedback=False,"
        " topology='all_gather', exact=policy)"
    ),
    "coded": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128, coding='elias'),"
        " exact=policy)"
    ),
    "hierarchical": "qcomp.QAdam(learning_rate=0.01, freeze=2, exact=policy, topology='hierarchical')",
    "zero_one_adam": (
        "qcomp.ZeroOneAdam(learning_rate=0.01, variance_steps=qcomp.DoublingIntervals(1), exact=policy)"
    ),
    "onebit_lamb": "qcomp.OneBitLamb(learning_rate=0.01, freeze=3, exact=policy)",
}


SERVERS_DRAW = ("draws", "by name", "coded")
"""Which rank is the server of a bucket, and so whose draws it gets, depends on how tensors are cut for the ranks."""


@pytest.mark.parametrize("name", OPTIMIZERS)
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
    """A script that steps an optimizer alone and under DistributedDataParallel, and says in which stage it ends."""
    return f"""
policy = qcomp.ExactBelow(100)
make = lambda: {OPTIMIZERS[name]}
alone, model = network(), wrapped()
optimizer = ddp.OverlappedOptimizer(model, make())
plain = dataclasses.replace(make(), tensorwise={name in SERVERS_DRAW})
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
say(state.stage)
"""
