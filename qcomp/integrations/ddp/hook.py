"""A communication hook for DistributedDataParallel that averages gradients with compression."""

# DistributedDataParallel reads the annotations of a hook, so they are not postponed here.
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.distributed import GradBucket

from qcomp.checkpoint.saves import Saves
from qcomp.comm.verbs import Verbs
from qcomp.core.compressor import Compressor, require_compressor
from qcomp.core.mean.averaging import Averaging
from qcomp.core.mean.owed import owed
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.integrations.ddp.backward import BackwardPass, Bucket, put_means
from qcomp.integrations.ddp.before_steps import BlindVariances, UnusableGradients, UnusedMeans
from qcomp.integrations.ddp.buckets import BucketedStep, SavesState
from qcomp.integrations.ddp.gradient_mean import GradientMean


class HookState(SavesState):
    """The state of a hook: the residuals by parameter name, and the number of iterations.

    Made by `hook`. It can be pickled, for example into a checkpoint. After loading, call `attach` with the model.

    Parameters
    ----------
    mean : GradientMean
    nonfinite : {"raise", "propagate"}
    """

    def __init__(self, mean: GradientMean, nonfinite: Literal["raise", "propagate"]) -> None:
        if nonfinite not in ("raise", "propagate"):
            raise ValueError(f"nonfinite is {nonfinite!r}; expected 'raise' or 'propagate'")
        self.nonfinite = nonfinite
        self._mean = mean
        self._step: BucketedStep | None = None
        self._unusable: UnusableGradients | None = None
        self._blind: BlindVariances | None = None
        self._unused: UnusedMeans | None = None
        self._saved: Mapping[str, Any] | None = None
        self._saves = Saves()

    def attach(
        self, model: Any, comm: Verbs | None = None, *, lost: Literal["raise", "drop"] = "raise"
    ) -> "HookState":
        """Attach this state to a model; collective over its ranks.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel
        comm : communicator, optional
            See `hook`.
        lost : {"raise", "drop"}
            As for `load_state_dict`; used only if this state was loaded.

        Raises
        ------
        MismatchError
            On every rank, if the ranks differ in the settings of the hook or in the model.
        ValueError
            If this state was loaded and belongs to another model, rank or number of ranks.
        """
        self._step = BucketedStep(
            self._mean, model, comm, deliver=self._deliver, finish=self._finish, leaves_out_unused=True
        )
        self._unusable = UnusableGradients(self._step.params.tensors)
        self._blind = self._blind_variances(self._step)
        self._unused = self._unused_means(self._step)
        if self._saved is not None:
            self.load_state_dict(self._saved, lost=lost)
            self._saved = None
        return self

    @property
    def iterations(self) -> int:
        """Number of averaged backward passes."""
        return self._running.state.step

    @property
    def skipped(self) -> int:
        """Number of backward passes skipped because a gradient on some rank was not finite."""
        return self._running.state.skipped

    def leave(self) -> dict[int, Any]:
        """Detach this state from its model, and return what its residuals owe to this rank's next gradients, by number.

        The keys are the numbers of the parameters, the values flat tensors; see `qcomp.core.mean.owed`.
        """
        step = self._running
        state = step.state
        numbers = [number for number, is_exact in enumerate(state.exact) if not is_exact]
        found = owed(step.optimizer.mean_of(state), state.exchange) if numbers else []
        step.close()
        self._step = self._unusable = self._blind = self._unused = None
        return dict(zip(numbers, found, strict=False))

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor, because the next gradients have another scale.

        Residuals have the scale of the gradients. Without this call, each change of the loss scale by a factor leaves
        the residuals too large or too small by that factor, for one step. To keep residuals right under a GradScaler,
        end each iteration with::

            before = scaler.get_scale()
            scaler.update()
            state.rescale(scaler.get_scale() / before)

        Parameters
        ----------
        factor : float
            The new scale divided by the old one, equal on all ranks. 1 changes nothing.

        Raises
        ------
        ValueError
            If the factor is not a finite number above 0.
        """
        if not 0 < factor < math.inf:
            raise ValueError(
                f"factor is {factor!r}; expected a finite number above 0, the new scale divided by the old"
            )
        if factor != 1:
            self._running.rescale(factor)
            self._saves.forget()

    def _blind_variances(self, step: BucketedStep) -> BlindVariances | None:
        """Return the check that warns of an optimizer for which these gradients are unsuitable."""
        state = step.state
        compressed = [p for p, exact in zip(step.params.tensors, state.exact, strict=True) if not exact]
        mean = self._mean.mean_of(state)
        return BlindVariances(compressed, mean.compressors) if compressed and not mean.low_rank else None

    def _unused_means(self, step: BucketedStep) -> UnusedMeans:
        """Return the check for means that feedback counts as used but no step uses."""
        params, state = step.params, step.state
        feedback = not all(state.exact) and self._mean.mean_of(state).feedback
        found = {i: params.tensors[i] for i, exact in enumerate(state.exact) if feedback and not exact}
        return UnusedMeans(found, params.names)

    @property
    def _running(self) -> BucketedStep:
        if self._step is None:
            raise RuntimeError("this state of a hook has no model: call attach(model) after loading it")
        return self._step

    def exchange(self, bucket: Any) -> Any:
        """Start to average a bucket; see `compress_gradients`."""
        return self._running.exchange(bucket)

    def _deliver(self, bucket: Bucket) -> None:
        """Replace the gradients with the means."""
        if not bucket.refused:
            for part in bucket.parts:
                put_means(part)
                assert part.means is not None
                part.means = part.means._replace(values=(), own=())  # frees memory
        else:
            bucket.buffer.fill_(torch.nan)

    def _finish(self, running: BackwardPass) -> None:
        """Store the new residuals, or skip the step."""
        step = self._running
        self._saves.forget()
        if running.refusal is None:
            _, step.state = step.optimizer.apply((), step.take(), step.state)
            if step.state.step > self._mean.exact_iterations:
                assert self._unused is not None
                self._unused.after_backward(
                    number for part in running.parts for number in part.numbers if number not in part.unused
                )
            return
        step.skip()
        if self.nonfinite == "raise":
            assert self._unusable is not None
            self._unusable.refuse(running.refusal)

    def __getstate__(self) -> dict[str, Any]:
        saved = self._saved if self._step is None else self.state_dict()
        return {"mean": self._mean, "nonfinite": self.nonfinite, "saved": saved}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._mean, self.nonfinite, self._saved = state["mean"], state["nonfinite"], state["saved"]
        self._step = self._unusable = self._blind = self._unused = None
        self._saves = Saves()


def compress_gradients(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over the ranks, with compression, during the backward pass.

    Parameters
    ----------
    state : HookState
    bucket : torch.distributed.GradBucket

    Returns
    -------
    torch.futures.Future
        Resolves to the bucket's buffer, with the means in it.
    """
    future: torch.futures.Future[torch.Tensor] = state.exchange(bucket)
    return future


def hook(
    compressor: Compressor,
    model: Any,
    *,
    feedback: bool | None = None,
    topology: str = "auto",
    averaging: Averaging | None = None,
    exact: ExactPolicy | None = ExactBelow(10_000),
    compressors: CompressorPolicy | None = None,
    exact_iterations: int = 2,
    seed: int = 0,
    nonfinite: Literal["raise", "propagate"] = "raise",
    comm: Verbs | None = None,
) -> tuple[HookState, Any]:
    """Return the arguments of ``model.register_comm_hook``: a state, and a hook that compresses gradients.

    Collective: all ranks call it, and raise at once if they differ. The averaged gradients are equal on all ranks, bit
    for bit.

    Parameters
    ----------
    compressor : Compressor
        A compressor with 4 bits or more, such as ``qcomp.QSGD(levels=7, bucket_size=128)``, suits any optimizer. One
        bit, as in `ScaledSign`, does not suit optimizers that divide by averages of squared gradients, such as Adam.
    model : torch.nn.parallel.DistributedDataParallel
        Its parameters may be float32, float16, bfloat16 or float64, on a CPU or a GPU.
    feedback : bool, optional
        Whether error feedback adds what compression loses to the next gradient. By default True unless the compressor
        is unbiased.
    topology : {"auto", "two_phase", "all_gather", "hierarchical", "ring"}
        See `qcomp.CompressedMean`. The default selects the fastest by the cost model: with two ranks, all-gather.
    averaging : Averaging, optional
        Given instead of ``feedback`` and ``topology``. With ``qcomp.PowerSGD(rank=1)`` two thin factors of each matrix
        are averaged, and the compressor compresses these.
    exact, compressors, seed
        See `qcomp.OneBitAdam`.
    exact_iterations : int
        Number of exact backward passes before the first compressed one, since the first gradients are the largest.
    nonfinite : {"raise", "propagate"}
        What to do if a gradient on any rank is infinite or NaN. In both cases all gradients of its bucket become NaN on
        all ranks, no residual changes, and a GradScaler skips the step on all ranks; see `HookState.rescale`.
        ``"raise"``: an optimizer that would step with these gradients raises `NonFiniteError` on all ranks and leaves
        its parameters unchanged. ``"propagate"``: the optimizer steps, as without a hook.
    comm : communicator, optional
        By default a `TorchCommunicator` of the model's process group. If one backward pass runs through several models,
        each model needs its own communicator: with a shared one the backward pass raises RuntimeError, since buckets of
        several models may become full in different orders on different ranks.

    Returns
    -------
    state : HookState
        With ``state_dict`` and ``load_state_dict`` for checkpoints.
    hook : callable

    Raises
    ------
    MismatchError
        On every rank, if the ranks differ in these settings or in the model.
    TypeError
        If ``compressor`` is not a compressor, for instance a `PowerSGD`, which belongs in ``averaging``.
    ValueError
        If ``averaging`` is given together with ``feedback`` or ``topology``.

    Warns
    -----
    UserWarning
        In a backward pass, on every rank: in the first pass if all ranks have the same gradients; in the first
        compressed pass if it moves elements whose gradients are 0 on all ranks, see `qcomp.CompressedSGD.step`. In a
        step, if the optimizer divides by averages of squared gradients, and the compressor keeps only signs.

    Notes
    -----
    A bucket sends as many bytes as `qcomp.CompressedMean` for its tensors. Its exchange starts when the bucket is full,
    in parts of 8 MiB and more, in a thread that compresses, waits and decompresses during the backward pass. With
    PowerSGD, whose messages are short, a bucket is one part. Residuals are kept by parameter name. They do not depend
    on the buckets, which DistributedDataParallel changes after its first iteration, and resets at a restart. The means
    equal a `qcomp.CompressedMean` of the whole model, bit for bit. Source: Seide et al., Interspeech 2014 (feedback);
    Li et al., VLDB 2020 (buckets).

    Examples
    --------
    >>> import qcomp, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 128))
    >>> state, averaged = hook(qcomp.ScaledSign(), model)
    >>> model.register_comm_hook(state, averaged)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> state.iterations
    1
    >>> dist.destroy_process_group()
    """
    if isinstance(compressor, Averaging):
        raise TypeError(
            f"compressor is {compressor!r}; expected a qcomp.Compressor; pass an Averaging as averaging="
        )
    require_compressor("compressor", compressor)
    if averaging is None:
        feedback = not compressor.traits.unbiased if feedback is None else feedback
        averaging = Averaging(topology=topology, feedback=feedback)
    elif feedback is not None or topology != "auto":
        raise ValueError(
            f"pass averaging, or feedback and topology, not both: averaging is {averaging!r}, feedback is "
            f"{feedback!r} and topology is {topology!r}"
        )
    mean = GradientMean(
        compressor=compressor,
        averaging=averaging,
        exact=exact,
        compressors=compressors,
        exact_iterations=exact_iterations,
        seed=seed,
    )
    return HookState(mean, nonfinite).attach(model, comm), compress_gradients
