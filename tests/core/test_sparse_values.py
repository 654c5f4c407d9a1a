"""Top-k with values of a few bits: the levels, the code, its length, and damaged bytes."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp import NonFiniteError, Payload, PayloadError, TopK
from qcomp.core import coding, primitives
from qcomp.core.coding import gaps
from qcomp.core.compressors.sparse_levels import kept_delta
from qcomp.testing.compressor_case import Case
from qcomp.testing.contract import compressor_contract
from qcomp.testing.inputs import FAMILIES, vector
from tests.core.worlds import average, start

F = np.float32


def decoded(c, x):
    return c.decompress(c.compress(x), like=x)


def bits_an_entry(c, x):
    return 8 * c.compress(x).nbytes / np.count_nonzero(decoded(c, x))


def short(x):
    """Round to 4 significant bits, half up."""
    if not x:
        return 0.0
    power = 2.0 ** (math.frexp(x)[1] - 4)
    return math.floor(x / power + 0.5) * power


def levels(magnitudes, bits):
    """Return the levels for magnitudes whose sums are exact."""
    mean = F(sum(magnitudes)) / F(len(magnitudes))
    if bits == 1:
        return [short(mean)]
    if bits == 2:
        parts = [m for m in magnitudes if m < mean], [m for m in magnitudes if m >= mean]
        low, high = (F(sum(part)) / F(len(part)) for part in (parts[0] or parts[1], parts[1] or parts[0]))
    else:
        low, high = F(min(magnitudes)), F(max(magnitudes))
    lowest, count = F(short(low)), 2 ** (bits - 1)
    step = F(short((high - lowest) / F(count - 1))) if high > lowest else F(0)
    return [float(lowest + F(j) * step) for j in range(count)]


class TestLevels:
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    @pytest.mark.parametrize(("k", "bucket_size"), [(1, 8), (5, 16), (16, 16), (12, 64)])
    def test_kept_values_take_the_nearest_level(self, k, bucket_size, bits):
        """For integers, whose sums are exact: elements and signs as with 32 bits; of two nearest levels the higher."""
        rng = np.random.default_rng([k, bucket_size, bits])
        for size in (bucket_size, 3 * bucket_size + 5, 3):
            x = rng.integers(-9, 10, size).astype(F) ** 3
            exact, y = decoded(TopK(k, bucket_size), x), decoded(TopK(k, bucket_size, bits), x)
            for at in range(0, size, bucket_size):
                bucket, got = exact[at : at + bucket_size], y[at : at + bucket_size]
                assert np.array_equal(np.sign(bucket), np.sign(got))
                kept = np.flatnonzero(bucket)
                if not kept.size:
                    continue
                found = levels([float(m) for m in np.abs(bucket[kept])], bits)
                for i in kept:
                    distance = [abs(abs(float(bucket[i])) - level) for level in found]
                    assert abs(float(got[i])) == max(
                        v for v, d in zip(found, distance, strict=True) if d == min(distance)
                    )

    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    def test_equal_magnitudes_of_four_bits_stay_exact(self, bits):
        x = np.where(np.arange(64) % 3, F(-13), F(13)) * F(2.0**-20)
        x[5:40] = 0
        assert decoded(TopK(64, 64, bits), x).tobytes() == x.tobytes()

    @pytest.mark.parametrize("family", FAMILIES)
    def test_more_bits_lose_less(self, family):
        x = vector(family, 8192, 3)
        x = x * F(2.0**30) if np.abs(x).max() < 1e-30 else x  # no step is below 2^-126
        kept = decoded(TopK(64, 1024), x)
        errors = [
            np.sum((decoded(TopK(64, 1024, bits), x) - kept).astype(float) ** 2) for bits in (1, 2, 3, 4)
        ]
        assert errors[1] <= errors[0] * (1 + 2**-6)
        assert errors[3] <= errors[2] * (1 + 2**-6)

    def test_two_bits_lose_one_or_two_percent_of_the_kept_gradients(self, gradients):
        for x in gradients.values():
            kept = decoded(TopK(64, 4096), x)
            lost = np.sum((decoded(TopK(64, 4096, 2), x) - kept).astype(float) ** 2)
            assert lost < 0.03 * np.sum(kept.astype(float) ** 2)

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_other_dtypes(self, dtype):
        x = vector("gaussian", 200, 1).astype(dtype)
        y = decoded(TopK(9, 64, 2), x)
        assert y.dtype == x.dtype
        np.testing.assert_allclose(y, decoded(TopK(9, 64, 2), x.astype(F)), rtol=2.0**-10)

    def test_not_finite(self):
        for bad in (np.nan, np.inf, -np.inf, 2.0**100):
            x = vector("gaussian", 100, 1)
            x[70] = bad
            with pytest.raises(NonFiniteError):
                TopK(4, 64, 2).compress(x)

    @pytest.mark.parametrize("k", [1, 3, 30])
    def test_the_ends_of_the_range(self, k):
        largest = 2.0**100 * (1 - 2.0**-24)
        for values in ([2.0**-126] * 40, [largest] * 40, [2.0**-126, largest] * 9):
            x = np.asarray(values, dtype=F)
            for bits in (1, 2, 3, 4):
                assert np.count_nonzero(decoded(TopK(k, 64, bits), x)) == min(k, x.size)


class TestContraction:
    @pytest.mark.slow
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize(
        "c", [TopK(5, 64, 2, "fixed"), TopK(32, 64, 1, "fixed"), TopK(40, 64, 3, "fixed")], ids=str
    )
    def test_no_vector_breaks_it(self, c):
        assert list(compressor_contract(Case(c, np), 5).broken(only="contraction")) == []

    @pytest.mark.parametrize("bits", [1, 2])
    def test_the_bound_is_attained_up_to_a_rounding(self, bits):
        """For equal magnitudes if k <= n / k; with one bit and k >= n / k, also for one value far above the others."""
        x = np.full(64, 9.49, dtype=F)  # is rounded to 9.5 or 9
        lost = np.sum((decoded(TopK(4, 64, bits), x) - x).astype(float) ** 2) / np.sum(x.astype(float) ** 2)
        assert 1 - 4 / 64 < lost < 1 - kept_delta(4, 64, bits)
        if bits == 1:
            x = np.asarray([1.0] + 63 * [1e-6], dtype=F)
            lost = np.sum((decoded(TopK(32, 64, 1), x) - x).astype(float) ** 2)
            assert 1 - 1.01 / 32 < lost < 1 - kept_delta(32, 64, 1)

    def test_the_bounds(self):
        assert kept_delta(4, 64, 2) == 4 / 64 * (1 - 2**-7)
        assert kept_delta(32, 64, 2) == (1 - 2**-7) / 32
        assert kept_delta(32, 64, 3) == 36 / (36 + 40)
        assert kept_delta(32, 64, 4) == 32 / 64 * (1 - 2**-7)
        assert [TopK(k, 64, 2).traits.kept for k in (4, 32)] == [4, 32]


class TestCode:
    @pytest.mark.slow
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    @pytest.mark.parametrize("k", [1, 2, 3, 8])
    def test_every_choice_of_positions_and_signs(self, coders, k, bits):
        """All vectors of 8 elements of {-3, 0, 5}, concatenated into payloads with several numbers of buckets."""
        every = np.asarray(list(itertools.product((-3, 0, 5), repeat=8)), dtype=F)
        every *= 2.0 ** (np.arange(len(every)) % 7)[:, None]
        for x in (every.reshape(-1), every.reshape(-1)[:-3], *every[::640]):
            fixed = TopK(k, 8, bits, "fixed")
            plain = fixed.compress(x).data.tobytes()
            code = coders.gaps_encode(memoryview(plain), x.size, k, 8, bits)
            assert coders.gaps_decode(memoryview(code), x.size, k, 8, bits) == plain
            assert len(code) <= gaps.longest(x.size, gaps.Shape(k, 8, bits))

    def test_the_code_by_hand(self):
        """Of 16 elements, 2 and 9 are kept, one of them negative, with K = 3: written out bit by bit."""
        x = np.zeros(16, dtype=F)
        x[2], x[9] = 2.0**-8, -(2.0**-8)
        count, lowest = "0" + "10", "1" + "0"
        step = (
            "0" * 9 + f"{936:010b}" + "1"
        )  # the number of 0 is 0: 0 - 952 + 16 = -936, of which -1 has the least bits
        assert gaps.divisor(16, 2) == 6
        first = "1" + "100"  # skipped 2: quotient 0, and the remainders 2 to 5 of 6 have 3 bits
        second = "01" + "00"  # skipped 6: quotient 1, and the remainders 0 and 1 have 2 bits
        code = count + lowest + step + first + "01" + second + "11"  # level 1 of a step of 0
        code += "0" * (-len(code) % 8)
        assert TopK(3, 16, 2).compress(x).data.tobytes() == int(code, 2).to_bytes(len(code) // 8, "big")

    @pytest.mark.parametrize("coding_of", ["fixed", None])
    @pytest.mark.parametrize("k", [3, 64])
    def test_zeros_and_empty_vectors_decode_to_themselves(self, k, coding_of):
        """For zeros, fewer elements than k, and an empty vector."""
        c = TopK(k, 64, 2, coding_of)
        for x in (np.zeros(200, F), np.zeros(0, F), np.eye(1, 130, 129, dtype=F)[0], -np.zeros(64, F)):
            assert decoded(c, x).tobytes() == (x + 0).tobytes()

    def test_every_library_and_kernel_has_the_same_bytes(self, library):
        x, c = vector("gaussian", 3000, 5), TopK(20, 512, 2)
        payload = c.compress(library.array(x))
        assert library.numpy(payload.data).tobytes() == c.compress(x).data.tobytes()
        assert (
            library.numpy(c.decompress(payload, like=library.array(x))).tobytes() == decoded(c, x).tobytes()
        )


class TestLength:
    def test_random_positions_cost_little_more_than_their_entropy(self):
        """Averaged over all choices of 4 of 16 positions."""
        total, count = 0, 0
        for chosen in itertools.combinations(range(16), 4):
            before, m = -1, gaps.divisor(16, 4)
            writer = gaps.BitWriter()
            for at in chosen:
                gaps._put_golomb(writer, at - before - 1, m)
                before = at
            total, count = total + 8 * len(writer._bytes) + writer._count, count + 1
        assert math.log2(count) < total / count < 1.15 * math.log2(count)

    @pytest.mark.parametrize(
        ("n", "c", "most"), [(4096, 64, 7.44), (1024, 32, 6.44), (4096, 1024, 3.5), (65536, 1, 16.7)]
    )
    def test_the_mean_length_of_a_gap_at_random_positions(self, n, c, most):
        """Exact: the first of c positions is g with probability binom(n - g - 1, c - 1) / binom(n, c)."""
        writer, total = gaps.BitWriter, 0
        for g in range(n - c + 1):
            bits = writer()
            gaps._put_golomb(bits, g, gaps.divisor(n, c))
            total += math.comb(n - g - 1, c - 1) * (8 * len(bits._bytes) + bits._count)
        assert math.log2(math.comb(n, c)) / c < total / math.comb(n, c) < most

    @pytest.mark.quick_cases(4)
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    @pytest.mark.parametrize("draw", ["normal", "laplace"])
    def test_the_length_for_64_of_4096_elements(self, draw, bits):
        """At least the entropy of the positions and the bits of the values; with 2-bit values at most 9.6."""
        x = getattr(np.random.default_rng(bits), draw)(size=64 * 4096).astype(F)
        floor = math.log2(math.comb(4096, 64)) / 64
        assert floor == pytest.approx(7.364, abs=1e-3)
        assert floor + bits < bits_an_entry(TopK(64, 4096, bits), x) < 7.6 + bits

    def test_the_length_for_gradients(self, gradients):
        for name, x in gradients.items():
            found = bits_an_entry(TopK(64, 4096, 2), x)
            assert 8.9 < found < 9.6, name

    @pytest.mark.parametrize(("k", "bucket_size"), [(1, 65536), (16, 1024), (100, 512), (8, 8)])
    def test_longest_is_an_upper_bound(self, k, bucket_size):
        """For elements crowded at the end, and scales that jump from one end of their range to the other."""
        n = bucket_size
        x = np.zeros(8 * n, dtype=F)
        for bucket in range(8):
            x[bucket * n + n - k : (bucket + 1) * n] = 2.0 ** (99 if bucket % 2 else -126)
            x[bucket * n + n - 1] *= 1.5
        for bits in (1, 2, 3, 4):
            c = TopK(k, n, bits)
            assert c.compress(x).nbytes <= c.payload_spec(x.size).nbytes
            plain = c.coder.plain.payload_spec(x.size).nbytes
            assert c.payload_spec(x.size).nbytes <= plain + 9 * 8

    @pytest.mark.parametrize(
        ("n", "k", "bits", "nbytes"), [(512, 5, 2, 2), (16384, 5, 2, 2), (65536, 5, 1, 3), (64, 5, 2, 1)]
    )
    def test_the_length_without_a_coder_is_fixed(self, n, k, bits, nbytes):
        entries = -(-2 * k * nbytes // 4) * 4
        assert TopK(k, n, bits, "fixed").payload_spec(2 * n).nbytes == entries + 2 * 8


compiled_is_slow = pytest.mark.parametrize(
    "kernels", ["pure", pytest.param("numba", marks=pytest.mark.slow)], indirect=True
)
"""Compiling what a test needs takes many seconds."""


class TestDamage:
    X = vector("sparse", 300, 11)
    C = TopK(9, 64, 2)

    def read(self, c, data, size=300):
        data = np.frombuffer(bytes(data), np.uint8)
        return c.decompress(Payload(c.spec, size, "float32", data), like=np.zeros(size, F))

    @compiled_is_slow
    def test_cut_off_anywhere(self, kernels):
        good = self.C.compress(self.X).data.tobytes()
        for length in range(len(good)):
            with pytest.raises(PayloadError):
                self.read(self.C, good[:length])
        for more in (b"\0", b"\1", b"\xff" * 3):
            with pytest.raises(PayloadError):
                self.read(self.C, good + more)

    @pytest.mark.parametrize(
        ("bits", "message"),
        [
            ("0111", "keeps 7 elements; expected at most 5"),
            ("1" + "1" + "1" + "0" * 12 + f"{4000:013b}", "gives its scales as"),
            ("1" + "10" + "10" + "0" * 20, "skips"),
            ("1" + "10" + "10" + "1" * 7 + "0" * 8, "skips 5 elements where at most 4 follow"),
        ],
    )
    def test_errors_say_what_is_wrong(self, bits, message):
        bits += "0" * (-len(bits) % 8)
        with pytest.raises(PayloadError, match=message), qcomp.backends.use("pure"):
            coding.decode_gaps(int(bits, 2).to_bytes(len(bits) // 8, "big"), 8, gaps.Shape(5, 8, 2))

    def test_a_scale_out_of_range(self, coders):
        for difference, sign in ((1000, "1"), (900, "0")):  # 952 - 1001 < 8, and 952 + 900 > 1816
            bits = "1" + "0" * 9 + f"{difference + 1:010b}" + sign
            bits += "1" * 15 + "0" * (-len(bits + 15 * "1") % 8)
            with pytest.raises(PayloadError):
                coders.gaps_decode(memoryview(int(bits, 2).to_bytes(len(bits) // 8, "big")), 8, 5, 8, 1)

    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(st.binary(max_size=60), st.sampled_from([(1, 8), (5, 64), (64, 64), (3, 4096)]), st.integers(1, 4))
    def test_arbitrary_bytes(self, data, shape, bits):
        """Either an error, or a vector with at most k elements per bucket; compiled loops read the same."""
        check_same_reading(data, 150, gaps.Shape(*shape, bits))

    @pytest.mark.slow
    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(
        st.integers(0, 9),
        st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=3),
        st.data(),
    )
    def test_mutated_bytes(self, seed, flips, data):
        shape = gaps.Shape(*data.draw(st.sampled_from([(1, 8), (5, 64), (64, 64), (3, 4096)])), 1 + seed % 4)
        x = vector("wide", 150, seed)
        code = bytearray(TopK(*shape).compress(x).data.tobytes())
        for at, bit in flips:
            code[at % len(code)] ^= 1 << bit
        check_same_reading(bytes(code[: data.draw(st.integers(len(code) // 2, len(code)))]), 150, shape)

    @compiled_is_slow
    def test_damaged_entries_of_fixed_length_stay_within_the_vector(self, kernels):
        rng = np.random.default_rng(0)
        for c in (TopK(9, 64, 2, "fixed"), TopK(9, 64), TopK(3, 8192, 4, "fixed")):
            data = rng.integers(0, 256, c.payload_spec(300).nbytes).astype(np.uint8)
            out = np.zeros(302, dtype=F)
            with np.errstate(all="ignore"):
                c.decompress(Payload(c.spec, 300, "float32", data), like=out[1:301], out=out[1:301])
            assert out[0] == out[301] == 0


def check_same_reading(data, size, shape):
    """Check that pure and compiled loops both raise, or return the same payload."""
    found = []
    numba = pytest.importorskip("qcomp.backends.numba_cpu.coding_set").CODERS
    for coders in (coding.PURE, numba):
        try:
            found.append(bytes(coders.gaps_decode(memoryview(data), size, *shape)))
        except PayloadError:
            found.append(None)
    assert found[0] == found[1]
    if found[0] is not None:
        fixed = TopK(*shape, "fixed")
        y = fixed.decompress(
            Payload(fixed.spec, size, "float32", np.frombuffer(found[0], np.uint8)), like=np.zeros(size, F)
        )
        for at in range(0, size, shape.bucket_size):
            assert np.count_nonzero(y[at : at + shape.bucket_size]) <= shape.k


class TestSpec:
    @pytest.mark.parametrize(
        ("c", "spec"),
        [
            (TopK(), "topk:k=32,bucket_size=1024"),
            (TopK(64, 4096, 2), "topk:k=64,bucket_size=4096,value_bits=2"),
            (replace(TopK(64, 4096), value_bits=2), "topk:k=64,bucket_size=4096,value_bits=2"),
            (replace(TopK(64, 4096, 2), value_bits=32), "topk:k=64,bucket_size=4096"),
            (TopK(64, 4096, 2, "fixed"), "topk:k=64,bucket_size=4096,value_bits=2,coding=fixed"),
        ],
    )
    def test_there_and_back(self, c, spec):
        assert c.spec == spec
        assert qcomp.compressor(spec) == c
        assert c.variable_length == (c.coder is not None) == (c.coding is None and c.value_bits < 32)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"value_bits": 0}, "value_bits is 0; expected an integer from 1 to 4, or 32"),
            ({"value_bits": 5}, "value_bits is 5; expected an integer from 1 to 4, or 32"),
            ({"value_bits": 2.0}, "value_bits is 2.0; expected an integer"),
            ({"value_bits": True}, "value_bits is True; expected an integer"),
            (
                {"coding": "fixed"},
                "coding is 'fixed', but payloads with value_bits=32 always have a fixed length; expected None, or",
            ),
            ({"value_bits": 2, "coding": "rice"}, "coding is 'rice'; expected 'fixed' or None"),
        ],
    )
    def test_options_out_of_range_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            TopK(**arguments)

    @pytest.mark.slow
    def test_a_compiler_can_trace_payloads_of_fixed_length(self):
        jax = pytest.importorskip("jax")
        x = vector("gaussian", 100, 1)
        c = TopK(5, 64, 2, "fixed")
        got = jax.jit(lambda x: c.compress(x).data)(jax.numpy.asarray(x))
        assert np.asarray(got).tobytes() == c.compress(x).data.tobytes()
        with pytest.raises(TypeError, match=r"coding is None with value_bits=2.*expected coding='fixed'"):
            jax.jit(lambda x: TopK(5, 64, 2).compress(x).data)(jax.numpy.asarray(x))


class TestMeans:
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_everything_lost_is_owed(self, topology):
        """Over rounds, the results plus what workers and servers still owe equal the inputs."""
        mean, world = qcomp.CompressedMean(TopK(4, 64, 2), topology=topology), 3
        x = [
            [vector("gaussian", 300, 10 * rank + turn).astype(float) for rank in range(world)]
            for turn in range(4)
        ]
        states, total = start(mean, [x[0][0]], world), 0.0
        for of_ranks in x:
            out, states = average(mean, of_ranks, states, None)
            total = total + out
        owed = np.mean([state.worker[0] for state in states], axis=0)
        if topology == "two_phase":
            owed = owed + np.concatenate([part for state in states for part in state.server])
        np.testing.assert_allclose(total + owed, np.sum(np.mean(x, axis=1), axis=0), atol=1e-12)

    def test_a_server_keeps_k_elements_of_the_mean(self, kernels):
        c = TopK(4, 64, 2)
        x = [vector("gaussian", 64, rank) for rank in range(4)]
        payloads = [c.compress(one) for one in x]
        mean = primitives.average(c, payloads, x[0])
        assert 4 < np.count_nonzero(mean) <= 16
        again = primitives.compress_mean(c, payloads, x[0], np.zeros_like(x[0]), None)
        y = c.decompress(c.payload(x[0], again.data), like=x[0])
        assert np.count_nonzero(y) == 4
        np.testing.assert_allclose(y + again.residual, mean, rtol=2.0**-22)


@pytest.fixture(scope="module")
def gradients():
    """Gradients of a trained language model, cut to whole buckets."""
    path = Path(__file__).parents[2] / "docs/benchmarks/gradients/sample.npz"
    found = {name: value.reshape(-1) for name, value in np.load(path).items()}
    return {
        name: x[: x.size // 4096 * 4096]
        for name, x in found.items()
        if x.size >= 4096 and "embedding" not in name
    }


@pytest.fixture(params=["pure", "numba"])
def coders(request):
    if request.param == "pure":
        return coding.PURE
    return pytest.importorskip("qcomp.backends.numba_cpu.coding_set").CODERS
