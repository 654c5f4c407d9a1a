"""Top-k and random-k: exact laws about what they keep, and their traits."""

import numpy as np
import pytest

import qcomp
from qcomp import Key, RandK, TopK
from qcomp.testing import replace_draws
from qcomp.testing.inputs import FAMILIES, vector


def decoded(c, x, key=None):
    return c.decompress(c.compress(x, key=key), like=x)


class TestTopK:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(("k", "bucket_size"), [(1, 8), (5, 64), (64, 64), (3, 512)])
    def test_keeps_the_largest_and_of_equals_the_first(self, family, k, bucket_size):
        x = vector(family, 2 * bucket_size + 5, 1)
        v = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)
        expected = np.zeros_like(v)
        for start in range(0, v.size, bucket_size):
            bucket = v[start : start + bucket_size]
            first = sorted(range(bucket.size), key=lambda i, b=bucket: (-abs(b[i]), i))[:k]
            expected[start : start + bucket_size][first] = bucket[first]
        assert decoded(TopK(k, bucket_size), x).tobytes() == expected.tobytes()

    def test_the_kept_and_the_lost_part_add_up_to_the_vector(self):
        """Nothing is rounded: p = D + e bit for bit, and the loss is the energy of the tail."""
        x, residual = vector("gaussian", 200, 2), vector("gaussian", 200, 3)
        payload, left = qcomp.feedback.compress(TopK(7, 64), x, residual)
        q = TopK(7, 64).decompress(payload, like=x)
        assert np.array_equal(q + left, x + residual)
        assert not (q * left).any()

    def test_the_contraction_is_tight_iff_all_magnitudes_are_equal(self):
        c, x = TopK(5, 64), np.where(np.arange(64) % 3, -2.0, 2.0)
        assert np.sum((decoded(c, x) - x) ** 2) == (1 - c.traits.delta) * np.sum(x**2)
        x[11] *= 1.01
        assert np.sum((decoded(c, x) - x) ** 2) < (1 - c.traits.delta) * np.sum(x**2) * 0.9999

    @pytest.mark.parametrize(
        ("size", "bucket_size", "nbytes"),
        [(512, 256, 2 * 5 * (1 + 4) + 2), (1024, 512, 2 * 5 * (2 + 4)), (514, 512, 7 * 6 + 2), (0, 512, 0)],
    )
    def test_bytes(self, size, bucket_size, nbytes):
        """One byte or two per index, then the values at a multiple of 4."""
        assert TopK(5, bucket_size).payload_spec(size).nbytes == nbytes


class TestRandK:
    @pytest.mark.parametrize(("k", "bucket_size"), [(1, 8), (8, 64), (4, 16), (64, 64), (2, 1024)])
    def test_moments_are_exact(self, k, bucket_size):
        """Over all draws: each stratum keeps each of its elements equally often."""
        c, x = RandK(k, bucket_size), vector("gaussian", bucket_size, 4).astype(np.float64)
        ratio = bucket_size // k
        results = []
        for number in range(ratio):
            for draw in (
                number * 65536 // ratio,
                (number + 1) * 65536 // ratio - 1,
            ):  # the first and the last draw of each number
                with replace_draws(lambda _key, _block, draw=draw: draw):
                    results.append(decoded(c, x, Key()))
        mean, error = np.mean(results, axis=0), np.mean(np.square(np.subtract(results, x)), axis=0)
        np.testing.assert_allclose(mean, x, rtol=2.0**-23)
        np.testing.assert_allclose(error, c.traits.omega * x**2, rtol=2.0**-20)
        assert c.traits.omega == ratio - 1
        assert all(np.count_nonzero(r) == k for r in results)

    def test_strata_are_drawn_independently(self):
        """With 4096 buckets of 8 strata of 8 elements, every pair of numbers occurs about equally often."""
        c, x = RandK(8, 64), np.ones(64 * 4096, dtype=np.float32)
        kept = decoded(c, x, Key(seed=1)).reshape(4096, 8, 8) != 0
        number = kept.argmax(axis=1)  # the number drawn in each bucket and stratum
        for i in range(8):
            for j in range(i):
                counts = np.bincount(number[:, i] * 8 + number[:, j], minlength=64)
                # 64 cells of 64 on average: chi-square with 63 degrees of freedom; its 1e-9 quantile is below 150.
                assert ((counts - 64) ** 2 / 64).sum() < 150

    def test_scaled_keeps_values_without_the_factor(self):
        c, x = qcomp.Scaled(RandK(8, 64)), vector("gaussian", 640, 5)
        y = decoded(c, x, Key(seed=2))
        assert np.count_nonzero(y) == 80
        np.testing.assert_allclose(y[y != 0], x[y != 0], rtol=2.0**-22)
        assert c.traits.delta == pytest.approx(1 / 8, rel=1e-3)

    def test_bytes(self):
        assert RandK(8, 64).payload_spec(640).nbytes == 80 * 5
        assert RandK(8, 4096).payload_spec(8192).nbytes == 16 * 6
        assert RandK(64, 64).payload_spec(3).nbytes == 8 * 5  # a tail of three counts as length eight

    def test_values_of_few_bits_are_rounded_as_by_qsgd_at_the_positions_of_32_bits(self):
        x, key = vector("gaussian", 300, 7), Key(seed=3, step=2, rank=1, hop=1, bucket=5)
        for bits in (2, 4, 8):
            c, exact = RandK(8, 64, bits), decoded(RandK(8, 64), x, key)
            y = decoded(c, x, key)
            step = c.payload_spec(300).split(c.compress(x, key=key).data)["step"]
            for bucket in range(5):
                part = slice(64 * bucket, 64 * bucket + 64)
                assert not y[part][exact[part] == 0].any()
                assert np.all(np.abs(y[part] - exact[part]) < 8 * step[bucket])
                assert not np.any((y[part] / (8 * step[bucket])) % 1)

    @pytest.mark.exhaustive
    def test_the_draws_of_values_do_not_depend_on_those_of_positions(self):
        """Values halfway between levels are rounded up half of the time, wherever in their stratum they were drawn."""
        x = np.full(64, 0.5, dtype=np.float32)
        x[7::8] = 1  # the largest value, in one place of each stratum
        ups = {True: [], False: []}
        for step in range(400):
            (number,) = np.flatnonzero(decoded(RandK(8, 64), x, Key(step=step))[::8])
            ups[bool(number < 4)].append(decoded(RandK(8, 64, 2), x, Key(step=step))[8 * number] != 0)
        for up in ups.values():
            assert abs(np.mean(up) - 0.5) < 6 * 0.5 / np.sqrt(len(up))

    @pytest.mark.exhaustive
    def test_a_compiler_draws_the_same(self):
        """Also when decompressing draws the positions again."""
        jax = pytest.importorskip("jax")
        c, x, key = RandK(8, 64, 2), vector("gaussian", 128, 1), Key(seed=1, step=5, hop=1)

        @jax.jit
        def compiled(x):
            payload = c.compress(x, key=key)
            return payload.data, c.decompress(payload, like=x)

        data, y = compiled(jax.numpy.asarray(x))
        assert np.asarray(data).tobytes() == c.compress(x, key=key).data.tobytes()
        assert np.asarray(y).tobytes() == decoded(c, x, key).tobytes()

    def test_bytes_of_few_bits(self):
        assert RandK(64, 4096, 2).payload_spec(1 << 20).nbytes == 256 * (16 + 4) + 16
        assert (
            RandK(2, 64, 2).payload_spec(64).nbytes == 8 * 2 // 8 + 2 + 4 + 16
        )  # at least eight codes, padding

    @pytest.mark.parametrize("k", [1, 8, 64])
    def test_zeros_tails_and_keys_of_every_size(self, k):
        c = RandK(k, 64, 3)
        for size in (0, 1, 7, 9, 64, 65, 200):
            for key in (
                Key(),
                Key(seed=2**64 - 1, step=2**63, rank=2**32 - 1, hop=2**32 - 1, bucket=2**32 - 2),
            ):
                x = vector("gaussian", size, 1)
                assert not decoded(c, 0 * x, key).any()
                y, exact = decoded(c, x, key), decoded(RandK(k, 64), x, key)
                assert not y[exact == 0].any()
                assert np.abs(y).max(initial=0) <= np.abs(exact).max(initial=0) * (1 + 2**-15)

    @pytest.mark.parametrize("bits", [2, 5, 32])
    def test_a_tail_has_the_factor_of_its_length(self, bits):
        for size, k, factor in ((64, 8, 8), (9, 8, 2), (9, 1, 16), (7, 64, 1), (33, 4, 16)):
            y = decoded(RandK(k, 64, bits), np.full(size, 3, dtype=np.float32), Key(seed=2))
            np.testing.assert_allclose(y[y != 0], 3 * factor, rtol=2.0**-15 if bits == 5 else 0)

    def test_feedback_around_it_is_refused(self):
        with pytest.raises(ValueError, match=r"omega = 7 >= 1.*qcomp\.Scaled"):
            qcomp.CompressedMean(RandK(8, 64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0, 8), "k is 0; expected an integer from 1 to 8, the bucket_size"),
        (lambda: TopK(9, 8), "k is 9; expected an integer from 1 to 8"),
        (lambda: TopK(2.0, 8), "k is 2.0; expected an integer"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: TopK(2, 100), "bucket_size is 100; expected a power of two"),
        (lambda: TopK(2, 1 << 17), "bucket_size is 131072; expected at most 65536"),
        (lambda: RandK(3, 8), "k is 3; expected a power of two"),
        (lambda: RandK(16, 8), "k is 16; expected an integer from 1 to 8"),
        (lambda: RandK(8, 8, 1), "value_bits is 1; expected an integer from 2 to 8, or 32"),
        (lambda: RandK(8, 8, 2.0), "value_bits is 2.0; expected an integer"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
