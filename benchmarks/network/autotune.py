"""One process that lets Autotune choose on a link, and times its steps beside those of every method chosen by hand.

autotune_times.py starts it on every rank. Autotune chooses first, in steps of its own; then the variants take turns, so
that all are measured over the same period.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import qcomp
from network.models import MODELS
from network.trainees import Trainee, run, timed
from qcomp.integrations import ddp
from qcomp.planning import Autotune

STOCK, TUNED = "DDP, no hook", "autotune"
METHODS = {
    STOCK: qcomp.CompressedMean(qcomp.Identity()),
    "min-max, 8 bits": qcomp.CompressedMean(qcomp.MinMaxUInt8(), "auto"),
    "QSGD, 4 bits": qcomp.CompressedMean(qcomp.QSGD(levels=7), "auto", feedback=False),
    "sign, 1 bit": qcomp.CompressedMean(qcomp.ScaledSign(), "auto"),
    "PowerSGD, rank 1": qcomp.PowerSGDMean(rank=1),
}
"""The methods that Autotune chooses from, in order of preference."""
VARIANTS = (*METHODS, TUNED)
MOST = 200
"""Steps after which Autotune must have chosen."""


class Tuned(Trainee):
    """A model that is averaged by one method, or by the one that Autotune chooses."""

    def __init__(self, model: str, variant: str) -> None:
        torch.manual_seed(0)
        module = DistributedDataParallel(
            MODELS[model].make(), process_group=dist.new_group(backend="gloo"), gradient_as_bucket_view=True
        )
        if variant == TUNED:
            self.state, averaged = ddp.autotune(Autotune(METHODS), module)
            module.register_comm_hook(self.state, averaged)
        elif variant != STOCK:
            mean = METHODS[variant]
            averaging = qcomp.Averaging(mean.topology, mean.feedback)
            if isinstance(mean, qcomp.PowerSGDMean):
                averaging = qcomp.PowerSGD(rank=mean.rank)
            hook = ddp.hook(mean.compressors[0], module, averaging=averaging)
            module.register_comm_hook(*hook)
        super().__init__(model, module)

    def choose(self) -> dict[str, Any]:
        """Make steps until Autotune has chosen; return the choice and the seconds that it is based on."""
        while self.state.chosen is None and self.state.iterations < MOST:
            self.step()
        return {"chosen": self.state.chosen, "tried": self.state.seconds, "iterations": self.state.iterations}


def time_steps(model: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return the seconds and bytes of a step of each variant, and the choice."""
    trainees: dict[str, Trainee] = {name: Tuned(model, name) for name in names}
    tuned = trainees[TUNED]
    assert isinstance(tuned, Tuned)
    choice = tuned.choose()
    found = timed(trainees, rounds)
    found[TUNED] |= choice
    return found


if __name__ == "__main__":
    run(__doc__ or "", VARIANTS, Tuned, time_steps)
