"""Optimizer states as flat dicts, saved by one world and loaded by another."""

from qcomp.core.checkpoint.format import plain, to_arrays

__all__ = ["plain", "to_arrays"]
