"""Time training steps and exchanges on links of 100 Mbit/s to 10 Gbit/s, between network namespaces of this machine.

    sudo make bench-network

Needs root and iproute2. Writes a file for each run into docs/benchmarks/network, and skips runs whose files exist, so
it can be stopped and restarted at any time. Then it draws the pictures and writes the tables of that folder's
README.md.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import page
from network import bars, journeys, tables
from network.launch import RankError, launch
from network.methods import METHODS
from network.models import MODELS
from network.recipes import RECIPES
from network.results import Results
from network.shaped import NetworkError, require_rights
from tqdm import tqdm

PARTS = ("matrix", "links", "exchange", "loss")
ROUNDS = {"100mbit": 5, "1gbit": 20, "10gbit": 30, "loopback": 30}
TIMED = {"100mbit": 4, "1gbit": 8}
"""Rounds in which the steps of loss curves are timed, by link."""
ALONE = ("powersgd1", "powersgd2", "sign", "onebit_adam")
"""Methods with which every rank also trains alone, since the cost model does not know their own computation."""
FAST_WITH_FOUR = "mlp"
"""The model that four ranks also train on fast links, where the processor is the limit and two cores tell little."""
LINK_ROUNDS, EXCHANGE_ROUNDS = 7, 9
CHECKED = ("adam", "onebit_adam")
CHECK_STEPS = 40


@dataclass(frozen=True)
class Task:
    """A program for every rank, and the files that it writes."""

    name: str
    transport: str
    ranks: int
    program: list[str]
    files: list[Path]
    link: str | None = None


def main() -> int:
    """Run what is missing, then write the page."""
    options = parse()
    results, failed = Results(options.out), False
    if not options.page:
        try:
            require_rights()
            failed = run([task for part in options.parts for task in TASKS[part](options, results)])
        except NetworkError as error:
            print(f"network_times.py: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("network_times.py: stopped; start it again to go on", file=sys.stderr)
            return 130
    write(results)
    return 1 if failed else 0


def run(tasks: Sequence[Task]) -> bool:
    """Run the tasks one after the other, all of them even if some fail; return whether any failed."""
    failed = False
    for task in tqdm(tasks, desc="runs", unit="run"):
        tqdm.write(task.name)
        for path in task.files:
            path.parent.mkdir(parents=True, exist_ok=True)
        files = [str(path.resolve()) for path in task.files]
        program = ["-W", "ignore", *task.program, "--out", *files]
        try:
            launch(task.transport, task.ranks, program, link=task.link)
        except RankError as error:
            failed = True
            tqdm.write(f"{task.name}: error: {error}")
    return failed


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--out", type=Path, default=Path("docs/benchmarks/network"), help=default)
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=default)
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL", help=default)
    add("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4], help=default)
    add("--links", nargs="+", choices=list(ROUNDS), default=list(ROUNDS), metavar="LINK", help=default)
    add("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD", help=default)
    add("--rounds", type=int, help="of every measurement, at least 2 (default: what each needs)")
    add("--steps", type=int, default=600, help=f"of the language model {default}")
    add("--page", action="store_true", help="only draw and write the tables, from the files")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}; expected at least 2, to compute quartiles")
    return options


def matrix(options: argparse.Namespace, results: Results) -> Iterator[Task]:
    """Return the tasks for steps of all methods; those that test the cost model share a process."""
    for ranks in options.ranks:
        for model in options.models:
            usual = [link for link in options.links if ranks == 2 or model == FAST_WITH_FOUR or link in TIMED]
            for links in (TIMED, ["10gbit"], ["loopback"]):
                paths = {link: results.run_path(model, ranks, link) for link in links if link in usual}
                wanted = [link for link in paths if not paths[link].exists()]
                if wanted:
                    rounds = [str(options.rounds or ROUNDS[link]) for link in wanted]
                    program = ["-m", "network.matrix", "--model", model, "--methods", *options.methods]
                    program += ["--alone", *(m for m in options.methods if m in ALONE and links is TIMED)]
                    program += ["--links", *wanted, "--rounds", *rounds]
                    name = f"{model}, {ranks} ranks: {', '.join(wanted)}"
                    files = [paths[link] for link in wanted]
                    yield Task(name, "gloo", ranks, program, files, _alone(wanted))


def links(options: argparse.Namespace, results: Results) -> Iterator[Task]:
    """Return the tasks for the inputs of the cost model."""
    for ranks in options.ranks:
        for group in ([link for link in options.links if link != "loopback"], ["loopback"]):
            wanted = [x for x in group if x in options.links and not results.link_path(ranks, x).exists()]
            if wanted:
                rounds = str(options.rounds or LINK_ROUNDS)
                program = ["-m", "network.links", "--links", *wanted, "--rounds", rounds]
                paths = [results.link_path(ranks, link) for link in wanted]
                name = f"links, {ranks} ranks: {', '.join(wanted)}"
                yield Task(name, "gloo", ranks, program, paths, _alone(wanted))


def exchange(options: argparse.Namespace, results: Results) -> Iterator[Task]:
    """Return the tasks for exchanges of 1-bit payloads."""
    wanted = [link for link in options.links if link in TIMED]
    for transport in ("gloo", "mpi"):
        for ranks in options.ranks:
            path = results.exchange_path(transport, ranks)
            if wanted and not path.exists():
                rounds = str(options.rounds or EXCHANGE_ROUNDS)
                program = ["-m", "network.exchange", "--transport", transport, "--links", *wanted]
                program += ["--rounds", rounds]
                yield Task(f"exchange, {transport}, {ranks} ranks", transport, ranks, program, [path])


def loss(options: argparse.Namespace, results: Results) -> Iterator[Task]:
    """Return the tasks for curves, for times of their steps, and for checks of the product of both."""
    for name in RECIPES:
        path = results.loss_path(name)
        if not path.exists():
            program = ["-m", "network.loss", "--curve", name, "--steps", str(options.steps)]
            yield Task(f"loss, {name}", "gloo", 2, [*program, "--links", "loopback"], [path], "loopback")
    timed = [link for link in options.links if link in TIMED]
    path = results.loss_path(journeys.TIMES)
    if timed and not path.exists():
        rounds = [str(options.rounds or TIMED[link]) for link in timed]
        program = ["-m", "network.loss", "--links", *timed, "--rounds", *rounds]
        yield Task("loss, times of steps", "gloo", 2, program, [path])
    for name in CHECKED if "1gbit" in options.links else ():
        path = results.loss_path(f"{journeys.CHECK}{name}")
        if not path.exists():
            steps = str(min(CHECK_STEPS, options.steps))
            program = ["-m", "network.loss", "--curve", name, "--steps", steps, "--links", "1gbit"]
            yield Task(f"loss, check of {name}", "gloo", 2, program, [path], "1gbit")


def _alone(wanted: Sequence[str]) -> str | None:
    """Return the loopback if it is requested; without a link the ranks set the limits themselves."""
    return "loopback" if wanted == ["loopback"] else None


TASKS = {"matrix": matrix, "links": links, "exchange": exchange, "loss": loss}


def write(results: Results) -> None:
    """Draw the pictures, and write the tables into the page."""
    blocks = tables.blocks(results) | journeys.blocks(results)
    runs = results.runs()
    figures = {"steps": bars.picture(runs), "gain": bars.gain(runs), "loss": journeys.picture(results)}
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(results.folder / f"{name}.png", dpi=100)
    page.rewrite(results.folder, blocks)
    for name, text in blocks.items():
        print(f"\n{name}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
