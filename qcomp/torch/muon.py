"""Muon as an optimizer of torch: a thin layer over the algorithm in the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from qcomp.core import optimizers
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import LloydMax, ScaledSign
from qcomp.core.mean.sharding import Sharding
from qcomp.core.optimizers.sharded_muon import ShardedMuon
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState
from qcomp.core.variance.schedules import Schedule
from qcomp.torch.group_settings import exact_of
from qcomp.torch.muon_shards import own_shard, sharding_of
from qcomp.torch.optimizer import AveragingOptimizer, arguments


class Muon(AveragingOptimizer):
    """Muon for matrices with compressed gradients and updates, AdamW for all else: `qcomp.Muon` as a torch optimizer.

    Name the embeddings and the output head in ``others``, or put them into a group with ``others=True`` or
    ``use_muon=False``: nothing else distinguishes them from the weights between hidden layers, and Muon suits only the
    latter.

    Parameters
    ----------
    params : iterable of Parameter, of pairs of names and parameters, or of dict
        As for every optimizer of torch: ``model.parameters()``, ``model.named_parameters()`` or groups. Names are used
        in errors, for random draws and for ``others``; give names on all ranks, or on none. A group may have
        ``use_muon``, as in Keller Jordan's ``MuonWithAuxAdam``: if it is False, AdamW moves all tensors of the group,
        with the group's own ``lr``, ``betas`` and ``eps``; if it is True, Muon moves them, with ``momentum``.
    lr : float, default 1e-3
        Learning rate, a finite number >= 0; AdamW's is ``adam_learning_rate_factor`` times it. Each group has its
        own, which schedulers may change.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0, decoupled. Each group has its own. The default of ``torch.optim.Muon`` is 0.1.
    momentum : float, default 0.95
        Decay rate of the momentum of the matrices, from 0 to below 1. The same in all groups; it may change between
        steps.
    nesterov : bool, default True
        Whether to use Nesterov momentum.
    adjust_lr_fn : {"original", "match_rms_adamw"}, default "original"
        The factor of a matrix's learning rate, as in ``torch.optim.Muon``.
    others : sequence of str, callable or bool, default ()
        The matrices that AdamW moves: patterns of names, or a policy, see `qcomp.Muon`; or True for all, or False for
        none. Each group may have its own, fixed from the first step on. AdamW always moves vectors and depthwise
        kernels, which have one input channel; an ordinary convolution of one channel needs ``splits={name: 1}``.
    stacks : sequence of str, default ()
        Patterns of the names of tensors whose slices along the first axis are matrices of their own, such as experts.
    splits : mapping of str to int or sequence of int, default {}
        Patterns of the names of tensors that hold several matrices along the axis of the outputs, such as queries, keys
        and values, each with the number of equal parts, or the rows of each part: ``{"*qkv*": 3}``. 1 says that a
        tensor is one matrix. If the tensor looks like depthwise kernels, the pattern must be its whole name.
    output_axis : {0, -1}, default 0
        The axis of a weight whose indices are the outputs of its layer: 0 in torch, -1 in ``Conv1D`` of transformers.
    block_rows : int, optional
        The largest number of rows of a matrix that are orthogonalised together. None, the default, orthogonalises whole
        matrices. Blocks of 64 to 128 rows take a fraction of the time, see `qcomp.Muon`.
    newton_schulz_steps : int, default 5
        Number of Newton-Schulz iterations, at least 1: ``ns_steps`` of ``torch.optim.Muon``.
    newton_schulz_dtype : {"float32", "bfloat16"}, default "float32"
        Dtype of the matrix products in the orthogonalisation. ``"bfloat16"``, as in ``torch.optim.Muon``, is several
        times as fast on GPUs and on CPUs that support it.
    adam_learning_rate_factor : float, optional
        AdamW's learning rate divided by the learning rate of the group. None, the default, is 1 with
        ``adjust_lr_fn="match_rms_adamw"``, or if a group has ``use_muon=False``; else 0.1.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates of AdamW's momentum and variance, each from 0 to below 1. Each group may have its own.
    eps : float, default 1e-8
        Added to the square root of AdamW's variance, >= 0. Each group may have its own.
    compressor : Compressor, default LloydMax(bits=4)
        Compresses the gradients of the matrices.
    update_compressor : Compressor, default ScaledSign(scale="rms")
        Compresses the updates of the matrices.
    whiten_steps : callable, optional
        Returns whether a step, counted from 1, makes new whiteners, such as ``qcomp.DoublingIntervals(each=1)``: they
        cost memory, and save bits, see `qcomp.Muon`. None, the default, never whitens.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i. None, the default, never clips.
    seed : int, default 0
        Seed of the compressors' random draws, 0 to 2**64 - 1.
    nonfinite : {"raise", "skip"}, default "raise"
        What all ranks do if a gradient on any rank is infinite or NaN. Under a GradScaler they skip the step.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `qcomp.Optimizer`.
    comm : communicator or ProcessGroup, optional
        By default all ranks of torch.distributed if it is initialised, else `qcomp.comm.world`. With ``model``, models
        in the same backward pass must not share a communicator; by default each gets its own.
    model : torch.nn.parallel.DistributedDataParallel, optional
        The model of these parameters, if it is wrapped: a matrix goes to its owner when its bucket is ready, and owners
        orthogonalise while the backward pass goes on. Then a parameter that no rank used counts as having a gradient of
        zero. Only ``clip_norm`` can clip gradients. A GradScaler cannot be used. By default no model is wrapped, and
        `step` averages.
    init_sync : bool, default True
        Whether all ranks get rank 0's parameters. With ``model``, DistributedDataParallel has copied them already. If
        False, parameters that differ between ranks raise an error on every rank.

    See `qcomp.Muon` for the algorithm, what it sends, and its source. With ``model``, owners and random draws are the
    same as without it, so steps are equal too: bit for bit if the library multiplies each matrix of a batch as it
    multiplies a single one.

    Parameters may be sharded by ``fully_shard``: all parameters over one mesh, which may have replicas, and each
    parameter along any axis. Then ``whiten_steps`` cannot be used. Each rank sends its shard of a gradient to the owner
    of the matrix, and gets its shard of the update. With N ranks it sends 1/N of the bytes that it would send for whole
    tensors. If ``comm`` has the ranks of several meshes of one dimension, each mesh holds a replica, and Muon averages
    the gradients of the replicas; else FSDP2 has averaged them. ``init_sync`` has no effect on shards: replicas that
    begin with different parameters are an error. Without compression, parameters equal those of Muon on whole tensors,
    bit for bit.

    Examples
    --------
    >>> import torch, qcomp.torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 256))
    >>> optimizer = qcomp.torch.Muon(model.named_parameters(), lr=0.02, others=("0.*", "2.*"))
    >>> model(torch.ones(1, dtype=torch.long)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.core_state.exact  # what AdamW moves: not the weight between the hidden layers
    (True, False, True, True, True)
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum", "betas", "eps")
    fixed: ClassVar[tuple[str, ...]] = ("others", "use_muon")
    _shards: Sharding | None
    """How the parameters are cut, if they are sharded."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
        others: Sequence[str] | ExactPolicy | bool = (),
        stacks: Sequence[str] = (),
        splits: Mapping[str, int | Sequence[int]] | tuple[()] = (),
        output_axis: int = 0,
        block_rows: int | None = None,
        newton_schulz_steps: int = 5,
        newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32",
        adam_learning_rate_factor: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        compressor: Compressor = LloydMax(bits=4),
        update_compressor: Compressor = ScaledSign(scale="rms"),
        whiten_steps: Schedule | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        nonfinite: Literal["raise", "skip"] = "raise",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        comm: Any = None,
        model: Any = None,
        init_sync: bool = True,
    ) -> None:
        self._adam_factor = adam_learning_rate_factor
        given = {**locals(), "use_muon": None}
        del given["adam_learning_rate_factor"]
        super().__init__(**arguments(self._make_core, given))

    @staticmethod
    def _make_core(**settings: Any) -> optimizers.Muon:
        """Return the optimizer of the core, for shards if the parameters are sharded."""
        if settings["shards"] is not None:
            return ShardedMuon(**settings)
        del settings["shards"]
        return optimizers.Muon(**settings)

    def _begin(self) -> None:
        """Compare the parameters of all ranks, and start; see `AveragingOptimizer`."""
        super()._begin()
        if self._model is None:
            self._require_rates_of_adam()

    def _overlap(self, comm: Any) -> None:
        """Let the model's backward passes start the exchange; see `AveragingOptimizer`."""
        super()._overlap(comm)
        self._require_rates_of_adam()

    def _require_rates_of_adam(self) -> None:
        """Raise if AdamW would move a tensor of a group that has the learning rate of Muon."""
        if self._adam_factor is not None or not self._has_rates_of_adam(self.param_groups):
            return
        rates_of_adam = {
            id(p) for group in self.param_groups if group["use_muon"] is False for p in group["params"]
        }
        for name, p, by_adam in zip(self._names, self._tensors, self.core_state.exact, strict=True):
            if by_adam and id(p) not in rates_of_adam:
                raise ValueError(
                    f"AdamW moves {name!r} of shape {tuple(p.shape)}, but its group has the learning rate of Muon: "
                    "put it into a group with use_muon=False, whose rate is AdamW's, or pass "
                    "adam_learning_rate_factor"
                )

    @staticmethod
    def _has_rates_of_adam(groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the learning rate of any group is AdamW's own, which no factor multiplies."""
        return any(group["use_muon"] is False for group in groups)

    def _policies(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        """Return the core's settings ``others`` and ``shards``, and AdamW's factor."""
        factor = self._adam_factor
        if factor is None and self._has_rates_of_adam(groups):
            factor = 1.0
        whole = self._model is not None  # DistributedDataParallel has whole parameters
        self._shards = None if whole else sharding_of(self._names, self._tensors, self._comm)
        self._init_sync = self._init_sync and self._shards is None
        others = self._others(groups, names)
        return {"adam_learning_rate_factor": factor, "others": others, "shards": self._shards}

    def _values(self) -> list[Any]:
        return super()._values() if self._shards is None else [own_shard(p) for p in self._tensors]

    def _gradients(self) -> tuple[list[Any], bool]:
        gradients, scaled = super()._gradients()
        if self._shards is None:
            return gradients, scaled
        return [None if g is None else own_shard(g) for g in gradients], scaled

    def _write(self, params: Sequence[Any]) -> None:
        if self._shards is None:
            super()._write(params)
            return
        for own, new in zip(self._values(), params, strict=True):
            if new.data_ptr() != own.data_ptr():
                own.copy_(new)

    def _compare(self, before: OptimizerState) -> None:
        if self._shards is None:
            super()._compare(before)

    def _others(self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> Any:
        first, *rest = [_others_of(number, group) for number, group in enumerate(groups)]
        named = self._model is not None or any(group.get("param_names") for group in groups)
        if first == () and not any(rest) and not named:
            self._warn_without_names(groups)
        if not isinstance(first, bool) and all(others == first for others in rest):
            return first
        policies = [
            others if callable(others) or isinstance(others, bool) else ExactBelow(0, others)
            for others in (first, *rest)
        ]
        return exact_of([{"exact": policy} for policy in policies], names)

    def _warn_without_names(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Warn that nothing tells embeddings and heads from other matrices."""
        matrices = [p for group in groups for p in group["params"] if p.requires_grad and p.ndim > 1]
        if len(matrices) > 1:
            warn_caller(
                f"Muon orthogonalises all {len(matrices)} matrices, since no parameter has a name: if embeddings or a "
                "head are among them, pass named_parameters() and others=, or put them into a group with others=True; "
                "if not, pass others=False"
            )


def _others_of(number: int, group: Mapping[str, Any]) -> Any:
    """Return the ``others`` of a group, which ``use_muon`` may decide."""
    others, use_muon = group["others"], group["use_muon"]
    if use_muon is None:
        return others
    if not isinstance(use_muon, bool):
        raise TypeError(f"param_groups[{number}] has use_muon={use_muon!r}; expected True or False")
    if use_muon and others is True:
        raise ValueError(
            f"param_groups[{number}] has use_muon=True and others=True; expected only one of them"
        )
    return (others or False) if use_muon else True
