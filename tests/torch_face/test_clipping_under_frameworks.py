"""What frameworks clip by default or on request is warned of at the first step, long before it would be an error."""

import pytest

pytest.importorskip("torch")

from tests.torch_face.test_resume_under_frameworks import HEAD, run

WARNED = """
LONG = 100.0  # so that the norm is above the limit at once
class Long(Model):
    def forward(self, x, labels=None):
        found = super().forward(x, labels)
        return found | {"loss": LONG * found["loss"]}

def told_in(train):
    warnings.simplefilter("always", UserWarning)
    with warnings.catch_warnings(record=True) as told:
        train()
    found = [str(one.message) for one in told if "was changed after the backward pass" in str(one.message)]
    assert len(found) == 1 and "pass clip_norm= to the optimizer" in found[0], found
"""

TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments
import tempfile

class Compress(TrainerCallback):
    def on_train_begin(self, *_, **__):
        self.trainer.optimizer.optimizer.attach(self.trainer.model_wrapped)

compress = Compress()
trainer = Trainer(
    Long(),
    TrainingArguments(  # max_grad_norm is 1.0
        tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=4, use_cpu=True, ddp_backend="gloo",
        ddp_find_unused_parameters=False, report_to=[], save_strategy="no", logging_strategy="no",
        dataloader_pin_memory=False, disable_tqdm=True),
    train_dataset=Data(), callbacks=[compress],
    optimizer_cls_and_kwargs=(qcomp.torch.OneBitAdam, SETTINGS | {"freeze": 9}))
compress.trainer = trainer
told_in(trainer.train)
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(Long())
inner = qcomp.torch.OneBitAdam(model.parameters(), model=model, **SETTINGS | {"freeze": 9})
optimizer = accelerator.prepare(inner)

def train():
    for step in range(2):
        draws = torch.Generator().manual_seed(100 * step + me)
        accelerator.backward(model(torch.randn(4, 20, generator=draws))["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
told_in(train)
"""

LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = Long()
    def training_step(self, batch, _):
        return self.inner(**batch)["loss"]
    def configure_optimizers(self):
        model = self.trainer.strategy.model
        return qcomp.torch.OneBitAdam(self.parameters(), model=model, **SETTINGS | {"freeze": 9})

trainer = lightning.Trainer(
    accelerator="cpu", devices=n, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=2,
    gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False)
module = Module()
told_in(lambda: trainer.fit(module, DataLoader(Data(), batch_size=4)))
"""

OF = {"transformers": TRAINER, "accelerate": ACCELERATE, "lightning": LIGHTNING}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "framework",
    [
        "accelerate",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("transformers", "lightning")),
    ],
)
def test_clipping_is_warned_of(framework):
    pytest.importorskip(framework)
    run(2, f"{HEAD}{WARNED}\n{OF[framework]}")
