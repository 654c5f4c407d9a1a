"""Optimizers of other projects, reproduced step by step, to help migration."""

from qcomp.compat import deepspeed

__all__ = ["deepspeed"]
