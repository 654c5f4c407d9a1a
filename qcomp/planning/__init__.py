"""Will compression pay off? Predicts the time of a step for each method, and which method reaches a loss first.

The model consists of formulas and needs no array library. Its inputs can be measured on the ranks themselves.
"""

from qcomp.planning.advice import Advice, advise, methods_for, methods_of
from qcomp.planning.autotune import Autotune, TunedState, Tuning
from qcomp.planning.cluster import Cluster, Job, Link
from qcomp.planning.evidence import Evidence, evidence_of
from qcomp.planning.machine import CPU, PURE, LowRankSpeed, Machine, Speed, gpu
from qcomp.planning.measurement import Measured
from qcomp.planning.methods import MuonMethod, OuterMethod, PowerSGDMethod
from qcomp.planning.model import Method, break_even, run_speedup, step_time
from qcomp.planning.probes import measure
from qcomp.planning.warning import warn_if_slower

__all__ = [
    "CPU",
    "PURE",
    "Advice",
    "Autotune",
    "Cluster",
    "Evidence",
    "Job",
    "Link",
    "LowRankSpeed",
    "Machine",
    "Measured",
    "Method",
    "MuonMethod",
    "OuterMethod",
    "PowerSGDMethod",
    "Speed",
    "TunedState",
    "Tuning",
    "advise",
    "break_even",
    "evidence_of",
    "gpu",
    "measure",
    "methods_for",
    "methods_of",
    "run_speedup",
    "step_time",
    "warn_if_slower",
]
