"""Environments in which laws repeat a call: simulated one by one in this process, and all at once in a fresh one.

This file is also the program that the fresh process runs, so it imports only what that program needs.
"""

import builtins
import datetime
import importlib
import os
import pickle
import platform
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_NAMES = (
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_PORT "
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE OMPI_UNIVERSE_SIZE "
    "PMI_RANK PMI_SIZE PMIX_RANK MPI_LOCALRANKID MPI_LOCALNRANKS MV2_COMM_WORLD_RANK MV2_COMM_WORLD_LOCAL_RANK "
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_JOB_ID SLURM_JOBID SLURM_NNODES "
    "SLURM_CPUS_PER_TASK PBS_TASKNUM PBS_JOBID LSB_JOBID JSM_NAMESPACE_RANK ALPS_APP_PE FLUX_TASK_RANK "
    "HOROVOD_RANK JAX_PROCESS_ID JAX_PROCESS_COUNT NCCL_RANK TPU_WORKER_ID CLOUD_TPU_TASK_ID RAY_JOB_ID "
    "KUBERNETES_SERVICE_PORT JOB_COMPLETION_INDEX POD_NAME "
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMBA_NUM_THREADS RAYON_NUM_THREADS "
    "PYTHONHASHSEED SEED HOSTNAME HOST USER LOGNAME USERNAME"
)
_LAUNCHERS = tuple(_NAMES.split())
"""Environment variables that differ between ranks, jobs and machines."""

_CHILD = 3
"""The number of the fresh process's environment; simulated environments have the numbers 1 and 2."""
_MARK = "QCOMP_FRESH_PROCESS"
"""An environment variable that is set in the fresh process, so that checks in code that it imports start no further
process."""
_SECONDS = 300.0


@contextmanager
def _replaced(place: Any, **others: Any) -> Iterator[None]:
    """Replace those of the given attributes that exist."""
    before = {name: getattr(place, name) for name in others if hasattr(place, name)}
    for name in before:
        setattr(place, name, others[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


@contextmanager
def _generators(number: int) -> Iterator[None]:
    """Seed the global generators."""
    import numpy as np  # noqa: PLC0415 - the fresh process does without it at first

    before, before_numpy = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    before_torch = None if torch is None else torch.get_rng_state()
    random.seed(number)
    np.random.seed(number)
    if torch is not None:
        torch.manual_seed(number)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)
        if torch is not None:
            torch.set_rng_state(before_torch)


@contextmanager
def _hash_seed(number: int) -> Iterator[None]:
    """Make `hash` return other numbers for strings, as in a process with another hash seed."""
    real = builtins.hash

    def salted(value: Any) -> int:
        if isinstance(value, str | bytes):
            return real((number, real(value)))
        return real(tuple(map(salted, value))) if isinstance(value, tuple) else real(value)

    with _replaced(builtins, hash=salted):
        yield


@contextmanager
def _processors(number: int) -> Iterator[None]:
    """Simulate another number of processors and threads."""
    count = 3 * number - 2
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    counted: dict[str, Any] = dict.fromkeys(("cpu_count", "process_cpu_count"), lambda: count)
    with (
        _replaced(os, sched_getaffinity=lambda _pid: set(range(count)), **counted),
        _replaced(threading, active_count=lambda: count),
    ):
        if torch is not None:
            torch.set_num_threads(number)
        try:
            yield
        finally:
            if torch is not None:
                torch.set_num_threads(before)


@contextmanager
def _variables(number: int) -> Iterator[None]:
    """Simulate other environment variables, program arguments and another process id."""
    before = {name: os.environ.get(name) for name in _LAUNCHERS}
    os.environ.update(dict.fromkeys(_LAUNCHERS, str(number)))
    try:
        with (
            _replaced(os, getpid=lambda: 1000 + number, getppid=lambda: 100 + number),
            _replaced(sys, argv=["program", str(number)]),
        ):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _thread(number: int) -> Iterator[None]:
    """Give this thread another name."""
    thread = threading.current_thread()
    with _replaced(thread, name=f"worker-{number}"):
        yield


@contextmanager
def _host(number: int) -> Iterator[None]:
    """Give the host another name and another network card."""
    name = f"host-{number}"
    others: dict[str, Any] = dict.fromkeys(("gethostname", "node", "getfqdn"), lambda *_: name)
    with ExitStack() as stack:
        for place in (socket, platform):
            stack.enter_context(_replaced(place, **others))
        stack.enter_context(_replaced(uuid, getnode=lambda: 0x20000000001 * number))
        if hasattr(os, "uname"):
            real = os.uname()
            own = os.uname_result((real[0], name, *real[2:]))
            stack.enter_context(_replaced(os, uname=lambda: own))
        yield


@contextmanager
def _date(number: int) -> Iterator[None]:
    """Set the clock to another day and hour; `datetime.date.today` reads it by `time.time`."""
    seconds = 10**9 + 100_003 * number

    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(seconds, tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(seconds, datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(seconds)

    def at(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda when=None: real(seconds if when is None else when)

    strftime, real_localtime = time.strftime, time.localtime
    clock = {name: at(getattr(time, name)) for name in ("localtime", "gmtime", "ctime")}
    with (
        _replaced(
            time,
            time=lambda: float(seconds),
            time_ns=lambda: seconds * 10**9,
            strftime=lambda how, when=None: strftime(how, real_localtime(seconds) if when is None else when),
            **clock,
        ),
        _replaced(datetime, datetime=Then),
    ):
        yield


ENVIRONMENTS: Mapping[str, Any] = {
    "another seed of the global generators": _generators,
    "another hash seed": _hash_seed,
    "another number of threads": _processors,
    "other environment variables": _variables,
    "another name of the thread": _thread,
    "another name of the host": _host,
    "another date": _date,
}
"""Contexts by name. Each context takes a number, and simulates another environment for each number."""


def modules_of(value: Any) -> list[tuple[str, str | None]]:
    """Return the names and files of the modules that define the classes of a value and of its fields."""
    found: dict[str, str | None] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        for cls in type(one).__mro__:
            module = sys.modules.get(cls.__module__)
            if module is not None and cls.__module__.partition(".")[0] not in ("qcomp", "builtins", "abc"):
                found[cls.__module__] = getattr(module, "__file__", None)
        waiting += [getattr(one, name) for name in getattr(one, "__dataclass_fields__", ())]
    return list(found.items())


def in_another_process(value: Any, task: str, argument: Any, *, spec: str | None = None) -> Any:
    """Run a task on a value in a fresh process with another hash seed, date, host, processor count and environment.

    The process imports the modules of the value's classes, unpickles the value, and calls the function that ``task``
    names, such as ``"qcomp.testing.jobs:run"``, with the value and the argument. Returns the function's result; None if
    the process cannot import the classes, such as classes of a notebook. A compressor that cannot be pickled is made
    from its ``spec``. Raises AssertionError if the function raises in the process.
    """
    modules = modules_of(value)
    if _MARK in os.environ or not all(_can_be_imported(name, file) for name, file in modules):
        return None
    pickled = None
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        pickled = pickle.dumps(value)
    if pickled is None and spec is None:
        return None
    paths = [str(Path(path).absolute()) for path in sys.path]
    other = str(_CHILD if os.environ.get("PYTHONHASHSEED") != str(_CHILD) else _CHILD + 1)
    # Matrix products of other libraries depend on the number of their threads, which is no fault of the author's.
    names = [name for name in (*_LAUNCHERS, "CUDA_VISIBLE_DEVICES") if not name.endswith("_NUM_THREADS")]
    environment = os.environ | dict.fromkeys(names, other)
    environment |= {_MARK: "1", "QCOMP_KERNELS": "pure"}  # the same bytes, and nothing to compile
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        job = pickle.dumps((paths, pickle.dumps((modules, str(result), task, pickled or spec, argument))))
        done = subprocess.run(
            [sys.executable, __file__],
            input=job,
            capture_output=True,
            env=environment,
            cwd=folder,
            timeout=_SECONDS,
            check=False,
        )
        if not result.exists():
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise AssertionError(f"a fresh process ends with status {done.returncode}: {last}")
        kind, found = pickle.loads(result.read_bytes())
    assert kind != "error", f"in another process, {found}"
    return found if kind == "result" else None


def _can_be_imported(name: str, file: str | None) -> bool:
    """Return whether another process can import a module: not a notebook, nor a script that would start again."""
    if name != "__main__":
        return file is not None
    try:
        return file is not None and "__name__ ==" in Path(file).read_text(encoding="utf-8")
    except OSError:
        return False


def _import(name: str, file: str) -> None:
    if name == "__main__":  # as multiprocessing does
        module = type(sys)("__mp_main__")
        module.__dict__.update(runpy.run_path(file, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        depth = name.count(".") + (Path(file).stem == "__init__")
        sys.path.append(str(Path(file).parents[depth]))  # pytest imports without it
        importlib.import_module(name)


def _run(
    modules: Sequence[tuple[str, str]], task: str, subject: bytes | str, argument: Any
) -> tuple[str, Any]:
    try:
        for name, file in modules:
            _import(name, file)
        if isinstance(subject, str):
            from qcomp.core.registry import compressor  # noqa: PLC0415 - only here

            value: Any = compressor(subject)
        else:
            value = pickle.loads(subject)
        where, _, function = task.rpartition(":")
        call = getattr(importlib.import_module(where), function) if where else globals()[function]
    except (ImportError, AttributeError, OSError, ValueError) as error:
        return "absent", str(error)
    try:
        return "result", call(value, argument)
    except Exception as error:
        return "error", f"it raises {type(error).__name__}: {error}"


def compress_and_decompress(
    compressor: Any, inputs: Sequence[tuple[Any, Any, bytes]]
) -> list[tuple[bytes, bytes]]:
    """For each vector, key and payload, return this process's payload of the vector, and the decompressed payload."""
    import numpy as np  # noqa: PLC0415 - this process has changed what numpy may read

    from qcomp.core.payload import Payload  # noqa: PLC0415

    decoded = [
        compressor.decompress(
            Payload(compressor.spec, x.size, x.dtype.name, np.frombuffer(data, np.uint8)), like=x
        ).tobytes()
        for x, _, data in inputs
    ]
    payloads = [compressor.compress(x, key=key).data.tobytes() for x, key, _ in inputs]
    return list(zip(payloads, decoded, strict=True))


def _main() -> None:
    sys.path[:], job = pickle.loads(sys.stdin.buffer.read())
    modules, result, *rest = pickle.loads(job)
    with ExitStack() as stack:
        for context in (_processors, _thread, _host, _date):
            stack.enter_context(context(_CHILD))
        sys.argv = ["another"]
        Path(result).write_bytes(pickle.dumps(_run(modules, *rest)))


if __name__ == "__main__":
    _main()
