"""Will compression pay off? Predicts the time of a step for each way to average, and break-even bandwidths.

The model consists of formulas, without an array library. Its inputs can be measured on the ranks themselves.
"""

from qcomp.planning.advice import WORTHWHILE, Advice, Row, advise, methods_of
from qcomp.planning.cluster import Cluster, Job, Link
from qcomp.planning.machine import CPU, PURE, Machine, Speed, gpu
from qcomp.planning.measurement import Measured
from qcomp.planning.model import Method, StepTime, break_even, run_speedup, step_time
from qcomp.planning.network import Network, measure_network
from qcomp.planning.probes import measure, measure_speed, measure_step
from qcomp.planning.warning import warn_if_slower

__all__ = [
    "CPU",
    "PURE",
    "WORTHWHILE",
    "Advice",
    "Cluster",
    "Job",
    "Link",
    "Machine",
    "Measured",
    "Method",
    "Network",
    "Row",
    "Speed",
    "StepTime",
    "advise",
    "break_even",
    "gpu",
    "measure",
    "measure_network",
    "measure_speed",
    "measure_step",
    "methods_of",
    "run_speedup",
    "step_time",
    "warn_if_slower",
]
