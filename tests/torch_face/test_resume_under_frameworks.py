"""Training resumes bit for bit from the checkpoints of frameworks, which load the optimizer at moments of their own."""

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

HEAD = """
import os, warnings
import torch
from torch import nn
from torch.utils.data import Dataset
import qcomp, qcomp.torch

warnings.simplefilter("error", UserWarning)
warnings.filterwarnings("ignore", "the variance is frozen after|the variance of .* no longer fits")
warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers|Checkpoint directory .* exists")
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TOTAL, STOP = 6, 3
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.9), "freeze": 2, "compressor": qcomp.ScaledSign(bucket_size=64),
            "exact": qcomp.ExactBelow(100)}

class Data(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, number):
        return {"x": torch.randn(20, generator=torch.Generator().manual_seed(number))}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(20, 31), nn.Tanh(), nn.LayerNorm(31), nn.Linear(31, 20))
    def forward(self, x, labels=None):
        out = self.layers(x)
        return {"loss": (out - x.flip(-1)).square().mean(), "logits": out}

def content(model, optimizer):
    state = optimizer.core_state
    arrays = [*state.momentum, *state.variance, *state.exchange.worker, *state.exchange.server]
    arrays += [x for kind in sorted(state.arrays) for x in state.arrays[kind]]
    assert optimizer._overlapped and state.stage != "warmup" and state.step == TOTAL, (state.stage, state.step)
    assert state.stage == "local" or any(x.any() for x in state.exchange.worker), "nothing is owed"
    return [x.detach().numpy().tobytes() for x in [*model.parameters(), *arrays]]
"""

TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Compress(TrainerCallback):
    gathers = True
    def on_train_begin(self, *_, **__):
        self.trainer.optimizer.optimizer.attach(self.trainer.model_wrapped)
    def on_step_end(self, args, state, control, **_):
        if control.should_save and self.gathers:
            self.trainer.optimizer.optimizer.gather_states()

def trained(folder, steps, resume=None, gathers=True):
    compress, model = Compress(), Model()
    compress.gathers = gathers
    trainer = Trainer(
        model,
        TrainingArguments(
            folder, max_steps=TOTAL, per_device_train_batch_size=4, learning_rate=0.01, weight_decay=0.1, use_cpu=True,
            ddp_backend="gloo", ddp_find_unused_parameters=False, max_grad_norm=0.0, report_to=[], save_steps=STOP,
            save_strategy="steps", logging_strategy="no", dataloader_pin_memory=False, disable_tqdm=True, seed=3),
        train_dataset=Data(), callbacks=[compress],
        optimizer_cls_and_kwargs=(getattr(qcomp.torch, name), SETTINGS))
    compress.trainer = trainer
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step >= steps
    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer.optimizer.optimizer

whole = content(*trained(f"{folder}/whole", TOTAL))
trained(f"{folder}/part", STOP)
assert content(*trained(f"{folder}/part", TOTAL, f"{folder}/part/checkpoint-3")) == whole
if n > 1:
    trained(f"{folder}/alone", STOP, gathers=False)
    try:
        trained(f"{folder}/alone", TOTAL, f"{folder}/alone/checkpoint-3")
    except (ValueError, qcomp.MismatchError) as error:
        assert "call gather_states() before it saves" in str(error), error
    else:
        raise AssertionError("only the state of rank 0 was saved")
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)

def made():
    model = accelerator.prepare(Model())
    optimizer = getattr(qcomp.torch, name)(model.parameters(), model=model, **SETTINGS)
    accelerator.register_save_state_pre_hook(lambda *_: optimizer.gather_states())
    return model, accelerator.prepare(optimizer)

def train(model, optimizer, steps):
    for step in steps:
        draws = torch.Generator().manual_seed(100 * step + me)
        accelerator.backward(model(torch.randn(4, 20, generator=draws))["loss"])
        optimizer.step()
        optimizer.zero_grad()

model, optimizer = made()
train(model, optimizer, range(STOP))
accelerator.save_state(folder)
train(model, optimizer, range(STOP, TOTAL))
whole = content(model, optimizer.optimizer)
accelerator.free_memory()
model, optimizer = made()
accelerator.load_state(folder)
train(model, optimizer, range(STOP, TOTAL))
assert content(model, optimizer.optimizer) == whole
"""

LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Subset

epoch = Subset(Data(), range(me, 4 * n * STOP, n))  # Lightning resumes where one has ended

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = Model()
    def training_step(self, batch, _):
        return self.inner(**batch)["loss"]
    def configure_optimizers(self):
        return getattr(qcomp.torch, name)(self.parameters(), model=self.trainer.strategy.model, **SETTINGS)
    def on_save_checkpoint(self, checkpoint):
        optimizer = self.trainer.optimizers[0]
        optimizer.gather_states()
        checkpoint["optimizer_states"] = [optimizer.state_dict()]

def trained(steps, save=None, resume=None):
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=n, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=steps // STOP,
        logger=False, use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False)
    trainer.fit(module, DataLoader(epoch, batch_size=4), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return module, trainer.optimizers[0]

whole = content(*trained(TOTAL))
trained(STOP, save=f"{folder}/part.ckpt")
assert content(*trained(TOTAL, resume=f"{folder}/part.ckpt")) == whole
"""

OF = {"transformers": TRAINER, "accelerate": ACCELERATE, "lightning": LIGHTNING}


def run(ranks, code):
    """Run code under torchrun; a job that fails or takes too long fails the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with subprocess.Popen(
        [*command, "--no-python", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as job:
        try:
            out, _ = job.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            pytest.fail(f"the job took too long:\n{job.communicate()[0]}")
    assert job.returncode == 0, "\n".join(line for line in out.splitlines() if "Error" in line) + out[-3000:]


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("framework", "name", "ranks"),
    [
        ("transformers", "OneBitAdam", 2),
        ("accelerate", "OneBitAdam", 2),
        ("lightning", "OneBitAdam", 2),
        *(
            pytest.param(framework, name, ranks, marks=pytest.mark.exhaustive)
            for framework in OF
            for name, ranks in (("OneBitAdam", 1), ("ZeroOneAdam", 2))
        ),
    ],
)
def test_a_restart_goes_on_bit_for_bit(tmp_path, framework, name, ranks):
    """Rank 0 saves for all. The Trainer loads the optimizer before a callback can attach the wrapped model."""
    pytest.importorskip(framework)
    changes = "SETTINGS['sync_steps'] = lambda step: step % 4 == 0" if name == "ZeroOneAdam" else ""
    run(ranks, f"folder, name = {str(tmp_path)!r}, {name!r}\n{HEAD}{changes}\n{OF[framework]}")
