"""Optimizers that keep parameters in their states: an outer loop moves these too, and nothing else."""

import copy

import pytest

import qcomp
from qcomp.comm import run_local

torch = pytest.importorskip("torch")
import qcomp.torch  # noqa: E402
from qcomp.torch import positions  # noqa: E402
from qcomp.torch.positions import Positions  # noqa: E402
from qcomp.torch.trained_parameters import Trained  # noqa: E402

ALONE = qcomp.comm.LocalCommunicator.alone()


class Masters(torch.optim.Optimizer):  # type: ignore[name-defined]  # not exported by name
    """SGD on float32 copies of the parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    master = (
                        self.state[p]
                        .setdefault("inside", {})
                        .setdefault("master", p.detach().float().clone())
                    )
                    master -= group["lr"] * p.grad.float()
                    p.copy_(master)


class SlowWeights(Masters):
    """Lookahead: every third step goes half of the way."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            if self.steps % 3 == 0:
                slow = self.state[p].setdefault("slow", p.clone())
                slow += 0.5 * (p - slow)
                p.copy_(slow)


class ScheduleFree(Masters):
    """Parameters between an average and a sequence z, which has their values only after the first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        share, rate = 1 / self.steps, self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            z = self.state[p].setdefault("z", p.clone())
            p.lerp_(z, share)
            p.add_(p.grad, alpha=rate * (0.9 * (1 - share) - 1))
            z.sub_(p.grad, alpha=rate)


class Beside(Masters):
    """Float32 copies beside the state, in groups of their own, as in apex."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        own = self.param_groups[0]["params"]
        self.groups_of_masters = [{"params": [p.detach().float().clone() for p in own]}]

    @torch.no_grad()
    def step(self, closure=None):
        for p, master in zip(
            self.param_groups[0]["params"], self.groups_of_masters[0]["params"], strict=True
        ):
            p.copy_(master.sub_(p.grad, alpha=self.param_groups[0]["lr"]))


class FromStart(Masters):
    """SGD that keeps where it has started, as Prodigy does; its rate rises from zero."""

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("start", p.clone())
            p.sub_(p.grad, alpha=rate * self.state[p].setdefault("steps", 0))
            self.state[p]["steps"] += 1


def fresh(dtype=torch.float32):
    """Three parameters, one of them zeros."""
    values = [torch.linspace(0, 1, 6), torch.zeros(4), torch.tensor(1.0)]
    return [torch.nn.Parameter(x.to(dtype)) for x in values]


def slopes(rank):
    """The constant gradients of a rank; of rank None the mean of both."""
    if rank is None:
        return [(a + b) / 2 for a, b in zip(slopes(0), slopes(1), strict=True)]
    return [torch.linspace(-1, 2, 6) * (1 + rank), torch.linspace(1, 0, 4) - rank, torch.tensor(0.5 - rank)]


def trained(make, loop, steps, *, comm=None, dtype=torch.float32):
    """Return the parameters after each step, the parameters, the optimizer and the loop.

    Without a communicator, a single rank trains on the mean gradient.
    """
    params, rank = fresh(dtype), None if comm is None else comm.rank
    optimizer = make(params)
    outer = None if loop is None else qcomp.torch.OuterLoop(params, optimizer, loop, comm=comm)
    trail = []
    for _ in range(steps):
        for p, slope in zip(params, slopes(rank), strict=True):
            p.grad = slope.to(dtype)
        optimizer.step()
        trail.append([p.detach().clone() for p in params])
    return trail, params, optimizer, outer


def known(outer):
    return outer._trained.positions.known


@pytest.mark.parametrize("every", [4, 5])
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (Masters, (0, ("inside", "master"))),
        (SlowWeights, (0, ("slow",))),
        (ScheduleFree, (0, ("z",))),
        (lambda params: torch.optim.ASGD(params, lr=0.1, lambd=0.0, t0=3), (0, ("ax",))),
    ],
    ids=["masters", "slow weights", "schedule-free", "averages"],
)
def test_optimizers_that_are_linear_train_as_one_on_the_mean_gradient(make, place, every):
    """The mean over ranks of each position is what a single rank has; so is the result of each exchange."""

    def rank_main(comm):
        trail, _, optimizer, outer = trained(make, qcomp.outer.local_sgd(every), 20, comm=comm)
        assert known(outer) == {place}
        return trail, [dict(positions.entries(state))[place[1]].clone() for state in optimizer.state.values()]

    (one, own), (_, other) = run_local(2, rank_main, timeout=20)
    expected, _, optimizer, _ = trained(make, None, 20)
    for step in range(every - 1, 20, every):
        for p, q in zip(one[step], expected[step], strict=True):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=0)
    for a, b, state in zip(own, other, optimizer.state.values(), strict=True):
        torch.testing.assert_close((a + b) / 2, dict(positions.entries(state))[place[1]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "loop",
    [
        qcomp.outer.local_sgd(3),
        qcomp.OuterLoop(every=4, fragments=2, delay=1, mixing=0.5),
        qcomp.OuterLoop(every=2, warmup=3, outer=qcomp.SGD(learning_rate=0.7, momentum=0.9)),
    ],
    ids=["plain", "streaming", "warm-up"],
)
def test_masters_are_their_parameters_after_each_exchange(loop, dtype):
    """Up to what the parameters' precision hides, which stays: less than a unit in their last place."""

    def rank_main(comm):
        params = fresh(dtype)
        optimizer = Masters(params)
        qcomp.torch.OuterLoop(params, optimizer, loop, comm=comm)
        for _ in range(9):
            for p, slope in zip(params, slopes(comm.rank), strict=True):
                p.grad = slope.to(dtype)
            optimizer.step()
            for p in params:
                master = optimizer.state[p]["inside"]["master"]
                unit = torch.finfo(dtype).eps * p.detach().abs().clamp(min=0.25)
                assert bool(((master - p).abs() <= unit).all())
                if dtype == torch.float32:
                    assert torch.equal(master, p)
        return [p.tolist() for p in params]

    one, other = run_local(2, rank_main, timeout=20)
    assert loop.mixing or loop.warmup or one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_constant_parameters_that_equal_their_copies_are_moved(dtype):
    """Two ranks with gradients of 1 and 2: the mean moves by 0.15 a step, and a rank by 0.1 or 0.2."""

    def rank_main(comm):
        p = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
        optimizer, trail = Masters([p]), []
        qcomp.torch.OuterLoop([("p", p)], optimizer, qcomp.outer.local_sgd(5), comm=comm)
        for _ in range(20):
            p.grad = torch.full_like(p, 1.0 + comm.rank)
            optimizer.step()
            trail.append(p[0].item())
        return trail

    for rank, found in enumerate(run_local(2, rank_main, timeout=20)):
        ends = [0.0, -0.75, -1.5, -2.25, -3.0]
        assert found[4::5] == pytest.approx(ends[1:], abs=1e-2)
        assert found[::5] == pytest.approx([end - 0.1 * (1 + rank) for end in ends[:-1]], abs=1e-2)


class MadeAtStart(Masters):
    """Copies that are there before the first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"inside": {"master": p.detach().float().clone()}}


@pytest.mark.parametrize("make", [MadeAtStart, Beside])
def test_copies_begin_with_the_parameters_of_rank_0(make):
    """Else the first step would go back to those with which a rank has made its optimizer."""

    def rank_main(comm):
        params = fresh(torch.bfloat16)
        with torch.no_grad():
            params[0] += comm.rank
        optimizer = make(params)
        qcomp.torch.OuterLoop(params, optimizer, qcomp.outer.local_sgd(2), comm=comm)
        for _ in range(2):
            for p in params:
                p.grad = torch.full_like(p, 0.5 + comm.rank)
            optimizer.step()
        return params[0].tolist()

    first, second = run_local(2, rank_main, timeout=20)
    assert first == second
    assert first == pytest.approx((fresh()[0] - 0.2).tolist(), abs=1e-2)


@pytest.mark.parametrize("every", [1, 3])
def test_copies_beside_the_state_are_moved(every):
    def rank_main(comm):
        trail, params, optimizer, _ = trained(Beside, qcomp.outer.local_sgd(every), 6, comm=comm)
        return trail, params, optimizer.groups_of_masters[0]["params"]

    (one, params, masters), (other, *_) = run_local(2, rank_main, timeout=20)
    expected, *_ = trained(Beside, None, 6)
    for step in range(every - 1, 6, every):
        for p, q, r in zip(one[step], other[step], expected[step], strict=True):
            assert torch.equal(p, q)
            torch.testing.assert_close(p, r, atol=1e-5, rtol=0)
    assert all(torch.equal(p, master) for p, master in zip(params, masters, strict=True))


@pytest.mark.parametrize("every", [1, 3])
def test_a_start_stays_where_it_was(every):
    """Parameters that have not moved yet equal it, as after a first step with a rate of zero."""

    def rank_main(comm):
        _, params, optimizer, outer = trained(FromStart, qcomp.outer.local_sgd(every), 6, comm=comm)
        assert known(outer) == set()
        return [optimizer.state[p]["start"] for p in params]

    for found in run_local(2, rank_main, timeout=20):
        assert all(torch.equal(x, p) for x, p in zip(found, fresh(), strict=True))


OTHERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "no rate": lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=1.0),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "qcomp": lambda params: qcomp.torch.CompressedSGD(params, lr=0.1, exact=None, comm=ALONE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_states_are_left_alone(name):
    """Also those of parameters without a gradient, ones and zeros, and of a parameter of one number."""

    def rank_main(comm):
        params = [*fresh(), torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))]
        optimizer = OTHERS[name](params)
        optimizer.of_the_script = [params, torch.ones(3)]
        optimizer.of_the_script.append(optimizer.of_the_script)  # which holds itself
        outer = qcomp.torch.OuterLoop(params, optimizer, qcomp.outer.local_sgd(2), comm=comm)
        found = outer._trained.positions
        moves, move = [], found.move
        found.move = lambda p, new: moves.append(found._of(p)) or move(p, new)
        for step in range(6):
            for p, slope in zip(params, slopes(comm.rank), strict=False):
                p.grad = slope * (step + 1)
            for p in params[3:]:
                p.grad = torch.zeros_like(p) if comm.rank else None
            optimizer.step()
        assert len(moves) >= 9 or name == "no rate"
        assert not any(moves)
        return known(outer)

    expected = {(0, ("anchor",))} if name == "qcomp" else set()
    assert run_local(2, rank_main, timeout=20) == [expected] * 2


def test_a_momentum_of_zero_does_not_follow_a_parameter_of_zero():
    """One rank does not use it, the other moves it."""

    def rank_main(comm):
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        qcomp.torch.OuterLoop([p], optimizer, qcomp.outer.local_sgd(2), comm=comm)
        for _ in range(2):
            p.grad = torch.full((3,), float(comm.rank))
            optimizer.step()
        return p.tolist(), optimizer.state[p]["momentum_buffer"].tolist()

    (moved, momentum), _ = run_local(2, rank_main, timeout=20)
    assert moved[0] != 0
    assert momentum == [0, 0, 0]


@pytest.mark.parametrize("loads_model", [True, False])
def test_masters_follow_when_a_state_is_loaded_on_another_number_of_ranks(loads_model):
    """The rank begins with the mean of two ranks' parameters, and one of their inner states.

    Without the model's own state the master has no parameter to follow from; then it stays as it was loaded.
    """
    loop = qcomp.outer.local_sgd(4)

    def rank_main(comm):
        _, params, optimizer, outer = trained(Masters, loop, 6, comm=comm, dtype=torch.bfloat16)
        return copy.deepcopy((outer.state_dict(), optimizer.state_dict(), [p.detach() for p in params]))

    saved = run_local(2, rank_main, timeout=20)
    params = fresh(torch.bfloat16)
    optimizer = Masters(params)
    outer = qcomp.torch.OuterLoop(params, optimizer, loop, comm=ALONE)
    if loads_model:
        with torch.no_grad():
            for p, value in zip(params, saved[0][2], strict=True):
                p.copy_(value)
    # torch casts states to the dtype of the parameters when it loads them, but not those in nested dicts.
    optimizer.load_state_dict(saved[0][1])
    with pytest.warns(UserWarning, match="a state of 2 ranks resumes with 1"):
        outer.load_state_dict([one[0] for one in saved])
    for p, *both in zip(params, saved[0][2], saved[1][2], strict=True):
        torch.testing.assert_close(p.detach(), sum(both) / 2, atol=1e-2, rtol=1e-2)
        master = optimizer.state[p]["inside"]["master"]
        nearest = p.detach() if loads_model else both[0]
        torch.testing.assert_close(master.bfloat16(), nearest, atol=1e-2, rtol=1e-2)


def test_zero_one_adam_moves_on_from_the_shared_parameters():
    """It goes back to the parameters of its last synchronisation, which the loop has moved."""

    def rank_main(comm):
        params = [torch.nn.Parameter(torch.zeros(8))]
        optimizer = qcomp.torch.ZeroOneAdam(
            params,
            lr=0.01,
            sync_steps=qcomp.LocalSteps(double_every=2, longest=8),
            variance_steps=lambda step: step < 3,
            exact=None,
            comm=ALONE,
        )
        outer = qcomp.torch.OuterLoop(params, optimizer, qcomp.outer.local_sgd(10), comm=comm)
        trail = []
        for _ in range(40):
            params[0].grad = torch.full((8,), 1.0 - 2 * comm.rank)
            optimizer.step()
            trail.append(params[0][0].item())
        assert outer.core_state.numbers["rounds.0"] == 4
        return trail

    one, other = run_local(2, rank_main, timeout=20)
    assert [one[step] for step in (9, 19, 29, 39)] == [other[step] for step in (9, 19, 29, 39)]
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    assert max(apart) < 0.02 * 10.5  # what ten steps do, and not all of them since the start


def test_states_can_move_to_other_parameters():
    """As in `qcomp.torch.ft`, where a new replica continues with the inner state of another."""
    _, params, optimizer, outer = trained(SlowWeights, qcomp.outer.local_sgd(2), 4, comm=ALONE)
    found = outer._trained.positions
    slow = [optimizer.state[p]["slow"].clone() for p in params]
    assert not torch.equal(slow[0], params[0])
    with found.relative(params):
        saved = copy.deepcopy(optimizer.state_dict())
    elsewhere = [torch.nn.Parameter(p.detach() + 1) for p in params]
    other = SlowWeights(elsewhere)
    other.load_state_dict(saved)
    Positions([other]).place(elsewhere, found.known)
    for p, q, value in zip(params, elsewhere, slow, strict=True):
        assert torch.equal(optimizer.state[p]["slow"], value)
        torch.testing.assert_close(other.state[q]["slow"], value + 1)


class StatefulSlowWeights(SlowWeights):
    """Slow weights, with the count of steps in the saved state."""

    def state_dict(self):
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "steps"})


class StatefulScheduleFree(StatefulSlowWeights, ScheduleFree):
    step = ScheduleFree.step


def resumed(comm, make, changed=None):
    """Return the parameters after nine steps, straight and if a new job makes the last four; and its positions."""
    loop = qcomp.outer.local_sgd(4)

    def four_steps(params, optimizer):
        for _ in range(4):
            for p, slope in zip(params, slopes(comm.rank), strict=True):
                p.grad = slope.clone()
            optimizer.step()
        return [p.tolist() for p in params]

    _, params, optimizer, outer = trained(make, loop, 5, comm=comm)
    outer.gather_states()
    at, inner, saved = copy.deepcopy((params, optimizer.state_dict(), outer.state_dict()))
    straight = four_steps(params, optimizer)
    again = fresh()
    other = make(again)
    outer = qcomp.torch.OuterLoop(again, other, loop, comm=comm)
    for p, value in zip(again, at, strict=True):
        p.data.copy_(value)
    other.load_state_dict(inner)
    if changed is not None:
        saved = changed(saved)
    if saved is not None:
        outer.load_state_dict(saved)
    return straight, four_steps(again, other), known(outer)


@pytest.mark.parametrize("make", [StatefulScheduleFree, StatefulSlowWeights])
def test_a_job_that_starts_again_still_moves_positions(make):
    """Most equal their parameters in the first steps only, so the loop's saved state names them."""
    of_all = {}

    def rank_main(comm):
        def of_first_rank(saved):
            of_all[comm.rank] = saved
            comm.all_gather(torch.zeros(1, dtype=torch.uint8), [1] * comm.size)  # until rank 0 has saved
            return of_all[0]

        def read_by_first_rank(saved):
            return [saved] if comm.rank == 0 else []  # which has gathered the states of both

        return [resumed(comm, make, change) for change in (None, of_first_rank, read_by_first_rank)]

    for (straight, own, _), (_, gathered, _), (_, _, places) in run_local(2, rank_main, timeout=20):
        assert own == gathered == straight
        assert len(places) == 1


def test_a_copy_that_no_saved_state_names_causes_a_warning():
    """As in a state of an earlier release, or if the loop is made after the optimizer has made steps."""

    def without_entry(saved):
        return {of: ({k: v for k, v in one.items() if k != "positions"},) for of, (one,) in saved.items()}

    text = "optimizer 0 has a state 'z' with values close to its parameters"
    with pytest.warns(UserWarning, match=text):
        resumed(ALONE, lambda params: StatefulScheduleFree(params, lr=0.01), without_entry)
    _, params, optimizer, _ = trained(lambda params: ScheduleFree(params, lr=0.01), None, 3)
    qcomp.torch.OuterLoop(params, optimizer, qcomp.outer.local_sgd(2), comm=ALONE)
    with pytest.warns(UserWarning, match=text):
        optimizer.step()


@pytest.mark.parametrize("named", ["z", [["z"]], [[0, 1.5]], [0], None, [[]]])
def test_a_damaged_entry_of_positions_is_refused_on_every_rank(named):
    def damaged(comm):
        def change(saved):
            if comm.rank:
                for (one,) in saved.values():
                    one["positions"] = named
            return saved

        return change

    def rank_main(comm):
        with pytest.raises((ValueError, qcomp.MismatchError), match="positions"):
            resumed(comm, StatefulScheduleFree, damaged(comm))

    run_local(2, rank_main, timeout=20)


def test_copies_beside_the_state_cannot_go_to_other_replicas():
    _, params, _, outer = trained(Beside, qcomp.outer.local_sgd(2), 2, comm=ALONE)
    text = "optimizer 0 keeps a copy of a parameter in its attribute 'groups_of_masters.0.params.0', which"
    with pytest.raises(ValueError, match=text), outer._trained.positions.relative(params):
        pass


class TestMistakes:
    class Around(torch.optim.Optimizer):  # type: ignore[name-defined]  # not exported by name
        """A wrapper with slow weights in a state of its own."""

        def __init__(self, optimizer):
            self.optimizer = optimizer
            params = optimizer.param_groups[0]["params"]
            self.state = {p: {"slow": p.detach().clone()} for p in params}

    class Bare(torch.optim.Optimizer):  # type: ignore[name-defined]  # not exported by name
        """An optimizer that torch does not know."""

        def __init__(self, params):
            self.param_groups, self.state, self.defaults = [{"params": params}], {}, {}

        def step(self):
            pass

    def test_a_wrapper_with_a_state_of_its_own(self):
        params = fresh()
        wrapped = self.Around(torch.optim.SGD(params, lr=0.1))
        with pytest.raises(
            ValueError,
            match="optimizer 0 is a Around around another optimizer and keeps a state 'slow' of its own",
        ):
            qcomp.torch.OuterLoop(params, wrapped, qcomp.outer.local_sgd(2), comm=ALONE)

    def test_a_wrapper_that_gets_a_state_later(self):
        params = fresh()
        inside = torch.optim.SGD(params, lr=0.1)
        wrapped = self.Around(inside)
        slow, wrapped.state = wrapped.state, {}
        outer = qcomp.torch.OuterLoop(params, wrapped, qcomp.outer.local_sgd(2), comm=ALONE)
        wrapped.state = slow
        with pytest.raises(ValueError, match="keeps a state 'slow' of its own"):
            inside.step()
        assert outer.core_state.step == 0

    def test_an_optimizer_without_hooks(self):
        params = fresh()
        with pytest.raises(TypeError, match="optimizer 0 is a Bare, whose __init__ does not call"):
            qcomp.torch.OuterLoop(params, self.Bare(params), qcomp.outer.local_sgd(2), comm=ALONE)


@pytest.mark.parametrize(
    ("broken", "law", "options"),
    [
        (
            (Positions, "move", lambda self, p, new: None),
            test_constant_parameters_that_equal_their_copies_are_moved,
            {"dtype": torch.float32},
        ),
        (
            (Positions, "note", lambda self, **_: None),
            test_masters_are_their_parameters_after_each_exchange,
            {"loop": qcomp.outer.local_sgd(3), "dtype": torch.bfloat16},
        ),
        (
            (positions, "_evidence", lambda pairs: True),
            test_other_states_are_left_alone,
            {"name": "SGD"},
        ),
        (
            (Positions, "forget", lambda self: None),
            test_zero_one_adam_moves_on_from_the_shared_parameters,
            {},
        ),
        (
            (Positions, "_note_beside", lambda self, *_, **__: None),
            test_copies_beside_the_state_are_moved,
            {"every": 3},
        ),
        (
            (Positions, "_has_moved", lambda self, p: True),
            test_a_start_stays_where_it_was,
            {"every": 3},
        ),
        (
            (Trained, "begin_with", Trained.write),
            test_copies_begin_with_the_parameters_of_rank_0,
            {"make": MadeAtStart},
        ),
        (
            (Positions, "resume", lambda self, saved: None),
            test_a_job_that_starts_again_still_moves_positions,
            {"make": StatefulScheduleFree},
        ),
        (
            (Positions, "place", lambda self, params, known: None),
            test_states_can_move_to_other_parameters,
            {},
        ),
    ],
    ids=[
        "not moved",
        "not noticed",
        "everything",
        "forgotten",
        "beside",
        "start",
        "begins",
        "resumed",
        "relative",
    ],
)
def test_broken_versions_are_detected(broken, law, options, monkeypatch):
    monkeypatch.setattr(*broken)
    with pytest.raises(AssertionError):
        law(**options)
