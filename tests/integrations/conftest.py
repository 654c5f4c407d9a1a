"""Fixture that runs a script on ranks with DistributedDataParallel."""

import pytest

HEAD = """
import copy, dataclasses, os, pickle, warnings
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import qcomp
from qcomp.core.optimizers.compression import EXACT
from qcomp.integrations import ddp
from qcomp.integrations.ddp import buckets as cut_buckets

cut_buckets.PART_BYTES = 8000  # so that large buckets are exchanged in parts
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "the variance is frozen after|the variance of .* no longer fits")
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group(backend, store=store, rank=me, world_size=n)
os.environ["QCOMP_HOST"] = f"host{me % 2}"
comm = qcomp.comm.TorchCommunicator(timeout=30)

def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 41, bias=False), torch.nn.Tanh(),
        torch.nn.Linear(41, 5),
    ).to(device)

def loss(model, step):
    draws = torch.Generator().manual_seed(1000 * step + me)
    return model(torch.randn(3, 33, generator=draws).to(device)).square().sum()

def wrapped(bucket_bytes=4000, **options):
    options = {"gradient_as_bucket_view": True} | options
    return DistributedDataParallel(network(), bucket_cap_mb=bucket_bytes / 2**20, **options)

def gradients(model):
    return [p.grad.clone() for p in model.parameters()]

def same(xs, ys):
    return len(xs) == len(ys) and all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))

def tensorwise(optimizer, each):
    if not hasattr(optimizer, "averaging"):  # the owners of Muon have whole tensors
        return optimizer
    return dataclasses.replace(optimizer, averaging=dataclasses.replace(optimizer.averaging, tensorwise=each))

def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def said(torch_ranks):
    """Run a script on ranks with a process group; return the lines of each.

    ``said(n, script, check=True, device="cpu", backend="gloo", timeout=60.0)``
    """

    def run(n, body, *, check=True, device="cpu", backend="gloo", timeout=60.0):
        script = f"device, backend = {device!r}, {backend!r}\n{HEAD}{body}"
        return [rank.out.splitlines() for rank in torch_ranks(n, script, check=check, timeout=timeout)]

    return run
