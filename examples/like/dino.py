"""A script like DINO's main_dino.py: a teacher that is a moving average, schedules per iteration, a frozen head.

torchrun --nproc-per-node 2 dino.py --output_dir out
"""

import argparse
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 128), nn.GELU(), nn.Linear(128, 64))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class MultiCropWrapper(nn.Module):
    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, crops):
        return self.head(self.backbone(torch.cat(crops)))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, warmup_epochs, nepochs):
        super().__init__()
        self.ncrops = ncrops
        self.register_buffer("center", torch.zeros(1, out_dim))
        warmup = np.linspace(0.02, 0.03, warmup_epochs)
        self.teacher_temp_schedule = np.concatenate([warmup, np.ones(nepochs - warmup_epochs) * 0.03])

    def forward(self, student_output, teacher_output, epoch):
        student_out = (student_output / 0.1).chunk(self.ncrops)
        teacher_out = F.softmax((teacher_output - self.center) / self.teacher_temp_schedule[epoch], dim=-1)
        pairs = [
            torch.sum(-q * F.log_softmax(s, dim=-1), dim=-1).mean()
            for n, q in enumerate(teacher_out.detach().chunk(2))
            for v, s in enumerate(student_out)
            if v != n
        ]
        self.update_center(teacher_output)
        return sum(pairs) / len(pairs)

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = teacher_output.sum(dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * 0.99 + batch_center * 0.01


def cosine_scheduler(base_value, final_value, epochs, niter_per_ep, warmup_epochs=0):
    warmup = np.linspace(0, base_value, warmup_epochs * niter_per_ep)
    iters = np.arange(epochs * niter_per_ep - len(warmup))
    schedule = final_value + 0.5 * (base_value - final_value) * (1 + np.cos(np.pi * iters / len(iters)))
    return np.concatenate((warmup, schedule))


def get_params_groups(model):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if name.endswith(".bias") or p.dim() == 1]
    return [
        {"params": [p for _, p in named if all(p is not q for q in plain)]},
        {"params": plain, "weight_decay": 0.0},
    ]


def clip_gradients(model, clip):
    for _, p in model.named_parameters():
        if p.grad is not None:
            clip_coef = clip / (p.grad.data.norm(2) + 1e-6)
            if clip_coef < 1:
                p.grad.data.mul_(clip_coef)


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    if epoch >= freeze_last_layer:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def restart_from_checkpoint(ckp_path, run_variables, **kwargs):
    if not os.path.isfile(ckp_path):
        return
    checkpoint = torch.load(ckp_path, map_location="cpu", weights_only=False)
    for key, value in kwargs.items():
        try:
            value.load_state_dict(checkpoint[key], strict=False)
        except TypeError:
            try:
                value.load_state_dict(checkpoint[key])
            except ValueError:
                print(f"failed to load {key} from checkpoint {ckp_path}")
    for var_name in run_variables:
        run_variables[var_name] = checkpoint[var_name]


def augment(images):
    rolled = torch.roll(images.view(-1, 8, 8), tuple(torch.randint(-1, 2, (2,)).tolist()), (1, 2)).flatten(1)
    return rolled + 0.05 * torch.randn_like(rolled)


@torch.no_grad()
def knn_error(model, images, labels, train=1500):
    model.eval()
    features = F.normalize(model(images), dim=-1)
    near = (features[train:] @ features[:train].T).topk(5).indices
    model.train()
    return (labels[:train][near].mode(dim=1).values != labels[train:]).float().mean().item()


def train_dino(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    digits, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits, dtype=torch.float32) / 16, torch.tensor(labels)
    dataset = TensorDataset(images[:1500])
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=True)
    data_loader = DataLoader(dataset, batch_size=args.batch_size_per_gpu, sampler=sampler, drop_last=True)

    def make():
        backbone = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 128))
        return MultiCropWrapper(backbone, DINOHead(128, args.out_dim))

    student, teacher = make(), make()
    student = nn.parallel.DistributedDataParallel(student)
    teacher_without_ddp = teacher
    teacher_without_ddp.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    dino_loss = DINOLoss(args.out_dim, 4, 2, args.epochs)
    optimizer = torch.optim.AdamW(get_params_groups(student), betas=(0.9, 0.98))
    lr = args.lr * args.batch_size_per_gpu * dist.get_world_size() / 256.0
    lr_schedule = cosine_scheduler(lr, 1e-6, args.epochs, len(data_loader), 1)
    wd_schedule = cosine_scheduler(0.04, 0.1, args.epochs, len(data_loader))
    momentum_schedule = cosine_scheduler(0.99, 1, args.epochs, len(data_loader))
    to_restore = {"epoch": 0}
    restart_from_checkpoint(
        os.path.join(args.output_dir, "checkpoint.pth"),
        run_variables=to_restore,
        student=student,
        teacher=teacher,
        optimizer=optimizer,
        dino_loss=dino_loss,
    )
    torch.manual_seed(args.seed + dist.get_rank() + 1000 * to_restore["epoch"])
    for epoch in range(to_restore["epoch"], args.epochs):
        data_loader.sampler.set_epoch(epoch)
        for it, (batch,) in enumerate(data_loader, start=len(data_loader) * epoch):
            for i, param_group in enumerate(optimizer.param_groups):
                param_group["lr"] = lr_schedule[it]
                if i == 0:
                    param_group["weight_decay"] = wd_schedule[it]
            crops = [augment(batch) for _ in range(4)]
            teacher_output = teacher(crops[:2])
            loss = dino_loss(student(crops), teacher_output, epoch)
            if not math.isfinite(loss.item()):
                print(f"Loss is {loss.item()}, stopping training")
                sys.exit(1)
            optimizer.zero_grad()
            loss.backward()
            if args.clip_grad:
                clip_gradients(student, args.clip_grad)
            cancel_gradients_last_layer(epoch, student, args.freeze_last_layer)
            optimizer.step()
            with torch.no_grad():
                m = momentum_schedule[it]
                for param_q, param_k in zip(student.module.parameters(), teacher_without_ddp.parameters()):
                    param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
            if dist.get_rank() == 0:
                print(f"Epoch: [{epoch}/{args.epochs}] [{it}] loss: {loss.item():.4f}", flush=True)
        save_dict = {
            "student": student.state_dict(),
            "teacher": teacher.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch + 1,
            "args": args,
            "dino_loss": dino_loss.state_dict(),
        }
        if dist.get_rank() == 0:
            torch.save(save_dict, os.path.join(args.output_dir, "checkpoint.pth"))
            print(f"val error {knn_error(teacher.backbone, images, labels):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("DINO")
    parser.add_argument("--out_dim", default=64, type=int)
    parser.add_argument("--batch_size_per_gpu", default=25, type=int)
    parser.add_argument("--epochs", default=10, type=int)
    parser.add_argument("--lr", default=0.002, type=float)
    parser.add_argument("--clip_grad", default=3.0, type=float)
    parser.add_argument("--freeze_last_layer", default=1, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--output_dir", default=".")
    args = parser.parse_args()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    train_dino(args)
