"""One process that times steps of FSDP2 with and without compression, and follows their losses.

sharded_times.py starts it on every rank. The variants take turns, so that all are measured over the same period.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qcomp
from network.models import MODELS
from network.trainees import Trainee, run, timed
from qcomp.torch.fsdp import compress

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FOUR_BITS = qcomp.QSGD(levels=7, bucket_size=128)


def variants() -> dict[str, tuple[bool, Callable[[Any], Any] | None]]:
    """Return for each variant whether it computes and sends bfloat16, and the function that makes it compress."""
    gradients = partial(compress, gradients=FOUR_BITS)
    return {
        "float32": (False, None),
        "bfloat16": (True, None),
        "4-bit gradients": (False, gradients),
        "4-bit gradients, 8-bit weights": (False, partial(gradients, weights=qcomp.MinMaxUInt8())),
        "4-bit gradients and changes": (False, partial(gradients, weights=FOUR_BITS, weight_changes=True)),
        "bfloat16, 4-bit gradients": (True, gradients),
        "bfloat16, 4-bit gradients, 8-bit weights": (True, partial(gradients, weights=qcomp.MinMaxUInt8())),
    }


def make(model: str, variant: str, *, keep: bool = False) -> Trainee:
    """Return a sharded model.

    Parameters
    ----------
    model : str
        One of `MODELS`.
    variant : str
        One of `variants`.
    keep : bool
        Whether weights stay gathered between the forward and the backward pass.
    """
    in_bfloat16, prepare = variants()[variant]
    torch.manual_seed(0)
    module: Any = MODELS[model].make()
    options: dict[str, Any] = {"reshard_after_forward": not keep}
    if in_bfloat16:
        options["mp_policy"] = BFLOAT16
    for layer in list(module.modules()):
        if isinstance(layer, nn.TransformerEncoderLayer):
            fully_shard(layer, **options)
    fully_shard(module, **options)
    if prepare is not None:
        prepare(module)
    return Trainee(model, module)


def time_steps(model: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return the seconds and bytes of a step of each variant, with weights freed and with weights kept."""
    return {
        label: timed({name: make(model, name, keep=keep) for name in names}, rounds)
        for label, keep in (("freed", False), ("kept", True))
    }


if __name__ == "__main__":
    run(__doc__ or "", list(variants()), make, time_steps)
