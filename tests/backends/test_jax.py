"""Compiled primitives return the bytes of the pure version, on the device of their arrays."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qcomp
from qcomp.backends.jax_xla import KERNELS, programs
from qcomp.core import primitives
from qcomp.core.feedback import compensated
from qcomp.core.kernels import Blend, StepNumbers, use_kernels
from qcomp.core.numeric.arrays import LIMIT, host_bytes, is_traced
from qcomp.testing import replace_draws
from qcomp.testing.inputs import FAMILIES, flushed, vector

KEY = qcomp.Key(seed=5, step=3, tensor=2, rank=1, hop=1, bucket=9)
COMPRESSORS = [
    qcomp.ScaledSign(bucket_size=64),
    qcomp.ScaledSign(bucket_size=64, scale="rms"),
    qcomp.QSGD(levels=7, bucket_size=64),
    qcomp.QSGD(levels=5, bucket_size=64, norm="l2"),
    qcomp.MinMaxUInt8(bucket_size=64),
    qcomp.Scaled(qcomp.QSGD(levels=3, bucket_size=64)),
]
SIZE = 2 * 64 + 37
"""Full buckets and a tail with padding. Other sizes would need a new compilation each, which takes most of the time."""

by_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)


def results(compressor, x, residual, key=KEY):
    """Return all results computed from a vector and a residual, as bytes."""
    payload, new = compensated(compressor, x, residual, key=key)
    plain = compressor.compress(x, key=key)
    decoded = compressor.decompress(payload, like=x)
    total = compressor.add(payload, residual + 0)  # a copy: `add` may write to its buffer
    return {
        "payload": host_bytes(payload.data),
        "residual": host_bytes(new),
        "without residual": host_bytes(plain.data),
        "decoded": host_bytes(decoded),
        "added": host_bytes(total),
    }


def check(compressor, x, residual, key=KEY):
    """Compare with the pure version on NumPy, which gives the same bytes as that of every library."""
    with use_kernels(None):
        expected = results(compressor, x, residual, key)
    with use_kernels(KERNELS):
        got = results(compressor, jnp.asarray(x), jnp.asarray(residual), key)
    assert [name for name in got if got[name] != expected[name]] == []


@pytest.fixture
def traced(monkeypatch):
    """A list of the traced calls: the pure version is called once for each program that is compiled."""
    calls = []

    def spy(name):
        function = getattr(primitives, name)

        def counted(*args, **options):
            if is_traced(args[1] if name == "encode" else args[1].data):
                calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(primitives, name, counted)

    spy("encode")
    spy("decode")
    return calls


class TestBytes:
    @pytest.mark.exhaustive
    @by_compressor
    def test_every_family_of_vectors(self, compressor):
        for family in FAMILIES:
            x = vector(family, SIZE, 0)
            check(compressor, x, flushed(np.roll(x, 1) * np.float32(0.5)))

    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("size", [0, 1, 64])
    @pytest.mark.parametrize("compressor", COMPRESSORS[2::2], ids=str)
    def test_sizes(self, compressor, size):
        check(compressor, vector("gaussian", size, 1), vector("gaussian", size, 2))

    @pytest.mark.exhaustive
    def test_shapes(self):
        x, residual = (vector("gaussian", 165, seed).reshape(3, 5, 11) for seed in (3, 4))
        check(qcomp.MinMaxUInt8(bucket_size=64), x, residual)
        with use_kernels(KERNELS):
            _, new = compensated(COMPRESSORS[0], jnp.asarray(x), jnp.asarray(residual))
        assert new.shape == x.shape

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("levels", [1, 15, 127])
    def test_widths_of_codes(self, levels):
        check(qcomp.QSGD(levels=levels, bucket_size=64), vector("wide", SIZE, 5), vector("ties", SIZE, 6))

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        "dtype",
        [pytest.param(jnp.float16, marks=pytest.mark.exhaustive), jnp.bfloat16],
        ids=["float16", "bfloat16"],
    )
    @pytest.mark.parametrize(
        "compressor",
        [
            COMPRESSORS[1],
            *(pytest.param(c, marks=pytest.mark.exhaustive) for c in COMPRESSORS[4:]),
        ],
        ids=str,
    )
    def test_half_precision(self, compressor, dtype):
        x, residual = (
            jnp.asarray(vector("gaussian", SIZE, 7), dtype),
            jnp.asarray(vector("gaussian", SIZE, 8)),
        )
        collected = []
        for kernels in (None, KERNELS):
            with use_kernels(kernels):
                payload, new = compensated(compressor, x, residual, key=KEY)
                decoded = compressor.decompress(payload, like=x)
                total = compressor.add(payload, x)
                assert (decoded.dtype, total.dtype, new.dtype) == (dtype, dtype, jnp.float32)
                collected.append([host_bytes(each) for each in (payload.data, new, decoded, total)])
        assert collected[0] == collected[1]

    def test_a_compressor_without_a_program_uses_the_pure_version(self):
        x = jnp.asarray(vector("gaussian", 9, 0))
        for compressor in (qcomp.Identity(), qcomp.Cast(), qcomp.Scaled(qcomp.Identity())):
            assert KERNELS.encode(compressor, x, None, None, out=None, blend=None) is None
            assert KERNELS.decode(compressor, x, x, out=None, accumulate=False) is None


class TestTakes:
    def test_concrete_arrays_of_floating_point(self):
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
            assert KERNELS.takes(jnp.zeros(3, dtype))
        assert not KERNELS.takes(jnp.zeros(3, jnp.int32))
        assert not KERNELS.takes(np.zeros(3, np.float32))

    def test_no_traced_arrays(self):
        c, seen = qcomp.ScaledSign(bucket_size=64), []

        @jax.jit
        def compressed(x):
            seen.append(KERNELS.takes(x))
            return c.compress(x).data

        x = vector("gaussian", SIZE, 0)
        with use_kernels(KERNELS):
            assert host_bytes(compressed(x)) == c.compress(x).data.tobytes()
        assert seen == [False]

    @pytest.mark.exhaustive
    def test_a_buffer_to_write_to_is_an_error(self):
        c, x = qcomp.ScaledSign(bucket_size=64), jnp.asarray(vector("gaussian", SIZE, 0))
        with use_kernels(KERNELS), pytest.raises(TypeError, match="out is an immutable"):
            c.decompress(c.compress(x), like=x, out=jnp.zeros_like(x))


class TestRefusal:
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, LIMIT, -LIMIT])
    @pytest.mark.parametrize("compressor", COMPRESSORS[::2], ids=str)
    def test_one_value_out_of_range_is_refused(self, compressor, bad):
        x, residual = vector("gaussian", SIZE, 0), jnp.zeros(SIZE)
        good = KERNELS.encode(compressor, jnp.asarray(x), residual, KEY, out=None, blend=None)
        assert (good.refused.shape, good.refused.dtype, int(good.refused[0])) == ((1,), jnp.uint8, 0)
        for position in (0, 70, SIZE - 1):
            x = vector("gaussian", SIZE, 0)
            x[position] = bad
            encoded = KERNELS.encode(compressor, jnp.asarray(x), residual, KEY, out=None, blend=None)
            assert int(encoded.refused[0]) == 1
            with use_kernels(KERNELS), pytest.raises(qcomp.NonFiniteError, match="cannot be compressed by"):
                compensated(compressor, jnp.asarray(x), residual, key=KEY)
            with use_kernels(KERNELS), pytest.raises(qcomp.NonFiniteError):
                compressor.compress(jnp.asarray(x), key=KEY)

    def test_the_compensated_value_must_be_in_range(self):
        below = np.full(SIZE, np.nextafter(np.float32(LIMIT), np.float32(0)), np.float32)
        c = COMPRESSORS[0]
        for x, residual, refused in ((below, 0 * below, 0), (below, below, 1), (below, -below, 0)):
            encoded = KERNELS.encode(c, jnp.asarray(x), jnp.asarray(residual), None, out=None, blend=None)
            assert int(encoded.refused[0]) == refused


class TestKeys:
    @pytest.mark.exhaustive
    def test_another_key_needs_no_other_program(self, traced):
        c, x = qcomp.QSGD(levels=7, bucket_size=32), jnp.asarray(vector("gaussian", 77, 0))
        payloads = set()
        with use_kernels(KERNELS):
            for key in (
                KEY,
                KEY._replace(seed=6),
                KEY._replace(step=2**32 - 1),
                KEY._replace(step=jnp.asarray(8, jnp.int32)),
                KEY._replace(tensor=3),
                KEY._replace(rank=0xFFFFFFFF),
                KEY.at(hop=2),
                KEY.at(bucket=10),
            ):
                payloads.add(host_bytes(compensated(c, x, x, key=key)[0].data))
        assert len(payloads) == 8
        assert traced == ["encode"]

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        "key",
        [
            pytest.param(qcomp.Key(seed=2**64 - 1), marks=pytest.mark.exhaustive),
            qcomp.Key(seed=2**40, step=2**33),
            pytest.param(qcomp.Key(seed=2**31, rank=0xFFFFFFFF), marks=pytest.mark.exhaustive),
        ],
        ids=str,
    )
    def test_large_numbers(self, key):
        check(
            qcomp.QSGD(levels=7, bucket_size=64),
            vector("gaussian", SIZE, 1),
            vector("gaussian", SIZE, 2),
            key,
        )

    @pytest.mark.exhaustive
    def test_errors_name_what_is_wrong_with_a_key(self):
        c, x = qcomp.QSGD(levels=7, bucket_size=64), jnp.asarray(vector("gaussian", SIZE, 0))
        with use_kernels(KERNELS):
            for key, error, said in (
                (lambda: None, ValueError, "key is None"),
                (lambda: qcomp.Key(seed=-1), ValueError, "Key.seed is -1"),
                (lambda: qcomp.Key(tensor=2**32), ValueError, "Key.tensor is 4294967296"),
                (lambda: qcomp.Key(step=0.5), TypeError, r"Key.step is 0\.5"),
            ):
                with pytest.raises(error, match=said):
                    c.compress(x, key=key())

    @pytest.mark.exhaustive
    def test_replaced_draws(self):
        c, x = qcomp.QSGD(levels=7, bucket_size=64), vector("gaussian", SIZE, 0)
        for draw in (0, 65535):
            with replace_draws(lambda _key, _block, draw=draw: draw):
                check(c, x, x)

    def test_programs_are_kept_and_bounded(self, traced):
        c, x = qcomp.ScaledSign(bucket_size=32), jnp.asarray(vector("gaussian", 79, 0))
        with use_kernels(KERNELS):
            for _ in range(3):
                payload, _ = compensated(c, x, x)
                c.decompress(payload, like=x)
        assert sorted(traced) == ["decode", "encode"]
        for kept in (programs.encoder, programs.decoder):
            assert kept.cache_info().maxsize == programs.PROGRAMS


def wide(seed, size=4099):
    x = vector("wide", size, seed)
    x[::7], x[1::11], x[2::13] = 0.0, -0.0, vector("subnormal", len(x[2::13]), seed)
    return jnp.asarray(x)


def pure(call):
    with use_kernels(None):
        return call()


class TestArithmetic:
    @pytest.mark.quick_cases(3)
    @pytest.mark.parametrize("count", [1, 2, 3, 7, 61])
    def test_finish_mean(self, count):
        total = wide(0)
        expected = pure(lambda: primitives.finish_mean(total, count))
        assert host_bytes(KERNELS.finish_mean(total, count)) == host_bytes(expected)

    @pytest.mark.parametrize(("beta1", "scale"), [(0.9, 1.0), (0.95, 0.3), (0.0, 1.0), (1 / 3, 1e-3)])
    def test_momentum(self, beta1, scale):
        """XLA would contract the products and the sum; these values reveal that."""
        m, g = wide(1), wide(2)
        expected = pure(lambda: primitives.momentum(m, g, beta1, scale))
        assert host_bytes(KERNELS.momentum(m, g, beta1, scale)) == host_bytes(expected)

    @pytest.mark.exhaustive
    def test_a_momentum_is_blended_and_compressed(self):
        m, g, residual = (flushed(vector("wide", SIZE, seed)) for seed in (1, 2, 3))
        c = COMPRESSORS[0]
        expected = pure(lambda: primitives.encode(c, g, residual, None, blend=Blend(m, 0.9, 0.3)))
        m, g, residual = map(jnp.asarray, (m, g, residual))
        with use_kernels(KERNELS):
            got = primitives.encode(c, g, residual, None, blend=Blend(m, 0.9, 0.3))
        assert [host_bytes(each) for each in got[:2]] == [host_bytes(each) for each in expected[:2]]

    @pytest.mark.parametrize("weight_decay", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.01])
    @pytest.mark.parametrize(("rate", "correction"), [(1e-3, 0.1), (0.7, 1 - 0.9**7), (1 / 3, 1.0)])
    def test_frozen_step(self, rate, correction, weight_decay):
        p, m, v = wide(3), wide(4), jnp.abs(wide(5))
        numbers = StepNumbers(rate, correction, 1e-8, weight_decay)
        expected = pure(lambda: primitives.frozen_step(p, m, v, numbers))
        got = KERNELS.frozen_step(p, m, v, numbers)
        assert [host_bytes(each) for each in got] == [host_bytes(each) for each in expected]

    def test_arrays_of_mixed_shapes_or_dtypes_use_the_pure_version(self):
        x, half = jnp.zeros(3), jnp.zeros(3, jnp.bfloat16)
        numbers = StepNumbers(1.0, 1.0, 1.0, 1.0)
        assert KERNELS.momentum(x, half, 0.9, 1.0) is None
        assert KERNELS.momentum(half, half, 0.9, 1.0) is None
        assert KERNELS.momentum(x, jnp.zeros(4), 0.9, 1.0) is None
        assert KERNELS.frozen_step(half, x, x, numbers) is None
        assert KERNELS.finish_mean(half, 2) is None


@pytest.mark.exhaustive
def test_compressed_mean_is_that_of_numpy():
    mean = qcomp.CompressedMean(qcomp.Scaled(qcomp.QSGD(levels=7, bucket_size=32)))

    def rank_main(comm, array):
        x = array(vector("gaussian", 128, comm.rank))
        state = mean.init(x, comm)
        for step in range(3):
            result, state = mean(x, state, comm, key=qcomp.Key(step=step))
        return [host_bytes(each) for each in (result, *state.worker, *state.server)]

    with use_kernels(None):
        expected = qcomp.comm.run_local(2, lambda comm: rank_main(comm, np.array))
    with use_kernels(KERNELS):
        assert qcomp.comm.run_local(2, lambda comm: rank_main(comm, jnp.asarray)) == expected


@pytest.mark.exhaustive
def test_a_value_out_of_range_on_one_rank_is_an_error_on_all():
    mean = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=32))

    def rank_main(comm):
        x = jnp.full(128, np.nan if comm.rank else 1.0)
        with pytest.raises(qcomp.NonFiniteError, match="rank 1"):
            mean(x, mean.init(x, comm), comm)

    with use_kernels(KERNELS):
        qcomp.comm.run_local(2, rank_main)


SECOND_DEVICE_AND_FLOAT64 = """
import jax, jax.numpy as jnp, numpy as np, qcomp
from qcomp.backends.jax_xla import KERNELS
from qcomp.core import primitives
from qcomp.core.feedback import compensated
from qcomp.core.kernels import StepNumbers, use_kernels
from qcomp.testing.inputs import vector

host = vector("gaussian", 165, 0).astype(np.float64) * (1 + 2.0**-40)
second = jax.devices()[1]
key = qcomp.Key(step=3)
for dtype in ("float32", "float64"):
    x, residual = (jax.device_put(a.astype(dtype), second) for a in (host, host[::-1].copy()))
    assert KERNELS.takes(x), dtype
    for c in (qcomp.ScaledSign(64), qcomp.QSGD(bucket_size=64, norm="l2"), qcomp.MinMaxUInt8(64)):
        encoded = KERNELS.encode(c, x, residual, key, out=None, blend=None)
        with use_kernels(None):
            payload, lost = compensated(c, np.asarray(x), np.asarray(residual), key=key)
            decoded = c.decompress(payload, like=np.array(x))
            mean = primitives.finish_mean(np.array(x), 3)
        data, new, refused = encoded
        numbers = StepNumbers(0.1, 0.3, 0.1, 0.1)
        with use_kernels(None):
            mixed = primitives.momentum(x, residual, 0.9, 0.3)
            moved, _ = primitives.frozen_step(x, x, abs(x), numbers)
        arrays = {
            "payload": (data, payload.data),
            "residual": (new, lost),
            "refused": (refused, np.zeros(1, np.uint8)),
            "decoded": (KERNELS.decode(c, data, x, out=None, accumulate=False), decoded),
            "added": (KERNELS.decode(c, data, x, out=residual, accumulate=True), np.asarray(residual) + decoded),
            "mean": (KERNELS.finish_mean(x, 3), mean),
            "momentum": (KERNELS.momentum(x, residual, 0.9, 0.3), mixed),
            "parameters": (KERNELS.frozen_step(x, x, abs(x), numbers)[0], moved),
        }
        for name, (got, expected) in arrays.items():
            assert got.devices() == {second}, (dtype, c, name, got.devices())
            assert got.dtype == expected.dtype, (dtype, c, name)
            assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), (dtype, c, name)
both = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), "d"), jax.sharding.PartitionSpec("d"))
assert not KERNELS.takes(jax.device_put(np.zeros(4, np.float32), both))
"""


@pytest.mark.exhaustive
def test_second_device_and_float64():
    """Run in a process of its own: JAX reads both settings when it starts."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-W", "error", "-c", SECOND_DEVICE_AND_FLOAT64]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


FEW_DRAWS = """
import jax, numpy as np, qcomp
from jax.sharding import PartitionSpec as P

compressor = qcomp.QSGD(levels=1, bucket_size=16)
x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
compiled = jax.jit(lambda x, step: compressor.compress(x, key=qcomp.Key(step=step)).data)(x, np.int32(3))
assert np.asarray(compiled).tobytes() == compressor.compress(x, key=qcomp.Key(step=3)).data.tobytes()

def average(comm):
    mean = qcomp.CompressedMean(compressor, feedback=False)
    key = qcomp.Key(tensor=qcomp.core.optimizers.agreement.stream_of(("",), [tuple(x.shape)]))
    return mean(x * (comm.rank + 1), mean.init(x, comm), comm, key=key)[0]

expected = qcomp.comm.run_local(4, average)[0]
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
mean = qcomp.jax.MeshMean(compressor, "data", feedback=False, exact=None)
with jax.set_mesh(mesh):
    state = mean.init(x)
specs = qcomp.jax.partition_specs(state, "data")
run = jax.shard_map(lambda x, s: mean(x[0], s), mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs))
found, _ = jax.jit(run)(np.stack([x * (rank + 1) for rank in range(4)]), state)
assert np.asarray(found).tobytes() == expected.tobytes()
"""


@pytest.mark.exhaustive
def test_few_draws_compile_in_seconds():
    """In a process of its own, since a compiler cannot be interrupted. It took minutes."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "QCOMP_KERNELS": "pure",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, "-W", "error", "-c", FEW_DRAWS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
