"""A script like Keller Jordan's speed runs: Muon for hidden matrices, Adam for the rest, gradients averaged by hand.

torchrun --nproc-per-node 2 muon_speedrun.py --out out
torchrun --nproc-per-node 2 muon_speedrun.py --out out --resume out/state.pt
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def zeropower_via_newtonschulz5(G, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.mT if G.size(-2) > G.size(-1) else G
    X = X / (X.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.size(-2) > G.size(-1) else X


class MuonWithAuxAdam(torch.optim.Optimizer):
    def __init__(self, param_groups):
        for group in param_groups:
            defaults = (
                {"lr": 0.02, "momentum": 0.95} if group["use_muon"] else {"lr": 3e-4, "betas": (0.9, 0.95)}
            )
            for key, value in {**defaults, "weight_decay": 0.0, "eps": 1e-10}.items():
                group.setdefault(key, value)
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            update = self.update_muon if group["use_muon"] else self.update_adam
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update(p.grad, self.state[p], group).view_as(p), alpha=-group["lr"])

    def update_muon(self, grad, state, group):
        buf = state.setdefault("momentum_buffer", torch.zeros_like(grad))
        buf.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buf, group["momentum"])
        return zeropower_via_newtonschulz5(update) * max(1, grad.size(-2) / grad.size(-1)) ** 0.5

    def update_adam(self, grad, state, group):
        b1, b2 = group["betas"]
        exp_avg = state.setdefault("exp_avg", torch.zeros_like(grad)).lerp_(grad, 1 - b1)
        exp_avg_sq = state.setdefault("exp_avg_sq", torch.zeros_like(grad)).lerp_(grad.square(), 1 - b2)
        state["step"] = state.get("step", 0) + 1
        denom = (exp_avg_sq / (1 - b2 ** state["step"])).sqrt() + group["eps"]
        return exp_avg / (1 - b1 ** state["step"]) / denom


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.attn(F.rms_norm(x, (x.size(-1),)))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (x.size(-1),)))).square())


class GPT(nn.Module):
    def __init__(self, dim=64, depth=2, heads=4, length=64):
        super().__init__()
        self.embed, self.pos = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(dim))
        self.lm_head = nn.Linear(dim, 256, bias=False)
        self.lm_head.weight.data.zero_()

    def forward(self, inputs, targets):
        x = self.embed(inputs) + self.pos.weight[: inputs.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(F.rms_norm(x, (x.size(-1),)) * self.scale)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data_generator(tokens, batch_size, length, rank, world_size, start=0):
    pos = start
    while True:
        offsets = torch.arange(batch_size) + (pos * world_size + rank) * batch_size
        window = tokens[(offsets * 7919 % (len(tokens) - length))[:, None] + torch.arange(length + 1)].long()
        yield window[:, :-1], window[:, 1:]
        pos += 1


def get_lr(step, steps, cooldown=0.4):
    left = 1 - step / steps
    return 1.0 if left > cooldown else left / cooldown


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--out", type=Path, default=Path())
parser.add_argument("--resume", type=Path)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
master_process = rank == 0
text = bytearray(b"".join(s.read_bytes() for s in sorted(Path(os.__file__).parent.glob("*.py"))))
tokens = torch.frombuffer(text, dtype=torch.uint8)
train, val = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]

torch.manual_seed(rank)
model = GPT()
for param in model.parameters():
    dist.broadcast(param.detach(), 0)
hidden = [p for p in model.blocks.parameters() if p.ndim >= 2]
others = [p for p in model.parameters() if all(p is not q for q in hidden)]
param_groups = [
    {"params": hidden, "use_muon": True, "lr": 0.02, "weight_decay": 0.01},
    {"params": others, "use_muon": False, "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.01},
]
optimizer = MuonWithAuxAdam(param_groups)
for group in optimizer.param_groups:
    group["initial_lr"] = group["lr"]
first = 0
if args.resume:
    state = torch.load(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]

loader = data_generator(train, args.batch_size, 64, rank, world_size, first)
for step in range(first, args.steps + 1):
    last_step = step == args.steps
    if last_step or (step and step % 100 == 0):
        val_loader = data_generator(val, 64, 64, rank, world_size)
        with torch.no_grad():
            val_loss = sum(model(*next(val_loader)) for _ in range(8)) / 8
        dist.all_reduce(val_loss)
        if master_process:
            print(f"step:{step}/{args.steps} val loss:{val_loss / world_size:.4f}", flush=True)
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.out / "state.pt")
    if last_step:
        break
    loss = model(*next(loader))
    loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad.div_(world_size)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * get_lr(step, args.steps)
        if group["use_muon"]:
            frac = min(step / 100, 1)
            group["momentum"] = (1 - frac) * 0.85 + frac * 0.95
    optimizer.step()
    model.zero_grad(set_to_none=True)
    if master_process:
        print(f"step:{step + 1}/{args.steps} train_loss:{loss.item():.4f}", flush=True)
dist.destroy_process_group()
