"""Train a small language model on several ranks that exchange compressed messages.

A byte-level transformer learns Python's own standard library, data-parallel over MPI::

    mpirun -n 2 python -m mpi4py examples/train_lm.py

Without options it trains four times with the same seed and steps: with exact Adam, 1-bit Adam, 8-bit QAdam, and SGD
with 4-bit QSGD and error feedback. It compares their losses and the bytes that they sent.

Ctrl-C stops all ranks after the same step. With ``--checkpoint-dir``, ``--resume`` continues from there, and ends
with the same ``parameters_sha256`` in summary.json as a run without a stop.
"""

import argparse
import io
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import numpy as np
from lm.gather import gather
from lm.interrupt import StopRequest
from lm.recipes import RECIPES, Settings, make_optimizer

import qcomp
from qcomp.cli.corpus import Corpus
from qcomp.comm import Communicator


def main() -> int:
    """Run the job and return the exit status."""
    stop = StopRequest()
    comm = qcomp.comm.world()
    options = parse_options(comm)

    # torch takes seconds to load, so wrong options and --help are handled first.
    from lm.checkpoint import CheckpointError, Checkpoints  # noqa: PLC0415
    from lm.report import report  # noqa: PLC0415
    from lm.train import share_the_cores, train  # noqa: PLC0415

    share_the_cores(comm)
    corpus = Corpus.of_standard_library()
    runs = []
    status = 0
    for name in chosen(options):
        folder: Path | None = options.checkpoint_dir
        try:
            with qcomp.backends.use(options.kernels):
                run = train(
                    settings_for(name, options),
                    corpus,
                    comm,
                    stop,
                    checkpoints=Checkpoints(folder / name, comm) if folder else None,
                    checkpoint_every=options.checkpoint_every,
                    resume=options.resume,
                    stop_after=options.stop_after,
                )
        except (CheckpointError, qcomp.MismatchError, qcomp.NonFiniteError) as error:  # on all ranks
            say(comm, f"train_lm.py: error: {name}: {error}")
            return 2
        if run is None:
            how = "--resume continues from here" if folder else "without --checkpoint-dir it was not kept"
            say(comm, f"stopped in {name}; {how}")
            status = 130
            break
        runs.append(run)
    if runs and comm.rank == 0:
        report(runs, options.out)
    return status


def parse_options(comm: Communicator) -> argparse.Namespace:
    """Read the command line; only rank 0 reports errors, before any rank exits."""
    options = argparse.Namespace()
    status = -1
    nowhere = io.StringIO()
    out, err = (sys.stdout, sys.stderr) if comm.rank == 0 else (nowhere, nowhere)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            parser = make_parser()
            parser.parse_args(namespace=options)
            check_together(parser, options)
            if comm.rank == 0:
                make_folder(parser, options.out)
    except SystemExit as leaving:
        err.flush()
        status = int(leaving.code or 0)
    worst = int(gather(comm, np.array([status])).max())
    if worst >= 0:
        raise SystemExit(worst)
    return options


def make_parser() -> argparse.ArgumentParser:
    """Describe the options."""
    parser = argparse.ArgumentParser(
        prog="train_lm.py",
        description="Train a small language model on ranks that send each other compressed messages.",
    )
    count = number(int, lambda value: value >= 1, "a whole number of at least 1")
    natural = number(int, lambda value: value >= 0, "a whole number of at least 0")
    positive = number(float, lambda value: 0 < value < math.inf, "a positive number")
    fraction = number(float, lambda value: 0 < value < 1, "a number between 0 and 1")
    default = "(default: %(default)s)"

    add = parser.add_argument
    add("--optimizer", choices=["all", *RECIPES], default="all", help=f"'all': one after the other {default}")
    add("--steps", type=count, default=120, help=f"steps of each run {default}")
    add("--batch", type=count, default=8, help=f"windows of 128 bytes per rank and step {default}")
    add("--seed", type=natural, default=0, help=f"of initial parameters, batches and rounding {default}")
    add("--learning-rate", type=positive, help="peak of the schedule (default: what suits the optimizer)")
    add("--compressor", type=compressor_spec, metavar="SPEC", help="such as qsgd:levels=7,bucket_size=512")
    add(
        "--kernels",
        choices=["auto", *qcomp.backends.names()],
        default="auto",
        help=f"the kernel set {default}",
    )
    freeze = parser.add_mutually_exclusive_group()
    freeze.add_argument(
        "--warmup-fraction", type=fraction, default=0.2, help=f"part of the steps before the freeze {default}"
    )
    freeze.add_argument(
        "--auto-freeze",
        action="store_true",
        help="freeze the variance when it is stable: takes 300 steps or more",
    )
    add("--checkpoint-dir", type=Path, help="where to write checkpoints (default: none are written)")
    add("--checkpoint-every", type=count, default=50, help=f"steps between checkpoints {default}")
    add("--resume", action="store_true", help="resume from the last checkpoint, if there is one")
    add("--stop-after", type=count, metavar="STEPS", help="leave early, as if by Ctrl-C, to try --resume")
    add("--out", type=Path, default=Path("runs/demo"), help=f"folder for the results {default}")
    return parser


def check_together(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if options.resume and options.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    for option in ("learning_rate", "compressor"):
        if getattr(options, option) is not None and options.optimizer == "all":
            parser.error(f"--{option.replace('_', '-')} needs one --optimizer: it does not suit all of them")
    if options.compressor is not None and not RECIPES[options.optimizer].compresses:
        parser.error(f"--compressor: {options.optimizer} compresses nothing")
    try:
        for name in chosen(options):
            make_optimizer(settings_for(name, options))
    except ValueError as error:
        parser.error(f"{options.optimizer}: {error}")


def make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the folder for the results now rather than after the training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the optimizers to train with, one run each."""
    return list(RECIPES) if options.optimizer == "all" else [options.optimizer]


def settings_for(name: str, options: argparse.Namespace) -> Settings:
    """Return one run's settings."""
    return Settings(
        optimizer=name,
        steps=options.steps,
        batch=options.batch,
        seed=options.seed,
        learning_rate=options.learning_rate or RECIPES[name].learning_rate,
        warmup_fraction=options.warmup_fraction,
        auto_freeze=options.auto_freeze,
        compressor=options.compressor,
    )


def number(
    convert: Callable[[str], float], accepts: Callable[[float], bool], expected: str
) -> Callable[[str], float]:
    """Return a parser for an option's value whose error says what it expected."""

    def read(text: str) -> float:
        with suppress(ValueError):
            value = convert(text)
            if accepts(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return read


def compressor_spec(text: str) -> str:
    """Return the text if it is a valid compressor spec."""
    try:
        qcomp.compressor(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def say(comm: Communicator, text: str) -> None:
    """Print a line on rank 0; no rank returns before it is printed."""
    if comm.rank == 0:
        print(text, file=sys.stderr, flush=True)
    gather(comm, np.zeros(1))


if __name__ == "__main__":
    sys.exit(main())
