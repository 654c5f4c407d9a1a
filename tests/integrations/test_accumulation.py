"""A step of several microbatches exchanges as often as a step of one, and as many bytes, under every framework."""

import pytest

pytest.importorskip("torch")

JOB = """
import logging
import qcomp.torch
from torch.utils.data import DataLoader, TensorDataset
warnings.simplefilter("ignore")
logging.disable()  # the ranks fail if they write to stderr
STEPS = 4
DATA = torch.randn(64, 33, generator=torch.Generator().manual_seed(me))
exchanges = []
for verb in ("_exchange", "_start"):
    def counted(self, *args, whole=getattr(qcomp.comm.TorchCommunicator, verb)):
        exchanges.append(self)
        return whole(self, *args)
    setattr(qcomp.comm.TorchCommunicator, verb, counted)

def optimizer_of(model, wrapped=None):
    if {attaches}:
        return qcomp.torch.CompressedSGD(model.parameters(), lr=0.01, model=wrapped, exact=None)
    return torch.optim.SGD(model.parameters(), lr=0.01)

def hooked(model):
    if not {attaches}:
        ddp.inside(model).register_comm_hook(*ddp.hook(qcomp.QSGD(levels=7), model, exact=None, exact_iterations=0))

def loss_of(model, x):
    return model(x).square().mean()

def plain(micro):
    model = wrapped()
    hooked(model)
    optimizer = optimizer_of(model, model)
    for number in range(STEPS * micro):
        model.require_backward_grad_sync = number % micro == micro - 1
        loss_of(model, DATA[:2]).backward()
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()

def accelerate(micro):
    from accelerate import Accelerator, state
    state.GradientState._reset_state()
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=micro), network()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    hooked(model)
    if {attaches}:
        optimizer.optimizer.attach(model)
    for number in range(STEPS * micro):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, DATA[:2]))
            optimizer.step()
            optimizer.zero_grad()

def fabric(micro):
    from lightning.fabric import Fabric
    fabric, model = Fabric(accelerator="cpu", devices=n, strategy="ddp"), network()
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer_of(model))
    hooked(model)
    if {attaches}:
        optimizer.attach(model)
    for number in range(STEPS * micro):
        last = number % micro == micro - 1
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(loss_of(model, DATA[:2]))
        if last:
            optimizer.step()
            optimizer.zero_grad()

def lightning(micro):
    import lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()
        def training_step(self, batch, _):
            return loss_of(self.network, batch[0])
        def configure_optimizers(self):
            model = self.trainer.strategy.model
            hooked(model)
            return optimizer_of(self, model)
    strategy = lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
    silent = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=n, strategy=strategy, max_steps=STEPS,
        accumulate_grad_batches=micro, **silent)
    trainer.fit(Module(), DataLoader(TensorDataset(DATA), 2))

def transformers(micro):
    from transformers import Trainer, TrainingArguments
    from qcomp.integrations.transformers import AttachOptimizer, CompressGradients
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network()
        def forward(self, x, labels):
            return {{"loss": loss_of(self.network, x)}}
    args = TrainingArguments({folder!r}, max_steps=STEPS, per_device_train_batch_size=2, max_grad_norm=0,
        gradient_accumulation_steps=micro, use_cpu=True, ddp_backend="gloo", ddp_find_unused_parameters=False,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
    sgd = (qcomp.torch.CompressedSGD, {{"exact": None}}) if {attaches} else (torch.optim.SGD, {{}})
    trainer = Trainer(Module(), args, optimizer_cls_and_kwargs=sgd,
        train_dataset=[{{"x": x, "labels": x}} for x in DATA])
    trainer.add_callback(AttachOptimizer(trainer) if {attaches} else
        CompressGradients(trainer, qcomp.QSGD(levels=7), exact=None, exact_iterations=0))
    trainer.train()

def cost(micro):
    exchanges.clear()
    {framework}(micro)
    return len(exchanges), sum(comm.bytes_sent for comm in set(exchanges))
once, several = cost(1), cost(3)
assert once == several and once[0] >= STEPS, (once, several)
"""

CASES = [
    pytest.param(framework, attaches, marks=pytest.mark.exhaustive if attaches else pytest.mark.slow)
    for framework in ("accelerate", "fabric", "lightning", "transformers")
    for attaches in (False, True)
]


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("framework", "attaches"),
    [("plain", True), pytest.param("plain", False, marks=pytest.mark.slow), *CASES],
)
def test_a_step_of_three_microbatches_exchanges_once(said, framework, attaches, tmp_path):
    if framework != "plain":
        pytest.importorskip({"fabric": "lightning"}.get(framework, framework))
    said(2, JOB.format(framework=framework, attaches=attaches, folder=str(tmp_path)), timeout=200.0)
