"""`QSVRG`: variance-reduced SGD on quantized vectors, which converges linearly."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qcomp.core.checkpoint.schema import Number, shown
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.qsgd import QSGD
from qcomp.core.mean.averaging import Averaging
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.stages import Stages, Transport, drive, owned, require_rank
from qcomp.core.numeric.arrays import Array, array_namespace, divide, to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import EXACT, Average, Compressing, Means
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.optimizers.tensors import as_given, as_tensors, update, zeros_like
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.settings import require
from qcomp.core.state import OptimizerState

_SNAPSHOT, _GRADIENT, _ITERATES = "snapshot", "gradient", "iterates"
_STEPS = "epoch_steps"


@dataclass(frozen=True, kw_only=True)
class QSVRG(Optimizer):
    """SVRG with quantized steps, for finite sums: it converges linearly despite compression.

    `begin_epoch` starts an epoch with the exact mean gradient at a snapshot y of the parameters. Each `step` then takes
    the gradients of one sample at the parameters x and at y. `next_snapshot` returns the snapshot of the next epoch.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0; weight_decay * x is added to the mean of the quantized vectors, exactly.
    clip_norm : float, optional
        Largest global norm sqrt(mean_i |c_i|^2) of the corrected vectors c_i over the ranks i, above 0. If the norm is
        larger, every rank multiplies its vectors by the same factor, which makes them biased. Costs an exchange of 8
        bytes per step. None, the default, never clips.
    seed : int, default 0
        Seed of the random draws of compressors and of stochastic rounding, 0 to 2**64 - 1. Draws also depend on the
        names and shapes of the parameters. If two optimizers in one job have parameters with equal names and shapes,
        give them different seeds.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `Optimizer`.
    compressor : Compressor, default QSGD(levels=31, bucket_size=512)
        Compresses the corrected vectors. It must be unbiased; `QSGD` has the theory's small variance with about as
        many levels as the square root of its bucket size.
    averaging : Averaging, default Averaging(topology="all_gather", feedback=False)
        Topology of the exchange, see `Averaging`; ``feedback`` must be False, since it would make steps biased.
        All-gather quantizes every vector once, as in the paper.
    exact : callable or None, default ExactBelow(10_000)
        Policy that gets all tensors and selects the tensors that stay exact, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that replaces ``compressor``: it returns a compressor for each tensor, or None for a tensor that stays
        exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.

    Notes
    -----
    f is the mean over the ranks i of f_i, and f_i the mean of its samples f_ij. Start: g = mean_i grad f_i(y). Step:
    draw j; send Q(grad f_ij(x) - grad f_ij(y) + g), the whole corrected vector; x' = x - rate * mean_i Q(...). Next
    snapshot: the mean of the parameters x after each of the T steps of the epoch. With Q of variance omega = O(1),
    rate = O(1 / L) and T = O(L / mu), E f(y_p) - f* <= 0.9^p (f(y_0) - f*). At the solution x - y and g vanish, and
    with them the error of Q. A rank sends 2 (N - 1) / N * 32 bits per parameter to start an epoch, and the payload to
    every other rank in a step. A state holds three vectors: ``state.arrays`` has y as "snapshot", g as "gradient" and
    the sum of the x as "iterates". Source: Alistarh et al., NeurIPS 2017, section 3.3 (where f is the sum of its
    parts), and Johnson and Zhang, NeurIPS 2013.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.QSVRG(learning_rate=0.5, exact=None)
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> targets = np.asarray([[0.0, 1.0], [2.0, 5.0]])  # f(x) = mean_j |x - target_j|^2 / 2
    >>> y = np.zeros(2)
    >>> state = opt.init(y, comm)
    >>> for epoch in range(3):
    ...     x, state = y, opt.begin_epoch(y, y - targets.mean(axis=0), state, comm)
    ...     for j in (0, 1, 1, 0, 1, 0):
    ...         x, state = opt.step(x, (x - targets[j], y - targets[j]), state, comm)
    ...     y = opt.next_snapshot(x, state)
    >>> bool(abs(y - [1, 3]).max() < 0.05)
    True
    """

    compares_gradients = False  # at the first step of an epoch, all ranks have the same vector
    two_gradients = "a step of QSVRG takes two, at the parameters and at the snapshot"

    compressor: Compressor = QSGD(levels=31, bucket_size=512)
    averaging: Averaging = Averaging(topology="all_gather", feedback=False)
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.averaging.feedback:
            raise ValueError("feedback is True; expected False: the steps of QSVRG are unbiased")

    @cached_property
    def compression(self) -> Compressing:
        """What this optimizer compresses, and how."""
        return Compressing(self.averaging.mean(self.compressor), self.exact, self.compressors, unbiased=True)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return the state before the first epoch."""
        state = OptimizerState.first("start", names, rank, size)._replace(
            arrays={kind: zeros_like(params) for kind in (_SNAPSHOT, _GRADIENT, _ITERATES)},
            numbers={_STEPS: 0.0},
        )
        return self.compression.choose(state, params, type(self).__name__)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return a state at the beginning of a stage: "start" before the first epoch, "epoch" from then on."""
        if stage not in ("start", "epoch"):
            raise ValueError(f"stage is {shown(stage)}; QSVRG has 'start' and 'epoch'")
        return state._replace(stage=stage)

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:
        """Return the limits of the number of steps since `begin_epoch`."""
        return {_STEPS: Number(least=0, most=state.step, whole=True)}

    def moments_like_params(self, state: OptimizerState) -> tuple[Array, ...]:
        """Return the snapshot."""
        return state.arrays[_SNAPSHOT]

    def begin_epoch(
        self, params: Any, full_grad: Any, state: OptimizerState, comm: Transport
    ) -> OptimizerState:
        """Begin an epoch over a communicator: take a snapshot and the exact mean of its gradients.

        Parameters
        ----------
        params : array or sequence of arrays
            The snapshot y, equal on all ranks, from which the first step of the epoch starts. It is copied.
        full_grad : array or sequence of arrays
            The gradient at y of this rank's f_i, the mean over all its samples; f is the mean of f_i over the ranks.
        state : OptimizerState
            From `init` or the last step. A running epoch ends here.
        comm : Communicator
            As for `step`.

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank is not finite, even with ``nonfinite="skip"``: an epoch needs this
            gradient.
        """
        require_rank(state, comm)
        owner = owner_of(self, state)._replace(doing=f"begin_epoch after step {state.step}")
        return drive(owned(self.epoch_stages(params, full_grad, state), owner), comm)

    def epoch_stages(self, params: Any, full_grad: Any, state: OptimizerState) -> Stages[OptimizerState]:
        """Begin an epoch as a generator of pure stages, see `begin_epoch`.

        Parameters
        ----------
        params, full_grad, state
            As for `begin_epoch`.
        """
        tensors = as_tensors(params, "params")
        self.require_own(tensors, state)
        gradients = _like_params(full_grad, tensors, "full_grad")
        nothing = MeanState(state.rank, state.size, (), ())
        mean, _ = yield from EXACT.stages([to_compute_dtype(g) for g in gradients], nothing)
        arrays = {
            _SNAPSHOT: tuple(map(_copy, tensors)),
            _GRADIENT: tuple(mean),
            _ITERATES: zeros_like(tensors),
        }
        return self.enter(state, "epoch")._replace(arrays=arrays, numbers={_STEPS: 0.0})

    def step(
        self,
        params: Any,
        grads: Any,
        state: OptimizerState,
        comm: Transport,
        *,
        donate: bool = False,
        weight: float | None = None,
    ) -> tuple[Any, OptimizerState]:
        """Make one step over a communicator, as `Optimizer.step` does.

        Parameters
        ----------
        params : array or sequence of arrays
            The parameters x, the same on all ranks.
        grads : tuple of two
            This rank's gradients of one sample, or of one batch: at x, and at the snapshot y.
        state : OptimizerState
            From `begin_epoch` or the last step.
        comm : Communicator
            The communicator given to `init`, or another with the same rank and size.
        donate : bool
            As for `Optimizer.step`. Only stochastic rounding reuses buffers here.
        weight : None
            Must be None, since f is the plain mean over the ranks in every step of an epoch.

        Raises
        ------
        ValueError
            If no epoch has begun, or a weight is given.
        """
        require(
            "weight",
            weight,
            weight is None,
            "None: f is the plain mean over the ranks, so scale each rank's loss",
        )
        return super().step(params, grads, state, comm, donate=donate)

    def stages(
        self,
        params: Any,
        grads: Any,
        state: OptimizerState,
        *,
        donate: bool = False,
        left_out: Collection[int] = (),
    ) -> Stages[tuple[Any, OptimizerState]]:
        """Make one step as a generator of pure stages, see `step` and `Optimizer.stages`."""
        tensors = as_tensors(params, "params")
        self.require_own(tensors, state)
        corrected = self.corrected(tensors, grads, state)
        new_params, new_state = yield from super().stages(
            tensors, corrected, state, donate=donate, left_out=left_out
        )
        return as_given(new_params, params), new_state

    def corrected(self, params: Sequence[Array], grads: Any, state: OptimizerState) -> list[Array]:
        """Return grad f_j(x) - grad f_j(y) + g, the vector that `prepare` averages.

        Parameters
        ----------
        params : array or sequence of arrays
            The parameters x.
        grads : pair
            This rank's gradients of one sample at x and at the snapshot.
        state : OptimizerState
            The state of the last step.
        """
        if state.stage != "epoch":
            raise ValueError(
                f"state is in the stage {state.stage!r}; expected 'epoch': call begin_epoch first"
            )
        if not isinstance(grads, tuple) or len(grads) != 2:
            raise TypeError(
                f"grads is a {type(grads).__name__}; expected the tuple (gradients at params, at the snapshot)"
            )
        at_params, at_snapshot = (
            [to_compute_dtype(g) for g in _like_params(each, params, f"grads[{index}]")]
            for index, each in enumerate(grads)
        )
        return [x - y + g for x, y, g in zip(at_params, at_snapshot, state.arrays[_GRADIENT], strict=True)]

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the compressed mean of the corrected vectors."""
        vectors = as_tensors(grads, "grads")
        scaled = vectors if scale == 1 else [v * scale for v in vectors]
        return self.compression.average(scaled, state, self.key(state))

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Move the parameters against the mean, and add the new parameters to the epoch's sum."""
        tensors = as_tensors(params, "params")
        decays, rates = self.weight_decays(state), self.rates(state)
        directions = [
            u + decay * to_compute_dtype(p) if decay else u
            for u, p, decay in zip(means.values, tensors, decays, strict=True)
        ]
        moved = [update(p, rate * d) for p, d, rate in zip(tensors, directions, rates, strict=True)]
        sums = [s + to_compute_dtype(p) for s, p in zip(state.arrays[_ITERATES], moved, strict=True)]
        return moved, state._replace(
            step=state.step + 1,
            exchange=means.exchange,
            arrays={**state.arrays, _ITERATES: tuple(sums)},
            numbers={_STEPS: state.numbers[_STEPS] + 1},
        )

    def next_snapshot(self, params: Any, state: OptimizerState) -> Any:
        """Return the point at which the next epoch begins: the mean of the parameters after each step of this epoch.

        Parameters
        ----------
        params : array or sequence of arrays
            Gives the dtypes, and decides whether the result is a list.
        state : OptimizerState
            The state of the last step.

        Raises
        ------
        ValueError
            If there was no step since `begin_epoch`.
        """
        steps = state.numbers[_STEPS]
        if not steps:
            raise ValueError(
                "state has made no step since begin_epoch; expected at least one, whose parameters are averaged"
            )
        tensors = as_tensors(params, "params")
        self.require_own(tensors, state)
        means = [
            array_namespace(p).astype(divide(s, steps), p.dtype, copy=False)
            for s, p in zip(state.arrays[_ITERATES], tensors, strict=True)
        ]
        return as_given(means, params)


def _like_params(grads: Any, params: Sequence[Array], argument: str) -> list[Array]:
    """Return gradients as a list; raise ValueError unless they have the shapes of the parameters."""
    gradients = as_tensors(grads, argument)
    shapes, expected = [tuple(g.shape) for g in gradients], [tuple(p.shape) for p in params]
    if shapes != expected:
        raise ValueError(f"{argument} has shapes {shapes}; params has {expected}")
    return gradients


def _copy(x: Array) -> Array:
    """Return a copy of x in its compute dtype, since the caller may write into the parameters."""
    wide = to_compute_dtype(x)
    return array_namespace(x).asarray(wide, copy=True) if wide is x else wide
