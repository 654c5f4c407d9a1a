"""A rank that exchanges beside a data loader's workers: ``loading.py mpi|torch|folder|local METHOD FOLDER RANK``."""

import sys
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import qcomp


def train(method, comm):
    """Exchange once for each batch, in two epochs, with workers that end between them and with workers that stay."""
    steps = 0
    for stays in (False, True):
        data = TensorDataset(torch.arange(8.0))
        loader = DataLoader(data, 4, num_workers=1, persistent_workers=stays, multiprocessing_context=method)
        for _ in range(2):
            for _ in loader:
                parts = comm.all_gather(np.full(3, comm.rank, np.uint8), [3] * comm.size)
                assert [int(part[0]) for part in parts] == [*range(comm.size)]
                steps += 1
    return steps


def communicator(kind, folder, rank):
    if kind == "mpi":
        return qcomp.comm.world()
    if kind == "folder":
        return qcomp.comm.FolderCommunicator(folder, rank, 2, timeout=300)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return qcomp.comm.TorchCommunicator(timeout=300)


if __name__ == "__main__":
    kind, method, folder, rank = sys.argv[1:]
    if kind == "local":
        done = qcomp.comm.run_local(2, partial(train, method), timeout=300)
    else:
        done = [train(method, communicator(kind, folder, int(rank)))]
    sys.stdout.write("".join(f"{steps}\n" for steps in done))
