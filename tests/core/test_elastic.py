"""Ranks die, leave and join in every exchange of every optimizer: the others agree, and owed amounts add up."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.core.elastic.meeting import meet
from qcomp.core.numeric.arrays import host_bytes
from qcomp.elastic import Elastic, ElasticState
from qcomp.testing import Death, lockstep, until_death
from tests.core.elastic_jobs import (
    JOBS,
    LOOPS,
    World,
    kills,
    left_with,
    owed_by,
    require_owed,
    whole_run,
    without,
    world,
)
from tests.core.elastic_scenarios import die_in_resumes, die_in_steps, join, leave
from tests.optimizers.every import EVERY, SHAPES, growing

pytestmark = [
    pytest.mark.filterwarnings("ignore:the variance of OneBitAdam no longer fits"),
    pytest.mark.filterwarnings("ignore:a state of . ranks resumes with"),
]

STEPS = 12
STEPPING = [name for name in JOBS if name not in LOOPS]
"""Jobs in which ranks wait for each other in every step, or soon do."""
QUICK = ("1-bit", "0/1", "EF21", "Muon", "1-bit, hierarchical", "streaming")


def jobs(quick: Any = QUICK, *, every: Any = JOBS) -> list[Any]:
    """Return every job; most of them are marked slow."""
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.exhaustive, id=name) for name in every
    ]


def moments(job: World) -> list[int]:
    """Return the steps in which ranks die: the first and last steps, the first of each stage, and those before them."""
    run = whole_run(job, STEPS)
    stages = [helds[0].state.stage for helds in run]
    edges = [i for i in range(1, STEPS) if stages[i] != stages[i - 1]]
    return sorted({0, *edges, *(i - 1 for i in edges), STEPS - 1})


def fingerprint(run: Any) -> list[Any]:
    """Return everything that ranks hold in a run."""
    return [
        [host_bytes(x) for x in (*held.params, *held.state.momentum, *held.state.exchange.worker)]
        for helds in run
        for held in helds
    ]


def snapshot(held: ElasticState, label: int) -> Any:
    return next(s for s in held.history if s.label == label)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", jobs())
def test_a_rank_dies_in_any_exchange_of_a_step(name):
    job = world(name)
    before = fingerprint(whole_run(job, STEPS))
    assert die_in_steps(job, STEPS, moments(job))
    assert fingerprint(whole_run(job, STEPS)) == before  # nothing that anybody held has changed


@pytest.mark.parametrize("lost", ["drop", "restore"])
@pytest.mark.parametrize("name", ["1-bit", "0/1", "streaming"])
def test_few_snapshots_are_kept_and_copies_until_the_next_ones(name, lost):
    """Also in steps that exchange nothing, of which there may be thousands."""
    run = whole_run(world(name, lost=lost, every=2), 2 * STEPS)
    copied = False
    for helds in run:
        for held in helds:
            assert len(held.history) <= (3 if lost == "restore" else 2)
        copied = copied or any(s.left is not None for s in helds[0].history)
        assert all(any(s.left is not None for s in held.history) == copied for held in helds)
    assert copied == (lost == "restore")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", jobs())
def test_a_rank_leaves(name):
    job = world(name)
    assert leave(job, STEPS, moments(job)[::2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", jobs(("1-bit",)))
def test_a_rank_joins_and_any_dies_meanwhile(name):
    job = world(name)
    assert join(job, STEPS, moments(job)[::2])


@pytest.mark.parametrize("name", jobs(("EF21",)))
def test_a_rank_dies_while_the_others_resume(name):
    job = world(name, "abcd")
    assert die_in_resumes(job, STEPS, moments(job)[1::2])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", jobs(("1-bit", "Muon"), every=STEPPING))
@pytest.mark.parametrize("every", [1, 3])
def test_restored_from_a_neighbour_as_if_nobody_had_died(name, every):
    """With a new rank in its place, the job continues bit for bit."""
    job = world(name, lost="restore", every=every)
    run = whole_run(job, STEPS)
    for step in moments(job)[1:]:  # in the first step there are no copies yet
        helds = run[step]
        for death, results in kills(lambda h=helds: job.steps(h), job.size, all_reaches=every == 3):
            left = left_with(helds, results, death.rank)
            left.insert(death.rank, None)
            again, report = job.resume(left, job.hosts)
            assert (report["restored_ranks"], report["dropped_ranks"], report["joined_ranks"]) == (1, 0, 1)
            assert report["repeated_steps"] <= every + 1
            for _ in range(2):
                same_as = run[again[0].state.step]
                for held, expected in zip(again, same_as, strict=True):
                    found, wanted = job.opt.state_dict(held.state), job.opt.state_dict(expected.state)
                    assert found.keys() == wanted.keys()
                    for key, value in wanted.items():
                        assert np.asarray(found[key]).tobytes() == np.asarray(value).tobytes(), key
                    if not job.opt.apart(held.state.stage):
                        assert [p.tobytes() for p in held.params] == [p.tobytes() for p in expected.params]
                if again[0].state.step == STEPS:
                    break
                again = lockstep(job.steps(again))


@pytest.mark.parametrize("name", jobs(("1-bit",), every=STEPPING))
def test_restored_with_fewer_ranks(name):
    """The ranks then owe what all old ranks owed when they last copied."""
    job = world(name, lost="restore", every=4)
    run = whole_run(job, STEPS)
    for step in range(1, STEPS, 3):
        for death, results in kills(lambda s=step: job.steps(run[s]), job.size, all_reaches=True):
            left = left_with(run[step], results, death.rank)
            again, report = job.resume(left, without(job.hosts, death.rank))
            assert (report["restored_ranks"], report["dropped_ranks"]) == (1, 0)
            old = run[again[0].state.step]
            assert all(held.history[0].left is not None for held in again)
            require_owed(job, [h.state for h in old], [h.state for h in again], [])
            job.go_on(again, 1)


@pytest.mark.parametrize("name", jobs(("1-bit",), every=STEPPING))
def test_ranks_die_while_they_save(name):
    """If only some ranks have written a new file, all ranks refuse the files, and the old ones load."""
    job = world(name)
    run = whole_run(job, STEPS)
    old, new = ([job.opt.state_dict(h.state) for h in run[step]] for step in (8, 9))

    def loaded(dicts: list) -> list[Any]:
        return lockstep(
            [
                job.opt.load_stages(dicts, held.params, rank=rank, size=job.size, host=job.hosts[rank])
                for rank, held in enumerate(run[8])
            ],
            catch=ValueError,
        )

    for written in range(1, 2**job.size - 1):
        dicts = [(new if written >> rank & 1 else old)[rank] for rank in range(job.size)]
        errors = loaded(dicts)
        assert len({str(error) for error in errors}) == 1
        assert "the dicts belong to different jobs or steps" in str(errors[0])
    for held, state in zip(run[8], loaded(old), strict=True):
        assert fingerprint([[job.elastic.begin(held.params, state)]]) == fingerprint([[held]])


class TestAnOuterLoop:
    """The scenarios above also hold for outer loops."""

    @pytest.mark.parametrize("name", LOOPS)
    @pytest.mark.parametrize("lost", ["drop", "restore"])
    @pytest.mark.parametrize("joins", [False, True])
    def test_the_mean_of_outer_gradients_is_over_the_counted_ranks(self, name, lost, joins):
        """Also of their parameters and of the exchanges under way, so that the next round moves towards their mean."""
        job = world(name, lost=lost, every=1)
        helds = whole_run(job, STEPS)[STEPS - 1]
        assert all(held.state.stage != "warmup" for held in helds)
        left = [*([None] if joins else []), *helds[1:]]
        again, report = job.resume(left, job.hosts[0 if joins else 1 :])
        at = again[-1].history[0].label
        counted = whole_run(job, STEPS)[at][0 if lost == "restore" else 1 :]
        assert (report["restored_ranks"], report["dropped_ranks"]) == (
            (1, 0) if lost == "restore" else (0, 1)
        )
        assert len({held.params[0].tobytes() for held in counted}) > 1
        whole = [job.opt.whole(held.params, held.state).arrays for held in counted]
        assert {kind for arrays in whole for kind in arrays} >= {"anchor", "local"}
        exactly = lost == "restore" and joins
        for number, held in enumerate(again):
            for kind, arrays in job.opt.whole(held.params, held.state).arrays.items():
                for i, x in enumerate(arrays):
                    if exactly:
                        assert x.tobytes() == whole[number][kind][i].tobytes()
                        continue
                    parts = [np.float64(arrays[kind][i]) for arrays in whole]
                    most = np.abs(parts).max(initial=0)
                    # A sum of three, a scaling and a division, each rounded once.
                    assert np.abs(x - np.mean(parts, axis=0)).max(initial=0) <= 5 * 2.0**-24 * most

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("name", LOOPS)
    def test_restored_from_a_neighbour_as_if_nobody_had_died(self, name):
        """With a new rank in its place, from the exchange of the last round on, bit for bit."""
        job = world(name, lost="restore", every=1)
        run = whole_run(job, STEPS)
        cases = 0
        for step in range(6, STEPS):
            for death, results in kills(lambda s=step: job.steps(run[s]), job.size, all_reaches=True):
                left = left_with(run[step], results, death.rank)
                left.insert(death.rank, None)
                again, report = job.resume(left, job.hosts)
                assert (report["restored_ranks"], report["joined_ranks"]) == (1, 1)
                assert report["repeated_steps"] <= job.opt.every + 1
                for expected in (run[again[0].state.step], run[again[0].state.step + 1]):
                    for held, wanted in zip(again, map(job.saved, expected), strict=True):
                        found = job.saved(held)
                        assert found.keys() == wanted.keys()
                        assert all(
                            np.asarray(found[k]).tobytes() == np.asarray(x).tobytes()
                            for k, x in wanted.items()
                        )
                    again = lockstep(job.steps(again))
                cases += 1
        assert cases > 9

    def test_between_two_rounds_ranks_exchange_nothing(self):
        job = world("outer loop", every=1, lost="restore")
        helds = whole_run(job, STEPS)
        silent = [step for step in range(STEPS) if step % 3 != 2]
        for step in silent:
            for stages in job.steps(helds[step]):
                with pytest.raises(StopIteration):
                    next(stages)

    def test_a_resume_goes_back_to_the_parameters_after_the_inner_step(self):
        """If the caller has reported its inner step, a failed exchange does not repeat that step."""
        job = world("outer loop")
        helds = whole_run(job, STEPS)[5]
        stepped = [held.moved([p + 1 + held.state.rank for p in held.params]) for held in helds]
        again, report = job.resume(stepped)
        assert report["repeated_steps"] == 0
        for held, before in zip(again, helds, strict=True):
            assert all(
                (p == q + 1 + held.state.rank).all() for p, q in zip(held.params, before.params, strict=True)
            )

    def test_gradients_are_refused(self):
        job = world("outer loop")
        held = job.begin()[0]
        with pytest.raises(TypeError, match="optimizer is an OuterLoop, whose steps take parameters"):
            job.elastic.stages(held.params, held)

    def test_over_a_communicator(self):
        loop = qcomp.OuterLoop(every=2)
        elastic = Elastic(loop)

        def rank_main(comm: Any) -> list[float]:
            params = np.zeros(3)
            held = elastic.begin(params, loop.init(params, comm))
            for _ in range(4):
                held = elastic.run(lambda p, state: loop.stages(p + comm.rank, state), held, comm)
            return held.params.tolist()

        assert qcomp.comm.run_local(2, rank_main) == [[2.0] * 3] * 2


class TestTheSumIdentity:
    """Sent and owed before = sent and owed after + dropped: exactly, with residuals whose sums are exact."""

    @staticmethod
    def job(topology: str) -> tuple[World, list[ElasticState]]:
        opt = qcomp.CompressedSGD(
            learning_rate=0.5,
            momentum=0.0,
            exact=None,
            compressor=qcomp.ScaledSign(8),
            averaging=qcomp.Averaging(topology=topology),
        )
        job = World(Elastic(opt), "aabb")
        params = [np.ones(s) for s in SHAPES]
        states = lockstep(
            [opt.init_stages(params, rank=rank, size=4, host=host) for rank, host in enumerate("aabb")]
        )
        helds = []
        for rank, state in enumerate(states):
            rng = np.random.default_rng(rank)
            kept = [
                tuple(rng.integers(-1000, 1000, x.shape).astype(np.float64) for x in group)
                for group in (state.exchange.worker, state.exchange.server)
            ]
            exchange = state.exchange._replace(worker=kept[0], server=kept[1])
            helds.append(job.elastic.begin(params, state._replace(exchange=exchange)))
        return job, helds

    @staticmethod
    def total(job: World, helds: list[ElasticState], only: Any = None) -> list[list[Fraction]]:
        lost = [] if only is None else [h.state.rank for h in helds if h.state.rank not in only]
        return [[Fraction(float(x)) for x in t.flat] for t in owed_by(job, [h.state for h in helds], lost)[0]]

    @pytest.mark.parametrize("topology", ["two_phase", "all_gather", "ring", "hierarchical"])
    @pytest.mark.parametrize("dead", [(), (0,), (2,), (1, 3)])
    def test_is_exact(self, topology, dead):
        job, helds = self.job(topology)
        alive = [rank for rank in range(4) if rank not in dead]
        again, _ = job.resume([helds[rank] for rank in alive], "".join("aabb"[rank] for rank in alive))
        before, dropped = self.total(job, helds), self.total(job, helds, dead)
        after = self.total(job, again)
        assert any(x for t in before for x in t)
        assert bool(dead) == any(x for t in dropped for x in t)
        for b, a, d in zip(before, after, dropped, strict=True):
            assert [x - y for x, y in zip(b, d, strict=True)] == a

    @pytest.mark.parametrize("topology", ["two_phase", "hierarchical"])
    def test_is_exact_in_the_next_step_too(self, topology):
        """What the new ranks send and then owe is their gradients and what was owed, without the dropped part."""
        job, helds = self.job(topology)
        again, _ = job.resume(helds[:3], "aab")
        grads = [[np.full(s, float(1 + rank)) for s in SHAPES] for rank in range(3)]
        moved = lockstep([job.elastic.stages(g, h) for g, h in zip(grads, again, strict=True)])
        sent = [(x - y) / 0.5 for x, y in zip(again[0].params, moved[0].params, strict=True)]
        owed = owed_by(job, [h.state for h in again])[0]
        for s, after, before in zip(sent, owed_by(job, [h.state for h in moved])[0], owed, strict=True):
            assert np.abs(s + after - (2.0 + before)).max() < 1e-10

    def test_the_norm_of_dropped_residuals_is_reported(self):
        job = world("1-bit", every=3)
        run = whole_run(job, STEPS)
        _, report = job.resume(run[10][:2], "aa")
        told = run[9][2].state.exchange
        for kind, kept in (("worker", told.worker), ("server", told.server)):
            norm = np.linalg.norm(np.concatenate(kept).astype(np.float64))
            assert abs(report[f"dropped_{kind}_residual"] - norm) <= 1e-6 * norm
            assert norm > 1e-3


class TestWhatIsNoResidual:
    def test_the_mean_of_estimates_stays_what_all_ranks_hold(self):
        """EF21: a mean over the remaining ranks would differ, and stay wrong."""
        job = world("EF21")
        helds = whole_run(job, STEPS)[8]
        for dead in range(3):
            again, _ = job.resume(without(helds, dead), without(job.hosts, dead))
            for held in again:
                for own, mean, before in zip(
                    held.state.exchange.worker,
                    held.state.exchange.server,
                    helds[0].state.exchange.server,
                    strict=True,
                ):
                    assert own.tobytes() == mean.tobytes() == before.tobytes()
                    assert not np.shares_memory(own, mean)

    @pytest.mark.parametrize("replaced", [False, True])
    def test_sums_of_ranks_apart_become_the_mean_over_the_survivors(self, replaced):
        job = world("0/1")
        run = whole_run(job, STEPS)
        helds = next(h for h in run if h[0].state.stage == "local")
        left = without(helds, 1)
        again, _ = job.resume([*left, None] if replaced else left)
        kinds: list[Any] = [lambda s: s.arrays["pending"], lambda s: s.momentum]
        for kind in kinds:
            for i in range(len(SHAPES)):
                mean = np.mean([kind(held.state)[i] for held in left], axis=0)
                for held in again:
                    assert np.abs(kind(held.state)[i] - mean).max() <= 1e-6 * np.abs(mean).max()

    def test_the_state_of_a_dead_owner_starts_anew_or_is_restored(self):
        for lost in ("drop", "restore"):
            job = world("Muon", lost=lost, every=1)
            helds = whole_run(job, STEPS)[8]
            owns = [
                {key for key in job.opt.state_dict(held.state) if key.startswith("owner")} for held in helds
            ]
            dead = next(rank for rank, keys in enumerate(owns) if keys)
            again, _ = job.resume(without(helds, dead))
            step = again[0].state.step
            before, after = (
                {
                    key: value
                    for held in found
                    for key, value in job.opt.state_dict(held.state).items()
                    if key.startswith("owner")
                }
                for found in (whole_run(job, STEPS)[step], again)
            )
            assert before.keys() == after.keys()
            for key, value in after.items():
                same = value.tobytes() == before[key].tobytes()
                assert same if lost == "restore" or key not in owns[dead] else not np.any(value), key


class TestLessUsualDeaths:
    def test_two_neighbours_at_once_are_dropped(self):
        job = world("1-bit", "abcd", lost="restore", every=3)
        helds = whole_run(job, STEPS)[8]
        again, report = job.resume([helds[0], helds[3]])
        assert (report["restored_ranks"], report["dropped_ranks"], report["repeated_steps"]) == (0, 2, 0)
        require_owed(job, [h.state for h in helds], [h.state for h in again], [1, 2])
        again, report = job.resume([helds[0], helds[2]])  # these two are not neighbours
        assert (report["restored_ranks"], report["dropped_ranks"], report["repeated_steps"]) == (2, 0, 2)

    def test_a_death_in_a_new_world_before_its_first_copies(self):
        """The others go back beyond the change of world, to the last copies of the old world."""
        job = world("1-bit", "abcd", lost="restore", every=5)
        run = whole_run(job, STEPS)
        again, report = job.resume(run[7][:3])
        assert report["repeated_steps"] == 2
        (death, results), *_ = kills(lambda: job.steps(again), 3)
        left = left_with(again, results, death.rank)
        final, report = job.resume(left)
        assert final[0].state.step == 5
        require_owed(
            job, [h.state for h in run[5]], [h.state for h in final], [0] if report["dropped_ranks"] else []
        )

    def test_the_last_rank_goes_on_alone_and_others_join(self):
        job = world("1-bit")
        alone, report = job.resume(whole_run(job, STEPS)[8][1:2])
        assert report["dropped_ranks"] == 2
        alone = job.go_on(alone, 1)
        again, report = job.resume([None, alone[0], None])
        assert report["joined_ranks"] == 2
        require_owed(job, [alone[0].state], [h.state for h in again], [])
        job.go_on(again)

    def test_ranks_between_synchronisations_need_not_be_at_the_same_step(self):
        """0/1 Adam: a rank that heard earlier of a death has made fewer silent steps."""
        job = world("0/1")
        run = whole_run(job, STEPS)
        quiet = next(
            i for i in range(2, STEPS) if all(h[0].state.stage == "local" for h in run[i - 1 : i + 1])
        )
        left = [run[quiet][0], run[quiet - 1][1]]
        again, report = job.resume(left, "aa")
        assert report["repeated_steps"] >= 1
        job.go_on(again)

    @pytest.mark.exhaustive
    def test_some_ranks_may_be_several_silent_steps_ahead(self):
        """0/1 Adam: a rank that completed a synchronisation makes silent steps, and then goes back before them."""
        job = world("0/1")
        run = whole_run(job, STEPS + 6)
        ahead = set()
        for start in range(8, 12):
            records: dict[int, ElasticState] = {}

            def several(rank: int, start: int = start, records: dict[int, ElasticState] = records) -> Any:
                held = records[rank] = run[start][rank]
                for _ in range(6):
                    (stages,) = job.steps([held])
                    held = records[rank] = yield from stages
                return held

            for death, _ in kills(
                lambda several=several: [several(r) for r in range(3)], 3, all_reaches=True
            ):
                left = without([records[rank] for rank in range(3)], death.rank)
                common = min(held.state.step for held in left)
                ahead.add(max(held.state.step for held in left) - common)
                again, _ = job.resume(left, without(job.hosts, death.rank))
                assert again[0].state.step == common
                old = run[common]
                require_owed(job, [h.state for h in old], [h.state for h in again], [death.rank])
                job.go_on(again, 1)
        assert max(ahead) > 1

    def test_one_rank_completes_a_step_and_a_resume_that_the_others_do_not(self):
        """It goes back twice to the same snapshot, never to the abandoned step."""
        job = world("1-bit", "abcd")
        helds = whole_run(job, STEPS)[8]
        results = until_death(job.steps(helds), Death(3, 1, [0]))
        first = left_with(helds, results, 3)
        assert [held.state.step for held in first] == [9, 8, 8]
        completed = 0
        for exchange in range(100):
            results = until_death(job.resumes(first), Death(2, exchange, [0]))
            if results[2] is not None:
                break
            completed += not isinstance(results[0], Exception)
            again, _ = job.resume(left_with(first, results, 2))
            assert again[0].state.step == 8
            require_owed(job, [h.state for h in helds], [h.state for h in again], [2, 3])
        assert completed == 1

    @pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
    def test_the_order_of_ranks_makes_no_difference(self, order):
        """The order in which ranks compute between exchanges makes no difference."""
        job = world("1-bit")
        run = whole_run(job, STEPS)
        for step in (3, 8):
            for exchange in range(3):
                deaths = [Death(1, exchange, [2])] * 2
                one, other = (
                    until_death(job.steps(run[step]), death, order=turns)
                    for death, turns in zip(deaths, (None, order), strict=True)
                )
                for a, b in zip(one, other, strict=True):
                    assert type(a) is type(b)
                    if isinstance(a, ElasticState):
                        assert fingerprint([[a]]) == fingerprint([[b]])

    def test_ranks_without_a_common_snapshot_are_an_error(self):
        job = world("1-bit")
        run = whole_run(job, STEPS)
        for helds, text in (
            ([None, None], "no snapshot in common"),
            ([run[8][0], run[5][1]], "no snapshot in common"),
            ([run[8][0], run[8][0]], "different jobs"),
        ):
            errors = lockstep(job.resumes(helds), catch=ValueError)
            assert len({str(error) for error in errors}) == 1
            assert text in str(errors[0])

    def test_one_machine_is_left_of_a_hierarchy(self):
        """It averages exactly and keeps no residuals, so it refuses what is owed, on all ranks alike."""
        job = world("1-bit, hierarchical")
        errors = lockstep(job.resumes(whole_run(job, STEPS)[8][:2], "aa"), catch=ValueError)
        assert len({str(error) for error in errors}) == 1
        assert "this optimizer keeps none" in str(errors[0])


def test_the_rule_for_the_common_snapshot():
    """From the facts alone: labels, membership, and which ranks have copies."""

    def facts(since: int, *seats: tuple) -> dict:
        return {"since": since, "seats": [(*seat, []) for seat in seats]}

    behind = facts(0, (4, 0, 3, 4, False), (5, 0, 3, 5, False))
    ahead = facts(0, (5, 1, 3, 5, False), (6, 1, 3, 6, False))
    assert meet([behind, ahead], restoring=False).label == 5
    # A rank that joined with label 6 does not outvote one that has not got that far.
    came = facts(6, (6, 0, 3, 5, False))
    through = facts(0, (5, 1, 2, 5, False), (6, 1, 3, 5, False))
    not_yet = facts(0, (4, 0, 2, 4, False), (5, 0, 2, 5, False))
    meeting = meet([came, through, not_yet], restoring=False)
    assert (meeting.label, meeting.members, meeting.lost) == (5, {1: 1, 0: 2}, ())
    assert meeting.next_label == 7
    copied = facts(0, (3, 1, 3, 3, True), (5, 1, 3, 5, False))
    other = facts(0, (3, 2, 3, 3, True), (5, 2, 3, 5, False))
    assert meet([copied, other], restoring=False).lost == (0,)
    meeting = meet([copied, other], restoring=True)
    assert (meeting.label, meeting.copies, meeting.lost, meeting.repeated) == (3, {0: 0}, (), 2)


class TestFramesInTheWrongPlace:
    """Communicators promise order. These tests deliver a frame twice, in place of the next one."""

    @staticmethod
    def outcomes(begin: Any, count: int) -> list[str]:
        """Return the outcome for each exchange in which rank 0 receives rank 1's previous message again."""
        found = []
        for late in range(1, count):
            seen: list[Any] = []

            def repeated(stages: Any, late: int = late, seen: list[Any] = seen) -> Any:
                arrived = None
                while True:
                    try:
                        arrived = list((yield stages.send(arrived)))
                    except StopIteration as stop:
                        return stop.value
                    seen.append(arrived[1])
                    if len(seen) == late + 1:
                        if seen[-1].shape != seen[-2].shape:
                            raise qcomp.CommunicatorError("another length")  # as every communicator does
                        arrived[1] = seen[-2]

            first, *others = begin()
            try:
                results = lockstep([repeated(first), *others])
            except Exception as error:  # the error of one rank, which then closes the communicator
                found.append("length" if "another length" in str(error) else "error")
                continue
            same = seen[late - 1].tobytes() == seen[late].tobytes()
            found.append("same" if same else "alike" if alike(results) else "apart")
        return found

    def test_a_resume_notices(self):
        """By the length, except in two exchanges."""
        job = world("1-bit")
        helds = [None, *whole_run(job, STEPS)[8][:2]]
        count = exchanges(job.resumes(helds))
        found = self.outcomes(lambda: job.resumes(helds), count)
        assert len(found) == count - 1 > 10
        # Two phases with residual values have the same length: this rank then owes something else. A digest of what the
        # ranks share is as long as a length of facts: this rank then tells its states, and the others expect none.
        assert (set(found), found.count("alike"), found.count("error")) == (
            {"length", "alike", "error"},
            1,
            1,
        )

    def test_a_step_notices_by_length_alone(self):
        """Two all-gather steps have frames of one length: a repeated one sets ranks apart; diagnostics see it."""
        job = world("SGD, all_gather", "ab")
        helds = whole_run(job, STEPS)[4]

        def two_steps(held: Any, rank: int) -> Any:
            held = yield from job.steps(helds)[rank]
            return (yield from job._step(held))

        assert self.outcomes(lambda: [two_steps(h, r) for r, h in enumerate(helds)], 2) == ["apart"]
        watched = qcomp.Diagnostics(job.opt, replicas_every=1)
        other = [helds[0].params, whole_run(job, STEPS)[5][1].params]
        grads = [np.ones(s, np.float32) for s in SHAPES]
        with pytest.warns(UserWarning, match="replicas have drifted apart"):
            lockstep([watched.stages(p, grads, h.state) for p, h in zip(other, helds, strict=True)])


def alike(results: Any) -> bool:
    """Return whether all ranks have the same parameters."""
    helds = [r if isinstance(r, ElasticState) else r[0] for r in results]
    return len({b"".join(np.asarray(p).tobytes() for p in held.params) for held in helds}) == 1


def exchanges(computations: Any) -> int:
    """Return the number of exchanges of some computations."""
    counted: list[int] = []

    def counting(stages: Any) -> Any:
        arrived = None
        while True:
            try:
                request = stages.send(arrived)
            except StopIteration as stop:
                return stop.value
            counted.append(1)
            arrived = yield request

    first, *others = computations
    lockstep([counting(first), *others])
    return len(counted)


def test_every_optimizer_has_a_job_and_bad_settings_are_refused():
    assert set(EVERY) <= set(JOBS)
    with pytest.raises(TypeError, match=r"expected a qcomp\.Optimizer"):
        Elastic(None)
    with pytest.raises(ValueError, match="expected 'drop' or 'restore'"):
        Elastic(qcomp.Adam(learning_rate=0.1), lost="keep")
    with pytest.raises(ValueError, match="expected an integer of at least 1"):
        Elastic(qcomp.Adam(learning_rate=0.1), every=0)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("lost", ["drop", "restore"])
def test_every_library(float64_library, lost):
    """Inputs are not written to, and arrays stay in their library."""
    library = float64_library
    opt = qcomp.OneBitAdam(
        learning_rate=0.1,
        betas=(0.9, 0.9),
        freeze=2,
        exact=qcomp.ExactBelow(10),
        compressor=qcomp.ScaledSign(16),
    )
    elastic = Elastic(opt, lost=lost, every=2)

    def drawn(rank: int, step: int) -> list[Any]:
        return [library.array(g) for g in growing(rank, step)]

    params = [library.array(np.ones(s, np.float32)) for s in SHAPES]
    states = lockstep([opt.init_stages(params, rank=rank, size=3) for rank in range(3)])
    helds = [elastic.begin(params, state) for state in states]
    for step in range(5):
        helds = lockstep([elastic.stages(drawn(rank, step), library.seal(h)) for rank, h in enumerate(helds)])
    resumes = [
        elastic.resume_stages(held, rank=rank, size=3, params=params)
        for rank, held in enumerate([None, helds[0], helds[2]])
    ]
    (held, report), *_ = results = lockstep(resumes)
    assert (report["restored_ranks"], report["dropped_ranks"]) == ((1, 0) if lost == "restore" else (0, 1))
    helds = lockstep([elastic.stages(drawn(rank, 5), library.seal(h)) for rank, (h, _) in enumerate(results)])
    kind = type(library.array([0.0]))
    for held in helds:
        assert all(
            isinstance(x, kind) for x in (*held.params, *held.state.momentum, *held.state.exchange.worker)
        )
        assert fingerprint([[held]])[0][: len(SHAPES)] == fingerprint([[helds[0]]])[0][: len(SHAPES)]


class TestUntilDeath:
    @staticmethod
    def total(x: int, size: int = 3) -> Any:
        parts = yield qcomp.extend.AllGather(np.asarray([x], dtype=np.uint8), (1,) * size)
        parts = yield qcomp.extend.AllGather(parts[0] + parts[1], (1,) * size)
        return int(parts[2][0])

    def test_all_end_if_none_dies_before(self):
        ranks = [self.total(x) for x in (1, 2, 3)]
        assert until_death(ranks, Death(0, 2)) == [3, 3, 3]

    def test_reached_ranks_continue_to_their_next_exchange(self):
        for exchange, reached, ends in ((0, [1, 2], []), (1, [1], [1]), (1, [0, 1, 2], [1, 2]), (1, [], [])):
            results = until_death([self.total(x) for x in (1, 2, 3)], Death(0, exchange, reached))
            assert results[0] is None
            assert [r for r in (1, 2) if results[r] == 3] == ends
            failed = [r for r in results[1:] if isinstance(r, qcomp.CommunicatorError)]
            assert len(failed) == 2 - len(ends)

    def test_a_computation_that_hides_a_failure_is_found(self):
        def hiding(x: int) -> Any:
            try:
                yield from self.total(x)
            except qcomp.CommunicatorError:
                return 0

        with pytest.raises(AssertionError, match="goes on after an exchange that failed"):
            until_death([hiding(1), hiding(2), hiding(3)], Death(0, 1))
