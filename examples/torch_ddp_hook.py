"""DistributedDataParallel with 1-bit gradients, or with 1-bit Adam: one network learns to imitate another.

Start it with ``torchrun --nproc-per-node 2 examples/torch_ddp_hook.py [--method plain|hook|onebit_adam]``.
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qcomp
from qcomp.integrations import ddp

INPUTS, WIDTH, BATCH, STEPS, WARMUP = 8, 256, 64, 200, 50


def network(seed: int) -> nn.Module:
    """Return a network whose initial parameters depend on the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)
    )


def check_identical(model: nn.Module, comm: qcomp.comm.Communicator) -> None:
    """End with an error unless all ranks hold the same bytes."""
    parameters = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    digest = bytearray(hashlib.sha256(parameters.numpy().tobytes()).digest())
    others = comm.all_gather(torch.frombuffer(digest, dtype=torch.uint8), [len(digest)] * comm.size)
    if any(bytearray(other.tolist()) != digest for other in others):
        raise SystemExit(f"rank {comm.rank}: the ranks hold different parameters")
    if comm.rank == 0:
        print(f"all {comm.size} ranks hold identical parameters: sha256 {digest.hex()[:16]}...")


def main() -> None:
    """Train, each rank on its own random inputs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--method", choices=["plain", "hook", "onebit_adam"], default="hook", help="(default: %(default)s)"
    )
    method = parser.parse_args().method
    comm = qcomp.comm.world()  # initialises torch.distributed too: NCCL if every rank has a GPU, else gloo
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = network(seed=1).to(device)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(2)  # so that the network has more to learn than its initial scale
    model = DistributedDataParallel(network(seed=2).to(device), gradient_as_bucket_view=True)

    optimizer: torch.optim.Optimizer | ddp.OverlappedOptimizer
    if method == "onebit_adam":  # averages 1-bit momenta once the variance is frozen
        adam = qcomp.OneBitAdam(learning_rate=1e-3, betas=(0.9, 0.97), freeze=WARMUP)
        optimizer = ddp.OverlappedOptimizer(model, adam, comm)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        if method == "hook":  # averages 1-bit gradients, for any optimizer
            model.register_comm_hook(*ddp.hook(qcomp.ScaledSign(), model, comm=comm))

    before = comm.bytes_sent
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(STEPS * comm.rank + step)
        x = torch.randn(BATCH, INPUTS, generator=draws).to(device)
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1:3}  loss {loss.item():.4f}", flush=True)
    if comm.rank == 0 and method != "plain":
        parameters = sum(p.numel() for p in model.parameters())
        exact = round(8 * (comm.size - 1) / comm.size * STEPS * parameters)
        sent = comm.bytes_sent - before
        print(f"{sent:,} bytes sent by rank 0; {exact:,} if they were all float32")
    check_identical(model, comm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
