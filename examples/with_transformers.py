"""The Trainer of Hugging Face with compression: a small BERT learns to read digits.

Start it with ``torchrun --nproc-per-node 2 examples/with_transformers.py``. The Trainer wraps the model in
DistributedDataParallel once training begins, so compression takes its place there, in a callback: by default 1-bit
Adam, with ``--hook`` any optimizer behind compressed gradients.
"""

import argparse
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import qcomp.torch
from qcomp.integrations import ddp

EPOCHS, BATCH, FREEZE, TRAINED = 4, 32, 40, 1500
EXACT = qcomp.ExactBelow(2000)


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Images of 64 pixels, each a token from 0 to 16, and what they show.

    Parameters
    ----------
    first, last : int
        The images from ``first`` to before ``last``.
    """

    def __init__(self, first: int, last: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images).long()[first:last], torch.tensor(labels)[first:last]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.images[number], "labels": self.labels[number]}


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
    config = BertConfig(
        vocab_size=17,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    config.num_labels = 10
    # With these betas the variance averages over 20 steps, so that it can be frozen in this short training.
    settings = {"lr": 2e-3, "betas": (0.9, 0.95), "freeze": FREEZE, "exact": EXACT}
    model = BertForSequenceClassification(config)
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
            eval_dataset=Digits(TRAINED, 1797),
            callbacks=[compress],
            optimizer_cls_and_kwargs=None if with_hook else (qcomp.torch.OneBitAdam, settings),
        )
        compress.trainer = trainer
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    total = torch.stack([p.detach().double().sum() for p in model.parameters()])
    totals = trainer.accelerator.gather(total.reshape(1, -1))
    if not torch.equal(totals, totals[:1].expand_as(totals)):
        raise SystemExit("the ranks hold different parameters")
    trainer.accelerator.print(
        f"all {len(totals)} ranks hold identical parameters; loss {loss:.3f} on other digits"
    )


if __name__ == "__main__":
    main()
