"""The optimizers of the core as optimizers of torch: CompressedSGD, OneBitAdam, OneBitLamb, QAdam and ZeroOneAdam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from qcomp.core import optimizers
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import QSGD, MinMaxUInt8, ScaledSign
from qcomp.core.mean.averaging import Averaging
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState
from qcomp.core.variance.rules import FreezeRule, VarianceStable
from qcomp.core.variance.schedules import DoublingIntervals, LocalSteps, Schedule
from qcomp.core.variance.watch import VarianceWatch
from qcomp.torch.adamw import BeginsAsAdamW
from qcomp.torch.optimizer import AveragingOptimizer, arguments


class CompressedSGD(AveragingOptimizer):
    """SGD with momentum on the compressed mean gradient: `qcomp.CompressedSGD` as an optimizer of torch.

    Parameters
    ----------
    params : iterable of Parameter, of pairs of names and parameters, or of dict
        As for every optimizer of torch: ``model.parameters()``, ``model.named_parameters()`` or groups. Names are used
        in errors and for random draws; give names on all ranks, or on none.
    lr : float, default 0.1
        Learning rate, a finite number >= 0. Each group has its own, which schedulers may change.
    momentum : float, default 0.9
        Decay rate of the momentum, from 0 to below 1. The same in all groups.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0. Each group has its own; the decay is added to the mean gradient.
    nesterov : bool, default False
        Whether to use Nesterov momentum; needs ``momentum`` above 0.
    compressor : Compressor, default QSGD(levels=7, bucket_size=128)
        Compresses what the ranks exchange. Each group may have its own, fixed from the first step on.
    exact : callable, bool or None, default ExactBelow(10_000)
        Which tensors stay exact: a policy such as `qcomp.ExactBelow`, True for all, False or None for none. Each group
        may have its own, fixed from the first step on.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `qcomp.Averaging`.
    clip_norm : float, optional
        Largest norm sqrt(mean_i |g_i|^2) of the gradients of all ranks i. None, the default, never clips.
    seed : int, default 0
        Seed of the compressor's random draws, 0 to 2**64 - 1.
    nonfinite : {"raise", "skip"}, default "raise"
        What all ranks do if a gradient on any rank is infinite or NaN. Under a GradScaler they skip the step.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `qcomp.Optimizer`.
    comm : communicator or ProcessGroup, optional
        By default all ranks of torch.distributed if it is initialised, else `qcomp.comm.world`. With ``model``, models
        in the same backward pass must not share a communicator; by default each gets its own.
    model : torch.nn.parallel.DistributedDataParallel, optional
        The model of these parameters, if it is wrapped: its backward pass starts the exchange, which saves time. Then a
        parameter that no rank used counts as having a gradient of zero. Where momenta are averaged, only
        ``clip_norm`` can clip gradients. A GradScaler cannot be used. By default no model is wrapped.
    init_sync : bool, default True
        Whether all ranks get rank 0's ``params``, frozen ones too. With ``model``, DistributedDataParallel has copied
        them already. If False, parameters that differ between ranks raise an error on every rank.

    See `qcomp.CompressedSGD` for the algorithm, what it sends, and its source.

    Examples
    --------
    >>> import torch, qcomp.torch
    >>> model = torch.nn.Linear(128, 128)
    >>> optimizer = qcomp.torch.CompressedSGD(model.parameters())
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.core_state.step, optimizer.core_state.stage
    (1, 'compressed')
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        compressor: Compressor = QSGD(levels=7, bucket_size=128),
        exact: ExactPolicy | bool | None = ExactBelow(10_000),
        averaging: Averaging = Averaging(),
        clip_norm: float | None = None,
        seed: int = 0,
        nonfinite: Literal["raise", "skip"] = "raise",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        comm: Any = None,
        model: Any = None,
        init_sync: bool = True,
    ) -> None:
        super().__init__(**arguments(optimizers.CompressedSGD, locals()))


class OneBitAdam(BeginsAsAdamW):
    """1-bit Adam: exact Adam until the variance is stable, then a momentum with one bit per element.

    Parameters
    ----------
    params : iterable of Parameter, of pairs of names and parameters, or of dict
        As for every optimizer of torch: ``model.parameters()``, ``model.named_parameters()`` or groups. Names are used
        in errors and for random draws; give names on all ranks, or on none.
    lr : float, default 1e-3
        Learning rate, a finite number >= 0. Each group has its own, which schedulers may change.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates of the momentum and the variance, each from 0 to below 1. Each group may have its own; the first
        may change between steps.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0. Each group may have its own.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0. Each group has its own.
    freeze : int or FreezeRule, default VarianceStable()
        When to freeze the variance: the number of exact steps, or a rule such as `qcomp.VarianceStable`.
    variance_floor : float, default 0.03
        Smallest frozen variance of an element of a compressed tensor, as a fraction of the tensor's mean variance, from
        0 to 1. Elements that never had a gradient keep a variance of zero, and do not move. With 0 there is no floor,
        as published; then units that are almost never active, such as dead ReLUs, can ruin a training run.
    variance_steps : callable, optional
        Returns whether a step, counted from 1 after the freeze, averages the gradient exactly and measures the variance
        again; for instance ``DoublingIntervals(4)``. None, the default, leaves the variance frozen, as published.
    watch : VarianceWatch or None, default VarianceWatch()
        Checks in the compressed stage whether the frozen variance still fits the gradients, and warns if not.
    decoupled_weight_decay : bool, default True
        True: weight decay as in ``torch.optim.AdamW``. False: it is added to the mean gradient, as in
        ``torch.optim.Adam``.
    compressor : Compressor, default ScaledSign(scale="rms")
        Compresses what the ranks exchange. Each group may have its own, fixed from the first step on.
    exact : callable, bool or None, default ExactBelow(10_000)
        Which tensors stay exact: a policy such as `qcomp.ExactBelow`, True for all, False or None for none. Each group
        may have its own, fixed from the first step on.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `qcomp.Averaging`.
    clip_norm : float, optional
        Largest norm sqrt(mean_i |g_i|^2) of the gradients of all ranks i. None, the default, never clips.
    seed : int, default 0
        Seed of the compressor's random draws, 0 to 2**64 - 1.
    nonfinite : {"raise", "skip"}, default "raise"
        What all ranks do if a gradient on any rank is infinite or NaN. Under a GradScaler they skip the step.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `qcomp.Optimizer`.
    comm : communicator or ProcessGroup, optional
        By default all ranks of torch.distributed if it is initialised, else `qcomp.comm.world`. With ``model``, models
        in the same backward pass must not share a communicator; by default each gets its own.
    model : torch.nn.parallel.DistributedDataParallel, optional
        The model of these parameters, if it is wrapped: its backward pass starts the exchange, which saves time. Then a
        parameter that no rank used counts as having a gradient of zero. Where momenta are averaged, only
        ``clip_norm`` can clip gradients. A GradScaler cannot be used. By default no model is wrapped.
    init_sync : bool, default True
        Whether all ranks get rank 0's ``params``, frozen ones too. With ``model``, DistributedDataParallel has copied
        them already. If False, parameters that differ between ranks raise an error on every rank.

    See `qcomp.OneBitAdam` for the algorithm, what it sends, and its source.

    Examples
    --------
    >>> import torch, qcomp.torch
    >>> model = torch.nn.Linear(128, 128)
    >>> optimizer = qcomp.torch.OneBitAdam(model.parameters())
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.core_state.step, optimizer.core_state.stage
    (1, 'warmup')
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze: int | FreezeRule = VarianceStable(),
        variance_floor: float = 0.03,
        variance_steps: Schedule | None = None,
        watch: VarianceWatch | None = VarianceWatch(),
        decoupled_weight_decay: bool = True,
        compressor: Compressor | None = None,
        exact: ExactPolicy | bool | None = ExactBelow(10_000),
        averaging: Averaging = Averaging(),
        clip_norm: float | None = None,
        seed: int = 0,
        nonfinite: Literal["raise", "skip"] = "raise",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        comm: Any = None,
        model: Any = None,
        init_sync: bool = True,
    ) -> None:
        if compressor is None:
            compressor = ScaledSign(scale="rms")
        super().__init__(**arguments(optimizers.OneBitAdam, locals()))


class OneBitLamb(AveragingOptimizer):
    """1-bit LAMB: exact LAMB until the variance is stable, then a momentum with one bit per element.

    Parameters
    ----------
    params : iterable of Parameter, of pairs of names and parameters, or of dict
        As for every optimizer of torch: ``model.parameters()``, ``model.named_parameters()`` or groups. Names are used
        in errors and for random draws; give names on all ranks, or on none.
    lr : float, default 1e-3
        Learning rate, a finite number >= 0. Each group has its own, which schedulers may change.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates of the momentum and the variance, each from 0 to below 1. Each group may have its own; the first
        may change between steps.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0. Each group may have its own.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0. Each group has its own.
    freeze : int or FreezeRule, default VarianceStable()
        When to freeze the variance: the number of exact steps, or a rule such as `qcomp.VarianceStable`.
    variance_floor : float, default 0.03
        Smallest frozen variance of an element of a compressed tensor, as a fraction of the tensor's mean variance, from
        0 to 1. Elements that never had a gradient keep a variance of zero, and do not move. With 0 there is no floor,
        as published; then units that are almost never active, such as dead ReLUs, can ruin a training run.
    watch : VarianceWatch or None, default VarianceWatch()
        Checks in the compressed stage whether the frozen variance still fits the gradients, and warns if not.
    decoupled_weight_decay : bool, default True
        True: weight decay as in ``torch.optim.AdamW``. False: it is added to the mean gradient, as in
        ``torch.optim.Adam``.
    trust_bounds : tuple of two floats, default (0.01, 10.0)
        Smallest and largest trust ratio, the first above 0.
    trust_decay : float, default 0.9
        Decay rate of the average of the trust ratios in the warm-up, from 0 to below 1.
    factor_bounds : tuple of two floats, default (0.5, 4.0)
        Smallest and largest factor by which compressed steps multiply the average trust ratio, the first above 0.
    factor_change : float, default 0.1
        Largest relative change of a factor per step, from 0 to below 1.
    compressor : Compressor, default ScaledSign(scale="rms")
        Compresses what the ranks exchange. Each group may have its own, fixed from the first step on.
    exact : callable, bool or None, default ExactBelow(10_000)
        Which tensors stay exact: a policy such as `qcomp.ExactBelow`, True for all, False or None for none. Each group
        may have its own, fixed from the first step on.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `qcomp.Averaging`.
    clip_norm : float, optional
        Largest norm sqrt(mean_i |g_i|^2) of the gradients of all ranks i. None, the default, never clips.
    seed : int, default 0
        Seed of the compressor's random draws, 0 to 2**64 - 1.
    nonfinite : {"raise", "skip"}, default "raise"
        What all ranks do if a gradient on any rank is infinite or NaN. Under a GradScaler they skip the step.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `qcomp.Optimizer`.
    comm : communicator or ProcessGroup, optional
        By default all ranks of torch.distributed if it is initialised, else `qcomp.comm.world`. With ``model``, models
        in the same backward pass must not share a communicator; by default each gets its own.
    model : torch.nn.parallel.DistributedDataParallel, optional
        The model of these parameters, if it is wrapped: its backward pass starts the exchange, which saves time. Then a
        parameter that no rank used counts as having a gradient of zero. Where momenta are averaged, only
        ``clip_norm`` can clip gradients. A GradScaler cannot be used. By default no model is wrapped.
    init_sync : bool, default True
        Whether all ranks get rank 0's ``params``, frozen ones too. With ``model``, DistributedDataParallel has copied
        them already. If False, parameters that differ between ranks raise an error on every rank.

    See `qcomp.OneBitLamb` for the algorithm, what it sends, and its source.

    Examples
    --------
    >>> import torch, qcomp.torch
    >>> model = torch.nn.Linear(128, 128)
    >>> optimizer = qcomp.torch.OneBitLamb(model.parameters())
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.core_state.step, optimizer.core_state.stage
    (1, 'warmup')
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze: int | FreezeRule = VarianceStable(),
        variance_floor: float = 0.03,
        watch: VarianceWatch | None = VarianceWatch(),
        decoupled_weight_decay: bool = True,
        trust_bounds: tuple[float, float] = (0.01, 10.0),
        trust_decay: float = 0.9,
        factor_bounds: tuple[float, float] = (0.5, 4.0),
        factor_change: float = 0.1,
        compressor: Compressor = ScaledSign(scale="rms"),
        exact: ExactPolicy | bool | None = ExactBelow(10_000),
        averaging: Averaging = Averaging(),
        clip_norm: float | None = None,
        seed: int = 0,
        nonfinite: Literal["raise", "skip"] = "raise",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        comm: Any = None,
        model: Any = None,
        init_sync: bool = True,
    ) -> None:
        super().__init__(**arguments(optimizers.OneBitLamb, locals()))


class QAdam(BeginsAsAdamW):
    """QAdam: `OneBitAdam` with 8 bits per element.

    Parameters
    ----------
    params : iterable of Parameter, of pairs of names and parameters, or of dict
        As for every optimizer of torch: ``model.parameters()``, ``model.named_parameters()`` or groups. Names are used
        in errors and for random draws; give names on all ranks, or on none.
    lr : float, default 1e-3
        Learning rate, a finite number >= 0. Each group has its own, which schedulers may change.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates of the momentum and the variance, each from 0 to below 1. Each group may have its own; the first
        may change between steps.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0. Each group may have its own.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0. Each group has its own.
    freeze : int or FreezeRule, default VarianceStable()
        When to freeze the variance: the number of exact steps, or a rule such as `qcomp.VarianceStable`.
    variance_floor : float, default 0.03
        Smallest frozen variance of an element of a compressed tensor, as a fraction of the tensor's mean variance, from
        0 to 1. Elements that never had a gradient keep a variance of zero, and do not move. With 0 there is no floor,
        as published; then units that are almost never active, such as dead ReLUs, can ruin a training run.
    variance_steps : callable or None, default DoublingIntervals(4)
        Returns whether a step, counted from 1 after the freeze, averages the gradient exactly and measures the variance
        again. None leaves the variance frozen, as published.
    watch : VarianceWatch or None, default VarianceWatch()
        Checks in the compressed stage whether the frozen variance still fits the gradients, and warns if not.
    decoupled_weight_decay : bool, default True
        True: weight decay as in ``torch.optim.AdamW``. False: it is added to the mean gradient, as in
        ``torch.optim.Adam``.
    compressor : Compressor, default MinMaxUInt8()
        Compresses what the ranks exchange. Each group may have its own, fixed from the first step on.
    exact : callable, bool or None, default ExactBelow(10_000)
        Which tensors stay exact: a policy such as `qcomp.ExactBelow`, True for all, False or None for none. Each group
        may have its own, fixed from the first step on.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `qcomp.Averaging`.
    clip_norm : float, optional
        Largest norm sqrt(mean_i |g_i|^2) of the gradients of all ranks i. None, the default, never clips.
    seed : int, default 0
        Seed of the compressor's random draws, 0 to 2**64 - 1.
    nonfinite : {"raise", "skip"}, default "raise"
        What all ranks do if a gradient on any rank is infinite or NaN. Under a GradScaler they skip the step.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `qcomp.Optimizer`.
    comm : communicator or ProcessGroup, optional
        By default all ranks of torch.distributed if it is initialised, else `qcomp.comm.world`. With ``model``, models
        in the same backward pass must not share a communicator; by default each gets its own.
    model : torch.nn.parallel.DistributedDataParallel, optional
        The model of these parameters, if it is wrapped: its backward pass starts the exchange, which saves time. Then a
        parameter that no rank used counts as having a gradient of zero. Where momenta are averaged, only
        ``clip_norm`` can clip gradients. A GradScaler cannot be used. By default no model is wrapped.
    init_sync : bool, default True
        Whether all ranks get rank 0's ``params``, frozen ones too. With ``model``, DistributedDataParallel has copied
        them already. If False, parameters that differ between ranks raise an error on every rank.

    See `qcomp.QAdam` for the algorithm, what it sends, and its source.

    Examples
    --------
    >>> import torch, qcomp.torch
    >>> model = torch.nn.Linear(128, 128)
    >>> optimizer = qcomp.torch.QAdam(model.parameters())
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.core_state.step, optimizer.core_state.stage
    (1, 'warmup')
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze: int | FreezeRule = VarianceStable(),
        variance_floor: float = 0.03,
        variance_steps: Schedule | None = DoublingIntervals(4),
        watch: VarianceWatch | None = VarianceWatch(),
        decoupled_weight_decay: bool = True,
        compressor: Compressor | None = None,
        exact: ExactPolicy | bool | None = ExactBelow(10_000),
        averaging: Averaging = Averaging(),
        clip_norm: float | None = None,
        seed: int = 0,
        nonfinite: Literal["raise", "skip"] = "raise",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        comm: Any = None,
        model: Any = None,
        init_sync: bool = True,
    ) -> None:
        if compressor is None:
            compressor = MinMaxUInt8()
        super().__init__(**arguments(optimizers.QAdam, locals()))


class ZeroOneAdam(BeginsAsAdamW):
    """0/1 Adam: updates the variance ever more rarely, and makes local steps between synchronisations.

    Parameters
    ----------
    params : iterable of Parameter, of pairs of names and parameters, or of dict
        As for every optimizer of torch: ``model.parameters()``, ``model.named_parameters()`` or groups. Names are used
        in errors and for random draws; give names on all ranks, or on none.
    lr : float, default 1e-3
        Learning rate, a finite number >= 0. Each group has its own, which schedulers may change.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates of the momentum and the variance, each from 0 to below 1. Each group may have its own; the first
        may change between steps.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0. Each group may have its own.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0. Each group has its own, decoupled as in ``torch.optim.AdamW``.
    freeze : int or FreezeRule, optional
        The last step that may change the variance, or a rule such as `qcomp.VarianceStable`; until then every step
        synchronises. None, the default, never stops updating the variance.
    variance_steps : callable, default DoublingIntervals(16)
        Returns whether a step, counted from 1, updates the variance with the exact mean gradient.
    sync_steps : callable, default LocalSteps()
        Returns whether a step synchronises the ranks with compression.
    variance_floor : float, default 1e-3
        From the first compressed step on, the variance of an element of a compressed tensor is at least this fraction
        of the tensor's mean variance, from 0 to 1. 0 is the algorithm as published.
    compressor : Compressor, default ScaledSign(scale="rms")
        Compresses what the ranks exchange. Each group may have its own, fixed from the first step on.
    exact : callable, bool or None, default ExactBelow(10_000)
        Which tensors stay exact: a policy such as `qcomp.ExactBelow`, True for all, False or None for none. Each group
        may have its own, fixed from the first step on.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `qcomp.Averaging`.
    clip_norm : float, optional
        Largest norm sqrt(mean_i |g_i|^2) of the gradients of all ranks i. None, the default, never clips.
    seed : int, default 0
        Seed of the compressor's random draws, 0 to 2**64 - 1.
    nonfinite : {"raise", "skip"}, default "raise"
        What all ranks do if a gradient on any rank is infinite or NaN. Under a GradScaler they skip the step.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `qcomp.Optimizer`.
    comm : communicator or ProcessGroup, optional
        By default all ranks of torch.distributed if it is initialised, else `qcomp.comm.world`. With ``model``, models
        in the same backward pass must not share a communicator; by default each gets its own.
    model : torch.nn.parallel.DistributedDataParallel, optional
        The model of these parameters, if it is wrapped: its backward pass starts the exchange, which saves time. Then a
        parameter that no rank used counts as having a gradient of zero. Where momenta are averaged, only
        ``clip_norm`` can clip gradients. A GradScaler cannot be used. By default no model is wrapped.
    init_sync : bool, default True
        Whether all ranks get rank 0's ``params``, frozen ones too. With ``model``, DistributedDataParallel has copied
        them already. If False, parameters that differ between ranks raise an error on every rank.

    See `qcomp.ZeroOneAdam` for the algorithm, what it sends, and its source.

    Examples
    --------
    >>> import torch, qcomp.torch
    >>> model = torch.nn.Linear(128, 128)
    >>> optimizer = qcomp.torch.ZeroOneAdam(model.parameters())
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.core_state.step, optimizer.core_state.stage
    (1, 'warmup')
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze: int | FreezeRule | None = None,
        variance_steps: Schedule = DoublingIntervals(16),
        sync_steps: Schedule = LocalSteps(32_678, 16),
        variance_floor: float = 1e-3,
        compressor: Compressor = ScaledSign(scale="rms"),
        exact: ExactPolicy | bool | None = ExactBelow(10_000),
        averaging: Averaging = Averaging(),
        clip_norm: float | None = None,
        seed: int = 0,
        nonfinite: Literal["raise", "skip"] = "raise",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        comm: Any = None,
        model: Any = None,
        init_sync: bool = True,
    ) -> None:
        super().__init__(**arguments(optimizers.ZeroOneAdam, locals()))

    def _after_adamw(self, core: Any, state: OptimizerState) -> OptimizerState:
        """Return the state after AdamW's steps, from which the next step of 0/1 Adam may be compressed."""
        after: OptimizerState = core.after_adam(state)
        return after
