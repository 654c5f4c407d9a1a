"""A script like many for Lightning: automatic optimization, a schedule per step, clipping, checkpoints within epochs.

torchrun --nproc-per-node 2 lightning_module.py --root out
torchrun --nproc-per-node 2 lightning_module.py --root out --ckpt_path out/last.ckpt
"""

import argparse
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class DigitsDataModule(L.LightningDataModule):
    def setup(self, stage):
        digits, labels = load_digits(return_X_y=True)
        images, labels = torch.tensor(digits, dtype=torch.float32) / 16, torch.tensor(labels)
        self.train, self.val = (
            TensorDataset(images[:1500], labels[:1500]),
            TensorDataset(images[1500:], labels[1500:]),
        )

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=25, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=99)


class LitClassifier(L.LightningModule):
    def __init__(self, lr=2e-3, weight_decay=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            *(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU()),
            *(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10)),
        )

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [
            {"params": decay, "weight_decay": self.hparams.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        total_steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class PrintLosses(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            print(f"step {trainer.global_step} loss {outputs['loss'].item():.4f}", flush=True)

    def on_validation_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(f"val loss {metrics['val_loss']:.4f} accuracy {metrics['val_acc']:.4f}", flush=True)


def main(args):
    L.seed_everything(args.seed, workers=True, verbose=False)
    checkpoint = ModelCheckpoint(
        args.root, save_last=True, save_top_k=0, every_n_train_steps=args.every_n_train_steps
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=args.max_epochs,
        gradient_clip_val=1.0,
        callbacks=[checkpoint, PrintLosses()],
        default_root_dir=args.root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitClassifier(), DigitsDataModule(), ckpt_path=args.ckpt_path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default=".")
    parser.add_argument("--max_epochs", type=int, default=10)
    parser.add_argument("--every_n_train_steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ckpt_path")
    main(parser.parse_args())
