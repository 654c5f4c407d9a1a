"""One process of a training by nanoGPT's train.py, which runs as it is but for the lines that set up the ranks.

nanogpt.py starts it on every rank, in a copy of nanoGPT's repository that has the data. The losses and the seconds are
those that the script prints.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from schedule import Cosine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from race.methods import METHODS
from race.products import InFloat32, are_slow
from race.settings import Settings

__all__ = ["AS_WRITTEN", "changed", "printed"]

CHANGES = (
    (r"device = f'cuda:\{ddp_local_rank\}'", "device = 'cpu'"),
    (r"torch\.cuda\.set_device\(device\)", "pass"),
    (r"torch\.manual_seed\(1337 \+ seed_offset\)", "torch.manual_seed(1337 + 100 * SEED + seed_offset)"),
    (r"model = DDP\(model, device_ids=\[ddp_local_rank\]\)", "model, optimizer = PARALLEL(model, optimizer)"),
    (r"    destroy_process_group\(\)", "    LEAVE()"),
    (r"raw_model = model\.module if ddp else model", "raw_model = getattr(model, 'module', model)"),
)
"""What is replaced in train.py, each once: two lines for processors, the seed, and the lines of the conversion."""
AS_WRITTEN = "as_written"
"""The method that leaves the script its own optimizer, under DistributedDataParallel."""


def changed(script: str) -> str:
    """Return train.py with all `CHANGES`.

    Raises
    ------
    ValueError
        If a line is missing, because this version of nanoGPT is another one.
    """
    for line, other in CHANGES:
        script, found = re.subn(line, lambda _, other=other: other, script)  # type: ignore[misc]  # a lambda's default
        if found != 1:
            raise ValueError(
                f"train.py has {found} lines like {line!r}; expected 1, as at the commit on the page"
            )
    return script


def printed(text: str) -> dict[str, list[tuple[int, float]]]:
    r"""Return the validation losses that the script printed, and the seconds of each step, with the steps before each.

    Examples
    --------
    >>> printed("step 30: train loss 2.1, val loss 2.5000\niter 30: loss 2.6, time 41.00ms, mfu 0.01%")
    {'losses': [(30, 2.5)], 'seconds': [(30, 0.041)]}
    """
    losses = re.findall(r"^step (\d+): .* val loss (\S+)$", text, re.MULTILINE)
    times = re.findall(r"^iter (\d+): .* time (\S+)ms", text, re.MULTILINE)
    return {
        "losses": [(int(step), float(loss)) for step, loss in losses],
        "seconds": [(int(step), float(time) / 1000) for step, time in times],
    }


class Together:
    """Several optimizers as the one that the script expects."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = optimizers
        products: Any = InFloat32  # torch's class has no types
        self.computing: AbstractContextManager[Any] = products() if are_slow() else nullcontext()
        self.param_groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients of all parameters."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Make a step of every optimizer."""
        with self.computing:
            for each in self.optimizers:
                each.step()

    def state_dict(self) -> list[Any]:
        """Return the states in order, for the script's checkpoint."""
        return [each.state_dict() for each in self.optimizers]


def main() -> None:
    """Run the script with a method, and leave what it prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", choices=[AS_WRITTEN, *METHODS], required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of the schedule")
    parser.add_argument("--every", type=int, required=True, help="steps of an outer round")
    parser.add_argument("--folder", type=Path, required=True, help="of the script")
    parser.add_argument("--out", type=Path, required=True, help="where to write what rank 0 prints")
    options, arguments = parser.parse_known_args()
    torch.set_num_threads(1)
    settings = Settings(Cosine(options.rate, options.steps), 0, options.every, options.seed)
    closing = ExitStack()

    def parallel(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        if options.method == AS_WRITTEN:
            return DistributedDataParallel(model), optimizer
        for (
            values
        ) in model.parameters():  # each rank has its own seed; DistributedDataParallel would send these too
            dist.broadcast(values.detach(), 0)
        trainer = METHODS[options.method].make(model, settings)
        closing.callback(trainer.close)
        return trainer.model, Together(trainer.optimizers)

    def leave() -> None:
        closing.close()
        dist.destroy_process_group()

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.chdir(options.folder)
    sys.path.insert(0, str(options.folder))
    sys.argv[1:] = arguments
    code = changed(Path("train.py").read_text())
    given = {"__name__": "__main__", "PARALLEL": parallel, "SEED": options.seed, "LEAVE": leave}
    with (
        (options.out if os.environ["RANK"] == "0" else Path(os.devnull)).open("w") as out,
        redirect_stdout(out),
    ):
        exec(compile(code, "train.py", "exec"), given)


if __name__ == "__main__":
    main()
