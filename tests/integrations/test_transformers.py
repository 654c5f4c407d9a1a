"""Callbacks for the Trainer: a run that resumes from a checkpoint ends with the bits of one that never stopped."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

CODE = """
import hashlib, sys, warnings
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
import qcomp, qcomp.torch
from qcomp.integrations.transformers import AttachOptimizer, CompressGradients

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 2000), nn.Tanh(), nn.Linear(2000, 1))

    def forward(self, x, labels):
        return {{"loss": (self.layers(x) - labels).square().mean()}}

draws = torch.Generator().manual_seed(5)
data = [{{"x": torch.randn(8, generator=draws), "labels": torch.randn(1, generator=draws)}} for _ in range(48)]

def run(resume, clip={clip}):
    args = TrainingArguments(
        "{folder}", max_steps=8, save_steps=5, per_device_train_batch_size=3, max_grad_norm=clip, use_cpu=True,
        ddp_backend="gloo", ddp_find_unused_parameters=False, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, lr_scheduler_type="constant", learning_rate=.01, logging_strategy="no",
    )
    one_bit = qcomp.torch.OneBitAdam, {{"lr": .01, "betas": (.9, .9), "freeze": 3}}
    sgd = torch.optim.SGD, {{"lr": .01}}
    trainer = Trainer(Model(), args, train_dataset=data, optimizer_cls_and_kwargs=one_bit if {attach} else sgd)
    trainer.add_callback(
        AttachOptimizer(trainer) if {attach} else CompressGradients(trainer, qcomp.ScaledSign(), exact=None)
    )
    trainer.train(resume_from_checkpoint=resume)
    values = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()

"""


def code(folder, attach):
    return CODE.format(folder=folder, attach=attach, clip=0.0 if attach else 1.0)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("attach", [False, True], ids=["hook", "attach"])
def test_a_run_resumes_with_the_same_bits(torch_ranks, tmp_path, attach):
    both = "whole, resumed = run(None), run('{0}/checkpoint-5')\nassert resumed == whole\nprint(whole)"
    ranks = torch_ranks(2, code(tmp_path, attach) + both.format(tmp_path), timeout=150)
    assert len({rank.out.splitlines()[-1] for rank in ranks}) == 1


@pytest.mark.timeout(200)
def test_a_checkpoint_without_the_state_of_the_hook_is_told(torch_ranks, tmp_path):
    job = """
run(None)
import pathlib
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    pathlib.Path("{0}/checkpoint-5/qcomp_hook.pt").unlink()
torch.distributed.barrier()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    run("{0}/checkpoint-5")
assert "has no qcomp_hook.pt" in "".join(str(one.message) for one in told)
"""
    torch_ranks(2, code(tmp_path, False) + job.format(tmp_path), timeout=150)


@pytest.mark.timeout(200)
def test_clipping_averaged_momenta_is_refused_at_the_start(torch_ranks, tmp_path):
    job = """
try:
    run(None, clip=.5)
except ValueError as error:
    assert "pass it clip_norm=0.5" in str(error)
else:
    raise AssertionError
"""
    torch_ranks(2, code(tmp_path, True) + job, timeout=150)
