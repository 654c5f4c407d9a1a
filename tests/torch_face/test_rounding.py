"""A model in bfloat16 ends at the loss of float32 if its parameters are rounded stochastically, and only then."""

import warnings

import pytest
import torch

import qcomp
import qcomp.torch

WEIGHTS, STEPS = 512, 100


def trained(dtype, rounding, freeze):
    """Return the loss after a training with gains that begin at 1 and end within 0.1 of it."""
    draws = torch.Generator().manual_seed(0)
    target = 1 + 0.2 * (torch.rand(WEIGHTS, generator=draws) - 0.5)
    noise = 0.15 * torch.randn(WEIGHTS, generator=draws)
    examples = torch.stack([target + noise, target - noise])  # so no gains have a loss of 0
    gain = torch.nn.Parameter(torch.ones(WEIGHTS, dtype=dtype))
    optimizer = qcomp.torch.OneBitAdam(
        [gain],
        lr=1.8e-3,
        betas=(0.9, 0.95),
        freeze=freeze,
        exact=None,
        rounding=rounding,
        comm=qcomp.comm.LocalCommunicator.alone(),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def loss():
        return (gain.float() - examples).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an early freeze, and of gains that rest
        for _ in range(STEPS):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return loss().item()


@pytest.mark.parametrize("freeze", [STEPS, 50], ids=["exact", "1-bit"])
def test_the_loss_is_that_of_float32(freeze):
    of_float32 = trained(torch.float32, "nearest", freeze)
    assert trained(torch.bfloat16, "stochastic", freeze) == pytest.approx(of_float32, rel=0.01)
    assert trained(torch.bfloat16, "nearest", freeze) > 1.05 * of_float32
