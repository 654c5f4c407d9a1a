"""Ordinary scripts of training frameworks, with one of our optimizers in them."""

import pytest

torch = pytest.importorskip("torch")

import qcomp.torch  # noqa: E402

CLIP, RATE = 0.5, 0.1


def sgd(params, **options):
    """Return an optimizer whose first step has the length of the clipped gradient, times the rate."""
    return qcomp.torch.CompressedSGD(params, lr=RATE, compressor=qcomp.Identity(), exact=None, **options)


def loss_of(model, x):
    """Return a loss whose gradient is longer than the limit."""
    return 100 * model(x).square().mean()


def moved(model, before):
    """Return how far the parameters are from earlier ones."""
    return (
        torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm().item()
    )


def values(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "by"), [("32-true", "lightning"), ("bf16-mixed", "lightning"), ("bf16-mixed", "optimizer")]
)
@pytest.mark.filterwarnings("ignore")
def test_clipping_under_lightning(precision, by):
    """In mixed precision Lightning clips no optimizer that handles the scale of gradients; `clip_norm` always works."""
    lightning = pytest.importorskip("lightning")
    network = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    before = values(network)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network

        def training_step(self, batch, _):
            return loss_of(self.network, batch[0])

        def configure_optimizers(self):
            return sgd(self.parameters(), clip_norm=CLIP if by == "optimizer" else None)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        precision=precision,
        gradient_clip_val=CLIP if by == "lightning" else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    if (precision, by) == ("bf16-mixed", "lightning"):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            trainer.fit(Module(), batches)
        return
    trainer.fit(Module(), batches)
    assert moved(network, before) == pytest.approx(RATE * CLIP, rel=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_accelerate_clips_in_mixed_precision():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    before = values(model)
    accelerator.backward(loss_of(model, torch.randn(4, 8)))
    accelerator.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    assert moved(model, before) == pytest.approx(RATE * CLIP, rel=1e-3)


def test_gradients_that_a_scaler_has_unscaled_may_be_clipped():
    """As Lightning and accelerate do with float16."""
    model = torch.nn.Linear(8, 8)
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = values(model)
    scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    assert moved(model, before) == pytest.approx(RATE * CLIP, rel=1e-3)
    now = values(model)
    scaler.scale(loss_of(model, torch.full((4, 8), torch.inf))).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), now, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["pure", "numba"])
def test_a_compiled_function_may_make_the_step(kernels):
    """torch.compile broke in the kernels: it gave them arrays of its own."""
    if kernels == "numba":
        pytest.importorskip("numba")
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 16)
        optimizer = qcomp.torch.OneBitAdam(
            model.parameters(), lr=0.01, betas=(0.9, 0.9), freeze=2, exact=None, watch=None
        )

        def whole(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        step = torch.compile(whole, backend="eager") if compiled else whole
        with qcomp.backends.use(kernels):
            for number in range(4):
                step(torch.full((4, 32), 1.0 + number))
        ends.append(values(model))
    assert all(map(torch.equal, *ends))
