"""What the core adds to the array API standard: bit-casts, correctly rounded division and roots, flushing."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp.core.errors import NonFiniteError
from qcomp.core.numeric import arrays
from qcomp.core.numeric.arrays import (
    LIMIT,
    bitcast,
    bytes_of,
    compute_dtype_name,
    concat,
    detached,
    divide,
    dtype_name,
    flat,
    flush,
    from_bytes_of,
    host_bytes,
    is_traced,
    matmul,
    out_of_range,
    require_below,
    sqrt,
    to_compute_dtype,
    truncate_last_bit,
    write_into,
)
from qcomp.core.numeric.orthogonal import orthogonalize
from qcomp.core.numeric.sums import sum_of_squares
from qcomp.core.numeric.whitening import unwhitened, whitened, whitener

VALUES = np.random.default_rng(3).standard_normal(64).astype(np.float32).reshape(2, 32)
DIVISORS = [3.0, 7.0, 61.0, 0.1]


def rounded_quotient(x: np.ndarray, divisor: np.ndarray | float) -> np.ndarray:
    """Return the correctly rounded float32 quotient: float64 has 53 bits, more than 2 * 24 + 2."""
    return (x.astype(np.float64) / np.float64(np.float32(divisor))).astype(np.float32)


def rounded_root(x: np.ndarray) -> np.ndarray:
    return np.sqrt(x.astype(np.float64)).astype(np.float32)


def bits(x: np.ndarray) -> list:
    return np.ascontiguousarray(x).view(np.uint32).tolist()


class TestDivide:
    @pytest.mark.parametrize("divisor", DIVISORS)
    def test_is_correctly_rounded(self, library, divisor):
        expected = bits(rounded_quotient(VALUES, divisor))
        assert bits(library.numpy(divide(library.array(VALUES), divisor))) == expected
        # An array that is broadcast over each row.
        column = library.array([[divisor]] * 2, dtype=np.float32)
        assert bits(library.numpy(divide(library.array(VALUES), column))) == expected
        # This would detect multiplication by the reciprocal, into which XLA turns x / 3.
        assert bits(VALUES * (np.float32(1) / np.float32(divisor))) != expected

    def test_is_correctly_rounded_under_jit(self):
        jax = pytest.importorskip("jax")

        @jax.jit
        def all_of_them(x):
            constant = [divide(x, divisor) for divisor in DIVISORS]
            largest = jax.numpy.max(jax.numpy.abs(x), axis=1)
            return constant, divide(x, largest[:, None])

        constant, by_row = all_of_them(VALUES)
        for got, divisor in zip(constant, DIVISORS, strict=True):
            assert bits(np.asarray(got)) == bits(rounded_quotient(VALUES, divisor))
        largest = np.abs(VALUES).max(axis=1, keepdims=True)
        expected = (VALUES.astype(np.float64) / largest).astype(np.float32)
        assert bits(np.asarray(by_row)) == bits(expected)

    def test_keeps_float64(self, float64_library):
        x = VALUES.astype(np.float64)
        got = float64_library.numpy(divide(float64_library.array(x), 3.0))
        assert got.dtype == np.float64
        assert (got == x / 3).all()


class TestSqrt:
    def test_is_correctly_rounded(self, library):
        x = np.abs(VALUES)
        assert bits(library.numpy(sqrt(library.array(x)))) == bits(rounded_root(x))

    def test_is_correctly_rounded_under_jit(self):
        jax = pytest.importorskip("jax")
        x = np.abs(VALUES)
        assert bits(np.asarray(jax.jit(sqrt)(x))) == bits(rounded_root(x))

    def test_is_correctly_rounded_on_many_values(self):
        """On so many values that torch's own vectorised root is off on some."""
        torch = pytest.importorskip("torch")
        x = np.random.default_rng(0).uniform(0, 100, 100_001).astype(np.float32)
        assert (sqrt(torch.from_numpy(x)).numpy() == rounded_root(x)).all()
        assert (sqrt(x) == rounded_root(x)).all()

    def test_keeps_float64(self, float64_library):
        x = np.abs(VALUES).astype(np.float64)
        assert (float64_library.numpy(sqrt(float64_library.array(x))) == np.sqrt(x)).all()


@pytest.fixture
def elsewhere(monkeypatch):
    """Let JAX divide and take roots as on a GPU, where its own results in float32 are off by an ulp."""
    monkeypatch.setattr(arrays, "_compiles_for_host", lambda _: False)
    return pytest.importorskip("jax")


@pytest.mark.parametrize("compiled", [False, True])
class TestInFloat64:
    def test_quotients_and_roots_are_correctly_rounded(self, elsewhere, compiled):
        def both(x, y):
            return divide(x, y), sqrt(x)

        x, y = np.abs(VALUES), np.roll(VALUES, 1)
        quotient, root = (elsewhere.jit(both) if compiled else both)(*map(elsewhere.numpy.asarray, (x, y)))
        assert quotient.dtype == root.dtype == np.float32
        assert bits(np.asarray(quotient)) == bits((x.astype(np.float64) / y).astype(np.float32))
        assert bits(np.asarray(root)) == bits(rounded_root(x))

    def test_the_root_of_a_quotient_is_rounded_twice(self, elsewhere, compiled):
        """XLA drops the conversion of the quotient to float32, and the one back, unless it is told to round."""
        x = np.random.default_rng(0).uniform(1, 2, 4096).astype(np.float32)

        def root(x):
            return sqrt(divide(x, 37))

        found = (elsewhere.jit(root) if compiled else root)(elsewhere.numpy.asarray(x))
        expected = bits(rounded_root(rounded_quotient(x, 37)))
        assert bits(np.asarray(found)) == expected
        assert bits(np.sqrt(x.astype(np.float64) / 37).astype(np.float32)) != expected
        # On CPUs XLA keeps the conversions, so the order to round is looked for in the program.
        assert str(elsewhere.make_jaxpr(root)(x)).count("reduce_precision[") == 2


@pytest.mark.parametrize(
    "product",
    [
        matmul,
        lambda a, b: orthogonalize(a),
        whitener,
        lambda a, b: whitened(flat(a), b, (4, 4)),
        lambda a, b: unwhitened(flat(a), b, (4, 4)),
    ],
)
def test_products_of_matrices_keep_all_bits(product):
    """JAX drops bits of float32 factors on GPUs and TPUs, unless it is told to keep them."""
    jax = pytest.importorskip("jax")
    x = np.eye(4, dtype=np.float32)
    program = str(jax.make_jaxpr(product)(x, x))
    assert program.count("dot_general[") == program.count("(Precision.HIGHEST, Precision.HIGHEST)") > 0


def test_the_core_multiplies_matrices_in_one_place():
    core = Path(arrays.__file__).parents[1]
    found = [path.name for path in core.rglob("*.py") if re.search(r"\.matmul\(|\w @ \w", code_of(path))]
    assert found == ["arrays.py"]


def code_of(path: Path) -> str:
    """Return the source of a module without its texts."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


class TestBits:
    @pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
    def test_bytes_and_back(self, library, dtype):
        host = np.arange(1, 9).astype(dtype)
        data = bytes_of(library.array(host))
        assert library.numpy(data).dtype == np.uint8
        assert library.numpy(data).tobytes() == host.tobytes()
        assert host_bytes(data) == host.tobytes()
        back = library.numpy(from_bytes_of(library.seal(data), dtype))
        assert back.dtype == host.dtype
        assert (back == host).all()

    def test_float64_bytes_and_back(self, float64_library):
        host = np.array([1.5, -2.25, 1e300])
        data = bytes_of(float64_library.array(host))
        assert host_bytes(data) == host.tobytes()
        assert (float64_library.numpy(from_bytes_of(data, "float64")) == host).all()

    def test_jax_of_32_bits_refuses_bytes_of_float64(self, libraries):
        data = bytes_of(libraries["numpy"].array(np.ones(3)))
        with pytest.raises(TypeError, match="the bytes hold float64, which JAX supports only in 64-bit mode"):
            from_bytes_of(libraries["jax"].array(data), "float64")

    @pytest.mark.parametrize("offset", [1, 2, 4])
    def test_unaligned(self, library, offset):
        """A slice of a message may start anywhere."""
        host = np.array([1.5, -2.5], dtype=np.float32)
        data = library.array(np.frombuffer(bytes(offset) + host.tobytes(), dtype=np.uint8))
        assert (library.numpy(from_bytes_of(data[offset:], "float32")) == host).all()

    def test_bitcast_shows_the_bits(self, library):
        x = library.array([1.0, -2.0, 0.0], dtype=np.float32)
        assert library.numpy(bitcast(x, library.xp.int32)).tolist() == [0x3F800000, -0x40000000, 0]

    def test_truncate_last_bit(self, library):
        got = library.numpy(truncate_last_bit(library.array(VALUES)))
        assert bits(got) == (VALUES.view(np.uint32) & 0xFFFFFFFE).tolist()
        assert bits(got) != bits(VALUES)

    def test_truncate_last_bit_of_float64(self, float64_library):
        x = VALUES.astype(np.float64) / 3
        got = float64_library.numpy(truncate_last_bit(float64_library.array(x)))
        assert got.view(np.uint64).tolist() == (x.view(np.uint64) & (2**64 - 2)).tolist()


class TestFlush:
    TINY = 2.0**-126
    CASES = (
        (0.0, 0.0),
        (-0.0, 0.0),
        (TINY, TINY),
        (-TINY, -TINY),
        (TINY * 0.75, 0.0),
        (-(2.0**-149), 0.0),
        (1.0, 1.0),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
    )

    def test_float32(self, library):
        x, expected = (np.array(column, dtype=np.float32) for column in zip(*self.CASES, strict=True))
        assert bits(library.numpy(flush(library.array(x)))) == bits(expected)
        assert np.isnan(library.numpy(flush(library.array([np.nan] * 9, dtype=np.float32)))).all()

    def test_float64_has_the_threshold_of_float32(self, float64_library):
        x, expected = (np.array(column) for column in zip(*self.CASES, strict=True))
        got = float64_library.numpy(flush(float64_library.array(x)))
        assert got.view(np.uint64).tolist() == expected.view(np.uint64).tolist()


class TestDtypes:
    @pytest.mark.parametrize(
        ("name", "compute"),
        [("float64", "float64"), ("float32", "float32"), ("float16", "float32"), ("bfloat16", "float32")],
    )
    def test_arithmetic_is_at_least_float32(self, name, compute):
        assert compute_dtype_name(name) == compute

    @pytest.mark.parametrize("name", ["int32", "complex64", "bool"])
    def test_other_dtypes_are_an_error_that_names_the_argument(self, name):
        with pytest.raises(TypeError, match=f"grads has dtype {name}; expected float64, float32, float16 or"):
            compute_dtype_name(name, argument="grads")

    def test_names_in_every_library(self, library):
        for name in ("float32", "int32", "uint8"):
            assert dtype_name(library.array([1], dtype=name).dtype) == name
            assert dtype_name(getattr(library.xp, name)) == name

    def test_halves_are_computed_in_float32(self):
        torch = pytest.importorskip("torch")
        for x in (np.ones(3, np.float16), torch.ones(3, dtype=torch.bfloat16)):
            assert dtype_name(to_compute_dtype(x).dtype) == "float32"
        x = np.ones(3, np.float32)
        assert to_compute_dtype(x) is x


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 2**20))
def test_divide_by_counts(x, count):
    with np.errstate(under="ignore"):
        got = divide(np.array([x], dtype=np.float32), count)
        assert bits(got) == bits(rounded_quotient(np.array([x], dtype=np.float32), count))


def test_require_below(library):
    require_below(library.array([1.0, -2.0], dtype=np.float32), 2.5, "sign")
    require_below(library.array([1.0, -2.0], dtype=np.float32)[:0], 2.5, "sign")
    for bad, said in [
        (2.5, "2.5"),
        (-2.5, "2.5"),
        (1e30, "1e\\+30"),
        (np.inf, "inf"),
        (-np.inf, "inf"),
        (np.nan, "nan"),
    ]:
        for values in ([1.0, bad], [bad, 1.0]):
            with pytest.raises(
                NonFiniteError, match=f"cannot be compressed by sign: it holds {said}; expected below 2.5"
            ):
                require_below(library.array(values, dtype=np.float32), 2.5, "sign")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_compressor_accepts_values_below_the_limit(dtype):
    """And no sum, range or norm overflows: a warning would be an error here."""
    x = np.where(np.arange(4100) % 2, 1.0, -1.0).astype(dtype) * dtype(
        np.nextafter(np.float32(LIMIT), np.float32(0))
    )
    for spec in (
        "sign",
        "sign:scale=rms",
        "qsgd",
        "qsgd:norm=l2",
        "minmax",
        "cast",
        "identity",
        "scaled(qsgd)",
    ):
        c = qcomp.compressor(spec)
        assert np.isfinite(c.decompress(c.compress(x, key=qcomp.Key()), like=x)).all()
        for bad in (LIMIT, -LIMIT, 3e38):
            too_large = x.copy()
            too_large[4097] = bad
            if dtype is np.float64 and spec == "identity":
                assert c.decompress(c.compress(too_large), like=x).tobytes() == too_large.tobytes()
                continue
            with pytest.raises(
                NonFiniteError, match=r"cannot be compressed by .*; expected below 1\.26765e\+30"
            ):
                c.compress(too_large, key=qcomp.Key())


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "pure"])
def test_the_default_device_of_torch_changes_nothing(kernels):
    """Arrays are made on the device of what is computed: here another default device makes none that has values."""
    torch = pytest.importorskip("torch")
    x = torch.randn(300, generator=torch.Generator().manual_seed(1))

    def results():
        found = []
        for spec in (
            "sign:scale=rms",
            "qsgd:norm=l2",
            "lloyd_max",
            "minmax",
            "cast",
            "topk",
            "randk",
            "identity",
        ):
            c = qcomp.compressor(spec)
            payload = c.compress(x, key=qcomp.Key())
            found += [payload.data, c.decompress(payload, like=x)]
        return found

    with qcomp.backends.use(kernels):
        expected = results()
        with torch.device("meta"):
            assert all(map(torch.equal, results(), expected))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_element_of_a_long_vector_is_found(library, bad):
    """On the CPU, XLA's maximum drops NaN from 12,100 elements on, though not at 1,000."""
    for at in (0, 6000, 12099):
        values = np.ones(12100, dtype=np.float32)
        assert not np.any(library.numpy(out_of_range(library.array(values), LIMIT)))
        values[at] = bad
        assert library.numpy(out_of_range(library.array(values), LIMIT)).tolist() == [1]
        with pytest.raises(NonFiniteError, match=f"it holds {abs(bad):g}; expected below"):
            require_below(library.array(values), LIMIT, "sign")
        assert sum_of_squares(library.array(values)) == np.inf


def test_require_below_lets_a_compiler_trace():
    jax = pytest.importorskip("jax")
    seen = []

    @jax.jit
    def traced(x):
        seen.append(is_traced(x))
        require_below(x, 1.0, "not while tracing")
        return x

    traced(np.array([np.inf], dtype=np.float32))
    assert seen == [True]
    assert not is_traced(jax.numpy.zeros(1))
    assert not is_traced(np.zeros(1))


def test_write_into():
    out = np.zeros((2, 3))
    value = np.arange(6.0)
    assert write_into(out, value) is out
    assert (out == [[0, 1, 2], [3, 4, 5]]).all()
    with pytest.raises(ValueError, match=r"out has shape \(2, 3\) and dtype float64; expected \(5,\)"):
        write_into(out, value[:5])
    with pytest.raises(ValueError, match="residual has shape"):
        write_into(out, value.astype(np.float32), argument="residual")
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="out is an immutable"):
        write_into(jax.numpy.zeros(2), jax.numpy.ones(2))


def test_detached():
    torch = pytest.importorskip("torch")
    leaf = torch.ones(2, requires_grad=True)
    (inside,) = detached([leaf * 2])
    assert not inside.requires_grad
    x = np.ones(2)
    assert detached([x])[0] is x


def test_tensors_whose_memory_holds_the_negatives_of_their_values():
    torch = pytest.importorskip("torch")
    plain = torch.randn(64, generator=torch.Generator().manual_seed(1))
    negated = torch._neg_view(-plain)
    assert negated.is_neg()
    c = qcomp.ScaledSign(bucket_size=8)

    def results(x):
        owed = torch.zeros(64)
        payload, residual = qcomp.feedback.compress(c, x, owed)

        def rank_main(comm):
            mean, optimizer = qcomp.CompressedMean(c), qcomp.Adam(learning_rate=0.1)
            mine = x if comm.rank else torch.ones(64)
            means, _ = mean(mine, mean.init(mine, comm), comm)
            moved, _ = optimizer.step(x, mine, optimizer.init(x, comm), comm)
            return [means, moved, qcomp.comm.broadcast(x, comm)]

        return [c.compress(x).data, payload.data, residual, *qcomp.comm.run_local(2, rank_main)[1]]

    assert all(map(torch.equal, results(negated), results(plain)))


def test_concat_of_one_is_the_same_array():
    x = np.ones(2)
    assert concat([x]) is x
    assert concat([x, 2 * x]).tolist() == [1, 1, 2, 2]


class TestOtherVersionsOfTheStandard:
    """Their libraries are refused where an array enters, on every rank, and not by an error from inside."""

    @pytest.fixture
    def strict(self, monkeypatch):
        strict = pytest.importorskip("array_api_strict")
        monkeypatch.setattr(arrays, "_namespaces", {})
        yield strict
        strict.reset_array_api_strict_flags()

    def raised(self, make):
        """Return the errors of two ranks, one of which has arrays of NumPy."""
        strict = pytest.importorskip("array_api_strict")

        def rank_main(comm):
            params = [(strict if comm.rank else np).ones((8, 4), dtype=(strict if comm.rank else np).float32)]
            try:
                make().init(params, comm)
            except Exception as error:
                return type(error), str(error)
            return None

        return qcomp.comm.run_local(2, rank_main)

    def test_an_old_version_is_named(self, strict):
        strict.set_array_api_strict_flags(api_version="2022.12")
        text = "an array is a array_api_strict.Array, whose library follows version 2022.12 of the array API"
        for compressor in (qcomp.ScaledSign(), qcomp.LloydMax(2)):
            with pytest.raises(TypeError, match=text):
                compressor.compress(strict.ones(8, dtype=strict.float32))
        for make in (lambda: qcomp.SGD(learning_rate=0.1), lambda: qcomp.OneBitAdam(learning_rate=0.1)):
            other, own = self.raised(make)
            assert own[0] is TypeError
            assert text in own[1]
            assert other is not None

    def test_the_oldest_one_suffices(self, strict):
        strict.set_array_api_strict_flags(api_version="2023.12", enabled_extensions=())
        params = [strict.ones((8, 4), dtype=strict.float32)]
        comm = qcomp.comm.LocalCommunicator.alone()
        opt = qcomp.OneBitAdam(learning_rate=0.1, freeze=1, exact=None)
        state = opt.init(params, comm)
        for _ in range(2):
            params, state = opt.step(params, params, state, comm)
        assert state.stage == "compressed"

    def test_muon_needs_linear_algebra(self, strict):
        strict.set_array_api_strict_flags(enabled_extensions=("fft",))
        with pytest.raises(
            TypeError, match=r"params has a array_api_strict\.Array, whose library lacks the extension"
        ):
            qcomp.Muon(learning_rate=0.1).init(
                strict.ones((8, 4), dtype=strict.float32), qcomp.comm.LocalCommunicator.alone()
            )
        other, own = self.raised(lambda: qcomp.Muon(learning_rate=0.1))
        assert other == own
        assert own[0] is qcomp.MismatchError
        assert "TypeError: params has a array_api_strict.Array" in own[1]
