"""Benchmarks are programs beside the package; they import each other from their folder."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def run_program(monkeypatch, tmp_path):
    """Run the ``main`` of a benchmark with options; return the folder that it wrote to."""
    threads = torch.get_num_threads()

    def run(program, *options):
        monkeypatch.setattr(sys, "argv", [program.__name__, "--out", str(tmp_path), *options])
        program.main()
        return tmp_path

    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def allowed():
    """Skip unless this process may make network namespaces; containers often give root but refuse them, so try it.

    Nothing can replace the kernel's queues. Tests without root check the rest of the benchmark.
    """
    from network import shaped

    try:
        with shaped.shaped_network(1, None):
            pass
    except shaped.NetworkError as error:
        pytest.skip(reason=f"only root can shape a network, and only the benchmark needs one: {error}")
