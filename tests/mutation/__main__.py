"""Breaks qcomp in one place at a time, and notes which test is the first to fail.

Run it from the root of the project, in its environment::

    python -m tests.mutation cover build/cover.json [PYTEST ARGUMENTS]
    python -m tests.mutation run build/cover.json build/mutants.jsonl --count 300 [PYTEST ARGUMENTS]

``cover`` runs the tests, and notes which functions of qcomp.core each of them calls, and how long it takes. ``run``
draws mutants, and runs for each the tests that call the changed function, the cheapest file first, until one fails. A
test that was not there in ``cover`` counts as calling what others in its file call. It continues where it stopped.
Arguments for pytest select the tests, such as ``-m "not slow"``.

Tests are imported once; each mutant is a forked process in which the functions have other code. Processes that tests
start import a copy of the package that has the same change.
"""

import argparse
import ast
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.points import Mutant, draw

ROOT = Path(__file__).parents[2]
CORE = str(ROOT / "qcomp" / "core")


class Cover:
    """Notes for each test its seconds, and the functions of qcomp.core that it calls."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.tests: dict[str, dict[str, Any]] = {}
        self.called: set[CodeType] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.called = set()
        note: Callable[[FrameType, str, Any], None] = self._note
        threading.setprofile(note)
        sys.setprofile(note)
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            seconds = time.perf_counter() - start
            functions = {name for code in self.called if (name := name_of(code))}
            self.tests[item.nodeid] = {"seconds": round(seconds, 3), "functions": sorted(functions)}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.called.add(frame.f_code)

    def pytest_sessionfinish(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.tests))


def file_of(test: str) -> str:
    return test.partition("::")[0]


def name_of(code: CodeType) -> str | None:
    """Return the module and name of the outermost function around some code of qcomp.core; None for other code."""
    if not code.co_filename.startswith(CORE):
        return None
    return f"{os.path.relpath(code.co_filename, ROOT)}:{code.co_qualname.partition('.<locals>')[0]}"


class Run:
    """Runs the tests of each mutant in a process of its own, some at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cover = json.loads(options.cover.read_text())
        self.callers = defaultdict(list)
        for test, known in self.cover.items():
            for function in known["functions"]:
                self.callers[function].append(test)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        mutants = draw(ROOT, self.options.count, self.options.seed)
        out = self.options.out
        done = (
            {json.loads(line)["mutant"] for line in out.read_text().splitlines()} if out.exists() else set()
        )
        waiting = [number for number in self.options.only or range(len(mutants)) if number not in done]
        running: list[multiprocessing.process.BaseProcess] = []
        context = multiprocessing.get_context("fork")
        while waiting or running:
            if waiting and len(running) < self.options.jobs:
                number = waiting.pop(0)
                process = context.Process(target=self._judge, args=(number, mutants[number], items))
                with warnings.catch_warnings(action="ignore"):  # JAX warns of forks, and was not used yet
                    process.start()
                running.append(process)
                continue
            multiprocessing.connection.wait([process.sentinel for process in running])
            running = [process for process in running if process.is_alive()]
        return True

    def _judge(self, number: int, mutant: Mutant, items: dict[str, pytest.Item]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="mutant"))
        start = time.monotonic()
        try:
            break_here(mutant, folder)
            tests = self._in_order(f"{mutant.module}:{mutant.function}", items)
            killer, count = self._first_failure([items[test] for test in tests], start + self.options.limit)
            line = asdict(mutant) | {
                "mutant": number,
                "killer": killer,
                "tests": count,
                "of": len(tests),
                "seconds": round(time.monotonic() - start),
            }
            with self.options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        finally:
            shutil.rmtree(folder)
            os._exit(0)

    def _in_order(self, function: str, items: dict[str, pytest.Item]) -> list[str]:
        """Return the tests that call a function, those of the cheapest file first."""
        callers = set(self.callers[function])
        known = {file_of(test) for test in callers}
        files = defaultdict(list)
        for test in items:
            if test in callers or (test not in self.cover and file_of(test) in known):
                files[file_of(test)].append(test)
        costs = {
            file: sum(self.cover[test]["seconds"] if test in self.cover else 1.0 for test in tests)
            for file, tests in files.items()
        }
        return [test for file in sorted(files, key=costs.__getitem__) for test in files[file]]

    def _first_failure(self, items: Sequence[pytest.Item], deadline: float) -> tuple[str | None, int]:
        """Return the first test that fails and the number of tests that ran."""
        for count, item in enumerate(items, start=1):
            following = items[count] if count < len(items) else None
            reports = runtestprotocol(item, log=False, nextitem=following)
            if any(report.failed for report in reports):
                return item.nodeid, count
            if time.monotonic() > deadline:
                return "out of time", count
        return None, len(items)


def break_here(mutant: Mutant, folder: Path) -> None:
    """Give this process's functions of a module the changed code, and processes that it starts a changed package."""
    path = ROOT / mutant.module
    tree = mutant.tree(ROOT)
    codes = codes_in(compile(tree, str(path), "exec"))
    changed = {(code.co_qualname, code.co_firstlineno): code for code in codes}
    found = 0
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(path):
            old = function.__code__
            code = changed.get((old.co_qualname, old.co_firstlineno))
            if code is not None and code.co_freevars == old.co_freevars:
                function.__code__ = code
                found += 1
    assert found, f"no function of {mutant.module} was found"
    package = shutil.copytree(ROOT / "qcomp", folder / "qcomp", ignore=shutil.ignore_patterns("__pycache__"))
    (package.parent / mutant.module).write_text(ast.unparse(tree))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    cover, run = (commands.add_parser(name) for name in ("cover", "run"))
    for command in (cover, run):
        command.add_argument("cover", type=Path, help="the file of functions that tests call")
    run.add_argument("out", type=Path, help="a line for each mutant is appended here")
    run.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these mutants (default: all)")
    run.add_argument("--count", type=int, default=300)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--jobs", type=int, default=2)
    run.add_argument("--limit", type=float, default=1200, help="seconds for a mutant")
    options, rest = parser.parse_known_args()
    plugin: Any = Cover(options.cover) if options.command == "cover" else Run(options)
    arguments = ["-q", "-p", "no:randomly", "-p", "no:xdist", "--timeout", "60", *rest]
    return int(pytest.main(arguments, plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
