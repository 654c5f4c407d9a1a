"""One rank of a case over gloo."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore

from faults.rank import TIMEOUT, Case, run
from qcomp.comm.torch_dist import TorchCommunicator

__all__ = ["rank_main"]


def rank_main(case: Case, rank: int, ranks: int, folder: Path) -> None:
    """Run one rank of a case."""

    def create() -> TorchCommunicator:
        return TorchCommunicator(timeout=TIMEOUT, silence=case.silence)

    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )
    run(case, create, rank, folder)


if __name__ == "__main__":
    rank_main(
        Case(**json.loads(sys.argv[1])),
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        Path(sys.argv[2]),
    )
