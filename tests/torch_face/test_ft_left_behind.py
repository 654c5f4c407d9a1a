"""A replica that the others have left behind, and that returns while another one dies."""

import os
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")
os.environ.setdefault("RUST_LOG", "error")  # torchft reads it at import
pytest.importorskip("torchft", reason="it is for Linux only")

import torch

import qcomp
import qcomp.torch
import qcomp.torch.ft
from tests.torch_face.ft_threads import Lighthouse, Strike

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:a state of . ranks resumes with"),
]

SLEEPER, VICTIM, END = 1, 2, 10


def main(replica: int, manager: Any, group: Any) -> dict[str, Any]:
    """Take some steps; after its first step, one replica misses some quorums of the others."""
    p = torch.nn.Parameter(torch.arange(40.0).reshape(8, 5) - replica)
    alone = qcomp.comm.LocalCommunicator.alone()
    inner = qcomp.torch.OneBitAdam([p], lr=1e-2, freeze=2, exact=None, comm=alone)
    optimizer = qcomp.torch.ft.Elastic(inner, manager, group)
    found: dict[str, Any] = {"steps": [], "reports": [], "begun": None, "last": 0}
    sleeps = replica == SLEEPER
    while optimizer.state.step < END:
        optimizer.zero_grad()
        if found["begun"] is None:
            found["begun"] = manager.exchanges
        if optimizer.report and optimizer.report not in found["reports"]:
            found["reports"].append(optimizer.report)
        if sleeps and optimizer.state.step == 1:
            sleeps = False
            manager.sleep(5)
        p.grad = torch.sin(p.detach() + replica + optimizer.state.step)
        found["last"] = manager.exchanges  # a replica that completed the last step ends, whatever others hold
        optimizer.step()
        found["steps"].append(optimizer.state.step)
    return found | {"end": p.detach().numpy().tobytes()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stride", [5, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_returning_replica_never_supplies_the_restored_state(stride):
    """A failed quorum does not make the returning replica count as up to date."""
    whole = Lighthouse(main, None, follows=False).run(3)
    assert 1 in [report["joined_ranks"] for report in whole[VICTIM]["reports"]]
    joined = 0
    for exchange in range(whole[VICTIM]["begun"], whole[VICTIM]["last"], stride):
        for reached in ([], [0], [SLEEPER], [0, SLEEPER])[: 4 if stride == 2 else 2]:
            found = Lighthouse(main, Strike(VICTIM, exchange, frozenset(reached)), follows=False).run(3)
            for one in found.values():
                assert not isinstance(one, BaseException), (exchange, reached, one)
            assert len({one["end"] for one in found.values()}) == 1
            assert all(after >= before - 1 for before, after in pairwise(found[0]["steps"]))
            joined += any(report["joined_ranks"] for report in found[0]["reports"])
    assert joined
