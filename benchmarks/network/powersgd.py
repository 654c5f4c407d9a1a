"""One process that times steps of PowerSGD, torch's hook and qcomp's, and follows their losses.

powersgd_times.py starts it on every rank. The variants take turns, so that all are measured over the same period.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import qcomp
from network.models import MODELS
from network.trainees import Trainee, run, timed
from qcomp.integrations import ddp

EXACT, TORCH, QCOMP, HALF = "exact", "torch", "qcomp", "qcomp, bfloat16"
RANKS = (1, 2, 4)
"""Ranks of the approximation."""
VARIANTS = {EXACT: (EXACT, 0)} | {
    f"{kind}, rank {rank}": (kind, rank) for rank in RANKS for kind in (TORCH, QCOMP, HALF)
}
START = 2
"""Exact steps before the first compressed one; torch demands two for its warm start."""


def make(model: str, variant: str) -> Trainee:
    """Return a model under DistributedDataParallel with its own process group, so that no hook waits for another."""
    kind, rank = VARIANTS[variant]
    group = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    # Over gloo torch's hook needs one bucket: with several the job aborts.
    module = DistributedDataParallel(
        MODELS[model].make(),
        process_group=group,
        bucket_cap_mb=1000 if kind == TORCH else 25,
        gradient_as_bucket_view=True,
    )
    if kind == TORCH:
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=START, min_compression_rate=2
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif kind != EXACT:
        compressor = qcomp.Cast("bfloat16") if kind == HALF else qcomp.Identity()
        averaging = qcomp.PowerSGD(rank=rank)
        hook = ddp.hook(compressor, module, averaging=averaging, exact=None, exact_iterations=START)
        module.register_comm_hook(*hook)
    return Trainee(model, module)


def time_steps(model: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return the seconds and bytes of a step of each variant."""
    return timed({name: make(model, name) for name in names}, rounds)


if __name__ == "__main__":
    run(__doc__ or "", list(VARIANTS), make, time_steps)
