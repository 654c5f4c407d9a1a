"""Prepares the process for running a page, and cleans up after it."""

import socket

import pytest

from qcomp.core import registry as compressors
from qcomp.core.mean.topologies import registry as topologies


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """Provide an empty folder, the environment of a single torchrun rank, and registries that are restored later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compressors, "_classes", dict(compressors._classes))
    monkeypatch.setattr(topologies, "_registered", dict(topologies._registered))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
