"""float16 and bfloat16: computed in float32, rounded once, with the bytes that the same values give in float32."""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.core.numeric.arrays import array_namespace, dtype_name, host_bytes, to_compute_dtype
from qcomp.testing.inputs import FAMILIES, rounded, vector

KEY = qcomp.Key(seed=3, step=1)
COMPRESSORS = [
    qcomp.ScaledSign(bucket_size=64),
    qcomp.ScaledSign(bucket_size=64, scale="rms"),
    qcomp.QSGD(levels=7, bucket_size=64),
    qcomp.QSGD(levels=5, bucket_size=64, norm="l2"),
    qcomp.MinMaxUInt8(bucket_size=64),
    qcomp.Identity(),
    qcomp.Cast("bfloat16"),
    qcomp.Scaled(qcomp.QSGD(levels=3, bucket_size=32)),
]


@dataclass(frozen=True)
class Halves:
    """A half dtype in an array library."""

    library: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.library}-{self.dtype}"

    @property
    def xp(self) -> Any:
        return importlib.import_module({"torch": "torch", "jax": "jax.numpy", "numpy": "numpy"}[self.library])

    @property
    def native(self) -> Any:
        """The dtype as an object of the library; NumPy's bfloat16 comes from ml_dtypes."""
        if (self.library, self.dtype) == ("numpy", "bfloat16"):
            return pytest.importorskip("ml_dtypes").bfloat16
        return getattr(self.xp, self.dtype)

    def array(self, values: np.ndarray) -> Any:
        """Return float32 values, all representable in this half dtype, in this dtype."""
        assert np.array_equal(values, rounded(values, self.dtype))
        single = self.single(values)
        return single.to(self.native) if self.library == "torch" else single.astype(self.native)

    def single(self, values: np.ndarray) -> Any:
        """Return values as float32 in the library."""
        return self.xp.asarray(np.array(values, dtype=np.float32, copy=True))

    def values(self, x: Any) -> np.ndarray:
        """Return the values of an array of this dtype as float32."""
        assert dtype_name(x.dtype) == self.dtype
        codes = np.frombuffer(host_bytes(x), np.uint16)
        if self.dtype == "float16":
            return codes.view(np.float16).astype(np.float32).reshape(tuple(x.shape))
        return (codes.astype(np.uint32) << 16).view(np.float32).reshape(tuple(x.shape))


HALVES = [
    Halves(library, dtype) for library in ("numpy", "torch", "jax") for dtype in ("float16", "bfloat16")
]


def quick_or_slow(half: Halves, *values: Any) -> Any:
    """Each half dtype is quick in one library; JAX compiles every operation for every shape."""
    is_quick = str(half) in ("numpy-float16", "torch-bfloat16")
    return pytest.param(
        half,
        *values,
        marks=[] if is_quick else [pytest.mark.exhaustive],
        id="-".join(map(str, (half, *values))),
    )


@pytest.fixture(params=[quick_or_slow(half) for half in HALVES])
def half(request: pytest.FixtureRequest) -> Halves:
    pytest.importorskip(request.param.library)
    return request.param


def halves_of(family: str, size: int, seed: int, name: str) -> np.ndarray:
    """Return a vector of a family as float32 values representable in the half dtype, small enough for float16."""
    x = vector(family, size, seed)
    if name == "float16":
        x = x.clip(-1000, 1000)
    return rounded(x, name)


def bytes_of_float32(x: Any) -> bytes:
    assert dtype_name(x.dtype) == "float32"
    return host_bytes(x)


class TestConversion:
    def test_every_half_becomes_the_float32_of_its_value(self, half):
        finite = {"float16": 0x7C00, "bfloat16": 0x7F80}[half.dtype]
        codes = np.concatenate([np.arange(finite), np.arange(finite) + 0x8000]).astype(np.uint16)
        if half.dtype == "float16":
            values = codes.view(np.float16).astype(np.float32)
        else:
            values = (codes.astype(np.uint32) << 16).view(np.float32)
        got = np.frombuffer(bytes_of_float32(to_compute_dtype(half.array(values))), np.float32)
        assert np.array_equal(
            got, np.where(got == 0, 0, values)
        )  # a device may flush subnormals, and `flush` does so
        assert np.all(np.abs(values[got == 0]) < 2.0**-126)

    def test_float32_is_rounded_to_nearest_even_once(self, half):
        # The halves between 2^-20 and 2, the midpoints between them, and their neighbours.
        step = rounded(np.exp2(np.linspace(-20, 1, 5000)).astype(np.float32), half.dtype)
        step = np.unique(step)
        middle = (step[1:] + step[:-1]) / 2
        x = np.concatenate(
            [step, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(9))]
        )
        x = np.concatenate([x, -x])
        c = qcomp.Identity()
        like = half.array(np.zeros_like(x))
        payload = c.compress(half.single(x))
        got = half.values(c.decompress(payload, like=like))
        assert got.tobytes() == rounded(x, half.dtype).tobytes()


# JAX compiles every operation for every shape: so it gets one compressor per kind, and one for its other half dtype.
JAX_COMPRESSORS = {"float16": COMPRESSORS[:5:2], "bfloat16": COMPRESSORS[2:3]}
EACH = [
    quick_or_slow(half, compressor)
    for half in HALVES
    for compressor in (COMPRESSORS if half.library != "jax" else JAX_COMPRESSORS[half.dtype])
]


@pytest.mark.parametrize(("half", "compressor"), EACH, indirect=["half"])
class TestCompressors:
    @pytest.mark.quick_cases(2)
    def test_payload_residual_and_result_are_those_of_the_values_in_float32(self, half, compressor):
        for family in FAMILIES:
            self.check(half, compressor, halves_of(family, 131, 0, half.dtype))
        for size in (0, 1, 9) if half.library != "jax" else ():  # JAX compiles for every size
            self.check(half, compressor, halves_of("gaussian", size, 1, half.dtype))

    def check(self, half: Halves, compressor: qcomp.Compressor, x: np.ndarray) -> None:
        old = rounded(vector("gaussian", x.size, 5), "float16") * np.float32(1 / 3)
        expected, lost = qcomp.feedback.compress(compressor, x, old, key=KEY)
        decoded = compressor.decompress(expected, like=x)
        array = half.array(x)
        payload, residual = qcomp.feedback.compress(compressor, array, half.single(old), key=KEY)
        assert host_bytes(payload.data) == host_bytes(expected.data)
        assert payload.dtype == "float32"
        assert bytes_of_float32(residual) == lost.tobytes()
        result = half.values(compressor.decompress(payload, like=array))
        assert result.tobytes() == rounded(decoded, half.dtype).tobytes()
        plain = compressor.compress(array, key=KEY)
        assert host_bytes(plain.data) == host_bytes(compressor.compress(x, key=KEY).data)

    def test_donated_residual(self, half, compressor):
        x, old = halves_of("gaussian", 131, 2, half.dtype), vector("gaussian", 131, 3)
        _, lost = qcomp.feedback.compress(compressor, x, old, key=KEY)
        residual = half.single(old)
        _, new = qcomp.feedback.compress(compressor, half.array(x), residual, key=KEY, donate=True)
        assert bytes_of_float32(new) == lost.tobytes()
        assert (new is residual) == (half.library != "jax")

    def test_out_is_of_the_half_dtype(self, half, compressor):
        x = half.array(halves_of("gaussian", 20, 4, half.dtype))
        payload = compressor.compress(x, key=KEY)
        out = half.array(np.zeros(20, np.float32))
        if half.library == "jax":
            with pytest.raises(TypeError, match="out is an immutable"):
                compressor.decompress(payload, like=x, out=out)
            return
        assert compressor.decompress(payload, like=x, out=out) is out
        assert host_bytes(out) == host_bytes(compressor.decompress(payload, like=x))

    def test_adding_in_half_precision_adds_two_rounded_values(self, half, compressor):
        x, total = (halves_of("gaussian", 131, seed, half.dtype) for seed in (6, 7))
        payload = compressor.compress(x, key=KEY)
        expected = rounded(total + rounded(compressor.decompress(payload, like=x), half.dtype), half.dtype)
        got = half.values(compressor.add(compressor.compress(half.array(x), key=KEY), half.array(total)))
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_is_an_error(half, bad):
    x = np.ones(100, np.float32)
    x[70] = bad
    single = half.single(x)
    array = single.to(half.native) if half.library == "torch" else single.astype(half.native)
    with pytest.raises(qcomp.NonFiniteError):
        qcomp.ScaledSign().compress(array)


def test_shapes(half):
    c = qcomp.QSGD(levels=7, bucket_size=64)
    for shape in ((), (3, 0), (4, 3, 2)):
        x = half.array(halves_of("ties", int(np.prod(shape)), 0, half.dtype).reshape(shape))
        y = c.decompress(c.compress(x, key=KEY), like=x)
        assert (tuple(y.shape), y.dtype) == (shape, x.dtype)


def test_views_with_strides(half):
    c, x = qcomp.MinMaxUInt8(bucket_size=64), halves_of("gaussian", 101, 0, half.dtype)
    got = c.compress(half.array(np.repeat(x, 2))[::2])
    assert host_bytes(got.data) == c.compress(x).data.tobytes()


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_a_result_beyond_float16_is_infinity(name):
    """A float32 above 65520 rounds to infinity; the residual comes from the float32, so nothing else is lost."""
    c = qcomp.QSGD(levels=1, bucket_size=64, norm="l2")  # the only results: 480000 or 0
    x = np.full(64, 60000, dtype=np.float32)
    decoded = c.decompress(c.compress(x, key=KEY), like=x)
    assert decoded.max() > 65520
    pytest.importorskip(name)
    half = Halves(name, "float16")
    with np.errstate(over="ignore"):
        got = half.values(c.decompress(c.compress(half.array(x), key=KEY), like=half.array(x)))
        assert got.tolist() == rounded(decoded, "float16").tolist()
    assert np.isinf(got).any()


@pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
def test_compressed_mean(half, topology):
    """Of one array in half and one in float32; the residuals are those of the values in float32."""
    mean = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=16), topology=topology)
    # Segments of one length, for JAX.
    size = 100 if half.library != "jax" else 64
    grads = [halves_of("gaussian", size, rank, half.dtype).reshape(4, -1) for rank in range(2)]
    other = [vector("gaussian", 20 if half.library != "jax" else 64, rank) for rank in range(2)]

    def rank_main(comm, first, second):
        x = [first(grads[comm.rank]), second(other[comm.rank])]
        state = mean.init(x, comm)
        for _ in range(3):
            result, state = mean(x, state, comm, key=KEY)
        return result, state

    expected = qcomp.comm.run_local(2, lambda comm: rank_main(comm, np.array, np.array))
    got = qcomp.comm.run_local(2, lambda comm: rank_main(comm, half.array, half.single))
    for (means, state), (expected_means, expected_state) in zip(got, expected, strict=True):
        assert half.values(means[0]).tobytes() == rounded(expected_means[0], half.dtype).tobytes()
        assert bytes_of_float32(means[1]) == expected_means[1].tobytes()
        for mine, its in zip(
            state.worker + state.server, expected_state.worker + expected_state.server, strict=True
        ):
            assert bytes_of_float32(mine) == its.tobytes()


OPTIMIZERS = [
    qcomp.Adam(learning_rate=0.01, weight_decay=0.1, clip_norm=1.0),
    qcomp.OneBitAdam(learning_rate=0.01, weight_decay=0.1, freeze=2, exact=None),
    qcomp.QAdam(learning_rate=0.01, warmup_steps=2, exact=None, variance_steps=None),
    qcomp.CompressedSGD(learning_rate=0.01, weight_decay=0.1, nesterov=True, exact=None, clip_norm=3.0),
]


STEPS = [
    pytest.param(*param.values, marks=param.marks, id=f"{half}-{type(optimizer).__name__}")
    for half in HALVES
    for optimizer in (OPTIMIZERS if half.library != "jax" else OPTIMIZERS[1:2])
    for param in [quick_or_slow(half, optimizer)]
]


@pytest.mark.parametrize(("half", "optimizer"), STEPS, indirect=["half"])
class TestOptimizers:
    @pytest.mark.quick_cases(5)
    def test_a_step_equals_the_float32_step_with_parameters_rounded_once(self, half, optimizer):
        """Moments and residuals are float32, and equal those of the same values in float32."""
        start = halves_of("gaussian", 96, 0, half.dtype).reshape(4, 24)

        def rank_main(comm):
            low, high = half.array(start), half.single(start)
            low_state, high_state = optimizer.init(low, comm), optimizer.init(high, comm)
            for step in range(5):
                grads = halves_of("gaussian", 96, 10 * comm.rank + step, half.dtype).reshape(4, 24)
                low, low_state = optimizer.step(low, half.array(grads), low_state, comm)
                high, high_state = optimizer.step(high, half.single(grads), high_state, comm)
                exact = np.frombuffer(bytes_of_float32(high), np.float32).reshape(4, 24)
                assert half.values(low).tobytes() == rounded(exact, half.dtype).tobytes()
                for mine, its in zip(arrays_of(low_state), arrays_of(high_state), strict=True):
                    assert bytes_of_float32(mine) == bytes_of_float32(its)
                high = half.single(half.values(low))

        qcomp.comm.run_local(2, rank_main)

    def test_resumes_from_a_checkpoint(self, half, optimizer):
        def rank_main(comm):
            grads = half.array(halves_of("gaussian", 96, 1 + comm.rank, half.dtype))
            params = half.array(halves_of("gaussian", 96, 0, half.dtype))
            state = optimizer.init(params, comm)
            for _ in range(3):
                params, state = optimizer.step(params, grads, state, comm)
            saved = optimizer.state_dict(state)
            expected, _ = optimizer.step(params, grads, state, comm)
            again = optimizer.load_state_dict(saved, params, comm)
            got, _ = optimizer.step(params, grads, again, comm)
            assert host_bytes(got) == host_bytes(expected)

        qcomp.comm.run_local(2, rank_main)


def arrays_of(state: Any) -> list[Any]:
    return [*state.momentum, *state.variance, *state.exchange.worker, *state.exchange.server]


def test_the_norm_of_many_float16_gradients_does_not_overflow(half):
    """Their sum of squares exceeds 65504, the largest float16."""
    optimizer = qcomp.CompressedSGD(
        learning_rate=1.0, momentum=0.0, clip_norm=1.0, exact=None, compressor=qcomp.Identity()
    )
    grads = half.array(np.full(1 << 17, 1.5, np.float32))
    comm = qcomp.comm.LocalCommunicator.alone()
    params = half.array(np.zeros(1 << 17, np.float32))
    new, _ = optimizer.step(params, grads, optimizer.init(params, comm), comm)
    expected = np.full(1 << 17, -1.5, np.float32) * np.float32(1 / (1.5 * (1 << 17) ** 0.5))
    assert half.values(new).tobytes() == rounded(expected, half.dtype).tobytes()


def test_bytes_of_a_half_on_the_host(half):
    x = half.array(np.asarray([1.5, -2.0], np.float32))
    assert host_bytes(x) == {"float16": b"\x00\x3e\x00\xc0", "bfloat16": b"\xc0\x3f\x00\xc0"}[half.dtype]
    assert array_namespace(x).__name__.endswith(half.xp.__name__)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_rounding_used_by_these_tests_is_that_of_torch(dtype):
    torch = pytest.importorskip("torch")
    x = np.concatenate([vector(family, 999, 0) for family in ("gaussian", "wide", "ties", "tiny")])
    with np.errstate(over="ignore"):
        got = rounded(x, dtype)
    assert got.tobytes() == torch.asarray(x).to(getattr(torch, dtype)).to(torch.float32).numpy().tobytes()
