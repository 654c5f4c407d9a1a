"""Ray Train starts the workers, and 1-bit Adam averages: start it with ``python examples/with_ray.py``.

Needs ``pip install 'ray[default,train]'``; without ``default``, Ray trains and warns every second. A worker that dies
ends the run; Ray starts all workers again, from the last checkpoint, as often as ``max_failures`` says.
"""

import argparse
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn import functional

import qcomp.torch

STEPS, FREEZE, EVERY = 60, 20, 30


def train_loop() -> None:
    """Train on this worker, from the last checkpoint if there is one."""
    context = ray.train.get_context()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    model = prepare_model(network)
    wrapped = model if context.get_world_size() > 1 else None  # Ray does not wrap for one worker
    optimizer = qcomp.torch.OneBitAdam(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), freeze=FREEZE, model=wrapped
    )
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    test = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))  # the same on all workers
    draws = torch.Generator().manual_seed(1000 * (first + 1) + context.get_world_rank())
    for step in range(first, STEPS):
        x = torch.randn(32, 64, generator=draws)
        functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY:
            continue
        with torch.no_grad():
            loss = functional.cross_entropy(network(test), test[:, :8].argmax(1)).item()
        losses = [0.0] * context.get_world_size()
        torch.distributed.all_gather_object(losses, loss)  # equal, as the workers' parameters are
        optimizer.gather_states()  # on all workers, before the first of them saves
        with tempfile.TemporaryDirectory() as folder:
            if context.get_world_rank() == 0:
                saved = {
                    "model": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                }
                torch.save(saved, Path(folder, "state.pt"))
                kept = ray.train.Checkpoint.from_directory(folder)
            else:
                kept = None
            metrics = {"step": step + 1, "losses": losses, "stage": optimizer.core_state.stage}
            ray.train.report(metrics, checkpoint=kept)


def main() -> None:
    """Train on some workers of a cluster, or of this machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--storage", default=None, help="a folder or URL that all workers see")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        run_config=ray.train.RunConfig(
            storage_path=options.storage, failure_config=ray.train.FailureConfig(max_failures=2)
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
