"""The methods of torch and torchft, as they ship."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from race.settings import Optimizers, Settings, Trainer

__all__ = ["bf16", "data_parallel", "plain", "post_local", "power_sgd", "torchft"]

PATIENCE = timedelta(minutes=30)
"""Timeout of the exchanges: a message of the largest model takes a minute on the slowest link."""
SMALLEST_GAIN = 2
"""PowerSGD's default: a matrix whose factors have more than half of its elements is sent uncompressed."""
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def data_parallel(model: nn.Module, *, bucket_mb: float = 25) -> Any:
    """Return a model under DistributedDataParallel, on a process group of its own."""
    group = dist.new_group(timeout=PATIENCE)
    return DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )


def plain(inner: Optimizers) -> Callable[[nn.Module, Settings], Trainer]:
    """Return DistributedDataParallel without a hook."""
    return lambda model, settings: Trainer(data_parallel(model), inner(model, settings))


def bf16(inner: Optimizers) -> Callable[[nn.Module, Settings], Trainer]:
    """Return DistributedDataParallel with the hook that sends bfloat16."""

    def make(model: nn.Module, settings: Settings) -> Trainer:
        wrapped = data_parallel(model)
        # Without NCCL, DistributedDataParallel refuses the original hook by its name.
        wrapped.register_comm_hook(wrapped.process_group, _bf16)
        return Trainer(wrapped, inner(model, settings))

    return make


def _bf16(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(group, bucket)


def power_sgd(rank: int, inner: Optimizers) -> Callable[[nn.Module, Settings], Trainer]:
    """Return DistributedDataParallel with the PowerSGD hook, which runs over gloo with one bucket only."""

    def make(model: nn.Module, settings: Settings) -> Trainer:
        wrapped = data_parallel(model, bucket_mb=1000)
        state = powerSGD_hook.PowerSGDState(
            wrapped.process_group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=SMALLEST_GAIN,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Trainer(wrapped, inner(model, settings))

    return make


def post_local(inner: Optimizers) -> Callable[[nn.Module, Settings], Trainer]:
    """Return post-local SGD with another inner optimizer: it averages gradients at first, and parameters later."""

    def make(model: nn.Module, settings: Settings) -> Trainer:
        wrapper = import_module("torch.distributed.optim").PostLocalSGDOptimizer  # warns when it is imported
        wrapped = data_parallel(model)
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        state = PostLocalSGDState(wrapped.process_group, alone, settings.warmup)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        # The averager counts steps from 0: it first averages after ``first`` + 1 steps.
        period, first = settings.every, settings.warmup - 1
        return Trainer(
            wrapped,
            [
                wrapper(each, PeriodicModelAverager(period, first, wrapped.process_group))
                for each in inner(model, settings)
            ],
        )

    return make


def torchft(
    inner: Optimizers, changed: Callable[[Settings], Settings] = lambda settings: settings, **outer: float
) -> Callable[[nn.Module, Settings], Trainer]:
    """Return torchft's DiLoCo; every rank is a replica of its own, and rank 0 has the lighthouse.

    ``changed`` may return settings with other outer rounds; ``outer`` replaces settings of the outer optimizer.
    """

    def make(model: nn.Module, settings: Settings) -> Trainer:
        os.environ.setdefault("RUST_LOG", "warn")
        local_sgd, coordination = import_module("torchft.local_sgd"), import_module("torchft.coordination")
        ft, size = import_module("torchft"), dist.get_world_size()
        lighthouse, address = None, [""]
        if dist.get_rank() == 0:
            lighthouse = coordination.LighthouseServer(
                bind="[::]:0", min_replicas=size, join_timeout_ms=10_000
            )
            port = lighthouse.address().rsplit(":", 1)[1]
            address = [f"http://{os.environ['MASTER_ADDR']}:{port}"]
        dist.broadcast_object_list(address)
        own = os.environ["OWN_ADDR"]
        store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
        manager = ft.Manager(
            pg=ft.ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=size,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=store.port,
            lighthouse_addr=address[0],
            replica_id=f"rank{dist.get_rank()}",
            hostname=own,
            init_sync=False,
        )
        optimizers = inner(model, settings)
        context = local_sgd.DiLoCo(
            manager,
            [model],
            optimizers[-1],
            torch.optim.SGD(model.parameters(), **(OUTER | outer)),
            sync_every=changed(settings).every,
        )
        context.__enter__()

        return Trainer(model, optimizers, close=partial(_leave, context, manager, [lighthouse, store]))

    return make


def _leave(context: Any, manager: Any, servers: list[Any]) -> None:
    """End torchft's part of a process; until then its servers must stay referenced."""
    context.__exit__(None, None, None)
    manager.shutdown()
    dist.barrier()
    servers.clear()
