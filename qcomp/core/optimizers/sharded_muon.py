"""`ShardedMuon`: Muon for sharded parameters, with one shard of each on every rank."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qcomp.core.compressors.identity import Identity
from qcomp.core.errors import MismatchError
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.owned import OwnedMean, Shape
from qcomp.core.mean.owned_shards import ExactShards, ShardedMean
from qcomp.core.mean.sharding import Sharding
from qcomp.core.mean.stages import Stages
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers.agreement import digests
from qcomp.core.optimizers.clipping import clip_scale
from qcomp.core.optimizers.muon import MatrixCompression, Muon
from qcomp.core.reporting import name_ranks
from qcomp.core.state import OptimizerState


@dataclass(frozen=True, kw_only=True)
class ShardedMuon(Muon):
    """Muon for sharded parameters, with one shard on each rank.

    Parameters, gradients and the moments of AdamW are flat arrays with this rank's shards. Everything else is as in
    `Muon`, which describes the other settings. Names, shapes and matrices refer to whole tensors. Without compression,
    the model's parameters are the same as with `Muon`, bit for bit.

    A rank sends each of its shards to the owner of the matrix, and gets its shard of the update. With N ranks it sends
    1/N of the bytes that it would send with `Muon`. See `ShardedMean` for details and for the sum identity, and
    `ExactShards` for the tensors that AdamW moves.

    With ``clip_norm`` the norm is sqrt(mean_j |g_j|^2) over the replicas j. There are no whiteners, since a rank with a
    shard of g cannot make its shard of W g. The first step does not check whether elements move whose gradients are 0.
    """

    compares_gradients = False
    sharded = True

    shards: Sharding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.whiten_steps is not None:
            raise ValueError(
                f"whiten_steps is {self.whiten_steps!r}; expected None for sharded parameters: whitening needs whole "
                "gradients"
            )

    @cached_property
    def compression(self) -> "_OfShards":
        """What this optimizer compresses: the shards of the gradients and the updates of matrices."""
        whole = super().compression
        of_whole: Any = whole.mean
        mean = ShardedMean(
            of_whole.compressor,
            updates=of_whole.updates,
            rule=of_whole.rule,
            repaid=of_whole.repaid,
            sharding=self.shards,
        )
        plain = ExactShards(Identity(), feedback=False, sharding=self.shards)
        return _OfShards(mean, plain=plain, stacks=whole.stacks, splits=whole.splits)

    def shapes_of(self, params: Sequence[Array]) -> list[Shape]:
        """Return the shapes of the whole parameters; raise ValueError unless there is one shard for each."""
        if len(params) != len(self.shards.shapes):
            raise ValueError(f"params has {len(params)} arrays; shards has {len(self.shards.shapes)} shapes")
        return list(self.shards.shapes)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments and residuals of zero for this rank's shards."""
        if size != len(self.shards.places):
            raise ValueError(
                f"shards has {len(self.shards.places)} ranks; comm has {size} ranks; expected equal numbers"
            )
        for index, (name, p) in enumerate(zip(names, params, strict=True)):
            start, stop = self.shards.part(index, rank)
            if tuple(p.shape) != (stop - start,):
                raise ValueError(
                    f"params[{index}], the shard of {name!r}, has shape {tuple(p.shape)}; expected "
                    f"{(stop - start,)}, the elements {start} to {stop} of {self.shards.shapes[index]} in the order of "
                    "the shards"
                )
        return super().initial_state(params, names, rank, size)

    def _compare_parameters(self, names: Sequence[str], params: Sequence[Array], size: int) -> Stages[None]:
        own = json.dumps(digests(names, params))
        held = [json.loads(text) for text in (yield from gather_texts(own, size, params[0]))]
        for first in self.shards.ranks[0]:
            ranks = self.shards.holders(first)
            for index, name in enumerate(names):
                if len({held[r][index][1] for r in ranks}) > 1:
                    raise MismatchError(
                        f"the shards of the parameter {name!r} differ between {name_ranks(ranks)}, which hold the "
                        "same part: load the same weights into all replicas"
                    )

    def own_kinds(self, stage: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the kinds of AdamW's moments, of which each rank has a part."""
        return ShardedMean.part_kinds

    def may_move_zeros(self, state: OptimizerState) -> bool:  # noqa: ARG002
        """Return False, since the ranks have no slices in common that they could check."""
        return False

    def clip_scale(self, grads: Sequence[Array], state: OptimizerState) -> Stages[float]:
        """Return the factor that brings the norm of the gradients down to ``clip_norm``, the same on all ranks."""
        assert self.clip_norm is not None
        return clip_scale(self.clip_norm, grads, state.size, len(self.shards.ranks))


@dataclass(frozen=True)
class _OfShards(MatrixCompression):
    """The compression of `ShardedMuon`, which tells the mean which tensors are averaged exactly."""

    def mean_of(self, state: OptimizerState) -> OwnedMean:
        """Return the `OwnedMean` of a state's matrices."""
        mean: Any = super().mean_of(state)
        key = mean.rule, state.exact
        if key not in self._known:
            self._known[key] = replace(mean, exact=state.exact)
        return self._known[key]
