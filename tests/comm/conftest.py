"""Ranks of torch.distributed for the tests of this folder."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Rank:
    """What became of a rank."""

    status: int
    out: str
    err: str


class ForkServer:
    """A process that forks ranks, and the store where they meet, which belongs to none of them."""

    def __init__(self, folder):
        import torch.distributed as dist

        self._folder = folder
        self._jobs = itertools.count()
        # Port 0: the system picks one that is free.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        )

    def environment(self, n):
        """What torchrun tells its ranks, but for their number; new for each job."""
        return {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(next(self._jobs)),
            "TORCHELASTIC_RUN_ID": "none",
        }

    def run(self, n, code, *, timeout, whole_exit):
        environment = self.environment(n)
        folder = self._folder / environment["TORCHELASTIC_RESTART_COUNT"]
        folder.mkdir()
        out, err = ([str(folder / f"{name}{rank}") for rank in range(n)] for name in ("out", "err"))
        job = {
            "ranks": n,
            "code": code,
            "timeout": timeout,
            "whole_exit": whole_exit,
            "environment": environment,
            "out": out,
            "err": err,
        }
        print(json.dumps(job), file=self.process.stdin, flush=True)
        statuses = json.loads(self.process.stdout.readline())
        return [
            Rank(status, Path(o).read_text(), Path(e).read_text())
            for status, o, e in zip(statuses, out, err, strict=True)
        ]


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    pytest.importorskip("torch")
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    server = ForkServer(tmp_path_factory.mktemp("ranks"))
    yield server
    server.process.stdin.close()
    server.process.wait(30)
    server.process.stdout.close()


@pytest.fixture
def torch_ranks(fork_server):
    """Run code on n ranks of torch.distributed: ``torch_ranks(n, code, timeout=60.0, check=True)``.

    A job that does not end in time fails the test, and so does a non-zero exit unless check is false, and anything
    written to stderr. With `whole_exit` the ranks end as Python does, else at once. Returns what became of each rank.
    """

    def run_ranks(n, code, *, timeout=60.0, check=True, whole_exit=False):
        ranks = fork_server.run(n, code, timeout=timeout, whole_exit=whole_exit)
        if any(rank.status == "late" for rank in ranks):
            pytest.fail(f"the job did not end within {timeout} s: {ranks}")
        if check and any(rank.status != 0 or rank.err for rank in ranks):
            pytest.fail("\n".join(f"rank {i}: {rank}" for i, rank in enumerate(ranks)))
        return ranks

    return run_ranks
