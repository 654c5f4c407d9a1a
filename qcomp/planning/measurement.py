"""The result of measurements on the ranks, in memory and in a file."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qcomp.planning.cluster import Cluster, Link
from qcomp.planning.machine import LowRankSpeed, Machine, Speed
from qcomp.planning.numbers_with_units import finite

_FORMAT = "qcomp-plan-1"


@dataclass(frozen=True)
class Measured:
    """The result of `measure`, equal on all ranks.

    Parameters
    ----------
    cluster : Cluster or None
        The measured ranks and their links; None with one rank.
    machine : Machine
        How fast the slowest rank encodes and decodes.
    compute : float or None
        Seconds of the caller's own step on the slowest rank, if one was timed.
    spreads : mapping of str to (float, float)
        The quartiles, in seconds, of the timings "latency", "transfer" and "compute".
    on_one_node : bool
        Whether all measured ranks share a node. Then the cluster's link is the link inside the node.
    """

    cluster: Cluster | None
    machine: Machine
    compute: float | None = None
    spreads: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    on_one_node: bool = False

    def __post_init__(self) -> None:
        if self.compute is not None and not 0 <= self.compute < math.inf:
            raise ValueError(f"compute is {self.compute!r}; expected seconds, at least 0")

    @property
    def document(self) -> dict[str, Any]:
        """The contents of the file that `save` writes, with None for infinity."""
        document: dict[str, Any] = finite({"format": _FORMAT, **asdict(self)})
        return document

    def save(self, path: str | Path) -> None:
        """Write a file that `load` reads."""
        Path(path).write_text(json.dumps(self.document, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Measured":
        """Read a file written by `save`.

        Raises
        ------
        ValueError
            If `save` did not write the file.
        """
        try:
            document = json.loads(Path(path).read_text())
            if not isinstance(document, dict):
                raise ValueError(f"it has a {type(document).__name__}; expected an object")
            if document.get("format") != _FORMAT:
                raise ValueError(f"format is {document.get('format')!r}; expected {_FORMAT!r}")
            return cls(
                None if document["cluster"] is None else _cluster(document["cluster"]),
                _machine(document["machine"]),
                document["compute"],
                {name: (low, high) for name, (low, high) in document["spreads"].items()},
                document.get("on_one_node", False),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not what qcomp plan --measure writes: {error}") from error


def _link(document: Mapping[str, Any]) -> Link:
    streams = math.inf if document["streams"] is None else document["streams"]
    return Link(**{**document, "streams": streams})


def _cluster(document: Mapping[str, Any]) -> Cluster:
    for name in ("ranks", "ranks_per_node"):
        if type(document[name]) is not int:
            raise ValueError(f"{name} is {document[name]!r}; expected an integer")
    return Cluster(**{**document, "link": _link(document["link"]), "inside": _link(document["inside"])})


def _machine(document: Mapping[str, Any]) -> Machine:
    speeds = {spec: Speed(**speed) for spec, speed in document["speeds"].items()}
    found = document.get("low_rank")
    low_rank = None if found is None else LowRankSpeed(**found)
    return Machine(**{**document, "speeds": speeds, "low_rank": low_rank})
