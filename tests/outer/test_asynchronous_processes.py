"""Processes that share a folder: one is killed, one joins, and all that are left end with the same bytes."""

import subprocess
import sys

import pytest

RANK = """
import hashlib, sys
import numpy as np
import qcomp

folder, rank, joins = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
inner = qcomp.outer.sparse_loco(20, compressor=qcomp.TopK(8, 64, value_bits=2), exact=None)
loop = qcomp.outer.Asynchronous(loop=inner, quorum=2, grace=0.05, pause=0.002, snapshot=2, max_age=1, timeout=60)
mailbox = qcomp.comm.FolderMailbox(folder)
params, state = loop.begin(np.zeros(5000, np.float32), mailbox, rank=rank)
draws, shown = np.random.default_rng(rank), state.version
print(f"at {shown}", flush=True)
while state.counted.get(joins, (0, 0))[0] < 5:
    noise = draws.standard_normal(5000, np.float32)
    params, state = loop.step(params - 0.01 * (params - 1 - noise), state, mailbox, weight=1 + rank % 2)
    if state.version > shown:
        shown = state.version
        print(f"at {shown}", flush=True)
print("end", state.version, hashlib.sha256(loop.shared(params, state).tobytes()).hexdigest())
"""


def start(folder, rank):
    command = [sys.executable, "-c", RANK, str(folder), str(rank), "99"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_rank_is_killed_and_another_joins(tmp_path):
    ranks = {rank: start(tmp_path, rank) for rank in range(3)}
    try:
        for line in ranks[1].stdout:
            if line == "at 3\n":
                break
        ranks[1].kill()
        assert ranks[1].wait(60) == -9
        ranks[99] = start(tmp_path, 99)
        ends = {rank: process.communicate(timeout=120)[0] for rank, process in ranks.items() if rank != 1}
    finally:
        for process in ranks.values():
            process.kill()
            process.communicate()
    assert [ranks[rank].returncode for rank in ends] == [0, 0, 0]
    assert ends[99].startswith("at ")
    assert not ends[99].startswith("at 0")
    assert len({text.splitlines()[-1] for text in ends.values()}) == 1


@pytest.mark.slow
def test_a_job_that_starts_again_goes_on(tmp_path):
    """All processes have ended; the folder has the last rounds."""

    def job(rank):
        code = RANK.replace("quorum=2", "quorum=1")
        command = [sys.executable, "-c", code, str(tmp_path), rank, rank]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    first, second = job("99"), job("98")
    assert second.splitlines()[0] == f"at {first.split()[-2]}"
