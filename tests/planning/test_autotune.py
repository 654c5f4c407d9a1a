"""The choice during the first steps: the same on all ranks, and without losing anything."""

import itertools
import math

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.core.mean.owed import owed
from qcomp.planning import Autotune, Tuning

EXACT, SIGN = qcomp.CompressedMean(qcomp.Identity()), qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8))
SHAPES = [(24, 9), (170,), (5, 3, 2)]
"""PowerSGD factors two of them, and averages the vector exactly."""


class Told:
    """A clock that advances by the given seconds at every second look, that is, after a step."""

    def __init__(self, *seconds):
        self.seconds, self.now, self.looks = itertools.chain(seconds, itertools.repeat(0.0)), 0.0, 0

    def __call__(self):
        self.looks += 1
        self.now += 0.0 if self.looks % 2 else next(self.seconds)
        return self.now


def values(rank, step, dtype=np.float64):
    draws = np.random.default_rng([rank, step])
    return [draws.standard_normal(shape).astype(dtype) for shape in SHAPES]


def total_owed(tuner, state):
    """Return everything that this rank owes, for each tensor, flat."""
    mean = tuner.methods[tuner.names[tuner.turn(state.tuning)]]
    zeros = [np.zeros(int(np.prod(shape))) for shape in SHAPES]
    found = [owed(mean, state.mean) or zeros, state.owed or zeros]
    return [np.asarray(a) + np.asarray(b) for a, b in zip(*found, strict=True)]


METHODS = {
    "exact": EXACT,
    "sign": SIGN,
    "gathered": qcomp.CompressedMean(qcomp.TopK(k=2, bucket_size=16), "all_gather"),
    "ring": qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8), "ring"),
    "hierarchical": qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8), "hierarchical"),
    "auto": qcomp.CompressedMean(qcomp.MinMaxUInt8(), "auto"),
    "powersgd": qcomp.PowerSGDMean(rank=1),
    "unbiased": qcomp.CompressedMean(qcomp.QSGD(levels=7, bucket_size=8), feedback=False),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("hosts", [list("ab"), list("abc"), list("aabb"), list("aab")], ids="".join)
def test_no_step_loses_anything(hosts):
    """The means so far plus what the ranks still owe are the exact means, also in the step after each change."""
    lossy = {name: mean for name, mean in METHODS.items() if name != "unbiased"}

    def rank_main(comm):
        tuner = Autotune({**lossy, "again": SIGN}, steps=1, clock=Told())
        state = tuner.init(values(0, 0), comm)
        sums = [np.zeros(int(np.prod(shape))) for shape in SHAPES]
        history = []
        for step in range(4 * len(tuner.methods) + 3):
            means, state = tuner(values(comm.rank, step), state, comm, key=qcomp.Key(step=step))
            sums = [s + m.ravel() for s, m in zip(sums, means, strict=True)]
            history.append((sums, total_owed(tuner, state)))
        return history

    n = len(hosts)
    found = run_local(n, rank_main, hosts=hosts)
    exact = [np.zeros(int(np.prod(shape))) for shape in SHAPES]
    seen = 0.0
    for step in range(len(found[0])):
        for rank in range(n):
            exact = [e + x.ravel() / n for e, x in zip(exact, values(rank, step), strict=True)]
        sums = found[0][step][0]
        owes = [sum(found[rank][step][1][i] for rank in range(n)) / n for i in range(len(SHAPES))]
        for s, o, e in zip(sums, owes, exact, strict=True):
            np.testing.assert_allclose(s + o, e, atol=1e-9)
        seen = max(seen, *(np.abs(o).max() for o in owes))
    assert seen > 0.1


def chosen(seconds, *, names="abc", steps=2, margin=0.0, n=2):
    """Return what each rank chooses if ranks and steps take the seconds ``seconds[rank][step]``."""

    def rank_main(comm):
        tuner = Autotune(
            dict.fromkeys(names, EXACT), steps=steps, margin=margin, clock=Told(*seconds[comm.rank])
        )
        state = tuner.init(np.ones(4), comm)
        turns = []
        for _ in range(len(seconds[0]) + 2):
            turns.append(tuner.names[tuner.turn(state.tuning)])
            _, state = tuner(np.ones(4), state, comm)
        return "".join(turns), tuner.chosen(state.tuning), state.tuning.seconds

    return run_local(n, rank_main)


class TestChoice:
    def test_is_the_fastest_without_its_first_step(self):
        first, second = chosen([[9, 3, 3, 9, 1, 1, 0, 2, 2]] * 2)
        assert first == second == ("aaabbbcccbb", "b", (3.0, 1.0, 2.0))

    def test_is_by_the_slowest_rank_and_the_same_on_all(self):
        first, second = chosen([[0, 5, 5, 0, 1, 1, 0, 2, 2], [0, 5, 5, 0, 9, 9, 0, 2, 2]])
        assert first == second == ("aaabbbccccc", "c", (5.0, 9.0, 2.0))

    def test_is_by_medians(self):
        one = [0, 2, 2, 99, 0, 4, 4, 4]
        assert chosen([one, one], names="ab", steps=3)[0][1:] == ("a", (2.0, 4.0))

    @pytest.mark.parametrize(("margin", "expected"), [(0.0, "c"), (0.04, "c"), (0.06, "b"), (1.0, "a")])
    def test_prefers_earlier_methods_within_the_margin(self, margin, expected):
        one = [0, 2.0, 2.0, 0, 1.05, 1.05, 0, 1.0, 1.0, 0, 1.0, 1.0, 0, 1.05, 1.05]
        assert {c for _, c, _ in chosen([one, one], margin=margin)} == {expected}

    def test_close_methods_get_a_second_round_and_the_lower_time_counts(self):
        """Otherwise a burst of other work in c's turn would have cost it the choice."""
        first = [0, 15, 15, 0, 12, 12, 0, 17, 17]
        again = [0, 11, 11, 9, 14, 14, 9, 16, 16]
        assert chosen([first + again] * 2)[0] == ("aaabbbcccc" + "ccbbbaaacc", "c", (15, 12, 11))
        slow = [0, 19, 19]  # more than half as much again as b
        assert chosen([first[:6] + slow + again[3:]] * 2)[0] == ("aaabbbccc" + "bbbaaabb", "b", (15, 12, 19))

    def test_among_equals_is_the_first(self):
        assert chosen([[1.0] * 18] * 2)[0][1] == "a"

    def test_of_a_single_method_is_that_method(self):
        assert chosen([[1.0] * 3] * 3, names="a", n=3)[2][1] == "a"

    @pytest.mark.parametrize(("bandwidth", "expected"), [(1e3, "sign"), (1e12, "exact")])
    def test_is_compression_on_a_slow_link(self, simulated, bandwidth, expected):
        def rank_main(comm):
            network = simulated(comm, latency=1e-3, bandwidth=bandwidth, per_message=1e-3)
            tuner = Autotune({"exact": EXACT, "sign": SIGN}, steps=3, clock=network.clock)
            x = np.ones(4096, dtype=np.float32)
            state = tuner.init(x, network)
            for _ in range(16):
                _, state = tuner(x, state, network)
            return tuner.chosen(state.tuning)

        assert run_local(2, rank_main, hosts=["a", "b"]) == [expected] * 2


def test_arrays_keep_their_library_shape_and_dtype(float64_library):
    """Also in steps that add what is owed, and in half precision."""

    def rank_main(comm):
        tuner = Autotune({"sign": SIGN, "exact": EXACT}, steps=1, clock=Told())
        x = [float64_library.array(v, dtype=np.float32) for v in values(comm.rank, 0)]
        state = tuner.init(x, comm)
        for _ in range(6):
            means, state = tuner(x, state, comm)
            assert all(
                type(m) is type(v) and m.shape == v.shape and m.dtype == v.dtype
                for m, v in zip(means, x, strict=True)
            )
        one, _ = tuner(x[0], tuner.init(x[0], comm), comm)
        assert one.shape == x[0].shape

    run_local(2, rank_main)


def test_a_refused_step_changes_nothing():
    """What was owed is still owed, and the next step uses the same method."""

    def rank_main(comm):
        tuner = Autotune({"sign": SIGN, "exact": EXACT}, steps=1, clock=Told())
        x = values(comm.rank, 0)
        state = tuner.init(x, comm)
        for _ in range(2):
            _, state = tuner(x, state, comm)
        assert state.owed
        before = [np.array(e) for e in state.owed]
        bad = [np.full_like(v, np.nan) if comm.rank else v for v in x]
        with pytest.raises(qcomp.NonFiniteError):
            tuner(bad, state, comm)
        _, after = tuner(x, state, comm)
        assert all(np.array_equal(a, b) for a, b in zip(before, state.owed, strict=True))
        assert not after.owed
        return tuner.turn(after.tuning)

    assert run_local(2, rank_main) == [1, 1]


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "error", "words"),
        [
            ({"methods": {}}, ValueError, "methods is {}; expected a qcomp.CompressedMean"),
            ({"methods": [EXACT]}, ValueError, "expected a qcomp.CompressedMean for each name"),
            ({"methods": {"a": qcomp.ScaledSign()}}, TypeError, "methods has 'a'"),
            ({"methods": {1: EXACT}}, TypeError, "methods has 1"),
            (
                {"methods": {"a": qcomp.EF21Mean(qcomp.TopK(2, 16))}},
                ValueError,
                "whose state holds no residuals",
            ),
            (
                {"methods": {"a": qcomp.Muon(learning_rate=0.1).mean}},
                ValueError,
                "whose state holds no residuals",
            ),
            ({"steps": 0}, ValueError, "steps is 0; expected an integer, at least 1"),
            ({"steps": 2.0}, ValueError, "steps is 2.0"),
            ({"margin": -0.1}, ValueError, "margin is -0.1; expected a finite number"),
            ({"margin": float("nan")}, ValueError, "margin is nan"),
            ({"margin": "wide"}, TypeError, "margin is .wide.; expected a number"),
        ],
    )
    def test_settings_out_of_range_are_errors(self, settings, error, words):
        with pytest.raises(error, match=words):
            Autotune(**{"methods": {"a": EXACT}, **settings})

    @pytest.mark.parametrize(
        "other", [{"steps": 3}, {"margin": 0.5}, {"methods": {"b": EXACT}}, {"methods": {"a": SIGN}}]
    )
    def test_ranks_that_differ_are_an_error_on_every_rank(self, other):
        def rank_main(comm):
            tuner = Autotune(**{"methods": {"a": EXACT}, **(other if comm.rank else {})})
            with pytest.raises(qcomp.MismatchError):
                tuner.init(np.ones(4), comm)

        run_local(2, rank_main)

    @pytest.mark.parametrize("seconds", [-1.0, math.nan])
    def test_a_clock_that_goes_back_on_one_rank_is_an_error_on_every_rank(self, seconds):
        def rank_main(comm):
            times = [seconds if comm.rank else 1.0] * 4
            tuner = Autotune({"a": EXACT, "b": EXACT}, steps=1, clock=Told(*times))
            x = np.ones(4, dtype=np.float32)
            state = tuner.init(x, comm)
            for _ in range(3):
                _, state = tuner(x, state, comm)
            with pytest.raises(
                ValueError, match=r"the steps of rank 1 take .* pass a clock that never goes back"
            ):
                tuner(x, state, comm)

        run_local(2, rank_main)

    def test_a_missing_key_is_an_error_before_the_turn_of_a_method_that_draws(self):
        tuner = Autotune({"a": EXACT, "draws": METHODS["unbiased"]}, steps=1, clock=Told())
        alone = qcomp.comm.LocalCommunicator.alone()
        state = tuner.init(np.ones(4), alone)
        with pytest.raises(ValueError, match="key is None; 'draws' draws random numbers"):
            tuner(np.ones(4), state, alone)

    def test_arrays_of_other_sizes_are_an_error_if_something_is_owed(self):
        def rank_main(comm):
            tuner = Autotune({"a": SIGN, "b": EXACT}, steps=1, clock=Told())
            state = tuner.init(np.ones(4), comm)
            for _ in range(2):
                _, state = tuner(np.arange(4.0), state, comm)
            with pytest.raises(ValueError, match=r"x has arrays of \[1\] elements; state is for \[4\]"):
                tuner(np.ones(1), state, comm)

        run_local(2, rank_main)


def test_the_times_are_kept_until_the_choice():
    tuner = Autotune({"a": EXACT, "b": SIGN}, steps=2)
    alone = qcomp.comm.LocalCommunicator.alone()
    tuning = Tuning()
    for seconds in (5.0, 2.0, 4.0, 5.0, 1.0):
        assert tuner.chosen(tuning) is None
        tuning = tuner.noted(tuning, seconds, alone, np.ones(1))
    assert tuning.times == (5.0, 2.0, 4.0, 5.0, 1.0)
    tuning = tuner.noted(tuning, 2.0, alone, np.ones(1))
    assert tuning == Tuning((5.0, 2.0, 4.0, 5.0, 1.0, 2.0), (3.0, 1.5), 1)
