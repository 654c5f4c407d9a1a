"""One replica: it trains a small model under torchft's quorums with qcomp or torchft's DDP, until it is killed."""

import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("RUST_LOG", "error")  # torchft reads it when it is imported

import torch
import torchft
from network.shaped import address, become
from torch import nn
from torch.distributed import TCPStore

import qcomp
import qcomp.torch.ft

__all__ = ["FACES", "PATIENCE", "SILENCE", "Node", "replica_main"]

PATIENCE = 2.5
"""Seconds that a replica waits for the others in an exchange or while they connect."""
SILENCE = 1.0
STEP_SECONDS = 0.1
"""The time of a device's work in each step; this process sleeps instead."""
WIDTH = 256


class Face(NamedTuple):
    """A library's part of a replica."""

    manager: Any
    begin: Callable[[], Any]
    model: Any
    finish: Callable[[], bool]
    counts: Callable[[], tuple[int, int, int]]
    """The quorum, the completed steps, and the number of replicas."""


def by_qcomp(settings: dict[str, Any]) -> Face:
    """Return 1-bit Adam of qcomp."""
    group = qcomp.torch.ft.ProcessGroup(timeout=PATIENCE, silence=SILENCE)
    manager = torchft.Manager(
        pg=group, load_state_dict=None, state_dict=None, use_async_quorum=False, **settings
    )
    model = _model()
    inner = qcomp.torch.OneBitAdam(
        model.parameters(), lr=1e-3, freeze=20, exact=None, comm=qcomp.comm.LocalCommunicator.alone()
    )
    optimizer = qcomp.torch.ft.Elastic(inner, manager, group)
    return Face(
        manager,
        optimizer.zero_grad,
        model,
        optimizer.step,
        lambda: (group.quorum, optimizer.state.step, group.size()),
    )


def by_torchft(settings: dict[str, Any]) -> Face:
    """Return AdamW under torchft's DistributedDataParallel, as in torchft's own example."""
    model = _model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=PATIENCE)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        **settings,
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)

    def finish() -> bool:
        before = manager.current_step()
        optimizer.step()
        return bool(manager.current_step() > before)

    return Face(
        manager,
        optimizer.zero_grad,
        wrapped,
        finish,
        lambda: (manager._quorum_id, manager.current_step(), manager.num_participants()),
    )


FACES = {"qcomp": by_qcomp, "torchft": by_torchft}


class Node(NamedTuple):
    """Where a replica runs."""

    network: str | None
    """The name of a network of this machine, None for the machine itself."""
    number: int

    @property
    def address(self) -> str:
        """The address by which other nodes reach it."""
        return address(self.number) if self.network else "127.0.0.1"

    def enter(self) -> None:
        """Move this process to the node."""
        if self.network:
            become(self.network, self.number)
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def replica_main(face: str, name: str, lighthouse: str, node: Node, path: Path) -> None:
    """Run a replica, and write a line for each event."""
    node.enter()
    warnings.simplefilter("ignore")
    logging.disable()
    BaseHTTPRequestHandler.log_message = lambda *_: None  # type: ignore[method-assign]  # silences it
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    store = TCPStore(node.address, 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=PATIENCE)
    own = FACES[face](
        {
            "min_replica_size": 1,
            "timeout": patience,
            "quorum_timeout": timedelta(seconds=60),
            "rank": 0,
            "world_size": 1,
            "store_addr": node.address,
            "store_port": store.port,
            "lighthouse_addr": lighthouse,
            "replica_id": name,
            "hostname": node.address,
        }
    )
    with path.open("a", buffering=1) as file:

        def note(event: str, **more: Any) -> None:
            file.write(json.dumps({"event": event, "time": time.monotonic(), **more}) + "\n")

        note("ready")
        while True:
            own.begin()
            x = torch.randn(16, WIDTH)
            (own.model(x) - x.flip(1)).square().mean().backward()
            time.sleep(STEP_SECONDS)
            committed = own.finish()
            quorum, step, size = own.counts()
            values = [p.detach().numpy().tobytes() for p in own.model.parameters()]
            digest = hashlib.sha256(b"".join(values)).hexdigest()
            note("committed" if committed else "failed", quorum=quorum, step=step, size=size, digest=digest)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
