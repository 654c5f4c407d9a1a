"""The command ``qcomp``, with a module for each subcommand."""

from qcomp.cli.main import main

__all__ = ["main"]
