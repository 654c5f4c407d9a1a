"""The examples for authors: a custom compressor and a custom transport."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qcomp
from qcomp.core import registry
from qcomp.testing import contract_of

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def example(monkeypatch):
    """Import an example: ``example(name)``."""
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def run(name, timeout=200):
    return subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_the_compressor_has_at_most_40_lines():
    tree = ast.parse((EXAMPLES / "custom_compressor.py").read_text())
    (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    first = min(node.lineno for node in (cls, *cls.decorator_list))
    assert cls.end_lineno - first + 1 <= 40


@pytest.mark.parametrize("law", ["sound_traits", "same_bytes", "unbiased_to_the_last_draw", "cut_at_buckets"])
def test_the_compressor_keeps_the_quickly_checked_laws(example, law):
    contract_of(example("custom_compressor").TernGrad(bucket_size=64)).require(only=law)


@pytest.mark.slow
def test_training_with_it_lowers_the_loss(example):
    module = example("custom_compressor")
    before, after, sent = qcomp.comm.run_local(module.RANKS, module.train)[0]
    assert before > 0.9
    assert after < 0.15
    assert sent * 12 < 2 * (module.RANKS - 1) / module.RANKS * 4 * module.FEATURES * module.STEPS


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_the_compressor_keeps_every_promise():
    done = run("custom_compressor")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TernGrad keeps every promise\nloss 1.0")
    assert done.stderr == ""


def test_the_transport_trains_and_all_ranks_hold_the_same():
    done = run("custom_transport", timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.match(r"all 3 ranks hold identical weights: sha256 [0-9a-f]{16}\.\.\.\n", done.stdout)
    assert done.stderr == ""


@pytest.fixture
def loop_of_three(example):
    """Run a coroutine on each of three connected ranks: ``loop_of_three(main)``, main(peers) -> anything."""
    import asyncio

    module = example("custom_transport")

    def run_ranks(main):
        async def rank_main(rank, ports):
            peers = await module.connect(rank, ports)
            try:
                return await main(module, peers)
            finally:
                await peers.close()

        async def all_ranks():
            ports = [asyncio.get_running_loop().create_future() for _ in range(3)]
            ranks = [rank_main(rank, ports) for rank in range(3)]
            return await asyncio.wait_for(asyncio.gather(*ranks, return_exceptions=True), timeout=30)

        return asyncio.run(all_ranks())

    return run_ranks


@pytest.mark.slow
def test_the_transport_gives_the_results_of_a_communicator(loop_of_three):
    """Also for large messages, which fill the buffers of the streams, and for a mean that blocks nothing."""
    import numpy as np

    mean = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=64), "ring")
    values = [np.random.default_rng(rank).standard_normal(3_000_000).astype(np.float32) for rank in range(3)]

    async def rank_main(module, peers):
        x = values[peers.rank]
        state = await module.drive(mean.init_stages(x, rank=peers.rank, size=peers.size), peers)
        found, _ = await module.drive(mean.stages(x, state), peers)
        exact = qcomp.CompressedMean(qcomp.Identity(), feedback=False)
        state = await module.drive(exact.init_stages(x, rank=peers.rank, size=peers.size), peers)
        whole, _ = await module.drive(exact.stages(x, state), peers)
        return found.tobytes(), whole.tobytes()

    def with_communicator(comm):
        x = values[comm.rank]
        return mean(x, mean.init(x, comm), comm)[0].tobytes()

    expected = qcomp.comm.run_local(3, with_communicator)
    found = loop_of_three(rank_main)
    assert [one for one, _ in found] == expected
    assert len({whole for _, whole in found}) == 1


def test_the_transport_reports_a_message_of_another_size(loop_of_three):
    import numpy as np

    from qcomp.extend import AllGather

    async def rank_main(module, peers):
        send = np.zeros(5 if peers.rank == 1 else 4, dtype=np.uint8)
        return await peers.exchange(AllGather(send, (4, 5 if peers.rank == 1 else 4, 4)))

    results = loop_of_three(rank_main)
    texts = [str(error.exceptions[0]) for error in (results[0], results[2])]
    assert texts == [f"rank 1 sends 5 bytes; rank {rank} expects 4" for rank in (0, 2)]
