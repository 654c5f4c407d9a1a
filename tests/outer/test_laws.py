"""The promises of the outer loop: exact data-parallel SGD, the sum identities, and equal shared parameters."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.stages import AllToAll
from qcomp.core.outer.fragments import assign, due
from qcomp.testing import lockstep
from qcomp.testing.means import owed
from qcomp.testing.one_thread import watched
from tests.outer.jobs import LARGE, SHAPES, SIGN, Job, begun, loop_of, moves

PLAIN = qcomp.OuterLoop(every=1)
TOPOLOGIES = qcomp.topologies.names()
LOW_RANK = {"averaging": qcomp.PowerSGD(rank=1), "compressor": qcomp.Identity()}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["readonly", "torch", "strict", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_round_of_one_step_is_exact_data_parallel_sgd(libraries, name, size):
    """Every rank moves by its gradient times a power of two, in sixteenths, so nothing is rounded."""
    library = libraries[name]
    job = Job(PLAIN, size, make=library.array)
    params = [p.astype(np.float64) for p in begun()]
    for step in range(3):
        job.inner()
        job.outer()
        mean = [sum(ms) / size for ms in zip(*(moves(rank, step) for rank in range(size)), strict=True)]
        params = [p - m for p, m in zip(params, mean, strict=True)]
        for of_rank in job.params:
            for found, p in zip(of_rank, params, strict=True):
                assert library.numpy(found).tobytes() == p.astype(np.float32).tobytes()


def test_rounds_of_one_step_equal_the_outer_optimizer():
    """Outer momentum, with an inner rate of 1 (a power of two), gives the steps of qcomp.SGD on the same gradients."""
    sgd = qcomp.SGD(learning_rate=0.5, momentum=0.5, nesterov=True)
    job = Job(qcomp.OuterLoop(every=1, outer=sgd), 2)
    params = begun()
    alone = qcomp.comm.LocalCommunicator.alone()
    state = sgd.init(params, alone)
    for step in range(4):
        job.inner()
        job.outer()
        grads = [(a + b) / 2 for a, b in zip(moves(0, step), moves(1, step), strict=True)]
        params, state = sgd.step(params, grads, state, alone)
        assert [x.tobytes() for x in job.anchor()] == [p.tobytes() for p in params]


def test_schedules_of_the_outer_optimizer_count_outer_rounds():
    loop = qcomp.OuterLoop(every=3, outer=qcomp.SGD(learning_rate=lambda rounds: 2.0**-rounds))
    job, params = Job(loop, 2), [p.astype(np.float64) for p in begun()]
    for step in range(9):
        job.inner()
        job.outer()
        rate = 2.0 ** -(step // 3)
        params = [
            p - rate * (a + b) / 2 for p, a, b in zip(params, moves(0, step), moves(1, step), strict=True)
        ]
    assert [x.tobytes() for x in job.anchor()] == [p.astype(np.float32).tobytes() for p in params]


@pytest.mark.parametrize(
    "changes", [{}, {"fragments": 2}, {"delay": 2}, {"fragments": 3, "delay": 1, "mixing": 0.5}]
)
def test_results_share_memory_with_the_state_only_with_permission(changes):
    """The values are the same either way."""
    loop = loop_of(**changes)
    job = Job(loop, 2)
    shared = 0
    for _ in range(9):
        job.inner()
        pairs = list(zip(job.params, job.states, strict=True))
        sharing = lockstep([loop.stages(p, s, shares=True) for p, s in pairs])
        job.outer()
        for own, state, (other, _) in zip(job.params, job.states, sharing, strict=True):
            held = [x for xs in state.arrays.values() for x in xs]
            assert not any(np.shares_memory(p, x) for p in own for x in held)
            assert [p.tobytes() for p in own] == [p.tobytes() for p in other]
        params, state = sharing[0]
        shared += sum(any(p is x for x in state.arrays["anchor"]) for p in params)
    assert bool(shared) == (not loop.mixing)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "how",
    [*({"averaging": qcomp.Averaging(topology=name)} for name in TOPOLOGIES), LOW_RANK],
    ids=[*TOPOLOGIES, "low rank"],
)
@pytest.mark.parametrize(("decay", "scale"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize("fragments", [1, 2])
def test_sent_and_owed_values_add_up(how, decay, scale, fragments):
    """For each round of a fragment, D = scale * mean_i d_i + decay * owed - owed'; with decay 1, the rounds telescope.

    The scale is that of compressed tensors.
    """
    loop = loop_of(**how, decay=decay, scale=scale, fragments=fragments)
    job = Job(loop, 3, params=begun(dtype=np.float64))
    before, sums, steps = job.anchor(), [np.zeros(s) for s in SHAPES], 0
    tensors = begun()[:2]
    debt = [np.zeros(s) for s in SHAPES[:2]]
    for _ in range(12):
        job.inner()
        inner = job.params
        job.outer()
        kept = owed(loop.mean_of(job.states[0]), [s.exchange for s in job.states], tensors)
        for i, after in enumerate(job.anchor()):
            if np.array_equal(after, before[i]):
                continue
            steps += 1
            sent = before[i] - after  # outer SGD with rate 1
            meant = (before[i] - sum(p[i] for p in inner) / 3) * (scale if i < 2 else 1)
            lost = decay * debt[i] - kept[i] if i < 2 else 0
            assert np.abs(sent - (meant + lost)).max() < 1e-12
            sums[i] += sent - meant
            before[i] = after
        debt = kept
    assert steps == 3 * len(SHAPES)
    assert min(np.abs(d).max() for d in debt) > 0.1
    if decay == 1:
        assert max(np.abs(s + d).max() for s, d in zip(sums, debt, strict=False)) < 1e-12


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    "loop",
    [
        loop_of(),
        loop_of(outer=qcomp.Adam(learning_rate=0.1), decay=0.9),
        loop_of(outer=qcomp.Lion(learning_rate=0.1), fragments=2, delay=3, mixing=0.5),
        loop_of(outer=qcomp.SGD(learning_rate=0.7, momentum=0.9, nesterov=True), fragments=3),
        loop_of(outer=qcomp.Lamb(learning_rate=0.1), compressor=qcomp.QSGD(7, 16), fragments=4, delay=1),
        loop_of(averaging=qcomp.Averaging(topology="auto"), compressor=qcomp.TopK(2, 16), delay=2),
        loop_of(compressors=qcomp.ByName({"0": SIGN, "*": qcomp.QSGD(7, 16)}), fragments=2),
        loop_of(**LOW_RANK, fragments=2, delay=2, decay=0.9),
        loop_of(
            averaging=qcomp.Averaging("all_gather", divisor="senders"),
            compressor=qcomp.TopK(2, 16),
            decay=0.9,
        ),
        loop_of(fragments=2, delay=1, turn="apply", mixing=1.0, scale=0.5),
    ],
    ids=lambda loop: f"{type(loop.outer).__name__}-{loop.fragments}-{loop.delay}",
)
def test_shared_parameters_are_the_same_on_all_ranks_bit_for_bit(loop):
    job = Job(loop, 3)
    first = job.anchor()
    for _ in range(13):
        job.run(1)
        for rank in (1, 2):
            for kind in ("momentum", "variance"):
                pairs = zip(getattr(job.states[0], kind), getattr(job.states[rank], kind), strict=True)
                assert all(np.array_equal(a, b) for a, b in pairs)
            assert [x.tobytes() for x in job.anchor(rank)] == [x.tobytes() for x in job.anchor()]
            assert job.states[rank].stage == job.states[0].stage
    assert all(not np.array_equal(a, b) for a, b in zip(first, job.anchor(), strict=True))


def test_ranks_differ_between_rounds_and_agree_after_them():
    job = Job(loop_of(), 2)
    for step in range(1, 9):
        job.run(1)
        same = all(np.array_equal(a, b) for a, b in zip(*job.params, strict=True))
        assert same == (step % 4 == 0)


def test_between_rounds_parameters_are_returned_as_given():
    job = Job(loop_of(), 2)
    job.inner()
    given = job.params[0]
    job.outer()
    assert all(a is b for a, b in zip(job.params[0], given, strict=True))


def test_a_fragment_acts_like_a_separate_model():
    """Two fragments act like two loops, each with its own tensors, shifted by half an outer round."""
    outer = qcomp.SGD(learning_rate=0.5, momentum=0.5)
    loop = loop_of(outer=outer, fragments=2, decay=0.5)
    job = Job(loop, 2).run(12)
    for fragment, first in ((0, 2), (1, 4)):
        members = loop.members(job.states[0], fragment)
        alone = Job(replace(loop, fragments=1), 2, params=[begun()[i] for i in members])
        alone.states = [s._replace(step=4 - first) for s in alone.states]
        for step in range(12):
            for rank in range(2):
                of_rank = moves(rank, step)
                alone.params[rank] = [
                    p - of_rank[i] for p, i in zip(alone.params[rank], members, strict=True)
                ]
            alone.outer()
        for x, i in zip(alone.anchor(), members, strict=True):
            assert x.tobytes() == job.anchor()[i].tobytes()


def test_a_delayed_result_is_the_result_of_the_step_that_sent_it():
    """If inner steps do not depend on the parameters, a delay only shifts when the shared parameters move."""
    soon, late = Job(loop_of(every=6), 2), Job(loop_of(every=6, delay=2), 2)
    for step in range(1, 9):
        soon.run(1)
        late.run(1)
        moved = [not np.array_equal(a, b) for a, b in zip(begun(), late.anchor(), strict=True)]
        assert moved == [step >= 8] * len(SHAPES)
    assert [x.tobytes() for x in late.anchor()] == [x.tobytes() for x in soon.anchor()]


@pytest.mark.parametrize("mixing", [0.0, 0.25, 1.0])
def test_results_are_mixed_with_the_local_parameters(mixing):
    job = Job(loop_of(delay=2, mixing=mixing), 2).run(5)
    job.inner()
    own = job.params
    job.outer()
    for rank in range(2):
        for p, x, found in zip(own[rank], job.anchor(), job.params[rank], strict=True):
            assert np.allclose(found, mixing * p + (1 - mixing) * x, rtol=1e-6, atol=1e-7)
            assert np.array_equal(found, x) == (mixing == 0)


def test_half_precision_parameters_have_float32_shared_parameters():
    """A round without inner steps moves nothing: the rounding to bfloat16 is not part of the outer gradient."""
    torch = pytest.importorskip("torch")
    outer = qcomp.SGD(learning_rate=1e-3)  # moves smaller than bfloat16 resolves, which add up in float32
    job = Job(qcomp.OuterLoop(every=1, outer=outer), 2, make=lambda x: torch.tensor(x).bfloat16())
    start = job.anchor()
    for _ in range(3):
        for rank in range(2):
            job.params[rank] = [p - 0.25 for p in job.params[rank]]
        job.outer()
    for x, y, p in zip(start, job.anchor(), job.params[0], strict=True):
        assert np.allclose(x - y, 3e-3 * 0.25, rtol=0.02)
        assert p.dtype == torch.bfloat16
    before = job.anchor()
    job.outer()
    assert [x.tobytes() for x in before] == [x.tobytes() for x in job.anchor()]


def test_returned_parameters_share_no_memory_with_the_state():
    """So inner steps may write in place, as torch optimizers do."""
    new, old = Job(loop_of(every=2, delay=1), 1), Job(loop_of(every=2, delay=1), 1)
    for _ in range(8):
        old.run(1)
        new.inner()
        (found,) = new.outer()
        held = [x for arrays in found[1].arrays.values() for x in arrays]
        assert not any(np.shares_memory(p, x) for p in found[0] for x in held)
        new.params = [[p.copy() for p in found[0]]]
        for p in found[0]:
            p.fill(np.nan)
    assert new.held() == old.held()


@pytest.mark.parametrize("kernels", ["pure", "auto"])
def test_arguments_are_never_written_to(kernels):
    """With and without kernels, which may reuse buffers only with permission: the state passed in does not change."""
    loop = loop_of(every=2, fragments=2, delay=1, mixing=0.5, decay=0.5, outer=qcomp.Adam(learning_rate=0.1))
    with qcomp.backends.use(kernels):
        job = Job(loop, 2)
        for _ in range(6):
            job.inner()
            for params, state in zip(job.params, job.states, strict=True):
                residuals = [*state.exchange.worker, *state.exchange.server]
                moments = [*state.momentum, *state.variance, *residuals]
                for x in [*params, *moments, *(x for xs in state.arrays.values() for x in xs)]:
                    if isinstance(x, np.ndarray):  # not a scalar
                        x.flags.writeable = False
            job.outer()
    assert job.states[0].numbers == {"rounds.0": 3.0, "rounds.1": 2.0}


def test_warm_up_averages_every_step_and_then_stops():
    loop = loop_of(warmup=3)
    job = Job(loop, 2)
    for step in range(3):
        grads = [moves(rank, step) for rank in range(2)]
        means = lockstep([loop.average_stages(g, s) for g, s in zip(grads, job.states, strict=True)])
        assert [m.tobytes() for m in means[0]] == [
            ((a + b) / 2).astype(np.float32).tobytes() for a, b in zip(*grads, strict=True)
        ]
        assert job.states[0].stage == "warmup"
        job.params = [
            [p - m for p, m in zip(ps, ms, strict=True)] for ps, ms in zip(job.params, means, strict=True)
        ]
        job.outer()
    assert job.states[0].stage == "local"
    assert [x.tobytes() for x in job.anchor()] == [p.tobytes() for p in job.params[0]]
    (grads,) = lockstep([loop.average_stages(g := moves(0, 3), job.states[0])])
    assert grads is g
    first = job.anchor()
    job.run(3)
    assert [x.tobytes() for x in job.anchor()] == [x.tobytes() for x in first]
    job.run(1)  # the fourth local step ends the first outer round
    assert [x.tobytes() for x in job.anchor()] != [x.tobytes() for x in first]


def test_every_tensor_is_in_one_fragment_and_fragments_are_balanced():
    rng = np.random.default_rng(0)
    for count in (1, 2, 5):
        sizes = [int(n) for n in rng.integers(0, 1000, 40)]
        fragments = assign(sizes, count)
        assert sorted(i for members in fragments for i in members) == list(range(40))
        loads = [sum(sizes[i] for i in members) for members in fragments]
        assert max(loads) - min(loads) <= max(sizes)
    assert all(assign([5, 0, 0], 3))
    for every, count in ((1, 1), (7, 3), (5, 5), (12, 4)):
        turns = [due(step, every, count) for step in range(1, 2 * every + 1)]
        assert turns[:every] == turns[every:]
        assert sorted(t for t in turns[:every] if t is not None) == list(range(count))


@pytest.mark.parametrize("exact", [LARGE, None])
def test_a_loop_without_compression_has_no_residuals_and_no_warning(exact):
    """Identity keeps no residuals, and policies do not warn that it compresses nothing."""
    job = Job(qcomp.OuterLoop(every=2, exact=exact), 2).run(2)
    assert job.states[0].exchange.worker == ()
    assert all(job.states[0].exact)


@pytest.mark.parametrize(
    "loop",
    [
        loop_of(),
        loop_of(every=1),
        loop_of(every=6, fragments=3, delay=2, mixing=0.5),
        loop_of(every=5, fragments=2, delay=4, warmup=3),
        loop_of(every=6, fragments=2, delay=2, warmup=3, turn="apply"),
    ],
    ids=["plain", "every step", "fragments", "long delay", "sent early"],
)
def test_exchanges_announces_the_steps_with_exchanges(loop):
    params = [np.ones(40, np.float32), np.ones((7, 5), np.float32), np.ones(3, np.float32)]
    states = lockstep([loop.init_stages(params, rank=rank, size=2) for rank in range(2)])
    mine = [params, params]
    seen = set()
    for _ in range(20):
        expected = {loop.exchanges(state) for state in states}
        stages = [loop.stages([p + 1 for p in own], state) for own, state in zip(mine, states, strict=True)]
        yielded = []

        results = lockstep([watched(one, yielded.append) for one in stages])
        assert expected == {bool(yielded)}
        seen |= expected
        mine, states = [list(p) for p, _ in results], [state for _, state in results]
    assert seen == ({True} if loop.every == 1 else {True, False})


@pytest.mark.slow
def test_a_matrix_moves_again_after_a_long_rest():
    """PowerSGD starts from its last factor: the decay applies to residuals only."""
    loop = loop_of(**LOW_RANK, every=1, decay=0.5)
    params = begun()
    alone = qcomp.comm.LocalCommunicator.alone()
    state = loop.init(params, alone)
    for _ in range(300):
        params, state = loop.step(params, state, alone)
    moved, state = loop.step([p - 1 for p in params], state, alone)
    assert all(np.allclose(p - m, 1) for p, m in zip(params, moved, strict=True))


@pytest.mark.parametrize("steps", [0, 2, 3, 6])
def test_shared_parameters_are_copies(steps):
    """Inner steps and evaluations may write to theirs, in the warm-up, at its end and after it."""
    job = Job(loop_of(warmup=3), 1).run(steps)
    (params,), (state,) = job.params, job.states
    of_all = [*params, *state.arrays["anchor"], *job.loop.shared(params, state)]
    assert not any(np.shares_memory(x, y) for x, y in combinations(of_all, 2))


def test_ranks_rounds_models_and_seeds_draw_different_numbers():
    """All have the same outer gradients here, so only draws can make their messages differ."""
    moved = np.arange(-32, 32, dtype=np.float32) / 32  # no difference is rounded
    found = {}

    def watched(stages, *what):
        arrived, sent = None, []
        while True:
            try:
                request = stages.send(arrived)
            except StopIteration as stop:
                (found[what],) = [
                    b"".join(m.tobytes() for m in x.send) for x in sent if isinstance(x, AllToAll)
                ]
                return stop.value
            sent.append(request)
            arrived = yield request

    for seed, name in ((0, "w"), (1, "w"), (0, "v")):
        loop = qcomp.OuterLoop(
            every=1,
            compressor=qcomp.QSGD(levels=1, bucket_size=16),
            averaging=qcomp.Averaging(feedback=False),
            exact=None,
            seed=seed,
        )
        start = np.zeros_like(moved)
        states = lockstep([loop.init_stages(start, rank=rank, size=2, names=[name]) for rank in range(2)])
        for number in range(2):
            ranks = lockstep(
                [
                    watched(loop.stages(start - moved, state), seed, name, rank, number)
                    for rank, state in enumerate(states)
                ]
            )
            states = [state for _, state in ranks]
            start = ranks[0][0]
    assert len(found) == len(set(found.values())) == 12
