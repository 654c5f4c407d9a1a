"""A small DCGAN that draws digits."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from scipy import linalg
from torch import nn
from torch.nn import functional

from convergence.digits import digits, draw
from convergence.task import Task

__all__ = ["AdversarialNetworkTask", "frechet_distance"]

LATENT = 32
WIDTH = 64
BATCH = 32
JUDGED = 2000
"""Number of pictures that are drawn for the metric."""


class AdversarialNetworkTask(Task):
    """A generator and a discriminator take turns; 0.2 million parameters, 32 pictures per rank and step.

    The metric is the Fréchet distance between the pixels of drawn and real digits, both taken as Gaussian: 0 for equal
    means and covariances.
    """

    name: ClassVar[str] = "adversarial_network"
    title: ClassVar[str] = "small DCGAN on digits"
    metric: ClassVar[str] = "Fréchet distance of the pixels"
    steps: ClassVar[int] = 1000
    learning_rate: ClassVar[float] = 1e-3
    betas: ClassVar[tuple[float, float]] = (0.5, 0.99)

    def build(self) -> Mapping[str, nn.Module]:
        """Return the two networks."""
        self.generator = nn.Sequential(
            nn.Linear(LATENT, 2 * WIDTH * 4, bias=False),
            nn.Unflatten(1, (2 * WIDTH, 2, 2)),
            norm(2 * WIDTH),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, stride=2, padding=1, bias=False),
            norm(WIDTH),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, stride=2, padding=1, bias=False),
            norm(2 * WIDTH),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(8 * WIDTH, 1),
        )
        for module in (*self.generator.modules(), *self.discriminator.modules()):
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
                nn.init.normal_(module.weight, std=0.05)
        return {"discriminator": self.discriminator, "generator": self.generator}

    def loss(self, network: str, step: int) -> torch.Tensor:
        """Return the discriminator's loss on real and drawn digits, or the generator's."""
        drawn = self.generator(latent(BATCH, (self.seed, self.rank, step, 1)))
        if network == "generator":
            return functional.softplus(-self.discriminator(drawn)).mean()
        pictures, _, _, _ = digits()
        real = pictures[draw(len(pictures), BATCH, (self.seed, self.rank, step))]
        of_real, of_drawn = self.discriminator(real), self.discriminator(drawn.detach())
        return functional.softplus(-of_real).mean() + functional.softplus(of_drawn).mean()

    def judge(self) -> float:
        """Return the distance between drawn digits, normalized by their own batch, and all real ones."""
        train, _, held_out, _ = digits()
        with torch.no_grad():
            drawn = self.generator(latent(JUDGED, (0,)))
        return frechet_distance(torch.cat([train, held_out]).flatten(1).numpy(), drawn.flatten(1).numpy())


def norm(features: int) -> nn.Module:
    """Return a batch norm without running statistics, so that every rank's networks are the same in each step."""
    return nn.BatchNorm2d(features, track_running_stats=False)


def latent(count: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return a generator's random input, which depends on a key alone."""
    return torch.from_numpy(np.random.default_rng(key).standard_normal((count, LATENT), dtype=np.float32))


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return |mean difference|^2 + trace(A + B - 2 (A B)^(1/2)) of the Gaussians fitted to two sets of rows."""
    covariance_a, covariance_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = linalg.sqrtm(covariance_a @ covariance_b)
    mean_part = float(((a.mean(axis=0) - b.mean(axis=0)) ** 2).sum())
    return mean_part + float(np.trace(covariance_a + covariance_b - 2 * np.real(root)))
