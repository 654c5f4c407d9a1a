"""A script like minGPT's Trainer under DistributedDataParallel: a class that trains, and snapshots of rank 0.

    torchrun --nproc-per-node 2 mingpt.py --snapshot_path snapshot.pt

A run that finds a snapshot goes on from it.
"""

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Snapshot:
    model_state: dict[str, Any]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class CharDataset(Dataset):
    def __init__(self, block_size, length):
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(s.read_bytes() for s in sources)), dtype=torch.uint8)
        self.block_size, self.length = block_size, length

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        start = idx * 9973 % (len(self.data) - self.block_size)
        dix = self.data[start : start + self.block_size + 1].long()
        return dix[:-1], dix[1:]


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x):
        heads = [
            part.unflatten(2, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2)
        ]
        return self.c_proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, block_size, n_layer=2, n_head=4, n_embd=64):
        super().__init__()
        self.tok_emb = nn.Embedding(256, n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, block_size, n_embd))
        self.blocks = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
        self.ln_f, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def create_optimizer(model, learning_rate, weight_decay):
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() <= 1]
    optim_groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(0.9, 0.95))


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset):
        self.config = config
        self.rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset)
        self.epochs_run = 0
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cpu", enabled=config.use_amp)
        self._load_snapshot()
        self.model = DDP(self.model)

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, self.config.batch_size, shuffle=False, sampler=DistributedSampler(dataset))

    def _load_snapshot(self):
        try:
            snapshot = Snapshot(**torch.load(self.config.snapshot_path, map_location="cpu"))
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _run_batch(self, source, targets, train=True):
        amp = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.use_amp)
        with torch.set_grad_enabled(train), amp:
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def _run_epoch(self, epoch, dataloader, train=True):
        dataloader.sampler.set_epoch(epoch)
        losses = []
        for i, (source, targets) in enumerate(dataloader):
            losses.append(self._run_batch(source, targets, train))
            if train and self.rank == 0:
                print(f"[RANK0] Epoch {epoch} | Iter {i} | Train Loss {losses[-1]:.5f}", flush=True)
        if not train and self.rank == 0:
            print(f"[RANK0] Epoch {epoch} | val loss {sum(losses) / len(losses):.5f}", flush=True)

    def _save_snapshot(self, epoch):
        model = self.model
        raw_model = model.module if hasattr(model, "module") else model
        snapshot = Snapshot(raw_model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)
        print(f"Snapshot saved at epoch {epoch}")

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.rank == 0 and (epoch + 1) % self.config.save_every == 0:
                self._save_snapshot(epoch + 1)
            self._run_epoch(epoch, self.test_loader, train=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=6)
    parser.add_argument("--save_every", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--grad_norm_clip", type=float, default=1.0)
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--use_amp", action="store_true")
    config = parser.parse_args()
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    model = GPT(block_size=64)
    optimizer = create_optimizer(model, 2e-3, 0.1)
    train_data, test_data = CharDataset(64, 1600), CharDataset(64, 2000)
    test_data = torch.utils.data.Subset(test_data, range(1600, 2000))
    Trainer(config, model, optimizer, train_data, test_data).train()
    dist.destroy_process_group()
