"""One rank of a case over gloo."""

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from faults.rank import SILENCE, TIMEOUT, Case, run
from qcomp.comm.torch_dist import TorchCommunicator

__all__ = ["rank_main"]


def rank_main(case: Case, rank: int, ranks: int, folder: Path) -> None:
    """Be one rank of a case."""

    def create() -> TorchCommunicator:
        return TorchCommunicator(timeout=TIMEOUT, silence=SILENCE)

    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )
    run(case, create, rank, folder)
