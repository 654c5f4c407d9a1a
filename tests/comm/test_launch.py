import os
import re
import subprocess
import sys
import types

import pytest

from qcomp.comm import launch, patience
from qcomp.comm.launch import world
from qcomp.comm.local import LocalCommunicator

LAUNCHER_PREFIXES = ("OMPI_", "PMI", "MV2_", "SLURM_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """As if only a shell had started the tests, and `world` had not been called yet."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_NAMES:
            monkeypatch.delenv(name)
    launch._world.cache_clear()
    yield
    launch._world.cache_clear()
    patience._inherited.clear()


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
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
        {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
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
        # A batch script runs on one of its nodes; only srun's steps are ranks.
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "0"},
    ],
    ids=str,
)
def test_a_lone_process_warns_if_the_environment_announces_several(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (first, *_) = environment
    with pytest.warns(UserWarning, match=f"{first} is 2, but no launcher started this process") as warned:
        assert world().size == 1
    assert [w.filename for w in warned] == [__file__]


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none"},
        {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
        # One rank may use DistributedDataParallel, too.
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none"},
        # torchrun under srun: srun starts one torchrun per node, and its variables remain set.
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
def test_torchrun_is_recognised(monkeypatch, environment):
    asked = []
    module = types.SimpleNamespace(
        torch_world=lambda **settings: asked.append(settings) or "the ranks of torchrun"
    )
    monkeypatch.setitem(sys.modules, "qcomp.comm.torch_launch", module)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert world(timeout=7, silence=3) == "the ranks of torchrun"
    assert asked == [{"timeout": 7, "silence": 3}]


class TestPatience:
    @pytest.fixture(autouse=True)
    def nothing_in_the_environment(self, monkeypatch):
        monkeypatch.delenv("QCOMP_TIMEOUT", raising=False)
        monkeypatch.delenv("QCOMP_SILENCE", raising=False)

    def test_comes_from_the_argument_the_world_the_environment_or_the_defaults(self, monkeypatch):
        assert patience.patience() == (300, None)
        monkeypatch.setenv("QCOMP_TIMEOUT", "40")
        monkeypatch.setenv("QCOMP_SILENCE", "2.5")
        assert patience.patience() == (40, 2.5)
        first = world(silence=90)
        assert patience.patience() == (40, 90)
        assert world() is first  # not another communicator with other settings
        assert world(timeout=50) is not first
        assert patience.patience() == (50, 90)
        assert patience.patience(timeout=7, silence=8) == (7, 8)

    @pytest.mark.parametrize("name", ["timeout", "silence"])
    @pytest.mark.parametrize("value", [0, -1, float("nan"), "5", True])
    def test_is_a_positive_number(self, monkeypatch, name, value):
        with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds, got {value!r}"):
            world(**{name: value})
        variable = f"QCOMP_{name.upper()}"
        monkeypatch.setenv(variable, f"{value}s")
        with pytest.raises(
            ValueError, match=f"{variable} is '{value}s'; expected a positive number of seconds"
        ):
            world()

    def test_may_be_endless(self):
        assert 1e8 < patience.patience(timeout=float("inf")).timeout < 1e10


@pytest.mark.slow
def test_torchruns_environment_gives_the_ranks_of_torch(torch_ranks):
    code = """
import numpy as np
import torch.distributed as dist
from qcomp.comm import TorchCommunicator, world
from qcomp.torch.optimizer import communicator
comm = world(timeout=30, silence=90)
assert type(comm) is TorchCommunicator and (comm.timeout, comm.silence) == (30, 90)
own = communicator()  # as optimizers make it
assert own is not comm and (own.timeout, own.silence) == (30, 90)
assert world() is comm and world(timeout=40).size == 2  # initialised before
received = comm.all_gather(np.full(1, comm.rank, dtype=np.uint8), [1, 1])
print(comm.rank, comm.size, dist.get_backend(), *[int(x[0]) for x in received])
"""
    assert [rank.out for rank in torch_ranks(2, code)] == ["0 2 gloo 0 1\n", "1 2 gloo 0 1\n"]


@pytest.mark.slow
def test_missing_ranks_of_torchrun_are_noticed(torch_ranks):
    code = """
import os, sys
from qcomp.comm import world
if os.environ["RANK"] == "1":
    sys.exit()
world(timeout=0.7)
"""
    ranks = torch_ranks(2, code, check=False)
    assert ranks[0].status == 1
    assert re.search(r"CommunicatorError: .*within 0\.7 s", ranks[0].err)


def test_torchrun_without_torch_says_what_to_install():
    result = run_python(
        "import sys; sys.modules['torch'] = None; from qcomp.comm.launch import world; world()",
        WORLD_SIZE="2",
        RANK="0",
        MASTER_ADDR="localhost",
    )
    assert result.returncode == 1
    assert "ImportError: a communicator over torch.distributed needs torch: pip install 'qcomp[torch]'" in (
        result.stderr
    )


@pytest.mark.parametrize(
    ("gpus", "environment", "device"),
    [
        (0, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        (2, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1),
        (2, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}, None),
        (4, {"LOCAL_RANK": "3", "WORLD_SIZE": "4"}, 3),
        (2, {"LOCAL_RANK": "3", "WORLD_SIZE": "4"}, None),
        (8, {"WORLD_SIZE": "4"}, None),  # nothing says which GPU belongs to which rank
    ],
)
def test_ranks_use_gpus_only_if_every_rank_of_the_machine_has_one(monkeypatch, gpus, environment, device):
    torch = pytest.importorskip("torch")
    from qcomp.comm.torch_launch import _own_device

    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert _own_device() == device


def printed(*command):
    """Run Python with these arguments, and return the lines that the ranks print, sorted."""
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return sorted(result.stdout.splitlines())


@pytest.mark.slow
def test_ranks_started_by_torchrun_exchange(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "ranks.py"
    script.write_text(
        "import numpy as np, os, qcomp\n"
        "comm = qcomp.comm.world(timeout=30)\n"
        "parts = comm.all_gather(np.full(1, comm.rank, dtype=np.uint8), [1, 1])\n"
        "os.write(1, f'{type(comm).__name__} {comm.rank} {[int(x[0]) for x in parts]}\\n'.encode())\n"
    )
    lines = printed("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script)
    assert lines == [f"TorchCommunicator {rank} [0, 1]" for rank in range(2)]


@pytest.mark.slow
def test_ranks_that_initialise_torch_themselves_are_its_ranks(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys, torch.distributed as dist, torch.multiprocessing as mp, qcomp\n"
        "def main(rank):\n"
        "    alone = qcomp.comm.world().size\n"
        "    dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}', rank=rank, world_size=2)\n"
        "    comm = qcomp.comm.world()\n"
        "    os.write(1, f'{alone} {type(comm).__name__} {comm.rank} {comm.size}\\n'.encode())\n"
        "    assert qcomp.comm.world() is comm\n"
        "    dist.destroy_process_group()\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, nprocs=2)\n"
    )
    assert printed(script, tmp_path / "store") == [f"1 TorchCommunicator {rank} 2" for rank in range(2)]


@pytest.mark.quick_cases(1)
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
def test_an_mpirun_of_another_mpi_library_is_noticed(environment):
    pytest.importorskip("mpi4py")
    # mpi4py warns of an environment that belongs to another MPI.
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


@pytest.mark.slow
def test_public_names():
    from qcomp import comm

    assert dir(comm) == comm.__all__ == sorted(comm.__all__, key=lambda name: (name.islower(), name))
    pytest.importorskip("mpi4py")
    # In another process, because importing mpi4py initializes MPI.
    result = run_python("from qcomp.comm import *; print(MPICommunicator.__name__, run_local.__name__)")
    assert result.stdout.strip() == "MPICommunicator run_local", result.stderr
    for name in ("NCCLCommunicator", "TorchCommunicator"):
        assert getattr(comm, name).__name__ == name
    with pytest.raises(AttributeError, match=r"module 'qcomp.comm' has no attribute 'nothing'"):
        comm.nothing  # noqa: B018
