"""`Muon`: replaces singular values of a momentum by values near 1; the rank that owns a matrix computes its update."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import compress
from typing import Any, Literal, NamedTuple, cast

from qcomp.core import primitives
from qcomp.core.compressor import Compressor, require_compressor
from qcomp.core.compressors.lloyd_max import LloydMax
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.kernels import AdamNumbers, StepNumbers
from qcomp.core.mean.owned import OwnedMean, Shape
from qcomp.core.numeric.arrays import Array, array_namespace, concat, is_mutable, to_compute_dtype
from qcomp.core.numeric.orthogonal import ITERATIONS, multiplications, orthogonalize, require_library
from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Compressing, Means
from qcomp.core.optimizers.groups import setting_of_each
from qcomp.core.optimizers.matrices import (
    Form,
    Splits,
    as_splits,
    blocks_of,
    forms_of,
    require_forms,
    warn_of_doubts,
    warn_of_first_convolution,
)
from qcomp.core.optimizers.own_counts import own_counts
from qcomp.core.optimizers.tensors import as_tensors, each_in_blocks, zeros_like
from qcomp.core.optimizers.whiteners import (
    WHITENER,
    first_whiteners,
    followed,
    new_whiteners,
    of_matrices,
)
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy, Tensor
from qcomp.core.policies.patterns import as_patterns, require_matches
from qcomp.core.reporting import warn_caller
from qcomp.core.settings import require
from qcomp.core.state import OptimizerState
from qcomp.core.variance.arithmetic import bias_corrections
from qcomp.core.variance.schedules import Schedule, require_schedule

_AT_ONCE = 1 << 20
"""Elements that are orthogonalised at a time: enough to keep a device busy, few enough for caches."""
_JOINED = 1 << 17
"""The same, if blocks of several matrices are joined. Joining copies them; larger copies cost more time than they
save."""


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon for matrices, with compressed gradients and compressed updates, and AdamW for all other tensors.

    Name the embeddings and the output head in ``others``: they are also matrices, but Muon suits only weights between
    hidden layers, and shapes do not tell the two apart.

    Parameters
    ----------
    learning_rate : float or callable
        Step size of the matrices: a finite number >= 0, or a schedule that returns it from the number of completed
        steps. Required. About 0.02 with ``adjust_lr_fn="original"``, and as large as for AdamW with
        ``"match_rms_adamw"``.
    weight_decay : float, default 0
        Decoupled weight decay coefficient, >= 0: each step subtracts rate * weight_decay * x from the parameters x,
        where rate is the tensor's learning rate without its shape factor.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. If the norm is larger, every rank
        multiplies its gradients by the same factor. Costs an exchange of 8 bytes per step. None, the default, never
        clips.
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
    compressor : Compressor, default LloydMax(bits=4)
        Compresses the gradients of the matrices, with feedback. `Identity` keeps them exact.
    update_compressor : Compressor, default ScaledSign(scale="rms")
        Compresses the updates of the matrices, with feedback. `Identity` keeps them exact.
    whiten_steps : callable, optional
        Says whether a step, counted from 1, makes new whiteners (see Notes): a function of the step, such as a
        `DoublingIntervals`. None, the default, never whitens. Without effect if ``compressor`` is lossless.
    others : sequence of str, or callable, default ()
        The matrices that AdamW moves: patterns of their names, with ``*``, ``?`` and ``[...]`` as in file names, such
        as ``("embed*", "head.*")``, each of which must match a name. Or a policy, a function that returns for every
        `Tensor` of the model whether AdamW moves it. AdamW always moves tensors with fewer than two dimensions, or with
        one row or one column, and the kernels of depthwise convolutions. Depthwise kernels have one input channel. So
        does the first convolution of a network for grey images: Muon moves it with ``splits={name: 1}``.
    stacks : sequence of str, default ()
        Patterns of the names of tensors that are stacks of matrices, such as the experts of a layer, or layers that are
        scanned: each slice along the first axis is a matrix of its own. Each pattern must match a tensor that Muon
        orthogonalises. If the slices are vectors, AdamW moves the tensor.
    splits : mapping of str to int or sequence of int, default {}
        Patterns of the names of tensors that hold several matrices side by side, such as queries, keys and values. Each
        pattern maps to the number of equal parts along the axis of the outputs, or to the rows of each part. Each part
        is a matrix of its own. The first pattern that matches counts, and each pattern must match a tensor that Muon
        orthogonalises. 1 says that a tensor is one matrix, and silences the warnings that it may hold several. If the
        pattern is the tensor's whole name, Muon moves the tensor even if it looks like the kernels of a depthwise
        convolution. If a model stores queries, keys and values head by head, give 3 times the number of heads: each
        part then holds the queries, keys or values of one head.
    momentum : float, default 0.95
        Decay rate of the momentum of the matrices, from 0 to below 1.
    nesterov : bool, default True
        Whether to use Nesterov momentum.
    adjust_lr_fn : {"original", "match_rms_adamw"}, default "original"
        The factor of a matrix's learning rate: ``"original"`` is sqrt(max(1, rows / columns)), ``"match_rms_adamw"`` is
        0.2 sqrt(max(rows, columns)), which makes updates as large as AdamW's. A slice, a part or a block has the factor
        of its own shape. ``torch.optim.Muon`` has the same names.
    output_axis : {0, -1}, default 0
        The axis of a tensor whose indices are the outputs of its layer, and so the rows of the matrix: the first, as in
        torch, or the last, as in Flax, Haiku and Keras.
    block_rows : int, optional
        The largest number of rows that are orthogonalised together, at least 1: a matrix, or a part of one, is cut into
        blocks of this many rows, and a last block with the rest. None, the default, orthogonalises whole matrices.
        Blocks of 64 to 128 rows take a fraction of the time. In a short training run, a step with blocks learned about
        as much as one with whole matrices at first, and less at the end.
    newton_schulz_steps : int, default 5
        Number of Newton-Schulz iterations, at least 1: ``ns_steps`` of ``torch.optim.Muon``. For short blocks, which
        have few small singular values, 3 are enough. Whole matrices learn less with 3.
    newton_schulz_dtype : {"float32", "bfloat16"}, default "float32"
        Dtype of the matrix products in the orthogonalisation. ``"bfloat16"``, as in ``torch.optim.Muon``, is several
        times as fast on GPUs and on CPUs that support it, and needs arrays of torch or JAX.
    adam_learning_rate_factor : float, optional
        The learning rate of AdamW, as a factor of ``learning_rate``, >= 0. None, the default, is 0.1 with
        ``adjust_lr_fn="original"`` and 1 with ``"match_rms_adamw"``.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates of AdamW's momentum and variance, each from 0 to below 1.
    eps : float, default 1e-8
        Added to the square root of AdamW's variance, >= 0.

    Notes
    -----
    A matrix is a tensor of two or more dimensions: ``output_axis`` is the rows, all other axes together are the
    columns, so that convolution kernels are matrices of (out, rest). In a stack this holds for each slice. Parts, and
    the blocks of ``block_rows``, are treated like separate tensors, but they share a compressor, an owner and a
    whitener, which see the whole tensor. The owner computes, with D the compressed mean gradient,

        m' = momentum m + (1 - momentum) D,  u = momentum m' + (1 - momentum) D  (u = m' without Nesterov),
        O = orthogonalize(u),  q = C(factor O + e),  e' = factor O + e - q,

    and all ranks compute x' = x - rate (q + weight_decay x).

    With Nesterov momentum, the last mean D, and so the residuals in it, weigh 1 + momentum times as much in u as in m'.
    So a worker adds only half of its residual to its next gradient, which leaves less noise in u. Nothing is lost,
    since the other half stays in the residual. Without Nesterov momentum, a worker adds its whole residual.

    Orthogonalising lifts small singular values of u to the size of large ones, and so amplifies compression errors in
    the directions of the small ones. With ``whiten_steps``, ranks compress W g instead of the gradient g, and the owner
    computes D = W^-1 mean_i C(W g_i + e_i / 2). W makes the singular values of the momentum about equal, so that errors
    are small where they are amplified most: training with W and 2 bits for gradients learned about as much as with 4
    bits without W. The owner makes W from its momentum in some steps, and all ranks hold it. For a matrix of n times m
    elements, n <= m, W costs a state of n^2 numbers and n^2 m multiplications in every step. In a step that makes W,
    each rank also sends (N - 1) / N * 8 n^2 bits.

    Only the owner has m and e, and only the owner orthogonalises. Matrices are distributed among the ranks by the cost
    of orthogonalising them, so a matrix that is larger than a rank's share keeps one rank busy while others wait. All
    ranks decode the same q, so they hold the same parameters bit for bit, however their libraries round matrix
    products. With `Identity` for both compressors this is exact Muon. Gradients of the other tensors are averaged
    exactly, in the same messages.

    With b bits per element for gradients and c for updates, each of N ranks sends about (N - 1) / N (b + c) bits per
    element of a matrix, and 2 (N - 1) / N * 32 bits per element of the other tensors. A checkpoint loads on any number
    of ranks: momenta and residuals of updates go to the new owners. Source: Jordan et al., 2024 (Muon); Liu et al.,
    arXiv:2502.16982 ("match_rms_adamw"); Gruntkowska et al., arXiv:2510.00643 (compression both ways); Khaled et al.,
    arXiv:2510.16981 (blocks). Whitening is this project's own.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.Muon(learning_rate=0.02, others=("embedding", "head"))
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> names = ["embedding", "hidden", "hidden_bias", "head"]
    >>> params = [np.ones(shape, np.float32) for shape in [(256, 64), (64, 64), (64,), (256, 64)]]
    >>> state = opt.init(params, comm, names)
    >>> dict(zip(names, state.exact))  # what AdamW moves
    {'embedding': True, 'hidden': False, 'hidden_bias': True, 'head': True}
    >>> params, state = opt.step(params, params, state, comm)
    """

    of_groups = ("betas", "eps")
    mixes_elements = True

    compressor: Compressor = LloydMax(bits=4)
    update_compressor: Compressor = ScaledSign(scale="rms")
    whiten_steps: Schedule | None = None
    others: Sequence[str] | ExactPolicy = ()
    stacks: Sequence[str] = ()
    splits: Mapping[str, int | Sequence[int]] | Splits = ()
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    output_axis: int = 0
    block_rows: int | None = None
    newton_schulz_steps: int = ITERATIONS
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    adam_learning_rate_factor: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("compressor", "update_compressor"):
            require_compressor(name, getattr(self, name))
        if self.whiten_steps is not None:
            require_schedule("whiten_steps", self.whiten_steps, "makes new whiteners")
        object.__setattr__(self, "splits", as_splits(self.splits))
        super().__post_init__()
        Adam(learning_rate=self.learning_rate, betas=self.betas, eps=self.eps)  # raises if any is invalid
        require("momentum", self.momentum, 0 <= self.momentum < 1, "a number from 0 to below 1")
        fits = self.adjust_lr_fn in ("original", "match_rms_adamw")
        require("adjust_lr_fn", self.adjust_lr_fn, fits, "'original' or 'match_rms_adamw'")
        if type(self.output_axis) is not int or self.output_axis not in (0, -1):
            raise ValueError(
                f"output_axis is {self.output_axis!r}; expected 0, the first axis, or -1, the last"
            )
        for name in ("block_rows", "newton_schulz_steps"):
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name == "block_rows"):
                raise TypeError(f"{name} is {value!r}; expected an integer, at least 1")
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value!r}; expected an integer, at least 1")
        fits = self.newton_schulz_dtype in ("float32", "bfloat16")
        require("newton_schulz_dtype", self.newton_schulz_dtype, fits, "'float32' or 'bfloat16'")
        factor = self.adam_learning_rate_factor
        if factor is not None and not 0 <= factor < math.inf:
            raise ValueError(
                f"adam_learning_rate_factor is {factor!r}; expected a finite number >= 0, or None"
            )
        if not callable(self.others):
            or_policy = ", or a policy, which is a function of the tensors"
            object.__setattr__(self, "others", as_patterns("others", self.others, or_policy))
        object.__setattr__(self, "stacks", as_patterns("stacks", self.stacks))

    @cached_property
    def compression(self) -> "MatrixCompression":
        """What this optimizer compresses: the gradients and the updates of matrices."""
        repaid = 0.5 if self.nesterov else 1.0
        mean = OwnedMean(self.compressor, updates=self.update_compressor, rule=self._rule, repaid=repaid)
        return MatrixCompression(mean, stacks=tuple(self.stacks), splits=self._splits)

    @property
    def _splits(self) -> Splits:
        return cast(Splits, self.splits)  # converted in __post_init__

    def mean_of(self, state: OptimizerState) -> OwnedMean:
        """Return the `OwnedMean` of a state's matrices; its rule knows which matrices each tensor holds."""
        return self.compression.mean_of(state)

    @cached_property
    def _rule(self) -> "_Rule":
        return _Rule(
            self.momentum,
            self.nesterov,
            self.adjust_lr_fn,
            self.output_axis,
            self.block_rows,
            self.newton_schulz_steps,
            self.newton_schulz_dtype,
        )

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments and residuals of zero; there is no warm-up."""
        exact = self.of_adam(params, names)
        kept = [
            p if is_exact else array_namespace(p).reshape(p, (-1,))[:0]
            for p, is_exact in zip(params, exact, strict=True)
        ]
        state = OptimizerState.first("compressed", names, rank, size)._replace(
            exact=exact, momentum=zeros_like(kept), variance=zeros_like(kept)
        )
        if self.whiten_steps is not None and not self.compressor.traits.lossless:
            whiteners = first_whiteners(params, exact, self.mean_of(state))
            state = state._replace(arrays={WHITENER: whiteners})
        return state._replace(exchange=self.compression.zero_residuals(params, state))

    def of_adam(self, params: Sequence[Array], names: tuple[str, ...]) -> tuple[bool, ...]:
        """Return for each tensor whether AdamW moves it; warn if this choice, or the form of a matrix, is doubtful.

        Parameters
        ----------
        params : sequence of arrays
            The parameters.
        names : tuple of str
            Their names.
        """
        shapes = self.shapes_of(params)
        tensors = [Tensor(name, shape, math.prod(shape)) for name, shape in zip(names, shapes, strict=True)]
        forms = forms_of(names, self.output_axis, tuple(self.stacks), self._splits)
        exact = self._moved_by_adam(tensors, forms)
        require_library(self.newton_schulz_dtype, params[0])
        if all(exact):
            warn_caller(
                f"Muon orthogonalises nothing: AdamW moves all {len(params)} tensors, because they are vectors or "
                f"depthwise kernels, or are chosen by others={self.others!r}"
            )
        by_muon = [not is_exact for is_exact in exact]
        matrices, forms = list(compress(tensors, by_muon)), tuple(compress(forms, by_muon))
        require_forms(matrices, forms, self.stacks, self._splits)
        warn_of_doubts(matrices, forms, guess_outside=not callable(self.others))
        return exact

    def adopt(self, saved: Mapping[str, Any], fresh: OptimizerState) -> Mapping[str, Any]:
        """Return a saved state, with initial whiteners if it was saved without any."""
        keys = [f"{WHITENER}.{name}" for name in fresh.names]
        if WHITENER not in fresh.arrays or not saved.keys().isdisjoint(keys):
            return saved
        return {**saved, **dict(zip(keys, fresh.arrays[WHITENER], strict=True))}

    def rates(self, state: OptimizerState) -> tuple[float, ...]:
        """Return the learning rate of each tensor in the next step, without the factor of a matrix's shape.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        factor = self.adam_learning_rate_factor
        if factor is None:
            factor = 0.1 if self.adjust_lr_fn == "original" else 1.0
        pairs = zip(super().rates(state), state.exact, strict=True)
        return tuple([rate * factor if is_exact else rate for rate, is_exact in pairs])

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the updates of the matrices, and for the exact mean gradients of the other tensors."""
        given = [*map(to_compute_dtype, as_tensors(grads, "grads"))]
        scaled = given if scale == 1 else each_in_blocks(lambda g: g * scale, given)
        average = self.compression.average(scaled, state, self.key(state), whiteners=of_matrices(state))
        if self._makes_whiteners(state):
            part = new_whiteners(state, self.mean_of(state))
            average = average._replace(parts=(*average.parts, part))
        # Gradients that were not scaled are the caller's: with ``own``, the exchange does not overwrite them.
        return average._replace(own=tuple(given)) if scale == 1 else average

    def _makes_whiteners(self, state: OptimizerState) -> bool:
        """Return whether the next step makes new whiteners."""
        if self.whiten_steps is None or WHITENER not in state.arrays:
            return False
        return bool(self.whiten_steps(state.step + 1))

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Move AdamW's tensors by a step of AdamW, and the matrices by the updates that their owners have sent."""
        tensors = as_tensors(params, "params")
        rates, decays = self.rates(state), self.weight_decays(state)
        moved: dict[int, Array] = {}
        updates = means.values[: len(tensors)]
        for i, (p, q, rate, decay) in enumerate(zip(tensors, updates, rates, decays, strict=True)):
            if not state.exact[i]:
                out = p if means.donate else primitives.empty_like(p)
                moved[i] = primitives.descend(p, q, rate, decay, out=out)
        momentum, variance = list(state.momentum), list(state.variance)
        by_adam = [i for i, is_exact in enumerate(state.exact) if is_exact]
        if by_adam:
            groups = tuple(self.groups)
            betas = setting_of_each(groups, state.names, "betas", self.betas)
            eps = setting_of_each(groups, state.names, "eps", self.eps)
            counts = own_counts(state, state.step + 1)
            of_momentum, of_variance = (bias_corrections(betas, which, counts) for which in (0, 1))
            numbers = [
                AdamNumbers(
                    betas[i], of_variance[i], 0.0, StepNumbers(rates[i], of_momentum[i], eps[i], decays[i])
                )
                for i in by_adam
            ]
            steps = primitives.adam_steps(
                [tensors[i] for i in by_adam],
                [momentum[i] for i in by_adam],
                [variance[i] for i in by_adam],
                [means.values[i] for i in by_adam],
                numbers,
                donate=means.donate,
            )
            for i, step in zip(by_adam, steps, strict=True):
                moved[i], momentum[i], variance[i] = step
        after = state._replace(
            step=state.step + 1, momentum=tuple(momentum), variance=tuple(variance), exchange=means.exchange
        )
        if whiteners := tuple(means.values[len(tensors) :]):
            after = after._replace(arrays={**state.arrays, WHITENER: whiteners})
            owed = followed(means.exchange, of_matrices(state), of_matrices(after), self.mean_of(state))
            after = after._replace(exchange=owed)
        return [moved[i] for i in range(len(tensors))], after

    def _moved_by_adam(self, tensors: Sequence[Tensor], forms: Sequence[Form]) -> tuple[bool, ...]:
        """Return for each tensor whether AdamW moves it."""
        if not callable(self.others):
            require_matches("others", self.others, [t.name for t in tensors])
        policy = self.others if callable(self.others) else ExactBelow(0, self.others)
        chosen = tuple(policy(tensors))
        if len(chosen) != len(tensors):
            raise TypeError(
                f"others chose {chosen!r}; expected True or False for each of {len(tensors)} tensors"
            )
        chosen = tuple(map(bool, chosen))
        warn_of_first_convolution(tensors, forms, chosen)
        every = zip(chosen, tensors, forms, strict=True)
        return tuple(c or not form.suits(t.shape) for c, t, form in every)


@dataclass(frozen=True)
class MatrixCompression(Compressing):
    """The compression of Muon; from the tensors' names, its rule knows which matrices each tensor holds."""

    stacks: tuple[str, ...] = ()
    splits: Splits = ()

    @cached_property
    def _known(self) -> dict[Any, OwnedMean]:
        """The means that `mean_of` has returned, kept because each of them caches its layouts."""
        return {}

    def mean_of(self, state: OptimizerState) -> OwnedMean:
        """Return the `OwnedMean` of a state's matrices."""
        mean = super().mean_of(state)
        assert isinstance(mean, OwnedMean)
        if not (self.stacks or self.splits):
            return mean
        key = state.names, state.exact
        if key not in self._known:
            rule: Any = mean.rule
            names = tuple(name for name, is_exact in zip(*key, strict=True) if not is_exact)
            forms = forms_of(names, rule.output_axis, self.stacks, self.splits)
            self._known[key] = replace(mean, rule=replace(rule, forms=forms))
        return self._known[key]


class _Blocks(NamedTuple):
    """Consecutive blocks of a tensor; the rows of all its slices are numbered in order."""

    tensor: int
    """The index of the tensor."""
    first: int
    """The first row of the first block in the tensor."""
    number: int
    """The number of blocks."""


@dataclass(frozen=True)
class _Rule:
    """What the owner of a matrix computes; see `Muon`."""

    momentum: float
    nesterov: bool
    adjust_lr_fn: str
    output_axis: int
    block_rows: int | None
    iterations: int
    dtype: str
    forms: tuple[Form, ...] = ()
    """How each tensor is cut into matrices; empty if each is one matrix."""

    def cost(self, tensor: int, shape: Shape) -> int:
        """Return the number of multiplications in `orthogonalize`."""
        form = self._form(tensor)
        _, _, columns = form.sides(shape)
        return sum(
            number * multiplications(of_block, columns, self.iterations)
            for _, number, of_block in blocks_of(form, shape, self.block_rows)
        )

    def updates(
        self,
        means: Sequence[Array],
        momenta: Sequence[Array],
        tensors: Sequence[int],
        shapes: Sequence[Shape],
    ) -> tuple[list[Array], list[Array]]:
        """Return the update and the new momentum of each tensor."""
        blended = list(momenta)
        forms = list(map(self._form, tensors))
        sides = [form.sides(shape) for form, shape in zip(forms, shapes, strict=True)]

        @cache
        def ahead(tensor: int) -> Array:
            """Return the blended momentum, computed only when it is needed, so that it is still in the caches."""
            m, mean = momenta[tensor], means[tensor]
            if self.nesterov:
                blended[tensor], found = primitives.nesterov(m, mean, self.momentum)
            else:
                found = blended[tensor] = primitives.momentum(m, mean, self.momentum, 1.0)
            slices, rows, columns = sides[tensor]
            return found if self.output_axis == 0 else _transposed(found, (slices, columns, rows))

        blocks = [blocks_of(form, shape, self.block_rows) for form, shape in zip(forms, shapes, strict=True)]
        made = self._orthogonalized(ahead, blocks, [columns for _, _, columns in sides])
        if self.output_axis != 0:
            made = [_transposed(x, of_tensor) for x, of_tensor in zip(made, sides, strict=True)]
        return made, blended

    def sides(self, tensor: int, shape: Shape) -> tuple[int, int]:
        """Return the shape of the matrix in which a tensor is stored; the slices of a stack lie below each other."""
        slices, rows, columns = self._form(tensor).sides(shape)
        return (slices * rows, columns) if self.output_axis == 0 else (slices * columns, rows)

    def _form(self, tensor: int) -> Form:
        return self.forms[tensor] if self.forms else Form(self.output_axis)

    def _orthogonalized(
        self,
        flat: Callable[[int], Array],
        runs: Sequence[Sequence[tuple[int, int, int]]],
        columns: Sequence[int],
    ) -> list[Array]:
        """Return flat tensors with each block orthogonalised, times its factor; blocks of equal shapes are joined."""
        alike: dict[Shape, list[_Blocks]] = defaultdict(list)
        for tensor, of_tensor in enumerate(runs):
            for first, count, of_block in of_tensor:
                most = _most((of_block, columns[tensor]), _AT_ONCE)
                alike[of_block, columns[tensor]] += [
                    _Blocks(tensor, first + start * of_block, min(most, count - start))
                    for start in range(0, count, most)
                ]
        made: list[dict[int, Array]] = [{} for _ in runs]
        for shape, every in alike.items():
            for some in _together(every, _most(shape, _JOINED)):
                stacked = concat([_cut(flat(blocks.tensor), blocks, shape) for blocks in some])
                done = orthogonalize(
                    stacked, iterations=self.iterations, dtype=self.dtype, factor=self._factor(shape)
                )
                start = 0
                for blocks in some:
                    stop = start + blocks.number
                    own = flat(blocks.tensor)
                    part = array_namespace(done).reshape(done[start:stop, ...], (-1,))
                    if self.nesterov and is_mutable(own):  # the blended momentum is no longer needed
                        own[_range(blocks, shape)] = part
                    else:
                        made[blocks.tensor][blocks.first] = part
                    start = stop
        return [_joined(parts, flat(tensor)) if parts else flat(tensor) for tensor, parts in enumerate(made)]

    def _factor(self, matrix: Shape) -> float:
        rows, columns = matrix
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _most(shape: Shape, elements: int) -> int:
    """Return how many blocks of a shape fit into ``elements``, at least 1."""
    return max(1, elements // math.prod(shape))


def _together(every: Sequence[_Blocks], most: int) -> Iterator[list[_Blocks]]:
    """Yield lists of entries with at most ``most`` blocks in all; an entry with more blocks is yielded alone."""
    some: list[_Blocks] = []
    room = most
    for blocks in every:
        if some and blocks.number > room:
            yield some
            some, room = [], most
        some.append(blocks)
        room -= blocks.number
    yield some


def _cut(flat: Array, blocks: _Blocks, shape: Shape) -> Array:
    """Return blocks of a flat matrix as an array of shape (blocks, rows, columns)."""
    return array_namespace(flat).reshape(flat[_range(blocks, shape)], (blocks.number, *shape))


def _range(blocks: _Blocks, shape: Shape) -> slice:
    """Return where blocks lie in their flat matrix."""
    start = blocks.first * shape[1]
    return slice(start, start + blocks.number * math.prod(shape))


def _joined(parts: dict[int, Array], like: Array) -> Array:
    """Return blocks in ascending order as one vector, in the dtype of ``like``."""
    xp = array_namespace(like)
    return xp.astype(concat([parts[number] for number in sorted(parts)]), like.dtype, copy=False)


def _transposed(flat: Array, shape: tuple[int, int, int]) -> Array:
    """Return the transposes of some flat matrices, also flat."""
    xp = array_namespace(flat)
    return xp.reshape(xp.permute_dims(xp.reshape(flat, shape), (0, 2, 1)), (-1,))
