"""Accelerate with compression: a convolutional network learns to read digits.

Start it with ``torchrun --nproc-per-node 2 examples/with_accelerate.py``, or ``accelerate launch``. ``prepare`` wraps
the model in DistributedDataParallel, to which the script attaches compression: by default 1-bit Adam, with ``--hook``
compressed gradients for any optimizer.
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import qcomp.torch
from qcomp.integrations import ddp

EPOCHS, BATCH, FREEZE, TRAINED = 12, 32, 60, 1500
EXACT = qcomp.ExactBelow(2000)


def main() -> None:
    """Train, each process on its share of the batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hook", action="store_true", help="compress gradients, and use AdamW")
    with_hook = parser.parse_args().hook
    images, labels = load_digits(return_X_y=True)
    inputs, targets = (
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16,
        torch.tensor(labels),
    )
    loader = DataLoader(TensorDataset(inputs[:TRAINED], targets[:TRAINED]), batch_size=BATCH, shuffle=True)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(network)
    optimizer: torch.optim.Optimizer
    if with_hook:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        state, hook = ddp.hook(qcomp.QSGD(levels=7), model, exact=EXACT)
        model.register_comm_hook(state, hook)
    else:
        # With these betas the variance averages over 20 steps, so that it can be frozen in this short training.
        optimizer = qcomp.torch.OneBitAdam(
            model.parameters(), lr=2e-3, betas=(0.9, 0.95), freeze=FREEZE, exact=EXACT, model=model
        )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)

    for _ in range(EPOCHS):
        for batch, wanted in loader:
            loss = functional.cross_entropy(model(batch), wanted)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    total = sum(p.detach().double().sum() for p in model.parameters())
    totals = accelerator.gather(torch.as_tensor(total).reshape(1))
    if not torch.equal(totals, totals[:1].expand_as(totals)):
        raise SystemExit("the ranks hold different parameters")
    read = (model(inputs[TRAINED:]).argmax(1) == targets[TRAINED:]).float().mean().item()
    accelerator.print(
        f"all {accelerator.num_processes} ranks hold identical parameters; {read:.1%} of digits read"
    )


if __name__ == "__main__":
    main()
