"""Copies under real torchrun agents: a rank kills itself, and a node loses its memory."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "survive_kill.py"
TORCHRUN = Path(sys.executable).parent / "torchrun"
FORGETFUL = """
import pathlib, runpy, shutil, sys

folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
for path in folder.glob("qcomp-*"):  # when it is started again
    shutil.rmtree(path)
runpy.run_path({example!r}, run_name="__main__")
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def ended(agents, timeout=100):
    """Wait for torchrun agents; return what their ranks printed, and kill leftover processes."""
    try:
        outs = [agent.communicate(timeout=timeout) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)  # which ends the agent's ranks
                agent.wait(60)
    for agent, (_, err) in zip(agents, outs, strict=True):
        assert agent.returncode == 0, err
    return "".join(out for out, _ in outs)


def agent(*arguments, host="a"):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "QCOMP_HOST": host, "PYTHONUNBUFFERED": ""}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise gloo finds addresses of dead ranks
    command = [TORCHRUN, "--monitor-interval", "0.1", "--max-restarts", "2", *arguments]
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def digests(out, ranks):
    found = dict(re.findall(r"rank (\d) has made \d+ steps: loss \S+, sha256 ([0-9a-f]{64})", out))
    assert sorted(found) == [str(rank) for rank in range(ranks)]
    return set(found.values())


def gone_on(out, ranks):
    """Return the step from which all ranks resumed; it must be the same."""
    found = re.findall(r"rank (\d) goes on after step (\d+)", out)
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(ranks)]
    (step,) = {int(step) for _, step in found}
    return step


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "victim", "step"), [(2, 1, 27), (3, 0, 9)])
def test_a_killed_rank_costs_the_steps_since_the_last_copy(folder, ranks, victim, step):
    one_node = ["--standalone", "--nproc-per-node", ranks, EXAMPLE, "--folder", folder]
    out = ended([agent(*one_node, "--kill", victim, step)])
    assert f"rank {victim} dies after step {step}" in out
    assert gone_on(out, ranks) == step // 5 * 5
    assert digests(out, ranks) == digests(ended([agent(*one_node)]), ranks)
    assert list(folder.iterdir()) == []  # a job that ended well leaves nothing behind


@pytest.mark.exhaustive
def test_a_node_that_loses_its_memory(folder):
    """Two agents with a folder each; the ranks of one are killed, and find nothing when they start again."""
    (folder / "forgetful.py").write_text(FORGETFUL.format(example=str(EXAMPLE)))
    outs = []
    for job, options in (("killed", ["--kill", 1, 13]), ("whole", [])):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        agents = []
        for host, script in (("a", EXAMPLE), ("b", folder / "forgetful.py")):
            (folder / host).mkdir(exist_ok=True)
            meeting = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", job]
            meeting += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
            agents.append(
                agent(*meeting, script, "--folder", folder / host, "--steps", 20, *options, host=host)
            )
        outs.append(ended(agents))
    assert "dies after step 13" in outs[0]
    assert gone_on(outs[0], 2) == 10
    assert digests(outs[0], 2) == digests(outs[1], 2)
    assert [list((folder / host).iterdir()) for host in "ab"] == [[], []]
