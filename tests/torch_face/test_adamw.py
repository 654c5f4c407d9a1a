"""Optimizers that begin with the steps of AdamW take its moments over, and give them back."""

import copy
import io
import warnings

import pytest

torch = pytest.importorskip("torch")

import qcomp.torch  # noqa: E402
from qcomp.comm import run_local  # noqa: E402

SIGN = qcomp.ScaledSign(bucket_size=64)
OF = {
    "OneBitAdam": {"compressor": SIGN, "freeze": 100},
    "QAdam": {"compressor": qcomp.MinMaxUInt8(64), "freeze": 100},
    "ZeroOneAdam": {"compressor": SIGN, "variance_steps": lambda step: step <= 100},
}
every_name = pytest.mark.parametrize("name", OF)


class Network(torch.nn.Module):  # type: ignore[name-defined]  # not exported by name
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(20, 31), torch.nn.Linear(31, 9, bias=False)
        self.unused = torch.nn.Linear(20, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


torch.manual_seed(0)
BEGINNING = Network()


def made(dtype=torch.float32):
    return copy.deepcopy(BEGINNING).to(dtype)


def groups(model):
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.002},
    ]


def ours(name, model, comm, **changes):
    settings = {"lr": 0.01, "exact": None, **OF[name], **changes}
    return getattr(qcomp.torch, name)(groups(model), comm=comm, **settings)


def theirs(model, **changes):
    return torch.optim.AdamW(groups(model), lr=0.01, **changes)


def train(model, optimizer, steps, rank=0, size=1):
    """Make steps with the mean gradient of all ranks, or with this rank's for an optimizer that averages itself."""
    for step in steps:
        of_ranks = range(size) if isinstance(optimizer, torch.optim.AdamW) else [rank]
        for each in of_ranks:
            draws = torch.Generator().manual_seed(1000 * step + each)
            x = torch.randn(8, 20, generator=draws).to(next(model.parameters()).dtype)
            (model(x).square().sum() / len(of_ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def stored(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the variance of .* no longer fits|the variance is frozen after")
        warnings.filterwarnings("ignore", "all gradients of .* were 0")  # of the layer that is not used
        yield


@every_name
def test_each_parameter_keeps_its_own_count(name):
    """A layer that AdamW has used less goes on with its own bias corrections, here and there again."""

    def train_all(optimizer, model, steps):
        for step in steps:
            train(model, optimizer, [step])
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * step)
            optimizer.step()
            optimizer.zero_grad()

    plain, model = made(), made()
    continuous, first = theirs(plain), theirs(model)
    for optimizer, network in ((continuous, plain), (first, model)):
        train(network, optimizer, range(5))  # `unused` has no gradient
        train_all(optimizer, network, range(5, 7))
    here = ours(name, model, qcomp.comm.LocalCommunicator.alone())
    here.load_state_dict(stored(first.state_dict()))
    for optimizer, network in ((continuous, plain), (here, model)):
        train_all(optimizer, network, range(7, 9))
    last = theirs(model)
    last.load_state_dict(stored(here.adamw_state_dict()))
    steps, expected = (
        {number: int(entry["step"]) for number, entry in optimizer.state_dict()["state"].items()}
        for optimizer in (last, continuous)
    )
    assert steps == expected
    assert set(steps.values()) == {13, 4}
    for optimizer, network in ((continuous, plain), (last, model)):
        train_all(optimizer, network, range(9, 11))
    for x, y in zip(bits(model), bits(plain), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(2)
@every_name
@pytest.mark.parametrize("size", [1, 2])
def test_adamw_goes_on_here_and_there_as_if_nothing_had_changed(name, size):
    """Ten steps there, ten here, ten there are thirty steps of AdamW, up to rounding, with groups and schedules."""

    def main(comm):
        plain, model = made(), made()
        continuous, first = theirs(plain), theirs(model)
        train(plain, continuous, range(30), size=size)
        train(model, first, range(10), size=size)
        optimizer = ours(name, model, comm, lr=9.0)
        optimizer.load_state_dict(stored(first.state_dict()))
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.002]
        assert "amsgrad" not in optimizer.param_groups[0]
        assert optimizer.core_state.step == 10
        train(model, optimizer, range(10, 20), comm.rank, size)
        last = theirs(model, weight_decay=9.0)
        last.load_state_dict(stored(optimizer.adamw_state_dict()))
        train(model, last, range(20, 30), size=size)
        for x, y in zip(bits(model), bits(plain), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert last.state[p].keys() == continuous.state[q].keys()
            if last.state[p]:
                assert last.state[p]["step"] == 30
        return bits(model)

    first, *others = run_local(size, main)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@every_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_and_steps_survive_the_way_there_and_back_bit_for_bit(name, dtype):
    def main(comm):
        model = made(dtype)
        first = theirs(model)
        train(model, first, range(5))
        saved = first.state_dict()
        optimizer = ours(name, model, comm)
        optimizer.load_state_dict(saved)
        before = copy.deepcopy(saved)
        again = theirs(model)
        again.load_state_dict(optimizer.adamw_state_dict())
        for p in model.parameters():
            assert first.state[p].keys() == again.state[p].keys()
            assert all(torch.equal(x, again.state[p][key]) for key, x in first.state[p].items())
        train(model, optimizer, range(5, 7))
        for number, entry in before["state"].items():  # steps do not write to what was loaded
            assert all(torch.equal(x, saved["state"][number][key]) for key, x in entry.items())
        return True

    assert run_local(1, main) == [True]


@pytest.mark.quick_cases(2)
@every_name
@pytest.mark.parametrize("freeze", [8, 3])
def test_a_training_that_takes_its_own_moments_over_is_one_without_a_stop(name, freeze):
    """Through the freeze; with a freeze that has passed, the next step freezes."""
    settings = {"freeze": freeze}
    if name == "ZeroOneAdam":
        settings["variance_steps"] = lambda step: step <= 5

    def main(comm):
        model, twin = made(), made()
        optimizer = ours(name, model, comm, **settings | {"freeze": 8})
        train(model, optimizer, range(15), comm.rank)
        exact = ours("OneBitAdam", twin, comm)
        train(twin, exact, range(5), comm.rank)
        other = ours(name, twin, comm, **settings)
        other.load_state_dict(exact.adamw_state_dict())
        train(twin, other, range(5, 15), comm.rank)
        assert other.core_state.stage == "compressed"
        return all(map(torch.equal, bits(model), bits(twin)))

    # A variance that is not updated any more is the same frozen and not.
    assert run_local(2, main) == [freeze == 8 or name == "ZeroOneAdam"] * 2


def test_the_ranks_agree_on_the_moments():
    """Other moments on some rank, or a state that does not fit there, are errors on every rank, and nothing changes."""

    def main(comm):
        model = made()
        first = theirs(model)
        train(model, first, range(3))
        optimizer = ours("OneBitAdam", model, comm)
        saved = copy.deepcopy(first.state_dict())
        told = []
        for change in (
            lambda: saved["state"][0]["exp_avg"].add_(1),
            lambda: saved["state"][0].update(exp_avg=torch.ones(2, 2)),
        ):
            if comm.rank == 1:
                change()
            try:
                optimizer.load_state_dict(saved)
            except (ValueError, qcomp.MismatchError) as error:
                told.append(f"{type(error).__name__}: {error}")
            assert optimizer.core_state.step == 0
            assert "compressor" in optimizer.param_groups[0]
        return told

    zero, one = run_local(2, main)
    assert "differ in ['momentum.0'" in zero[0]
    assert zero[0] == one[0]
    assert zero[1].startswith(
        "MismatchError: rank 1 cannot load its state: ValueError: state_dict does not fit: AdamW has exp_avg"
    )
    assert one[1].startswith(
        "ValueError: state_dict does not fit: AdamW has exp_avg of '0' with shape (2, 2)"
    )


def changed(saved, **settings):
    for group in saved["param_groups"]:
        group.update(settings)
    return saved


def with_steps(saved, number, step):
    saved["state"][number]["step"] = torch.tensor(step)
    return saved


def of_amsgrad():
    model = made()
    optimizer = theirs(model, amsgrad=True)
    train(model, optimizer, range(2))
    return optimizer.state_dict()


def of_sgd():
    model = made()
    optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_dict()


def plain():
    model = made()
    optimizer = theirs(model)
    train(model, optimizer, range(3))
    return copy.deepcopy(optimizer.state_dict())


def renamed():
    model = made()
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.01)
    return optimizer.state_dict()


REFUSED = {
    "amsgrad": (of_amsgrad, "param_groups[0] of AdamW has amsgrad=True; expected False"),
    "maximize": (
        lambda: changed(plain(), maximize=True),
        "param_groups[0] of AdamW has maximize=True; expected False",
    ),
    "SGD": (of_sgd, "not those of an optimizer of qcomp"),
    "half a step": (
        lambda: with_steps(plain(), 0, 1.5),
        "AdamW has step=1.5 of '0'; expected a whole number >= 0",
    ),
    "no step": (lambda: with_steps(plain(), 0, torch.nan), "AdamW has step=nan of '0'"),
    "coupled decay": (
        lambda: changed(plain(), decoupled_weight_decay=False),
        "of Adam has decoupled_weight_decay=False; expected True, as this optimizer has: make it with",
    ),
    "other groups": (
        lambda: torch.optim.AdamW(made().parameters()).state_dict(),
        "AdamW has groups of [5] parameters; this optimizer has [3, 2]",
    ),
    "a variance below 0": (
        lambda: (saved := plain())["state"][0]["exp_avg_sq"].sub_(1) is None or saved,
        "AdamW has exp_avg_sq of '0' with a value that is negative or not finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    make, expected = REFUSED[case]

    def main(comm):
        optimizer = ours("OneBitAdam", made(), comm)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match="state_dict does not fit") as caught:
            optimizer.load_state_dict(make())
        assert str(optimizer.state_dict()) == str(before)
        return str(caught.value)

    for told in run_local(2, main):
        assert expected in told


def test_parameters_in_another_order_are_refused():
    def main(comm):
        optimizer = qcomp.torch.OneBitAdam(made().named_parameters(), comm=comm, exact=None, freeze=100)
        with pytest.raises(
            ValueError, match=r"has 'unused.bias' at position 0, this optimizer 'first.weight'"
        ):
            optimizer.load_state_dict(renamed())
        return True

    assert run_local(1, main) == [True]


@pytest.mark.parametrize("name", ["CompressedSGD", "OneBitLamb", "Muon"])
def test_other_optimizers_refuse_the_state_of_adamw(name):
    def main(comm):
        optimizer = getattr(qcomp.torch, name)(made().parameters(), comm=comm)
        saved = torch.optim.AdamW(made().parameters()).state_dict()
        with pytest.raises(ValueError, match="OneBitAdam, QAdam and ZeroOneAdam also take"):
            optimizer.load_state_dict(saved)
        return hasattr(optimizer, "adamw_state_dict")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_local(1, main) == [False]


@every_name
def test_a_compressed_stage_gives_no_moments_back(name):
    settings = {"freeze": 2} | ({"variance_steps": lambda step: step <= 2} if name == "ZeroOneAdam" else {})

    def main(comm):
        model = made()
        optimizer = ours(name, model, comm, **settings)
        train(model, optimizer, range(4))
        with pytest.raises(
            ValueError,
            match=r"adamw_state_dict was called in the stage '.*', after 4 steps; expected 'warmup'",
        ):
            optimizer.adamw_state_dict()
        return True

    assert run_local(1, main) == [True]


def test_zero_one_adam_goes_on_with_compressed_steps_where_its_schedule_says_so():
    """By default it is compressed after some steps; the variance of AdamW was updated in each of them."""

    def main(comm):
        model = made()
        first = theirs(model)
        train(model, first, range(41))
        optimizer = ours("ZeroOneAdam", model, comm, variance_steps=qcomp.DoublingIntervals(16))
        optimizer.load_state_dict(first.state_dict())
        state = optimizer.core_state
        assert (state.stage, state.numbers["updates"], state.step) == ("compressed", 41, 41)
        train(model, optimizer, range(41, 60), comm.rank)
        return bits(model)

    one, other = run_local(2, main)
    assert all(map(torch.equal, one, other))


def test_a_state_of_half_precision_is_kept_in_float32():
    def main(comm):
        model = made(torch.bfloat16)
        first = theirs(model)
        train(model, first, range(3))
        optimizer = ours("OneBitAdam", model, comm)
        optimizer.load_state_dict(first.state_dict())
        train(model, optimizer, range(3, 5))
        saved = optimizer.adamw_state_dict()
        assert saved["state"][0]["exp_avg"].dtype == torch.float32
        last = theirs(model)
        last.load_state_dict(saved)
        assert last.state[model.first.weight]["exp_avg"].dtype == torch.bfloat16
        return True

    assert run_local(1, main) == [True]


def test_coupled_weight_decay_is_that_of_adam():
    def main(comm):
        plain, model = made(), made()
        options = {"lr": 0.01, "weight_decay": 0.1}
        continuous = torch.optim.Adam(plain.parameters(), **options)
        first = torch.optim.Adam(model.parameters(), **options)
        for net, opt in ((plain, continuous), (model, first)):
            _adam_steps(net, opt, range(5))
        optimizer = qcomp.torch.OneBitAdam(
            model.parameters(), exact=None, freeze=100, decoupled_weight_decay=False, comm=comm
        )
        optimizer.load_state_dict(first.state_dict())
        _adam_steps(model, optimizer, range(5, 10))
        last = torch.optim.Adam(model.parameters())
        last.load_state_dict(optimizer.adamw_state_dict())
        _adam_steps(model, last, range(10, 15))
        _adam_steps(plain, continuous, range(5, 15))
        for x, y in zip(bits(model), bits(plain), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        return True

    assert run_local(1, main) == [True]


def _adam_steps(model, optimizer, steps):
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        model(torch.randn(8, 20, generator=draws)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_frozen_parameter_has_no_part():
    """It has moments in neither, or is left out of those that are taken over."""

    def main(comm):
        model = made()
        first = theirs(model)
        train(model, first, range(3))
        model.first.bias.requires_grad_(False)
        optimizer = ours("OneBitAdam", model, comm)
        optimizer.load_state_dict(first.state_dict())
        train(model, optimizer, range(3, 5))
        saved = optimizer.adamw_state_dict()
        assert sorted(saved["state"]) == [0, 1]
        theirs(model).load_state_dict(saved)
        return True

    assert run_local(1, main) == [True]


@pytest.mark.slow
def test_under_distributed_data_parallel(torch_ranks):
    """With ``model=``, 1-bit Adam goes on from AdamW as without, and gives the moments back."""
    script = """
import copy, os, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import qcomp, qcomp.torch
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "the variance is frozen after|the variance of .* no longer fits")
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=me, world_size=n)
def wrapped():
    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 5))
    return DistributedDataParallel(network)
def train(model, optimizer, steps):
    for step in steps:
        draws = torch.Generator().manual_seed(1000 * step + me)
        model(torch.randn(6, 33, generator=draws)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
for freeze, name in ((100, "OneBitAdam"), (8, "OneBitAdam"), (100, "ZeroOneAdam")):
    plain, model = wrapped(), wrapped()
    continuous, first = (torch.optim.AdamW(net.parameters(), lr=0.01) for net in (plain, model))
    train(model, first, range(5))
    train(plain, continuous, range(15))
    options = {"variance_steps": lambda step: step != 6} if name == "ZeroOneAdam" else {}
    optimizer = getattr(qcomp.torch, name)(model.parameters(), exact=None, freeze=freeze, model=model, **options)
    optimizer.load_state_dict(first.state_dict())
    train(model, optimizer, range(5, 10))
    if freeze == 8 or name == "ZeroOneAdam":
        assert optimizer.core_state.stage == "compressed", optimizer.core_state.stage
        continue
    last = torch.optim.AdamW(model.parameters())
    last.load_state_dict(optimizer.adamw_state_dict())
    bare = DistributedDataParallel(model.module)
    train(bare, last, range(10, 15))
    for x, y in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
"""
    torch_ranks(2, script)
