"""Evidence, from the studies in this repository, of how many steps a method needs to reach a loss."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from qcomp.core.mean.averaging import Averaging
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.outer.presets import diloco, local_sgd, muloco, sparse_loco
from qcomp.planning.methods import MuonMethod, OuterMethod, PowerSGDMethod
from qcomp.planning.model import Method

UNMEASURED = 3.0
"""The steps that a comparison charges a method for each step of exact training, if its steps to a loss were not
measured."""
TASKS = ("language model", "residual network", "adversarial network")
"""The tasks of the studies."""
STUDIED: Mapping[str, Callable[..., OuterLoop]] = {
    "LocalSGD": local_sgd,
    "DiLoCo": diloco,
    "SparseLoCo": partial(sparse_loco, averaging=Averaging(topology="all_gather")),
    "MuLoCo": partial(muloco, scale=1.0),
}
"""The outer loops of the studies. SparseLoCo divided sums by all ranks, and MuLoCo applied its outer rate only once."""


@dataclass(frozen=True)
class Evidence:
    """A record from a study, made by benchmarks/steps_to_loss.py.

    Parameters
    ----------
    task : str
        The task of the study, one of `TASKS`.
    method : str
        The name of the method in the study.
    label : str
        A description of the method.
    warmup : float
        The method's share of exact steps.
    ratio : float or None
        The method's steps per step of exact training, to the lowest loss that both reach; None if the study has no
        curves.
    gap : float
        The method's loss after equally many steps, minus the loss of exact training.
    seeds : int
        The number of runs of the method, and of exact training.
    steps, ranks, parameters : int
        The numbers of steps, ranks and parameters of each run.
    reference : str
        The optimizer of exact training. If the method works with several optimizers, it also used this one.
    source : str
        Where the study is.
    """

    task: str
    method: str
    label: str
    warmup: float
    ratio: float | None
    gap: float
    seeds: int
    steps: int
    ranks: int
    parameters: int
    reference: str
    source: str

    @property
    def counted(self) -> float:
        """The steps that a comparison charges the method for each step of exact training.

        A ratio below 1 counts as 1: a method that loses something is no better than the exact one, and a study of few
        seeds may show a better result by chance.
        """
        return UNMEASURED if self.ratio is None else max(1.0, self.ratio)

    @property
    def text(self) -> str:
        """A sentence about the method, without its subject: the ratio or the gap, and how it was measured."""
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        trained = f"{self.task}, {self.parameters / 1e6:.2g}M parameters, {self.ranks} ranks, {seeds}, {self.source}"
        if self.ratio is not None:
            return f"{self.ratio:.2f} of the steps of {self.reference} to the same loss, as {self.label} ({trained})"
        side = f"{abs(self.gap):.2f} {'below' if self.gap < 0 else 'above'} the loss of {self.reference}"
        return f"steps not measured; after {self.steps} steps {side} ({trained})"


@lru_cache(1)
def studies() -> tuple[Evidence, ...]:
    """Return all records."""
    records = json.loads(Path(__file__).with_name("steps_to_loss.json").read_text())
    return tuple(Evidence(**record) for record in records)


def evidence_of(
    method: Method, *, warmup: float = 0.0, task: str = TASKS[0], ranks: int = 2
) -> Evidence | None:
    """Return the best record about a method on a task, or None.

    Parameters
    ----------
    method : Method
        Each compressor is judged by the runs in which it was studied: after exact steps `ScaledSign` by runs of 1-bit
        Adam and `MinMaxUInt8` by runs of QAdam; without exact steps `ScaledSign` and QSGD of 4 bits by runs of Adam on
        compressed gradients. An outer loop must have the settings of a study, except for the topology.
    warmup : float
        The share of exact steps of a run. Studies with curves are preferred, then studies with the closest share, the
        closest number of ranks, the most seeds, and the least favourable result, in this order.
    task : str
        One of `TASKS`.
    ranks : int
        The number of ranks that train.

    Examples
    --------
    >>> import qcomp
    >>> known = evidence_of(Method("two_phase", qcomp.ScaledSign()), warmup=0.15)
    >>> known.label, known.seeds, known.ratio < 1.1
    ('1-bit Adam', 5, True)
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; expected one of {', '.join(TASKS)}")
    names = _names(method, warmup)
    known = [record for record in studies() if record.method in names and record.task == task]

    def preference(record: Evidence) -> tuple[bool, float, float, int, float]:
        times = abs(math.log(record.ranks / ranks))
        return record.ratio is None, abs(record.warmup - warmup), times, -record.seeds, -(record.ratio or 0.0)

    return min(known, key=preference, default=None)


def _names(method: Method, warmup: float) -> tuple[str, ...]:
    """Return the names under which the studies list a method."""
    if isinstance(method, MuonMethod):
        return _names_of_muon(method)
    if isinstance(method, OuterMethod):
        return _names_of_loop(method.loop)
    if isinstance(method, PowerSGDMethod):
        exact_factors = method.compressor.traits.lossless
        return (f"PowerSGD rank {method.averaging.rank}",) if exact_factors else ()
    if method.compressor is None:
        return ()
    name = method.compressor.name
    if warmup > 0:
        return {"sign": ("onebit_adam",), "minmax": ("qadam_measured", "qadam_longer", "qadam_half")}.get(
            name, ()
        )
    four_bits = getattr(method.compressor, "levels", None) == 7
    return ("sign_hook",) if name == "sign" else ("qsgd4_hook",) if name == "qsgd" and four_bits else ()


def _names_of_muon(method: MuonMethod) -> tuple[str, ...]:
    """Return the name of Muon with the compressors of a method."""
    opt = method.optimizer
    both = (opt.compressor, opt.update_compressor)
    name = "Muon" if opt.block_rows is None else "Muon in blocks"
    if method.replicated or all(c.traits.lossless for c in both):
        return (f"{name}, exact",)
    studied = [c.name for c in both] == ["lloyd_max", "sign"] and getattr(opt.compressor, "bits", 0) == 4
    return (f"{name}, 4 + 1 bits",) if studied else ()


def _names_of_loop(loop: OuterLoop) -> tuple[str, ...]:
    """Return the names of the studied loops that have the same settings as a loop, except for the topology."""
    topology = loop.averaging.topology
    names = []
    for name, preset in STUDIED.items():
        published = preset(loop.every, seed=loop.seed)
        own = replace(published.averaging, topology=topology)
        if replace(published, averaging=own) == loop:
            names.append(f"{name} every {loop.every} steps")
    return tuple(names)
