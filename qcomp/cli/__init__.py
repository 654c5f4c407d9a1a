"""The command ``qcomp``."""

from qcomp.cli.main import main

__all__ = ["main"]
