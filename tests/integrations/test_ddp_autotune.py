"""The hook that chooses its method: what it averages meanwhile, what it chooses, and what it refuses."""

import pytest

pytest.importorskip("torch")

TUNER = """
import itertools
from qcomp.planning import Autotune

class Told:
    # A clock that is looked at once per iteration, and shows given times.
    def __init__(self, *seconds):
        self.seconds, self.now = itertools.chain(seconds, itertools.repeat(0.0)), 0.0
    def __call__(self):
        self.now += next(self.seconds)
        return self.now

exact = qcomp.CompressedMean(qcomp.Identity())
sign = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=64))
methods = {
    "sign": sign,
    "factors": qcomp.PowerSGDMean(rank=1),
    "gathered": qcomp.CompressedMean(qcomp.TopK(k=2, bucket_size=64), "all_gather"),
    "exact": exact,
    "hierarchical": qcomp.CompressedMean(qcomp.MinMaxUInt8(), "auto"),
}

def mean_of(x):
    dist.all_reduce(x)
    return x / n

def own_gradients(model, step):
    return [g.detach() for g in torch.autograd.grad(loss(model, step), list(model.parameters()))]
"""


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_no_iteration_loses_anything(said, n):
    """Delivered means plus what the ranks still owe are the exact means; the parameters do not change."""
    body = f"""{TUNER}
model = wrapped(1)
tuner = Autotune(methods, steps=1, clock=Told())
state, averaged = ddp.autotune(tuner, model, exact=qcomp.ExactBelow(100), exact_iterations=1)
model.register_comm_hook(state, averaged)
alone = network()
total, delivered = [0.0] * 5, [0.0] * 5
largest = 0.0
for step in range(24):
    loss(model, step).backward()
    delivered = [d + g.double() for d, g in zip(delivered, gradients(model), strict=True)]
    total = [t + mean_of(g.double()) for t, g in zip(total, own_gradients(alone, step), strict=True)]
    state._settle()
    owes = {{}} if state.hook is None else ddp.hook.__globals__["owed"](
        state.hook._running.optimizer.mean_of(state.hook._running.state), state.hook._running.state.exchange)
    numbers = [] if state.hook is None else [i for i, e in enumerate(state.hook._running.state.exact) if not e]
    for i in range(5):
        mine = torch.zeros_like(total[i])
        if i in numbers and len(owes):
            mine = mine + owes[numbers.index(i)].double().view(mine.shape)
        if i in state._owed:
            mine = mine + state._owed[i].double().view(mine.shape)
        still = mean_of(mine)
        largest = max(largest, still.abs().max().item())
        assert torch.allclose(delivered[i] + still, total[i], atol=1e-3, rtol=1e-5), (step, i, state.chosen)
    model.zero_grad()
say(state.chosen, largest > 0.1, len(state.seconds), state.iterations)
"""
    assert said(n, body) == [["sign True 5 24"]] * n


def test_the_exact_method_gives_the_gradients_without_a_hook(said):
    body = f"""{TUNER}
plain, model = wrapped(), wrapped()
tuner = Autotune({{"exact": exact, "sign": sign}}, steps=2, clock=Told(*[0.0] * 2, *[1.0] * 3, *[2.0] * 3))
state, averaged = ddp.autotune(tuner, model, exact=None, exact_iterations=1)
model.register_comm_hook(state, averaged)
alike = []
for step in range(12):
    for each in (plain, model):
        loss(each, step).backward()
    alike.append(same(gradients(plain), gradients(model)))
    plain.zero_grad(), model.zero_grad()
say(state.chosen, state.seconds, state.hook)
# What one bit owes is added to the gradients of the next iteration.
say(*map(int, alike))
"""
    assert said(2, body) == [["exact {'exact': 1.0, 'sign': 2.0} None", "1 1 1 1 0 0 0 0 1 1 1 1"]] * 2


def test_the_slowest_rank_decides_and_all_ranks_choose_alike(said):
    body = f"""{TUNER}
times = [0, 0, 2, 2, 0, 1, 1] if me == 0 else [0, 0, 2, 2, 0, 4, 4]
model = wrapped()
tuner = Autotune({{"exact": exact, "sign": sign}}, steps=2, margin=0.0, clock=Told(*times))
state, averaged = ddp.autotune(tuner, model, exact=None, exact_iterations=0)
model.register_comm_hook(state, averaged)
for step in range(8):
    loss(model, step).backward()
    model.zero_grad()
say(state.chosen, state.seconds)
"""
    assert said(2, body) == [["exact {'exact': 2.0, 'sign': 4.0}"]] * 2


@pytest.mark.parametrize("after", ["sign", "exact"])
def test_discarded_gradients_do_not_lose_what_is_owed(said, after):
    """The iteration after a change has a value that is not finite: what is owed is added to the next one."""
    body = f"""{TUNER}
model = wrapped()
chosen = {{"factors": qcomp.PowerSGDMean(rank=1), {after!r}: {after}}}
tuner = Autotune(chosen, steps=1, clock=Told())
state, averaged = ddp.autotune(tuner, model, exact=None, exact_iterations=0, nonfinite="propagate")
model.register_comm_hook(state, averaged)
for step in range(5):
    total = loss(model, step)
    (total * float("inf") if step == 2 and me == 1 else total).backward()
    state._settle()
    say(len(state._owed) > 0)
    model.zero_grad()
"""
    assert said(2, body) == [["False", "False", "True", "False", "False"]] * 2


def test_ranks_that_differ_are_an_error_on_every_rank(said):
    body = f"""{TUNER}
for others in ({{"steps": 2}}, {{"methods": {{"exact": exact, "sign": sign}}}}, {{"margin": 0.5}}):
    settings = {{"methods": {{"exact": exact, "bit": sign}}}} | (others if me else {{}})
    try:
        ddp.autotune(Autotune(**settings), wrapped())
    except qcomp.MismatchError as error:
        say("not started alike" in str(error))
try:
    ddp.autotune(Autotune({{"exact": exact}}), wrapped(), exact_iterations=me)
except qcomp.MismatchError as error:
    say("exact_iterations is 0 on rank 0, but 1 on rank 1" in str(error))
"""
    assert said(2, body) == [["True"] * 4] * 2


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("ddp.autotune({'exact': exact}, wrapped())", "tuner is {'exact'"),
        ("ddp.autotune(Autotune(methods), wrapped())", "the hook compresses nothing"),
        ("ddp.autotune(Autotune(methods), wrapped(), exact=qcomp.ExactBelow(9, 'no*'))", "no*"),
        ("ddp.autotune(Autotune(methods), network())", "model is a Sequential; expected a torch.nn"),
        ("ddp.autotune(Autotune(methods), wrapped(), nonfinite='skip')", "nonfinite is 'skip'"),
        ("ddp.autotune(Autotune(methods), wrapped(), exact_iterations=-1)", "exact_iterations is -1"),
        ("ddp.autotune(Autotune(methods), wrapped(find_unused_parameters=True))", "expected neither"),
        (
            "ddp.autotune(Autotune({'a': qcomp.CompressedMean([qcomp.ScaledSign()] * 2)}), wrapped())",
            "methods has 'a' with 2 compressors; expected one",
        ),
    ],
)
def test_wrong_use_says_what_is_wrong(said, call, message):
    body = f"""{TUNER}
try:
    {call}
except Exception as error:
    say(error)
"""
    ((first, *_),) = said(1, body)
    assert message in first


def test_no_thread_is_left_by_methods_that_were_not_chosen(said):
    body = f"""{TUNER}
import threading
model = wrapped()
tuner = Autotune({{"a": sign, "b": sign, "c": sign, "exact": exact}}, steps=1, clock=Told(*[9] * 7, 1, 1, 1))
state, averaged = ddp.autotune(tuner, model, exact=None)
model.register_comm_hook(state, averaged)
for step in range(12):
    loss(model, step).backward()
    model.zero_grad()
for thread in threading.enumerate():
    if thread.name == "qcomp-ddp":
        thread.join(30)
say(state.chosen, [t.name for t in threading.enumerate()].count("qcomp-ddp"))
"""
    assert said(2, body) == [["exact 0"]] * 2
