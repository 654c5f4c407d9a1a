"""Lightning with compression: a convolutional network learns to read digits on two processes.

Start it with ``python examples/with_lightning.py``. By default 1-bit Adam averages during the backward pass; ``--hook``
compresses gradients for any optimizer. Lightning registers hooks on GPUs only, so a callback does it here.
"""

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import qcomp.torch
from qcomp.integrations import ddp

EPOCHS, BATCH, FREEZE, TRAINED = 12, 32, 60, 1500
EXACT = qcomp.ExactBelow(2000)


class Reader(lightning.LightningModule):
    """Reads digits.

    Parameters
    ----------
    with_hook : bool
        Whether gradients are compressed, for AdamW; otherwise the optimizer is 1-bit Adam.
    """

    def __init__(self, *, with_hook: bool) -> None:
        super().__init__()
        self.with_hook = with_hook
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return the optimizer; Lightning has wrapped the model already."""
        if self.with_hook:
            return torch.optim.AdamW(self.parameters(), lr=2e-3)
        # With these betas the variance averages over 20 steps, so that it can be frozen in this short training.
        return qcomp.torch.OneBitAdam(
            self.parameters(),
            lr=2e-3,
            betas=(0.9, 0.95),
            freeze=FREEZE,
            exact=EXACT,
            model=self.trainer.strategy.model,
        )


class CompressGradients(lightning.Callback):
    """Compresses the gradients that DistributedDataParallel averages."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Register the hook."""
        state, hook = ddp.hook(qcomp.QSGD(levels=7), trainer.strategy.model, exact=EXACT)
        trainer.strategy.model.register_comm_hook(state, hook)


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
    torch.manual_seed(0)
    reader = Reader(with_hook=with_hook)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=EPOCHS,
        callbacks=[CompressGradients()] if with_hook else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        reader, DataLoader(TensorDataset(inputs[:TRAINED], targets[:TRAINED]), batch_size=BATCH, shuffle=True)
    )
    total = torch.stack([p.detach().double().sum() for p in reader.parameters()])
    totals = trainer.strategy.all_gather(total)
    if not torch.equal(totals[0], totals[-1]):
        raise SystemExit("the ranks hold different parameters")
    read = (reader.network(inputs[TRAINED:]).argmax(1) == targets[TRAINED:]).float().mean().item()
    if trainer.is_global_zero:
        print(f"all {trainer.world_size} ranks hold identical parameters; {read:.1%} of digits read")


if __name__ == "__main__":
    main()
