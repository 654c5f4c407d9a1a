"""Sharded models average what stock FSDP2 averages, except for the loss of compression, and owe the rest."""

import pytest

pytest.importorskip("torch")

HEAD = """
import io, os, warnings
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
import qcomp
import qcomp.torch.fsdp
from qcomp.torch.fsdp import compress
from qcomp.torch.fsdp_units import units_of

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "the states come from|the dicts come from|.*another number of ranks")
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=me, world_size=n)
everyone = dist.init_device_mesh("cpu", (n,))
SIGN = qcomp.ScaledSign(bucket_size=64)
SMALL = {"exact": qcomp.ExactBelow(100)}

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(18)
        self.up, self.down = torch.nn.Linear(18, 35), torch.nn.Linear(35, 18, bias=False)
        self.extra = torch.nn.Linear(18, 18)
        self.uses_extra = True
    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.extra(x) if self.uses_extra else x

def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(7, 18), Block(), Block(), torch.nn.Linear(18, 5))

def sharded(mesh=everyone, model=None, blocks=True, **options):
    model = network() if model is None else model
    for layer in model[1:3] if blocks else ():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)

def backward(model, step, factor=1.0):
    draws = torch.Generator().manual_seed(1000 * step + me)
    (factor * model(torch.randn(6, 7, generator=draws)).square().sum()).backward()

def local(x):
    return x.to_local() if isinstance(x, DTensor) else x

def gradients(model):
    return {k: local(p.grad).clone() for k, p in model.named_parameters() if p.grad is not None}

def whole_gradients(model):
    return {k: p.grad.full_tensor() for k, p in model.named_parameters()}

def close(xs, ys, **tolerance):
    assert xs.keys() == ys.keys() and xs
    for key in xs:
        torch.testing.assert_close(xs[key], ys[key], **tolerance, msg=lambda text: f"{key}: {text}")

def require_equal_replicas(model, mesh):
    for key, p in model.named_parameters():
        both = [torch.empty_like(p.to_local()) for _ in range(2)]
        dist.all_gather(both, p.to_local().detach(), group=mesh["replicas"].get_group())
        assert torch.equal(both[0], both[1]), key

def refusal(do):
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def said(torch_ranks):
    """Run a script on ranks with a process group; return the lines of each."""

    def run(n, body):
        return [rank.out.splitlines() for rank in torch_ranks(n, HEAD + body, timeout=120.0)]

    return run


PLACES = {
    "blocks": "lambda: sharded()",
    "whole": "lambda: sharded(blocks=False)",
    "kept": "lambda: sharded(reshard_after_forward=False)",
    "columns": "lambda: sharded(shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.shape[-1] == 18 else None)",
    "bfloat16": "lambda: sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))",
    "float16": "lambda: sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))",
    "float64": "lambda: sharded(model=network().double())",
}


QUICK = ("blocks", "columns", "float16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "places"),
    [(2, QUICK), *(pytest.param(n, tuple(PLACES), marks=pytest.mark.slow) for n in (2, 3))],
    ids=["2", "2, all", "3, all"],
)
def test_without_loss_it_equals_stock_fsdp(said, n, places):
    """All ways to shard, uneven shards, accumulation, and parameters without gradients."""
    places = {k: PLACES[k] for k in places if n == 2 or k != "columns"}  # torch requires these to be even
    said(
        n,
        f"""
for name, make in {{ {", ".join(f"{k!r}: {v}" for k, v in places.items())} }}.items():
    stock, ours = make(), make()
    if name == "blocks":
        for model in (stock, ours):
            model[1].up.weight.requires_grad_(False)
    compression = compress(ours, qcomp.Identity(), qcomp.Identity(), exact=None)
    for step in range(3):
        for model in (stock, ours):
            model[2].uses_extra = step != 1
            x = {{torch.float64: torch.float64}}.get(next(model.parameters()).dtype, torch.float32)
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                draws = torch.Generator().manual_seed(1000 * step + 10 * me + micro)
                model(torch.randn(6, 7, generator=draws, dtype=x)).square().sum().backward()
        exact = {{"float16": 2e-3, "float64": 1e-12}}.get(name, 1e-5)
        close(gradients(ours), gradients(stock), rtol=exact, atol=10 * exact)
        for model in (stock, ours):
            model.zero_grad()
    assert compression.bytes_sent
""",
    )


def test_the_parameters_of_a_unit_are_in_the_order_of_torch(said):
    """Otherwise buckets would start in the middle of parameters, and other parts of a message would be exact."""
    said(
        2,
        """
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(6, 6, bias=False)
        self.first = torch.nn.Embedding(6, 6)
        self.first.weight = self.last.weight
        self.scale = torch.nn.Parameter(torch.ones(3))
for model in (sharded(), sharded(blocks=False), fully_shard(Tied(), mesh=everyone)):
    units = units_of(model)
    for unit in units:
        (group,) = unit.module._get_fsdp_state()._fsdp_param_groups
        assert [id(p.sharded_param) for p in group.fsdp_params] == [id(p) for p in unit.params]
    assert len({id(p) for unit in units for p in unit.params}) == len(list(model.parameters()))
pair = network()
fully_shard([pair[1], pair[2]], mesh=everyone)
fully_shard(pair, mesh=everyone)
units = units_of(pair)
assert [unit.name for unit in units] == ["", "1"]
(group,) = pair[1]._get_fsdp_state()._fsdp_param_groups
assert [id(p.sharded_param) for p in group.fsdp_params] == [id(p) for p in units[1].params]
""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_part_that_is_not_sent_is_owed(said, n):
    """The compressed gradients of all steps plus the mean of what the ranks owe equal the exact gradients."""
    said(
        n,
        """
for columns in (False, True) if n == 2 else (False,):
    along = {"shard_placement_fn": lambda p: Shard(p.ndim - 1) if p.shape[-1] == 18 else None} if columns else {}
    stock, ours = sharded(**along), sharded(**along)
    compression = compress(ours, SIGN, **SMALL)
    sums = [dict.fromkeys(dict(stock.named_parameters()), 0) for _ in range(2)]
    for step in range(4):
        for total, model in zip(sums, (stock, ours)):
            backward(model, step)
            for key, g in whole_gradients(model).items():
                total[key] = total[key] + g
            model.zero_grad()
    owed = [r for part in compression.state_dict()["parts"].values() for r in part["residuals"].items()]
    assert len(owed) == len(sums[0])
    for key, residual in owed:
        dist.all_reduce(residual)
        torch.testing.assert_close(sums[1][key] + residual / n, sums[0][key], rtol=1e-5, atol=1e-4)
    kept = {key: residual.abs().max().item() for key, residual in owed}
    assert kept["1.up.weight"] > 0.01 and kept["1.norm.weight"] == kept["3.bias"] == 0
""",
    )


def test_four_bits_send_an_eighth_of_the_bytes(said):
    """Plus 32 bits for each bucket of 128 elements; the bias stays exact, and nothing else is sent."""
    said(
        2,
        """
model = fully_shard(torch.nn.Linear(256, 256), mesh=everyone)
compression = compress(model)
before = compression.bytes_sent
model(torch.randn(6, 256)).square().sum().backward()
sent, half = compression.bytes_sent - before, 256 * 256 // 2
assert 0 <= sent - (half // 2 + half // 128 * 4 + 128 * 4) < 16, sent
""",
    )


@pytest.mark.slow
def test_gradients_are_unbiased(said):
    """Over 60 draws the mean of each element is within 6 of the largest standard errors of the exact one.

    Weights and gradients repeat after 32 rows, that is four buckets, so each rank has five draws per step.
    """
    said(
        2,
        """
def repeating():
    layer = torch.nn.Linear(16, 320, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(32, 16, generator=torch.Generator().manual_seed(7)).repeat(10, 1))
    return fully_shard(layer, mesh=everyone)

def gradient(model):
    model(torch.randn(6, 16, generator=torch.Generator().manual_seed(me))).square().sum().backward()
    return gradients(model)["weight"].reshape(5, 32, 16)

stock, ours = repeating(), repeating()
compress(ours, qcomp.QSGD(7, 128), exact=None)
exact, found = gradient(stock)[0], []
for step in range(12):
    found.append(gradient(ours))
    ours.zero_grad()
found = torch.cat(found)
spread = found.std(0) / 60**0.5
assert (spread > 0).float().mean() > 0.5
assert ((found.mean(0) - exact).abs() <= 6 * spread.max()).all()
""",
    )


@pytest.mark.slow
def test_no_two_roundings_have_the_same_draws(said):
    """Gradients depend on how their weights were rounded: rounded by the same draws they would be biased."""
    said(
        2,
        """
from qcomp.testing import replace_draws
TERNARY = qcomp.QSGD(levels=1, bucket_size=1024)
keys, by_step = [], []
def source(key, block):
    first = key.bucket + block.first_bucket
    keys.extend(key._replace(bucket=first + row) for row in range(block.rows))
    return 30000
model = sharded()
compress(model, TERNARY, TERNARY, exact=None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with replace_draws(source):
    for step in range(2):
        backward(model, step)
        optimizer.step()
        by_step.append(list(keys))
        keys.clear()
of_gradients = [key for step in by_step for key in step if key.hop == 0]
of_weights = [{key for key in step if key.hop} for step in by_step]
assert len(of_gradients) == len(set(of_gradients)) > 0
assert all(of_weights) and not of_weights[0] & of_weights[1]

class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((n * 1024,), 0.5))
    def forward(self):
        return self.w
model = fully_shard(Weights(), mesh=everyone)
with torch.no_grad():
    model.w.to_local()[0] = 1.0  # the step of a bucket, so that 0.5 is rounded to 0 or 1
compress(model, TERNARY, TERNARY, exact=None)
total, exact = 0.0, 0.0
for step in range(10):
    w = model()
    g = torch.where(w.detach() > 0.5, 0.9, 0.4)
    g[::1024] = 1.0
    (w * g).sum().backward()
    dist.all_reduce(g)
    exact += (g / n)[me * 1024 + 1 : (me + 1) * 1024].mean().item() / 10
    total += model.w.grad.to_local()[1:].mean().item() / 10
    model.zero_grad()
assert abs(total - exact) < 0.02, (total, exact)  # six standard errors
""",
    )


def test_all_ranks_compute_with_the_same_weights(said):
    said(
        2,
        """
model = sharded()
before = {k: p.full_tensor().detach() for k, p in model.named_parameters()}
compress(model, None, qcomp.MinMaxUInt8(bucket_size=64), **SMALL)
model.unshard()
for layer in model[1:3]:
    layer.unshard()
used = dict(model.named_parameters())
for key, value in used.items():
    value = value.detach()
    both = [torch.empty_like(value) for _ in range(n)]
    dist.all_gather(both, value.contiguous())
    assert torch.equal(both[0], both[1]), key
    assert torch.equal(value, before[key]) == (value.numel() < 100 or value.ndim == 1), key
    torch.testing.assert_close(value, before[key], rtol=0, atol=before[key].abs().max().item() / 120)
model.reshard()
for layer in model[1:3]:
    layer.reshard()
after = {k: p.full_tensor().detach() for k, p in model.named_parameters()}
close(after, before, rtol=0, atol=0)
""",
    )


@pytest.mark.slow
def test_changes_of_weights_lose_less_each_time(said):
    """With EF21's contraction: the first gather is exact, and the loss of one call is part of the next change."""
    said(
        2,
        """
model = sharded(blocks=False)
compression = compress(model, None, qcomp.QSGD(7, 128), weight_changes=True, exact=None)
def used():
    model.unshard()
    found = {k: p.detach().clone() for k, p in model.named_parameters()}
    model.reshard()
    return found
def distance():
    exact = {k: p.full_tensor().detach() for k, p in model.named_parameters()}
    return max((x - exact[k]).abs().max().item() for k, x in used().items())
assert distance() == 0
with torch.no_grad():
    for p in model.parameters():
        x = p.to_local()
        x += torch.linspace(0.1, 0.4, max(1, x.numel()))[: x.numel()].reshape(x.shape)
lost = []
for _ in range(8):
    lost.append(distance())
    assert distance() == lost[-1]  # weights that have not changed send nothing new
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(1 + 2e-7)
assert lost[0] < 0.2 and lost[-1] < 1e-5, lost
compression.load_state_dict(compression.state_dict())
assert distance() == 0
""",
    )


GRID = """
mesh = dist.init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("replicas", "shard"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", pytest.param("replicated", marks=pytest.mark.slow)])
def test_between_replicas_without_loss_it_gives_the_mean_over_all(said, kind):
    n = 4 if kind == "sharded" else 2
    said(
        n,
        f"""
if {kind == "sharded"}:
    mesh = dist.init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("replicas", "shard"))
    make = lambda: sharded(mesh["shard"])
else:
    mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("replicas", "alone"))
    make = lambda: replicate(network(), mesh=mesh["alone"])
stock, ours = sharded(), make()
compress(ours, qcomp.Identity(), replicas=mesh["replicas"], exact=None)
for step in range(2):
    for model in (stock, ours):
        backward(model, step)
    close(whole_gradients(ours), whole_gradients(stock), rtol=1e-5, atol=1e-4)
""",
    )


@pytest.mark.parametrize("topology", ["two_phase", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_replicas_stay_equal_bit_for_bit(said, topology):
    said(
        4,
        f"""
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
model = sharded(mesh["shard"])
compression = compress(model, SIGN, replicas=mesh["replicas"], topology={topology!r}, **SMALL)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(4):
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()
require_equal_replicas(model, mesh)
assert compression.bytes_sent
""",
    )


@pytest.mark.slow
def test_hsdp_compresses_inside_a_shard_group(said):
    said(
        4,
        """
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
stock, ours = sharded(mesh), sharded(mesh)
compress(ours, qcomp.Identity(), qcomp.Identity(), exact=None)
for model in (stock, ours):
    backward(model, 0)
close(gradients(ours), gradients(stock), rtol=1e-5, atol=1e-4)
say(refusal(lambda: compress(ours, SIGN, replicas=mesh["replicas"])))
""",
    )


@pytest.mark.slow
def test_between_replicas_frozen_parameters_take_no_part(said):
    """As in LoRA: some parameters of a unit are frozen, or all; what is frozen changes, and a state is loaded."""
    said(
        4,
        """
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
PARTLY = lambda name: name.startswith(("1.up", "3.weight"))
WHOLLY = lambda name: name.startswith(("1.", "3.weight"))
ELSEWHERE = lambda name: name.startswith(("2.", "0."))
def freeze(model, frozen):
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen(name))
for first in (PARTLY, WHOLLY):
    stock, ours = sharded(), sharded(mesh["shard"])
    for model in (stock, ours):
        freeze(model, first)
    compression = compress(ours, qcomp.Identity(), replicas=mesh["replicas"], feedback=False, exact=None)
    for step, frozen in enumerate((first, first, ELSEWHERE, WHOLLY)):
        for model in (stock, ours):
            freeze(model, frozen)
            backward(model, step)
        close(*[
            {k: p.grad.full_tensor() for k, p in model.named_parameters() if p.requires_grad}
            for model in (ours, stock)
        ], rtol=1e-5, atol=1e-4)
        for model in (stock, ours):
            model.zero_grad()
    compression.rescale(2.0)
    compression.load_state_dict(compression.state_dict())

for first in (PARTLY, WHOLLY):
    model = sharded(mesh["shard"])
    freeze(model, first)
    compression = compress(model, SIGN, replicas=mesh["replicas"], **SMALL)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    require_equal_replicas(model, mesh)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = compression.state_dict()
    backward(model, 2)
    again = sharded(mesh["shard"])
    again.load_state_dict(weights)
    other = compress(again, SIGN, replicas=mesh["replicas"], **SMALL)
    other.load_state_dict(saved)
    freeze(again, first)
    backward(again, 2)
    close(gradients(again), gradients(model), rtol=0, atol=0)
    freeze(again, ELSEWHERE)
    text = refusal(lambda: backward(again, 3))
    # The first unit that the backward pass reaches is the model itself; it has the last layer and the first one.
    assert text.startswith("ValueError: requires_grad has changed since the residuals of the model were made "), text
    assert "(now without a gradient: 0.weight, 0.bias; now with a gradient: 3.weight)" in text, text
    again = sharded(mesh["shard"])
    compress(again, SIGN, replicas=mesh["replicas"], **SMALL)
    backward(again, 3)
    again.zero_grad()
    freeze(again, ELSEWHERE)
    compress(again, SIGN, replicas=mesh["replicas"], **SMALL)
    backward(again, 4)
""",
    )


def test_replicas_average_once_for_all_microbatches(said):
    """As with HSDP, whose replicas wait for `set_requires_all_reduce(True)`; residuals see the sum alone."""
    said(
        2,
        """
mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("replicas", "shard"))
IDENTITY = qcomp.Identity()
for compressor in (IDENTITY, SIGN):
    stock, whole, ours = sharded(mesh), sharded(mesh["shard"]), sharded(mesh["shard"])
    first, second = [compress(m, compressor, replicas=mesh["replicas"], **SMALL) for m in (whole, ours)]
    for step in range(2):
        sent = []
        for micro in range(3):
            stock.set_requires_all_reduce(micro == 2)
            ours.set_requires_all_reduce(micro == 2)
            whole.set_requires_gradient_sync(micro == 2)
            before = second.bytes_sent
            for model in (stock, whole, ours):
                backward(model, 10 * step + micro)
            sent.append(second.bytes_sent - before)
        assert sent[:2] == [0, 0] and sent[2] > 0, sent
        close(gradients(ours), gradients(whole), rtol=0, atol=0)
        if compressor is IDENTITY:
            close(gradients(ours), gradients(stock), rtol=1e-5, atol=1e-4)
        for model in (stock, whole, ours):
            model.zero_grad()
    assert first.bytes_sent == second.bytes_sent

fresh, kept = sharded(mesh["shard"]), sharded(mesh["shard"])
compress(fresh, IDENTITY, replicas=mesh["replicas"], feedback=False, exact=None)
compression = compress(kept, IDENTITY, replicas=mesh["replicas"], feedback=False, exact=None)
def keep():
    kept.zero_grad()
    kept.set_requires_all_reduce(False)
    backward(kept, 0)
keep()
text = refusal(torch.optim.SGD(kept.parameters(), lr=1.0).step)  # it would move with zeros
assert text.startswith("RuntimeError: the replicas have not averaged the gradients of "), text
compression.load_state_dict(compression.state_dict())  # a state has no gradients
kept.set_requires_all_reduce(True)
for model in (fresh, kept):
    backward(model, 1)
close(gradients(kept), gradients(fresh), rtol=0, atol=0)
keep()
kept.zero_grad()  # drops the microbatch
kept.set_requires_all_reduce(True)
backward(kept, 1)
close(gradients(kept), gradients(fresh), rtol=0, atol=0)
keep()
kept[1].up.weight.requires_grad_(False)
text = refusal(lambda: backward(kept, 1))
assert text.startswith("ValueError: the module '1' has gradients of "), text
""",
    )


@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_ranks_that_run_other_modules_are_told_which(said, what):
    """Modules of equal sizes: each rank would receive gradients, or weights, of another module."""
    compressors = "qcomp.Identity(), None" if what == "gradients" else "None, qcomp.Identity()"
    said(
        2,
        f"""
import time
class Skipping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(4))
    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = x if number == 1 + me else x + block(x)
        return x
net = Skipping()
for block in net.blocks:
    fully_shard(block, mesh=everyone, reshard_after_forward=False)
fully_shard(net, mesh=everyone)
compress(net, {compressors}, exact=None)
began = time.monotonic()
text = refusal(lambda: net(torch.ones(2, 16)).sum().backward())
assert time.monotonic() - began < 10
assert text.startswith("MismatchError: "), text
for rank in range(2):
    assert any(
        f"rank {{rank}}: the {what}{{which}} of the module 'blocks.{{2 - rank}}'" in text
        for which in ("", " of backward pass 1")
    ), text
assert "must run it and multiply the result by zero" in text, text
""",
    )


@pytest.mark.parametrize(
    "options",
    ["", pytest.param(", weight_changes=True", marks=pytest.mark.slow)],
    ids=["weights", "changes"],
)
def test_a_step_computes_with_one_rounding_of_its_weights(said, options):
    """Forward passes, backward passes, and activations that are computed again; the next step has other draws."""
    said(
        2,
        f"""
from torch.utils.checkpoint import checkpoint
class Seen(torch.nn.Module):
    def __init__(self, again):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16, bias=False)
        self.again, self.seen = again, []
    def whole(self, x):
        self.seen.append(self.inner.weight.detach().clone())
        return torch.tanh(self.inner(x))
    def forward(self, x):
        return checkpoint(self.whole, x, use_reentrant=False) if self.again else self.whole(x)
def losses(again):
    torch.manual_seed(0)
    layers = [Seen(again), Seen(again)]
    model = sharded(model=torch.nn.Sequential(torch.nn.Linear(16, 16), *layers))
    compress(model, qcomp.Identity(), qcomp.QSGD(7, 128){options}, exact=None)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        draws = torch.Generator().manual_seed(9 * step + me)
        loss = (model(torch.randn(4, 16, generator=draws)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, layers[0].seen, model
plain, once, _ = losses(False)
again, twice, model = losses(True)
assert plain == again
assert len(once) == 3 and len(twice) == 6
for number, weight in enumerate(once):
    assert torch.equal(weight, twice[2 * number]) and torch.equal(weight, twice[2 * number + 1])
assert not torch.equal(once[0], once[1])
""",
    )


def test_it_finds_parameters_that_an_evaluation_has_left_gathered(said):
    """A forward pass leaves those of the outermost module gathered; they were neither compressed nor averaged."""
    said(
        2,
        """
mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("replicas", "shard"))
stock, ours = sharded(), sharded(mesh["shard"])
with torch.no_grad():
    ours(torch.ones(1, 7))
compression = compress(ours, qcomp.Identity(), replicas=mesh["replicas"], exact=None)
assert sorted(compression.parts) == ["", "1", "2"]
for model in (stock, ours):
    backward(model, 0)
close(whole_gradients(ours), whole_gradients(stock), rtol=1e-5, atol=1e-4)
""",
    )


def test_residuals_stay_with_their_parameters_when_others_are_frozen(said):
    """Two parameters of one shape: the residual of one was added to the gradient of the other."""
    said(
        2,
        """
class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(16, 8)) for _ in range(2))
    def forward(self, x):
        return x @ (self.a + 2 * self.b).T
def train(model, step):
    draws = torch.Generator().manual_seed(10 * step + me)
    model(torch.randn(4, 8, generator=draws)).square().sum().backward()
model = fully_shard(Pair(), mesh=everyone)
model.b.requires_grad_(False)
compression = compress(model, SIGN, exact=None)
train(model, 0)
model.a.requires_grad_(False)
model.b.requires_grad_(True)
assert tuple(compression.state_dict()["parts"][""]["residuals"]) == ("a",)
text = refusal(lambda: train(model, 1))
assert text.startswith("ValueError: requires_grad has changed since the residuals of the model were made "), text
assert "(now without a gradient: a; now with a gradient: b)" in text, text
""",
    )


def test_it_warns_if_all_that_is_trained_stays_exact(said):
    said(
        2,
        """
model = sharded(blocks=False)
for name, p in model.named_parameters():
    p.requires_grad_(p.numel() < 100)
assert refusal(lambda: compress(model, **SMALL)).startswith("UserWarning: compress compresses nothing: exact=")
compress(model, weights=qcomp.MinMaxUInt8(), **SMALL)
if me:
    model[3].bias.requires_grad_(False)
text = refusal(lambda: compress(model, exact=None))
assert text.startswith("MismatchError: the ranks were not started alike: requires_grad.3.bias is true on rank 0"), text
""",
    )


CHECKPOINT = """
def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
def of_all(saved):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, saved)
    return found
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "compressors"),
    [
        # The first draws, and leaves residuals; the second, for weights, draws too.
        (False, "qcomp.Scaled(qcomp.QSGD(7, 64)), qcomp.QSGD(7, 64)"),
        (False, "SIGN"),  # it leaves residuals of the padding of uneven shards, which no state has
        pytest.param(True, "qcomp.Scaled(qcomp.QSGD(7, 64))", marks=pytest.mark.slow),
    ],
)
def test_a_restart_goes_on_bit_for_bit(said, between, compressors):
    said(
        4 if between else 2,
        f"""{CHECKPOINT}
if {between}:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
    make, options = (lambda: sharded(mesh["shard"])), {{"replicas": mesh["replicas"]}}
else:
    make, options = sharded, {{}}
compressors = {compressors},
model = make()
compression = compress(model, *compressors, **options, **SMALL)
train(model, range(2))
weights, saved = model.state_dict(), through_a_file(compression.state_dict())
weights = {{k: v.clone() for k, v in weights.items()}}
train(model, range(2, 4))
for states in (saved, of_all(saved)):
    again = make()
    other = compress(again, *compressors, **options, **SMALL)
    again.load_state_dict(weights)
    other.load_state_dict(states)
    train(again, range(2, 4))
    for key, p in model.named_parameters():
        assert torch.equal(p.to_local(), dict(again.named_parameters())[key].to_local()), key
""",
    )


@pytest.mark.slow
def test_a_restart_with_compiled_layers_goes_on_bit_for_bit(said):
    """torch.compile changes the names of parameters: they have their plain ones in states, policies and draws."""
    said(
        2,
        f"""{CHECKPOINT}
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads it

def compiled():
    model = network()
    model[1] = torch.compile(model[1], backend="eager")
    return torch.compile(sharded(model=model), backend="eager")

policy = qcomp.ExactBelow(100, names=("1.up.weight",))
model = sharded()
compression = compress(model, SIGN, exact=policy)
train(model, range(2))
weights, saved = {{k: v.clone() for k, v in model.state_dict().items()}}, compression.state_dict()
train(model, range(2, 4))
again = compiled()
other = compress(again, SIGN, exact=policy)
inside = again._orig_mod
for key, p in inside.named_parameters():
    p.data.copy_(weights[key.replace("_orig_mod.", "")])
other.load_state_dict(saved)
train(again, range(2, 4))
for (key, p), q in zip(model.named_parameters(), inside.parameters(), strict=True):
    assert torch.equal(p.to_local(), q.to_local()), key
assert other.state_dict()["parts"].keys() == compression.state_dict()["parts"].keys()
""",
    )


@pytest.mark.slow
def test_another_number_of_ranks_owes_the_same(said, tmp_path):
    """Residuals are whole tensors, whatever the mesh; each new rank continues with the mean of the old residuals."""
    path = str(tmp_path / "saved")
    said(
        3,
        f"""{CHECKPOINT}
model = sharded()
compression = compress(model, SIGN, **SMALL)
train(model, range(3))
saved = of_all(compression.state_dict())
if me == 0:
    torch.save(saved, {path!r})
""",
    )
    said(
        2,
        f"""{CHECKPOINT}
saved = torch.load({path!r}, weights_only=True)
compression = compress(sharded(), SIGN, **SMALL)
compression.load_state_dict(saved)
for name, part in compression.state_dict()["parts"].items():
    for key, residual in part["residuals"].items():
        expected = sum(one["parts"][name]["residuals"][key] for one in saved) / 3
        torch.testing.assert_close(residual, expected, rtol=1e-6, atol=1e-7)
assert refusal(lambda: compression.load_state_dict(saved[0])).startswith(
    "ValueError: saved does not fit: ValueError: it belongs to rank 0 of 3"
)
assert "expected one state of each rank that saved" in refusal(lambda: compression.load_state_dict(saved[:2]))
broken = {{**saved[0], "rank": me, "size": 2}}
if me:
    broken["parts"] = {{}}
text = refusal(lambda: compression.load_state_dict(broken))
expected = "MismatchError: rank 1 cannot load its state" if me == 0 else "ValueError: saved does not fit"
assert text.startswith(expected), text
train(sharded(), range(1))
""",
    )


def test_gradients_that_are_not_finite(said):
    said(
        2,
        """
for how in ("raise", "propagate"):
    model = sharded(blocks=False)
    compression = compress(model, SIGN, nonfinite=how, **SMALL)
    backward(model, 0)
    model.zero_grad()
    before = compression.state_dict()["parts"][""]["residuals"]
    backward(model, 1, torch.inf if me == 1 else 1.0)
    assert all(g.isnan().all() for g in gradients(model).values() if g.numel())
    weights = {k: local(p.detach()).clone() for k, p in model.named_parameters()}
    text = refusal(torch.optim.SGD(model.parameters(), lr=0.1).step)
    now = {k: local(p.detach()) for k, p in model.named_parameters()}
    if how == "raise":
        assert text.startswith("NonFiniteError: a value on rank 1 is not finite"), text
        close(now, weights, rtol=0, atol=0)
    else:
        assert text == "nothing" and all(p.isnan().all() for p in now.values() if p.numel())
    assert compression.skipped == 1
    close(compression.state_dict()["parts"][""]["residuals"], before, rtol=0, atol=0)
""",
    )


@pytest.mark.parametrize(
    "between",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["of shards", "of replicas"],
)
def test_a_gradient_scaler_skips_on_all_ranks(said, between):
    """An overflow on one rank; residuals stay as they are, and training goes on towards the loss of stock FSDP2."""
    said(
        2,
        f"""
from torch.amp import GradScaler
mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("replicas", "shard"))
def residuals_of(compression):
    if compression is None:
        return []
    part = compression.state_dict()["parts"][""]
    kept = part["residuals"] if "residuals" in part else part["mean"]
    return [x.clone() for key, x in sorted(kept.items()) if "residual" in key or "residuals" in part]
def trained(compressed):
    model = sharded(mesh["shard"], blocks=False) if {between} and compressed else sharded(blocks=False)
    options = dict(SMALL, replicas=mesh["replicas"]) if {between} else SMALL
    compression = compress(model, qcomp.Scaled(qcomp.QSGD(15, 64)), feedback=True, **options) if compressed else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    draws = torch.Generator().manual_seed(me)
    data = torch.randn(24, 7, generator=draws)
    moved = []
    for step in range(30):
        before = local(model[0].weight.detach()).clone()
        bad = torch.inf if (step, me) == (7, 1) else 1.0
        value = (model(data) - data[:, :5].tanh()).square().mean()
        owed = residuals_of(compression)
        (scaler.scale(value) * bad).backward()
        if step == 7:
            assert all(map(torch.equal, owed, residuals_of(compression)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, local(model[0].weight)))
    assert moved == [step != 7 for step in range(30)], moved
    assert scaler.get_scale() == 2.0
    assert not compression or compression.skipped == 1
    final = value.detach().clone()
    dist.all_reduce(final)
    return float(final / n)
exact, found = trained(False), trained(True)
assert abs(found / exact - 1) < 0.05, (found, exact)
""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("between", [False, True], ids=["of shards", "of replicas"])
def test_residuals_follow_the_scale_of_the_gradients(said, between):
    """Scales are powers of two, so nothing is rounded differently."""
    said(
        2,
        f"""
mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("replicas", "shard"))
make = (lambda: sharded(mesh["shard"])) if {between} else sharded
plain, scaled = make(), make()
options = dict(SMALL, replicas=mesh["replicas"]) if {between} else SMALL
_, compression = [compress(model, SIGN, **options) for model in (plain, scaled)]
scale = 1.0
for step, factor in enumerate((4.0, 0.5, 8.0, 1.0)):
    for model, own in ((plain, 1.0), (scaled, scale)):
        model.zero_grad()
        backward(model, step, own)
    close(gradients(scaled), {{k: scale * g for k, g in gradients(plain).items()}}, rtol=0, atol=0)
    compression.rescale(factor)
    scale *= factor
""",
    )


REFUSALS = {
    "not sharded": ("compress(network())", "TypeError: model is a Sequential without sharded parameters"),
    "no values": (
        "compress(sharded(model=network().to('meta')))",
        "ValueError: the parameter '0.weight' is on the meta device; expected one with values: call model.to_empty",
    ),
    "nothing to do": ("compress(sharded(), None)", "ValueError: gradients and weights are None"),
    "no compressor": (
        "compress(sharded(), 'qsgd')",
        "TypeError: gradients is 'qsgd'; expected a qcomp.Compressor",
    ),
    "diverges": (
        "compress(sharded(), qcomp.QSGD(1, 512), feedback=True, exact=None)",
        "ValueError: feedback=True around qsgd",
    ),
    "weights diverge": (
        "compress(sharded(), None, qcomp.QSGD(1, 512), weight_changes=True, exact=None)",
        "ValueError: weight_changes is True, but weights=qsgd:levels=1",
    ),
    "replicate": (
        "compress(replicate(network(), mesh=everyone))",
        "ValueError: the model is replicated over 2 ranks, over which FSDP2 sums exactly before it calls any hook: "
        "replicate over a mesh of one rank, and pass the mesh of all ranks as replicas",
    ),
    "replicas": (
        "compress(sharded(), replicas=3)",
        "TypeError: replicas is 3; expected a one-dimensional DeviceMesh",
    ),
    "nonfinite": ("compress(sharded(), nonfinite='skip')", "ValueError: nonfinite is 'skip'"),
    "other settings": (
        "compress(sharded(), qcomp.QSGD(7 + 8 * me, 128), exact=None)",
        "MismatchError: the ranks were not started alike: gradients is ",
    ),
    "unused": (
        "model = sharded(); model[1].uses_extra = False; compress(model, SIGN, **SMALL); backward(model, 0)",
        "ValueError: feedback is True, but some parameters of the module '1' have no gradient",
    ),
    "factor": (
        "model = sharded(); model.set_gradient_divide_factor(3.0); compress(model, **SMALL); backward(model, 0)",
        "ValueError: the model has a gradient_divide_factor",
    ),
    "dtypes": (
        "model = sharded(blocks=False); compress(model, None, qcomp.MinMaxUInt8(), **SMALL); "
        "bytes_ = torch.zeros(8, dtype=torch.uint8); "
        "(group,) = model._get_fsdp_state()._fsdp_param_groups; "
        "group._all_gather_comm(bytes_, bytes_[:4], everyone.get_group())",
        "ValueError: the model has parameters of several dtypes",
    ),
}


def test_models_that_torch_cannot_support_are_refused_on_every_rank(said):
    cases = "".join(
        f"""
def case():
    {code}
text = refusal(case)
assert text.startswith({expected!r}), (text, {expected!r})
"""
        for code, expected in REFUSALS.values()
    )
    said(2, cases)


def test_replicas_that_differ_are_an_error(said):
    said(
        2,
        """
mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("replicas", "alone"))
model = network()
torch.nn.init.constant_(model[3].bias, me)
text = refusal(lambda: compress(replicate(model, mesh=mesh["alone"]), replicas=mesh["replicas"], exact=None))
assert text.startswith("MismatchError: the ranks were not started alike: the parameter '3.bias'"), text
""",
    )


@pytest.mark.slow
def test_residuals_of_rows_are_refused_for_columns(said):
    """Both have equally many elements, but others."""
    said(
        2,
        """
mesh = dist.init_device_mesh("cpu", (1, n), mesh_dim_names=("replicas", "shards"))
def compressed(**along):
    model = fully_shard(torch.nn.Linear(8, 18), mesh=mesh["shards"], **along)
    return compress(model, SIGN, replicas=mesh["replicas"], exact=None)
columns = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}
saved = compressed(**columns).state_dict()
text = refusal(lambda: compressed().load_state_dict(saved))
assert "sharded along the axes [0, 0]; the state has residuals of shards along other axes" in text, text
compressed(**columns).load_state_dict(saved)
along = columns if me else {}
text = refusal(lambda: compressed(**along))
assert "MismatchError" in text and "axes" in text, text
""",
    )


def test_unused_parameters_may_have_zeros(said):
    said(
        2,
        """
model = sharded()
model.set_reduce_scatter_unused_params(True)
model[1].uses_extra = False
compress(model, SIGN, **SMALL)
backward(model, 0)
assert gradients(model)["1.extra.weight"].abs().max() == 0
""",
    )
