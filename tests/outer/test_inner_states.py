"""The averages of inner states: exact means, periods, and what is refused; all ranks of a world are in one thread."""

from dataclasses import replace

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.outer import inner_states as module
from qcomp.core.outer.fragments import due
from qcomp.outer import InnerStates
from qcomp.testing import lockstep
from tests.outer.jobs import SHAPES, begun, loop_of, moves

PLAIN = qcomp.OuterLoop(every=4)
BOTH = InnerStates({"m": 2, "v": 3})
COMPRESSED = replace(BOTH, compressor=qcomp.Cast("bfloat16"))


def own_states(rank, dtype=np.float32):
    rng = np.random.default_rng([1, rank])
    return {
        "m": [np.asarray(rng.standard_normal(s), dtype) for s in SHAPES],
        "v": [np.asarray(np.abs(rng.standard_normal(s)), dtype) for s in SHAPES],
        "own": [np.asarray(rng.standard_normal(s), dtype) for s in SHAPES],
    }


class States:
    """The loop and the inner states of all ranks; parameters do not move."""

    def __init__(self, inner, loop=PLAIN, size=2, *, states=None, make=np.array):
        self.inner, self.loop, self.size = inner, loop, size
        params = [make(p) for p in begun()]
        self.loops = lockstep(
            [
                loop.init_stages(params, rank=rank, size=size, host=("a", "b", "b")[rank])
                for rank in range(size)
            ]
        )
        self.held = states or [own_states(rank) for rank in range(size)]
        self.held = [
            {kind: [x if x is None else make(x) for x in xs] for kind, xs in of_rank.items()}
            for of_rank in self.held
        ]

    def at(self, step):
        """Let all ranks have made some inner steps."""
        stage = "warmup" if step < self.loop.warmup else "local"
        self.loops = [s._replace(step=step, stage=stage) for s in self.loops]
        return self

    def average(self, weights=None, inners=None):
        """Average what is due."""
        self.held = lockstep(self.stages(weights, inners))

    def stages(self, weights=None, inners=None):
        inners, weights = inners or [self.inner] * self.size, weights or [None] * self.size
        given = zip(inners, self.held, self.loops, weights, strict=True)
        return [i.stages(h, self.loop, s, weight=w) for i, h, s, w in given]

    def bits(self, rank, kind):
        return [None if x is None else np.asarray(x).tobytes() for x in self.held[rank][kind]]


def mean(ranks, kind, number):
    """Return the sum in the order of the ranks, divided by their number, in single precision."""
    total = sum((own_states(rank)[kind][number] for rank in range(1, ranks)), own_states(0)[kind][number])
    return np.asarray(total / np.float32(ranks), np.float32)


def changed(job, before):
    return {
        kind for kind in before for x, y in zip(job.held[0][kind], before[kind], strict=True) if x is not y
    }


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["readonly", "torch", "strict", pytest.param("jax", marks=pytest.mark.slow)])
def test_an_average_is_the_mean_bit_for_bit(libraries, name, size):
    job = States(BOTH, size=size, make=libraries[name].array).at(6)
    job.average()
    for of_rank in job.held:
        for kind in ("m", "v"):
            for number, x in enumerate(of_rank[kind]):
                assert libraries[name].numpy(x).tobytes() == mean(size, kind, number).tobytes()


@pytest.mark.parametrize("topology", [*qcomp.topologies.names(), "auto", "low rank"])
def test_of_two_ranks_in_every_topology(topology):
    averaging = qcomp.PowerSGD(rank=1) if topology == "low rank" else qcomp.Averaging(topology=topology)
    loop = qcomp.OuterLoop(every=4, averaging=averaging, exact=qcomp.ExactBelow(10))
    job = States(BOTH, loop).at(6)
    job.average()
    for rank in range(2):
        for kind in ("m", "v"):
            assert job.bits(rank, kind) == [mean(2, kind, n).tobytes() for n in range(len(SHAPES))]


def test_each_kind_has_its_period_after_the_warm_up_and_others_stay():
    job, found = States(BOTH, loop_of(warmup=5)), {}
    for step in range(1, 12):
        before = job.at(step).held[0]
        job.average()
        found[step] = changed(job, before)
        job.held = [own_states(rank) for rank in range(2)]
    quiet = {key: set() for key in [*range(1, 7), 10]}
    assert found == quiet | {7: {"m"}, 8: {"v"}, 9: {"m"}, 11: {"m", "v"}}


def test_a_pattern_is_the_period_of_the_kinds_that_no_pattern_before_it_names():
    job = States(InnerStates({"v": 3, "?": 2})).at(2)
    before = job.held[0]
    job.average()
    assert changed(job, before) == {"m"}
    assert InnerStates(5) == InnerStates({"*": 5})


def test_a_fragment_has_its_turn_in_each_period():
    """As far before the end of a period as in a round of its parameters; so multiples of a period coincide with it."""
    loop = loop_of(fragments=2, every=4)
    job = States(InnerStates({"m": 8, "v": 4, "own": 3}), loop)
    members = [job.loop.members(job.loops[0], fragment) for fragment in range(2)]
    turns = {
        step: [
            (kind, f)
            for kind, period in (("m", 8), ("v", 4), ("own", 3))
            for f in (0, 1)
            if (step + 2 - 2 * f) % period == 0
        ]
        for step in range(1, 17)
    }
    assert all(due(step, 4, 2) == f for step, of_step in turns.items() for kind, f in of_step if kind in "mv")
    for step, of_step in turns.items():
        job.held = [own_states(rank) for rank in range(2)]
        before = job.at(step).held[0]
        job.average()
        for kind in before:
            pairs = enumerate(zip(job.held[0][kind], before[kind], strict=True))
            expected = {n for k, fragment in of_step if k == kind for n in members[fragment]}
            assert {n for n, (x, y) in pairs if x is not y} == expected


def test_periods_of_one_give_sgd_with_momentum_on_the_mean_gradient():
    """In sixteenths and with powers of two, so nothing is rounded."""
    loop, inner = qcomp.OuterLoop(every=1), InnerStates(1)
    params = [begun()[:2] for _ in range(2)]
    states = lockstep([loop.init_stages(p, rank=r, size=2) for r, p in enumerate(params)])
    momenta = [[np.zeros_like(p) for p in params[0]] for _ in range(2)]
    p_one, m_one = begun()[:2], [np.zeros_like(p) for p in params[0]]
    for step in range(4):
        grads = [moves(rank, step)[:2] for rank in range(2)]
        momenta = [
            [m / 2 + g for m, g in zip(*pair, strict=True)] for pair in zip(momenta, grads, strict=True)
        ]
        params = [[p - m for p, m in zip(*pair, strict=True)] for pair in zip(params, momenta, strict=True)]
        found = lockstep([loop.stages(p, s) for p, s in zip(params, states, strict=True)])
        params, states = map(list, zip(*found, strict=True))
        given = zip(momenta, states, strict=True)
        momenta = [one["m"] for one in lockstep([inner.stages({"m": m}, loop, s) for m, s in given])]
        m_one = [m / 2 + (a + b) / 2 for m, a, b in zip(m_one, *grads, strict=True)]
        p_one = [p - m for p, m in zip(p_one, m_one, strict=True)]
        for rank in range(2):
            assert [x.tobytes() for x in momenta[rank]] == [x.tobytes() for x in m_one]
            assert [x.tobytes() for x in params[rank]] == [x.tobytes() for x in p_one]


def test_a_compressor_changes_each_element_by_a_part_of_itself():
    """Ranks round to 8 bits, and the server once more; second moments stay above 0, whatever stands beside them."""
    states = [own_states(rank) for rank in range(2)]
    for rank, tiny in enumerate((1e-30, 3e-30)):
        states[rank]["v"][0][0, 0] = tiny
    job = States(COMPRESSED, states=states).at(6)
    job.average()
    for kind in ("m", "v"):
        assert job.bits(0, kind) == job.bits(1, kind)
        for number, x in enumerate(job.held[0][kind]):
            a, b = (of_rank[kind][number].astype(np.float64) for of_rank in states)
            bound = (np.abs(a) + np.abs(b)) / 2 * ((1 + 2.0**-8) ** 2 * (1 + 2.0**-23) - 1)
            assert (np.abs(x - (a + b) / 2) <= bound).all()
            assert kind == "m" or (x > 0).all()
    assert any(not np.array_equal(x, mean(2, "m", n)) for n, x in enumerate(job.held[0]["m"]))


def test_weights_count():
    job = States(BOTH).at(6)
    job.average(weights=[3, 1])
    for rank in range(2):
        for number, x in enumerate(job.held[rank]["m"]):
            a, b = (own_states(r)["m"][number].astype(np.float64) for r in range(2))
            assert np.abs(x - (3 * a + b) / 4).max() <= 4 * 2.0**-24 * np.maximum(np.abs(a), np.abs(b)).max()
        assert all((v >= 0).all() for v in job.held[rank]["v"])
    job = States(BOTH).at(6)
    job.held[0] = {kind: [np.full_like(x, np.nan) for x in xs] for kind, xs in job.held[0].items()}
    job.average(weights=[0, 2])
    for kind in ("m", "v"):
        assert job.bits(0, kind) == job.bits(1, kind) == [x.tobytes() for x in own_states(1)[kind]]


def test_a_state_that_a_rank_lacks_stays_on_all_ranks():
    states = [own_states(rank) for rank in range(2)]
    states[1]["m"][0] = None
    del states[0]["v"]
    job = States(BOTH, states=states).at(6)
    job.average()
    assert job.bits(0, "m")[0] == own_states(0)["m"][0].tobytes()
    assert job.held[1]["m"][0] is None
    assert job.bits(0, "m")[1:] == [mean(2, "m", n).tobytes() for n in (1, 2, 3)]
    assert job.bits(1, "v") == [x.tobytes() for x in own_states(1)["v"]]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_dtypes_stay(dtype):
    job = States(BOTH, states=[own_states(rank, dtype) for rank in range(2)]).at(6)
    job.average()
    wide = np.float64 if dtype == np.float64 else np.float32
    for number, x in enumerate(job.held[0]["m"]):
        a, b = (np.asarray(own_states(rank, dtype)["m"][number], wide) for rank in range(2))
        assert x.dtype == dtype
        assert x.tobytes() == np.asarray((a + b) / 2, dtype).tobytes()


def test_given_arrays_are_not_written_to():
    job = States(COMPRESSED, make=np.array).at(6)
    given = [{kind: [x.copy() for x in xs] for kind, xs in of_rank.items()} for of_rank in job.held]
    before = job.held
    job.average()
    for was, copies in zip(before, given, strict=True):
        for kind in was:
            assert [x.tobytes() for x in was[kind]] == [x.tobytes() for x in copies[kind]]


def test_a_rank_alone_keeps_its_states():
    job = States(BOTH, size=1).at(6)
    job.average()
    assert job.bits(0, "m") == [x.tobytes() for x in own_states(0)["m"]]


def test_an_exact_average_sends_what_its_docstring_says():
    def rank_main(comm):
        params = [np.zeros(20_000, np.float32)]
        loop, states = PLAIN, {"m": [np.ones(20_000, np.float32)]}
        state = loop.init(params, comm)._replace(step=4)
        before = comm.bytes_sent
        InnerStates(4).step(states, loop, state, comm)
        return comm.bytes_sent - before

    expected = 2 * 2 / 3 * 4 * 20_000
    for sent in qcomp.comm.run_local(3, rank_main, timeout=20):
        assert expected - 16 <= sent <= expected + 2 * 1200  # texts with the settings and the version


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every is 0; expected an integer >= 1"),
        ({"every": {}}, "every is {}; expected at least one period"),
        ({"every": {"m": 2.0}}, "every is {'m': 2.0}; expected an integer >= 1"),
        ({"every": {3: 2}}, "expected an integer >= 1, or a mapping from names"),
        (
            {"compressor": qcomp.TopK(4, 16)},
            "expected one whose error in each element is a fraction of that element",
        ),
        ({"compressor": qcomp.ScaledSign()}, "such as qcomp.Cast('bfloat16')"),
        ({"compressor": qcomp.Cast("float16")}, "expected one whose error"),
        ({"compressor": "cast"}, "compressor is 'cast'"),
    ],
)
def test_wrong_settings(arguments, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        InnerStates(**{"every": 2, **arguments})
    assert message in str(caught.value)


def test_loops_with_a_delay_are_refused():
    with pytest.raises(ValueError, match="delay=1; expected 0"):
        States(BOTH, loop_of(delay=1)).average()


def spoilt(kind, number, value):
    states = [own_states(rank) for rank in range(2)]
    states[1][kind][number] = value
    return {"states": states}


@pytest.mark.parametrize(
    ("options", "average", "errors", "message"),
    [
        (
            spoilt("m", 0, np.zeros((5, 8), np.float32)),
            {},
            (qcomp.MismatchError, ValueError),
            "has shape (5, 8)",
        ),
        (spoilt("m", 0, np.zeros((8, 5), np.int32)), {}, (qcomp.MismatchError, TypeError), "states['m']"),
        (spoilt("m", 2, np.zeros(3, np.float64)), {}, (qcomp.MismatchError,) * 2, "float64 on others"),
        (
            spoilt("m", 2, np.full(3, np.nan, np.float32)),
            {},
            (qcomp.NonFiniteError,) * 2,
            "inner state of 'm of 2' on rank 1 is not finite, or too large to compress, in step 6",
        ),
        (
            {},
            {"inners": [BOTH, InnerStates({"m": 3, "v": 3})]},
            (qcomp.MismatchError,) * 2,
            "inner states.every[0][1] is 2 on rank 0, but 3 on rank 1",
        ),
        (
            {},
            {"weights": [1, None]},
            (qcomp.MismatchError,) * 2,
            "weight is 'a number' on rank 0, but 'none'",
        ),
        ({}, {"weights": [1, -1]}, (ValueError,) * 2, "weight of rank 1 is not a finite number >= 0"),
        (
            {"inner": InnerStates({"w": 3, "*": 3})},
            {},
            (ValueError,) * 2,
            "keeps such a state (copies of parameters do not count); expected names among ['m', 'v', 'own']",
        ),
    ],
)
def test_errors_reach_every_rank_and_change_nothing(options, average, errors, message):
    job = States(**{"inner": BOTH, **options}).at(6)
    before = job.held
    found = lockstep(job.stages(**average), catch=Exception)
    assert job.held is before
    assert {type(one) for one in found} == set(errors)
    assert all(message in str(one) for one in found), found


def sums(self, *given):
    means, state = yield from MEAN(self, *given)
    return [x + x for x in means], state


def takes_its_own(self, values, state):
    _, state = yield from MEAN(self, values, state)
    return values, state


def ignores_the_warm_up(self, loop, state):
    return TURNS(self, replace(loop, warmup=0), state)


def averages_all_fragments(self, loop, state):
    return {kind: set(range(len(SHAPES))) for kind in TURNS(self, loop, state)}


def gives_others_a_period(self, kind):
    return kind if kind in "mv" else "v"


MEAN, TURNS = CompressedMean.stages, InnerStates._turns


@pytest.mark.parametrize(
    ("place", "broken", "test"),
    [
        ((CompressedMean, "stages"), sums, lambda: test_of_two_ranks_in_every_topology("ring")),
        ((CompressedMean, "stages"), takes_its_own, lambda: test_of_two_ranks_in_every_topology("ring")),
        (
            (InnerStates, "_turns"),
            ignores_the_warm_up,
            test_each_kind_has_its_period_after_the_warm_up_and_others_stay,
        ),
        (
            (InnerStates, "_pattern_of"),
            gives_others_a_period,
            test_each_kind_has_its_period_after_the_warm_up_and_others_stay,
        ),
        ((InnerStates, "_turns"), averages_all_fragments, test_a_fragment_has_its_turn_in_each_period),
        ((module, "product"), lambda x, _: x, test_weights_count),
    ],
)
def test_broken_averages_are_caught(monkeypatch, place, broken, test):
    monkeypatch.setattr(*place, broken)
    with pytest.raises(AssertionError):
        test()


def test_a_compressor_that_the_settings_refuse_is_caught(monkeypatch):
    monkeypatch.setitem(vars(COMPRESSED), "_mean", CompressedMean(qcomp.MinMaxUInt8(16), feedback=False))
    with pytest.raises(AssertionError):
        test_a_compressor_changes_each_element_by_a_part_of_itself()
