"""``qcomp warmup``: compiles the kernels before training starts."""

import argparse
import time

from qcomp.backends import explain
from qcomp.cli.output import print_json, say, vector
from qcomp.cli.selection import add_arguments as add_selection
from qcomp.cli.selection import compressors_of
from qcomp.core.compressors.identity import Identity
from qcomp.core.kernels import chosen
from qcomp.core.numeric.arrays import array_namespace
from qcomp.core.primitives.rehearsal import rehearse

EPILOG = """
Kernels are compiled when they are first needed, which takes seconds to a minute. They are kept in a cache on disk;
numba's is in ~/.cache/qcomp. To compile once for all users of a container image or a shared disk, set NUMBA_CACHE_DIR
and TRITON_CACHE_DIR to folders that these users share.

Several of these commands at a time share the work: each compiles what the others have not begun.

examples:
  qcomp warmup
  qcomp warmup --arrays torch --dtype float32,bfloat16
  NUMBA_CACHE_DIR=/cache qcomp warmup --compressor sign
"""

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_CODED = ("qsgd:coding=elias", "qsgd:coding=range")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``qcomp warmup``."""
    add_selection(parser)
    parser.add_argument(
        "--dtype",
        type=_dtypes,
        default=("float32",),
        metavar="DTYPES",
        help=f"dtypes, separated by commas, out of {', '.join(_DTYPES)} (default: float32)",
    )


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_DTYPES)}")
    return names


def run(options: argparse.Namespace) -> int:
    """Compile, and print how long it took; the status is 1 if there are no kernels for such arrays."""
    compressors = compressors_of(options, _CODED)
    like = vector(options.arrays, 1)
    reports = []
    for name in options.dtype:
        xp = array_namespace(like)
        dtype = getattr(xp, name, None)
        if dtype is None:
            reports.append({"dtype": name, "kernels": None, "problem": f"{options.arrays} has no {name}"})
            continue
        x = xp.astype(like, dtype)
        choice, kernels = explain(x), chosen(x)
        if kernels is None:
            reports.append({"dtype": name, "kernels": None, "problem": choice.reason})
            continue
        if not getattr(kernels, "any_shape", False):
            problem = "compiles anew for every shape, so nothing can be compiled ahead"
            reports.append({"dtype": name, "kernels": kernels.name, "problem": problem})
            continue
        start = time.perf_counter()
        rehearse([*compressors, Identity()], x, steps=True)  # steps average small tensors exactly
        seconds = round(time.perf_counter() - start, 3)
        reports.append({"dtype": name, "kernels": kernels.name, "problem": None, "seconds": seconds})
    if options.json:
        print_json(
            {"arrays": options.arrays, "compressors": [c.spec for c in compressors], "dtypes": reports}
        )
    else:
        for report in reports:
            done = report["problem"] or f"compiled, or found in the cache, in {report['seconds']:.1f} s"
            say(f"{options.arrays} {report['dtype']}: kernels {report['kernels'] or 'none'}: {done}")
    return int(any(report["problem"] for report in reports))
