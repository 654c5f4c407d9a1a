"""An ordinary training script for torch with 1-bit Adam: a convolutional network learns to read digits.

Start it with ``torchrun --nproc-per-node 2 examples/torch_optimizer.py``. Two lines differ from the script with
``torch.optim.AdamW``: the import, and the optimizer. There are parameter groups, a schedule, mixed precision, a scaler,
clipping, accumulated gradients and a checkpoint.
"""

import hashlib
import io

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import qcomp.torch

STEPS, MICRO_BATCHES, BATCH, FREEZE, TRAINED = 150, 2, 32, 40, 1500


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
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": others}]
    # With these betas the variance averages over 20 steps, so that it can be frozen in this short training.
    optimizer = qcomp.torch.OneBitAdam(
        groups, lr=2e-3, betas=(0.9, 0.95), freeze=FREEZE, exact=qcomp.ExactBelow(5000)
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cpu")
    comm = optimizer.comm
    draws = torch.Generator().manual_seed(comm.rank)

    for step in range(STEPS):
        for _ in range(MICRO_BATCHES):
            batch = torch.randint(0, TRAINED, (BATCH,), generator=draws)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(inputs[batch]), targets[batch]) / MICRO_BATCHES
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # this rank's gradients, before they are averaged
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        if comm.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item() * MICRO_BATCHES:.3f}, {optimizer.core_state.stage}")

    checkpoint = io.BytesIO()  # residuals differ between ranks: each saves its own
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).digest()
    others_digests = comm.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), [32] * comm.size)
    if any(bytes(other.tolist()) != digest for other in others_digests):
        raise SystemExit(f"rank {comm.rank}: the ranks hold different parameters")
    model.eval()
    read = (model(inputs[TRAINED:]).argmax(1) == targets[TRAINED:]).float().mean().item()
    if comm.rank == 0:
        exact = 2 * (comm.size - 1) / comm.size * 4 * parameters.numel() * STEPS
        print(f"all {comm.size} ranks hold identical parameters: sha256 {digest.hex()[:16]}...")
        print(f"{comm.bytes_sent:,} bytes sent; {exact:,.0f} without compression; {read:.1%} of digits read")


if __name__ == "__main__":
    main()
