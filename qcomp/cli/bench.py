"""``qcomp bench``: times compressors on this machine, and compares them with a copy."""

import argparse
import platform
from typing import Any

from qcomp.backends import explain
from qcomp.cli.output import UsageError, explained, print_json, say, table, vector
from qcomp.cli.selection import add_arguments as add_selection
from qcomp.cli.selection import compressors_of
from qcomp.comm.local import LocalCommunicator
from qcomp.core.compressor import Compressor
from qcomp.core.numeric.random import Key
from qcomp.planning import measure
from qcomp.planning.numbers_with_units import count
from qcomp.version import __version__

EPILOG = """
Times are medians in nanoseconds per float32 element: to compress with error feedback, to decompress, and to decompress
and add to a sum. The column after each time gives it as a multiple of the time to copy the vector.

examples:
  qcomp bench
  qcomp bench --arrays torch --elements 16M
  qcomp bench --compressor qsgd:levels=7,bucket_size=128 --compressor topk:k=4,bucket_size=64
  QCOMP_KERNELS=pure qcomp bench --json
"""

_PARTS = ("encode", "decode", "add")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``qcomp bench``."""
    add_selection(parser)
    parser.add_argument(
        "--elements", type=explained(count), default=1 << 22, help="elements of the vector (default: 2^22)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of timings; the median counts (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table."""
    for name in ("elements", "rounds"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}; expected at least 1")
    like = vector(options.arrays, options.elements)
    facts = _measured(compressors_of(options), like, options)
    if options.json:
        print_json(facts)
    else:
        say(_text(facts))
    return 0


def _measured(compressors: list[Compressor], like: Any, options: argparse.Namespace) -> dict[str, Any]:
    found = measure(LocalCommunicator.alone(), compressors, like=like, rounds=options.rounds).machine
    return {
        "qcomp": __version__,
        "machine": platform.machine(),
        "arrays": options.arrays,
        "kernels": explain(like).kernels,
        "elements": options.elements,
        "rounds": options.rounds,
        "copy_ns": found.copy * 1e9,
        "compressors": [
            {
                "spec": c.spec,
                "bits": _bits(c, like),
                **{f"{part}_ns": getattr(found.speeds[c.spec], part) * 1e9 for part in _PARTS},
                **{f"{part}_over_copy": getattr(found.speeds[c.spec], part) / found.copy for part in _PARTS},
            }
            for c in compressors
        ],
    }


def _bits(compressor: Compressor, like: Any) -> float:
    """Return the bits per element of a payload of this vector."""
    return compressor.compress(like, key=Key()).nbytes * 8 / int(like.shape[0])


def _text(facts: dict[str, Any]) -> str:
    head = ["compressor", "bits", *(cell for part in _PARTS for cell in (f"{part} ns", "copies"))]
    rows = [
        [
            row["spec"],
            f"{row['bits']:.2f}",
            *(
                cell
                for part in _PARTS
                for cell in (f"{row[f'{part}_ns']:.3g}", f"{row[f'{part}_over_copy']:.2f}")
            ),
        ]
        for row in facts["compressors"]
    ]
    what = f"{facts['elements']:,} float32 of {facts['arrays']}, kernels {facts['kernels']}"
    return "\n".join(
        [f"{what}; a copy takes {facts['copy_ns']:.3g} ns an element", "", *table([head, *rows], right=True)]
    )
