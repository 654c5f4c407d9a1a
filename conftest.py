"""What pytest must not import where it cannot, and what its tests need of the process."""

import ctypes
import gc
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
NEEDS = {
    "torch": ["qcomp/torch", "qcomp/integrations", "qcomp/comm/torch_*", "qcomp/private_names/torch.py"],
    "torch>=2.9": ["qcomp/torch/exchanges.py", "qcomp/torch/fsdp.py", "tests/torch_face/test_fsdp.py"],
    "torchft": ["qcomp/torch/ft", "qcomp/private_names/torchft.py", "tests/torch_face/ft_threads.py"],
    "triton>=3.4": ["qcomp/backends/torch_triton", "tests/backends/test_triton.py"],
    "jax": ["qcomp/jax", "qcomp/backends/jax_xla"],
    "numba": ["qcomp/backends/numba_cpu", "qcomp/private_names/numba.py"],
    "mpi4py": ["qcomp/comm/mpi*"],
}
"""What cannot be imported without an optional package, or with an older version."""


def is_installed(needed: str) -> bool:
    """Return whether a package is there, in a version that is new enough."""
    requirement = Requirement(needed)
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


MISSING = [needed for needed in NEEDS if not is_installed(needed)]
collect_ignore_glob = [path for needed in MISSING for path in NEEDS[needed]]

# Before torch starts: workers share the processors, and OpenMP's threads spin while they wait for work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so; tests of interrupts, and their children, need it otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the limit on memory, and the share of the exhaustive tests."""
    parser.addoption(
        "--max-memory",
        type=int,
        metavar="MIB",
        help="report the peak memory of each worker; fail if one exceeds this",
    )
    parser.addoption(
        "--tenth",
        metavar="HEX",
        help="of the exhaustive tests, run a tenth, chosen by a hash such as that of a commit",
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let JAX keep compiled programs between runs: in pytest's cache, under the hash of what was compiled.

    Not in the environment: ranks that share a directory could read a file that another is still writing.
    """
    names = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if names & {"half", "library", "libraries"} and find_spec("jax"):
        importlib.import_module("jax")  # else a test would import it, and compile without the cache

    jax, cache = sys.modules.get("jax"), getattr(session.config, "cache", None)
    if jax is not None and cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def needs_missing(error: BaseException | None) -> str | None:
    """Return the optional package that a test needs and that is not installed, if this is what an error says.

    A module of qcomp that should do without the package is an error still.
    """
    while error is not None:
        if isinstance(error, ImportError):
            places = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
            own = [place.relative_to(ROOT) for place in places if place.is_relative_to(ROOT)]
            *_, last = [place for place in own if not place.parts[0].startswith(".")]
            for needed in MISSING:
                if any(last.match(f"{path}*") or Path(path) in last.parents for path in NEEDS[needed]):
                    return needed
            package = (error.name or "").partition(".")[0]
            if package in MISSING and last.parts[0] != "qcomp":
                return package
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Leave out files that need a package that is not installed."""
    report: Any = yield
    call = getattr(report, "call", None)
    package = needs_missing(call.excinfo.value) if report.failed and call else None
    if package:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {package}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip tests that need a package that is not installed."""
    try:
        yield
    except ImportError as error:
        package = needs_missing(error)
        if package:
            pytest.skip(f"needs {package}: {item.name}")
        raise


_memory_after_release = 0
"""Resident memory in MiB when compiled programs were last freed."""


def resident_memory() -> int:
    """Return the memory of this process in MiB; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize() >> 20


def pytest_runtest_teardown() -> None:
    """Free what JAX has compiled, of 150 MiB or more; the programs of all tests together take gigabytes."""
    global _memory_after_release  # noqa: PLW0603 - of the process
    grown = resident_memory() - _memory_after_release
    if "jax" not in sys.modules or grown < 150:
        return
    sys.modules["jax"].clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc keeps freed memory otherwise
        libc.malloc_trim(0)
    _memory_after_release = resident_memory()


_peaks: dict[str, int] = {}
"""Peak memory of each worker in MiB, where it is limited."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report the peak memory of this process to whoever started it."""
    if session.config.getoption("--max-memory") is None:
        return
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["peak"] = peak
    elif not _peaks:  # the tests ran in this process
        _peaks["pytest"] = peak
    if any(peak > session.config.getoption("--max-memory") for peak in _peaks.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take down the peak memory of a worker; one that crashed has none."""
    if "peak" in getattr(node, "workeroutput", {}):
        _peaks[node.gateway.id] = node.workeroutput["peak"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how much memory the workers took."""
    limit = config.getoption("--max-memory")
    for name, peak in sorted(_peaks.items()):
        terminalreporter.write_line(f"peak memory of {name}: {peak} MiB; at most {limit} are allowed")
