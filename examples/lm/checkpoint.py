"""Checkpoints of a data-parallel job: one file per rank and step; the last two steps are kept."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qcomp.checkpoint import write_whole
from qcomp.comm import Communicator

from .gather import gather

__all__ = ["CheckpointError", "Checkpoints"]

KEPT = 2
"""Two: if the job dies when only some ranks have written a step, the previous step is still complete on all ranks."""


class CheckpointError(Exception):
    """The existing checkpoints belong to another job."""


class Checkpoints:
    """The checkpoints of one run, in a folder that nodes may share.

    Parameters
    ----------
    folder
        Created if missing.
    comm
        Each of its ranks writes ``step-<step>.rank-<rank>-of-<size>.pt``. Residuals differ between ranks, so a
        checkpoint is complete only with the files of all ranks.
    """

    def __init__(self, folder: Path, comm: Communicator) -> None:
        self.folder = folder
        self._comm = comm

    def save(self, step: int, content: dict[str, Any]) -> None:
        """Write this rank's file of a step atomically, and delete files that are too old."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(step)
        write_whole(path, lambda file: torch.save(content, file))
        steps = self._own_steps()
        later = [other for other in steps if other > step]  # incomplete, or this run would have started there
        for other in [*steps[: -KEPT - len(later)], *later]:
            self._path(other).unlink()

    def last_step(self) -> int | None:
        """Return the newest step for which every rank has its file, the same on all ranks.

        Raises
        ------
        CheckpointError
            On all ranks, if all checkpoints were written by another number of ranks.
        """
        own = self._own_steps()[-KEPT:]
        sizes = {size for _, _, size in self._found()} - {self._comm.size}
        report = np.full(KEPT + 1, -1, np.int64)
        report[: len(own)] = own
        report[KEPT] = max(sizes, default=-1)
        reports = gather(self._comm, report)
        common = set.intersection(*(set(steps.tolist()) for steps in reports[:, :KEPT])) - {-1}
        other_size = reports[:, KEPT].max()
        if not common and other_size > 0:
            raise CheckpointError(
                f"the checkpoints in {self.folder} are of {other_size} ranks; this job has {self._comm.size}"
            )
        return max(common, default=None)

    def load(self, step: int) -> dict[str, Any]:
        """Read this rank's file of a step."""
        content: dict[str, Any] = torch.load(self._path(step), weights_only=True)
        return content

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.rank-{self._comm.rank}-of-{self._comm.size}.pt"

    def _own_steps(self) -> list[int]:
        mine = (self._comm.rank, self._comm.size)
        return sorted(step for step, *owner in self._found() if tuple(owner) == mine)

    def _found(self) -> list[tuple[int, int, int]]:
        """List the (step, rank, size) of all files."""
        pattern = re.compile(r"step-(\d+)\.rank-(\d+)-of-(\d+)\.pt")
        names = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = (pattern.fullmatch(path.name) for path in names)
        return [(int(m[1]), int(m[2]), int(m[3])) for m in matches if m]
