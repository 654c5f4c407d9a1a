"""Kernel sets: faster versions of the primitives, which return the same bytes as the pure version.

Kernels are selected automatically for every array, by its library and device. A setting (`set_default`, or the
environment variable ``QCOMP_KERNELS``) overrides the automatic choice, and a context (`use`) overrides the setting.

>>> import numpy as np, qcomp
>>> with qcomp.backends.use("pure"):
...     qcomp.backends.explain(np.zeros(3)).kernels
'pure'
"""

from qcomp.backends.choice import Choice, automatic, choose, choose_coders, explain, set_default, use
from qcomp.backends.registry import names
from qcomp.core.kernels import Encoded, KernelSet, choose_coders_with, choose_with

__all__ = ["Choice", "Encoded", "KernelSet", "automatic", "explain", "names", "set_default", "use"]

choose_with(choose)
choose_coders_with(choose_coders)
