"""The Trainer of Hugging Face with compression: a convolutional network learns to read digits.

Start it with ``torchrun --nproc-per-node 2 examples/with_transformers.py``. The Trainer wraps the model in
DistributedDataParallel once training begins, so compression takes its place there, in a callback: by default 1-bit
Adam, with ``--hook`` any optimizer behind compressed gradients.
"""

import argparse
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import qcomp.torch
from qcomp.integrations import ddp

EPOCHS, BATCH, FREEZE, TRAINED = 12, 32, 60, 1500
EXACT = qcomp.ExactBelow(2000)


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Images, and what they show.

    Parameters
    ----------
    first, last : int
        The images from ``first`` to before ``last``.
    """

    def __init__(self, first: int, last: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[first:last], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[first:last])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"images": self.images[number], "labels": self.labels[number]}


class Reader(nn.Module):
    """Reads digits, with the face that the Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits."""
        logits = self.network(images)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Compress(TrainerCallback):
    """Takes over the averaging, once the model is wrapped."""

    trainer: Any

    def __init__(self, *, with_hook: bool) -> None:
        self.with_hook = with_hook

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the hook, or let the optimizer do it."""
        model = self.trainer.model_wrapped
        if self.with_hook:
            state, hook = ddp.hook(qcomp.QSGD(levels=7), model, exact=EXACT)
            model.register_comm_hook(state, hook)
        else:
            self.trainer.optimizer.optimizer.attach(model)


def main() -> None:
    """Train, each process on its share of the batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hook", action="store_true", help="compress gradients, and use AdamW")
    with_hook = parser.parse_args().hook
    torch.manual_seed(0)
    # With these betas the variance averages over 20 steps, so that it can be frozen in this short training.
    settings = {"lr": 2e-3, "betas": (0.9, 0.95), "freeze": FREEZE, "exact": EXACT}
    model = Reader()
    compress = Compress(with_hook=with_hook)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                num_train_epochs=EPOCHS,
                per_device_train_batch_size=BATCH,
                learning_rate=2e-3,
                use_cpu=True,
                ddp_backend="gloo",
                ddp_find_unused_parameters=False,
                max_grad_norm=1.0
                if with_hook
                else 0.0,  # momenta are averaged before gradients could be clipped
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                dataloader_pin_memory=False,
                disable_tqdm=True,
            ),
            train_dataset=Digits(0, TRAINED),
            callbacks=[compress],
            optimizer_cls_and_kwargs=None if with_hook else (qcomp.torch.OneBitAdam, settings),
        )
        compress.trainer = trainer
        trainer.train()
    total = torch.stack([p.detach().double().sum() for p in model.parameters()])
    totals = trainer.accelerator.gather(total.reshape(1, -1))
    if not torch.equal(totals, totals[:1].expand_as(totals)):
        raise SystemExit("the ranks hold different parameters")
    others = Digits(TRAINED, 1797)
    read = (model.network(others.images).argmax(1) == others.labels).float().mean().item()
    trainer.accelerator.print(f"all {len(totals)} ranks hold identical parameters; {read:.1%} of digits read")


if __name__ == "__main__":
    main()
