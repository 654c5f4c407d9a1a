"""The arguments of the command ``qcomp``."""

import argparse
import json
from collections.abc import Sequence

from qcomp.cli.info import gather, info
from qcomp.cli.plan import add_arguments, plan
from qcomp.version import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status."""
    parser = argparse.ArgumentParser(prog="qcomp", description="Compressed communication for training.")
    parser.add_argument("--version", action="version", version=f"qcomp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = commands.add_parser("info", help="print which kernels run for which arrays, and why")
    planning = commands.add_parser("plan", help="predict or measure whether compression pays off")
    add_arguments(planning)
    for command in (about, planning):
        command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.command == "info":
        text = json.dumps(gather(), indent=1) if options.json else info()
    else:
        try:
            text = plan(options)
        except (ValueError, ImportError, OSError) as error:
            planning.error(str(error))
    if text:
        print(text)  # noqa: T201
    return 0
