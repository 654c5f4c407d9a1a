"""Measures when the gradients of a step are ready, from which the cost model derives the possible overlap."""

import time
from statistics import median
from typing import Any

import torch
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from network.methods import BUCKET_MB
from network.models import Model, loss

__all__ = ["overlap", "readiness"]

WARM = 3


def readiness(model: Model, group: Any, rounds: int) -> list[float]:
    """Return when each bucket of gradients is ready, as the median share of a step that sends nothing.

    Parameters
    ----------
    model : Model
    group : ProcessGroup
        A group of this rank alone.
    rounds : int
    """
    marks: list[float] = []
    trained = DistributedDataParallel(
        model.make(), process_group=group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
    )
    trained.register_comm_hook(marks, _mark)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)
    batch, steps = model.batch(), []
    for _ in range(WARM + rounds):
        marks.clear()
        start = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(loss(trained, batch))
        optimizer.step()
        seconds = time.perf_counter() - start
        steps.append([(mark - start) / seconds for mark in marks])
    return [median(shares) for shares in zip(*steps[WARM:], strict=True)]


def _mark(marks: list[float], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    marks.append(time.perf_counter())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def overlap(ready: list[float]) -> tuple[float, int]:
    """Return the share of a step that sending may overlap with, and the number of pieces, as in `Job`.

    In the model m pieces become ready at equal intervals, the last one at the end of that share. So 1 - 1 / m of it
    lies between the first and the last.

    Examples
    --------
    >>> overlap([0.5, 0.8])
    (0.6, 2)
    """
    pieces = len(ready)
    if pieces < 2:
        return 0.0, 1
    return round(min(1.0, (ready[-1] - ready[0]) / (1 - 1 / pieces)), 3), pieces
