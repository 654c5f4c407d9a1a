"""A training script that survives a killed rank, or a lost node, without a disk that all nodes share.

Start it with

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 2 examples/survive_kill.py --kill 1 27

After 27 steps rank 1 kills itself, torchrun starts all ranks again, and they continue from step 25, with the same bits
as without the kill. On several nodes give torchrun a ``--rdzv-id`` of this job's own. Without the variable, gloo would
connect to killed ranks, whose addresses it finds in torchrun's store.
"""

import argparse
import hashlib
import os
import signal
from typing import IO

import torch
from torch import nn
from torch.nn import functional

import qcomp.torch

FEATURES, CLASSES, BATCH, FREEZE = 64, 10, 32, 10


def main() -> None:
    """Train, each rank on its own random batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    parser.add_argument(
        "--every", type=int, default=5, help="steps between two copies (default: %(default)s)"
    )
    parser.add_argument("--folder", default="/dev/shm", help="memory of the node (default: %(default)s)")
    parser.add_argument("--kill", type=int, nargs=2, metavar=("RANK", "STEP"), help="end a rank, once")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same network on every rank
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.Tanh(), nn.Linear(128, CLASSES))
    target = torch.randn(FEATURES, CLASSES)
    optimizer = qcomp.torch.OneBitAdam(
        model.parameters(), lr=2e-3, betas=(0.9, 0.9), freeze=FREEZE, exact=qcomp.ExactBelow(1000)
    )
    comm = optimizer.comm
    copies = qcomp.checkpoint.Copies(comm, every=options.every, folder=options.folder)

    def write(file: IO[bytes]) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    first, kept = 0, copies.newest()
    if kept is not None:
        parts = [torch.load(part, weights_only=True) for part in kept.files()]
        model.load_state_dict(parts[0]["model"])
        optimizer.load_state_dict([part["optimizer"] for part in parts])
        first = kept.step
        print(f"rank {comm.rank} goes on after step {first}", flush=True)

    for step in range(first, options.steps):
        if options.kill == [comm.rank, step] and kept is None:
            print(f"rank {comm.rank} dies after step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        draws = torch.Generator().manual_seed(1000 * step + comm.rank)  # depends on step and rank alone
        inputs = torch.randn(BATCH, FEATURES, generator=draws)
        loss = functional.cross_entropy(model(inputs), (inputs @ target).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        copies.keep(step + 1, write)

    copies.forget()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
    print(
        f"rank {comm.rank} has made {options.steps} steps: loss {loss.item():.3f}, sha256 {digest}",
        flush=True,
    )


if __name__ == "__main__":
    main()
