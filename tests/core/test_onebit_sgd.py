"""1-bit SGD: the identities of its quantizer, columns from the shapes of tensors, and the doubly quantized mean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp import CompressedMean, OneBitSGD
from qcomp.comm import run_local
from qcomp.testing import check_compressor
from qcomp.testing.inputs import FAMILIES, vector

COLUMNS = (1, 3, 8, 33, 64, 100)


def decoded(c, x):
    return c.decompress(c.compress(x), like=x)


def columns(x: np.ndarray, column_size: int):
    return [x[i : i + column_size] for i in range(0, x.size, column_size)]


def two_means(x: np.ndarray, column_size: int) -> np.ndarray:
    """Return the result by the definition, in float64."""
    parts = []
    for column in columns(x.astype(np.float64), column_size):
        up = column >= 0
        parts.append(
            np.where(up, column[up].mean() if up.any() else 0, column[~up].mean() if (~up).any() else 0)
        )
    return np.concatenate(parts) if parts else x.astype(np.float64)


class TestContract:
    @pytest.mark.exhaustive
    @pytest.mark.parametrize("column_size", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
    def test_of_columns_of_any_size(self, column_size):
        check_compressor(OneBitSGD(column_size=column_size), max_examples=10)

    def test_is_registered(self):
        assert qcomp.compressor("onebit_sgd:column_size=100") == OneBitSGD(column_size=100)
        assert qcomp.compressor("onebit_sgd") == OneBitSGD()

    @pytest.mark.parametrize("column_size", [0, -1, 2**20 + 1, 8.0, True])
    def test_column_size_out_of_range(self, column_size):
        with pytest.raises(
            ValueError, match=f"column_size is {column_size!r}; expected an integer from 1 to"
        ):
            OneBitSGD(column_size=column_size)

    @pytest.mark.parametrize(
        ("size", "column_size", "nbytes"),
        [
            (4096, 512, 8 * (64 + 8)),  # one bit per element, 64 bits per column
            (100 * 768, 768, 100 * (96 + 8)),  # not a power of two
            (10 * 5, 5, 10 * (1 + 8) + 2),  # whole bytes per column, and the means at a multiple of 4 bytes
            (13, 5, (1 + 1 + 1) + 1 + 3 * 8),
            (0, 5, 0),
        ],
    )
    def test_bytes(self, size, column_size, nbytes):
        assert OneBitSGD(column_size=column_size).payload_spec(size).nbytes == nbytes


class TestIdentities:
    """For every column: the sums of the loss over each sign, orthogonality, and the contraction."""

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("column_size", COLUMNS)
    def test_of_the_loss(self, family, column_size):
        x = vector(family, 210, 3)
        q = decoded(OneBitSGD(column_size=column_size), x).astype(np.float64)
        v = np.where(np.abs(x) < 2.0**-126, 0, x).astype(np.float64)
        for p, r in zip(columns(v, column_size), columns(q, column_size), strict=True):
            lost, square, m = p - r, np.sum(p**2), p.size
            # A mean is a tree of at most 8 roundings and one of the division; below 2^-126 it is zero.
            slack = 9 * 2.0**-24 * np.sum(np.abs(p)) + m * 2.0**-126
            for chosen in (p >= 0, p < 0):
                assert abs(lost[chosen].sum()) <= slack
            assert abs(lost @ r) <= slack * np.max(np.abs(p))
            assert abs(square - r @ r - lost @ lost) <= 3 * slack * np.max(np.abs(p))
            bound = square - np.sum(np.abs(p)) ** 2 / m
            assert lost @ lost <= bound + 3 * slack * np.max(np.abs(p))

    @pytest.mark.parametrize("column_size", COLUMNS)
    def test_is_its_definition(self, column_size):
        for family in ("gaussian", "wide", "positive", "sparse", "ties"):
            x = vector(family, 210, 4)
            expected = two_means(x, column_size)
            np.testing.assert_allclose(
                decoded(OneBitSGD(column_size=column_size), x), expected, rtol=2.0**-20, atol=2.0**-125
            )

    def test_the_threshold_is_zero_and_not_the_mean(self):
        """At the mean, 5, two values would remain here and nothing would be lost."""
        x = np.asarray([1.0, 1.0, 9.0, 9.0], dtype=np.float32)
        assert decoded(OneBitSGD(), x).tolist() == [5.0] * 4

    def test_padding_is_not_counted(self):
        """Otherwise the positive elements would have a smaller mean."""

        class CountsPadding(OneBitSGD):
            def encode_block(self, rows, block, key):
                return super().encode_block(rows, block._replace(filled=block.length), key)

        x = np.full(3, 8.0, dtype=np.float32)
        assert decoded(OneBitSGD(), x).tolist() == [8.0] * 3
        assert decoded(CountsPadding(), x).tolist() == [3.0] * 3

    def test_relative_error_of_gaussian_columns(self):
        """It is 1 - 2 / pi, as for a scaled sign."""
        x = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
        lost = x - decoded(OneBitSGD(column_size=1 << 12), x)
        assert np.sum(lost**2) / np.sum(x**2) == pytest.approx(1 - 2 / np.pi, abs=0.003)

    @pytest.mark.parametrize("column_size", COLUMNS)
    @settings(deadline=None, derandomize=True, max_examples=25)
    @given(
        low=st.floats(-(2.0**60), -(2.0**-120), width=32),
        high=st.floats(0, 2.0**60, width=32),
        seed=st.integers(0, 99),
    )
    def test_two_values_are_kept_exactly(self, column_size, low, high, seed):
        high = 0.0 if high < 2.0**-126 else high
        x = np.where(np.random.default_rng(seed).random(210) < 0.3, low, high).astype(np.float32)
        assert np.array_equal(decoded(OneBitSGD(column_size=column_size), x), x)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_compressing_twice_changes_nothing(self, family):
        c, x = OneBitSGD(column_size=33), vector(family, 210, 5)
        once = c.compress(x)
        assert c.compress(c.decompress(once, like=x)).data.tobytes() == once.data.tobytes()

    def test_single_elements_and_zeros_are_kept_exactly(self):
        x = vector("gaussian", 50, 6)
        assert np.array_equal(decoded(OneBitSGD(column_size=1), x), x)
        payload = OneBitSGD(column_size=10).compress(np.zeros(50, dtype=np.float32))
        assert not payload.data.any()  # the sign of zero is plus, and both means are zero

    def test_codes_depend_on_signs_alone_and_negation_swaps_the_means(self):
        c, x = OneBitSGD(column_size=30), vector("gaussian", 90, 7)
        spec = c.payload_spec(90)
        there, back = (spec.split(c.compress(v).data) for v in (x, -x))
        assert np.array_equal(there["positive"], -back["negative"])
        assert np.array_equal(there["negative"], -back["positive"])
        scaled = spec.split(c.compress(x * np.abs(x)).data)
        assert np.array_equal(scaled["codes"], there["codes"])
        assert not np.array_equal(scaled["positive"], there["positive"])


class TestShapes:
    @pytest.mark.parametrize(
        ("shape", "column_size"),
        [
            ((), 1000),
            ((50,), 1000),
            ((4, 7), 7),
            ((4, 3, 2, 2), 12),
            ((4, 0), 1),
            ((2, 3000), 1000),
            ((2, 1000), 1000),
        ],
    )
    def test_a_column_has_the_weights_of_one_output(self, shape, column_size):
        c = OneBitSGD(column_size=1000)
        assert c.for_shape(shape) == OneBitSGD(column_size=column_size)
        assert c.for_shape(shape).for_shape((123,)) == OneBitSGD(column_size=column_size)

    def test_other_compressors_ignore_the_shape(self):
        c = qcomp.ScaledSign()
        assert c.for_shape((3, 4)) is c

    def test_compress_takes_the_columns_of_its_array(self, library):
        x = np.random.default_rng(0).standard_normal((4, 3, 7)).astype(np.float32)
        c, array = OneBitSGD(), library.array(x)
        payload = c.compress(array)
        assert payload.compressor == "onebit_sgd:column_size=21"
        got = library.numpy(c.decompress(payload, like=array))
        assert got.shape == x.shape
        np.testing.assert_allclose(got.ravel(), two_means(x.ravel(), 21), rtol=2.0**-20)
        total = library.numpy(c.add(payload, array * 0))
        assert total.tobytes() == got.tobytes()
        blob = payload.to_bytes()
        back = qcomp.Payload.from_bytes(blob, like=array)
        again = qcomp.compressor(back.compressor).decompress(back, like=array)
        assert library.numpy(again).tobytes() == got.tobytes()

    def test_feedback_takes_the_columns_of_its_array(self):
        x = np.random.default_rng(1).standard_normal((5, 9))
        payload, residual = qcomp.feedback.compress(OneBitSGD(), x, np.zeros_like(x))
        assert payload.compressor == "onebit_sgd:column_size=9"
        assert np.abs(residual.sum(axis=1)).max() < 1e-6  # the losses of each column add up to zero
        assert np.abs(residual.sum(axis=0)).max() > 0.1  # those along other axes do not

    def test_an_array_of_another_shape_is_an_error(self):
        c, x = OneBitSGD(), np.ones((4, 6), dtype=np.float32)
        with pytest.raises(qcomp.PayloadError, match="made by onebit_sgd:column_size=6; this compressor is"):
            c.decompress(c.compress(x), like=x.reshape(3, 8))


SHAPES = [(5, 21), (33,), (4, 3, 2), (), (0, 3)]


def inputs(rank: int, step: int, dtype=np.float64) -> list:
    rng = np.random.default_rng([rank, step])
    return [(rng.standard_normal(shape) + 0.3).astype(dtype) for shape in SHAPES]


class TestMean:
    """The mean of the paper's section 3.2: quantized by the workers, and again by the server of each part."""

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_is_that_of_a_reference(self, lockstep, size, topology):
        """With the columns of every tensor, residuals of workers and servers, sums in rank order; three steps."""
        mean = CompressedMean(OneBitSGD(), topology=topology)
        states = [mean.zeros(inputs(0, 0), rank=rank, size=size) for rank in range(size)]
        heights = [21, 1 << 20, 6, 1 << 20, 3]
        worker = [[np.zeros(x.size) for x in inputs(0, 0)] for _ in range(size)]
        server = [np.zeros(x.size) for x in inputs(0, 0)]
        for step in range(3):
            values = [inputs(rank, step) for rank in range(size)]
            results = lockstep([mean.stages(x, s) for x, s in zip(values, states, strict=True)])
            states = [s for _, s in results]
            assert len({b"".join(m.tobytes() for m in means) for means, _ in results}) == 1
            for i, height in enumerate(heights):
                average = np.zeros(values[0][i].size)
                for rank in range(size):
                    p = values[rank][i].ravel() + worker[rank][i]
                    q = two_means(p, height)
                    worker[rank][i] = p - q
                    average += q / size
                if topology == "two_phase":
                    p = average + server[i]
                    average = two_means(p, height)
                    server[i] = p - average
                np.testing.assert_allclose(results[0][0][i].ravel(), average, rtol=0, atol=1e-5)

    def test_the_missing_part_is_in_the_residuals(self, lockstep):
        """Telescoping: the sum of the means is that of the exact means minus mean_i D_i + D_agg, in float64."""
        size, mean = 3, CompressedMean(OneBitSGD())
        states = [mean.zeros(inputs(0, 0), rank=rank, size=size) for rank in range(size)]
        total = [np.zeros(x.size) for x in inputs(0, 0)]
        for step in range(8):
            values = [inputs(rank, step) for rank in range(size)]
            results = lockstep([mean.stages(x, s) for x, s in zip(values, states, strict=True)])
            states = [s for _, s in results]
            for i, got in enumerate(results[0][0]):
                total[i] += got.ravel() - sum(v[i] for v in values).ravel() / size
        owed = [sum(s.worker[i] for s in states) / size for i in range(len(SHAPES))]
        for state, chunk in zip(
            states, mean.layout([x.shape for x in inputs(0, 0)], rank=0, size=size).chunks, strict=True
        ):
            for segment, residual in zip(chunk, state.server, strict=True):
                owed[segment.tensor][segment.start : segment.stop] += residual
        for difference, e in zip(total, owed, strict=True):
            np.testing.assert_allclose(difference, -e, rtol=0, atol=1e-12)

    @pytest.mark.slow
    def test_a_constant_gradient_needs_the_residual(self, lockstep):
        """The mean over time of what is sent tends to a constant gradient of mixed magnitudes, as ||D|| / T."""
        g = np.asarray([[1.0, -3.0, 0.2, -0.1, 5.0]])
        distances = {}
        for feedback in (True, False):
            mean = CompressedMean(OneBitSGD(), feedback=feedback)
            state, total, found = mean.zeros([g], rank=0, size=1), 0, []
            for step in range(1, 401):
                ((got, state),) = lockstep([mean.stages(g, state)])
                total = total + got
                if step in (100, 400):
                    found.append(np.abs(total / step - g).max())
            distances[feedback] = found
        assert distances[True][1] < 0.1
        assert distances[True][1] < distances[True][0] / 2
        assert distances[False][0] == pytest.approx(distances[False][1])
        assert distances[False][1] > 1

    def test_bytes(self):
        """One bit per element in whole bytes and two float32 per column, without overhead for other tensors."""
        x = [np.ones((64, 96), dtype=np.float32)]

        def rank_main(comm):
            mean = CompressedMean(OneBitSGD())
            state, before = mean.init(x, comm), comm.bytes_sent
            mean(x, state, comm)
            return comm.bytes_sent - before

        assert run_local(2, rank_main) == [2 * (32 * (96 // 8 + 8) + 8)] * 2

    def test_tensors_with_buckets_of_their_own_share_no_draws(self):
        """Bucket numbers count in units of the elements before a tensor; every bucket is in exactly one chunk."""
        mean = CompressedMean(OneBitSGD())
        shapes = [(5, 21), (2, 8), (7,), (30, 3)]
        for size in (1, 2, 3, 7):
            chunks = mean.layout(shapes, rank=0, size=size).chunks
            segments = [segment for chunk in chunks for segment in chunk]
            for i, shape in enumerate(shapes):
                own = [s for s in segments if s.tensor == i]
                assert [s.start for s in own[1:]] == [s.stop for s in own[:-1]]
                assert (own[0].start, own[-1].stop) == (0, np.prod(shape))
        (whole,) = mean.layout(shapes, rank=0, size=1).chunks
        heights = [21, 8, 1 << 20, 3]
        for before, after, height in zip(whole, whole[1:], heights, strict=False):
            end = before.bucket * height + before.size
            assert after.bucket * heights[after.tensor] >= end


class TestOptimizer:
    """CompressedSGD with OneBitSGD: momentum acts on the aggregate, as in the paper."""

    @staticmethod
    def train(steps: int, comm, opt, state=None, params=None, *, first: int = 0):
        params = [np.zeros(shape) for shape in SHAPES] if params is None else params
        state = opt.init(params, comm) if state is None else state
        for step in range(first, first + steps):
            grads = [p - t for p, t in zip(params, inputs(comm.rank, 0), strict=True)]
            grads = [g + 0.01 * n for g, n in zip(grads, inputs(comm.rank, 1 + step), strict=True)]
            params, state = opt.step(params, grads, state, comm)
        return params, state

    @pytest.mark.exhaustive
    def test_it_trains_and_resumes_bit_for_bit(self):
        opt = qcomp.CompressedSGD(learning_rate=0.05, momentum=0.5, exact=None, compressor=OneBitSGD())

        def rank_main(comm):
            params, state = self.train(40, comm, opt)
            loaded = opt.load_state_dict(opt.state_dict(state), params, comm)
            one = self.train(20, comm, opt, state, params, first=40)
            other = self.train(20, comm, opt, loaded, params, first=40)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(one[0], other[0], strict=True))
            return one[0]

        results = run_local(3, rank_main, timeout=30)
        assert len({b"".join(p.tobytes() for p in params) for params in results}) == 1
        for i, p in enumerate(results[0]):
            target = sum(inputs(rank, 0)[i] for rank in range(3)) / 3
            assert np.linalg.norm(p - target) <= 0.35 * np.linalg.norm(target)
