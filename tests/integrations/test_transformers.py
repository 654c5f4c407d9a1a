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

one_bit = qcomp.torch.OneBitAdam, {{"lr": .01, "betas": (.9, .9), "freeze": 3}}
sgd = torch.optim.SGD, {{"lr": .01}}

def run(*resumed, clip={clip}, folder="{folder}", optimizer=one_bit if {attach} else sgd, **settings):
    args = TrainingArguments(
        folder, max_steps=8, save_steps=5, per_device_train_batch_size=3, max_grad_norm=clip, use_cpu=True,
        ddp_backend="gloo", ddp_find_unused_parameters=False, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, lr_scheduler_type="constant", learning_rate=.01, logging_strategy="no", **settings
    )
    trainer = Trainer(Model(), args, train_dataset=data, optimizer_cls_and_kwargs=optimizer)
    trainer.add_callback(
        AttachOptimizer(trainer) if {attach} else CompressGradients(trainer, qcomp.ScaledSign(), exact=None)
    )
    for resume in resumed:
        trainer.train(resume_from_checkpoint=resume)
    values = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()

"""


def code(folder, attach):
    return CODE.format(folder=folder, attach=attach, clip=0.0 if attach else 1.0)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("attach", [False, True], ids=["hook", "attach"])
def test_a_run_resumes_with_the_same_bits(torch_ranks, tmp_path, attach):
    both = """
saved = "{0}/checkpoint-5"
whole, resumed, again = run(None), run(saved), run(None, saved)
elsewhere = run(saved, folder="{0}/elsewhere", resume_from_checkpoint=saved)
assert whole == resumed == again == elsewhere
print(whole)
"""
    ranks = torch_ranks(2, code(tmp_path, attach) + both.format(tmp_path), timeout=150)
    assert len({rank.out.splitlines()[-1] for rank in ranks}) == 1


@pytest.mark.timeout(200)
def test_the_state_of_the_hook_is_that_of_the_checkpoint(torch_ranks, tmp_path):
    """The file of another run of the same folder is told, and one rank's file serves all."""
    job = """
import shutil
saved = "{0}/checkpoint-5"
whole = run(None)
run(None, folder="{0}/other", seed=7)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    run(saved, folder="{0}/other")
assert "no qcomp_hook.pt belongs to the checkpoint of step 5" in "".join(str(one.message) for one in told)
if torch.distributed.get_rank() == 1:
    shutil.copytree(saved, saved := "{0}/bare", ignore=shutil.ignore_patterns("qcomp_hook.pt"))
assert whole == run(saved, folder="{0}/empty", resume_from_checkpoint=saved)
"""
    torch_ranks(2, code(tmp_path, False) + job.format(tmp_path), timeout=150)


@pytest.mark.timeout(200)
def test_what_cannot_be_averaged_is_refused_at_the_start(torch_ranks, tmp_path):
    job = """
for wrong, cure in (({{"clip": .5}}, "pass clip_norm=0.5 to"), ({{"optimizer": sgd}}, "expected one of qcomp.torch")):
    try:
        run(None, **wrong)
    except (ValueError, TypeError) as error:
        assert cure in str(error)
    else:
        raise AssertionError
"""
    torch_ranks(2, code(tmp_path, True) + job.format(), timeout=150)
