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
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained(f"{folder}/alone", STOP, gathers=False)
    told = [str(w.message) for w in told if "gather_states" in str(w.message)]
    assert len(told) == (me == 0) and all("of Hugging Face saves the state of only" in t for t in told), told
    try:
        trained(f"{folder}/alone", TOTAL, f"{folder}/alone/checkpoint-3")
    except (ValueError, qcomp.MismatchError) as error:
        assert "call gather_states() on all ranks before that rank saves" in str(error), error
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
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    hooks = accelerator._save_model_state_pre_hook
    kept = dict(hooks)
    hooks.clear()
    accelerator.save_state(f"{folder}/forgotten")
    optimizer.optimizer._saves.forget()
    accelerator.save_state(f"{folder}/forgotten")
    hooks.update(kept)
assert len([w for w in told if "Accelerate saves the state of only one rank" in str(w.message)]) == (n > 1), told
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

FABRIC = """
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

fabric = Fabric(accelerator="cpu", devices=n, strategy=DDPStrategy(process_group_backend="gloo"))
fabric.launch()

def made():
    model = Model()
    optimizer = getattr(qcomp.torch, name)(model.parameters(), **SETTINGS)
    model, wrapped = fabric.setup(model, optimizer)
    wrapped.optimizer.attach(model._forward_module)
    return model, wrapped

def train(model, optimizer, steps):
    for step in steps:
        draws = torch.Generator().manual_seed(100 * step + me)
        fabric.backward(model(torch.randn(4, 20, generator=draws))["loss"])
        optimizer.step()
        optimizer.zero_grad()

model, optimizer = made()
train(model, optimizer, range(STOP))
fabric.save(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer})
train(model, optimizer, range(STOP, TOTAL))
whole = content(model, optimizer.optimizer)
model, optimizer = made()
fabric.load(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer})
train(model, optimizer, range(STOP, TOTAL))
assert content(model, optimizer.optimizer) == whole
"""

OF = {"transformers": TRAINER, "accelerate": ACCELERATE, "lightning": LIGHTNING, "fabric": FABRIC}


END = """
torch.distributed.destroy_process_group()  # without it, torch can abort at exit while its threads still run
"""


def run(ranks, code):
    """Run code under torchrun; a job that fails or takes too long fails the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with subprocess.Popen(
        [*command, "--no-python", sys.executable, "-c", code + END],
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
        ("fabric", "OneBitAdam", 2),
        *(
            pytest.param(framework, name, ranks, marks=pytest.mark.exhaustive)
            for framework in OF
            for name, ranks in (("OneBitAdam", 1), ("ZeroOneAdam", 2))
        ),
    ],
)
def test_a_restart_goes_on_bit_for_bit(tmp_path, framework, name, ranks):
    """Rank 0 saves for all. The Trainer loads the optimizer before a callback can attach the wrapped model."""
    pytest.importorskip({"fabric": "lightning"}.get(framework, framework))
    changes = "SETTINGS['sync_steps'] = lambda step: step % 4 == 0" if name == "ZeroOneAdam" else ""
    run(ranks, f"folder, name = {str(tmp_path)!r}, {name!r}\n{HEAD}{changes}\n{OF[framework]}")


BESIDE = """
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from qcomp.integrations import ddp

EXACT = qcomp.ExactBelow(100)

def compressed(model, optimizer):
    if name == "hook":
        state, hook = ddp.hook(qcomp.ScaledSign(64), model, exact=EXACT)
        model.register_comm_hook(state, hook)
        return state
    model.register_comm_hook(None, noop_hook)
    loop = qcomp.outer.diloco(2, warmup=1, compressor=qcomp.ScaledSign(64), exact=EXACT)
    return qcomp.torch.OuterLoop(model.module, optimizer, loop)

def content(model, thing):
    state = thing._running.state if name == "hook" else thing.core_state
    assert state.step and any(x.any() for x in state.exchange.worker), "nothing is owed"
    arrays = [*state.exchange.worker, *state.exchange.server]
    arrays += [x for kind in sorted(state.arrays) for x in state.arrays[kind]]
    return state.step, state.stage, [x.detach().numpy().tobytes() for x in [*model.parameters(), *arrays]]
"""

TRAINER_BESIDE = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Compress(TrainerCallback):
    saves, at_save, begun = True, None, None
    def on_train_begin(self, args, state, control, **_):
        self.thing = compressed(self.trainer.model_wrapped, self.trainer.optimizer.optimizer)
        file = f"{args.output_dir}/checkpoint-{state.global_step}/compression.pt"
        if os.path.exists(file):
            self.thing.load_state_dict(torch.load(file))
            self.begun = content(self.trainer.model, self.thing)
    def on_save(self, args, state, control, **_):
        if not self.saves:
            return
        self.at_save = content(self.trainer.model, self.thing)
        self.thing.gather_states()
        if state.is_world_process_zero:
            torch.save(self.thing.state_dict(), f"{args.output_dir}/checkpoint-{state.global_step}/compression.pt")
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.last

def trained(folder, steps, resume=None, saves=True):
    compress, model = Compress(), Model()
    compress.last, compress.saves = steps, saves
    trainer = Trainer(
        model,
        TrainingArguments(
            folder, max_steps=TOTAL, per_device_train_batch_size=4, learning_rate=0.01, use_cpu=True,
            ddp_backend="gloo", ddp_find_unused_parameters=False, report_to=[], save_steps=STOP,
            save_strategy="steps", logging_strategy="no", dataloader_pin_memory=False, disable_tqdm=True, seed=3),
        train_dataset=Data(), callbacks=[compress])
    compress.trainer = trainer
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    told = [str(w.message) for w in told if "OuterLoop" in str(w.message) or "gather_states" in str(w.message)]
    return compress, content(model, compress.thing), told

first, _, told = trained(f"{folder}/part", STOP)
assert not told, told
second, end, told = trained(f"{folder}/part", TOTAL, f"{folder}/part/checkpoint-3")
assert not told, told
assert second.begun == first.at_save
if name == "hook":
    assert end == trained(f"{folder}/whole", TOTAL)[1]
else:
    _, _, told = trained(f"{folder}/alone", TOTAL - 1, saves=False)
    assert len(told) == (me == 0), told
    assert all("saved after step 3, but the state of its OuterLoop was not" in t for t in told), told
    _, _, told = trained(f"{folder}/alone", TOTAL, f"{folder}/alone/checkpoint-3", saves=False)
    assert "a warm-up of 1 steps begins, but optimizer 0 has made steps before" in told[0], told
"""

ACCELERATE_BESIDE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)

def made():
    model = accelerator.prepare(Model())
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    thing = compressed(model, optimizer)
    accelerator.register_save_state_pre_hook(lambda *_: thing.gather_states())
    accelerator.register_for_checkpointing(thing)
    return model, optimizer, thing

def train(model, optimizer, steps):
    for step in steps:
        draws = torch.Generator().manual_seed(100 * step + me)
        accelerator.backward(model(torch.randn(4, 20, generator=draws))["loss"])
        optimizer.step()
        optimizer.zero_grad()

model, optimizer, thing = made()
train(model, optimizer, range(STOP + 2))
at_save = content(model, thing)
accelerator.save_state(folder)
train(model, optimizer, range(STOP + 2, TOTAL + 2))
whole = content(model, thing)
accelerator.free_memory()
accelerator._custom_objects.clear()
accelerator._save_model_state_pre_hook.clear()
del model, optimizer, thing
model, optimizer, thing = made()
accelerator.load_state(folder)
assert content(model, thing) == at_save
train(model, optimizer, range(STOP + 2, TOTAL + 2))
if name == "hook":
    assert content(model, thing) == whole
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["hook", "outer"])
@pytest.mark.parametrize(
    ("framework", "code"), [("transformers", TRAINER_BESIDE), ("accelerate", ACCELERATE_BESIDE)]
)
def test_what_is_beside_an_optimizer_is_saved_by_rank_0(tmp_path, framework, code, name):
    """The state of a hook, or of an outer loop. Inner optimizers of an outer loop go on from that of rank 0."""
    pytest.importorskip(framework)
    run(2, f"folder, name = {str(tmp_path)!r}, {name!r}\n{HEAD}{BESIDE}{code}")
