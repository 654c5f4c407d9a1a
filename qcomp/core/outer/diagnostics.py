"""`OuterDiagnostics`: measures in a run how far ranks drift apart, and what compression does to their mean."""

import copy
import math
import struct
from dataclasses import dataclass
from typing import Any

from qcomp.core.diagnostics import Facts, Notes, counted, message_of, report_of
from qcomp.core.mean.stages import AllGather, Stages, Transport, drive, owned, require_rank
from qcomp.core.numeric.arrays import host_bytes
from qcomp.core.numeric.sums import sum_of_squares
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.state import OptimizerState


@dataclass(frozen=True)
class OuterDiagnostics:
    """Makes the steps of an `OuterLoop`, and measures its exchanges.

    Its steps give the same results as the loop's own, bit for bit. The report is a dict of floats, equal on all ranks.
    It is empty in a step that exchanges nothing; otherwise it describes the fragment that was exchanged:

    - ``drift`` and ``drift_worst``: |d_i - mean d| / |mean d|, how far the ranks have drifted apart in the outer round,
      relative to their common progress; mean and maximum over the ranks. 0 if all ranks made the same progress. Above
      about sqrt(N - 1), the ranks' outer gradients have nothing in common, and mostly cancel in the mean: make outer
      rounds shorter.
    - ``cosine``: the cosine between the mean as it was exchanged and the exact mean.
    - ``worker_residual``, ``worker_residual_worst``, ``server_residual``, ``server_residual_worst``, ``bytes_sent``,
      ``bits_per_element``: as for `Diagnostics`; bits are per element of the whole model.

    Parameters
    ----------
    loop : OuterLoop
        The loop whose steps are measured. An exchange runs when its result is applied, and not earlier as in
        `Overlapped`.
    sample : int
        The largest number of elements to sample from a fragment, equally spaced: from its compressed tensors, or from
        its exact tensors if none are compressed.

    Notes
    -----
    A step that exchanges sends 2 (N - 1) / N * 4 * sample bytes more, and 48 bytes to every rank.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> watched = qcomp.outer.OuterDiagnostics(qcomp.OuterLoop(every=2))
    >>> def rank_main(comm):
    ...     params = np.zeros(2)
    ...     state = watched.loop.init(params, comm)
    ...     for _ in range(2):
    ...         params, state, report = watched.step(params + 1 + comm.rank, state, comm)
    ...     return report
    >>> first, second = qcomp.comm.run_local(2, rank_main)
    >>> first == second, round(first["drift"], 3), first["cosine"]
    (True, 0.333, 1.0)
    """

    loop: OuterLoop
    sample: int = 4096

    def __post_init__(self) -> None:
        if not isinstance(self.loop, OuterLoop):
            raise TypeError(f"loop is {self.loop!r}; expected a qcomp.OuterLoop")
        if type(self.sample) is not int or self.sample < 1:
            raise ValueError(f"sample is {self.sample!r}; expected an integer of at least 1")

    def step(
        self, params: Any, state: OptimizerState, comm: Transport
    ) -> tuple[Any, OptimizerState, dict[str, float]]:
        """Make a step as `OuterLoop.step` does, and also return the report.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters after an inner step.
        state : OptimizerState
            From ``loop.init`` or the last step.
        comm : Communicator
            As for `OuterLoop.step`.
        """
        require_rank(state, comm)
        return drive(owned(self.stages(params, state), owner_of(self.loop, state)), comm)

    def stages(
        self, params: Any, state: OptimizerState
    ) -> Stages[tuple[Any, OptimizerState, dict[str, float]]]:
        """`step` as a generator of pure stages.

        Parameters
        ----------
        params : array or sequence of arrays
            As for `step`.
        state : OptimizerState
            As for `step`.
        """
        notes = Notes(self.sample, exact=True)
        (new_params, new_state), sent = yield from counted(
            _watched(self.loop, notes).stages(params, state), state.rank
        )
        if notes.part is None:
            return new_params, new_state, {}
        facts = yield from notes.facts(state, sent)
        drift = math.nan
        if notes.exact is not None:
            together = sum_of_squares(notes.exact)
            apart = sum_of_squares(notes.signal - notes.exact)
            drift = math.sqrt(apart / together) if together else math.inf if apart else 0.0
        like = state.arrays["anchor"][0]
        size = 8 * (len(facts) + 1)
        arrived = yield AllGather(message_of((*facts, drift), like), (size,) * state.size)
        told = [struct.unpack(f"<{len(facts) + 1}d", host_bytes(part)) for part in arrived]
        elements = sum(math.prod(x.shape) for x in state.arrays["anchor"])
        report = report_of([Facts(*each[:-1]) for each in told], elements)
        drifts = [each[-1] for each in told]
        if not any(map(math.isnan, drifts)):
            report |= {"drift": math.fsum(drifts) / len(drifts), "drift_worst": max(drifts)}
        return new_params, new_state, report


def _watched(loop: OuterLoop, notes: Notes) -> OuterLoop:
    """Return a loop that makes the same steps and records what it exchanges."""
    twin = copy.copy(loop)

    def prepare(state: OptimizerState, fragment: int) -> Average:
        average = loop.prepare(state, fragment)
        notes.before(average)
        return average

    def exchange(state: OptimizerState, fragment: int) -> Stages[Means]:
        means = yield from OuterLoop.exchange(twin, state, fragment)
        notes.after(means)
        return means

    object.__setattr__(twin, "prepare", prepare)
    object.__setattr__(twin, "exchange", exchange)
    return twin
