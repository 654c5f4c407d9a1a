"""Optimizers of other projects, reproduced step by step, for those who come from there."""

from qcomp.compat import deepspeed

__all__ = ["deepspeed"]
