"""`InnerStates`: averages inner optimizers' states in an outer loop, each kind of state with a period of its own."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from qcomp.core.compressor import Compressor, require_compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.errors import MismatchError, NonFiniteError
from qcomp.core.handshake import agree_stages, gather_texts, handshake_stages
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.stages import Stages, Transport, drive, owned, require_rank
from qcomp.core.mean.weights import product, weight_stages
from qcomp.core.numeric.arrays import Array, array_namespace, compute_dtype_name, dtype_name, to_compute_dtype
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.outer.fragments import first_step
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.outer.settings import ANCHOR, WARMUP
from qcomp.core.settings import require
from qcomp.core.state import OptimizerState

States = Mapping[str, Sequence[Array | None]]
"""For each kind, such as "exp_avg", one array per parameter; None if the optimizer has no state for the parameter."""


@dataclass(frozen=True)
class InnerStates:
    """Says when the states of inner optimizers are averaged in an outer loop, and how these states are compressed.

    An outer loop averages only parameters. This class averages the states that inner optimizers keep for each
    parameter, such as momentum or Adam's two moments. Each kind has a period of its own, as in DES-LOC: moments that
    change slowly need few exchanges. This class keeps nothing between two averages, so there is nothing to save, and a
    job can resume on any number of ranks.

    Parameters
    ----------
    every : int, or mapping of str to int
        Inner steps from one average to the next, counted from the end of the warm-up. A mapping gives periods by the
        name of a kind, or by a pattern as in file names; the first match counts, and kinds without a period are not
        averaged. If a fragment's parameters are exchanged k steps before the end of the loop's ``every`` steps, its
        states are averaged k steps before the end of each period. So if a period is a multiple of the loop's ``every``,
        states are averaged when the parameters are exchanged.
    compressor : Compressor, default Identity()
        Compresses the states, on workers and servers, without feedback: `Cast`, which halves the bytes, or another
        compressor whose error in each element is relative to that element. Other compressors are refused: they could
        round a second moment, by which Adam divides, to 0.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    Without compression, s_i' = (s_1 + ... + s_N) / N in the dtype of computation, the same on all ranks bit for bit. In
    two phases, a rank sends 2 (N - 1) / N * 32 bits per element and kind, or 2 (N - 1) / N times the payload of
    ``compressor``. It also sends a text of about ten bytes per parameter and kind to each other rank. The topology is
    the loop's.

    If some rank lacks a state, for instance before a parameter's first gradient, the state stays as it is on all ranks.
    With periods of 1 for parameters and momentum, SGD equals SGD on the mean gradient. This does not hold for Adam: its
    second moment then averages the squares of the ranks' gradients, not the square of their mean.

    Give second moments a period that divides the period of first moments. If only first moments are averaged, a rank
    divides them by its own second moment, which is 0 for elements for which it has had no gradient: the next step may
    be arbitrarily large. In the paper second moments have the longer period.

    Source: Iacob et al., arXiv 2505.22549 (DES-LOC).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> loop = qcomp.outer.local_sgd(2)
    >>> inner = qcomp.outer.InnerStates({"momentum": 2, "variance": 4})
    >>> def rank_main(comm):
    ...     params = [np.zeros(2)]
    ...     state, found = loop.init(params, comm), []
    ...     own = {"momentum": [np.full(2, 1.0 + comm.rank)], "variance": [np.full(2, 4.0 * comm.rank)]}
    ...     for _ in range(4):
    ...         params, state = loop.step(params, state, comm)
    ...         own = inner.step(own, loop, state, comm)
    ...         found.append((float(own["momentum"][0][0]), float(own["variance"][0][0])))
    ...     return found
    >>> qcomp.comm.run_local(2, rank_main)[1]
    [(2.0, 4.0), (1.5, 4.0), (1.5, 4.0), (1.5, 2.0)]
    """

    every: int | Mapping[str, int]
    compressor: Compressor = Identity()

    def __post_init__(self) -> None:
        given = self.every if isinstance(self.every, Mapping) else {"*": self.every}
        require("every", self.every, bool(given), "at least one period")
        for kind, period in given.items():
            fits = isinstance(kind, str) and type(period) is int and period > 0
            require("every", self.every, fits, "an integer >= 1, or a mapping from names to such integers")
        object.__setattr__(self, "every", dict(given))
        require_compressor("compressor", self.compressor)
        traits = self.compressor.traits
        if not traits.lossless and (traits.bucket_size > 1 or traits.random or traits.delta is None):
            raise ValueError(
                f"compressor is {self.compressor.spec}; expected one whose error in each element is a fraction of "
                "that element, such as qcomp.Cast('bfloat16'): others could round a second moment to 0, and Adam "
                "would divide by it"
            )

    @cached_property
    def _mean(self) -> CompressedMean:
        return CompressedMean(self.compressor, feedback=False)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The settings as text, which must be equal on all ranks."""
        periods: Any = self.every
        return {"every": list(periods.items()), "compressor": self.compressor.spec}

    def require_fits(self, loop: OuterLoop) -> None:
        """Raise ValueError unless inner states can be averaged in this loop.

        Parameters
        ----------
        loop : OuterLoop
            The loop.
        """
        if loop.delay:
            raise ValueError(
                f"the loop has delay={loop.delay}; expected 0 if inner states are averaged: the ranks must wait for "
                "that exchange, so a delay would save no time"
            )

    @property
    def _periods(self) -> dict[str, int]:
        assert isinstance(self.every, dict)
        return self.every

    def step(
        self,
        states: States,
        loop: OuterLoop,
        state: OptimizerState,
        comm: Transport,
        *,
        weight: float | None = None,
    ) -> dict[str, list[Array | None]]:
        """Average the states that are due after an inner step; all ranks call this after each `OuterLoop.step`.

        Parameters
        ----------
        states : mapping of str to sequence of arrays or None
            For each kind, such as "momentum", one array per parameter, with its shape and any floating-point dtype, or
            None. They are not written to.
        loop : OuterLoop
            The loop of the parameters, without ``delay``.
        state : OptimizerState
            The state that the loop's `OuterLoop.step` has just returned.
        comm : Communicator
            As for `OuterLoop.step`.
        weight : float, optional
            How much this rank's states count in the mean, as in `OuterLoop.step`.

        Returns
        -------
        dict of str to list of arrays or None
            The means, in new arrays. States that are not due stay the given arrays.

        Raises
        ------
        ValueError
            If inner states cannot be averaged in this loop. On every rank, if ``every`` names a kind (not a pattern)
            that no rank has.
        TypeError, ValueError
            If an array that is due has no floating-point dtype, or not the shape of its parameter.
        MismatchError
            On the other ranks, if one rank raises for such an array. On every rank, if ranks compute a state in
            different precisions.
        NonFiniteError
            On every rank, if a state on any rank is not finite.
        """
        require_rank(state, comm)
        return drive(self.stages(states, loop, state, weight=weight), comm)

    def stages(
        self, states: States, loop: OuterLoop, state: OptimizerState, *, weight: float | None = None
    ) -> Stages[dict[str, list[Array | None]]]:
        """`step` as a generator of pure stages, for callers that move the buffers themselves.

        Parameters
        ----------
        states, loop, state, weight
            As for `step`.
        """
        self.require_fits(loop)
        owner = owner_of(loop, state)._replace(doing=f"the mean of inner states after step {state.step}")
        return (yield from owned(self._stages(states, loop, state, weight), owner))

    def _stages(
        self, states: States, loop: OuterLoop, state: OptimizerState, weight: float | None
    ) -> Stages[dict[str, list[Array | None]]]:
        new: dict[str, list[Any]] = {kind: list(arrays) for kind, arrays in states.items()}
        turns, like = self._turns(loop, state), state.arrays[ANCHOR][0]
        if not turns:
            return new
        alike = {"inner states": self.facts, "weight": "none" if weight is None else "a number"}
        yield from handshake_stages(alike, size=state.size, like=like)
        factor = 1.0 if weight is None else (yield from weight_stages(weight, state.size, like))
        text, problem = "", None
        try:
            due_ones = {kind: xs for kind, xs in new.items() if self._pattern_of(kind) in turns}
            text = json.dumps({kind: _precisions(kind, xs, state) for kind, xs in due_ones.items()})
        except Exception as error:  # perhaps only on this rank
            problem = error
        yield from agree_stages(problem, what="average its inner states", size=state.size, like=like)
        told = list(map(json.loads, (yield from gather_texts(text, state.size, like))))
        self._require_known(turns, set().union(*told), list(states))
        chosen = self._common(told, turns, state)
        if not chosen:
            return new
        values = [to_compute_dtype(new[kind][number]) for kind, number in chosen]
        if factor != 1:
            values = [product(x, factor) for x in values]
        names = [f"{kind} of {state.names[number]}" for kind, number in chosen]
        topology = loop.compression.mean_of(state).topology
        nothing = MeanState(state.rank, state.size, (), (), nodes=state.exchange.nodes, topology=topology)
        try:
            means, _ = yield from self._mean.within(topology).stages(values, nothing)
        except NonFiniteError as error:
            before = state._replace(step=state.step - 1)
            raise (yield from name_gradients(error, values, names, before, what="inner state")) from error
        for (kind, number), mean in zip(chosen, means, strict=True):
            dtype = new[kind][number].dtype
            new[kind][number] = array_namespace(mean).astype(mean, dtype, copy=False)
        return new

    def is_due(self, loop: OuterLoop, state: OptimizerState) -> bool:
        """Return whether anything is averaged after an inner step.

        Parameters
        ----------
        loop, state
            As for `step`.
        """
        return bool(self._turns(loop, state))

    def _turns(self, loop: OuterLoop, state: OptimizerState) -> dict[str | None, set[int]]:
        """Return the patterns whose states are averaged after the last step, with the parameters whose turn it is."""
        step = state.step - loop.warmup
        if state.stage == WARMUP or not step:
            return {}
        found: dict[str | None, set[int]] = {}
        for kind, period in self._periods.items():
            for fragment in range(loop.fragments):
                ahead = loop.every - first_step(fragment, loop.every, loop.fragments)
                if (step + ahead) % period == 0:
                    found.setdefault(kind, set()).update(loop.members(state, fragment))
        return found

    def _pattern_of(self, kind: str) -> str | None:
        return next((pattern for pattern in self._periods if fnmatchcase(kind, pattern)), None)

    def _require_known(
        self, turns: Mapping[str | None, Set[int]], due_ones: Set[str], own: Sequence[str]
    ) -> None:
        """Raise ValueError on every rank if no rank has a kind that is due."""
        for kind in turns:
            if kind not in due_ones and not any(c in "*?[" for c in str(kind)):
                raise ValueError(
                    f"every has a period for {kind!r}, but no inner optimizer keeps such a state (copies of parameters "
                    f"do not count); expected names among {own}, or patterns"
                )

    def _common(
        self,
        told: Sequence[Mapping[str, Sequence[str | None]]],
        turns: Mapping[str | None, Set[int]],
        state: OptimizerState,
    ) -> list[tuple[str, int]]:
        """Return the states that are due and that all ranks have, each as its kind and the number of its parameter."""
        found = []
        for kind in sorted(set.intersection(*map(set, told))):
            for number in sorted(turns[self._pattern_of(kind)]):
                precisions = {of_rank[kind][number] for of_rank in told}
                if None in precisions:
                    continue
                if len(precisions) > 1:
                    raise MismatchError(
                        f"the inner state {kind!r} of {state.names[number]!r} is computed in float32 on some ranks, "
                        "and in float64 on others; expected the same precision on all"
                    )
                found.append((kind, number))
        return found


def _precisions(kind: str, arrays: Sequence[Array | None], state: OptimizerState) -> list[str | None]:
    """Return the compute dtype of each state; raise ValueError unless each state has the shape of its parameter."""
    params, found = state.arrays[ANCHOR], []
    if len(arrays) != len(params):
        raise ValueError(f"states[{kind!r}] has {len(arrays)} arrays; the loop has {len(params)} parameters")
    for x, p, name in zip(arrays, params, state.names, strict=True):
        if x is not None and tuple(x.shape) != tuple(p.shape):
            raise ValueError(
                f"states[{kind!r}] of the parameter {name!r} has shape {tuple(x.shape)}; expected {tuple(p.shape)}"
            )
        found.append(
            None if x is None else compute_dtype_name(dtype_name(x.dtype), argument=f"states[{kind!r}]")
        )
    return found
