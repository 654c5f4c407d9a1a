"""The launchers' lines on the page run as they stand, with stand-ins for ssh and Slurm that start processes here."""

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import DOCS, ROOT

BLOCKS = pages.blocks(DOCS / "launch.md")
MPIRUN, SSH, SLURM, SLURM_MPI = (text for language, text in BLOCKS if language == "sh")
(POD,) = (text for language, text in BLOCKS if language == "yaml")
TRAIN = """
import sys
import torch
import qcomp.torch
comm = qcomp.comm.world()
model = torch.nn.Linear(8, 8)
optimizer = qcomp.torch.CompressedSGD(model.parameters(), lr=1e-2)
with qcomp.checkpoint.on_signal(optimizer.comm) as ends:
    while not ends():
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if len(sys.argv) == 1:
            print("steps\\n", end="", flush=True)
        if optimizer.core_state.step == {last}:
            break
told = "rank %d of %d ends at %d\\n" % (comm.rank, comm.size, optimizer.core_state.step)
print(told, end="", flush=True)  # at once: torchrun's ranks share an output that is not buffered
torch.distributed.destroy_process_group()
"""
RAY_WAITS = {"RAY_gcs_server_port_wait_time_s": "120", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180"}
"""Seconds that Ray waits for its server and its workers, which start slowly while other tests run."""
ENDED = re.compile(r"rank (\d) of 2 ends at (\d+)")
TOOLS = {
    "ssh": 'exec bash -c "$2"',
    "scontrol": "printf 'localhost\\nother\\n'",
    # As srun does, it starts the program on both nodes, and passes a signal on.
    "srun": 'for _ in 1 2; do "$@" & started="$started $!"; done; trap "kill -TERM $started" TERM; wait; wait; wait',
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts a block of the page, with one process on each of two nodes."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "training").mkdir()
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_NNODES", "2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def begin(text, last):
        for folder in (tmp_path, tmp_path / "training"):
            (folder / "train.py").write_text(TRAIN.replace("{last}", str(last)))
        changed = text.replace("alpha:29400", f"localhost:{port}").replace("$head:29400", f"$head:{port}")
        changed = changed.replace("--nproc-per-node 2", "--nproc-per-node 1")
        assert changed.count(str(port)) in (1, 2)
        return subprocess.Popen(
            ["bash", "-e", "-c", changed],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return begin


@pytest.mark.parametrize("text", [SSH, SLURM], ids=["ssh", "slurm"])
def test_torchrun_meets_on_two_nodes(start, text):
    pytest.importorskip("torch")
    with start(text, last=5) as job:
        out, _ = job.communicate(timeout=200)
    assert (job.returncode, sorted(ENDED.findall(out))) == (0, [("0", "5"), ("1", "5")])


def test_the_end_of_a_slurm_job_lets_all_ranks_save_at_the_same_step(start):
    pytest.importorskip("torch")
    with start(SLURM, last=-1) as job:
        lines = iter(job.stdout.readline, "")
        assert [line for line, _ in zip(lines, range(20), strict=False)][-1] == "steps\n"  # both ranks train
        os.kill(srun_of(job.pid), signal.SIGTERM)
        ended = ENDED.findall("".join(lines))
    assert len({step for _, step in ended}) == 1
    assert sorted(rank for rank, _ in ended) == ["0", "1"]


def srun_of(pid):
    """Return the process of srun below a batch script, or the script's own if bash has become srun."""
    (children,) = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(child) for child in children.read_text().split()]
    named = [child for child in below if "srun" in Path(f"/proc/{child}/cmdline").read_text()]
    return named[0] if named else pid


@pytest.mark.mpi
def test_mpirun_on_two_hosts(tmp_path):
    words = (
        MPIRUN.replace("alpha:2,beta:2", "localhost:2").replace("eth0", "lo").replace("-n 4", "-n 2").split()
    )
    words[0] = str(Path(sys.executable).parent / words[0])
    words[words.index(".venv/bin/python")] = sys.executable
    (tmp_path / "train.py").write_text("import qcomp\nprint(qcomp.comm.world().size)\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["2", "2"]), done.stderr


def test_other_lines_are_understood_by_their_programs():
    """Slurm's for MPI by bash, and the pods' by a reader of YAML and by torchrun's parser."""
    assert subprocess.run(["bash", "-n", "-c", SLURM_MPI], check=False, timeout=20).returncode == 0
    yaml = pytest.importorskip("yaml")
    run = pytest.importorskip("torch.distributed.run")
    service, job = yaml.safe_load_all(POD)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    options = run.parse_args(command[1:])
    assert command[0] == "torchrun"
    assert int(options.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["completionMode"] == "Indexed"  # gives the pods their names
    name = service["metadata"]["name"]
    assert (pod["subdomain"], service["spec"]["selector"]["job-name"]) == (name, job["metadata"]["name"])
    assert options.rdzv_endpoint.partition(":")[0] == f"{job['metadata']['name']}-0.{name}"
    assert int(container["env"][0]["value"]) < pod["terminationGracePeriodSeconds"]


@pytest.mark.exhaustive
def test_ray_trains_on_two_workers(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    program = [sys.executable, ROOT / "examples" / "with_ray.py", "--storage", tmp_path]
    environment = os.environ | RAY_WAITS
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    metrics = ast.literal_eval(done.stdout.splitlines()[-1])
    assert (metrics["step"], metrics["stage"]) == (60, "compressed")
    one, other = metrics["losses"]
    assert one == other < 1.5  # the same parameters; they began at log(8) = 2.1
