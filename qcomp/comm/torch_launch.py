"""The communicator of the ranks started by torchrun."""

from __future__ import annotations

import os
from datetime import timedelta

from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.comm.torch_library import dist, torch, transport_errors


def torch_world(*, timeout: float, silence: float | None) -> TorchCommunicator:
    """Initialise torch.distributed from the environment if necessary; return the communicator of all ranks."""
    if not dist.is_initialized():
        device = _own_device()
        if device is not None:
            torch.cuda.set_device(device)
        own = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
        with transport_errors(f"{own} did not meet the others within {timeout:g} s"):
            dist.init_process_group(
                "gloo" if device is None else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=timeout)
            )
    return TorchCommunicator(timeout=timeout, silence=silence)


def _own_device() -> int | None:
    """Return the number of this rank's own GPU; None if this machine has fewer GPUs than ranks."""
    if "LOCAL_RANK" not in os.environ or not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    return int(os.environ["LOCAL_RANK"]) if ranks_here <= torch.cuda.device_count() else None
