"""The Trainer of Hugging Face with compression: a convolutional network learns to read digits.

Start it with ``torchrun --nproc-per-node 2 examples/with_transformers.py``. The Trainer wraps the model in
DistributedDataParallel once training begins, so a callback attaches compression at that time: by default 1-bit Adam,
with ``--hook`` compressed gradients for any optimizer, and with ``--outer`` an outer loop around any optimizer, for
which the wrapper must average nothing.
"""

import argparse
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import qcomp.torch
from qcomp.integrations import ddp

EPOCHS, BATCH, FREEZE, TRAINED = 12, 32, 60, 1500
WARMUP, EVERY = 48, 15
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
    """Reads digits, with the interface that the Trainer expects."""

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

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the hook, or let the optimizer or an outer loop do it."""
        model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer.optimizer
        if self.how == "hook":
            state, hook = ddp.hook(qcomp.QSGD(levels=7), model, exact=EXACT)
            model.register_comm_hook(state, hook)
        elif self.how == "outer":
            model.register_comm_hook(None, noop_hook)  # each rank keeps its own gradients
            # A network this small needs more than the published 64 of 4,096 elements.
            loop = qcomp.outer.sparse_loco(
                EVERY, warmup=WARMUP, compressor=qcomp.TopK(k=51, bucket_size=256), exact=EXACT
            )
            qcomp.torch.OuterLoop(model.module, optimizer, loop)
        else:
            optimizer.attach(model)


def main() -> None:
    """Train, each process on its share of the batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_mutually_exclusive_group().add_argument
    add("--hook", dest="how", action="store_const", const="hook", help="compress gradients, and use AdamW")
    add("--outer", dest="how", action="store_const", const="outer", help="AdamW in an outer loop")
    how = parser.parse_args().how or "optimizer"
    torch.manual_seed(0)
    # With these betas the variance averages over 20 steps, so that it can be frozen in this short training.
    settings = {"lr": 2e-3, "betas": (0.9, 0.95), "freeze": FREEZE, "exact": EXACT}
    model = Reader()
    compress = Compress(how)
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
                # Momenta are averaged before gradients could be clipped.
                max_grad_norm=0.0 if how == "optimizer" else 1.0,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                dataloader_pin_memory=False,
                disable_tqdm=True,
            ),
            train_dataset=Digits(0, TRAINED),
            callbacks=[compress],
            optimizer_cls_and_kwargs=(qcomp.torch.OneBitAdam, settings) if how == "optimizer" else None,
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
