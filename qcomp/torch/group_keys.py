"""The check that an optimizer reads every key of a parameter group."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from qcomp.core.checkpoint.schema import shown

_OF_TORCH = {"amsgrad": False, "dampening": 0, "maximize": False, "nesterov": False}
"""Settings of torch's optimizers that change their steps, with the values that match the steps of this library."""
_OF_OTHERS = {
    *("capturable", "differentiable", "foreach", "fused"),  # how torch's optimizers compute
    *("base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"),  # of torch's schedulers
    *("group_name", "lr_scale", "name"),  # of Lightning's LearningRateMonitor, and of timm's schedulers
}
"""Keys that torch or other packages write and read."""


def require_read(
    group: Mapping[str, Any], number: int, *, name: str, own: Collection[str], of_all: Collection[str]
) -> None:
    """Raise ValueError if a new group has a setting that has no effect in a group.

    ``own`` has the settings that the optimizer reads from each group, ``of_all`` those that it reads for all groups
    together.
    """
    known = {*own, "params", "param_names"}
    for key, value in group.items():
        if key in known:
            continue
        if key in of_all:
            cure = "pass it to the optimizer"
        elif key in _OF_OTHERS or (key in _OF_TORCH and value == _OF_TORCH[key]):
            continue
        elif key in _OF_TORCH:
            cure = "leave it out"
        else:
            close = get_close_matches(str(key), own, n=1)
            cure = (
                f"{f'did you mean {close[0]!r}? ' if close else ''}Known are {', '.join(own)}. Leave it "
                "out; or, if a scheduler of yours reads it, set it in param_groups once the optimizer is made"
            )
        raise ValueError(
            f"param_groups[{number}] has {key}={shown(value)}, which {name} does not read from groups: {cure}"
        )
