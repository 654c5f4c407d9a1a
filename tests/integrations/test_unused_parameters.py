"""Nothing that is owed gets lost if a backward pass leaves out parameters, or a rank runs out of inputs.

Gradients are small integers, top-k keeps values as they are, and there are two ranks: every sum below is exact.
"""

import pytest

pytest.importorskip("torch")

MODEL = """
from torch.distributed.algorithms.join import Join
class Parts(torch.nn.Module):
    # The gradient of each used parameter is the value passed in.
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (torch.nn.Parameter(torch.zeros(40, 33)) for _ in range(3))
    def forward(self, gradients):
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())
def gradient(step, salt=0):
    draws = torch.Generator().manual_seed(1000 * step + 2 * me + salt)
    return torch.randint(-9, 10, (40, 33), generator=draws).float()
def mean_over_ranks(x):
    x = x.clone()
    dist.all_reduce(x)
    return x / n
class Account:
    # The inputs and results for one parameter.
    def __init__(self, name="sometimes"):
        self.name, self.put_in = name, torch.zeros(40, 33)
    def put(self, own):
        self.put_in += mean_over_ranks(own)
    def owed(self, saved):
        total = mean_over_ranks(saved[f"worker_residual.{self.name}"])
        for key, part in saved.items():
            assert not key.startswith("server_residual"), "all-gather has no servers"
        return total.reshape(40, 33)
top = dict(compressor=qcomp.TopK(k=4, bucket_size=64), averaging=qcomp.Averaging("all_gather"), exact=None)
"""

USES = {
    "by nobody for a while": "step < 3 or step == 7",
    "by one rank only": "me == 0 and step < 3 or me == 1 and step > 5",
    "by everybody": "True",
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("use", USES)
def test_results_plus_owed_values_are_the_inputs(said, use, overlapped):
    body = f"""
{MODEL}
for view in (True, False):
    for to_none in (True, False):
        model = DistributedDataParallel(Parts(), find_unused_parameters=True, gradient_as_bucket_view=view)
        if {overlapped}:
            kept = optimizer = ddp.OverlappedOptimizer(
                model, qcomp.CompressedSGD(learning_rate=1.0, momentum=0.0, **top))
        else:
            kept, averaged = ddp.hook(top["compressor"], model, topology="all_gather", exact=None, exact_iterations=0)
            model.register_comm_hook(kept, averaged)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        account = Account()
        for step in range(8):
            used = {USES[use]}
            given = {{"always": gradient(step)}} | ({{"sometimes": gradient(step, 1)}} if used else {{}})
            before = kept.state_dict()["worker_residual.sometimes"].clone()
            account.put(given.get("sometimes", torch.zeros(40, 33)))
            model(given).backward()
            optimizer.step()
            owed = account.owed(kept.state_dict())
            came_out = -model.module.sometimes.detach()
            assert torch.equal(came_out + owed, account.put_in), (step, view, to_none)
            used_by = mean_over_ranks(torch.tensor(float(used))).item()
            if not used_by and not {overlapped}:
                assert torch.equal(kept.state_dict()["worker_residual.sometimes"], before)
                grad = model.module.sometimes.grad
                assert grad is None or not grad.any(), "nobody used it, so its gradient stays as it was"
            assert not kept.state_dict()["worker_residual.never"].any()
            optimizer.zero_grad(set_to_none=to_none)
        assert owed.any()
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("overlapped", [False, True])
def test_gradients_from_no_sync_alone_are_averaged(said, overlapped):
    body = f"""
{MODEL}
for view in (True, False):
    model = DistributedDataParallel(Parts(), find_unused_parameters=True, gradient_as_bucket_view=view)
    if {overlapped}:
        kept = optimizer = ddp.OverlappedOptimizer(model, qcomp.CompressedSGD(learning_rate=1.0, momentum=0.0, **top))
    else:
        kept, averaged = ddp.hook(top["compressor"], model, topology="all_gather", exact=None, exact_iterations=0)
        model.register_comm_hook(kept, averaged)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    account = Account()
    for step in range(5):
        with model.no_sync():
            first = {{"always": gradient(step)}} | ({{"sometimes": gradient(step, 1)}} if me == step % 2 else {{}})
            model(first).backward()
        model({{"always": gradient(step, 5)}}).backward()
        account.put(first.get("sometimes", torch.zeros(40, 33)))
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(account.owed(kept.state_dict()) - model.module.sometimes.detach(), account.put_in), step
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_static_graph_may_have_unused_parameters_and_mixed_dtypes(said, overlapped):
    """Its first backward pass hands over all buckets, one for each dtype, all with the number 0."""
    body = f"""
{MODEL}
class Mixed(Parts):
    def __init__(self):
        super().__init__()
        self.short = torch.nn.Parameter(torch.zeros(40, 33, dtype=torch.bfloat16))
for view in (True, False):
    model = DistributedDataParallel(Mixed(), static_graph=True, gradient_as_bucket_view=view)
    if {overlapped}:
        kept = optimizer = ddp.OverlappedOptimizer(model, qcomp.CompressedSGD(learning_rate=1.0, momentum=0.0, **top))
    else:
        kept, averaged = ddp.hook(top["compressor"], model, topology="all_gather", exact=None, exact_iterations=0)
        model.register_comm_hook(kept, averaged)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    account = Account()
    for step in range(4):
        given = {{"always": gradient(step), "short": gradient(step).bfloat16()}}
        given |= {{"sometimes": gradient(step, 1)}} if me == 0 else {{}}
        account.put(given.get("sometimes", torch.zeros(40, 33)))
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(account.owed(kept.state_dict()) - model.module.sometimes.detach(), account.put_in), step
        doubled = 2 * model.module.short.detach().float()
        assert torch.equal(doubled, doubled.round()), "means of two integers, exact in bfloat16"
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_rank_without_inputs_takes_part(said, overlapped, find_unused):
    body = f"""
{MODEL}
model = DistributedDataParallel(Parts(), find_unused_parameters={find_unused})
everything = ["always", "sometimes"] if {find_unused} else ["always", "sometimes", "never"]
if {overlapped}:
    kept = optimizer = ddp.OverlappedOptimizer(model, qcomp.CompressedSGD(learning_rate=1.0, momentum=0.0, **top))
    joined = Join([model, optimizer])
else:
    kept, averaged = ddp.hook(top["compressor"], model, topology="all_gather", exact=None, exact_iterations=0)
    model.register_comm_hook(kept, averaged)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    joined = model.join()
steps = [2, 5][me]
with joined, warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of uneven inputs
    for step in range(steps):
        model({{name: gradient(step, i) for i, name in enumerate(everything)}}).backward()
        optimizer.step()
        optimizer.zero_grad()
account = Account()
for step in range(5):
    account.put(gradient(step, 1) if step < steps else torch.zeros(40, 33))
assert torch.equal(account.owed(kept.state_dict()) - model.module.sometimes.detach(), account.put_in)
say(kept.state.step if {overlapped} else kept.iterations)
"""
    assert said(2, body) == [["5"]] * 2


def test_join_without_the_optimizer_is_refused_at_once(said):
    body = f"""
{MODEL}
def attempt(join_of):
    model = DistributedDataParallel(network())
    optimizer = ddp.OverlappedOptimizer(model, qcomp.QAdam(learning_rate=0.1, freeze=99, exact=None))
    try:
        with join_of(model, optimizer):
            for step in range(1 + me):
                loss(model, step).backward()
                optimizer.step()
    except RuntimeError as error:
        say(error)
attempt(lambda model, optimizer: model.join())
attempt(lambda model, optimizer: Join([optimizer, model]))
"""
    for lines in said(2, body, check=False):
        assert len(lines) >= 1
        assert all("use torch.distributed.algorithms.Join([model, optimizer])" in line for line in lines)


def test_an_optimizer_of_torch_that_cannot_join_says_what_can(said):
    body = """
import qcomp.torch
model = wrapped()
optimizer = qcomp.torch.CompressedSGD(model.parameters(), lr=0.1, model=model, exact=None)
try:
    with model.join():
        loss(model, 0).backward()
except RuntimeError as error:
    say(error)
"""
    for (line,) in said(2, body):
        assert "use a hook, qcomp.integrations.ddp.hook, or an OverlappedOptimizer" in line


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_mean_over_only_the_ranks_with_inputs_is_refused(said, overlapped):
    """A hook cannot know their number, so its means would be too small by the share of the ranks without inputs."""
    body = f"""
model = wrapped()
joined = [model]
if {overlapped}:
    joined.append(ddp.OverlappedOptimizer(model, qcomp.CompressedSGD(learning_rate=1.0, exact=None)))
else:
    model.register_comm_hook(*ddp.hook(qcomp.QSGD(levels=7), model, exact=None))
try:
    with Join(joined, divide_by_initial_world_size=False):
        for step in range(1 + me):
            loss(model, step).backward()
except RuntimeError as error:
    say(error)
"""
    for (line,) in said(2, f"from torch.distributed.algorithms.join import Join\n{body}"):
        assert line.startswith("divide_by_initial_world_size is False, but means are over all ranks")
        assert line.endswith("with Join([model], enable=False): pass")


def test_a_hook_works_after_a_join_over_the_ranks_with_inputs_if_its_settings_are_reset(said):
    """torch keeps the settings of a Join that has ended."""
    body = """
from torch.distributed.algorithms.join import Join
model = wrapped()
with Join([model], divide_by_initial_world_size=False):
    for step in range(1 + me):
        loss(model, step).backward()
with Join([model], enable=False):
    pass
model.register_comm_hook(*ddp.hook(qcomp.QSGD(levels=7), model, exact=None))
loss(model, 2).backward()
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


def test_unused_parameters_are_named_if_ddp_does_not_look_for_them(said):
    body = f"""
{MODEL}
model = DistributedDataParallel(Parts())
optimizer = ddp.OverlappedOptimizer(model, qcomp.QAdam(learning_rate=0.1, freeze=99, exact=None))
model({{"always": gradient(0)}}).backward()
try:
    optimizer.step()
except RuntimeError as error:
    say(error)
"""
    for (line,) in said(2, body, check=False):
        assert "no backward pass has averaged the gradient of 'always', 'sometimes', 'never'" in line
        assert "find_unused_parameters=True" in line
