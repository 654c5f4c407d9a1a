"""The compared methods: those of torch and torchft with AdamW and with Muon inside, and those of qcomp."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from network.methods import QSGD4
from torch import nn

import qcomp
import qcomp.torch
from qcomp.integrations import ddp
from race import peers
from race.settings import BETAS, DECAY, Optimizers, Settings, Trainer, adamw, muon, others, short_muon

__all__ = ["EXACT", "EXCHANGE", "LOCAL", "MAIN", "METHODS", "REFERENCE", "STEP", "Method"]

STEP, EXACT, LOCAL, EXCHANGE = "step", "exact", "local", "exchange"
"""The phases: a usual step; an exact one, or one before local steps begin; a local one; the end of an outer round."""
REFERENCE = "ddp_adamw"
"""The method that others are compared with; its last loss is the target."""

Make = Callable[[nn.Module, Settings], Trainer]
Phase = Callable[[int, Settings], str]


def always(_step: int, _: Settings) -> str:
    """Return the phase of a method whose steps are alike."""
    return STEP


def warmed(step: int, settings: Settings) -> str:
    """Return the phase of a method with exact first steps."""
    return EXACT if step < settings.warmup else STEP


def measured_again(step: int, settings: Settings) -> str:
    """Return the phase of a step of QAdam, which measures its variance in some of its later steps."""
    since = step + 1 - settings.warmup
    again = not settings.settled and since > 0 and qcomp.DoublingIntervals(4)(since)
    return EXACT if again else warmed(step, settings)


def doubling(step: int, settings: Settings) -> str:
    """Return the phase of a step of 0/1 Adam."""
    return EXACT if _variance_steps(settings)(step + 1) else STEP


def outer(step: int, settings: Settings) -> str:
    """Return the phase of a method in an outer loop."""
    return EXCHANGE if (step + 1) % settings.every == 0 else LOCAL


def warmed_outer(step: int, settings: Settings) -> str:
    """Return the phase of a method with exact first steps, and then an outer loop."""
    return EXACT if step < settings.warmup else outer(step - settings.warmup, settings)


OFTEN = 5
"""Steps of a short outer round, for methods whose messages take little time beside the computation of these steps."""


def often(settings: Settings) -> Settings:
    """Return settings with outer rounds of at most `OFTEN` steps."""
    return replace(settings, every=min(settings.every, OFTEN))


def rounds_of(every: int) -> Callable[[Settings], Settings]:
    """Return a function of settings that returns them with outer rounds of ``every`` steps."""
    return lambda settings: replace(settings, every=every)


def outer_with(changed: Callable[[Settings], Settings]) -> Phase:
    """Return the phase of a method in an outer loop that changes its settings."""
    return lambda step, settings: outer(step, changed(settings))


def warmed_often(step: int, settings: Settings) -> str:
    """Return the phase of a method with first steps of another kind, and then short outer rounds."""
    return warmed_outer(step, often(settings))


@dataclass(frozen=True)
class Method:
    """A method of training on several ranks.

    Parameters
    ----------
    label : str
    make : callable
        Makes the trainer from a model and settings.
    phase : callable
        Returns the phase of a step, counted from 0.
    peer : bool
        Whether the method is one of torch or torchft.
    exact_as : tuple of str
        The method and the phase whose time its exact steps take, if they are not timed themselves.
    varies : str
        The method whose settings this trial varies, and whose phases take as long, if this is a trial of a search.
    """

    label: str
    make: Make
    phase: Phase = always
    peer: bool = False
    exact_as: tuple[str, str] | None = None
    varies: str | None = None

    def timed_as(self, name: str, phase: str) -> tuple[str, str]:
        """Return the method and the phase whose time a phase of this method takes; ``name`` is this method's."""
        return self.exact_as if phase == EXACT and self.exact_as else (self.varies or name, phase)


def overlapped(make: Callable[..., qcomp.Optimizer], **changes: Any) -> Make:
    """Return an optimizer of qcomp under DistributedDataParallel."""

    def made(model: nn.Module, settings: Settings) -> Trainer:
        shared = {
            "learning_rate": settings.rate,
            "betas": BETAS,
            "weight_decay": DECAY,
            "seed": settings.seed,
        }
        own = {name: value(settings) for name, value in changes.items()}
        wrapped = peers.data_parallel(model)
        return Trainer(wrapped, [ddp.OverlappedOptimizer(wrapped, make(**shared, **own))])

    return made


def hook(inner: Optimizers, compressor: qcomp.Compressor, **settings_of_hook: Any) -> Make:
    """Return DistributedDataParallel with the hook of qcomp, and optimizers of torch."""

    def made(model: nn.Module, settings: Settings) -> Trainer:
        wrapped = peers.data_parallel(model)
        given = ddp.hook(compressor, wrapped, seed=settings.seed, **settings_of_hook)
        wrapped.register_comm_hook(*given)
        return Trainer(wrapped, inner(model, settings))

    return made


def own_muon(
    compressor: qcomp.Compressor, update_compressor: qcomp.Compressor, *, inner: bool = False, **changes: Any
) -> Optimizers:
    """Return Muon of qcomp; as an ``inner`` optimizer it averages nothing."""

    def made(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
        own = qcomp.torch.Muon(
            model.named_parameters(),
            weight_decay=DECAY,
            betas=BETAS,
            others=others(model),
            adjust_lr_fn="match_rms_adamw",
            newton_schulz_dtype="bfloat16",  # as in torch's Muon
            compressor=compressor,
            update_compressor=update_compressor,
            seed=settings.seed,
            comm=qcomp.comm.LocalCommunicator.alone() if inner else None,
            **changes,
        )
        return [own]

    return made


def averaging(optimizers: Optimizers) -> Make:
    """Return optimizers that do the averaging."""
    return lambda model, settings: Trainer(model, optimizers(model, settings))


def loop(
    inner: Optimizers,
    preset: Callable[..., qcomp.OuterLoop],
    *,
    warm: bool = False,
    changed: Callable[[Settings], Settings] = lambda settings: settings,
) -> Make:
    """Return an outer loop of qcomp around optimizers of torch."""

    def made(model: nn.Module, settings: Settings) -> Trainer:
        chosen = preset(changed(settings).every, warmup=settings.warmup if warm else 0, seed=settings.seed)
        optimizers = inner(model, settings)
        around = qcomp.torch.OuterLoop(model, optimizers, chosen)
        return Trainer(model, optimizers, close=around.remove)

    return made


def after_low_rank(inner: Optimizers, preset: Callable[..., qcomp.OuterLoop]) -> Make:
    """Return an outer loop that begins after a warm-up under DistributedDataParallel with qcomp's PowerSGD."""

    def made(model: nn.Module, settings: Settings) -> Trainer:
        low_rank = hook(inner, ALL, **LOW_RANK)(model, settings)
        optimizers, done, close = low_rank.optimizers, 0, ExitStack()

        def begin(*_: Any) -> None:
            nonlocal done
            done += 1
            if done == settings.warmup:
                chosen = preset(often(settings).every, seed=settings.seed)
                around = qcomp.torch.OuterLoop(model, optimizers, chosen)
                close.callback(around.remove)

        def logits(windows: Any) -> Any:
            current = low_rank.model if done < settings.warmup else model
            return current(windows)

        close.callback(optimizers[-1].register_step_post_hook(begin).remove)
        return Trainer(logits, optimizers, close=close.close)

    return made


def _freeze(settings: Settings) -> int:
    return settings.warmup


def _later_variance_steps(settings: Settings) -> Callable[[int], bool] | None:
    """Return the steps after the freeze, from 1, in which QAdam averages exactly."""
    return None if settings.settled else qcomp.DoublingIntervals(4)


def _variance_steps(settings: Settings) -> Callable[[int], bool]:
    """Return the steps, from 1, in which 0/1 Adam averages exactly."""
    if settings.settled:
        return lambda step: step <= settings.warmup
    return qcomp.DoublingIntervals(2)


MULOCO = partial(qcomp.outer.muloco, scale=1.0)
"""As measured: the outer learning rate once, as in the paper."""
SPARSE_LOCO = partial(qcomp.outer.sparse_loco, averaging=qcomp.Averaging(topology="all_gather"))
"""As measured: sums divided by the number of ranks."""
BLOCKS: dict[str, Any] = {"block_rows": 68, "newton_schulz_steps": 3}
"""A block has the rows of one head of attention in the transformer, of queries, keys or values."""
LOW_RANK = {"averaging": qcomp.PowerSGD(rank=2), "exact": None}
ONE, ALL = qcomp.ScaledSign(scale="rms"), qcomp.Identity()
AS_WARMUP = ("onebit_adam", EXACT)


def searched(words: str, every: int | None = None, **outer: float) -> Method:
    """Return a trial in the search for the best settings of torchft's DiLoCo with Muon."""
    changed = rounds_of(every) if every else lambda settings: settings
    made = peers.torchft(muon, changed, **outer)
    return Method(
        f"torchft DiLoCo, Muon, {words}", made, outer_with(changed), peer=True, varies="torchft_muon"
    )


METHODS = {
    REFERENCE: Method("DDP, float32, AdamW", peers.plain(adamw), peer=True),
    "ddp_muon": Method("DDP, float32, Muon", peers.plain(muon), peer=True),
    "ddp_muon3": Method("DDP, float32, Muon of 3 iterations", peers.plain(short_muon), peer=True),
    "bf16_adamw": Method("DDP, bf16 hook, AdamW", peers.bf16(adamw), peer=True),
    "bf16_muon": Method("DDP, bf16 hook, Muon", peers.bf16(muon), peer=True),
    "powersgd1_adamw": Method("DDP, PowerSGD hook rank 1, AdamW", peers.power_sgd(1, adamw), peer=True),
    "powersgd1_muon": Method("DDP, PowerSGD hook rank 1, Muon", peers.power_sgd(1, muon), peer=True),
    "powersgd2_adamw": Method("DDP, PowerSGD hook rank 2, AdamW", peers.power_sgd(2, adamw), peer=True),
    "powersgd2_muon": Method("DDP, PowerSGD hook rank 2, Muon", peers.power_sgd(2, muon), peer=True),
    "postlocal_adamw": Method(
        "torch post-local SGD, AdamW", peers.post_local(adamw), warmed_outer, True, (REFERENCE, STEP)
    ),
    "postlocal_muon": Method(
        "torch post-local SGD, Muon", peers.post_local(muon), warmed_outer, True, ("ddp_muon", STEP)
    ),
    "torchft_adamw": Method("torchft DiLoCo, AdamW", peers.torchft(adamw), outer, True),
    "torchft_muon": Method("torchft DiLoCo, Muon", peers.torchft(muon), outer, True),
    "torchft_muon3": Method("torchft DiLoCo, Muon of 3 iterations", peers.torchft(short_muon), outer, True),
    "torchft_muon_10": searched("rounds of 10", 10),
    "torchft_muon_15": searched("rounds of 15", 15),
    "torchft_muon_60": searched("rounds of 60", 60),
    "torchft_muon_slow": searched("outer rate 0.5", lr=0.5),
    "torchft_muon_fast": searched("outer rate 1", lr=1.0),
    "torchft_muon_light": searched("outer momentum 0.6", momentum=0.6),
    "torchft_muon_light_fast": searched("outer momentum 0.6, outer rate 1", lr=1.0, momentum=0.6),
    "torchft_muon_15_light": searched("rounds of 15, outer momentum 0.6", 15, momentum=0.6),
    "torchft_muon_15_slow": searched("rounds of 15, outer rate 0.5", 15, lr=0.5),
    "torchft_muon_60_light": searched("rounds of 60, outer momentum 0.6", 60, momentum=0.6),
    "onebit_adam": Method("1-bit Adam", overlapped(qcomp.OneBitAdam, freeze=_freeze), warmed),
    "qadam": Method(
        "QAdam, 8 bits",
        overlapped(qcomp.QAdam, freeze=_freeze, variance_steps=_later_variance_steps),
        measured_again,
        False,
        AS_WARMUP,
    ),
    "zero_one_adam": Method(
        "0/1 Adam",
        overlapped(qcomp.ZeroOneAdam, variance_steps=_variance_steps),
        doubling,
        False,
        AS_WARMUP,
    ),
    "qsgd4_adamw": Method("gradients in 4 bits, AdamW", hook(adamw, qcomp.compressor(QSGD4))),
    "lowrank2_adamw": Method("PowerSGD rank 2, AdamW", hook(adamw, ALL, **LOW_RANK)),
    "lowrank2_muon": Method("PowerSGD rank 2, Muon", hook(muon, ALL, **LOW_RANK)),
    "muon_exact": Method("Muon, exact", averaging(own_muon(ALL, ALL))),
    "muon_4_1": Method("Muon, 4 + 1 bits", averaging(own_muon(qcomp.LloydMax(4), ONE))),
    "muon_2_1": Method("Muon, 2 + 1 bits", averaging(own_muon(qcomp.LloydMax(2, 256), ONE))),
    "muon_exact_blocks": Method("Muon in blocks, exact", averaging(own_muon(ALL, ALL, **BLOCKS))),
    "muon_4_1_blocks": Method(
        "Muon in blocks, 4 + 1 bits", averaging(own_muon(qcomp.LloydMax(4), ONE, **BLOCKS))
    ),
    "local_adamw": Method("LocalSGD, AdamW", loop(adamw, qcomp.outer.local_sgd), outer),
    "diloco_adamw": Method("DiLoCo, AdamW", loop(adamw, qcomp.outer.diloco), outer),
    "muloco": Method("MuLoCo", loop(muon, MULOCO), outer),
    "sparse_adamw": Method("SparseLoCo, AdamW", loop(adamw, SPARSE_LOCO), outer),
    "sparse_muon": Method("SparseLoCo, Muon", loop(muon, SPARSE_LOCO), outer),
    "sparse_often_muon3": Method(
        f"SparseLoCo every {OFTEN} steps, Muon of 3 iterations",
        loop(short_muon, SPARSE_LOCO, changed=often),
        outer_with(often),
    ),
    "sparse_often_blocks": Method(
        f"SparseLoCo every {OFTEN} steps, Muon in blocks",
        loop(own_muon(ALL, ALL, inner=True, **BLOCKS), SPARSE_LOCO, changed=often),
        outer_with(often),
    ),
    "sparse_warm_adamw": Method(
        "SparseLoCo after a warm-up, AdamW", loop(adamw, SPARSE_LOCO, warm=True), warmed_outer
    ),
    "sparse_warm_muon": Method(
        "SparseLoCo after a warm-up, Muon", loop(muon, SPARSE_LOCO, warm=True), warmed_outer
    ),
    "sparse_lowrank_muon": Method(
        f"SparseLoCo every {OFTEN} steps after a warm-up by PowerSGD rank 2, Muon",
        after_low_rank(muon, SPARSE_LOCO),
        warmed_often,
        False,
        ("lowrank2_muon", STEP),
    ),
}
"""By name, in the order of the tables. Rows refer to the name, so a method whose settings change needs a new one."""

MAIN = (
    *("ddp_adamw", "ddp_muon", "bf16_adamw", "bf16_muon", "powersgd1_adamw", "powersgd1_muon"),
    *(
        "powersgd2_adamw",
        "powersgd2_muon",
        "postlocal_adamw",
        "postlocal_muon",
        "torchft_adamw",
        "torchft_muon",
    ),
    *("onebit_adam", "lowrank2_muon", "muon_4_1", "muon_2_1", "sparse_muon", "sparse_often_blocks"),
)
"""The methods that run first: those of torch and torchft with AdamW and Muon, and one of qcomp of each kind."""
