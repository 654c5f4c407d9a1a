"""A step among replicas of torchft is the same under autocast."""

import os

import pytest

pytest.importorskip("torch")
os.environ.setdefault("RUST_LOG", "error")  # torchft reads it at import
pytest.importorskip("torchft", reason="it is for Linux only")

import torch

import qcomp
import qcomp.torch
import qcomp.torch.ft
from tests.torch_face.ft_threads import Lighthouse


def steps_of(enabled):
    def main(replica, manager, group):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 96).reshape(8, 12).clone())
        alone = qcomp.comm.LocalCommunicator.alone()
        inner = qcomp.torch.Muon([p], lr=0.1, whiten_steps=qcomp.DoublingIntervals(1), comm=alone)
        optimizer = qcomp.torch.ft.Elastic(inner, manager, group)
        while optimizer.state.step < 4:
            optimizer.zero_grad()
            p.grad = torch.sin(torch.arange(96.0) * (optimizer.state.step + replica + 1)).reshape(8, 12)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                optimizer.step()
        return p.detach().numpy().tobytes()

    return Lighthouse(main, None, follows=False).run(2)


@pytest.mark.timeout(120)
def test_a_step_under_autocast_equals_one_outside():
    assert steps_of(True) == steps_of(False)
