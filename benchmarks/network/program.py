"""The common part of the programs that measure on shaped links."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from network.shaped import NetworkError, require_rights

__all__ = ["measure_and_write"]

Part = Callable[[argparse.Namespace], None]


def measure_and_write(options: argparse.Namespace, measure: Part, write: Part) -> int:
    """Measure, unless only the page is requested, then write the page; return the status of the program.

    Parameters
    ----------
    options : argparse.Namespace
        With ``out``, a folder that is created, and ``page``.
    measure : callable
        Starts the runs that are missing.
    write : callable
        Writes the page from the files.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.page:
        try:
            require_rights()
            measure(options)
        except NetworkError as error:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
            return 2
    write(options)
    return 0
