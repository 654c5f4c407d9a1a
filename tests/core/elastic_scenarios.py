"""Ranks die, leave and join in every exchange of some steps of a job: the others agree, and owed amounts add up.

Each function returns how many times a rank died, left or joined.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from qcomp.elastic import ElasticState
from qcomp.testing import Death, lockstep, until_death
from tests.core.elastic_jobs import World, kills, left_with, require_owed, whole_run, without

__all__ = ["die_in_resumes", "die_in_steps", "join", "leave"]


def die_in_steps(job: World, steps: int, moments: Sequence[int]) -> int:
    """The others go back to the last step that all completed; only what the dead rank owed is dropped."""
    run = whole_run(job, steps)
    cases = mixed = 0
    for step in moments:
        helds = run[step]
        for death, results in kills(partial(job.steps, helds), job.size, all_reaches=True):
            left = left_with(helds, results, death.rank)
            mixed += len({held.state.step for held in left}) > 1
            common = min(held.history[-1].label for held in left)
            assert common in (step, step + 1)
            again, report = job.resume(left, without(job.hosts, death.rank))
            assert report["dropped_ranks"] == 1
            assert report["repeated_steps"] == max(held.state.step for held in left) - again[0].state.step
            assert again[0].state.step == run[common][0].state.step
            require_owed(job, [h.state for h in run[common]], [h.state for h in again], [death.rank])
            job.go_on(again)
            cases += 1
    assert mixed
    return cases


def leave(job: World, steps: int, moments: Sequence[int]) -> int:
    """Nothing is lost when a rank leaves; if it dies while leaving, no more is lost than by any other death."""
    cases = 0
    for step in moments:
        helds = whole_run(job, steps)[step]
        for leaving in range(job.size):
            shared = lockstep(_shares_of(job, helds))
            again, report = job.resume(without(shared, leaving), without(job.hosts, leaving))
            assert (report["restored_ranks"], report["dropped_ranks"], report["repeated_steps"]) == (1, 0, 0)
            require_owed(job, [h.state for h in helds], [h.state for h in again], [])
            job.go_on(again)
            cases += 1
        shares = partial(_shares_of, job, helds)
        for death, results in kills(shares, job.size, all_reaches=True):
            left = left_with(helds, results, death.rank)
            again, report = job.resume(left, without(job.hosts, death.rank))
            whole = all(r is None or isinstance(r, ElasticState) for r in results)
            assert report["restored_ranks"] == whole
            lost = [] if whole else [death.rank]
            require_owed(job, [h.state for h in helds], [h.state for h in again], lost)
            job.go_on(again, 1)
            cases += 1
    return cases


def join(job: World, steps: int, moments: Sequence[int]) -> int:
    """In every exchange of a resume with one more rank, either the new rank or one of the old ones dies."""
    cases = 0
    for step in moments:
        helds = whole_run(job, steps)[step]
        joined = [None, *helds]
        hosts = f"b{job.hosts}"
        again, report = job.resume(joined, hosts)
        assert (report["joined_ranks"], report["dropped_ranks"]) == (1, 0)
        assert [held.since for held in again] == [again[0].history[-1].label, *[0] * job.size]
        require_owed(job, [h.state for h in helds], [h.state for h in again], [])
        job.go_on(again)
        cases += 1
        for death, results in kills(partial(job.resumes, joined, hosts), len(joined), first=step):
            left = left_with(joined, results, death.rank)
            again, report = job.resume(left, without(hosts, death.rank))
            went_on = all(not isinstance(result, Exception) for result in results)
            if not went_on:  # back to the old world, where the new rank held nothing
                lost = [] if death.rank == 0 else [death.rank - 1]
                require_owed(job, [h.state for h in helds], [h.state for h in again], lost)
                assert report["joined_ranks"] == (death.rank != 0)
            assert report["dropped_ranks"] == (went_on or death.rank != 0)
            job.go_on(again, 1)
            cases += 1
    return cases


def die_in_resumes(job: World, steps: int, moments: Sequence[int]) -> int:
    """One of four ranks has died, and another dies in any exchange of the resume; what both owed is dropped once."""
    cases = 0
    in_groups = len(set(job.hosts)) < job.size
    gone = 3 if in_groups else 1
    for step in moments:
        helds = whole_run(job, steps)[step]
        rest, first = without(job.hosts, gone), without(helds, gone)
        # If the step exchanges anything, one rank has completed it and goes back.
        deaths = [Death(gone, exchange, [0]) for exchange in range(4)]
        for results in (until_death(job.steps(helds), death) for death in deaths):
            if isinstance(results[0], ElasticState) and results[gone] is None:
                first = left_with(helds, results, gone)
                assert [held.state.step for held in first] == [step + 1, step, step]
        for death, results in kills(partial(job.resumes, first, rest), 3, first=step):
            if in_groups and death.rank == 2:
                continue  # one machine is left: `test_one_machine_is_left_of_a_hierarchy`
            left = left_with(first, results, death.rank)
            again, report = job.resume(left, without(rest, death.rank))
            if any(isinstance(result, Exception) for result in results):
                lost = [gone, first[death.rank].state.rank]
                require_owed(job, [h.state for h in helds], [h.state for h in again], lost)
                assert report["dropped_ranks"] == 2
            else:
                assert report["dropped_ranks"] == 1
            job.go_on(again, 1)
            cases += 1
    return cases


def _shares_of(job: World, helds: Sequence[ElasticState]) -> list[Any]:
    """Return the stages in which each rank shares what it owes."""
    return [job.elastic.share_stages(held) for held in helds]
