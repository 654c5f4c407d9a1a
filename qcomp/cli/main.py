"""The command ``qcomp``: its subcommands and its exit status."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from qcomp.cli import bench, check, demo, info, plan, warmup
from qcomp.cli.output import UsageError, write_no_more
from qcomp.version import __version__

_COMMANDS = {
    "demo": (demo, "train a small model with four optimizers on this machine, and compare them"),
    "info": (info, "print which kernels run for which arrays, and what packages add"),
    "check": (check, "check the promises of a compressor, topology, optimizer, kernel set or communicator"),
    "bench": (bench, "time compressors on this machine against a copy"),
    "plan": (plan, "predict or measure whether compression pays off"),
    "warmup": (warmup, "compile kernels ahead of time"),
}

_INTERRUPTED, _UNHEARD = 130, 141
"""The statuses that shells report for a process ended by SIGINT or SIGPIPE."""
_EPILOG = """
status: 0 if all is well, 1 if a problem was found, 2 if the command was called wrongly, 130 if it was interrupted

examples:
  qcomp info
  qcomp check mypackage:MyCompressor --xp numpy,torch
  qcomp plan --params 350M --compute-ms 200 --ranks 16 --link 10gbit

'qcomp COMMAND --help' has more examples.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="qcomp",
        description="Compressed communication for data-parallel training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"qcomp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand with arguments, by default the process's, and return its exit status.

    The status is 0 if all is well, 1 if a problem was found, 130 if interrupted, 141 if the reader of the output has
    left. Wrong usage raises SystemExit with status 2, as argparse does.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
    options = make_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except UsageError as error:
        options.parser.error(str(error))
    except MemoryError as error:
        options.parser.error(f"there is not enough memory: {error}")
    except SystemExit as leaving:  # raised by the user's code, so its status is not ours
        options.parser.error(
            f"the code named on the command line called sys.exit({leaving.code!r}); expected code that returns"
        )
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has left
        write_no_more()
        return _UNHEARD
    return status
