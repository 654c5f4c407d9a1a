"""Reads the results that the programs of the ranks have written."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from network.launch import LINKS
from network.methods import COMPUTE
from qcomp.planning import Measured

__all__ = ["Results", "Run"]


@dataclass(frozen=True)
class Run:
    """The times of all methods on one link."""

    model: str
    ranks: int
    link: str
    rounds: int
    machine: dict[str, Any]
    shapes: list[tuple[int, ...]]
    methods: dict[str, dict[str, Any]]
    failures: dict[str, str]
    alone: dict[str, dict[str, Any]]
    """The times of methods when every rank trains alone; empty on links that do not test the cost model."""
    ready: list[float]
    """When each bucket of gradients is ready, as shares of a step without messages; only with `alone`."""

    def seconds(self, method: str, *, alone: bool = False) -> float:
        """Return the median of a step, or of one in which every rank trains alone."""
        if method == COMPUTE or not alone:
            return float(self.methods[method]["seconds"]["median"])
        return float(self.alone[method]["seconds"]["median"])

    @property
    def compute(self) -> float:
        """The median of a step without communication."""
        return self.seconds(COMPUTE)

    @property
    def averaging(self) -> list[str]:
        """The methods that average."""
        return [method for method in self.methods if method != COMPUTE]


class Results:
    """The files of a folder.

    Parameters
    ----------
    folder : Path
        Contains ``runs``, ``links``, ``exchange`` and ``loss``, any of which may be missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run_path(self, model: str, ranks: int, link: str) -> Path:
        """Return the file of a run."""
        return self.folder / "runs" / f"{model}-{ranks}-{link}.json"

    def link_path(self, ranks: int, link: str) -> Path:
        """Return the file of the measured inputs of the cost model."""
        return self.folder / "links" / f"{ranks}-{link}.json"

    def exchange_path(self, transport: str, ranks: int) -> Path:
        """Return the file of the exchanges over a transport."""
        return self.folder / "exchange" / f"{transport}-{ranks}.json"

    def loss_path(self, name: str) -> Path:
        """Return the file of a curve, or of the times of its stages."""
        return self.folder / "loss" / f"{name}.json"

    def runs(self, links: Sequence[str] = LINKS) -> list[Run]:
        """Return the runs on these links, by ranks and model."""
        found = [_run(path) for path in (self.folder / "runs").glob("*.json")]
        chosen = [run for run in found if run.link in links]
        return sorted(chosen, key=lambda run: (run.ranks, run.model, links.index(run.link)))

    def measured(self, run: Run) -> Measured | None:
        """Return the measured inputs of the cost model for a run's link, if any."""
        path = self.link_path(run.ranks, run.link)
        return Measured.load(path) if path.exists() else None

    def exchanges(self) -> list[dict[str, Any]]:
        """Return the exchanges, by transport and ranks."""
        found = [json.loads(path.read_text()) for path in (self.folder / "exchange").glob("*.json")]
        return sorted(found, key=lambda document: (document["transport"], document["ranks"]))


def _run(path: Path) -> Run:
    document = json.loads(path.read_text())
    return Run(**document | {"shapes": [tuple(shape) for shape in document["shapes"]]})
