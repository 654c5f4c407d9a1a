"""An asynchronous outer loop waits for nobody, and neither loses nor repeats anything, whoever dies, stops or joins."""

import random
from itertools import combinations

import numpy as np
import pytest

import qcomp
from qcomp.core.outer.mailbox import answer
from tests.outer.jobs import begun, moves
from tests.outer.mailboxes import Box, World, loop_of

Asynchronous = qcomp.outer.Asynchronous


EXACT_AT_ONCE = loop_of(grace=0.0, compressor=qcomp.Identity(), outer=qcomp.SGD(learning_rate=1.0))


def any_order(loop, seed, count=3, requests=900, weight=None):
    """Let ranks make their requests in a random order, die, stop for long, and join; return the world."""
    draw = random.Random(seed)
    world = World(loop, count, weight)
    paces = {}
    for _ in range(requests):
        alive = world.alive
        weights = [paces.setdefault(rank.number, draw.choice([1, 1, 4, 16])) for rank in alive]
        rank = draw.choices(alive, weights)[0]
        world.go(rank)
        world.box.clock += draw.random()
        chance = draw.random()
        if chance < 0.004 and len(alive) > loop.quorum:
            rank.is_alive = False
        elif chance < 0.012 and len(alive) < 5:
            world.join()
        elif chance < 0.03:
            paces[rank.number] = draw.choice([0.01, 1, 4])
    return world


def weight_of(step):
    return float(step % 3 + 1)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("seed", range(120))
def test_nothing_is_lost_in_any_order(seed):
    loop = loop_of(quorum=seed % 3 + 1, max_age=seed % 2, every=1 + seed % 4, grace=float(seed % 4))
    world = any_order(loop, seed, weight=weight_of if seed % 5 == 0 else None)
    assert len(world.box.rounds) >= 3


@pytest.mark.slow
def test_random_orders_reach_what_is_rare():
    """Contributions late by rounds, ranks that go on from a snapshot, and contributions that are taken back."""
    ages, jumps, returned = set(), 0, 0

    class Counted(Asynchronous):
        def _jumped(self, state, snapshot):
            nonlocal jumps
            jumps += 1
            return super()._jumped(state, snapshot)

        def step_requests(self, params, state, now, **options):
            nonlocal returned
            found, after = yield from super().step_requests(params, state, now, **options)
            last, _ = after.counted.get(state.rank, (0, 0))
            returned += (
                state.sent is not None and after.sent is not state.sent and last < state.sent.name.number
            )
            ages.update(member.age for member in after.members)
            return found, after

    for seed in range(8):
        any_order(loop_of(Counted, quorum=1, max_age=1, every=1, grace=0), seed)
    assert ages == {0, 1}
    assert jumps
    assert returned


@pytest.mark.slow
@pytest.mark.parametrize("quorum", [1, 2])
def test_a_rank_may_die_at_any_request(quorum):
    """The others go on; the dead rank is missed for a grace period at most."""
    loop = loop_of(quorum=quorum)
    for at in range(60):
        world = World(loop).run(2)
        victim = world.ranks[1]
        for turn in range(at):
            world.go(victim)
            if turn % 5 == 4:
                world.run(1, world.ranks[0], world.ranks[2])
        victim.is_alive = False
        before = len(world.box.rounds)
        world.run(12)
        assert len(world.box.rounds) >= before + 2


@pytest.mark.slow
@pytest.mark.parametrize("pause", [3, 40])
def test_a_rank_may_stop_at_any_request_and_come_back(pause):
    """Meanwhile the others close rounds, and delete what nobody needs who looks now and then."""
    for at in range(1, 60):
        world = World(loop_of(every=1)).run(2)
        stopped, *others = world.ranks
        for _ in range(at):
            world.go(stopped)
        world.run(pause, *others)
        world.run(6)
        assert stopped.state.version >= len(world.box.rounds) - 1 > pause / 3 - 1
        assert stopped.number in {name.rank for name in world.box.rounds[-1]}


@pytest.mark.slow
def test_a_rank_may_join_at_any_request():
    for at in range(0, 80, 3):
        world = World(loop_of(), 2)
        first, second = world.ranks
        for _ in range(at):
            world.go(first)
            world.go(second)
        world.join()
        world.run(10, seconds=2)
        assert min(rank.state.version for rank in world.ranks) >= len(world.box.rounds) - 1
        assert world.ranks[2].number in {name.rank for name in world.box.rounds[-1]}


@pytest.mark.slow
def test_two_ranks_close_the_same_round_in_every_interleaving():
    """A third rank has sent its contribution; who comes first decides which contributions the round has."""
    closed = set()
    for turns in combinations(range(12), 6):
        world = World(EXACT_AT_ONCE, 3)
        while any(rank.state is None or rank.state.sent is None for rank in world.ranks):
            world.run(1)
        world.go(world.ranks[2])
        world.go(world.ranks[2])
        for turn in range(12):
            world.go(world.ranks[turn in turns])
        closed.add(tuple(name.rank for name in world.box.rounds[0]))
    assert closed == {(10, 12), (11, 12), (10, 11, 12)}


def test_no_rank_waits_for_a_slow_one():
    """One rank is four times slower: each makes its steps at its own pace, and all that it does counts."""
    world = World(loop_of(every=4, max_age=4, grace=2.0), 4)
    *fast, slow = world.ranks
    for second in range(160):
        for rank in fast:
            world.run(1, rank, seconds=0)
        if second % 4 == 3:
            world.run(1, slow, seconds=0)
        world.box.clock += 1
    assert [rank.steps for rank in fast] == [159] * 3  # the first second is that of their beginning
    assert slow.steps == 39
    assert len(world.box.rounds) >= 0.75 * 160 / 4
    merged = [name for names in world.box.rounds for name in names if name.rank == slow.number]
    assert [name.number for name in merged] == list(range(1, len(merged) + 1))
    assert len(merged) >= 9  # of ten rounds of its own


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": qcomp.Identity()},
        {},
        {"outer": qcomp.Adam(learning_rate=0.1)},
        {"outer": qcomp.Lamb(learning_rate=0.1)},
        {"compressor": qcomp.QSGD(levels=3, bucket_size=8)},
        {
            "compressor": qcomp.TopK(4, 16, value_bits=2),
            "averaging": qcomp.Averaging(topology="all_gather", divisor="senders"),
        },
        {"averaging": qcomp.Averaging(topology="all_gather", feedback=False)},
    ],
    ids=["exact", "sign", "Adam", "Lamb", "QSGD", "SparseLoCo", "without feedback"],
)
def test_ranks_that_are_in_time_do_what_the_outer_loop_does(changes):
    """The same bits in every round, if all ranks come to the end of a round together."""
    averaging = changes.get("averaging", qcomp.Averaging(topology="all_gather"))
    loop = loop_of(every=3, quorum=3, **{**changes, "averaging": averaging})
    box = Box()

    def begin(rank):
        return answer(loop.begin_requests(begun(), 0.0, rank=rank), box)

    ranks = [begin(rank) for rank in range(3)]
    comms = qcomp.comm.run_local(3, lambda comm: _synchronous(loop.loop, comm))
    for step in range(9):
        for rank, (params, state) in enumerate(ranks):
            new = [np.asarray(p - m) for p, m in zip(params, moves(rank, step), strict=True)]
            ranks[rank] = loop.step(new, state, box)
        for _ in range(2):  # send, and apply
            ranks = [loop.exchange(params, state, box) for params, state in ranks]
            box.clock += 5
        ranks = [loop.exchange(params, state, box) for params, state in ranks]
        for (params, state), expected in zip(ranks, comms, strict=True):
            if step % 3 == 2:
                assert state.version == step // 3 + 1
                assert [p.tobytes() for p in params] == expected[step]
                assert [p.tobytes() for p in loop.shared(params, state)] == expected[step]


def _synchronous(loop, comm):
    params, found = begun(), []
    state = loop.init(params, comm)
    for step in range(9):
        params = [np.asarray(p - m) for p, m in zip(params, moves(comm.rank, step), strict=True)]
        params, state = loop.step(params, state, comm)
        found.append([p.tobytes() for p in params])
    return found


@pytest.mark.parametrize("outer", [qcomp.Adam, qcomp.Lion, qcomp.Lamb])
def test_a_snapshot_has_all_that_the_outer_optimizer_holds(outer):
    """A rank that begins from one makes the same rounds as a rank that has applied all."""
    box = Box()
    loop = loop_of(
        every=1, quorum=1, grace=0.0, snapshot=3, outer=outer(learning_rate=lambda rounds: 0.5 / (1 + rounds))
    )
    params, state = loop.begin(begun(), box)
    for step in range(12):
        new = [np.asarray(p - m) for p, m in zip(params, moves(0, step), strict=True)]
        params, state = loop.step(new, state, box)
    assert state.version > max(int(name) for name in box.names("shared")) > 0
    for name in [name for name in box.files if name.startswith("sent")]:
        box.delete(name)
    other, joined = loop.begin(begun(), box)
    assert 0 < joined.version < state.version
    box.files.update(box.ever)
    other, joined = loop.exchange(other, joined, box)
    assert joined.version == state.version
    for kind in ("momentum", "variance"):
        pairs = zip(getattr(joined.shared, kind), getattr(state.shared, kind), strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pairs)
    assert [p.tobytes() for p in loop.shared(other, joined)] == [
        p.tobytes() for p in loop.shared(params, state)
    ]


def test_ranks_end_at_the_same_round():
    """Whoever stops at round 5 has the same shared parameters as all others, without waiting for them."""
    for seed in range(10):
        draw = random.Random(seed)
        world = World(loop_of(grace=0.0, quorum=1 + seed % 2, every=1), 3)
        while running := [rank for rank in world.ranks if rank.state is None or rank.state.version < 5]:
            rank = draw.choice(running)
            while not world.go(rank):
                pass
            world.box.clock += 1
        assert {rank.state.version for rank in world.ranks} == {5}
        assert len(world.box.rounds) == 5


def test_a_contribution_that_nobody_sees_for_too_long_is_taken_back_and_sent_again():
    world = World(loop_of(every=2, max_age=1), 3).run(3)
    slow = world.ranks[0]
    hidden = slow.state.sent.name
    world.box.hidden.add(hidden.path)
    world.run(8)
    world.box.hidden.clear()
    world.run(8)
    merged = [name.number for names in world.box.rounds for name in names if name.rank == slow.number]
    assert hidden.number not in merged
    assert hidden.number + 1 in merged


@pytest.mark.parametrize("max_age", [1, 2])
def test_late_contributions_count_in_the_next_round_with_their_age(max_age):
    world = World(loop_of(every=2, max_age=max_age), 3).run(3)
    late = world.ranks[0].state.sent.name
    world.box.hidden.add(late.path)
    while not world.box.rounds:
        world.run(1)
    world.box.hidden.clear()
    world.run(1)
    while all(rank.state.version < 2 for rank in world.ranks):
        world.run(1)
    state = next(rank.state for rank in world.ranks if rank.state.version == 2)
    ages = {member.rank: member.age for member in state.members}
    assert ages == {10: 1, 11: 0, 12: 0}
    world.run(4)  # which checks each rank once more


@pytest.mark.slow
def test_an_interrupted_request_changes_nothing_and_can_be_repeated():
    """Also if the mailbox did what was asked before it failed: nothing counts twice."""
    for at in range(40):
        world = World(loop_of(every=1), 2).run(3)
        rank = world.ranks[0]
        params, state, steps, seen = rank.params, rank.state, 0, 0
        failing = _Failing(world.box, at)
        while steps < 12:
            moved = moves(rank.number, rank.steps + steps, dtype=np.float64)
            new = [p - m for p, m in zip(params, moved, strict=True)]
            try:
                params, state = world.loop.step(new, state, failing)
            except qcomp.CommunicatorError:
                seen += 1
                continue
            steps += 1
            rank.params, rank.state = params, state
            rank.computed = [c + m for c, m in zip(rank.computed, moved, strict=True)]
            world.check(rank)
            world.run(1, world.ranks[1])
        assert seen == 1


class _Failing:
    """A mailbox that fails once, after the request."""

    def __init__(self, box, at):
        self._box, self._left = box, at
        self.now = box.now

    def __getattr__(self, verb):
        def call(*given):
            found = getattr(self._box, verb)(*given)
            self._left -= 1
            if self._left == -1:
                raise qcomp.CommunicatorError("lost")
            return found

        return call


def test_too_few_ranks_are_an_error_in_time():
    world = World(loop_of(timeout=50.0, quorum=3), 3).run(9)
    assert world.box.rounds
    world.ranks[2].is_alive = False
    with pytest.raises(
        qcomp.CommunicatorError, match=r"no round could be applied for 5\d s after round \d+"
    ) as info:
        world.run(70)
    assert "the quorum is 3, and ranks 10 and 11 contributed (this is rank 10)" in str(info.value)
    world.check(world.ranks[0])
    world.join()
    world.ranks[0].go_on()
    before = len(world.box.rounds)
    world.box.clock -= 60  # the error comes back until a round closes
    world.run(12)
    assert len(world.box.rounds) > before


def test_a_round_that_cannot_be_read_is_an_error_in_time():
    world = World(loop_of(timeout=50.0, quorum=1, snapshot=100), 2).run(4)
    late, other = world.ranks
    world.run(12, other)
    for name in world.box.rounds[late.state.version]:
        world.box.files.pop(name.path)
    with pytest.raises(
        qcomp.CommunicatorError,
        match="the next round has closed, but one of its contributions cannot be read",
    ):
        world.run(70, late)


def test_what_does_not_fit_is_refused():
    with pytest.raises(TypeError, match=r"loop is None; expected a qcomp\.OuterLoop"):
        Asynchronous(loop=None, quorum=1)
    for changes in ({"fragments": 2}, {"delay": 1}, {"warmup": 1}, {"mixing": 0.5}):
        (name,) = changes
        with pytest.raises(ValueError, match=f"loop has {name}="):
            Asynchronous(loop=qcomp.OuterLoop(every=2, **changes), quorum=1)
    for averaging in (qcomp.Averaging(topology="ring"), qcomp.PowerSGD(rank=1)):
        with pytest.raises(ValueError, match="loop has averaging="):
            Asynchronous(loop=qcomp.OuterLoop(every=2, averaging=averaging), quorum=1)
    for name, bad in (
        ("quorum", 0),
        ("quorum", 1.5),
        ("max_age", -1),
        ("snapshot", 0),
        ("grace", -1.0),
        ("timeout", np.inf),
    ):
        with pytest.raises(ValueError, match=f"{name} is "):
            loop_of(**{name: bad})
    with pytest.raises(TypeError, match=r"mailbox is 'folder'; expected a qcomp\.comm\.FolderMailbox"):
        loop_of().begin(begun(), "folder")
    box = Box()
    with pytest.raises(ValueError, match="rank is -1"):
        loop_of().begin(begun(), box, rank=-1)
    params, state = loop_of().begin(begun(), box)
    with pytest.raises(ValueError, match="weight is nan"):
        loop_of().step(params, state, box, weight=float("nan"))
    with pytest.raises(ValueError, match="params has 1 arrays; state has 4"):
        loop_of().step(params[:1], state, box)


def test_a_rank_of_another_job_does_not_join():
    box = Box()
    loop_of().begin(begun(), box)
    before = dict(box.files)
    for loop, params, named in (
        (loop_of(quorum=1), begun(), "quorum is 1 here, and 2"),
        (loop_of(compressor=qcomp.ScaledSign(8)), begun(), "compressor is"),
        (loop_of(outer=qcomp.SGD(learning_rate=0.25)), begun(), "outer.learning_rate is"),
        (loop_of(), begun(dtype=np.float64), "dtypes is"),
        (loop_of(), begun([(8, 5), (7, 6), (3,), ()]), "shapes is"),
    ):
        with pytest.raises(qcomp.MismatchError, match=named):
            loop.begin(params, box)
    assert box.files == before
    loop_of(every=7, grace=0.0, pause=9.0).begin(begun(), box)  # these are each rank's own


def test_weights_on_some_ranks_alone_are_an_error():
    world = World(loop_of(every=1, grace=0.0), 2)
    world.ranks[1].weight = weight_of
    with pytest.raises(qcomp.MismatchError, match="contributed to round 1, and rank 11 gave a weight"):
        world.run(5)
    world = World(loop_of(every=1, grace=0.0), 2).run(5)
    world.join().weight = weight_of
    with pytest.raises(qcomp.MismatchError, match=r"weight is 1\.0, but the ranks of this job pass none"):
        world.run(2)


def test_a_number_that_another_process_uses_is_an_error():
    box = Box()
    loop = loop_of(every=1, quorum=1)
    params, state = loop.begin(begun(), box, rank=10)
    with pytest.raises(ValueError, match="rank is 10, which another process of this job uses or has used"):
        loop.begin(begun(), box, rank=10)
    params, state = loop.step(params, state, box)
    loop.step([np.asarray(p + 1) for p in params], state, box)
    other = loop.step([np.asarray(p + 1) for p in params], state._replace(sent=None, number=0, since=1), box)
    with pytest.raises(qcomp.CommunicatorError, match="rank 10 has already sent another contribution 1"):
        loop.exchange(*other, box)


def test_a_mailbox_of_something_else_is_an_error():
    box = Box()
    box.create("shared/0", b"{}\n")
    with pytest.raises(ValueError, match="the folder 'shared' of the mailbox has a file that is no snapshot"):
        loop_of().begin(begun(), box)
    box = Box()
    params, state = loop_of().begin(begun(), box)
    box.create("rounds/1", b"[[0, 1, 1]]")
    with pytest.raises(qcomp.CommunicatorError, match=r"round 1 is '\[\[0, 1, 1\]\]'; expected at least 2"):
        loop_of().exchange(params, state, box)


def test_a_value_that_is_not_finite_stays_on_its_rank():
    box = Box()
    loop = loop_of(every=1, quorum=1, grace=0.0)
    params, state = loop.begin(begun(), box)
    bad = [np.asarray(p * np.nan) for p in params]
    with pytest.raises(qcomp.NonFiniteError, match=r"the outer gradient of '0' on rank \d+ is not finite"):
        loop.step(bad, state, box)
    assert not box.names("sent")
    new, state = loop.step([np.asarray(p + 1) for p in params], state, box)
    assert loop.exchange(new, state, box)[1].version == 1


def test_steps_without_tokens_are_not_sent():
    box = Box()
    loop = loop_of(every=1, quorum=1, grace=0.0)
    params, state = loop.begin(begun(), box)
    for weight in (0.0, 0.0, 5.0):
        assert state.sent is None
        params, state = loop.step(params, state, box, weight=weight)
    assert state.sent.weight == 5


def test_parameters_may_be_written_to_in_place():
    def run(step_of):
        box, loop = Box(), loop_of(every=2, quorum=1, grace=0.0)
        params, state = loop.begin(begun(), box, rank=1)
        for step in range(12):
            params, state = loop.step(step_of(params, moves(1, step)), state, box)
        return box.files

    def in_place(params, moved):
        for p, m in zip(params, moved, strict=True):
            np.subtract(p, m, out=p)
        return params

    assert run(in_place) == run(
        lambda params, moved: [np.asarray(p - m) for p, m in zip(params, moved, strict=True)]
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rounding_of_parameters_does_not_count_as_progress(dtype):
    """A rank that moves with rounds of others, and makes no progress itself, has nothing to send."""
    box = Box()
    loop = loop_of(every=1, quorum=1, grace=0.0, compressor=qcomp.Identity())
    first = [np.linspace(1, 2, 50).astype(dtype)]
    idle, still = loop.begin(first, box)
    params, state = loop.begin(first, box)
    for step in range(20):
        params, state = loop.step([params[0] - np.asarray(0.01 * step, dtype)], state, box)
        idle, still = loop.exchange(idle, still, box)
        assert idle[0].dtype == dtype
    assert still.version > 15
    assert np.abs(still.start[0] - idle[0].astype(still.start[0].dtype)).max() == 0
    assert idle[0].tobytes() == loop.shared(idle, still)[0].tobytes()


@pytest.mark.parametrize("name", ["readonly", "torch", "strict", pytest.param("jax", marks=pytest.mark.slow)])
def test_other_libraries_give_the_same_bytes(libraries, name):
    library = libraries[name]

    def run(make, numpy):
        box, loop = Box(), loop_of(every=2, quorum=2, grace=0.0)
        ranks = [loop.begin([make(p) for p in begun()], box, rank=rank) for rank in range(2)]
        for step in range(10):
            for rank, (params, state) in enumerate(ranks):
                moved = [make(m) for m in moves(rank, step)]
                new = [p - m for p, m in zip(params, moved, strict=True)]
                new = [np.asarray(p) for p in new] if make is np.array else new
                ranks[rank] = loop.step(new, state, box, weight=1.0 + rank)
            box.clock += 1
        return box.ever, [numpy(p).tobytes() for params, _ in ranks for p in params]

    files, params = run(library.array, library.numpy)
    expected, expected_params = run(np.array, np.asarray)
    assert {key: files[key] for key in files if "rounds" in key or "sent" in key} == {
        key: expected[key] for key in expected if "rounds" in key or "sent" in key
    }
    assert params == expected_params


def test_files_are_deleted():
    world = World(loop_of(every=1, grace=0.0, snapshot=4), 3)
    most = 0
    for _ in range(60):
        world.run(1)
        most = max(most, len(world.box.names("sent")))
    assert len(world.box.rounds) > 20
    assert len(world.box.names("shared")) <= 3
    assert most < 3 * (2 * 4 + 4)


# Broken loops, each of which one of the checks above notices.


class CountsTwice(Asynchronous):
    def _open(self, names, state):
        return super()._open(names, state._replace(counted={}))


class LosesWhatIsLate(Asynchronous):
    """Forgets a contribution that no round has merged, instead of taking it back."""

    def _placed(self, tensors, params, state, moved, unmerged=()):
        new, after = Asynchronous._placed(tensors, params, state, moved, unmerged)
        if unmerged and state.sent is None:
            after = after._replace(start=tuple(x - u for x, u in zip(after.start, unmerged, strict=True)))
        return new, after


class TakesBackTooEarly(Asynchronous):
    def step_requests(self, params, state, now, **options):
        if state.sent is not None and state.sent.is_there:
            start = tuple(x + u for x, u in zip(state.start, state.sent.moved, strict=True))
            state = state._replace(sent=None, start=start)
        return (yield from super().step_requests(params, state, now, **options))


class AddsInItsOwnOrder(Asynchronous):
    def _applied(self, state, names, contributions):
        after = super()._applied(state, names, contributions)
        if state.rank % 2:
            turned = self._means(state.shared, contributions[::-1])
            x = tuple(
                np.nextafter(p, 9) if not np.array_equal(a, b) else p
                for p, a, b in zip(
                    after.shared.arrays["anchor"],
                    turned,
                    self._means(state.shared, contributions),
                    strict=True,
                )
            )
            after = after._replace(shared=after.shared._replace(arrays={**after.shared.arrays, "anchor": x}))
        return after


class ClosesBelowTheQuorum(Asynchronous):
    def _close(self, state, now):
        below = loop_of(every=self.every, quorum=self.quorum - 1, max_age=self.max_age)
        return (yield from Asynchronous._close(below, state, now))


class MergesEqually(Asynchronous):
    def _means(self, shared, contributions):
        return super()._means(shared, [each._replace(weight=1.0) for each in contributions])


class ForgetsWhatItOwes(Asynchronous):
    def _departed(self, tensors, state):
        return super()._departed(tensors, state._replace(owed=tuple(0 * e for e in state.owed)))


class MovesOnlyWithItsOwnRounds(Asynchronous):
    def _placed(self, tensors, params, state, moved, unmerged=()):
        new, after = Asynchronous._placed(tensors, params, state, moved, unmerged)
        return (list(tensors) if unmerged else new), after


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "broken",
    [
        CountsTwice,
        LosesWhatIsLate,
        TakesBackTooEarly,
        AddsInItsOwnOrder,
        ClosesBelowTheQuorum,
        MergesEqually,
        ForgetsWhatItOwes,
        MovesOnlyWithItsOwnRounds,
    ],
)
def test_a_broken_loop_is_noticed(broken):
    with pytest.raises((AssertionError, qcomp.CommunicatorError)):  # noqa: PT012
        for seed in range(20):
            loop = loop_of(broken, quorum=2, max_age=seed % 2, every=1, grace=0.0)
            any_order(loop, seed, weight=weight_of)
