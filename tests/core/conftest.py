"""A topology that is registered for one test."""

import pytest

from qcomp import topologies
from qcomp.core.mean.topologies import registry
from tests.core.tree import Tree


@pytest.fixture
def tree(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    return topologies.register(Tree())
