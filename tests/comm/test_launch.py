import os
import subprocess
import sys

import pytest

from qcomp.comm.launch import world
from qcomp.comm.local import LocalCommunicator
from qcomp.core.errors import CommunicatorError

LAUNCHER_PREFIXES = ("OMPI_", "PMI", "MV2_", "SLURM_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """As if nothing but a shell had started the tests, and nobody had asked for the world yet."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_NAMES:
            monkeypatch.delenv(name)
    world.cache_clear()
    yield
    world.cache_clear()


def run_python(code, *, warnings="error", **environment):
    return subprocess.run(
        [sys.executable, "-W", warnings, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none"},
        # A batch script runs on one of the nodes that it has; only srun's steps are ranks.
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    ],
    ids=str,
)
def test_one_process_is_a_world_of_one(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    comm = world()
    assert isinstance(comm, LocalCommunicator)
    assert (comm.rank, comm.size) == (0, 1)
    assert world() is comm


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none"},
        {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
        # torchrun under srun: srun starts one torchrun for each node, and its variables are still there.
        {
            "PMIX_RANK": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "RANK": "0",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_RUN_ID": "none",
        },
    ],
    ids=str,
)
def test_torchrun_is_answered_with_the_way_to_start(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicatorError, match=r"one of 4 that torchrun started.*'mpirun -n"):
        world()


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        # MASTER_ADDR and the like are also set by hand for mpirun.
        {"OMPI_COMM_WORLD_SIZE": "4", "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
    ],
    ids=str,
)
def test_the_mpirun_of_another_mpi_is_noticed(environment):
    pytest.importorskip("mpi4py")
    # mpi4py warns of an environment that is not its MPI's.
    result = run_python("from qcomp.comm.launch import world; world()", warnings="ignore", **environment)
    assert result.returncode == 1
    assert "4 processes were started together, but mpi4py's MPI library (" in result.stderr
    assert "sees only this one" in result.stderr


def test_an_mpi_launch_without_mpi4py_says_what_to_install():
    result = run_python(
        "import sys; sys.modules['mpi4py'] = None; from qcomp.comm.launch import world; world()", PMI_SIZE="2"
    )
    assert result.returncode == 1
    assert (
        "ImportError: an MPI communicator needs mpi4py and an MPI library: pip install 'qcomp[mpi]'"
        in result.stderr
    )


@pytest.mark.mpi
def test_mpirun_gives_the_ranks_of_mpi(mpirun):
    code = """
from qcomp.comm import MPICommunicator, world
comm = world(timeout=30)
assert type(comm) is MPICommunicator and comm.size == 2 and comm.timeout == 30
assert world(timeout=30) is comm
import os
os.write(1, f"rank {comm.rank}\\n".encode())
"""
    result = mpirun(2, ["-c", code])
    assert sorted(result.stdout.split("\n")) == ["", "rank 0", "rank 1"]
    assert result.stderr == ""


@pytest.mark.parametrize(
    "use", ["", "comm.world().size; comm.LocalCommunicator.alone(); comm.run_local(2, lambda c: c.rank)"]
)
def test_importing_loads_no_array_library(use):
    heavy = ("numpy", "torch", "jax", "cupy", "mpi4py", "array_api_strict")
    result = run_python(
        f"import sys; from qcomp import comm; {use}\nprint(*[name for name in {heavy} if name in sys.modules])"
    )
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_public_names():
    from qcomp import comm

    assert dir(comm) == comm.__all__ == sorted(comm.__all__, key=lambda name: (name.islower(), name))
    pytest.importorskip("mpi4py")
    # In another process, because importing mpi4py starts MPI.
    result = run_python("from qcomp.comm import *; print(MPICommunicator.__name__, run_local.__name__)")
    assert result.stdout.strip() == "MPICommunicator run_local", result.stderr
    with pytest.raises(AttributeError, match=r"module 'qcomp.comm' has no attribute 'nothing'"):
        comm.nothing  # noqa: B018
