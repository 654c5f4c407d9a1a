"""Will it pay? How long a step takes with each way to average, and below which bandwidth compression is faster.

The model is formulas, on no array library. What it is fed with can be measured on the ranks themselves.
"""

from qcomp.planning.advice import WORTHWHILE, Advice, Row, advise, methods_of
from qcomp.planning.cluster import Cluster, Job, Link
from qcomp.planning.machine import CPU, PURE, Machine, Speed, gpu
from qcomp.planning.measurement import Measured
from qcomp.planning.model import Method, StepTime, break_even, run_speedup, step_time
from qcomp.planning.network import Network, measure_network
from qcomp.planning.probes import measure, measure_speed, measure_step
from qcomp.planning.watching import watch

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
    "watch",
]
