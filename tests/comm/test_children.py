"""Children of ranks, such as the workers of data loaders, neither disturb exchanges nor take part in them."""

import subprocess
import sys
from pathlib import Path

import pytest

FORKED = """
import multiprocessing, os, sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor
import numpy as np, qcomp
warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
one, fork, alone = np.zeros(1, np.uint8), multiprocessing.get_context("fork"), threading.Lock()

def use(comm, said):
    try:
        comm.all_gather(one, [1, 1])
    except qcomp.CommunicatorError as error:
        said.put(str(error).replace(str(os.getpid()), "CHILD").replace(str(os.getppid()), "RANK"))
    said.put("went on")

def train(comm):
    comm.all_gather(one, [1, 1])
    if comm.rank == 0:
        said = fork.SimpleQueue()
        child = fork.Process(target=use, args=(comm, said))
        child.start()
        print(said.get(), flush=True)
        child.join()
        try:
            multiprocessing.get_context("spawn").Process(target=use, args=(comm, None)).start()
        except TypeError as error:
            print("cannot be copied or pickled" in str(error))
    comm.all_gather(one, [1, 1])

KINDS = {
    "local": lambda comm: comm,
    "authenticated": lambda comm: qcomp.comm.AuthenticatedCommunicator(comm, key=b"sixteen or more bytes"),
    "folder": lambda comm: qcomp.comm.FolderCommunicator(sys.argv[2], comm.rank, 2, timeout=60),
}
qcomp.comm.run_local(2, lambda comm: train(KINDS[sys.argv[1]](comm)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no fork")
@pytest.mark.parametrize(
    "kind", ["folder", *(pytest.param(k, marks=pytest.mark.slow) for k in ("local", "authenticated"))]
)
def test_a_child_that_exchanges_is_told_so(kind, tmp_path):
    """Those of MPI and torch.distributed are in `test_mpi` and `test_torch_dist`."""
    command = [sys.executable, "-c", FORKED, kind, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "all_gather: process CHILD is a forked child of rank 0 (process RANK), whose connections it must not use: let "
        "children, such as a data loader's workers, only compute, and call exchanges in the rank",
        "True",
    ]


UNGUARDED = """
import multiprocessing, os, sys, qcomp
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=print, args=("ran",))
    child.start()
    child.join(60)
else:
    os.environ["PMI_SIZE"] = "2"
    for make in (qcomp.comm.world, lambda: qcomp.comm.FolderCommunicator(sys.argv[2], 0, 2, timeout=1)):
        try:
            make()
        except qcomp.CommunicatorError as error:
            print(str(error).replace(str(os.getpid()), "CHILD"), flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_child_that_imports_the_script_does_not_take_the_place_of_its_rank(method, tmp_path):
    """Under torchrun the workers of both ranks met, and the ranks waited for them."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, script, method, tmp_path], capture_output=True, text=True, timeout=120, check=True
    )
    told = "process CHILD is a child that only imports the script, such as a data loader's worker: put the code of "
    told += "the ranks under if __name__ == '__main__'"
    found = done.stdout.splitlines()
    assert found[:2] == [f"world: {told}", f"FolderCommunicator: {told}"]
    assert found[-1] == "ran"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("fork", marks=pytest.mark.slow),
        *(pytest.param(method, marks=pytest.mark.exhaustive) for method in ("spawn", "forkserver")),
    ],
)
@pytest.mark.parametrize("kind", ["mpi", "torch", "folder", "local"])
def test_ranks_exchange_beside_the_workers_of_data_loaders(kind, method, tmp_path, mpirun):
    pytest.importorskip("torch")
    script = Path(__file__).with_name("loading.py")
    if kind == "mpi":
        assert mpirun(2, [script, kind, method, tmp_path, 0], timeout=300).stdout.split() == ["8", "8"]
        return
    ranks = [
        subprocess.Popen(
            [sys.executable, script, kind, method, tmp_path, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(1 if kind == "local" else 2)
    ]
    try:
        said = [(*rank.communicate(timeout=300), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    expected = ["8", "8"] if kind == "local" else ["8"]
    assert [(out.split(), status) for out, _, status in said] == [(expected, 0)] * len(ranks), said
