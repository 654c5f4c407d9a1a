"""A sharded training script (FSDP2) with compressed gradients and weights: a small transformer learns to read digits.

Start it with ``torchrun --nproc-per-node 2 examples/torch_fsdp.py``. Two lines differ from the script without
compression: the import, and ``compress``. ``--mesh hsdp`` shards over the ranks of a node and compresses between nodes
(of two ranks each, so it needs four); ``--mesh replicate`` keeps whole copies, as DistributedDataParallel does.
``--muon`` takes Muon in place of AdamW: the gradient shards of a matrix go to one rank, which orthogonalises the
update.
"""

import argparse
import io

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import qcomp.torch
import qcomp.torch.fsdp

STEPS, BATCH, TRAINED, WIDTH = 100, 64, 1500, 64


class Block(nn.Module):
    """Attention and a perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, rows, width) to the same shape."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        added: torch.Tensor = x + self.perceptron(self.norms[1](x))
        return added


class Reader(nn.Module):
    """Reads the rows of an image as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, WIDTH)
        self.places = nn.Parameter(torch.randn(8, WIDTH) / 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 8, 8) to logits (batch, 10)."""
        x = self.rows(images) + self.places
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


def sharded(kind: str) -> tuple[nn.Module, qcomp.torch.fsdp.Compression]:
    """Return the model, the same on all ranks, and the compression of its messages."""
    torch.manual_seed(0)
    model = Reader()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    gradients, weights, exact = qcomp.QSGD(levels=7), qcomp.MinMaxUInt8(), qcomp.ExactBelow(1000)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, qcomp.torch.fsdp.compress(model, gradients, weights, exact=exact)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("nodes", "ranks"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["ranks"], mp_policy=policy)
        fully_shard(model, mesh=mesh["ranks"], mp_policy=policy)
        return model, qcomp.torch.fsdp.compress(model, gradients, exact=exact, replicas=mesh["nodes"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ranks", "alone"))
    replicate(model, mesh=mesh["alone"], mp_policy=policy)
    return model, qcomp.torch.fsdp.compress(model, gradients, exact=exact, replicas=mesh["ranks"])


def main() -> None:
    """Train, each rank on its own random batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", choices=("fsdp", "hsdp", "replicate"), default="fsdp")
    parser.add_argument("--muon", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8) / 16
    targets = torch.tensor(labels)
    model, compression = sharded(options.mesh)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if options.muon:
        others, splits = ("rows.*", "places", "head.*"), {"*in_proj_weight": 3}
        optimizer = qcomp.torch.Muon(model.named_parameters(), lr=0.02, others=others, splits=splits)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    draws = torch.Generator().manual_seed(rank)

    for step in range(STEPS):
        batch = torch.randint(0, TRAINED, (BATCH,), generator=draws)
        loss = functional.cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the mean gradient
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    checkpoint = io.BytesIO()  # beside those of the model and the optimizer; each rank saves its own
    torch.save(compression.state_dict(), checkpoint)
    with torch.no_grad():
        read = (model(inputs[TRAINED:]).argmax(1) == targets[TRAINED:]).float().mean().item()
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    total = torch.stack([p.detach().double().sum() for p in parameters])
    totals = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, total)
    if any(not torch.equal(total, other) for other in totals):
        raise SystemExit(f"rank {rank}: the ranks hold different parameters")
    if rank == 0:
        print(f"all {dist.get_world_size()} ranks hold identical parameters")
        print(f"{compression.bytes_sent:,} bytes sent by this rank; {read:.1%} of digits read")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
