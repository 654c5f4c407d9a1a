"""`PowerSGDMean`: ranks average two thin factors of each matrix, and keep what the factors lose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.cast import Cast
from qcomp.core.compressors.identity import Identity
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.codec import Verdicts, unless_refused
from qcomp.core.mean.compressed_mean import EXACT, Computation, MeanState, Terms
from qcomp.core.mean.costs import Link
from qcomp.core.mean.factors import (
    FactorPlan,
    Finish,
    Matrix,
    Server,
    average,
    make_plan,
    matrices_of,
    serve,
)
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import Stages, announce_lengths, fuse
from qcomp.core.mean.state import require_tensors, zeros_for
from qcomp.core.mean.tensorwise import TensorwiseMean
from qcomp.core.mean.topologies.base import Averaged
from qcomp.core.mean.topologies.choice import ETHERNET
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    compute_dtype_name,
    dtype_name,
    flat,
    is_mutable,
    matmul,
    shaped_like,
    vectors_of,
)
from qcomp.core.numeric.low_rank import (
    LEAST_LEFT,
    LEAST_RIGHT,
    first_factor,
)
from qcomp.core.numeric.random import Key

_LEFT, _RIGHT = 0, 2
"""The hops of a rank's draws for each factor. The owner of the factor draws with the next hop."""
_LARGEST_ERROR = 1 / 6
"""The largest allowed relative squared error of a factor, times the rank.

Above (sqrt(2) - 1)^2, which is a little larger, feedback could diverge.
"""


@dataclass(frozen=True)
class PowerSGDMean(TensorwiseMean):
    """The mean over all ranks by PowerSGD: each matrix as a product of two thin factors, with error feedback.

    Rank i takes M_i = x_i + e_i as an n x m matrix, and all ranks have Q from the last step. Together they compute P =
    orthonormal(mean_i M_i Q) and Q' = mean_i M_i^T P. All ranks return P Q'^T, and rank i keeps e_i' = M_i - P Q'^T.
    Over time nothing is lost, and P Q'^T follows the singular vectors of the mean that have the largest singular
    values.

    Parameters
    ----------
    compressor : Compressor or sequence of Compressor, default Identity()
        Compresses the factors: one compressor for all tensors, or one for each. ``Cast("bfloat16")`` halves what is
        sent. A compressor must lose little, see Notes.
    rank : int, default 1
        Columns of a factor, at least 1. If a matrix has fewer rows or columns, its factors have only as many columns.
    min_compression : float, default 2
        At least 0. A tensor is averaged exactly unless its factors have fewer elements by more than this factor:
        ``rank * (n + m) * min_compression < n * m``. Vectors are always averaged exactly.
    numbers : sequence of int
        As for `TensorwiseMean`.

    Raises
    ------
    ValueError
        If the rank or ``min_compression`` is out of range, or the compressor loses too much.

    Notes
    -----
    The first axes of a tensor are the n rows of its matrix, all others the m columns, cut where n + m is smallest:
    after the first axis of a convolution kernel in torch, and before the last axis in Flax. With N ranks, a rank sends
    on average 2 (N - 1) / N * 4 rank (n + m) bytes for a matrix in float32, in four exchanges. In the first two of
    these, it also sends 2 (N - 1) / N * 4 bytes per element of the exact tensors. Each factor has an owner among the
    ranks, which averages it, makes it orthonormal if it is P, and sends it to all. Factors are dealt to owners by size.
    Two ranks need no owners: they send each other all factors, which takes two exchanges and the same number of bytes.
    Means and orthonormal factors have the same bits in every library, so ranks may have different hardware and
    libraries, and hold the same mean bit for bit. Each rank computes its contributions M_i Q and M_i^T P by the matrix
    product of its library. A column of Q that would be zero, as for a gradient of zero, stays as it was. Elements of Q'
    below 2^-72 count as zero and stay in the residuals, so gradients should be larger.

    Sum identity: the means of T steps add up to the sum of the exact means minus mean_i e_i after the last step, even
    if factors are compressed. Feedback is stable because P P^T is a projection. With compressed factors it is stable if
    P P^T is close to a projection. So the compressor must be a `Cast`, or its ``traits`` must promise that it is
    lossless or has a relative squared error of at most 1 / (6 rank). A state holds e_i as ``worker``. As ``server`` it
    holds the Q of each matrix, the same on all ranks, with its columns joined into one vector. Source: Vogels,
    Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> mean = qcomp.PowerSGDMean(rank=1)
    >>> def rank_main(comm):
    ...     x = np.outer(np.arange(8.0), np.ones(16)) * (1 + comm.rank)  # the mean has rank 1
    ...     state = mean.init(x, comm)
    ...     g, state = mean(x, state, comm)
    ...     return g[:, 0].round(6).tolist()
    >>> qcomp.comm.run_local(2, rank_main)[0]
    [0.0, 1.5, 3.0, 4.5, 6.0, 7.5, 9.0, 10.5]
    """

    kinds: ClassVar[tuple[str, str]] = ("worker_residual", "right_factor")
    low_rank: ClassVar[bool] = True

    compressor: Compressor | Sequence[Compressor] = Identity()
    topology: Literal["two_phase"] = field(default="two_phase", init=False)
    feedback: bool = field(default=True, init=False)
    link: Link = field(default=ETHERNET, init=False)
    divisor: Literal["ranks"] = field(default="ranks", init=False)
    numbers: Sequence[int] = field(default=(), kw_only=True)
    rank: int = 1
    min_compression: float = 2.0

    def __post_init__(self) -> None:
        require_rank(self.rank, self.min_compression)
        compressors = self.compressor if isinstance(self.compressor, Sequence) else (self.compressor,)
        for compressor in compressors:
            if isinstance(compressor, Compressor):
                _require_faithful(compressor, self.rank)
        super().__post_init__()

    @property
    def lossless(self) -> bool:
        """False, since a product of factors is not exact, whatever their compressor."""
        return False

    def facts(self, tensors: Sequence[Array]) -> dict[str, Any]:
        """Return what the ranks must agree on; see `CompressedMean.facts`."""
        return super().facts(tensors) | {"rank": self.rank, "min_compression": self.min_compression}

    def keeps_exact(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape is averaged exactly."""
        return not self._matrices((shape,))

    def zeros(
        self, tensors: Sequence[Array], *, rank: int, size: int, nodes: tuple[int, ...] = ()
    ) -> MeanState:
        """Return a rank's state with residuals of zero and the first factors, without an exchange."""
        shapes = tuple(tuple(t.shape) for t in tensors)
        worker, factors = [], []
        for matrix in self._matrices(shapes):
            residual = zeros_for(tensors[matrix.tensor], matrix.rows * matrix.columns)
            worker.append(residual)
            factors.append(flat(first_factor(matrix.rank, matrix.columns, residual)))
        if not worker:
            return MeanState(rank, size, (), (), nodes=nodes, topology=self.topology)
        return MeanState(rank, size, tuple(worker), tuple(factors), shapes, nodes, self.topology)

    def rescaled(self, state: MeanState, factor: float) -> MeanState:
        """Return the state with all residuals multiplied by a factor, and the right factors as they are."""
        return super().rescaled(state, factor)._replace(server=state.server)

    def layout(
        self,
        shapes: Sequence[tuple[int, ...]],
        *,
        rank: int,
        size: int,
        nodes: tuple[int, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> Layout:
        """Return the layout of the residuals and factors for tensors of these shapes; messages have other layouts."""
        operands = self._operands(shapes, dtypes, rank, Nodes.of(size, nodes))
        matrices = self._matrices(tuple(shapes))
        worker = tuple(Segment(m.tensor, 0, m.rows * m.columns, 0) for m in matrices)
        factors = tuple(Segment(m.tensor, 0, m.rank * m.columns, 0) for m in matrices)
        return Layout(operands, operands.chunks(1), Residuals(worker, factors))

    def message_sizes(
        self, shapes: Sequence[tuple[int, ...]], size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes of a message to or from each owner, for left and for right factors in float32.

        Between two ranks there are no owners: one message has all left factors, and one has all right factors.

        Parameters
        ----------
        shapes : sequence of shapes
        size : int
            Number of ranks.
        """
        nobody = MeanState(0, size, (), ())
        plan = self._plan(tuple(shapes), ("float32",) * len(shapes), nobody)
        return plan.left.layout.message_sizes, plan.right.layout.message_sizes

    def begin(self, tensors: Sequence[Array], state: MeanState, terms: Terms) -> Computation:
        """Return the one round of a call; see `CompressedMean.begin`."""
        self._require_terms(terms, len(tensors))
        self._require_own(state, tensors)
        targets = [b.m for b in terms.blends] or tensors
        vectors = vectors_of(tensors)
        if terms.blends:
            vectors = [
                primitives.blended(b._replace(m=flat(b.m)), g)
                for g, b in zip(vectors, terms.blends, strict=True)
            ]
        given = bool(terms.donate or terms.blends)
        used_up = [given or t.dtype != v.dtype for t, v in zip(tensors, vectors, strict=True)]
        shapes = state.shapes or tuple(tuple(t.shape) for t in tensors)
        plan = self._plan(shapes, tuple(dtype_name(v.dtype) for v in vectors), state)
        stages = self._stages(plan, vectors, used_up, state, terms)

        def finish(results: Sequence[Averaged]) -> tuple[Any, MeanState]:
            (averaged,) = results
            means = unless_refused(averaged.means, averaged.verdicts)
            new_state = state._replace(worker=averaged.worker, server=averaged.server)
            return shaped_like(means, targets), new_state

        return Computation([stages], finish)

    def _stages(
        self,
        plan: FactorPlan,
        vectors: Sequence[Array],
        used_up: Sequence[bool],
        state: MeanState,
        terms: Terms,
    ) -> Stages[Averaged]:
        """Average the factors of the matrices and, exactly, the other tensors, in the same messages."""
        side_by_side: list[Stages[Any]] = []
        if plan.rest:
            nothing = MeanState(state.rank, state.size, (), ())
            plain = EXACT.begin([vectors[i] for i in plan.rest], nothing, Terms(at_once=True))
            side_by_side += plain.rounds
        if plan.matrices:
            factored = self._factored(plan, vectors, used_up, state, terms)
            if plan.left.layout.operands.variable_length:
                factored = announce_lengths(factored, state.rank)
            side_by_side.append(factored)
        results = yield from fuse(side_by_side)
        means: dict[int, Array] = {}
        verdicts: tuple[Array, ...] = ()
        if plan.rest:
            verdicts += results[0].verdicts
            exact, _ = plain.finish(results[:1])
            means.update(zip(plan.rest, exact, strict=True))
        worker, server = (), ()
        if plan.matrices:
            products, worker, server, unread = results[-1]
            verdicts += unread
            means.update(zip((m.tensor for m in plan.matrices), products, strict=True))
        return Averaged([means[i] for i in range(len(vectors))], worker, server, verdicts)

    def _factored(
        self,
        plan: FactorPlan,
        vectors: Sequence[Array],
        used_up: Sequence[bool],
        state: MeanState,
        terms: Terms,
    ) -> Stages[Averaged]:
        """Average the left factor of each matrix, then the right factor of each."""
        verdicts = Verdicts(at_once=plan.left.layout.operands.variable_length)
        old = [_rows(q, m.rank) for q, m in zip(state.server, plan.matrices, strict=True)]
        key = (terms.key or Key())._replace(rank=self._number(state))

        matrices, left, error = self._compensated(plan, vectors, used_up, state.worker, old)
        lefts, error = yield from average(
            plan.left,
            left,
            verdicts,
            error,
            key.at(hop=_LEFT),
            least=LEAST_LEFT,
            finish=primitives.orthonormal,
            server=self._server,
        )
        right = [
            _product(p, _rows(x, m.rows)) for p, x, m in zip(lefts, matrices, plan.matrices, strict=True)
        ]
        rights, error = yield from average(
            plan.right,
            right,
            verdicts,
            error,
            key.at(hop=_RIGHT),
            least=LEAST_RIGHT,
            finish=None,
            server=self._server,
        )
        unread = verdicts.require_accepted(error)

        products, residuals = [], []
        for p, q, x, m in zip(lefts, rights, matrices, plan.matrices, strict=True):
            place = vectors[m.tensor] if terms.overwrite and not used_up[m.tensor] else None
            product, rest = primitives.take_low_rank(
                p, q, x, out=place if place is not None and is_mutable(place) else None
            )
            products.append(product)
            residuals.append(rest)
        factors = tuple(map(flat, primitives.next_factors(rights, old)))
        return Averaged(products, tuple(residuals), factors, unread)

    def _has_owners(self, size: int) -> bool:
        """Return whether factors have owners. Two ranks need none: they send each other all factors in one exchange."""
        return size > 2

    def _number(self, state: MeanState) -> Any:
        """Return the number of this rank, on which random draws depend."""
        return state.rank

    def _server(self, finish: Finish | None) -> Server:
        """Return the function that an owner applies to arriving factors; see `qcomp.core.mean.factors.serve`."""
        return partial(serve, finish=finish)

    def _compensated(
        self,
        plan: FactorPlan,
        vectors: Sequence[Array],
        used_up: Sequence[bool],
        residuals: Sequence[Array],
        rights: Sequence[Array],
    ) -> tuple[list[Array], list[Array], NonFiniteError | None]:
        """Return each matrix plus its residual, flat; the product of each sum with its right factor; and any error.

        With an error, the matrices are zeros. A product is NaN if a device has refused the values of the matrix.
        """
        matrices, products = [], []
        try:
            for matrix, residual, right in zip(plan.matrices, residuals, rights, strict=True):
                x = vectors[matrix.tensor]
                buffer = x if used_up[matrix.tensor] and is_mutable(x) else primitives.empty_like(x)
                values, refused = primitives.compensate(
                    x, residual, what=f"PowerSGD of rank {self.rank}", out=buffer
                )
                matrices.append(values)
                # Multiplied at once, while the matrix is in a cache.
                products.append(_unless(refused, _left_product(values, matrix, right)))
        except NonFiniteError as error:
            nothing = [array_namespace(e).zeros_like(e) for e in residuals]
            return nothing, list(map(_left_product, nothing, plan.matrices, rights)), error
        return matrices, products, None

    def _plan(
        self, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], state: MeanState
    ) -> FactorPlan:
        """Return the plan for tensors of these shapes, which is made once and kept."""
        asked = (shapes, dtypes, state.rank, state.size)
        known = self._plans  # ranks in threads of one process share it
        found = known.get(asked)
        if found is None:
            if len(known) >= _MOST_PLANS:
                known.clear()
            numbers = self.numbers or self.bucket_numbers(shapes)
            matrices, chosen = self._matrices(shapes), self._chosen(shapes)
            found = make_plan(
                matrices,
                chosen,
                dtypes,
                numbers,
                state,
                owners=state.size if self._has_owners(state.size) else 1,
            )
            known[asked] = found
        return found

    @cached_property
    def _plans(self) -> dict[Any, FactorPlan]:
        return {}

    def _operands(
        self, shapes: Sequence[tuple[int, ...]], dtypes: tuple[str, ...], rank: int, nodes: Nodes
    ) -> Operands:
        sizes = tuple(map(math.prod, shapes))
        return Operands(tuple(self._chosen(shapes)), sizes, dtypes or ("float32",) * len(sizes), rank, nodes)

    def _chosen(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[Compressor]:
        """Return the compressor of the factors of each tensor."""
        self.compressors_of(shapes)  # raises if there is not one for each
        return self.compressors if isinstance(self.compressor, tuple) else self.compressors * len(shapes)

    def _matrices(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[Matrix, ...]:
        return matrices_of(shapes, self.rank, self.min_compression)

    def _require_own(self, state: MeanState, tensors: Sequence[Array]) -> None:
        """Raise ValueError unless the state holds this mean's residuals and factors for these tensors."""
        given = tuple(tuple(t.shape) for t in tensors)
        shapes = state.shapes or given
        require_tensors(state._replace(shapes=shapes), tensors, self.topology)
        for index, (found_shape, expected_shape) in enumerate(zip(given, shapes, strict=True)):
            if found_shape != expected_shape:  # as a matrix, it could have other rows
                raise ValueError(f"x[{index}] has shape {found_shape}; state was made for {expected_shape}")
        matrices = self._matrices(shapes)
        expected = [m.rows * m.columns for m in matrices], [m.rank * m.columns for m in matrices]
        found = tuple([math.prod(e.shape) for e in kept] for kept in (state.worker, state.server))
        if found != expected:
            raise ValueError(
                f"state has residuals of {found[0]} and factors of {found[1]} elements; expected {expected[0]} and "
                f"{expected[1]} for rank {self.rank}: make it with this mean's init"
            )
        for m, residual in zip(matrices, state.worker, strict=True):
            dtype, kept = dtype_name(tensors[m.tensor].dtype), dtype_name(residual.dtype)
            if compute_dtype_name(dtype) != kept:
                raise ValueError(
                    f"x[{m.tensor}] has dtype {dtype}; state was made for arrays that are computed in {kept}"
                )


_MOST_PLANS = 256
"""How many plans a mean remembers, as for the layouts of a `CompressedMean`."""


def require_rank(rank: int, min_compression: float) -> None:
    """Raise ValueError unless the arguments are valid settings of PowerSGD."""
    if type(rank) is not int or rank < 1:
        raise ValueError(f"rank is {rank!r}; expected an integer, at least 1")
    if not 0 <= min_compression < math.inf:
        raise ValueError(f"min_compression is {min_compression!r}; expected a finite number >= 0")


def _require_faithful(compressor: Compressor, rank: int) -> None:
    """Raise ValueError if a compressor may lose so much of a factor that feedback would not be stable.

    Compression turns P, which has orthonormal columns, into P + E, with |E|^2 <= rank times the relative squared error.
    For feedback to be stable, I - (P + E)(P + E)^T must have a norm below 1, so |P + E| <= 1 + |E| must stay below
    sqrt(2).
    """
    traits = compressor.traits
    losses = [1 - traits.delta] if traits.delta is not None else []
    losses += [traits.omega] if traits.omega is not None else []
    if traits.lossless or isinstance(compressor, Cast) or (losses and min(losses) * rank <= _LARGEST_ERROR):
        return
    told = f"a relative squared error of {min(losses):.3g}" if losses else "no bound on its error"
    raise ValueError(
        f"compressor is {compressor.spec}, which promises {told}; PowerSGD of rank {rank} needs at most "
        f"{_LARGEST_ERROR / rank:.3g} for its factors, or feedback could diverge: pass compressor=qcomp.Identity(), "
        "qcomp.Cast('bfloat16') or qcomp.QSGD(levels=127)"
    )


def _rows(x: Array, count: int) -> Array:
    """Return a vector as a matrix with this number of rows."""
    return array_namespace(x).reshape(x, (count, -1))


def _product(first: Array, second: Array) -> Array:
    """Return a matrix product in the dtype of its two factors, even in a context such as ``torch.autocast``."""
    xp = array_namespace(first)
    return xp.astype(matmul(first, second), first.dtype, copy=False)


def _left_product(values: Array, matrix: Matrix, right: Array) -> Array:
    """Return the product of a matrix and a right factor, as a left factor."""
    return _transposed(_product(_rows(values, matrix.rows), _transposed(right)))  # faster than q x^T


def _transposed(matrix: Array) -> Array:
    return array_namespace(matrix).matrix_transpose(matrix)


def _unless(refused: Array | None, x: Array) -> Array:
    """Return x, or NaN if a device has refused the values from which x was made."""
    if refused is None:
        return x
    xp = array_namespace(x)
    return xp.where(refused > 0, xp.asarray(math.nan, dtype=x.dtype), x)
