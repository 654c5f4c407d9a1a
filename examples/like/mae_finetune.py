"""A script like MAE's main_finetune.py: layer-wise learning rates set in every iteration, a scaler that also clips.

torchrun --nproc-per-node 2 mae_finetune.py --output_dir out
torchrun --nproc-per-node 2 mae_finetune.py --output_dir out --resume out/checkpoint.pth
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEPTH, DIM = 2, 64


class NativeScalerWithGradNormCount:
    state_dict_key = "amp_scaler"

    def __init__(self, enabled):
        self._scaler = torch.amp.GradScaler("cpu", enabled=enabled)

    def __call__(
        self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, update_grad=True
    ):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, clip_grad or math.inf)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Linear(4, DIM)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, DIM) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.1, F.gelu, batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.fc_norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 10)

    def forward(self, images):
        patches = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), self.patch_embed(patches)], dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.fc_norm(x[:, 1:].mean(dim=1)))


def get_layer_id(name):
    if name.startswith(("cls_token", "pos_embed", "patch_embed")):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks") else DEPTH + 1


def param_groups_lrd(model, weight_decay, layer_decay):
    groups = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        decay = 0.0 if p.ndim == 1 or name in ("cls_token", "pos_embed") else weight_decay
        layer = get_layer_id(name)
        scale = layer_decay ** (DEPTH + 1 - layer)
        group = groups.setdefault((layer, decay), {"lr_scale": scale, "weight_decay": decay, "params": []})
        group["params"].append(p)
    return list(groups.values())


def adjust_learning_rate(optimizer, epoch, args):
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        done = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = args.min_lr + (args.lr - args.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * param_group["lr_scale"] if "lr_scale" in param_group else lr


def train_one_epoch(model, data_loader, optimizer, epoch, loss_scaler, args):
    model.train(True)
    optimizer.zero_grad()
    for data_iter_step, (samples, targets) in enumerate(data_loader):
        if data_iter_step % args.accum_iter == 0:
            adjust_learning_rate(optimizer, data_iter_step / len(data_loader) + epoch, args)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
            loss = F.cross_entropy(model(samples), targets, label_smoothing=0.1)
        loss_value = loss.item()
        update_grad = (data_iter_step + 1) % args.accum_iter == 0
        loss_scaler(
            *(loss / args.accum_iter, optimizer, args.clip_grad, model.parameters()), update_grad=update_grad
        )
        if update_grad:
            optimizer.zero_grad()
            if args.rank == 0:
                print(f"Epoch: [{epoch}]  [{data_iter_step}]  loss: {loss_value:.4f}", flush=True)


@torch.no_grad()
def evaluate(data, model):
    model.eval()
    images, labels = data.tensors
    output = model(images)
    error = (output.argmax(1) != labels).float().mean()
    return F.cross_entropy(output, labels).item(), error.item()


def main(args):
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    args.rank, world = 0, 1
    if args.distributed:
        dist.init_process_group("gloo")
        args.rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + args.rank)
    digits, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    dataset_train, dataset_val = (
        TensorDataset(images[:1500], labels[:1500]),
        TensorDataset(images[1500:], labels[1500:]),
    )
    sampler_train = DistributedSampler(dataset_train, num_replicas=world, rank=args.rank, shuffle=True)
    data_loader_train = DataLoader(dataset_train, args.batch_size, sampler=sampler_train, drop_last=True)
    model = VisionTransformer()
    model_without_ddp = model
    args.lr = args.blr * args.batch_size * args.accum_iter * world / 256
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        model_without_ddp = model.module
    param_groups = param_groups_lrd(model_without_ddp, args.weight_decay, args.layer_decay)
    optimizer = torch.optim.AdamW(param_groups, lr=args.lr, betas=(0.9, 0.95))
    loss_scaler = NativeScalerWithGradNormCount(enabled=args.amp)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=False)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        args.start_epoch = checkpoint["epoch"] + 1
        loss_scaler.load_state_dict(checkpoint["scaler"])

    for epoch in range(args.start_epoch, args.epochs):
        sampler_train.set_epoch(epoch)
        train_one_epoch(model, data_loader_train, optimizer, epoch, loss_scaler, args)
        to_save = {
            "model": model_without_ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
            "scaler": loss_scaler.state_dict(),
            "args": args,
        }
        if args.rank == 0:
            torch.save(to_save, Path(args.output_dir) / "checkpoint.pth")
        val_loss, error = evaluate(dataset_val, model)
        if args.rank == 0:
            print(f"val loss {val_loss:.4f}, {100 * error:.1f}% of digits misread", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("MAE fine-tuning")
    for name, default in {
        **{"batch_size": 25, "accum_iter": 1, "epochs": 10, "start_epoch": 0, "warmup_epochs": 1},
        **{
            "blr": 0.01,
            "min_lr": 1e-6,
            "layer_decay": 0.75,
            "weight_decay": 0.05,
            "clip_grad": 1.0,
            "seed": 0,
        },
    }.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--resume", default="")
    main(parser.parse_args())
