"""Muon: updates with the singular vectors of the momentum, made by the rank that owns a matrix."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from qcomp.core import primitives
from qcomp.core.compressor import Compressor, require_compressor
from qcomp.core.compressors.lloyd_max import LloydMax
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.kernels import AdamNumbers, StepNumbers
from qcomp.core.mean.owned import OwnedMean, Shape
from qcomp.core.numeric.arrays import Array, array_namespace, concat, is_mutable, to_compute_dtype
from qcomp.core.numeric.orthogonal import ITERATIONS, multiplications, orthogonalize, require_dtype
from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Compression, Means
from qcomp.core.optimizers.schedules import Schedule, require_schedule
from qcomp.core.optimizers.tensors import as_tensors, each_in_blocks, zeros_like
from qcomp.core.optimizers.whiteners import (
    WHITENER,
    first_whiteners,
    followed,
    new_whiteners,
    of_matrices,
)
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy, Tensor
from qcomp.core.policies.patterns import require_matches
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState

__all__ = ["Muon"]

_AT_ONCE = 1 << 20
"""Elements of the blocks that are orthogonalised at a time: enough to keep a device busy, few enough for caches."""
_JOINED = 1 << 17
"""The same for blocks of several matrices: copying larger ones takes longer than it saves."""


_OUTSIDE = re.compile(r"embed|(^|[./])(emb|wte|wpe|(lm_)?head|classifier)([./]|$)", re.IGNORECASE)
"""Names of embeddings and output heads in the models of most libraries."""
_FOUND = {0: "in torch", -1: "in Flax"}
"""The libraries in which a layer's outputs are on this axis."""


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon for matrices, with compressed gradients and compressed updates, and AdamW for all other tensors.

    Name the embeddings and the output head in ``others``: they are matrices too, but Muon suits only weights between
    hidden layers, and shapes do not tell the two apart.

    Parameters
    ----------
    learning_rate : float or callable
        Step size of the matrices: a finite number >= 0, or a schedule that returns it from the number of completed
        steps. Required. About 0.02 with ``adjust_lr_fn="original"``, and as large as for AdamW with
        ``"match_rms_adamw"``.
    weight_decay : float, default 0
        Decoupled weight decay coefficient, >= 0: each step subtracts rate * weight_decay * x from the parameters x,
        with the learning rate of the tensor before its shape factor.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. Larger gradients are scaled down
        by the same factor on all ranks. Costs an exchange of 8 bytes per step. None, the default, never clips.
    seed : int, default 0
        Seed of the compressors' random draws, 0 to 2**64 - 1. Draws also depend on the names and shapes of the
        parameters. If two optimizers in one job have parameters with equal names and shapes, give them different
        seeds.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    compressor : Compressor, default LloydMax(bits=4)
        Compresses the gradients of the matrices, with feedback. `Identity` keeps them exact.
    update_compressor : Compressor, default ScaledSign(scale="rms")
        Compresses the updates of the matrices, with feedback. `Identity` keeps them exact.
    whiten_steps : callable, optional
        Returns whether a step, counted from 1, makes new whiteners, such as `DoublingIntervals`, see Notes. None, the
        default, never whitens. Has no effect if ``compressor`` loses nothing.
    others : sequence of str, or callable, default ()
        The matrices that AdamW moves: patterns of their names, with ``*``, ``?`` and ``[...]`` as in file names, such
        as ``("embed*", "head.*")``, each of which must match a name. Or a policy, a function that returns for every
        `Tensor` of the model whether AdamW moves it. Tensors with fewer than two dimensions are always among them.
    momentum : float, default 0.95
        Decay rate of the momentum of the matrices, from 0 to below 1.
    nesterov : bool, default True
        Whether to use Nesterov momentum.
    adjust_lr_fn : {"original", "match_rms_adamw"}, default "original"
        The factor of a matrix's learning rate: sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns)), with
        which updates are as large as those of AdamW. A block has the factor of its own shape. The names are those of
        ``torch.optim.Muon``.
    output_axis : {0, -1}, default 0
        The axis of a tensor whose indices are the outputs of its layer, and so the rows of the matrix: the first, as in
        torch, or the last, as in Flax, Haiku and Keras.
    block_rows : int, optional
        The largest number of rows that are orthogonalised together, at least 1: a matrix is cut into blocks of this
        many rows, and a last block with the rest. None, the default, orthogonalises whole matrices. Blocks of 64 to 128
        rows take a fraction of the time. In a short training run, a step with blocks learned about as much as one with
        whole matrices at first, and less at the end.
    newton_schulz_steps : int, default 5
        Iterations that orthogonalise, at least 1: ``ns_steps`` of ``torch.optim.Muon``. With short blocks 3
        are enough, as they have few small singular values; whole matrices learn less with 3.
    newton_schulz_dtype : {"float32", "bfloat16"}, default "float32"
        Dtype of the matrix products that orthogonalise. ``"bfloat16"``, as in ``torch.optim.Muon``, is several times as
        fast on GPUs and on CPUs that have it, and needs arrays of torch or JAX.
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
    columns, so that convolution kernels are matrices of (out, rest). Its owner computes, with D the compressed mean
    gradient,

        m' = momentum m + (1 - momentum) D,  u = momentum m' + (1 - momentum) D  (u = m' without Nesterov),
        O = orthogonalize(u),  q = C(factor O + e),  e' = factor O + e - q,

    and all ranks x' = x - rate (q + weight_decay x).

    With Nesterov momentum, u weighs the last mean 1 + momentum times as much as m' does, and with it the residuals that
    the mean contains. So a worker adds half of its residual to its next gradient instead of all of it, which leaves
    less noise in u. Nothing is lost, since the other half stays in the residual. Without Nesterov momentum it adds all
    of it.

    Orthogonalising lifts small singular values of u to the size of large ones, and also the compression errors in their
    directions. With ``whiten_steps``, ranks compress W g instead of the gradient g, and the owner computes D = W^-1
    mean_i C(W g_i + e_i / 2). W makes the singular values of the momentum about equal, so errors are small where they
    are lifted most: training with W and 2 bits for gradients learned about as much as with 4 bits without W. The owner
    makes W from its momentum in some steps, and all ranks hold it. For a matrix of n times m elements, n <= m, W costs
    a state of n^2 numbers, n^2 m multiplications in every step, and (N - 1) / N * 8 n^2 bits from each rank in those
    steps.

    Only the owner has m and e, and only it orthogonalises. Matrices are distributed among the ranks by the cost of
    orthogonalising them, so a matrix that is larger than a rank's share keeps one rank busy while others wait. All
    ranks decode the same q, so they hold the same parameters bit for bit, however their libraries round matrix
    products. With `Identity` for both compressors this is exact Muon. Gradients of the other tensors are averaged
    exactly, in the same messages.

    With b bits per element for gradients and c for updates, each of N ranks sends about (N - 1) / N (b + c) bits per
    element of a matrix, and 2 (N - 1) / N * 32 bits per element of the others. A checkpoint loads on any number of
    ranks: momenta and residuals of updates go to the new owners. Source: Jordan et al., 2024 (Muon);
    Liu et al., arXiv:2502.16982 ("match_rms_adamw"); Gruntkowska et al., arXiv:2510.00643 (compression both ways);
    Khaled et al., arXiv:2510.16981 (blocks). Whitening is this project's own.

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

    compressor: Compressor = LloydMax(bits=4)
    update_compressor: Compressor = ScaledSign(scale="rms")
    whiten_steps: Schedule | None = None
    others: Sequence[str] | ExactPolicy = ()
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
        super().__post_init__()
        Adam(learning_rate=self.learning_rate, betas=self.betas, eps=self.eps)  # raises if these do not fit
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum!r}; expected a number from 0 to below 1")
        if self.adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn is {self.adjust_lr_fn!r}; expected 'original' or 'match_rms_adamw'"
            )
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
        if self.newton_schulz_dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"newton_schulz_dtype is {self.newton_schulz_dtype!r}; expected 'float32' or 'bfloat16'"
            )
        factor = self.adam_learning_rate_factor
        if factor is not None and not 0 <= factor < math.inf:
            raise ValueError(
                f"adam_learning_rate_factor is {factor!r}; expected a finite number >= 0, or None"
            )
        if not callable(self.others):
            if not isinstance(self.others, list | tuple) or not all(isinstance(n, str) for n in self.others):
                raise TypeError(
                    f"others is {self.others!r}; expected a sequence of patterns, such as ('embed*', 'head.*'), or a "
                    "policy, which is a function of the tensors"
                )
            object.__setattr__(self, "others", tuple(self.others))

    @cached_property
    def compression(self) -> Compression:
        """What this optimizer compresses: the gradients and the updates of matrices."""
        repaid = 0.5 if self.nesterov else 1.0
        mean = OwnedMean(self.compressor, updates=self.update_compressor, rule=self._rule, repaid=repaid)
        return Compression(mean)

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
        exact = self._moved_by_adam(names, params)
        require_dtype(self.newton_schulz_dtype, params[0])
        if all(exact):
            warn_caller(
                f"Muon orthogonalises nothing: AdamW moves all {len(params)} tensors, because they have fewer than two "
                f"dimensions or are chosen by others={self.others!r}"
            )
        matrices = [(name, p) for name, p, is_exact in zip(names, params, exact, strict=True) if not is_exact]
        self._warn_of_flat(matrices)
        self._warn_of_outside(matrices)
        kept = [
            p if is_exact else array_namespace(p).reshape(p, (-1,))[:0]
            for p, is_exact in zip(params, exact, strict=True)
        ]
        state = OptimizerState.first("compressed", names, rank, size)._replace(
            exact=exact, momentum=zeros_like(kept), variance=zeros_like(kept)
        )
        if self.whiten_steps is not None and not self.compressor.traits.lossless:
            whiteners = first_whiteners(params, exact, self._rule.sides)
            state = state._replace(arrays={WHITENER: whiteners})
        return state._replace(exchange=self.compression.zero_residuals(params, state))

    def adopt(self, saved: Mapping[str, Any], fresh: OptimizerState) -> Mapping[str, Any]:
        """Return a saved state with the first whiteners, if it was saved without any."""
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
            part = new_whiteners(state, self.mean_of(state), self._rule.sides)
            average = average._replace(parts=(*average.parts, part))
        # Gradients that were not scaled are the caller's: with ``own``, the exchange does not overwrite them.
        return average._replace(own=tuple(given)) if scale == 1 else average

    def _makes_whiteners(self, state: OptimizerState) -> bool:
        """Return whether the next step makes new whiteners."""
        if self.whiten_steps is None or not of_matrices(state):
            return False
        return bool(self.whiten_steps(state.step + 1))

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Make a step of AdamW, and one with the updates that the owners have sent."""
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
            count = state.step + 1
            corrections = [1 - beta**count for beta in self.betas]
            numbers = [
                AdamNumbers(
                    self.betas,
                    corrections[1],
                    0.0,
                    StepNumbers(rates[i], corrections[0], self.eps, decays[i]),
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
        exchange, arrays = means.exchange, state.arrays
        if len(means.values) > len(tensors):
            new = means.values[len(tensors) :]
            exchange = followed(exchange, of_matrices(state), new, self._rule.sides)
            each = iter(new)
            kept = [
                w if exact else next(each) for w, exact in zip(arrays[WHITENER], state.exact, strict=True)
            ]
            arrays = {**arrays, WHITENER: tuple(kept)}
        return [moved[i] for i in range(len(tensors))], state._replace(
            step=state.step + 1,
            momentum=tuple(momentum),
            variance=tuple(variance),
            exchange=exchange,
            arrays=arrays,
        )

    def _warn_of_outside(self, matrices: Sequence[tuple[str, Array]]) -> None:
        """Warn of matrices with the name of an embedding or a head, unless ``others`` is a function."""
        outside = [repr(name) for name, _ in matrices if _OUTSIDE.search(name)]
        if outside and not callable(self.others):
            warn_caller(
                f"Muon orthogonalises {_first_three(outside)}, by their names embeddings or heads: Muon suits matrices "
                "between hidden layers. Name them in others, so that AdamW moves them; if it is meant, pass a function "
                "as others"
            )

    def _warn_of_flat(self, matrices: Sequence[tuple[str, Array]]) -> None:
        """Warn of tensors of three or more dimensions whose shapes suggest that the outputs are on the other axis."""
        other = -1 if self.output_axis == 0 else 0
        flat = [
            f"{name!r} of shape {tuple(x.shape)}"
            for name, x in matrices
            if len(x.shape) > 2 and x.shape[self.output_axis] < x.shape[other]
        ]
        if flat:
            warn_caller(
                f"output_axis is {self.output_axis}, so Muon orthogonalises few rows of {_first_three(flat)}: "
                f"if outputs are on the other end, as {_FOUND[other]}, pass output_axis={other}; name a stack of "
                "matrices in others"
            )

    def _moved_by_adam(self, names: Sequence[str], params: Sequence[Array]) -> tuple[bool, ...]:
        """Return for each tensor whether AdamW moves it."""
        tensors = [
            Tensor(name, tuple(p.shape), math.prod(p.shape)) for name, p in zip(names, params, strict=True)
        ]
        if not callable(self.others):
            require_matches("others", self.others, names)
        policy = self.others if callable(self.others) else ExactBelow(0, self.others)
        chosen = tuple(policy(tensors))
        if len(chosen) != len(tensors):
            raise TypeError(
                f"others chose {chosen!r}; expected True or False for each of {len(tensors)} tensors"
            )
        return tuple(bool(c) or len(t.shape) < 2 or not t.size for c, t in zip(chosen, tensors, strict=True))


class _Blocks(NamedTuple):
    """Consecutive blocks of a matrix."""

    matrix: int
    """The index of the matrix."""
    first: int
    """The first row of the first block in the matrix."""
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

    def cost(self, shape: Shape) -> int:
        """Return the multiplications in `orthogonalize`."""
        rows, columns = self._matrix(shape)
        return sum(
            count * multiplications(of_block, columns, self.iterations)
            for _, count, of_block in self._parts(rows)
        )

    def updates(
        self, means: Sequence[Array], momenta: Sequence[Array], shapes: Sequence[Shape]
    ) -> tuple[list[Array], list[Array]]:
        """Return the update and the new momentum of each matrix."""
        blended = list(momenta)
        matrices = [self._matrix(shape) for shape in shapes]

        @cache
        def ahead(matrix: int) -> Array:
            """Blend only when the result is needed, so that it is still in the caches."""
            m, mean = momenta[matrix], means[matrix]
            if self.nesterov:
                blended[matrix], found = primitives.nesterov(m, mean, self.momentum)
            else:
                found = blended[matrix] = primitives.momentum(m, mean, self.momentum, 1.0)
            return found if self.output_axis == 0 else _transposed(found, matrices[matrix][::-1])

        made = self._orthogonalized(ahead, matrices)
        if self.output_axis != 0:
            made = [_transposed(x, matrix) for x, matrix in zip(made, matrices, strict=True)]
        return made, blended

    def sides(self, shape: Shape) -> tuple[int, int]:
        """Return the shape of the matrix that a tensor is stored as."""
        rows, columns = self._matrix(shape)
        return (rows, columns) if self.output_axis == 0 else (columns, rows)

    def _matrix(self, shape: Shape) -> tuple[int, int]:
        """Return the rows and columns of a tensor."""
        rows = shape[self.output_axis]
        return rows, math.prod(shape) // rows

    def _orthogonalized(self, flat: Callable[[int], Array], matrices: Sequence[Shape]) -> list[Array]:
        """Return flat matrices with each block orthogonalised, times its factor; takes blocks of one shape together."""
        alike: dict[Shape, list[_Blocks]] = defaultdict(list)
        for matrix, (rows, columns) in enumerate(matrices):
            for first, count, of_block in self._parts(rows):
                most = _most((of_block, columns), _AT_ONCE)
                alike[of_block, columns] += [
                    _Blocks(matrix, first + start * of_block, min(most, count - start))
                    for start in range(0, count, most)
                ]
        made: list[dict[int, Array]] = [{} for _ in matrices]
        for shape, every in alike.items():
            for some in _together(every, _most(shape, _JOINED)):
                stacked = concat([_cut(flat(blocks.matrix), blocks, shape) for blocks in some])
                done = orthogonalize(
                    stacked, iterations=self.iterations, dtype=self.dtype, factor=self._factor(shape)
                )
                start = 0
                for blocks in some:
                    stop = start + blocks.number
                    own = flat(blocks.matrix)
                    part = array_namespace(done).reshape(done[start:stop, ...], (-1,))
                    if self.nesterov and is_mutable(own):  # the blended momentum is not needed any more
                        own[_range(blocks, shape)] = part
                    else:
                        made[blocks.matrix][blocks.first] = part
                    start = stop
        return [_joined(parts, flat(matrix)) if parts else flat(matrix) for matrix, parts in enumerate(made)]

    def _parts(self, rows: int) -> list[tuple[int, int, int]]:
        """Return the first row, the number of blocks and the rows per block, for the whole blocks and for the rest."""
        most = min(rows, self.block_rows or rows)
        whole = rows // most
        rest = rows - whole * most
        return [(0, whole, most)] + [(whole * most, 1, rest)] * (rest > 0)

    def _factor(self, matrix: Shape) -> float:
        rows, columns = matrix
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _first_three(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def _most(shape: Shape, elements: int) -> int:
    """Return how many blocks of a shape fit into ``elements``, at least 1."""
    return max(1, elements // math.prod(shape))


def _together(every: Sequence[_Blocks], most: int) -> Iterator[list[_Blocks]]:
    """Yield runs of at most ``most`` blocks; a single entry with more forms its own run."""
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
    """Return blocks of a flat matrix, of shape (blocks, rows, columns)."""
    return array_namespace(flat).reshape(flat[_range(blocks, shape)], (blocks.number, *shape))


def _range(blocks: _Blocks, shape: Shape) -> slice:
    """Return where blocks lie in their flat matrix."""
    start = blocks.first * shape[1]
    return slice(start, start + blocks.number * math.prod(shape))


def _joined(parts: dict[int, Array], like: Array) -> Array:
    """Return blocks in ascending order as one vector, in the dtype of ``like``."""
    xp = array_namespace(like)
    return xp.astype(concat([parts[number] for number in sorted(parts)]), like.dtype, copy=False)


def _transposed(flat: Array, shape: Shape) -> Array:
    """Return the transpose of a flat matrix, flat too."""
    xp = array_namespace(flat)
    return xp.reshape(xp.permute_dims(xp.reshape(flat, shape), (1, 0)), (-1,))
