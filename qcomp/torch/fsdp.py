"""Compresses gradients and weights of models that ``fully_shard`` or ``replicate`` has prepared (FSDP2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.core.checkpoint.schema import Entries, Whole, read, shown
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import QSGD
from qcomp.core.errors import MismatchError, NonFiniteError
from qcomp.core.handshake import agree, handshake
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy, Tensor
from qcomp.core.reporting import warn_caller
from qcomp.integrations.ddp.before_steps import BlindVariances, UnusableGradients
from qcomp.torch.exchanges import (
    GatheredWeights,
    ReplicatedGradients,
    Rules,
    ScatteredGradients,
)
from qcomp.torch.fsdp_units import Unit, units_of

__all__ = ["Compression", "compress"]


def compress(
    model: Any,
    gradients: Compressor | None = QSGD(levels=7, bucket_size=128),
    weights: Compressor | None = None,
    *,
    replicas: Any = None,
    feedback: bool | None = None,
    topology: str = "auto",
    exact: ExactPolicy | None = ExactBelow(10_000),
    weight_changes: bool = False,
    seed: int = 0,
    nonfinite: Literal["raise", "propagate"] = "raise",
) -> Compression:
    """Compress the exchanges of a sharded model, for any optimizer.

    Collective: all ranks call it after ``fully_shard`` or ``replicate``, and raise at once if they differ.

    Parameters
    ----------
    model : module
        Prepared by ``torch.distributed.fsdp.fully_shard``, whole or layer by layer.
    gradients : Compressor or None, default QSGD(levels=7, bucket_size=128)
        Compresses gradients where they are averaged: in the reduce-scatter, or between ``replicas``. None leaves them
        as they are.
    weights : Compressor or None, default None
        Compresses weights where they are gathered, for instance ``qcomp.MinMaxUInt8()``. Every rank computes with the
        same decoded weights; the optimizer keeps its own weights exactly. None leaves them exact.
    replicas : DeviceMesh or ProcessGroup, optional
        The ranks that have the same shards as this one. The model must be sharded over a one-dimensional mesh without
        other replicas, such as ``mesh["shard"]`` of a mesh with the dimensions ("replicas", "shard"), or replicated
        over a mesh of one rank. Gradients are then reduced exactly inside a shard group, whose ranks are close to each
        other, and averaged with compression between replicas, which are farther apart.
    feedback : bool, optional
        Whether error feedback adds what compression loses to the next gradients. By default True unless ``gradients``
        is unbiased. On each rank, residuals are as large as the gradients of the whole model, or with ``replicas`` as
        large as the gradients of the rank's shards.
    topology : str, default "auto"
        Topology of the mean between ``replicas``, see `qcomp.CompressedMean`.
    exact : callable or None, default ExactBelow(10_000)
        Selects the parameters that stay exact; None for none. It is given the shapes of whole parameters, not shards.
    weight_changes : bool, default False
        Whether ``weights`` compresses only the changes since weights were last gathered. Changes lose less, so one to
        four bits suffice; but each rank keeps the last weights of the whole model, in float32.
    seed : int, default 0
        Seed of the random draws, equal on all ranks.
    nonfinite : {"raise", "propagate"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. In both cases the gradients of that module become NaN
        on all ranks, its residuals do not change, and a GradScaler skips the step on all ranks; see
        `Compression.rescale`. ``"raise"``: an optimizer that would step with these gradients raises `NonFiniteError`
        and leaves its parameters unchanged. ``"propagate"``: the optimizer steps, as under plain FSDP2. With
        ``replicas``, only the ranks that hold the shard with such a gradient get NaN, and only they raise.

    Returns
    -------
    Compression
        With ``state_dict`` and ``load_state_dict`` for checkpoints.

    Raises
    ------
    TypeError
        If nothing of the model is sharded, or ``replicas`` is neither a mesh nor a process group.
    ValueError
        If a parameter has no values yet, or torch offers no hook for a requested compression; the error says what to do
        instead.
    MismatchError
        On every rank, if the ranks differ in these settings or in the model, or if replicas differ in their weights.

    Warns
    -----
    UserWarning
        If nothing is compressed; or in a step, if the optimizer divides by averages of squared gradients, as Adam does,
        and ``gradients`` keeps only signs.

    Notes
    -----
    Per step, a rank of N sends (N - 1) / N of the payload of the whole gradient, and (N - 1) / N of the payload of the
    weights each time they are gathered: twice where weights are freed after the forward pass. If some parameters of a
    module have no gradient on any rank, the module's other gradients are compressed as one tensor, in which buckets may
    span several parameters. Parameters that require no gradient are left out. If ``requires_grad`` changes later,
    compressors without feedback go on with the parameters that require a gradient from then on; with feedback, the
    backward pass raises ValueError on all ranks, and `compress` must be called again. Source: Wang et al. (ZeRO++),
    2023; Markov et al. (QSDP), ICML 2023.

    Examples
    --------
    >>> import qcomp.torch.fsdp, torch, torch.distributed as dist
    >>> from torch.distributed.fsdp import fully_shard
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> model = fully_shard(torch.nn.Linear(128, 128), mesh=mesh)
    >>> compression = qcomp.torch.fsdp.compress(model)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> dist.destroy_process_group()
    """
    if nonfinite not in ("raise", "propagate"):
        raise ValueError(f"nonfinite is {nonfinite!r}; expected 'raise' or 'propagate'")
    for argument, compressor in (("gradients", gradients), ("weights", weights)):
        if not isinstance(compressor, Compressor | None):
            raise TypeError(f"{argument} is {compressor!r}; expected a qcomp.Compressor, or None")
    if gradients is None and weights is None:
        raise ValueError("gradients and weights are None; expected a compressor for at least one of them")
    units = units_of(model)
    between = _group_of(replicas)
    _require_place(units, gradients, between)
    if feedback is None:
        feedback = gradients is not None and not gradients.traits.unbiased
    tensors = [
        Tensor(name, tuple(p.shape), p.numel())
        for u in units
        for name, p in zip(u.names, u.params, strict=True)
    ]
    kept = exact(tensors) if exact is not None else [False] * len(tensors)
    is_exact = {tensor.name: bool(found) for tensor, found in zip(tensors, kept, strict=True)}
    trained = [name for u in units for name in u.trained().names]
    exchanged = [tensor for tensor in tensors if weights is not None or tensor.name in trained]
    if exchanged and all(is_exact[tensor.name] for tensor in exchanged):
        warn_caller(
            f"compress compresses nothing: exact={exact!r} keeps all {len(exchanged)} parameters exact (the largest "
            f"has {max(tensor.size for tensor in exchanged)} elements); pass exact=None to compress all"
        )
    facts = {
        "gradients": gradients and gradients.spec,
        "weights": weights and weights.spec,
        "feedback": feedback,
        "topology": topology,
        "exact": list(is_exact.items()),
        "weight_changes": weight_changes,
        "modules": [[u.name, *u.names] for u in units],
        "shapes": [list(tensor.shape) for tensor in tensors],
        "sharded axes": [unit.axes for unit in units],
        "requires_grad": {
            name: p.requires_grad for u in units for name, p in zip(u.names, u.params, strict=True)
        },
        "seed": seed,
        "nonfinite": nonfinite,
    }
    comms = _Communicators(facts, units[0].own_shards(1)[0])
    unusable = UnusableGradients(p for unit in units for p in unit.params) if nonfinite == "raise" else None
    compressed = [p for u in units for name, p in zip(u.names, u.params, strict=True) if not is_exact[name]]
    blind = BlindVariances(compressed, [] if gradients is None else [gradients])
    terms = Rules(feedback, is_exact, seed, unusable.refuse if unusable else _pass_on, (unusable, blind))
    compression = Compression(comms)
    for unit in units:
        if unit.shards > 1:
            comms.of(unit.group)
        if gradients is not None and between is not None:
            replicated = ReplicatedGradients(unit, gradients, comms.of(between), terms, topology)
            unit.module.set_all_reduce_hook(replicated)
            compression.parts[unit.name] = replicated
        elif gradients is not None and unit.shards > 1:
            scattered = ScatteredGradients(unit, gradients, comms.of(unit.group), terms)
            unit.module.set_custom_reduce_scatter(scattered)
            compression.parts[unit.name] = scattered
        if weights is not None and unit.shards > 1:
            gathered = GatheredWeights(unit, weights, comms.of(unit.group), terms, changes=weight_changes)
            unit.module.set_custom_all_gather(gathered)
            compression.weights.append(gathered)
    return compression


class Compression:
    """The exchanges that `compress` has put into a model, and this rank's residuals for checkpoints."""

    def __init__(self, comms: _Communicators) -> None:
        self._comms = comms
        self.parts: dict[str, ScatteredGradients | ReplicatedGradients] = {}
        self.weights: list[GatheredWeights] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others, without headers."""
        return self._comms.bytes_sent

    @property
    def skipped(self) -> int:
        """How often the gradients of a module were not finite on some rank."""
        return sum(part.skipped for part in self.parts.values())

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor, because the next gradients have another scale.

        `qcomp.integrations.ddp.HookState.rescale` explains when this is needed.

        Parameters
        ----------
        factor : float
            The new scale divided by the old one, a finite number above 0, equal on all ranks.

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
            for part in self.parts.values():
                part.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and counters, as plain types and tensors; every rank must save its own dict.

        Residuals of a reduce-scatter are whole tensors in the shapes of the parameters, whatever the mesh.
        """
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"rank": dist.get_rank(), "size": dist.get_world_size(), "parts": parts}

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a saved state; collective.

        Parameters
        ----------
        saved : mapping, or sequence of mappings
            The dict that `state_dict` returned on this rank, or a list of the dicts of all ranks that saved, in any
            order. With another number of ranks, each rank continues with the mean of the old ranks' residuals. With
            ``replicas``, only the number of replicas may have changed, not the number of shards.

        Raises
        ------
        ValueError
            If ``saved`` belongs to another rank, number of ranks, model or kind of compression. The state stays as it
            was.
        MismatchError
            On the other ranks, if some rank raises ValueError.
        """
        problem: Exception | None = None
        known: dict[str, Any] = {}
        loaded: dict[str, Any] = {}
        try:
            states = _states(saved)
            for name, part in self.parts.items():
                known[name] = part.read([read(state, name, Entries(), "parts") for state in states])
        except (
            Exception
        ) as error:  # perhaps on this rank alone, so `agree` comes before any exchange about the parts
            problem = ValueError(f"saved does not fit: {type(error).__name__}: {error}")
        self._comms.agree(problem)
        try:
            loaded = {name: part.agreed(known[name]) for name, part in self.parts.items()}
        except (ValueError, MismatchError) as error:
            problem = ValueError(f"saved does not fit: {error}")
        self._comms.agree(problem)
        for name, part in self.parts.items():
            part.load(loaded[name])
        for gathered in self.weights:
            gathered.forget()


def _pass_on(_: NonFiniteError) -> None:
    """Let optimizers use gradients that are not finite."""


def _states(saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts of the states to load: this rank's own, or those of all ranks if their number has changed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given = [saved] if isinstance(saved, Mapping) else list(saved)
    for one in given:
        if not isinstance(one, Mapping):
            raise ValueError(f"it has {shown(one)}; expected dicts from state_dict")
    places = [(read(one, "rank", Whole(), "it"), read(one, "size", Whole(), "it")) for one in given]
    parts = [read(one, "parts", Entries(), "it") for one in given]
    if isinstance(saved, Mapping):
        if places != [(rank, size)]:
            raise ValueError(
                f"it belongs to rank {places[0][0]} of {places[0][1]}; this is rank {rank} of {size}: pass a list "
                "with the states of all ranks that saved"
            )
        return parts
    if not places or sorted(places) != [(number, len(places)) for number in range(len(places))]:
        ranks = sorted(number for number, _ in places)
        raise ValueError(
            f"it is a list with the states of the ranks {ranks}; expected one state of each rank that saved"
        )
    return [parts[places.index((rank, size))]] if len(places) == size else parts


class _Communicators:
    """One communicator for each process group, whose ranks have agreed on the settings."""

    def __init__(self, facts: Mapping[str, object], like: Any) -> None:
        self._facts = facts
        self._like = like
        self._of: dict[str, TorchCommunicator] = {}

    def of(self, group: Any) -> TorchCommunicator:
        """Return the communicator of a process group; collective the first time."""
        name = str(group.group_name)
        if name not in self._of:
            comm = TorchCommunicator(group)
            handshake(comm, self._facts, like=self._like)
            self._of[name] = comm
        return self._of[name]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent over all communicators."""
        return sum(comm.bytes_sent for comm in self._of.values())

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank if any has a problem; ranks pass problems on from one group to the next."""
        for comm in self._of.values():
            try:
                agree(comm, problem, what="load its state", like=self._like)
            except (ValueError, MismatchError) as found:
                problem = found
        if problem is not None:
            raise problem


def _group_of(replicas: Any) -> Any:
    """Return the process group of the argument ``replicas``."""
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(
                f"replicas is a mesh of {replicas.ndim} dimensions; expected one, such as mesh['replicas']"
            )
        return replicas.get_group()
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas is {replicas!r}; expected a one-dimensional DeviceMesh, or a ProcessGroup")
    return replicas


def _require_place(units: Sequence[Unit], gradients: Compressor | None, between: Any) -> None:
    """Raise ValueError where torch offers no hook for the requested compression."""
    for unit in units:
        if not unit.is_sharded_once:
            raise ValueError(
                f"{unit.label} is sharded along several dimensions of its mesh, as by tensor parallelism; expected "
                "one dimension: if there are more, torch does not tell which parts of which parameters a message holds"
            )
        if between is not None and unit.copies > 1:
            raise ValueError(
                f"replicas is given, but {unit.label} has {unit.copies} copies of each shard in its own mesh, over "
                "which FSDP2 sums exactly before it calls any hook: shard over mesh['shard'] alone, or replicate "
                "over a mesh of one rank"
            )
        if between is None and gradients is not None and unit.shards == 1 and unit.copies > 1:
            raise ValueError(
                f"{unit.label} is replicated over {unit.copies} ranks, over which FSDP2 sums exactly before it calls "
                "any hook: replicate over a mesh of one rank, and pass the mesh of all ranks as replicas"
            )
