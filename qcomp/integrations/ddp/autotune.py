"""A communication hook for DistributedDataParallel that tries some methods of averaging, and keeps the fastest."""

# DistributedDataParallel reads the annotations of a hook, so they are not postponed here.
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from qcomp.comm.torch_dist import over_ranks
from qcomp.comm.verbs import Verbs
from qcomp.core.mean.averaging import Averaging, PowerSGD
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.mean.powersgd import PowerSGDMean
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.integrations.ddp.exchange_thread import require_unoccupied
from qcomp.integrations.ddp.gradient_mean import GradientMean
from qcomp.integrations.ddp.hook import HookState
from qcomp.integrations.ddp.parameters import AveragedParameters, inside
from qcomp.planning.autotune import Autotune, Tuning


class TunedHookState:
    """The state of a hook that chooses its method. Made by `autotune`.

    Parameters
    ----------
    tuner : Autotune
    hooks : mapping of str to HookState
        The detached hook of each method that compresses.
    model : torch.nn.parallel.DistributedDataParallel
    exact_iterations : int
    comm : Verbs
    """

    def __init__(
        self,
        tuner: Autotune,
        hooks: Mapping[str, HookState],
        model: Any,
        exact_iterations: int,
        comm: Verbs,
    ) -> None:
        self.tuning = Tuning()
        self._tuner, self._hooks, self._model, self._comm = tuner, hooks, model, comm
        self._exact_iterations = exact_iterations
        self._params = AveragedParameters(model)
        self._number: int | None = None  # exact iterations come first
        self._began = 0.0
        self._owed: dict[int, torch.Tensor] = {}
        self._pass = _Pass(None)
        self.iterations = 0
        """Number of backward passes so far."""

    @property
    def chosen(self) -> str | None:
        """The name of the chosen method; None before the choice."""
        return self._tuner.chosen(self.tuning)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per step by method, the same on all ranks; empty until every method has had its turn."""
        return dict(zip(self._tuner.names, self.tuning.seconds, strict=False))

    @property
    def hook(self) -> HookState | None:
        """The state of the current method, for checkpoints after the choice; None while gradients are exact."""
        return None if self._number is None else self._hooks.get(self._tuner.names[self._number])

    def rescale(self, factor: float) -> None:
        """Multiply the residuals, and what earlier methods still owe, by a factor; see `HookState.rescale`.

        Parameters
        ----------
        factor : float
            The new scale of gradients divided by the old one.
        """
        self._settle()
        if self.hook is not None:
            self.hook.rescale(factor)
        self._owed = {number: factor * e for number, e in self._owed.items()}

    def exchange(self, bucket: Any) -> Any:
        """Start to average a bucket; see `average_gradients`."""
        if bucket.index() == 0:
            self._begin()
        if self._owed:
            for number, gradient in self._params.gradients_in(bucket):
                if number in self._owed:
                    e = self._owed[number]
                    gradient.copy_(gradient.to(e.dtype) + e.view(gradient.shape))
        hook = self._pass.hook
        return self._all_reduced(bucket.buffer()) if hook is None else hook.exchange(bucket)

    def _begin(self) -> None:
        """Record the time of the last iteration, and switch to the method of this one."""
        require_unoccupied(self._comm)
        now = self._tuner.clock()
        self._settle()
        if self.iterations >= self._exact_iterations and self.tuning.chosen is None:
            if self._number is not None:
                like = self._params.tensors[0].detach()
                self.tuning = self._tuner.noted(self.tuning, now - self._began, self._comm, like)
            self._use(self._tuner.turn(self.tuning))
            self._began = now
        self.iterations += 1
        self._pass = _Pass(self.hook)

    def _use(self, number: int) -> None:
        """Leave the previous method, and begin another one with residuals of zero."""
        if number == self._number:
            return
        if self.hook is not None:
            for tensor, e in self.hook.leave().items():
                self._owed[tensor] = self._owed[tensor] + e if tensor in self._owed else e
        self._number = number
        if self.hook is not None:
            self.hook.attach(self._model, self._comm)

    def _settle(self) -> None:
        """Drop the residuals of earlier methods if the last backward pass has averaged them."""
        if self._pass.has_averaged:
            self._owed = {}

    def _all_reduced(self, buffer: torch.Tensor) -> Any:
        """Average a bucket as DistributedDataParallel does without a hook."""
        group = self._model.process_group
        work: Any = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
        current, checked = self._pass, bool(self._owed)

        def mean(future: Any) -> torch.Tensor:
            found: torch.Tensor
            (found,) = future.value()
            if checked:  # what is owed must not be lost with gradients that nobody uses
                current.finite = current.finite and bool(found.isfinite().all())
            return found

        return work.get_future().then(mean)


class _Pass:
    """A backward pass, and whether its gradients were averaged."""

    def __init__(self, hook: HookState | None) -> None:
        self.hook = hook
        self.finite = True
        self._before = 0 if hook is None else hook.iterations

    @property
    def has_averaged(self) -> bool:
        """Whether the gradients of this pass were averaged; known once it is over."""
        return self.finite if self.hook is None else self.hook.iterations > self._before


def average_gradients(state: TunedHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over the ranks, by the method whose turn it is.

    Parameters
    ----------
    state : TunedHookState
    bucket : torch.distributed.GradBucket

    Returns
    -------
    torch.futures.Future
        Resolves to the bucket's buffer, with the means in it.
    """
    future: torch.futures.Future[torch.Tensor] = state.exchange(bucket)
    return future


def autotune(
    tuner: Autotune,
    model: Any,
    *,
    exact: ExactPolicy | None = ExactBelow(10_000),
    exact_iterations: int = 2,
    seed: int = 0,
    nonfinite: Literal["raise", "propagate"] = "raise",
    comm: Verbs | None = None,
) -> tuple[TunedHookState, Any]:
    """Return the arguments of ``model.register_comm_hook``: a state, and a hook that chooses its method by time.

    Collective. Each method of the tuner averages the gradients of a few iterations; from then on the fastest averages
    them. An iteration is timed from the first bucket of its backward pass to the first bucket of the next. A method
    with an exact mean runs the all-reduce that DistributedDataParallel does without a hook. This all-reduce passes on
    values that are not finite.

    Parameters
    ----------
    tuner : Autotune
        The methods to try. Each of them has a single compressor.
    model : torch.nn.parallel.DistributedDataParallel
    exact, seed, nonfinite, comm
        As for `hook`. All methods that compress use these.
    exact_iterations : int, default 2
        Number of exact iterations before the first method has its turn.

    Returns
    -------
    state : TunedHookState
        After the choice, ``state.chosen`` is the method's name, and ``state.hook`` the state for checkpoints. To
        resume, register `hook` with the chosen compressor and averaging, or nothing if the choice was exact.
    hook : callable

    Raises
    ------
    MismatchError
        On every rank, if the ranks differ in the methods or settings.
    ValueError
        If some parameters may be unused (``find_unused_parameters`` or ``static_graph``), because their residuals could
        be lost; or if a mean has several compressors.

    Notes
    -----
    As under `hook`, gradients are bit for bit the same on all ranks. When a method is left, its residuals are added to
    the next gradients, in the dtype of the gradients. If that average is refused or not finite, they are added again to
    the gradients after these.

    Examples
    --------
    >>> import qcomp, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 128))
    >>> methods = {"exact": qcomp.CompressedMean(qcomp.Identity()), "1 bit": qcomp.CompressedMean(qcomp.ScaledSign())}
    >>> state, averaged = autotune(qcomp.planning.Autotune(methods, steps=2), model)
    >>> model.register_comm_hook(state, averaged)
    >>> for _ in range(15):
    ...     model(torch.ones(1, 128)).sum().backward()
    >>> state.chosen in methods
    True
    >>> dist.destroy_process_group()
    """
    if not isinstance(tuner, Autotune):
        raise TypeError(f"tuner is {tuner!r}; expected a qcomp.planning.Autotune")
    if type(exact_iterations) is not int or exact_iterations < 0:
        raise ValueError(f"exact_iterations is {exact_iterations!r}; expected an integer, at least 0")
    model = inside(model)
    if AveragedParameters(model).some_may_be_unused:
        raise ValueError(
            "model was made with find_unused_parameters or static_graph; expected neither: the residuals of unused "
            "parameters could be lost"
        )
    hooks = {
        name: HookState(
            GradientMean(
                compressor=_compressor(name, mean),
                averaging=_averaging(mean),
                exact=exact,
                exact_iterations=0,
                seed=seed,
            ),
            nonfinite,
        )
        for name, mean in tuner.methods.items()
        if not mean.lossless
    }
    comm = over_ranks(model.process_group if comm is None else comm)
    tuner.agree(comm, next(model.parameters()).detach(), exact_iterations=exact_iterations)
    for hook in hooks.values():  # raises errors now, and compiles the kernels
        hook.attach(model, comm).leave()
    return TunedHookState(tuner, hooks, model, exact_iterations, comm), average_gradients


def _compressor(name: str, mean: CompressedMean) -> Any:
    if len(mean.compressors) != 1:
        raise ValueError(f"methods has {name!r} with {len(mean.compressors)} compressors; expected one")
    return mean.compressors[0]


def _averaging(mean: CompressedMean) -> Averaging:
    """Return the settings from which a mean is made."""
    if isinstance(mean, PowerSGDMean):
        return PowerSGD(rank=mean.rank, min_compression=mean.min_compression)
    return Averaging(mean.topology, mean.feedback, mean.link, divisor=mean.divisor)
