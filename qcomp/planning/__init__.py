"""Will compression pay off? Predicts the time of a step for each way to average, and break-even bandwidths.

The model consists of formulas, without an array library. Its inputs can be measured on the ranks themselves.
"""

from qcomp.planning.advice import Advice, advise, methods_of
from qcomp.planning.cluster import Cluster, Job, Link
from qcomp.planning.machine import CPU, PURE, Machine, Speed, gpu
from qcomp.planning.measurement import Measured
from qcomp.planning.model import Method, break_even, run_speedup, step_time
from qcomp.planning.probes import measure
from qcomp.planning.warning import warn_if_slower

__all__ = [
    "CPU",
    "PURE",
    "Advice",
    "Cluster",
    "Job",
    "Link",
    "Machine",
    "Measured",
    "Method",
    "Speed",
    "advise",
    "break_even",
    "gpu",
    "measure",
    "methods_of",
    "run_speedup",
    "step_time",
    "warn_if_slower",
]
