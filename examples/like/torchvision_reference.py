"""A script like torchvision's references/classification/train.py: epochs, warm-up, amp, evaluation on all ranks.

torchrun --nproc-per-node 2 torchvision_reference.py --output-dir out
torchrun --nproc-per-node 2 torchvision_reference.py --output-dir out --resume out/checkpoint.pth
"""

import argparse
import builtins
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        if kwargs.pop("force", False) or is_master:
            builtin_print(*args, **kwargs, flush=True)

    builtins.print = print


def init_distributed_mode(args):
    args.distributed = "RANK" in os.environ
    if not args.distributed:
        return
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend="gloo", rank=args.rank, world_size=args.world_size)
    dist.barrier()
    setup_for_distributed(args.rank == 0)


def save_on_master(*args, **kwargs):
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(*args, **kwargs)


def reduce_across_processes(value):
    total = torch.as_tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.barrier()
        dist.all_reduce(total)
    return total


def load_data():
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    )
    return torch.utils.data.Subset(data, range(1500)), torch.utils.data.Subset(data, range(1500, len(data)))


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10)),
    )


def train_one_epoch(model, criterion, optimizer, data_loader, epoch, args, scaler):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=scaler is not None):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if args.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
        lr = optimizer.param_groups[0]["lr"]
        print(f"Epoch: [{epoch}]  [{i}/{len(data_loader)}]  lr: {lr:.4f}  loss: {loss.item():.4f}")


def evaluate(model, criterion, data_loader):
    model.eval()
    total_loss = right = seen = 0
    with torch.inference_mode():
        for image, target in data_loader:
            output = model(image)
            total_loss += criterion(output, target).item() * len(target)
            right += (output.argmax(1) == target).sum().item()
            seen += len(target)
    total_loss, right, seen = reduce_across_processes([total_loss, right, seen]).tolist()
    print(f"Test: val loss {total_loss / seen:.4f}  Acc@1 {100 * right / seen:.2f}")


def main(args):
    init_distributed_mode(args)
    dataset, dataset_test = load_data()
    train_sampler, test_sampler = None, None
    if args.distributed:
        train_sampler, test_sampler = (
            DistributedSampler(dataset),
            DistributedSampler(dataset_test, shuffle=False),
        )
    shuffle = train_sampler is None
    data_loader = DataLoader(dataset, args.batch_size, shuffle, sampler=train_sampler, drop_last=True)
    data_loader_test = DataLoader(dataset_test, args.batch_size, sampler=test_sampler)

    model = network()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scaler = torch.amp.GradScaler("cpu") if args.amp else None
    main_lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs - 1)
    warmup_lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, schedulers=[warmup_lr_scheduler, main_lr_scheduler], milestones=[1]
    )
    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module

    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=False)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        args.start_epoch = checkpoint["epoch"] + 1
        if scaler:
            scaler.load_state_dict(checkpoint["scaler"])

    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, epoch, args, scaler)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test)
        checkpoint = {
            "model": model_without_ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
            "args": args,
        }
        if scaler:
            checkpoint["scaler"] = scaler.state_dict()
        save_on_master(checkpoint, Path(args.output_dir) / "checkpoint.pth")


def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=10, type=int)
    parser.add_argument("--start-epoch", default=0, type=int)
    parser.add_argument("--batch-size", default=25, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", default=1e-4, type=float)
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--output-dir", default=".")
    parser.add_argument("--resume", default="")
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
