"""The hook for gradients: what it averages, what it keeps, and how it handles errors."""

import pytest

pytest.importorskip("torch")

PLAIN = """
from qcomp.core.optimizers.agreement import stream_of
policy = qcomp.ExactBelow(100)
options = {"exact": policy, "seed": 5}
def compressed(mean, model, state, step):
    # What the hook must return: the exact mean twice, then one compressed mean of the whole model.
    chosen = [i for i, p in enumerate(model.parameters()) if p.dim() > 1]
    own = [g.detach() for g in torch.autograd.grad(loss(model, step), list(model.parameters()))]
    means, _ = EXACT(own, qcomp.MeanState(me, n, (), ()), comm)
    if step >= 2:
        names, shapes = zip(*((name, tuple(p.shape)) for name, p in model.named_parameters()), strict=True)
        key = qcomp.Key(seed=5, step=step, tensor=stream_of(names, shapes), rank=me)
        some, state = mean([own[i] for i in chosen], state, comm, key=key)
        for i, m in zip(chosen, some, strict=True):
            means[i] = m
    return means, state
def begin(mean, model):
    return mean.init([p.detach() for p in model.parameters() if p.dim() > 1], comm)
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("compressor", "mean", "topology", "feedback"),
    [
        ("qcomp.ScaledSign()", "CompressedMean", "auto", None),
        ("qcomp.ScaledSign()", "CompressedMean", "two_phase", None),
        ("qcomp.MinMaxUInt8()", "CompressedMean", "two_phase", False),
        ("qcomp.QSGD(levels=7, bucket_size=128)", "TensorwiseMean", "two_phase", None),
        ("qcomp.QSGD(levels=7, bucket_size=128)", "CompressedMean", "all_gather", None),
    ],
)
def test_means_do_not_depend_on_the_buckets(said, compressor, mean, topology, feedback):
    chosen = "QSGD" not in compressor if feedback is None else feedback
    body = f"""
from qcomp.core.mean.tensorwise import TensorwiseMean
from qcomp import CompressedMean
{PLAIN}
alone = network()
mean = {mean}({compressor}, topology={topology!r}, feedback={chosen})
kept = begin(mean, alone)
models = [wrapped(1), wrapped(4000), wrapped(10**6, gradient_as_bucket_view=False)]
states = []
for model in models:
    state, averaged = ddp.hook({compressor}, model, topology={topology!r}, feedback={feedback}, **options)
    model.register_comm_hook(state, averaged)
    states.append(state)
for step in range(5):
    expected, kept = compressed(mean, alone, kept, step)
    for model, state in zip(models, states, strict=True):
        loss(model, step).backward()
        assert same(gradients(model), expected), (step, models.index(model))
        assert (state.iterations, state.skipped) == (step + 1, 0)
        model.zero_grad()
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("broken", ["draws by bucket", "chunks by bucket", "residuals by position"])
def test_a_hook_that_depends_on_the_buckets_is_noticed(said, broken):
    body = f"""
from qcomp.core.mean.tensorwise import TensorwiseMean
from qcomp.integrations.ddp import buckets, hook as hook_module
broken = {broken!r}
compressor = qcomp.ScaledSign(bucket_size=64)
if broken == "draws by bucket":
    compressor = qcomp.QSGD(levels=7, bucket_size=128)
    def ignoring(self, *args, plain=TensorwiseMean.begin, **how):
        return plain(dataclasses.replace(self, numbers=()), *args, **how)
    TensorwiseMean.begin = ignoring
elif broken == "chunks by bucket":
    TensorwiseMean.cutter = qcomp.CompressedMean.cutter
else:
    def shuffled(self, exchange, part, plain=buckets.BucketedStep._split):
        own = plain(self, exchange, part)
        return dict(zip(own, list(own.values())[::-1]))
    buckets.BucketedStep._split = shuffled
different = False
models = [wrapped(1), wrapped(10**6)]
for model in models:
    state, averaged = ddp.hook(
        compressor, model, topology="two_phase", exact=qcomp.ExactBelow(100), exact_iterations=0
    )
    model.register_comm_hook(state, averaged)
try:
    for step in range(4):
        for model in models:
            loss(model, step).backward()
        a, b = map(gradients, models)
        different |= not same(a, b)
        for model in models:
            model.zero_grad()
except Exception:
    different = True
say(different)
"""
    assert said(2, body, check=False) == [["True"]] * 2


def test_an_exchange_ends_before_the_backward_pass_does(said):
    body = """
import threading
over = threading.Event()
class Waiting(torch.autograd.Function):
    # Before the first layer: its backward pass must not continue before an exchange of the others has ended.
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        assert over.wait(30), "nothing was exchanged beside the backward pass"
        return g
layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
layers.forward = lambda x: layers[3](layers[2](layers[1](Waiting.apply(layers[0](x)))))
model = DistributedDataParallel(layers, bucket_cap_mb=64 * 65 * 4 / 2**20)
state, averaged = ddp.hook(qcomp.ScaledSign(), model, exact=None, exact_iterations=0)
model.register_comm_hook(state, averaged)
over.set()
torch.manual_seed(me)
model(torch.randn(3, 64)).sum().backward()  # after it, the buckets no longer change
over.clear()
plain = state._step._deliver
state._step._deliver = lambda bucket: (plain(bucket), over.set())
model(torch.randn(3, 64)).sum().backward()
say(state.iterations)
"""
    assert said(2, body) == [["2"]] * 2


def test_a_restart_goes_on_bit_for_bit(said):
    body = """
def make(model):
    state, averaged = ddp.hook(qcomp.ScaledSign(), model, exact=qcomp.ExactBelow(100), exact_iterations=1)
    model.register_comm_hook(state, averaged)
    return state
whole = wrapped()
state = make(whole)
for step in range(3):
    loss(whole, step).backward()
    whole.zero_grad()
saved = copy.deepcopy(state.state_dict())
assert "worker_residual.0.weight" in saved and not any("bias" in key for key in saved)
pickled = pickle.dumps(state)
dicts, loaded = wrapped(), wrapped()
again = make(dicts)
again.load_state_dict(saved)
woken = pickle.loads(pickled)
try:
    woken.iterations
except RuntimeError as error:
    say(error)
loaded.register_comm_hook(woken.attach(loaded), ddp.compress_gradients)
assert pickle.loads(pickle.dumps(pickle.loads(pickled)))._saved["step"] == 3
for step in range(3, 6):
    for model in (whole, dicts, loaded):
        loss(model, step).backward()
    assert same(gradients(whole), gradients(dicts)) and same(gradients(whole), gradients(loaded))
    for model in (whole, dicts, loaded):
        model.zero_grad()
say(again.iterations, woken.iterations)
"""
    message = "this state of a hook has no model: call attach(model) after loading it"
    assert said(2, body) == [[message, "6 6"]] * 2


@pytest.mark.slow
def test_a_restart_with_fewer_ranks_keeps_what_is_owed(said, tmp_path):
    make = """
model = wrapped()
state, averaged = ddp.hook(qcomp.ScaledSign(), model, exact=None, exact_iterations=0)
model.register_comm_hook(state, averaged)
def owed(dicts):
    name = "0.weight"
    total = sum(d[f"worker_residual.{name}"] for d in dicts) / len(dicts)
    for d in dicts:
        for key, part in d.items():
            if key.startswith(f"server_residual.{name}@"):
                start = int(key.rpartition("@")[2])
                total[start : start + part.shape[0]] += part
    return total
"""
    save = f"""{make}
for step in range(2):
    loss(model, step).backward()
    model.zero_grad()
torch.save(state.state_dict(), f"{tmp_path}/{{me}}")
say("saved")
"""
    load = f"""{make}
old = [torch.load(f"{tmp_path}/{{r}}", weights_only=False) for r in range(3)]
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    state.load_state_dict(old)
assert any("a state of 3 ranks resumes with 2" in str(w.message) for w in told), told
torch.testing.assert_close(owed([state.state_dict()]), owed(old), rtol=1e-5, atol=1e-7)
loss(model, 2).backward()
say(state.iterations)
"""
    assert said(3, save) == [["saved"]] * 3
    assert said(2, load) == [["3"]] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_value_that_is_not_finite_reaches_all_ranks_but_no_residual(said, bad):
    body = f"""
model = wrapped(1)
state, averaged = ddp.hook(
    qcomp.ScaledSign(), model, exact=qcomp.ExactBelow(100), exact_iterations=1, nonfinite="propagate"
)
model.register_comm_hook(state, averaged)
before = None
for step in range(4):
    total = loss(model, step)
    if step == 2 and me == 1:
        total = total * float("{bad}")
    total.backward()
    finite = all(g.isfinite().all() for g in gradients(model))
    now = state.state_dict()
    if step == 2:
        kept = all(torch.equal(now[key], before[key]) for key in now if "residual" in key)
        say(finite, kept, state.iterations, state.skipped)
    else:
        assert finite, step
    before = {{key: value.clone() if hasattr(value, "clone") else value for key, value in now.items()}}
    model.zero_grad()
say(state.iterations, state.skipped)
"""
    assert said(2, body) == [["False True 2 1", "3 1"]] * 2


def test_by_default_a_value_that_is_not_finite_raises_on_all_ranks(said):
    """A step raises the documented error, naming parameter and rank; training can continue after it."""
    body = """
model = wrapped()
state, averaged = ddp.hook(qcomp.ScaledSign(), model, exact=None, exact_iterations=1)
model.register_comm_hook(state, averaged)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    total = loss(model, step)
    if step in (0, 2) and me == 0:
        total = total + float("nan") * list(model.parameters())[2].sum()
    total.backward()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        optimizer.step()
    except qcomp.NonFiniteError as error:
        say(step, error, same(before, [p.detach() for p in model.parameters()]))
    model.zero_grad()
say(state.iterations, state.skipped)
"""
    message = (
        "{} the gradient of '2.weight' on rank 0 is not finite, or too large to compress, in step {} True"
    )
    assert said(2, body) == [[message.format(0, 1), message.format(2, 2), "2 2"]] * 2


def test_gradients_are_accumulated_and_some_may_be_missing(said):
    body = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.used, self.idle = torch.nn.Linear(33, 40), torch.nn.Linear(33, 40)
    def forward(self, x):
        return self.used(x)
model = DistributedDataParallel(Net().bfloat16(), find_unused_parameters=True)
state, averaged = ddp.hook(qcomp.ScaledSign(), model, exact=None, exact_iterations=9)
model.register_comm_hook(state, averaged)
torch.manual_seed(me)
x, y = torch.randn(2, 3, 33, dtype=torch.bfloat16)
with model.no_sync():
    model(x).square().sum().backward()
assert state.iterations == 0
model(y).square().sum().backward()
other = Net().bfloat16()
other(x).square().sum().backward()
other(y).square().sum().backward()
expected, _ = EXACT([p.grad for p in other.used.parameters()], qcomp.MeanState(me, n, (), ()), comm)
assert same([p.grad for p in model.module.used.parameters()], expected)
say(state.iterations)
"""
    assert said(2, body) == [["1"]] * 2


SHARING = """
import qcomp.torch
from qcomp.planning import Autotune
def hooked(model, comm):
    model.register_comm_hook(*ddp.hook(qcomp.Identity(), model, exact=None, exact_iterations=0, comm=comm))
def tuned(model, comm):
    methods = {"a": qcomp.CompressedMean(qcomp.ScaledSign()), "b": qcomp.CompressedMean(qcomp.Identity())}
    tuner = Autotune(methods, steps=1)
    model.register_comm_hook(*ddp.autotune(tuner, model, exact=None, exact_iterations=1, comm=comm))
def stepped(model, comm):
    return ddp.OverlappedOptimizer(model, qcomp.CompressedSGD(learning_rate=0.1, exact=None), comm)
def live(model, comm):
    return qcomp.torch.CompressedSGD(model.parameters(), model=model, lr=0.1, exact=None, comm=comm)
"""


@pytest.mark.slow
@pytest.mark.parametrize("second", ["hooked", "tuned", "stepped", "live"])
def test_models_may_share_a_communicator_but_not_in_one_backward_pass(said, second):
    """Their buckets may be full in another order on another rank. Passes one after the other are as with two."""
    body = f"""{SHARING}
models, plain = [wrapped(), wrapped()], [wrapped(), wrapped()]
made = [make(model, comm) for make, model in zip((hooked, {second}), models)]
for step in range(2):
    for model, other in zip(models, plain):
        loss(model, step).backward()
        loss(other, step).backward()
    close = [torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(gradients(models[0]), gradients(plain[0]))]
    say(all(close))
    for optimizer in made:
        if optimizer is not None:
            optimizer.step()
    for model in (*models, *plain):
        model.zero_grad()
try:
    (loss(models[0], 2) * loss(models[1], 3)).backward()
except RuntimeError as error:
    say(type(error).__name__, "the backward pass of another model still averages" in str(error))
"""
    assert said(2, body) == [["True", "True", "RuntimeError True"]] * 2


def test_ranks_with_different_settings_all_raise(said):
    body = """
model = wrapped()
try:
    ddp.hook(qcomp.ScaledSign() if me else qcomp.MinMaxUInt8(), model)
except qcomp.MismatchError as error:
    say("compressor" in str(error))
"""
    assert said(2, body) == [["True"]] * 2


def test_a_dead_rank_ends_the_backward_pass_of_the_others(said):
    body = """
import signal
model = wrapped()
model.register_comm_hook(*ddp.hook(qcomp.ScaledSign(), model, exact=None, exact_iterations=0))
for step in range(2):  # DistributedDataParallel itself communicates in the first two
    loss(model, step).backward()
    model.zero_grad()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    loss(model, 2).backward()
except qcomp.CommunicatorError as error:
    say("rank 1" in str(error), all(p.grad is None for p in model.parameters()))
try:
    loss(model, 3).backward()
except qcomp.CommunicatorError as error:
    say("an earlier exchange failed" in str(error))
"""
    assert said(2, body, check=False) == [["True True", "True"], []]


def test_a_dead_rank_ends_the_backward_pass_of_an_overlapped_optimizer(said):
    body = """
import signal
model = wrapped()
optimizer = ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=0.1, freeze=1, exact=None))
for step in range(2):
    loss(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    loss(model, 2).backward()
except qcomp.CommunicatorError as error:
    say("rank 1" in str(error))
try:
    optimizer.step()
except RuntimeError as error:
    say(error)
"""
    (first, second), _ = said(2, body, check=False)
    assert first == "True"
    assert second.startswith("step was called, but since the last step no backward pass")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "ddp.hook(qcomp.ScaledSign(), network())",
            "model is a Sequential; expected a torch.nn.parallel.Dist",
        ),
        (
            "ddp.hook(qcomp.ScaledSign(), wrapped(), nonfinite='skip')",
            "nonfinite is 'skip'; expected 'raise' or",
        ),
        (
            "ddp.hook(qcomp.ScaledSign(), wrapped(), exact_iterations=-1)",
            "exact_iterations is -1; expected an",
        ),
        ("ddp.OverlappedOptimizer(wrapped(), qcomp.EF21SGD(learning_rate=0.1))", "optimizer is EF21SGD("),
        ("ddp.OverlappedOptimizer(wrapped(), qcomp.Adam(learning_rate=0.1))", "expected one that averages"),
        ("ddp.OverlappedOptimizer(wrapped(), qcomp.OneBitAdam)", "expected one that averages"),
        (
            "ddp.hook(qcomp.ScaledSign(), DistributedDataParallel(torch.nn.Embedding(9, 4, sparse=True)))",
            "the layer '' has sparse gradients, which cannot be compressed: make it with sparse=False",
        ),
        ("thawed()", "did not when the model was wrapped: wrap the model again"),
        ("stepped().step()", "step was called, but since the last step no backward pass"),
        ("twice()", "a backward pass starts, but the previous one did not finish"),
    ],
)
def test_wrong_use_says_what_is_wrong(said, call, message):
    body = f"""
def stepped():
    return ddp.OverlappedOptimizer(wrapped(), qcomp.QAdam(learning_rate=0.1, freeze=99, exact=None))
def thawed():
    net = network()
    net[2].weight.requires_grad_(False)
    model = DistributedDataParallel(net)
    model.register_comm_hook(*ddp.hook(qcomp.ScaledSign(), model, exact=None))
    net[2].weight.requires_grad_(True)
    loss(model, 0).backward()
def twice():
    model = wrapped()
    optimizer = ddp.OverlappedOptimizer(model, qcomp.QAdam(learning_rate=0.1, freeze=99, exact=None))
    loss(model, 0).backward()
    loss(model, 1).backward()
try:
    {call}
except Exception as error:
    say(error)
"""
    ((first, *_),) = said(1, body)
    assert message in first


def test_an_overlapped_optimizer_skips_a_step_or_raises(said):
    body = """
for nonfinite in ("raise", "skip"):
    model = wrapped(1)
    opt = qcomp.OneBitAdam(learning_rate=0.01, freeze=2, exact=qcomp.ExactBelow(100), nonfinite=nonfinite)
    optimizer = ddp.OverlappedOptimizer(model, opt)
    for step in range(5):
        before, state = [p.detach().clone() for p in model.parameters()], optimizer.state
        total = loss(model, step)
        (total * float("inf") if step == 3 and me == 1 else total).backward()
        try:
            optimizer.step()
        except qcomp.NonFiniteError:
            say(step, "raised")
        if step == 3:
            assert same(before, [p.detach() for p in model.parameters()])
            assert optimizer.state.exchange is state.exchange and optimizer.state.momentum is state.momentum
        optimizer.zero_grad()
    say(optimizer.state.step, optimizer.state.skipped)
"""
    assert said(2, body) == [["3 raised", "4 0", "4 1"]] * 2


def test_an_overlapped_optimizer_resumes_bit_for_bit(said):
    body = """
def make():
    model = wrapped()
    opt = qcomp.OneBitAdam(learning_rate=0.01, freeze=2, exact=qcomp.ExactBelow(100))
    return model, ddp.OverlappedOptimizer(model, opt)
model, optimizer = make()
again, resumed = make()
for step in range(7):
    if step == 4:
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (again, resumed)):
        if m is model or step >= 4:
            loss(m, step).backward()
            o.step()
            o.zero_grad(set_to_none=False)
assert same([p.detach() for p in model.parameters()], [p.detach() for p in again.parameters()])
say(resumed.state.step, resumed.state.stage)
"""
    assert said(2, body) == [["7 compressed"]] * 2


def test_a_large_bucket_is_exchanged_in_parts(said):
    """All parts are under way before the first is waited for; a value that is not finite spoils the whole bucket."""
    body = """
started = []
start = type(comm).start
type(comm).start = lambda self, request: started.append(type(request).__name__) or start(self, request)
model = wrapped(10**6)
state, averaged = ddp.hook(
    qcomp.ScaledSign(bucket_size=64), model, exact=None, exact_iterations=0, nonfinite="propagate"
)
model.register_comm_hook(state, averaged)
for step in range(3):
    started.clear()
    loss(model, step).backward()
    model.zero_grad()
say(" ".join(started))
for spoiled in range(5):
    handle = list(model.parameters())[spoiled].register_hook(lambda g: g * float("inf") if me else g)
    loss(model, 3).backward()
    handle.remove()
    say(all(p.grad.isnan().all().item() for p in model.parameters()), state.skipped == spoiled + 1)
    model.zero_grad()
loss(model, 4).backward()
say(all(p.grad.isfinite().all().item() for p in model.parameters()))
"""
    expected = ["AllGather AllGather", *["True True"] * 5, "True"]
    assert said(2, body) == [expected] * 2


def test_a_state_can_be_loaded_after_other_steps(said):
    """The residuals are those of the loaded state, not those of the last step."""
    body = """
model = wrapped(4000)
state, averaged = ddp.hook(qcomp.ScaledSign(bucket_size=64), model, exact=None, exact_iterations=0)
model.register_comm_hook(state, averaged)
def pass_of(step):
    loss(model, step).backward()
    found = gradients(model)
    model.zero_grad()
    return found
for step in range(2):
    pass_of(step)
saved = copy.deepcopy(state.state_dict())
first = [pass_of(step) for step in (2, 3)]
state.load_state_dict(saved)
again = [pass_of(step) for step in (2, 3)]
say(all(map(same, first, again)))
"""
    assert said(2, body) == [["True"]] * 2


def test_parameters_that_ddp_ignores_are_left_alone(said):
    body = """
net = network()
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
for overlapped in (True, False):
    model = DistributedDataParallel(copy.deepcopy(net))
    if overlapped:
        optimizer = ddp.OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=0.1, freeze=1, exact=None))
    else:
        state, averaged = ddp.hook(qcomp.ScaledSign(), model, exact=None, exact_iterations=0)
        model.register_comm_hook(state, averaged)
    for step in range(3):
        loss(model, step).backward()
        if overlapped:
            before = model.module[2].weight.detach().clone()
            optimizer.step()
            assert torch.equal(before, model.module[2].weight)
        model.zero_grad()
    names = optimizer.state.names if overlapped else state._step.params.names
    say("2.weight" in names, len(names))
"""
    assert said(2, body) == [["False 4"] * 2] * 2


def test_backward_passes_of_two_models_in_another_order_are_named(said):
    """Over one communicator, each model would get the gradients of the other."""
    body = """
models = [wrapped(10**6), wrapped(10**6)]
for model in models:
    model.register_comm_hook(*ddp.hook(qcomp.ScaledSign(), model, exact=None, comm=comm))
try:
    for which in (0, 1) if me == 0 else (1, 0):
        loss(models[which], which).backward()
except qcomp.MismatchError as error:
    for rank in range(2):
        assert f"rank {rank}: step 1 (compressed), " in str(error), error
        assert f" of GradientMean number {rank + 1} with " in str(error), error
    say("named")
dist.barrier()
"""
    assert said(2, body) == [["named"]] * 2
