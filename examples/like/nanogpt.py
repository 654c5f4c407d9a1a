"""A script like nanoGPT's train.py: settings are globals, and rank 0 evaluates and saves.

torchrun --nproc-per-node 2 nanogpt.py --max_iters=300
torchrun --nproc-per-node 2 nanogpt.py --init_from=resume
"""

import ast
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out-nanogpt"
eval_interval, log_interval, eval_iters = 100, 1, 40
init_from = "scratch"  # or "resume"
gradient_accumulation_steps = 4  # over all ranks
batch_size, block_size = 8, 64
n_layer, n_head, n_embd = 2, 4, 64
learning_rate, min_lr = 2e-3, 2e-4
warmup_iters, lr_decay_iters, max_iters = 20, 300, 300
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.95, 1.0
device, dtype, compile = "cpu", "float32", False
for arg in sys.argv[1:]:
    key, value = arg.removeprefix("--").split("=")
    globals()[key] = value if isinstance(globals()[key], str) else ast.literal_eval(value)

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
    master_process = dist.get_rank() == 0
    seed_offset = dist.get_rank()
    assert gradient_accumulation_steps % dist.get_world_size() == 0
    gradient_accumulation_steps //= dist.get_world_size()
else:
    master_process, seed_offset = True, 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
ctx = nullcontext() if dtype == "float32" else torch.autocast(device, dtype=getattr(torch, dtype))

sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(s.read_bytes() for s in sources)), dtype=torch.uint8)
splits = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def get_batch(split):
    starts = torch.randint(len(splits[split]) - block_size, (batch_size, 1))
    window = splits[split][starts + torch.arange(block_size + 1)].long().to(device)
    return window[:, :-1], window[:, 1:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(
            nn.TransformerEncoderLayer(
                n_embd, n_head, 4 * n_embd, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(n_layer)
        )
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], device=idx.device)
        for block in self.h:
            x = block(x, mask, is_causal=True)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, 256), targets.reshape(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        params = [p for p in self.parameters() if p.requires_grad]
        optim_groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        extra_args = {"fused": True} if device_type == "cuda" else {}
        return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas, **extra_args)


iter_num = 0
model = GPT()
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in checkpoint["model"].items()})
    iter_num = checkpoint["iter_num"]
model.to(device)
scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device)
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
if compile:
    model = torch.compile(model)
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {
        split: sum(model(*get_batch(split))[1] for _ in range(eval_iters)) / eval_iters for split in splits
    }
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


X, Y = get_batch("train")
raw_model = model.module if ddp else model
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        if iter_num > 0:
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
            }
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    if iter_num >= max_iters:
        break
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}", flush=True)
    iter_num += 1
if ddp:
    dist.destroy_process_group()
