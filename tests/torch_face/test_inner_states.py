"""What an outer loop does to the states of torch's optimizers: exact identities; ranks are threads."""

import warnings

import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.outer import InnerStates

torch = pytest.importorskip("torch")
import qcomp.torch  # noqa: E402
from qcomp.torch import inner_states as module  # noqa: E402
from qcomp.torch.positions import Positions  # noqa: E402
from tests.torch_face.test_outer import network, one_step, train  # noqa: E402

EVERY = 3
LOOP = qcomp.outer.local_sgd(EVERY)
MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def held(optimizer, model, names=(*MOMENTS, "step")):
    """Return the entries of all states, as they are now."""
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    return {name: [s[name].detach().clone() if name in s else None for s in states] for name in names}


def same(xs, ys):
    return all(
        x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(xs, ys, strict=True)
    )


def run(
    inner_state, steps=EVERY, size=2, *, loop=LOOP, optimizers=adamw, names=(*MOMENTS, "step"), **options
):
    """Train, and return what the states of each rank hold, and the parameters."""

    def rank_main(comm):
        model, optimizer, _ = train(
            comm, loop, steps, optimizers=optimizers, inner_state=inner_state, buffers=False, **options
        )
        return held(optimizer, model, names), [p.detach().clone() for p in model.parameters()]

    return run_local(size, rank_main, timeout=60)


@pytest.mark.parametrize("size", [2, 3])
def test_an_average_is_the_mean_of_the_states_bit_for_bit(size):
    kept, averaged = run("keep", size=size), run("average", size=size)
    for name in MOMENTS:
        ranks = [states[name] for states, _ in kept]
        total = [sum(xs[1:], xs[0]) / size for xs in zip(*ranks, strict=True)]
        for states, _ in averaged:
            assert same(states[name], total)
    for (before, p), (after, q) in zip(kept, averaged, strict=True):
        assert same(before["step"], after["step"])
        assert same(p, q)


def test_states_of_equal_ranks_stay():
    """All ranks train on the same data, so that a mean of two changes no bit."""

    def rank_main(comm):
        found = []
        for inner_state in ("keep", "average", InnerStates({"exp_avg": 2, "exp_avg_sq": 1})):
            model = network()
            optimizer = adamw(model)
            qcomp.torch.OuterLoop(model, optimizer, LOOP, comm=comm, inner_state=inner_state)
            for step in range(5):
                one_step(model, optimizer, 0, step)
            found.append((held(optimizer, model), list(model.parameters())))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for (kept, p), *others in run_local(2, rank_main, timeout=60):
            for other, q in others:
                assert all(same(kept[name], other[name]) for name in kept)
                assert same(p, q)


def test_names_have_periods_of_their_own():
    for steps, due in ((2, {"exp_avg_sq"}), (4, set(MOMENTS)), (5, set())):
        (one, _), (other, _) = run(InnerStates({"exp_avg": 4, "exp_avg_sq": 2}), steps)
        assert {name for name in MOMENTS if same(one[name], other[name])} == due


def test_hooks_do_what_the_core_does():
    inner = InnerStates({"exp_avg": 6, "exp_avg_sq": 2}, compressor=qcomp.Cast("bfloat16"))

    def by_hand(comm):
        model = network()
        optimizer, params = adamw(model), list(model.parameters())
        state = LOOP.init([p.detach() for p in params], comm, [name for name, _ in model.named_parameters()])
        for step in range(7):
            one_step(model, optimizer, comm.rank, step)
            new, state = LOOP.step([p.detach() for p in params], state, comm)
            means = inner.step(held(optimizer, model, MOMENTS), LOOP, state, comm)
            for index, p in enumerate(params):
                p.data.copy_(new[index])
                for name in MOMENTS:
                    optimizer.state[p][name].copy_(means[name][index])
        return held(optimizer, model), [p.detach().clone() for p in params]

    for (a, p), (b, q) in zip(run_local(2, by_hand, timeout=60), run(inner, 7), strict=True):
        assert all(same(a[name], b[name]) for name in a)
        assert same(p, q)


@pytest.mark.parametrize(
    "loop", [LOOP, qcomp.outer.diloco(EVERY, delay=1, mixing=0.5)], ids=["at once", "delayed"]
)
def test_a_reset_makes_a_new_optimizer(loop):
    def anew(comm):
        model = network()
        params = list(model.parameters())
        optimizer = adamw(model)
        state = loop.init([p.detach() for p in params], comm, [name for name, _ in model.named_parameters()])
        for step in range(8):
            one_step(model, optimizer, comm.rank, step)
            rounds = state.numbers["rounds.0"]
            new, state = loop.step([p.detach() for p in params], state, comm)
            for p, value in zip(params, new, strict=True):
                p.data.copy_(value)
            if state.numbers["rounds.0"] > rounds:
                optimizer = adamw(model)
        return held(optimizer, model), [p.detach().clone() for p in params]

    for (a, p), (b, q) in zip(run_local(2, anew, timeout=60), run("reset", 8, loop=loop), strict=True):
        assert all(same(a[name], b[name]) for name in a)
        assert same(p, q)


@pytest.mark.parametrize("inner_state", ["average", "reset"])
def test_states_go_with_the_fragment_of_their_parameter(inner_state):
    loop = qcomp.outer.local_sgd(4, fragments=2)

    def rank_main(comm):
        model = network()
        optimizer = adamw(model)
        outer = qcomp.torch.OuterLoop(model, optimizer, loop, comm=comm, inner_state=inner_state)
        found = []
        for step in range(4):
            one_step(model, optimizer, comm.rank, step)
            found.append(held(optimizer, model, ("exp_avg",))["exp_avg"])
        members = [loop.members(outer.core_state, fragment) for fragment in range(2)]
        return found, members

    (one, members), (other, _) = run_local(2, rank_main, timeout=60)
    for step, fragment in enumerate([None, 0, None, 1]):
        pairs = enumerate(zip(one[step], other[step], strict=True))
        equal = {i for i, (x, y) in pairs if (x is None and y is None) or torch.equal(x, y)}
        expected = set() if fragment is None else set(members[fragment])
        if inner_state == "reset" and step == 2:
            expected = set()  # each has made a step since
        assert equal == expected


def test_several_optimizers_and_states_of_every_kind():
    """Each optimizer of torch whose states have means; the names differ, and some have no state."""

    def two(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return [
            torch.optim.Muon(matrices, lr=0.01),
            torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=0.01),
        ]

    def rank_main(comm):
        model, (muon, _), _ = train(comm, LOOP, EVERY, optimizers=two, inner_state="average")
        return held(muon, model, ("momentum_buffer",))["momentum_buffer"]

    one, other = run_local(2, rank_main, timeout=60)
    assert sum(x is not None for x in one) == 2
    assert same(one, other)


KINDS = {
    "Adadelta": ("square_avg", "acc_delta"),
    "Adagrad": ("sum",),
    "Adam": MOMENTS,
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": MOMENTS,
    "RAdam": MOMENTS,
    "RMSprop": ("square_avg",),
    "Rprop": ("prev", "step_size"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_torch(kind):
    names = KINDS[kind]

    def optimizers(model):
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01)

    kept, averaged = (
        run(choice, optimizers=optimizers, names=(*names, "step")) for choice in ("keep", "average")
    )
    for name in names:
        expected = [(a + b) / 2 for a, b in zip(kept[0][0][name], kept[1][0][name], strict=True)]
        assert same(averaged[0][0][name], expected)
    assert same(averaged[1][0]["step"], kept[1][0]["step"])


@pytest.mark.parametrize("name", ["Muon", "CompressedSGD"])
def test_optimizers_of_qcomp(name):
    def rank_main(comm):
        alone = {"comm": qcomp.comm.LocalCommunicator.alone()}

        def made(model):
            if name == "Muon":
                return qcomp.torch.Muon(model.named_parameters(), lr=0.01, **alone)
            options = {"momentum": 0.5, "exact": qcomp.ExactBelow(10)}
            return qcomp.torch.CompressedSGD(model.parameters(), lr=0.01, **options, **alone)

        model, optimizer, _ = train(comm, LOOP, EVERY, optimizers=made, inner_state="average")
        shown = held(optimizer, model, ("momentum",))["momentum"]
        return shown, [m.clone() for m in optimizer.core_state.momentum]

    (shown, core), (other, _) = run_local(2, rank_main, timeout=60)
    assert same(shown, other)
    assert same(shown, core)
    assert any(x.any() for x in shown)


def test_a_parameter_without_a_gradient_on_a_rank_keeps_its_state():
    def rank_main(comm):
        model = network()
        model.rare = torch.nn.Parameter(torch.ones(2))
        optimizer = adamw(model)
        qcomp.torch.OuterLoop(model, optimizer, LOOP, comm=comm, inner_state="average")
        for step in range(EVERY):
            optimizer.zero_grad()
            used = model(torch.ones(4, 6) * (comm.rank + step + 1)).square().mean()
            (used + model.rare.square().sum() if comm.rank else used).backward()
            optimizer.step()
        return optimizer.state.get(model.rare), held(optimizer, model)["exp_avg"][1]

    (none, one), (own, other) = run_local(2, rank_main, timeout=60)
    assert none is None
    assert own["exp_avg"].all()
    assert torch.equal(one, other)


def test_moments_meet_in_every_fragment():
    """Second moments in a period that divides that of first ones: so it warns of nothing, and warnings are errors."""
    run(InnerStates({"exp_avg": 8, "exp_avg_sq": 4}), 17, loop=qcomp.outer.local_sgd(3, fragments=3))


def test_it_warns_of_first_moments_without_second_ones():
    """A rank without gradients has second moments of 0, by which AdamW would divide the first ones of others."""

    def rank_main(comm, periods):
        model = network()
        model.rare = torch.nn.Parameter(torch.ones(2))
        optimizer = adamw(model)
        qcomp.torch.OuterLoop(model, optimizer, LOOP, comm=comm, inner_state=InnerStates(periods))
        for step in range(2):
            optimizer.zero_grad()
            used = model(torch.ones(4, 6) * (comm.rank + step + 1)).square().mean()
            (used + model.rare.square().sum() * comm.rank).backward()
            optimizer.step()
        state = optimizer.state[model.rare]
        return float((state["exp_avg"].abs() / (state["exp_avg_sq"].sqrt() + 1e-8)).max())

    with pytest.warns(UserWarning, match="exp_avg is averaged in a step without exp_avg_sq"):
        apart, _ = run_local(2, lambda comm: rank_main(comm, {"exp_avg": 2, "exp_avg_sq": 3}), timeout=60)
    together, _ = run_local(2, lambda comm: rank_main(comm, {"exp_avg": 2, "exp_avg_sq": 1}), timeout=60)
    assert together < 10
    assert apart > 1e6


class WithMasters(torch.optim.Optimizer):  # type: ignore[name-defined]  # not exported by name
    """SGD with momentum on a float32 copy of bfloat16 parameters."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(
                        master=p.detach().float(),
                        momentum=torch.zeros(p.shape),
                        step=0,
                        table=[p.new_ones(2)],
                    )
                state["momentum"].mul_(0.5).add_(p.grad.float())
                state["master"].sub_(state["momentum"], alpha=group["lr"])
                p.copy_(state["master"])


def test_copies_of_parameters_move_with_them_and_are_not_averaged():
    def rank_main(comm, inner_state):
        model = torch.nn.Linear(6, 5, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            model.weight.copy_(torch.arange(30.0).reshape(5, 6) / 64)
        optimizer = WithMasters(model.parameters())
        qcomp.torch.OuterLoop(model, optimizer, LOOP, comm=comm, inner_state=inner_state)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(EVERY):
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=generator).bfloat16()).float().square().sum().backward()
            optimizer.step()
        return {name: optimizer.state[model.weight][name].clone() for name in ("master", "momentum")}

    kept, averaged = (
        run_local(2, lambda comm, choice=choice: rank_main(comm, choice), timeout=60)
        for choice in ("keep", "average")
    )
    for before, after in zip(kept, averaged, strict=True):
        assert torch.equal(before["master"], after["master"])
    assert not torch.equal(kept[0]["master"], kept[1]["master"])
    assert torch.equal(averaged[0]["momentum"], averaged[1]["momentum"])


def test_a_run_resumes_within_a_period_bit_for_bit():
    inner = InnerStates({"exp_avg": 8, "exp_avg_sq": 4})

    def begun(comm):
        model = network()
        optimizer = adamw(model)
        return model, optimizer, qcomp.torch.OuterLoop(model, optimizer, LOOP, comm=comm, inner_state=inner)

    def rank_main(comm):
        model, optimizer, outer = begun(comm)
        for step in range(10):
            if step == 5:
                saved = [one.state_dict() for one in (model, optimizer, outer)]
                model, optimizer, outer = begun(comm)
                for one, of_one in zip((model, optimizer, outer), saved, strict=True):
                    one.load_state_dict(of_one)
            one_step(model, optimizer, comm.rank, step)
        return held(optimizer, model)

    for resumed, (whole, _) in zip(run_local(2, rank_main, timeout=60), run(inner, 10), strict=True):
        assert all(same(resumed[name], whole[name]) for name in whole)


def test_a_count_of_a_parameter_without_axes_stays():
    def rank_main(comm):
        scale = torch.nn.Parameter(torch.ones(()))
        optimizer = torch.optim.AdamW([scale], lr=0.05)
        qcomp.torch.OuterLoop([scale], optimizer, LOOP, comm=comm, inner_state="average")
        for step in range(EVERY):
            optimizer.zero_grad()
            (scale * (comm.rank + step)).square().backward()
            optimizer.step()
            if not step:
                optimizer.state[scale]["step"] += 10 * comm.rank  # as a rank that has made steps before
        return optimizer.state[scale]

    one, other = run_local(2, rank_main, timeout=60)
    assert [float(state["step"]) for state in (one, other)] == [EVERY, EVERY + 10]
    assert torch.equal(one["exp_avg"], other["exp_avg"])


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


def adagrad(model):
    return torch.optim.Adagrad(model.parameters())


def own(model):
    return qcomp.torch.CompressedSGD(
        model.parameters(), lr=0.1, comm=qcomp.comm.LocalCommunicator.alone(), exact=qcomp.ExactBelow(10)
    )


@pytest.mark.parametrize(
    ("inner_state", "optimizers", "loop", "message"),
    [
        ("mean", adamw, LOOP, "inner_state is 'mean'; expected 'keep', 'average', 'reset', or periods"),
        ({"exp_avg": 2}, adamw, LOOP, "or periods, such as qcomp.outer.InnerStates"),
        (
            "average",
            adamw,
            qcomp.OuterLoop(every=4, delay=1),
            "delay=1; expected 0 if inner states are averaged",
        ),
        ("average", lbfgs, LOOP, "optimizer 0 is a LBFGS"),
        ("average", lambda m: [adamw(m), adamw(m)], LOOP, "two optimizers move the same parameter"),
        ("reset", adagrad, LOOP, "optimizer 0 is a Adagrad, which makes its state in its constructor"),
        ("reset", own, LOOP, "optimizer 0 is a CompressedSGD"),
    ],
)
def test_what_does_not_fit_is_refused_when_the_loop_is_made(inner_state, optimizers, loop, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each case has its message
        run(inner_state, 0, 1, loop=loop, optimizers=optimizers)
    assert message in str(caught.value)


def test_ranks_with_other_choices_are_refused():
    def rank_main(comm):
        model = network()
        choice = "average" if comm.rank else "keep"
        with pytest.raises(qcomp.MismatchError, match="inner_state"):
            qcomp.torch.OuterLoop(model, adamw(model), LOOP, comm=comm, inner_state=choice)

    run_local(2, rank_main, timeout=60)


def test_a_name_that_no_state_has_is_an_error_on_every_rank():
    def rank_main(comm):
        model = network()
        optimizer = adamw(model)
        qcomp.torch.OuterLoop(model, optimizer, LOOP, comm=comm, inner_state=InnerStates({"exp_avgs": 1}))
        with pytest.raises(
            ValueError,
            match=r"'exp_avgs', but no inner optimizer keeps such a state .*'exp_avg', 'exp_avg_sq'",
        ):
            one_step(model, optimizer, comm.rank, 0)

    run_local(2, rank_main, timeout=60)


def forgets_all(self, means, before, after):
    for entry, mean in means:
        entry.copy_(mean)
    if after.numbers != before.numbers and self._resets:
        for optimizer in self._trained.optimizers:
            optimizer.state.clear()


def writes_nothing(self, means, before, after):
    pass


@pytest.mark.parametrize(
    ("place", "broken", "test"),
    [
        ((module, "_COUNT"), "count", test_a_count_of_a_parameter_without_axes_stays),
        (
            (module.InnerOfTorch, "write"),
            forgets_all,
            lambda: test_states_go_with_the_fragment_of_their_parameter("reset"),
        ),
        (
            (module.InnerOfTorch, "write"),
            writes_nothing,
            lambda: test_an_average_is_the_mean_of_the_states_bit_for_bit(2),
        ),
        ((module.InnerOfTorch, "write"), writes_nothing, lambda: test_a_reset_makes_a_new_optimizer(LOOP)),
        ((Positions, "has"), lambda *_: False, test_copies_of_parameters_move_with_them_and_are_not_averaged),
    ],
)
def test_broken_versions_are_caught(monkeypatch, place, broken, test):
    monkeypatch.setattr(*place, broken)
    with pytest.raises(AssertionError):
        test()
