"""The options of ``bench`` and ``warmup`` that select compressors and arrays."""

import argparse

from qcomp.cli.output import explained
from qcomp.core.compressor import Compressor
from qcomp.core.registry import compressor

ARRAYS = ("numpy", "torch", "torch-cuda", "cupy", "jax")

_USUAL = (
    "sign",
    "sign:scale=rms",
    "onebit_sgd",
    "qsgd:levels=1",
    "qsgd:levels=7",
    "qsgd:levels=127",
    "minmax",
    "cast",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select arrays and compressors."""
    parser.add_argument(
        "--arrays", choices=ARRAYS, default="numpy", help="library and device (default: %(default)s)"
    )
    parser.add_argument(
        "--compressor",
        type=explained(compressor),
        action="append",
        metavar="SPEC",
        help=f"compressor spec; repeatable (default: {', '.join(_USUAL)})",
    )


def compressors_of(options: argparse.Namespace, more: tuple[str, ...] = ()) -> list[Compressor]:
    """Return the requested compressors; by default the usual ones, and the compressors with the specs ``more``."""
    chosen: list[Compressor] | None = options.compressor
    return chosen or [compressor(spec) for spec in (*_USUAL, *more)]
