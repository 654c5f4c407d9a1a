"""Saved after any step, in any stage, a job resumes bit for bit; and if killed, from its last whole checkpoint."""

import io
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp.comm import run_local
from tests.optimizers.every import EVERY, SHAPES, advance

pytestmark = pytest.mark.filterwarnings("ignore:the variance of OneBitAdam no longer fits")

STEPS = 14
WORLD = 2


class Run:
    """One rank's run without a stop: its dict and parameters after every step."""

    def __init__(self, opt: qcomp.Optimizer, comm: Any) -> None:
        params = [np.ones(s, np.float32) for s in SHAPES]
        state = opt.init(params, comm)
        self.stages, self.saved = [state.stage], [self.bytes_of(opt, params, state)]
        for step in range(STEPS):
            params, state = advance(opt, params, state, comm, step)
            self.stages.append(state.stage)
            self.saved.append(self.bytes_of(opt, params, state))

    @staticmethod
    def bytes_of(opt: qcomp.Optimizer, params: Sequence[np.ndarray], state: Any) -> bytes:
        file = io.BytesIO()
        entries: dict[str, Any] = {f"parameter.{i}": p for i, p in enumerate(params)}
        np.savez(file, **entries, **{f"state.{key}": value for key, value in opt.state_dict(state).items()})
        return file.getvalue()


@pytest.fixture(scope="module")
def whole_runs() -> dict[str, list[Run]]:
    """The runs of every rank, for the optimizers used so far."""
    return {}


def whole_run(known: dict[str, list[Run]], name: str) -> list[Run]:
    """Return the run of every rank, made only once."""
    if name not in known:
        known[name] = run_local(WORLD, lambda comm: Run(EVERY[name].opt, comm), timeout=20)
    return known[name]


def resumed(opt: qcomp.Optimizer, saved: Sequence[bytes], stop: int, last: int) -> list[bytes]:
    """Resume in a fresh world from the bytes of each rank; return the bytes after the last step."""

    def rank_main(comm):
        archive = np.load(io.BytesIO(saved[comm.rank]), allow_pickle=False)
        params = [archive[f"parameter.{i}"] for i in range(len(SHAPES))]
        own = {key.removeprefix("state."): archive[key] for key in archive if key.startswith("state.")}
        state = opt.load_state_dict(own, params, comm)
        for step in range(stop, last):
            params, state = advance(opt, params, state, comm, step)
        return Run.bytes_of(opt, params, state)

    return run_local(len(saved), rank_main, timeout=20)


def content(data: bytes) -> dict[str, bytes]:
    """Return the entries of an archive; its own bytes contain the time of day."""
    archive = np.load(io.BytesIO(data), allow_pickle=False)
    return {key: archive[key].tobytes() + str(archive[key].dtype).encode() for key in archive}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_saved_after_any_step(whole_runs, name, data):
    opt = EVERY[name].opt
    runs = whole_run(whole_runs, name)
    stage = data.draw(st.sampled_from(sorted(set(runs[0].stages))), "stage")
    stop = data.draw(st.sampled_from([i for i, s in enumerate(runs[0].stages) if s == stage]), "stop")
    last = data.draw(st.integers(stop, min(STEPS, stop + 5)), "last")
    again = resumed(opt, [run.saved[stop] for run in runs], stop, last)
    for run, data_again in zip(runs, again, strict=True):
        assert content(data_again) == content(run.saved[last])


def test_every_optimizer_is_in_the_table():
    public = {value for value in vars(qcomp).values() if isinstance(value, type)}
    optimizers = {kind for kind in public if issubclass(kind, qcomp.Optimizer)} - {qcomp.Optimizer}
    assert {type(entry.opt) for entry in EVERY.values()} == optimizers


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", EVERY)
def test_every_stage_is_reached(whole_runs, name):
    """Otherwise the test above would not stop in it."""
    assert set(whole_run(whole_runs, name)[0].stages) == {*EVERY[name].stages}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.filterwarnings("ignore:a state of 2 ranks resumes with 3")
def test_resumes_with_other_ranks_in_every_stage(whole_runs, name):
    """Other tests check what is owed; this one checks that another world can take everything that optimizers keep."""
    opt, stages = EVERY[name].opt, EVERY[name].stages
    runs = whole_run(whole_runs, name)
    for stage in stages:
        stop = max(i for i, s in enumerate(runs[0].stages[:STEPS]) if s == stage)
        archives = [np.load(io.BytesIO(run.saved[stop]), allow_pickle=False) for run in runs]
        dicts = [
            {key.removeprefix("state."): archive[key] for key in archive if key.startswith("state.")}
            for archive in archives
        ]

        def rank_main(comm, archives=archives, dicts=dicts, stop=stop):
            params = [archives[0][f"parameter.{i}"] for i in range(len(SHAPES))]
            state = opt.load_state_dict(dicts[comm.rank : comm.rank + 1], params, comm)
            before = opt.state_dict(state)
            params, state = advance(opt, params, state, comm, stop)
            return before, params, state.stage

        results = run_local(3, rank_main, timeout=20)
        for before, params, after in results:
            kept = {key for key in before if "residual" not in key} - {"rank", "size", "skipped", "digests"}
            kept -= {key for key in before if key.partition(".")[0] in opt.own_kinds(stage)}
            for key in kept:
                assert np.asarray(before[key]).tobytes() == np.asarray(dicts[0][key]).tobytes(), key
            if after != "local":
                assert [p.tobytes() for p in params] == [p.tobytes() for p in results[0][1]]


@pytest.mark.parametrize(
    ("what", "name", "stage"),
    [
        ("worker_residual", "1-bit", "compressed"),
        ("server_residual", "1-bit", "compressed"),
        ("momentum", "Adam", "warmup"),
        ("variance", "1-bit", "compressed"),
        ("history", "1-bit, automatic", "warmup"),
        ("number.rewarm_steps_left", "1-bit, watched", "rewarm"),
        ("anchor", "0/1", "local"),
        ("pending", "0/1", "local"),
    ],
)
def test_a_state_that_loses_a_part_is_found(whole_runs, what, name, stage):
    """Setting any part of a state to zero, or to another valid number, changes the run."""
    opt = EVERY[name].opt
    runs = whole_run(whole_runs, name)
    stop = [i for i, s in enumerate(runs[0].stages) if s == stage][-1]
    forgetful = []
    for run in runs:
        archive = np.load(io.BytesIO(run.saved[stop]), allow_pickle=False)
        entries = {key: archive[key] for key in archive}
        lost = [key for key in entries if key.startswith(f"state.{what}")]
        assert lost
        for key in lost:
            entries[key] = np.full_like(entries[key], 7 if what.startswith("number") else 0)
        del entries["state.digests"]
        file = io.BytesIO()
        np.savez(file, **entries)
        forgetful.append(file.getvalue())
    again = resumed(opt, forgetful, stop, STEPS)
    assert content(again[0]) != content(runs[0].saved[STEPS])


@pytest.mark.mpi
class TestKilled:
    """Ranks that die without notice, and their checkpoints: each file is whole or missing."""

    JOB = Path(__file__).parent / "resumable_job.py"
    STEPS = 20

    def job(self, mpirun: Any, folder: Path, kill_at: int, how: str) -> Any:
        folder.mkdir(exist_ok=True)
        return mpirun(2, [self.JOB, folder, self.STEPS, kill_at, how], timeout=100, check=kill_at < 0)

    def digests(self, job: Any, start: int) -> set[str]:
        lines = sorted(job.stdout.split("\n"))[-2:]
        assert [line.partition(":")[0] for line in lines] == [f"rank {rank} from {start}" for rank in (0, 1)]
        return {line.partition(": ")[2] for line in lines}

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("how", "kill_at", "start"),
        [
            # After a number of steps drawn anew in every run, except those where the other rank may still be writing.
            pytest.param(
                "between",
                5 + 4 * secrets.randbelow(4) + secrets.randbelow(3),
                None,
                id="between two checkpoints",
                marks=pytest.mark.slow,
            ),
            # Rank 0 has its file of step 12 when rank 1 dies: the last whole checkpoint is that of step 8.
            pytest.param("saving", 12, 8, id="while one is written"),
        ],
    )
    def test_a_killed_job_ends_with_the_same_parameters(self, mpirun, tmp_path, how, kill_at, start):
        whole = self.digests(self.job(mpirun, tmp_path / "whole", -1, ""), 0)
        assert len(whole) == 1
        killed = self.job(mpirun, tmp_path / "killed", kill_at, how)
        assert killed.returncode != 0
        assert "from" not in killed.stdout
        resumed_job = self.job(mpirun, tmp_path / "killed", -1, "")
        start = kill_at // 4 * 4 if start is None else start
        assert self.digests(resumed_job, start) == whole, f"killed at {kill_at}"
