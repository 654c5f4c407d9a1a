"""A script like Accelerate's complete examples: prepares, accumulates, clips, evaluates on all ranks, saves, resumes.

torchrun --nproc-per-node 2 accelerate_loop.py --output_dir out
torchrun --nproc-per-node 2 accelerate_loop.py --output_dir out --resume_from_checkpoint out/step_200
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    digits, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(test, 64)


def get_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def training_function(args):
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = get_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    total = args.num_epochs * len(train_dataloader) // args.gradient_accumulation_steps
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        overall_step = int(Path(args.resume_from_checkpoint).name.removeprefix("step_"))
        starting_epoch, resume_step = divmod(overall_step, len(train_dataloader))
    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        active_dataloader = train_dataloader
        if resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            resume_step = None
        for images, labels in active_dataloader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            overall_step += 1
            accelerator.print(f"epoch {epoch} step {overall_step} loss: {loss.item():.4f}", flush=True)
            if overall_step % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        model.eval()
        losses, right = [], []
        for images, labels in eval_dataloader:
            with torch.no_grad():
                logits = model(images)
            logits, labels = accelerator.gather_for_metrics((logits, labels))
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
            right.append(logits.argmax(dim=-1) == labels)
        accuracy = torch.cat(right).float().mean().item()
        accelerator.print(
            f"epoch {epoch}: val loss {torch.cat(losses).mean().item():.4f} accuracy {accuracy:.4f}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=25)
    parser.add_argument("--num_epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpointing_steps", type=int, default=100)
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--resume_from_checkpoint", default=None)
    training_function(parser.parse_args())
