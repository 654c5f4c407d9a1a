"""Fixtures shared by several test modules."""

import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Tests and their ranks run the pure version, which is the reference; tests of kernels select kernel sets.
os.environ["QCOMP_KERNELS"] = "pure"


@functools.cache
def cuda_is_there() -> bool:
    """Return whether torch or CuPy finds a CUDA device."""
    for library, look in (("torch", "torch.cuda"), ("cupy", "cupy.cuda")):
        if importlib.util.find_spec(library) and importlib.import_module(look).is_available():
            return True
    return False


QUICK_IN_JAX = (
    "test_is_correctly_rounded[",
    "test_known_answers_of_int32_arrays[",
    *(f"test_float32[jax-{spec}" for spec in ("sign:bucket_size=32,scale=rms", "minmax", "scaled(", "cast")),
)
"""The JAX tests in the quick run, besides JAX's own test folders: rounding, draws, and golden payloads."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the quick run and CI leave out, and deselect the exhaustive tests that are not in this tenth.

    JAX compiles for every shape, so the JAX cases of tests for all libraries are exhaustive.
    """
    for item in items:
        folder = item.path.parent.name
        if isinstance(item, pytest.DoctestItem) and folder in {"jax", "planning", "testing"}:
            item.add_marker("slow")
        own = folder in {"backends", "jax_face"}
        parameters = item.name.partition("[")[2]
        if (
            "jax" in parameters
            and not own
            and (not item.name.startswith(QUICK_IN_JAX) or "coding=" in parameters)
        ):
            item.add_marker("exhaustive")
    _thin_out(items)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
    commit = config.getoption("--tenth")
    if commit:
        left_out = [item for item in items if not _is_in_tenth(item, int(commit, 16) % 10)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_in_tenth(item: pytest.Item, tenth: int) -> bool:
    """Return whether a test runs with a tenth of the exhaustive tests: those with a digest that ends alike."""
    digest = hashlib.sha256(item.nodeid.encode()).digest()
    return not item.get_closest_marker("exhaustive") or digest[-1] % 10 == tenth


def _thin_out(items: Sequence[pytest.Item]) -> None:
    """Mark as exhaustive all but n cases of a test that is marked ``quick_cases(n)``: the same ones in every run."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick_cases") and not (
            item.get_closest_marker("slow") or item.get_closest_marker("exhaustive")
        ):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, of_test in cases.items():
        marker = of_test[0].get_closest_marker("quick_cases")
        assert marker is not None
        for item in random.Random(name).sample(of_test, max(0, len(of_test) - marker.args[0])):
            item.add_marker("exhaustive")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where there is no GPU: no emulation runs compiled kernels.

    The Makefile deselects these tests, so they are skipped only if someone requests them.
    """
    if item.get_closest_marker("gpu") is not None and not cuda_is_there():
        pytest.skip(reason="only a CUDA device can run this, and there is none; see `make test-gpu`")


@pytest.fixture(params=["numba", "pure"])
def kernels(request):
    """The kernels that steps use, by name."""
    if request.param == "numba":
        pytest.importorskip("numba")
    with importlib.import_module("qcomp.backends").use(request.param):
        yield request.param


@pytest.fixture(scope="session")
def launcher() -> Path:
    """The mpirun of the environment, which qcomp[dev] installs."""
    pytest.importorskip("mpi4py")
    found = Path(sys.executable).parent / "mpirun"
    assert found.exists(), f"no mpirun beside {sys.executable}: pip install 'qcomp[mpi]'"
    return found


@pytest.fixture(scope="session")
def mpirun(launcher: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs ``python *args`` on n ranks: ``mpirun(n, ["-c", code], timeout=60.0, check=True)``.

    A job that does not end in time is killed and fails the test, and so does a non-zero exit unless check is
    false. The function returns the completed process with the ranks' joint stdout and stderr.
    """

    def run_ranks(
        n: int, args: Sequence[str | Path], *, timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = [str(part) for part in (launcher, "-n", n, sys.executable, "-W", "error", *args)]
        # The ranks share few cores, so each gets one thread. They buffer their output, as by default.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        ) as job:
            try:
                out, err = job.communicate(timeout=timeout)
            except BaseException as error:
                os.killpg(job.pid, signal.SIGKILL)
                out, err = job.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    pytest.fail(f"the job did not end within {timeout} s\nstdout:\n{out}\nstderr:\n{err}")
                raise
        if check and job.returncode != 0:
            pytest.fail(f"the job ended with status {job.returncode}\nstdout:\n{out}\nstderr:\n{err}")
        return subprocess.CompletedProcess(command, job.returncode, out, err)

    return run_ranks


@pytest.fixture
def lockstep() -> Callable[..., list[Any]]:
    """Run one computation in stages per rank, all in this thread; see `qcomp.testing.lockstep`."""
    from qcomp.testing import lockstep

    return lockstep


@dataclass(frozen=True)
class Library:
    """An array library: how to make its arrays from NumPy's and back."""

    name: str
    device: str | None = None
    """Where its arrays are, if not where it puts them."""

    @property
    def xp(self) -> Any:
        """The library's namespace, imported when it is first used."""
        return importlib.import_module(LIBRARIES.get(self.name, f"array_api_compat.{self.name}"))

    def array(self, values: Any, dtype: Any = None) -> Any:
        """Return an array of this library that shares no memory with the values."""
        there = {} if self.device is None else {"device": self.device}
        return self.seal(self.xp.asarray(np.array(values, dtype=dtype, copy=True), **there))

    def numpy(self, x: Any) -> np.ndarray:
        """Return the values of an array as a NumPy array."""
        to_host = getattr(x, "cpu", None) or getattr(x, "get", None)  # torch, CuPy
        return np.asarray(x if to_host is None else to_host()).copy()

    def seal(self, value: Any) -> Any:
        """Make every array within a value read-only if this is the read-only detector; return the value."""
        if self.name != "readonly":
            return value
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        elif isinstance(value, list | tuple):
            for item in value:
                self.seal(item)
        elif isinstance(value, Mapping):
            self.seal(list(value.values()))
        elif is_dataclass(value):
            self.seal([getattr(value, f.name) for f in fields(value)])
        return value


LIBRARIES = {
    "numpy": "numpy",
    "readonly": "numpy",
    "torch": "array_api_compat.torch",
    "strict": "array_api_strict",
    "jax": "jax.numpy",
}
"""The array libraries; "readonly" is NumPy with read-only arrays, a detector of in-place writes."""


ON_A_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", "torch.cuda")]
"""The array libraries on a GPU; JAX's default device is one if it finds any."""


def library_named(name: str) -> Library:
    if name == "torch.cuda":
        return Library("torch", "cuda")
    if name == "cupy":
        pytest.importorskip("cupy")
    return Library(name)


@pytest.fixture(params=[*LIBRARIES, *ON_A_GPU])
def library(request: pytest.FixtureRequest) -> Library:
    """Every library. JAX compiles for every new shape, so use few shapes."""
    return library_named(request.param)


@pytest.fixture(params=[*(name for name in LIBRARIES if name != "jax"), *ON_A_GPU])
def float64_library(request: pytest.FixtureRequest) -> Library:
    """The libraries that support float64 by default: all but JAX."""
    return library_named(request.param)


@pytest.fixture
def libraries() -> dict[str, Library]:
    """All libraries by name, imported before ranks start as threads, which could see a half-done import."""
    known = {name: Library(name) for name in LIBRARIES}
    for library in known.values():
        with suppress(ModuleNotFoundError):  # a test that uses it is skipped
            assert library.xp
    return known


@dataclass(frozen=True)
class TorchRank:
    """The outcome of one rank of torch.distributed."""

    status: int
    out: str
    err: str


class ForkServer:
    """A process that forks ranks."""

    def __init__(self, folder, modules):
        self._folder = folder
        self._jobs = itertools.count()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(Path(__file__).with_name("fork_server.py")), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        )

    def environment(self, n, store):
        """Return the variables that torchrun sets for the ranks of a new job, except their number."""
        return {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(next(self._jobs)),
            "TORCHELASTIC_RUN_ID": "none",
        }

    def run(self, n, code, *, timeout, whole_exit):
        import torch.distributed as dist

        # A store for each job, in which no rank finds addresses of an earlier one. Port 0: the system picks a free one.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = self.environment(n, store)
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
            TorchRank(status, Path(o).read_text(), Path(e).read_text())
            for status, o, e in zip(statuses, out, err, strict=True)
        ]


@contextmanager
def started_fork_server(folder: Path, *modules: str) -> Iterator[ForkServer]:
    """A fork server that has imported torch and the given modules."""
    server = ForkServer(folder, modules)
    yield server
    server.process.stdin.close()
    server.process.wait(30)
    server.process.stdout.close()


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    """A fork server that has also imported what the first optimizer of torch imports, which takes seconds."""
    pytest.importorskip("torch")
    with started_fork_server(tmp_path_factory.mktemp("ranks"), "torch._dynamo", "qcomp.torch") as server:
        yield server


@pytest.fixture(scope="session")
def small_fork_server(tmp_path_factory):
    """A fork server for ranks that exit as Python does: with torch's compiler, they would speak of what it leaks."""
    with started_fork_server(tmp_path_factory.mktemp("ranks")) as server:
        yield server


@pytest.fixture
def torch_ranks(request, fork_server):
    """Return a function that runs code on n torch.distributed ranks: ``run_ranks(n, code, timeout=60.0, check=True)``.

    A job that does not end in time fails the test; so does, unless check is false, a non-zero exit or anything written
    to stderr. With `whole_exit` the ranks exit as Python does, else at once. Returns the outcome of each rank.
    """

    def run_ranks(n, code, *, timeout=60.0, check=True, whole_exit=False):
        server = request.getfixturevalue("small_fork_server") if whole_exit else fork_server
        ranks = server.run(n, code, timeout=timeout, whole_exit=whole_exit)
        if any(rank.status == "late" for rank in ranks):
            pytest.fail(f"the job did not end within {timeout} s: {ranks}")
        if check and any(rank.status != 0 or rank.err for rank in ranks):
            pytest.fail("\n".join(f"rank {i}: {rank}" for i, rank in enumerate(ranks)))
        return ranks

    return run_ranks
