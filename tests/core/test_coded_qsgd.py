"""QSGD with a coder: shorter payloads of the same values, more levels than eight bits hold, and damaged payloads."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp import Key, PayloadError
from qcomp.core import coding, primitives
from qcomp.core.feedback import compensated
from qcomp.core.kernels import Blend
from qcomp.testing import replace_draws
from qcomp.testing.inputs import vector

KEY = Key(seed=3, step=1, rank=2, hop=1, bucket=5)
CODINGS = ["elias", "range"]
LEVELS = [1, 5, 127, 128, 700, 32767]
"""Levels with code widths from 2 to 16 bits; 5 does not use all values of its width."""


def coded(levels: int = 7, coding: Any = "range", **options) -> qcomp.QSGD:
    return qcomp.QSGD(levels=levels, coding=coding, **{"bucket_size": 32, **options})


def decoded(c, x, key=KEY):
    return c.decompress(c.compress(x, key=key), like=x)


def steps(c, x, key=KEY) -> np.ndarray:
    return c.payload_spec(x.size).split(c.compress(x, key=key).data)["step"]


class TestSameValues:
    """A coder loses nothing: the contract checks this for compressing vectors; these tests cover everything else."""

    @pytest.mark.quick_cases(6)
    @pytest.mark.parametrize("make", [lambda c: c, qcomp.Scaled], ids=["plain", "scaled"])
    @pytest.mark.parametrize("coding", CODINGS)
    @pytest.mark.parametrize("levels", [1, 127, 700])
    def test_every_operation_gives_the_results_of_fixed_width(self, float64_library, levels, coding, make):
        """Compressing, feedback with donation, blending a momentum, writing into a buffer, adding."""
        lib, c = float64_library, make(coded(levels, coding, norm="l2"))
        plain = c.coder.plain
        x, old = (vector(family, 77, 1) for family in ("gaussian", "sparse"))
        results = []
        for each in (c, plain):
            given = [lib.array(v) for v in (x, old, old, x)]
            array, residual, total, buffer = given
            writes = lib.name in ("numpy", "torch")
            payload, lost = compensated(each, array, residual, key=KEY, donate=writes)
            y = each.decompress(payload, like=array, out=buffer if writes else None)
            assert not writes or (y is buffer and lost is residual)
            added = each.add(payload, total)
            mixed = primitives.encode(each, array, lib.array(old), KEY, blend=Blend(lib.array(x), 0.9, 0.7))
            assert (payload.compressor, payload.size) == (each.spec, 77)
            results.append([lib.numpy(v).tobytes() for v in (lost, y, added, mixed.residual)])
        assert results[0] == results[1]

    @pytest.mark.parametrize(("levels", "coding"), [(5, "elias"), (700, "range")])
    def test_every_library_gives_the_bytes_of_numpy(self, library, levels, coding):
        c, x = coded(levels, coding), vector("gaussian", 64, 2)
        expected = c.compress(x, key=KEY)
        got = c.compress(library.array(x), key=KEY)
        assert library.numpy(got.data).tobytes() == expected.data.tobytes()
        back = library.seal(qcomp.Payload.from_bytes(expected.to_bytes(), like=library.array(x)))
        y = library.numpy(c.decompress(back, like=library.array(x)))
        assert y.tobytes() == c.decompress(expected, like=x).tobytes()

    def test_float64(self, float64_library):
        c, x = coded(700), vector("gaussian", 77, 2).astype(np.float64) * (1 + 2.0**-40)
        y = c.decompress(c.compress(float64_library.array(x), key=KEY), like=float64_library.array(x))
        assert float64_library.numpy(y).tobytes() == decoded(c.coder.plain, x).tobytes()
        assert np.abs(float64_library.numpy(y) - x).max() <= steps(c, x).max()

    @pytest.mark.parametrize("name", ["pure", "numba"])
    def test_kernels_compress_the_plain_payload(self, name):
        """The bytes are the same whatever kernels compress the plain payload; no kernel set is asked for a coder."""
        asked = []

        class Spy:
            name = "spy"

            def takes(self, _):
                return True

            def encode(self, compressor, *_, **__):
                asked.append(compressor)

            def decode(self, compressor, *_, **__):
                asked.append(compressor)

        x = vector("gaussian", 1000, 3)
        for c in (coded(7), qcomp.Scaled(coded(7)), coded(700)):
            with qcomp.backends.use("pure"):
                expected = qcomp.feedback.compress(c, x, x, key=KEY)
            with qcomp.backends.use(name):
                got = qcomp.feedback.compress(c, x, x, key=KEY)
                y = c.decompress(got[0], like=x)
            assert got[0].data.tobytes() == expected[0].data.tobytes()
            assert got[1].tobytes() == expected[1].tobytes()
            assert y.tobytes() == decoded(c.coder.plain, x + x).tobytes()
            with qcomp.core.kernels.use_kernels(Spy()):
                decoded(c, x)
        assert asked
        assert all(c.coder is None for c in asked)

    def test_a_refused_vector_is_an_error_and_touches_nothing(self):
        x, residual = vector("gaussian", 77, 4), vector("gaussian", 77, 5)
        before = residual.copy()
        x[50] = np.nan
        for c in (coded(7), coded(700), qcomp.Scaled(coded(1))):
            with pytest.raises(qcomp.NonFiniteError):
                qcomp.feedback.compress(c, x, residual, key=KEY, donate=True)
            assert residual.tobytes() == before.tobytes()

    def test_a_vector_refused_by_a_device_still_gives_a_valid_payload(self):
        """A device reports the refusal only later: until then the codes may be arbitrary."""
        x = vector("gaussian", 77, 4)

        class Device:
            name = "device"

            def takes(self, _):
                return True

            def encode(self, compressor, x, *_, **__):
                data = np.full(compressor.payload_spec(x.size).nbytes, 0xFF, dtype=np.uint8)
                return qcomp.core.kernels.Encoded(data, None, np.ones(1, dtype=np.uint8))

        c = coded(5)
        with qcomp.core.kernels.use_kernels(Device()):
            encoded = primitives.encode(c, x, None, KEY)
            with pytest.raises(qcomp.NonFiniteError):
                c.compress(x, key=KEY)
        c.payload_spec(x.size).check(encoded.data)
        assert not np.any(c.decompress(c.payload(x, encoded.data), like=x))


class TestLength:
    @pytest.mark.quick_cases(12)
    @pytest.mark.parametrize("coding", CODINGS)
    @pytest.mark.parametrize("levels", LEVELS)
    @pytest.mark.parametrize("family", ["gaussian", "constant", "one_hot", "wide"])
    def test_at_most_a_byte_over_fixed_width(self, family, levels, coding):
        for size in (0, 1, 7, 8, 33, 1000):
            c, x = coded(levels, coding, bucket_size=512), vector(family, size, 6)
            payload = c.compress(x, key=KEY)
            spec = c.payload_spec(size)
            packed, count = c.coder.plain.payload_spec(size).fields
            assert spec.nbytes == 4 * count.size + 1 + packed.size
            assert 4 * count.size + 1 == spec.shortest <= payload.nbytes <= spec.nbytes

    @pytest.mark.parametrize("coding", CODINGS)
    def test_codes_that_coding_would_not_shorten_are_sent_as_they_are(self, coding):
        """With the largest level everywhere, no code is shorter than the plain bits."""
        c = coded(127, coding, bucket_size=8)
        x = 127 * np.asarray([1, -1, 1, 1, -1, 1, -1, -1], dtype=np.float32)
        payload = c.compress(x, key=KEY)
        assert payload.nbytes == 4 + 1 + 8
        assert payload.data[4] == 0
        assert decoded(c, x).tobytes() == x.tobytes()

    def test_sparse_codes_are_short(self):
        """One level and the L2 norm: 3.7% of a Gaussian bucket of 512 is nonzero, against 2 bits per element."""
        x = vector("gaussian", 64 * 512, 7)
        nbytes = {
            coding: coded(1, coding, bucket_size=512, norm="l2").compress(x, key=KEY).nbytes - 64 * 4
            for coding in CODINGS
        }
        p = float(np.mean(decoded(coded(1, bucket_size=512, norm="l2"), x) != 0))
        entropy = -p * math.log2(p / 2) - (1 - p) * math.log2(1 - p)
        assert entropy <= nbytes["range"] * 8 / x.size < 1.03 * entropy + 0.01
        assert nbytes["range"] < nbytes["elias"] < 0.5 * 2 * x.size / 8

    def test_the_payload_holds_the_output_of_the_coder(self):
        """Steps, the byte 1, and then exactly the coder's output for levels and signs."""
        c = coded(7, bucket_size=64)
        x = vector("sparse", 150, 8)
        data = c.compress(x, key=KEY).data.tobytes()
        step = np.frombuffer(data[:12], np.float32)
        level = np.abs(decoded(c, x)) / np.repeat(step, 64)[:150]
        levels = level.astype("<u2").tobytes()
        negative = (decoded(c, x) < 0).astype(np.uint8).tobytes()
        code = coding.encode("range", levels, negative, largest=7)
        assert data[12:] == b"\1" + code


class TestManyLevels:
    @pytest.mark.parametrize("norm", ["max", "l2"])
    @pytest.mark.parametrize("levels", [128, 255, 256, 1000, 32767])
    def test_all_levels_times_the_step_are_exact(self, levels, norm):
        c, x = coded(levels, norm=norm), vector("wide", 320, 9)
        step = steps(c, x)
        products = step[:, None] * np.arange(levels + 1, dtype=np.float32)
        exact = step[:, None].astype(np.float64) * np.arange(levels + 1)
        assert np.array_equal(products.astype(np.float64), exact)
        norms = np.abs(x.reshape(-1, 32)).max(axis=1)
        if norm == "max":
            assert np.all(norms / np.float64(levels) <= step)
            slack = 1 + 2.0 ** (levels.bit_length() - 23)
            assert np.all(step <= np.maximum(norms / np.float64(levels) * slack, 2.0**-126))

    def test_with_more_bits_a_product_would_not_be(self):
        """Otherwise the test above could not fail."""
        step = np.asarray([1 + 2.0**-16], dtype=np.float32)
        assert float(step[0] * np.float32(1001)) != float(step[0]) * 1001

    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("norm", ["max", "l2"])
    @pytest.mark.parametrize("levels", [128, 1000, 32767])
    def test_moments_over_all_draws(self, levels, norm):
        """E C(v) = v up to a rounding, and E |C(v) - v|^2 = step^2 sum p (1 - p) within omega |v|^2."""
        c, x = coded(levels, norm=norm), vector("gaussian", 32, 10)
        (step,) = steps(c, x).astype(np.float64)
        position = np.abs(x) / np.float32(step)
        low = np.floor(position)
        threshold = np.round((position - low) * np.float32(65536))
        results = []
        for draw in range(0, 65536, 257):  # 256 draws; all draws below a threshold round up
            with replace_draws(lambda _key, _block, draw=draw: draw):
                got = np.abs(decoded(c, x).astype(np.float64)) / step
            assert np.array_equal(got, low + (draw < threshold))
            results.append(got)
        assert len({r.tobytes() for r in results}) > 16
        p = threshold / 65536
        mean = np.copysign((low + p) * step, x)
        np.testing.assert_allclose(mean, x, rtol=2.0**-23, atol=2.0**-17 * step)
        error = p * ((low + 1) * step - np.abs(x)) ** 2 + (1 - p) * (low * step - np.abs(x)) ** 2
        assert np.sum(error) <= c.traits.omega * np.sum(x.astype(np.float64) ** 2)

    def test_the_promised_bound_on_the_variance_is_nearly_attained(self):
        """p = 1/2 everywhere but in one element: n / (4 s^2) times max^2 n, for a nearly flat vector."""
        c, n = coded(1000, bucket_size=1024), 1024
        x = np.full(n, 999.5, dtype=np.float32)
        x[0] = 1000
        error = np.sum((decoded(c, x).astype(np.float64) - x) ** 2)
        assert 0.9 * 0.25 * (n - 1) < error < 1.1 * 0.25 * (n - 1)
        # The bound allows for the worst |v|: a flat vector has |v|^2 = n max^2.
        assert error <= c.traits.omega * 1000**2

    def test_traits_are_those_of_fixed_width(self):
        for levels in LEVELS:
            c = coded(levels)
            assert c.traits == c.coder.plain.traits
            assert qcomp.Scaled(c).factor == qcomp.Scaled(c.coder.plain).factor

    def test_omega_continues_where_fixed_width_ends(self):
        """One formula on either side of eight bits, up to the rounding term."""
        below, above = (coded(levels, bucket_size=512).traits.omega for levels in (127, 128))
        assert above < below < above * (128 / 127) ** 2 * 1.001

    @pytest.mark.parametrize("levels", [127, 128, 32767])
    def test_kernels_return_the_same_bytes(self, levels):
        kernels = pytest.importorskip("qcomp.backends.numba_cpu.kernel_set").KERNELS
        x, plain = vector("gaussian", 100, 1), coded(levels).coder.plain
        options = {"out": None, "blend": None}
        for c in (plain, qcomp.Scaled(plain)):
            encoded = kernels.encode(c, x, None, KEY, **options)
            assert encoded.data.tobytes() == c.compress(x, key=KEY).data.tobytes()
            values = kernels.decode(c, encoded.data, x, out=None, accumulate=False)
            assert values.tobytes() == c.decompress(c.compress(x, key=KEY), like=x).tobytes()


class TestDamage:
    X = vector("sparse", 300, 11)

    def read(self, c, data):
        data = np.frombuffer(bytes(data), np.uint8)
        return c.decompress(qcomp.Payload(c.spec, 300, "float32", data), like=self.X)

    @pytest.mark.parametrize("coding", CODINGS)
    @pytest.mark.parametrize("levels", [7, 700])
    def test_cut_off_anywhere(self, levels, coding):
        c = coded(levels, coding)
        good = c.compress(self.X, key=KEY).data.tobytes()
        assert good[c.payload_spec(300).shortest - 1] == 1
        for length in range(len(good)):
            with pytest.raises(PayloadError):
                self.read(c, good[:length])
        for more in (b"\0", b"\1", b"\xff" * 9):
            with pytest.raises(PayloadError):
                self.read(c, good + more)

    def test_codes_as_they_are_of_another_length(self):
        c = coded(7)
        start = c.payload_spec(300).shortest
        with pytest.raises(PayloadError, match=r"has 5 bytes of uncoded codes; expected 152"):
            self.read(c, bytes(start + 5))
        assert not np.any(self.read(c, bytes(start + 152)))

    def test_codes_of_an_unknown_kind(self):
        c = coded(7)
        start = c.payload_spec(300).shortest
        with pytest.raises(PayloadError, match="has codes of kind 2; expected 0 or 1"):
            self.read(c, bytes(start - 1) + b"\2" + bytes(10))

    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(st.sampled_from(CODINGS), st.sampled_from([1, 700]), st.binary(max_size=90))
    def test_arbitrary_codes(self, coding, levels, code):
        """Either a PayloadError, or levels that the compressor has."""
        c = coded(levels, coding, bucket_size=512)
        step = np.ones(1, dtype=np.float32).tobytes()
        try:
            y = self.read(c, step + b"\1" + code)
        except PayloadError:
            return
        assert np.abs(y).max() <= levels

    def test_an_empty_vector(self):
        c, x = coded(7), np.zeros(0, dtype=np.float32)
        assert c.compress(x, key=KEY).data.tolist() == [0]
        assert decoded(c, x).shape == (0,)
        with pytest.raises(PayloadError, match="kind 1"):
            c.decompress(qcomp.Payload(c.spec, 0, "float32", np.ones(1, dtype=np.uint8)), like=x)


class TestSpec:
    @pytest.mark.parametrize("coding", ["fixed", *CODINGS])
    def test_there_and_back(self, coding):
        c = qcomp.QSGD(levels=7, coding=coding)
        assert qcomp.compressor(c.spec) == c
        assert c.variable_length == (coding != "fixed") == (c.coder is not None)

    def test_the_spec_of_fixed_width_is_unchanged(self):
        """Payloads in files are identified by it."""
        assert qcomp.QSGD().spec == "qsgd:levels=7,bucket_size=512,norm=max"
        assert qcomp.compressor("qsgd:coding=fixed") == qcomp.QSGD()
        assert coded(300).spec == "qsgd:levels=300,bucket_size=32,norm=max,coding=range"
        assert qcomp.Scaled(coded(3)).spec == "scaled(qsgd:levels=3,bucket_size=32,norm=max,coding=range)"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"coding": "huffman"}, r"coding is 'huffman'; expected 'fixed', 'elias' or 'range'"),
            ({"levels": 128}, r"levels is 128; expected an integer from 1 to 127, or to 32767 with coding="),
            ({"levels": 32768, "coding": "range"}, r"levels is 32768; expected an integer from 1 to 32767$"),
            ({"levels": 0, "coding": "elias"}, r"levels is 0; expected an integer from 1 to 32767$"),
        ],
    )
    def test_options_out_of_range_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            qcomp.QSGD(**arguments)

    def test_a_compiler_cannot_trace_it(self):
        jax = pytest.importorskip("jax")
        with pytest.raises(TypeError, match=r"coding is 'range'.*expected coding='fixed'"):
            jax.jit(lambda x: coded().compress(x, key=KEY).data)(jax.numpy.ones(8))
