"""`check_optimizer` catches optimizers with one fault each."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.core.optimizers.clipping import clip_scale
from qcomp.testing import ContractError, check_optimizer
from qcomp.testing.optimizers import optimizer_contract


@dataclass(frozen=True, kw_only=True)
class Whole(qcomp.CompressedSGD):
    """The base of the broken optimizers: it compresses half of its tensors."""

    learning_rate: float = 0.1
    exact: qcomp.ExactBelow = qcomp.ExactBelow(100)  # noqa: RUF009 - immutable
    momentum: float = 0.9


class RanksDrift(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return [p + p.dtype.type(state.rank) for p in new], after


class IgnoresWeights(Whole):
    def step(self, params, grads, state, comm, *, donate=False, weight=None):
        return super().step(params, grads, state, comm, donate=donate)


class GoesUp(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return [2 * p - n for p, n in zip(params, new, strict=True)], after


class UsesUpGradients(Whole):
    def stages(self, params, grads, state, *, donate=False):
        for g in grads:
            np.multiply(g, 0.5, out=g)
        return (yield from super().stages(params, grads, state, donate=donate))


class WritesIntoMomenta(Whole):
    def apply(self, params, means, state):
        for m in state.momentum:
            np.multiply(m, 0.5, out=m)
        return super().apply(params, means, state)


class SavesNoMomentum(Whole):
    def state_dict(self, state):
        saved = super().state_dict(state)
        return {key: 0 * value if key.startswith("momentum") else value for key, value in saved.items()}


class DropsResiduals(Whole):
    def state_dict(self, state):
        saved = super().state_dict(state)
        return {key: 0 * value if "residual" in key else value for key, value in saved.items()}


class SwallowsNaN(Whole):
    def stages(self, params, grads, state, *, donate=False):
        fine = [np.nan_to_num(g, posinf=0.0, neginf=0.0) for g in grads]
        return (yield from super().stages(params, fine, state, donate=donate))


class RaisesAlone(Whole):
    def stages(self, params, grads, state, *, donate=False):
        if not all(np.isfinite(g).all() for g in grads):
            raise qcomp.NonFiniteError("a gradient is not finite")
        return (yield from super().stages(params, grads, state, donate=donate))


class CountsOnTheSide(Whole):
    calls = [0]

    def apply(self, params, means, state):
        self.calls[0] += 1
        new, after = super().apply(params, means, state)
        return [p * p.dtype.type(1 - 1e-3 * (self.calls[0] // 10)) for p in new], after


class IgnoresTheRate(Whole):
    def rate(self, state):
        return 0.1


class RateOfTheNextStep(Whole):
    def rate(self, state):
        return super().rate(state._replace(step=state.step + 1))


class RateOfTheLastStep(Whole):
    def rate(self, state):
        return super().rate(state._replace(step=max(0, state.step - 1)))


class OneRateForAll(Whole):
    def rates(self, state):
        return (self.rate(state),) * len(state.names)


class RatesOfOtherTensors(Whole):
    def rates(self, state):
        return super().rates(state)[::-1]


class OneDecayForAll(Whole):
    def weight_decays(self, state):
        return (self.weight_decay,) * len(state.names)


class NoDecay(Whole):
    def weight_decays(self, state):
        return (0.0,) * len(state.names)


class DecaysByRanks(Whole):
    def weight_decays(self, state):
        return tuple(decay * state.size for decay in super().weight_decays(state))


class DecayGrows(Whole):
    def weight_decays(self, state):
        return tuple(-decay for decay in super().weight_decays(state))


class NeverClips(Whole):
    def clip_scale(self, grads, state):
        return 1.0
        yield


class ClipsEachRankByItsOwnNorm(Whole):
    def clip_scale(self, grads, state):
        norm = math.sqrt(sum(float(np.sum(np.square(g))) for g in grads))
        return min(1.0, self.clip_norm / norm)
        yield


class ClipsTheSumOfRanks(Whole):
    def clip_scale(self, grads, state):
        return (yield from clip_scale(self.clip_norm / math.sqrt(state.size), grads, state.size))


class ScalesUpToo(Whole):
    def clip_scale(self, grads, state):
        return self.clip_norm * (yield from clip_scale(1.0, grads, state.size))


class AddsUpRanks(Whole):
    def apply(self, params, means, state):
        return super().apply(params, means._replace(values=[v * state.size for v in means.values]), state)


class FollowsRankZero(Whole):
    def prepare(self, grads, state, *, scale=1.0):
        return super().prepare(grads, state, scale=0.0 if state.rank else scale * state.size)


class KeepsGradientsIfAlone(Whole):
    def stages(self, params, grads, state, *, donate=False):
        new, after = yield from super().stages(params, grads, state, donate=donate)
        return new, after._replace(momentum=tuple(grads)) if state.size == 1 else after


class SameDrawsInEveryStep(Whole):
    def key(self, state):
        return super().key(state)._replace(step=0)


class IgnoresTheSeed(Whole):
    def key(self, state):
        return super().key(state)._replace(seed=3)


class ComparesNothing(Whole):
    def init_stages(self, params, *, rank, size, host=None, names=None):
        return self.initial_state(list(params), tuple(names), rank, size)
        yield


class AlwaysSingle(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return [np.asarray(p, dtype=np.float32) for p in new], after


class MakesLists(Whole):
    def stages(self, params, grads, state, *, donate=False):
        new, after = yield from super().stages(params, grads, state, donate=donate)
        return list(new) if isinstance(new, list) else [new], after


class ForgetsToCount(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return new, after._replace(step=state.step)


class UsesUpWithoutDonation(Whole):
    def apply(self, params, means, state):
        return super().apply(params, means._replace(donate=True), state)


class UsesUpGradientsIfDonated(Whole):
    def stages(self, params, grads, state, *, donate=False):
        found = yield from super().stages(params, grads, state, donate=donate)
        for g in grads if donate else ():
            np.multiply(g, 0.5, out=g)
        return found


class DecaysDonatedMomentaTooEarly(Whole):
    """Donated momenta change before the exchange, which other ranks may still refuse."""

    def stages(self, params, grads, state, *, donate=False):
        if donate:
            copies = tuple(m.copy() for m in state.momentum)
            for m in state.momentum:
                np.multiply(m, 0.9, out=m)
            state = state._replace(momentum=copies)
        return (yield from super().stages(params, grads, state, donate=donate))


class ForgetsInAnotherWorld(Whole):
    """On another number of ranks, momenta or residuals start from zero."""

    def load_stages(self, saved, params, **options):
        loaded = yield from super().load_stages(saved, params, **options)
        return loaded if isinstance(saved, dict) else self.forget(loaded)


class ForgetsMomentaInAnotherWorld(ForgetsInAnotherWorld):
    def forget(self, state):
        return state._replace(momentum=tuple(0 * m for m in state.momentum))


class ForgetsResidualsInAnotherWorld(ForgetsInAnotherWorld):
    def forget(self, state):
        return with_worker_residuals(state, lambda r: 0 * r)


class TripsOverItsFourthRank(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return [p + p.dtype.type(state.rank > 2) for p in new], after


class DividesByTwo(Whole):
    """Divides sums by two instead of the number of ranks, if there are several."""

    def apply(self, params, means, state):
        values = [v * v.dtype.type(max(1, state.size / 2)) for v in means.values]
        return super().apply(params, means._replace(values=values), state)


class RateOfSkippedSteps(Whole):
    def rate(self, state):
        return super().rate(state._replace(step=state.step + state.skipped))


class DividesByTwoOnThree(Whole):
    """Takes three ranks for two."""

    def apply(self, params, means, state):
        values = [v * v.dtype.type(1.5 if state.size == 3 else 1) for v in means.values]
        return super().apply(params, means._replace(values=values), state)


class ForgetsTheLastBucket(Whole):
    """Of a long tensor, what follows the last whole block of 2^16 elements stays."""

    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        for p, n in zip(params, new, strict=True):
            if p.size > 1 << 16:
                n.reshape(-1)[p.size >> 16 << 16 :] = p.reshape(-1)[p.size >> 16 << 16 :]
        return new, after


class StepsOfAByte(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return new, after._replace(step=after.step % 256)


class SavesNoSkippedSteps(Whole):
    def state_dict(self, state):
        return super().state_dict(state._replace(skipped=0))


SALT = hash("salt") % 2**20


class DrawsOfTheProcess(Whole):
    """The keys of a process depend on its hash seed."""

    def key(self, state):
        return super().key(state)._replace(step=state.step + SALT)


class MomentaBesideTheState(Whole):
    """The momenta of float32 are on the side, by rank and step; the state has copies that are never read."""

    beside: dict[Any, Any] = {}

    def apply(self, params, means, state):
        own = self.beside.get((state.rank, state.size, state.step, params[0].tobytes()))
        new, after = super().apply(params, means, state if own is None else state._replace(momentum=own))
        self.beside[after.rank, after.size, after.step, new[0].tobytes()] = after.momentum
        return new, after._replace(
            momentum=tuple(m.astype(np.float16).astype(m.dtype) for m in after.momentum)
        )


def with_worker_residuals(state, change):
    exchange = state.exchange
    return state._replace(exchange=exchange._replace(worker=tuple(map(change, exchange.worker))))


class OwesTheOpposite(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return new, with_worker_residuals(after, lambda r: -r)


class OwesLess(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return new, with_worker_residuals(after, lambda r: r * r.dtype.type(0.9))


class ForgetsEveryFiveSteps(Whole):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        return new, with_worker_residuals(after, lambda r: 0 * r) if after.step % 5 == 0 else after


class SignsThatKeepOldResiduals(Whole):
    """Moves along signs, so that its moves need not add up to the mean gradients."""

    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        signs = [p - p.dtype.type(0.1) * np.sign(p - n) for p, n in zip(params, new, strict=True)]
        return signs, after._replace(exchange=state.exchange)


class SignsThatForgetEveryFiveSteps(SignsThatKeepOldResiduals):
    def apply(self, params, means, state):
        new, after = super().apply(params, means, state)
        after = after._replace(exchange=means.exchange)
        return new, with_worker_residuals(after, lambda r: 0 * r) if after.step % 5 == 0 else after


class IgnoresNesterov(Whole):
    def apply(self, params, means, state):
        plain = replace(self, nesterov=False)
        return qcomp.CompressedSGD.apply(plain, params, means, state)


@dataclass(frozen=True, kw_only=True)
class CompressesNothing(Whole):
    exact: qcomp.ExactBelow = qcomp.ExactBelow(10**6)  # noqa: RUF009 - immutable


BROKEN = {
    DividesByTwoOnThree: "gradients_are_averaged",
    ForgetsTheLastBucket: "long_tensors_move_to_the_end",
    StepsOfAByte: "counts_are_kept",
    SavesNoSkippedSteps: "counts_are_kept",
    DrawsOfTheProcess: "goes_on_in_another_process",
    MomentaBesideTheState: "goes_on_in_another_process",
    UsesUpGradientsIfDonated: "donation_changes_nothing",
    DecaysDonatedMomentaTooEarly: "refusals_are_shared",
    ForgetsMomentaInAnotherWorld: "another_world_goes_on",
    ForgetsResidualsInAnotherWorld: "another_world_goes_on",
    TripsOverItsFourthRank: "ranks_agree",
    DividesByTwo: "gradients_are_averaged",
    RateOfSkippedSteps: "schedules_count_completed_steps",
    OwesTheOpposite: "nothing_is_lost",
    OwesLess: "nothing_is_lost",
    ForgetsEveryFiveSteps: "nothing_is_lost",
    SignsThatKeepOldResiduals: "keeps_new_residuals",
    SignsThatForgetEveryFiveSteps: "keeps_new_residuals",
    IgnoresNesterov: "switches_act",
    CompressesNothing: "compresses_soon",
    RanksDrift: "ranks_agree",
    ForgetsToCount: "ranks_agree",
    AlwaysSingle: "shapes_and_dtypes",
    MakesLists: "shapes_and_dtypes",
    GoesUp: "against_the_gradient",
    CountsOnTheSide: "same_again",
    UsesUpGradients: "only_results_are_new",
    WritesIntoMomenta: "only_results_are_new",
    SavesNoMomentum: "saved_after_any_step",
    DropsResiduals: "saved_after_any_step",
    SwallowsNaN: "refusals_are_shared",
    RaisesAlone: "refusals_are_shared",
    ComparesNothing: "starts_alike",
    IgnoresTheRate: "rates_scale_the_step",
    RateOfTheNextStep: "schedules_count_completed_steps",
    RateOfTheLastStep: "schedules_count_completed_steps",
    OneRateForAll: "groups_select_by_name",
    RatesOfOtherTensors: "groups_select_by_name",
    OneDecayForAll: "groups_select_by_name",
    NoDecay: "weight_decay_shrinks",
    DecayGrows: "weight_decay_shrinks",
    NeverClips: "clipping_scales_gradients",
    ClipsEachRankByItsOwnNorm: "clipping_scales_gradients",
    ClipsTheSumOfRanks: "clipping_scales_gradients",
    ScalesUpToo: "clipping_scales_gradients",
    KeepsGradientsIfAlone: "keeps_no_gradients",
    FollowsRankZero: "gradients_are_averaged",
    AddsUpRanks: "equal_ranks_move_as_one",
    DecaysByRanks: "equal_ranks_move_as_one",
    IgnoresWeights: "weights_scale_gradients",
    SameDrawsInEveryStep: "draws_have_keys_of_their_own",
    IgnoresTheSeed: "draws_have_keys_of_their_own",
}


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_broken_optimizer_is_caught_by_its_law(kind):
    contract = optimizer_contract(kind())
    assert [name for name, _ in contract.broken(only=BROKEN[kind])] == [BROKEN[kind]]


@pytest.mark.exhaustive
def test_the_base_of_the_broken_optimizers_passes():
    check_optimizer(Whole())


@pytest.mark.slow
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "name",
    [
        "rates_scale_the_step",
        "schedules_count_completed_steps",
        "groups_select_by_name",
        "weight_decay_shrinks",
        "clipping_scales_gradients",
        "equal_ranks_move_as_one",
    ],
)
def test_the_laws_hold_for_a_rate_that_rises_from_zero(name):
    whole = Whole(
        learning_rate=lambda step: 0.02 * min(step, 5),
        groups=[qcomp.Group("layer.*", 0.5, weight_decay=0.1)],
        clip_norm=3.0,
    )
    optimizer_contract(whole).require(only=name)


def test_an_optimizer_that_only_warms_up_gets_a_hint():
    contract = optimizer_contract(qcomp.OneBitAdam(learning_rate=0.1))
    with pytest.raises(
        ContractError, match=r"compresses_soon: it is still in its warm-up after 12 steps; .* freeze=5"
    ):
        contract.require(only="compresses_soon")


def test_the_error_names_the_optimizer_and_the_law():
    with pytest.raises(ContractError, match="GoesUp on numpy breaks 1 promise") as caught:
        optimizer_contract(replace(GoesUp(), seed=3)).require(only="against_the_gradient")
    assert "- against_the_gradient: with positive gradients, 'layer.weight' does not fall" in str(
        caught.value
    )


def test_an_object_that_is_not_an_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"optimizer is .*Whole.*; expected an instance of"):
        check_optimizer(Whole)
