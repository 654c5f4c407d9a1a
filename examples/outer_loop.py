"""An ordinary training script for torch in an outer loop: ranks exchange a fifth of the elements every 15 steps.

Start it with ``torchrun --nproc-per-node 2 examples/outer_loop.py``, or with ``mpirun -n 2 python -m mpi4py
examples/outer_loop.py``. Two lines differ from the script for a single rank: the import, and the loop.
"""

import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import qcomp.torch

WARMUP, EVERY, ROUNDS, BATCH, TRAINED = 30, 15, 10, 32, 1500
STEPS = WARMUP + EVERY * ROUNDS


def network() -> nn.Sequential:
    """Return the same network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def main() -> None:
    """Train, each rank on its own random batches."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # A network this small needs more than the published 64 of 4,096 elements, and must compress smaller tensors too.
    outer = qcomp.torch.OuterLoop(
        model,
        optimizer,
        qcomp.outer.sparse_loco(
            EVERY, warmup=WARMUP, compressor=qcomp.TopK(k=51, bucket_size=256), exact=qcomp.ExactBelow(1000)
        ),
    )
    comm = outer.comm
    draws = torch.Generator().manual_seed(comm.rank)
    warmup_bytes = 0

    for step in range(STEPS):
        batch = torch.randint(0, TRAINED, (BATCH,), generator=draws)
        loss = functional.cross_entropy(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 == WARMUP:
            warmup_bytes = comm.bytes_sent
        if comm.rank == 0 and (step + 1) % 30 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {outer.core_state.stage}")

    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).digest()
    others = comm.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), [32] * comm.size)
    if any(bytes(other.tolist()) != digest for other in others):
        raise SystemExit(f"rank {comm.rank}: the ranks hold different parameters")
    model.eval()
    read = (model(inputs[TRAINED:]).argmax(1) == targets[TRAINED:]).float().mean().item()
    if comm.rank == 0:
        exact = 2 * (comm.size - 1) / comm.size * 4 * parameters.numel() * (STEPS - WARMUP)
        print(f"all {comm.size} ranks hold identical parameters: sha256 {digest.hex()[:16]}...")
        print(
            f"{comm.bytes_sent - warmup_bytes:,} bytes sent after the warm-up; {exact:,.0f} by exact steps; "
            f"{read:.1%} of digits read"
        )


if __name__ == "__main__":
    main()
