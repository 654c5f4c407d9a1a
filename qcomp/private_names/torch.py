"""Undocumented names of torch that qcomp uses; versions 2.6 to 2.13 have all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from qcomp.private_names import require

_require = partial(require, library="torch", versions=">=2.6,<2.14")

COMPILED = "_orig_mod"
"""The name of the original module inside the module that torch.compile makes. It also occurs in parameters' names."""


class ScaledStep:
    """Base of an optimizer that unscales gradients and skips steps itself, instead of the GradScaler."""

    _step_supports_amp_scaling = True


def grad_scale(optimizer: Any) -> Any:
    """Return the scale that a GradScaler leaves for a step to remove, as a tensor; None without a GradScaler."""
    return getattr(optimizer, "grad_scale", None)


def found_inf(optimizer: Any) -> Any:
    """Return a tensor that is not 0 if a GradScaler has found an infinite gradient; None without a GradScaler."""
    return getattr(optimizer, "found_inf", None)


def take_off_scale(optimizer: Any) -> None:
    """Remove the scale that a step would find, because its gradients are no longer scaled."""
    if hasattr(optimizer, "grad_scale"):
        optimizer.grad_scale = None


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch runs an optimizer's step hooks, which it sets up when the optimizer is made."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # so that torch has made an optimizer
    _require(torch.optim.SGD.step, "hooked", "know that an outer loop will notice an optimizer's steps")
    return bool(getattr(type(optimizer).step, "hooked", False))


def hooks_of_saving(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks to call before and after ``state_dict`` of an optimizer, in their order."""
    use = "run the hooks of state_dict"
    before = _require(optimizer, "_optimizer_state_dict_pre_hooks", use)
    after = _require(optimizer, "_optimizer_state_dict_post_hooks", use)
    return list(before.values()), list(after.values())


def hooks_of_loading(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks to call before and after ``load_state_dict`` of an optimizer, in their order."""
    use = "run the hooks of load_state_dict"
    before = _require(optimizer, "_optimizer_load_state_dict_pre_hooks", use)
    after = _require(optimizer, "_optimizer_load_state_dict_post_hooks", use)
    return list(before.values()), list(after.values())


def default_store() -> Any:
    """Return the store in which all ranks of torch.distributed have met."""
    return _require(
        torch.distributed.distributed_c10d, "_get_default_store", "connect the ranks of a process group"
    )()


def timeout_of(group: Any) -> float | None:
    """Return the seconds that the exchanges of a process group may take, or None if torch does not tell."""
    device = torch.device("cuda" if "nccl" in str(torch.distributed.get_backend_config(group)) else "cpu")
    backend = _require(group, "_get_backend", "wait as long as a process group does")(device)
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds())


def call_at_end() -> Callable[[Callable[[], None]], None]:
    """Return the function that queues a call for the end of the backward pass that is running."""
    engine = _require(torch.autograd.Variable, "_execution_engine", "learn that a backward pass has ended")
    found: Callable[[Callable[[], None]], None] = _require(
        engine, "queue_callback", "learn that a backward pass has ended"
    )
    return found


def writes_to(tensor: torch.Tensor) -> int:
    """Return how many writes to a tensor torch has counted."""
    return int(_require(tensor, "_version", "notice that a script has changed a gradient"))


def hooks_of(model: Any) -> list[Any]:
    """Return the communication hooks of a DistributedDataParallel, if it shows them."""
    return [hook for hook, _ in getattr(model, "_comm_hooks", ())]


def ignored_by(model: Any) -> Collection[str]:
    """Return the names of the parameters that a DistributedDataParallel does not average."""
    found: Collection[str] = _require(
        model, "parameters_to_ignore", "leave out parameters as DistributedDataParallel does"
    )
    return found


def is_joined_without(model: Any, other: Any) -> bool:
    """Return whether torch's Join covers a model in steps of other ranks, and does not cover a later object."""
    joined, own = (
        _require(x, "_join_config", "take part in the steps of ranks with more inputs")
        for x in (model, other)
    )
    return bool(joined.enable and (not own.enable or own.is_first_joinable))


def counts_ranks_with_inputs(model: Any) -> bool:
    """Return whether torch's Join asks a DistributedDataParallel for means over the ranks that still have inputs."""
    joined = _require(model, "_join_config", "take part in the steps of ranks with more inputs")
    return bool(joined.enable and not getattr(model, "_divide_by_initial_world_size", True))


def averages_over_replicas(state: Any) -> bool:
    """Return whether FSDP2 averages gradients over replicas now, see ``set_requires_all_reduce``."""
    return bool(_require(_group_of(state), "all_reduce_grads", _ACCUMULATES))


def has_gradients(state: Any) -> bool:
    """Return whether any shard of FSDP2 has a gradient: ``zero_grad`` sets them to None."""
    params = _require(_group_of(state), "fsdp_params", _ACCUMULATES)
    return any(_require(p, "sharded_param", _ACCUMULATES).grad is not None for p in params)


_ACCUMULATES = "accumulate gradients without averaging them"


def _group_of(state: Any) -> Any:
    return _require(state, "_fsdp_param_group", _ACCUMULATES)


def fsdp_state_of() -> Callable[[Any], object]:
    """Return the function that maps a module to its FSDP2 state, which modules of one ``fully_shard`` list share."""
    fsdp = torch.distributed.fsdp
    found: Callable[[Any], object] = _require(
        fsdp.FSDPModule, "_get_fsdp_state", "find the parameters that FSDP2 gathers together"
    )
    return found
