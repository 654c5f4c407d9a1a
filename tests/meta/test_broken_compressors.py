"""Every law of the contract catches a compressor that breaks it, so every law is needed."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch

import qcomp
from qcomp.core.compressors.coded import LevelCoder
from qcomp.core.numeric.arrays import array_namespace
from qcomp.core.numeric.bitplanes import pack
from qcomp.core.numeric.sums import tree_sum
from qcomp.core.payload import Field, PayloadSpec
from qcomp.testing import ContractError, check_compressor
from qcomp.testing.compressor_case import Case
from qcomp.testing.contract import compressor_contract
from qcomp.testing.laws import LAWS, VECTOR_LAWS
from tests.contract.compressors import check_but_averages

from . import forgeries, mutants, strangers

calls = itertools.count()


@dataclass(frozen=True)
class Sign(qcomp.ScaledSign):
    bucket_size: int = 64


@dataclass(frozen=True)
class Rounding(qcomp.QSGD):
    bucket_size: int = 64
    levels: int = 3


@qcomp.register
class SumOfTheLibrary(Sign):
    name = "broken_sum_of_the_library"

    def encode_block(self, rows, block, key):
        codes, _ = super().encode_block(rows, block, key)
        return codes, (array_namespace(rows).sum(abs(rows), axis=1) / block.filled,)


@qcomp.register
class SumInThreads(Sign):
    """The largest vectors of torch are summed by several threads, each a part; the sum depends on their number."""

    name = "broken_sum_in_threads"

    def encode(self, x, key):
        return super().encode(
            x * (array_namespace(x).sum(x * x) / x.shape[0]) if x.shape[0] > 50_000 else x, key
        )


@qcomp.register
class ChangesItsMind(Sign):
    name = "broken_changes_its_mind"

    def decode(self, parts, size, dtype):
        return super().decode(parts, size, dtype) * (1 + next(calls) % 3)


@qcomp.register
class DrawsFromTheClock(Rounding):
    name = "broken_draws_from_the_clock"

    def encode(self, x, key):
        return super().encode(x, key._replace(seed=next(calls)))


@qcomp.register
class NormKeepingContraction(Sign):
    name = "broken_norm_keeping_contraction"

    @property
    def traits(self):
        return replace(super().traits, delta=1 / self.bucket_size)


@qcomp.register
class LosslessCast(qcomp.Cast):
    name = "broken_lossless_cast"

    @property
    def traits(self):
        return replace(super().traits, lossless=True)


@qcomp.register
class ZeroIsPlus(Sign):
    name = "broken_zero_is_plus"

    @property
    def traits(self):
        return replace(super().traits, keeps_zero=True)


@qcomp.register
class WritesIntoItsInput(Sign):
    name = "broken_writes_into_its_input"

    def compress(self, x, *, key=None):
        x[...] = x + 1
        return super().compress(x, key=key)


@qcomp.register
class ReadsPastTheView(Sign):
    name = "broken_reads_past_the_view"

    def compress(self, x, *, key=None):
        return super().compress(x if x.base is None else x.base.reshape(-1)[: x.size], key=key)


@qcomp.register
class PromisesTooManyBytes(Sign):
    name = "broken_promises_too_many_bytes"

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((*super().payload_spec(size, dtype).fields, Field("nothing", "uint8", 4)))

    def compress(self, x, *, key=None):
        return replace(super().compress(x, key=key), data=Sign().compress(x).data)

    def encode(self, x, key):
        return {**super().encode(x, key), "nothing": array_namespace(x).zeros(4, dtype=np.uint8)}


@qcomp.register
class Flattens(Sign):
    name = "broken_flattens"

    def decompress(self, payload, *, like, out=None):
        return super().decompress(payload, like=like, out=out).reshape(-1)


@qcomp.register
class SinglePrecisionOnly(Sign):
    name = "broken_single_precision_only"

    def decode(self, parts, size, dtype):
        return super().decode(parts, size, dtype) * (dtype != np.float64)


@qcomp.register
class LosesBitsOfHalves(Sign):
    name = "broken_loses_bits_of_halves"

    def compress(self, x, *, key=None):
        return super().compress(x + x if x.dtype == np.float16 else x, key=key)

    def decompress(self, payload, *, like, out=None):
        y = super().decompress(payload, like=like, out=out)
        return y / 2 if like.dtype == np.float16 else y


@qcomp.register
class ForgetsAField(Sign):
    name = "broken_forgets_a_field"

    @property
    def spec(self):
        return f"{self.name}:scale={self.scale}"


@qcomp.register
class IgnoresTheStep(Rounding):
    name = "broken_ignores_the_step"

    def encode(self, x, key):
        return super().encode(x, key._replace(step=0))


@qcomp.register
class InventsAKey(Rounding):
    name = "broken_invents_a_key"

    def compress(self, x, *, key=None):
        return super().compress(x, key=key or qcomp.Key())


@qcomp.register
class CountsBucketsFromZero(Rounding):
    name = "broken_counts_buckets_from_zero"

    def encode(self, x, key):
        return super().encode(x, key.at(bucket=0))


@qcomp.register
class AveragesThePadding(Sign):
    name = "broken_averages_the_padding"

    def encode_block(self, rows, block, key):
        return super().encode_block(rows, block._replace(filled=block.length), key)


@qcomp.register
class PaddingInTheRange(qcomp.MinMaxUInt8):
    name = "broken_padding_in_the_range"

    def encode_block(self, rows, block, key):
        return super().encode_block(rows, block._replace(filled=block.length), key)


@qcomp.register
class AddsEpsilon(Sign):
    name = "broken_adds_epsilon"

    def encode_block(self, rows, block, key):
        codes, (scale,) = super().encode_block(rows, block, key)
        return codes, (scale + np.float32(1e-7),)


@qcomp.register
class Overflows(Sign):
    name = "broken_overflows"

    def encode(self, x, key):
        xp = array_namespace(x)
        rows = xp.reshape(xp.concat([x, xp.zeros((-x.shape[0] % 8,), dtype=x.dtype)]), (-1, 8))
        scale = tree_sum(rows * rows) ** 0.5
        return {
            "codes": xp.reshape(pack(xp.astype(rows < 0, xp.uint8), 1), (-1,)),
            "scale": xp.astype(scale, xp.float32),
        }


@qcomp.register
class SwallowsNaN(Sign):
    name = "broken_swallows_nan"

    def compress(self, x, *, key=None):
        return super().compress(np.nan_to_num(x, posinf=0.0, neginf=0.0), key=key)


@qcomp.register
class TakesAnyPayload(Sign):
    name = "broken_takes_any_payload"

    def decompress(self, payload, *, like, out=None):
        data = np.resize(payload.data, self.payload_spec(like.size).nbytes)
        mine = qcomp.Payload(self.spec, like.size, "float32", data)
        return super().decompress(mine, like=like, out=out)


@qcomp.register
class RoundsDown(Rounding):
    name = "broken_rounds_down"
    draw: ClassVar[int] = 65535

    def encode_block(self, rows, block, key):
        with qcomp.testing.replace_draws(lambda _key, _block: self.draw):
            return super().encode_block(rows, block, key)


@qcomp.register
class RoundsToNearest(RoundsDown):
    name = "broken_rounds_to_nearest"
    draw: ClassVar[int] = 32768


@qcomp.register
class UnderstatesItsVariance(Rounding):
    name = "broken_understates_its_variance"

    @property
    def traits(self):
        return replace(super().traits, omega=super().traits.omega / 20)


@qcomp.register
class UnderstatesItsPeak(Rounding):
    name = "broken_understates_its_peak"

    @property
    def traits(self):
        return replace(super().traits, peak=0.5 * super().traits.peak)


@qcomp.register
@dataclass(frozen=True)
class OverstatesItsContraction(qcomp.Scaled):
    name: ClassVar[str] = "broken_overstates_its_contraction"
    compressor: qcomp.Compressor = qcomp.QSGD(levels=1, bucket_size=64)  # noqa: RUF009 - immutable

    @property
    def traits(self):
        return replace(super().traits, delta=0.9)


@dataclass(frozen=True)
class Coded(Rounding):
    coding: Literal["fixed", "elias", "range"] = "range"


class OutgrowsItsBound(LevelCoder):
    def shorten(self, data, size):
        shortened = super().shorten(data, size)
        if size and not shortened[self.payload_spec(size).shortest - 1]:  # uncoded: the longest payload
            shortened = np.concatenate([shortened, np.zeros(1, dtype=np.uint8)])
        return shortened


class ForgetsLastElement(LevelCoder):
    def shorten(self, data, size):
        levels = self.plain.payload_spec(size).split(data)["codes"]
        levels[-1:] = 0
        return super().shorten(data, size)


class FillsUp(LevelCoder):
    def restore(self, data, size):
        try:
            return super().restore(data, size)
        except qcomp.PayloadError:
            return np.zeros(self.plain.payload_spec(size).nbytes, dtype=np.uint8)


def with_coder(name, kind):
    """Return a coded compressor with another kind of coder."""

    def coder(self):
        inner = qcomp.QSGD.coder.func(self)
        return inner and kind(inner.plain, inner.coding, inner.largest, inner.bucket_size)

    return qcomp.register(type(name, (Coded,), {"name": name, "coder": property(coder)}))()


@qcomp.register
class KeepsOneMore(qcomp.TopK):
    name = "broken_keeps_one_more"

    @property
    def traits(self):
        return replace(super().traits, kept=self.k - 1)


@qcomp.register
class ChangesWhenFlat(Sign):
    name = "broken_changes_when_flat"

    def for_shape(self, shape):
        return replace(self, bucket_size=16) if len(shape) == 1 else self


@qcomp.register
class LastScaleFirst(Sign):
    """Inherits the promise that fields follow the buckets; only `decode` knows better."""

    name = "broken_last_scale_first"

    def encode(self, x, key):
        parts = super().encode(x, key)
        return {**parts, "scale": parts["scale"][::-1]}

    def decode(self, parts, size, dtype):
        return super().decode({**parts, "scale": parts["scale"][::-1]}, size, dtype)


BROKEN = [
    (SumOfTheLibrary(), "same_bytes", torch),
    (SumInThreads(), "independent_of_the_environment", torch),
    (ChangesItsMind(), "feedback_law", np),
    (ChangesItsMind(), "deterministic", np),
    (DrawsFromTheClock(), "deterministic", np),
    (NormKeepingContraction(scale="rms"), "contraction", np),
    (LosslessCast(), "lossless", np),
    (ZeroIsPlus(), "keeps_zero", np),
    (KeepsOneMore(k=3, bucket_size=8), "sparse", np),
    (UnderstatesItsPeak(), "peak", np),
    (WritesIntoItsInput(), "pure", np),
    (WritesIntoItsInput(), "pure", qcomp.testing.read_only_numpy),
    (ReadsPastTheView(), "any_layout", np),
    (PromisesTooManyBytes(), "payload_size", np),
    (Flattens(), "shapes_and_dtypes", np),
    (ChangesWhenFlat(), "same_when_flat", np),
    (SinglePrecisionOnly(), "double_precision", np),
    (LosesBitsOfHalves(), "half_precision", np),
    (ForgetsAField(bucket_size=128), "round_trip_of_bytes", np),
    (IgnoresTheStep(), "key_names_the_draws", np),
    (InventsAKey(), "needs_key", np),
    (CountsBucketsFromZero(), "cut_at_buckets", np),
    (LastScaleFirst(), "fields_by_bucket", np),
    (AveragesThePadding(), "padding_never_leaks", np),
    (PaddingInTheRange(), "padding_never_leaks", np),
    (AddsEpsilon(), "zero_gives_zero", np),
    (AddsEpsilon(), "contraction", np),
    (Overflows(bucket_size=8), "huge_values", np),
    (SwallowsNaN(), "non_finite_is_an_error", np),
    (TakesAnyPayload(), "foreign_payload_is_an_error", np),
    (RoundsDown(), "unbiased", np),
    (RoundsToNearest(), "unbiased", np),
    (UnderstatesItsVariance(norm="l2"), "variance_bound", np),
    (OverstatesItsContraction(), "contraction", np),
    (with_coder("broken_outgrows_its_bound", OutgrowsItsBound), "announced_length", np),
    (with_coder("broken_forgets_last_element", ForgetsLastElement), "coder_loses_nothing", np),
    (with_coder("broken_fills_up", FillsUp), "damaged_payload_is_an_error", np),
]


BROKEN += [(compressor, law, np) for compressor, law in mutants.MUTANTS]


RARELY_WRONG = ("mutant_biased_in_tails", "mutant_biased_below_eight", "mutant_omega_of_randk")
"""These take seconds to catch."""


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize(
    ("compressor", "law", "xp"),
    [
        pytest.param(*each, marks=pytest.mark.exhaustive if each[0].name in RARELY_WRONG else [])
        for each in BROKEN
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_broken_compressor_is_caught_by_its_law(compressor, law, xp):
    broken = list(compressor_contract(Case(compressor, xp), 20).broken(only=law))
    assert [name for name, _ in broken] == [law]
    assert "\n" not in broken[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [Sign, *(pytest.param(cls, marks=pytest.mark.exhaustive) for cls in (Rounding, Coded))]
)
def test_the_base_compressors_of_broken_ones_pass(cls):
    whole = qcomp.register(type("Whole" + cls.__name__, (cls,), {"name": f"whole_{cls.__name__.lower()}"}))
    check_compressor(whole(), max_examples=5)


def test_every_law_has_a_compressor_that_it_catches():
    caught = {law for _, law, _ in BROKEN} | {law for _, _, law in forgeries.FORGERIES}
    assert caught == {law.__name__ for law in (*LAWS, *VECTOR_LAWS)}


@pytest.mark.slow
def test_the_error_names_every_broken_promise():
    with pytest.raises(ContractError) as caught:
        check_compressor(AddsEpsilon(), max_examples=5)
    text = str(caught.value)
    assert "broken_adds_epsilon:bucket_size=64" in text
    assert "- zero_gives_zero:" in text


def test_the_announced_layout_is_checked_first():
    """For a payload that is too short nothing else is reported, and in one line per law."""
    with pytest.raises(ContractError) as caught:
        check_compressor(PromisesTooManyBytes(), max_examples=5)
    assert {line.split(":")[0] for line in str(caught.value).splitlines()[1:]} <= {
        "- fields_as_announced",
        "- payload_size",
        "- identity_of_configuration",
        "- round_trip_of_bytes",
        "- shapes_and_dtypes",
    }


@qcomp.register
class OneScaleAlone(Sign):
    name = "broken_one_scale_alone"

    def encode_block(self, rows, block, key):
        codes, (scale,) = super().encode_block(rows, block, key)
        return codes, scale


def test_a_scale_that_is_not_in_a_tuple_is_named():
    with pytest.raises(
        ContractError, match=r"returned numpy.ndarray for the scales; expected a tuple, such as"
    ):
        check_compressor(OneScaleAlone(), max_examples=5)


@pytest.mark.parametrize(
    ("given", "message"), [(Sign, "is the class Sign; expected an instance"), (3, "is a int")]
)
def test_an_object_that_is_not_a_compressor_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        check_compressor(given)


SLOW = {
    "stranger_stochastic_sign",
    "stranger_bernoulli",
    "stranger_folded",
    "stranger_every_eighth_draw",
    "stranger_one_dither",
    "stranger_ternary",
    "stranger_deadzone",
    "stranger_log",
    "stranger_natural",
    "stranger_deflated",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "compressor",
    [
        pytest.param(c, marks=[pytest.mark.exhaustive] if c.name in SLOW else [], id=c.name)
        for c in strangers.STRANGERS
    ],
)
def test_correct_compressors_of_other_designs_pass(compressor):
    check_compressor(compressor, max_examples=5)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("compressor", strangers.STRANGERS, ids=lambda c: c.name)
def test_correct_compressors_of_other_designs_pass_in_torch(compressor):
    check_but_averages(compressor, torch)
