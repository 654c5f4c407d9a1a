"""The CUDA C++ kernels: emulated on the CPU everywhere, compiled where there is NVRTC, run where there is a GPU."""

import functools
import importlib.util
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import qcomp
from qcomp.backends.cupy_cuda import sources
from qcomp.backends.cupy_cuda.kernel_set import KERNELS, OPTIONS
from qcomp.backends.cupy_cuda.launches import CudaKernels
from qcomp.core import primitives
from qcomp.core.kernels import Blend, StepNumbers, use_kernels
from qcomp.core.numeric.random import Key, replace_draws
from qcomp.testing import check_compressor, check_kernels
from qcomp.testing.inputs import FAMILIES, vector
from qcomp.testing.kernels import COMPRESSORS

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
KEY = Key(seed=2**63 + 5, step=3, tensor=2, rank=1, hop=1, bucket=2**24 + 1)

SMALL_AND_LARGE = (
    *(qcomp.ScaledSign(bucket_size=b, scale=s) for b in (8, 16, 32, 1024, 32768) for s in ("l1", "rms")),
    qcomp.QSGD(levels=1, bucket_size=8),
    qcomp.QSGD(levels=2, bucket_size=16, norm="l2"),
    qcomp.QSGD(levels=100, bucket_size=32, norm="l2"),
    qcomp.QSGD(levels=7, bucket_size=512),
    qcomp.QSGD(levels=60, bucket_size=32768, norm="l2"),
    qcomp.Scaled(qcomp.QSGD(levels=15, bucket_size=16)),
    qcomp.Scaled(qcomp.QSGD(levels=31, bucket_size=32768)),
    *(qcomp.MinMaxUInt8(bucket_size=b) for b in (8, 16, 32, 65536)),
)
"""Buckets of less than a group of elements, of one group, of several warps, and of more than a block's threads; codes
of every width."""


def _load_emulator():
    path = Path(__file__).parent / "cuda_emulation" / "emulator.py"
    spec = importlib.util.spec_from_file_location("cuda_emulator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


emulator = _load_emulator()


@pytest.fixture(scope="session")
def compiler():
    """The C++ compiler of the emulation; no Python package provides one.

    The tests are skipped without one, because `make test` promises to need only Python and make.
    """
    if emulator.COMPILER is None:
        pytest.skip(reason="the emulation of CUDA needs g++, which Python and make do not bring along")


@pytest.fixture(scope="session")
def emulated_library(compiler, tmp_path_factory):
    """The emulated kernels as a shared library, which all workers of one test run share."""
    return emulator.build(tmp_path_factory.getbasetemp().parent)


class Pure:
    """NumPy arrays without kernels: the reference."""

    kernels = None

    def array(self, values, shift=0):
        return values.copy()

    def numpy(self, array):
        return array


class Emulated:
    """NumPy arrays and the emulated machine."""

    def __init__(self, library, order=0):
        self.runtime = emulator.EmulatedRuntime(library, order)
        self.kernels = CudaKernels("emulated", self.runtime)

    def array(self, values, shift=0):
        """Return a copy that starts ``shift`` elements behind an address that is a multiple of 16."""
        whole = self.runtime.empty((values.size + shift,), values.dtype.name, like=values)
        whole[shift:] = values
        return whole[shift:]

    def numpy(self, array):
        assert emulator.guards_are_whole(array)
        return array


class Device:
    """CuPy arrays and a GPU."""

    kernels = KERNELS

    def __init__(self):
        self.cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def array(self, values, shift=0):
        whole = self.cupy.empty(values.size + shift, dtype=values.dtype)
        whole[shift:].set(values)
        return whole[shift:]

    def numpy(self, array):
        return array.get()


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request):
    if request.param == "gpu":
        return Device()
    return Emulated(request.getfixturevalue("emulated_library"), order=12345)


def sizes_of(bucket_size):
    b = bucket_size
    return sorted({1, 5, 8, 15, b - 1, b, b + 1, 2 * b + 5}) if b <= 1024 else [b - 3, b + b // 2 + 3]


def mixed(size, seed):
    """Return values of very different magnitudes, some of them zero, that fit the range of a half."""
    x = vector("wide", size, seed) * np.float32(2.0**-30)
    x[::7] = 0.0
    return x


def all_of(machine, compressor, x, old, total, *, shift=0):
    """Return the bytes of all results for a vector, computed in arrays that start at a shifted address."""

    def array(values):
        return machine.array(values, shift)

    with use_kernels(machine.kernels):
        plain = primitives.encode(compressor, array(x), None, KEY)
        both = primitives.encode(compressor, array(x), array(old), KEY)
        given = primitives.encode(compressor, array(x), array(old), KEY, out=array(np.zeros_like(old)))
        blend = Blend(array(old[::-1].copy()), 0.9, 0.7)
        mixed = primitives.encode(compressor, array(x), None, KEY, blend=blend)
        # Every array may start at another address.
        mixed_both = primitives.encode(compressor, machine.array(x), array(old), KEY, blend=blend)
        payload = compressor.payload(x, array(machine.numpy(both.data)))
        decoded = primitives.decode(compressor, payload, array(x))
        written = primitives.decode(compressor, payload, array(x), out=array(x))
        added = primitives.decode(compressor, payload, array(x), out=array(total), accumulate=True)
    encoded = [plain.data, both.data, both.residual, given.residual]
    encoded += [mixed.data, mixed_both.data, mixed_both.residual]
    parts = [*encoded, decoded, written, added]
    return [machine.numpy(part).tobytes() for part in parts]


def spec(compressor):
    return compressor.spec


# The widths in between differ only in how codes are packed, and SMALL_AND_LARGE has them.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "compressor",
    [
        pytest.param(c, marks=[pytest.mark.exhaustive] * (number != 1), id=spec(c))
        for number, c in enumerate(c for c in COMPRESSORS if getattr(c, "levels", 1) in {1, 5, 127})
    ],
)
def test_the_emulated_kernels_keep_the_contract(emulated_library, compressor):
    check_kernels(Emulated(emulated_library).kernels, compressors=[compressor], max_examples=10)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "compressor",
    [
        pytest.param(qcomp.ScaledSign(16), marks=pytest.mark.exhaustive),
        qcomp.ScaledSign(16, "rms"),
        pytest.param(qcomp.QSGD(3, 16), marks=pytest.mark.exhaustive),
        qcomp.MinMaxUInt8(16),
    ],
    ids=spec,
)
def test_the_laws_hold_under_the_emulated_kernels(emulated_library, compressor):
    with use_kernels(Emulated(emulated_library).kernels):
        check_compressor(compressor, max_examples=5)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 1, 99])
def test_the_order_of_the_threads_makes_no_difference(emulated_library, order):
    # The norms rms and l2 have the most barriers.
    for compressor in (qcomp.ScaledSign(scale="rms"), qcomp.QSGD(bucket_size=2048, norm="l2")):
        x, old = vector("gaussian", 9000, 0), vector("gaussian", 9000, 1)
        found = all_of(Emulated(emulated_library, order), compressor, x, old, x)
        assert found == all_of(Pure(), compressor, x, old, x)


@pytest.mark.slow
def test_the_emulation_finds_a_missing_barrier(compiler, tmp_path):
    code = emulator.translation_unit(["sign_encode_float32"])
    calls = re.compile(r"^( +)__sync(threads|warp)\(\);", flags=re.MULTILINE)
    assert len(calls.findall(code)) == 4
    c, x = qcomp.ScaledSign(), vector("gaussian", 4096, 0)
    with use_kernels(None):
        expected = c.compress(x).data.tobytes()
    found = []
    for text in (code, calls.sub(r"\1;", code)):
        kernels = Emulated(emulator.build(tmp_path, text, optimise="-O0")).kernels
        with use_kernels(kernels):
            found.append(primitives.encode(c, x, None, None).data.tobytes())
    assert found[0] == expected
    assert found[1] != expected


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compressor", SMALL_AND_LARGE, ids=spec)
def test_buckets_of_all_sizes_and_elements_of_all_dtypes(machine, compressor, dtype):
    for size in sizes_of(compressor.traits.bucket_size):
        x, old, total = (mixed(size, seed) for seed in range(3))
        x, total = x.astype(DTYPES[dtype]), total.astype(DTYPES[dtype])
        expected = all_of(Pure(), compressor, x, old, total)
        for shift in (0, 1, 3):
            assert all_of(machine, compressor, x, old, total, shift=shift) == expected, (size, shift)


@pytest.mark.quick_cases(17)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "compressor",
    [qcomp.ScaledSign(), qcomp.QSGD(), qcomp.QSGD(levels=127, norm="l2"), qcomp.MinMaxUInt8()],
    ids=spec,
)
def test_values_of_all_kinds(machine, compressor, family):
    x, old = vector(family, 5_000, 0), vector("gaussian", 5_000, 1)
    old *= np.max(np.abs(x))
    assert all_of(machine, compressor, x, old, x) == all_of(Pure(), compressor, x, old, x)


def test_the_largest_bucket(machine):
    x, old = mixed((1 << 20) + 70_000, 0), mixed((1 << 20) + 70_000, 1)
    compressor = qcomp.ScaledSign(bucket_size=1 << 20)
    assert all_of(machine, compressor, x, old, x) == all_of(Pure(), compressor, x, old, x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_is_read_exactly(machine, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    x = x[np.abs(x.astype(np.float32)) < 2.0**99]
    old = np.zeros(x.size, dtype=np.float32)
    compressor = qcomp.QSGD(levels=1, bucket_size=8)
    total = np.zeros_like(x)
    assert all_of(machine, compressor, x, old, total) == all_of(Pure(), compressor, x, old, total)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@np.errstate(over="ignore")
def test_halves_are_rounded_once_to_nearest(machine, dtype):
    halves = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    ties = (halves[:-1] + halves[1:]) / 2
    near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    arbitrary = np.random.default_rng(0).integers(0, 0x7F800000, 20_000, dtype=np.uint32).view(np.float32)
    edges = np.asarray([65519.0, 65520.0, 3.4e38, np.inf], dtype=np.float32)
    scales = np.concatenate([halves, ties, *near, arbitrary, edges])
    compressor = qcomp.ScaledSign(bucket_size=8)
    signs = np.zeros(-(-scales.size // 4) * 4, dtype=np.uint8)
    like = np.zeros(8 * scales.size, dtype=DTYPES[dtype])
    payload = compressor.payload(like, machine.array(np.concatenate([signs, scales.view(np.uint8)])))
    with use_kernels(machine.kernels):
        decoded = machine.numpy(primitives.decode(compressor, payload, machine.array(like)))
    assert decoded.tobytes() == np.repeat(scales, 8).astype(DTYPES[dtype]).tobytes()


@pytest.mark.parametrize(
    "compressor",
    [
        *(qcomp.ScaledSign(bucket_size=size) for size in (64, 4096)),
        *(c for c in COMPRESSORS if type(c) is qcomp.QSGD),
        qcomp.MinMaxUInt8(bucket_size=64),
    ],
    ids=spec,
)
def test_arbitrary_codes_decode_as_in_the_pure_version(machine, compressor):
    # Also codes that no encoder writes: levels above the largest, a sign without a level, negative scales.
    rng = np.random.default_rng(0)
    total = vector("gaussian", 1000, 0)
    layout = compressor.payload_spec(1000)
    parts = {name: rng.standard_normal(size).astype(np.float32) for name, _, size in layout.fields}
    parts["codes"] = rng.integers(0, 256, layout.fields[0].size, dtype=np.uint8)
    data = layout.join(parts)
    results = []
    for each in (Pure(), machine):
        payload = compressor.payload(total, each.array(data))
        out = each.array(total)
        with use_kernels(each.kernels):
            added = primitives.decode(compressor, payload, out, out=out, accumulate=True)
        results.append(each.numpy(added).tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**100, -(2.0**100)])
@pytest.mark.parametrize("compressor", SMALL_AND_LARGE[1::3], ids=spec)
def test_a_value_out_of_range_is_flagged_and_the_residual_stays(machine, compressor, bad):
    size = 2 * compressor.traits.bucket_size + 9
    for position in (0, size // 2, size - 1):
        for where in (0, 1):
            values = [vector("gaussian", size, 0), vector("gaussian", size, 1)]
            values[where][position] = bad
            x, residual = (machine.array(each) for each in values)
            with use_kernels(machine.kernels):
                refused = primitives.encode(compressor, x, residual, KEY, out=residual).refused
            assert refused.shape == (1,)
            assert machine.numpy(refused)[0] == 1
            assert machine.numpy(residual).tobytes() == values[1].tobytes()
    just_below = np.full(size, np.nextafter(np.float32(2.0**100), np.float32(0)))
    with use_kernels(machine.kernels):
        refused = primitives.encode(compressor, machine.array(just_below), None, KEY).refused
    assert machine.numpy(refused)[0] == 0


@pytest.mark.parametrize("family", ["sign", "qsgd", "minmax"])
def test_the_range_check_applies_to_the_blend_and_not_to_its_parts(machine, family):
    compressor = qcomp.compressor(f"{family}:bucket_size=64")
    small = vector("gaussian", 100, 0)
    # 0.5 * m + scale / 2 * x
    for x_bad, m_bad, scale, expected in [
        (2.0**100, 0.0, 1.0, 0),
        (2.0**99, 0.0, 4.0, 1),
        (0.0, 2.0**100, 1.0, 0),
        (0.0, 2.0**101, 1.0, 1),
        (2.0**101, -(2.0**101), 1.0, 0),
        (3e38, 3e38, 4.0, 1),
        (0.0, np.nan, 1.0, 1),
        (-np.inf, 0.0, 0.0, 1),
    ]:
        x, m = small.copy(), small.copy()
        x[70], m[70] = x_bad, m_bad
        residual = machine.array(small)
        with use_kernels(machine.kernels):
            blend = Blend(machine.array(m), 0.5, scale)
            found = primitives.encode(compressor, machine.array(x), residual, KEY, out=residual, blend=blend)
        assert machine.numpy(found.refused)[0] == expected, (x_bad, m_bad, scale)
        assert machine.numpy(residual).tobytes() == small.tobytes()
        if not expected:
            with use_kernels(None):
                pure = primitives.encode(compressor, x, small, KEY, blend=Blend(m, 0.5, scale))
            assert machine.numpy(found.data).tobytes() == pure.data.tobytes()
            assert machine.numpy(found.residual).tobytes() == pure.residual.tobytes()


@pytest.mark.parametrize("bucket_size", [64, 32768])
@pytest.mark.parametrize("name", ["sign", "qsgd", "minmax"])
@pytest.mark.parametrize("blended", [False, True])
def test_the_new_residual_uses_the_given_buffer_unless_it_is_the_old_one(machine, name, bucket_size, blended):
    compressor = qcomp.compressor(f"{name}:bucket_size={bucket_size}")
    x, old, m = (mixed(40_000, seed) for seed in range(3))
    with use_kernels(None):
        blend = Blend(m, 0.9, 0.7) if blended else None
        expected = primitives.encode(compressor, x, old, KEY, blend=blend).residual.tobytes()
    for where in ("x", "residual", "beside"):
        arrays = {"x": machine.array(x), "residual": machine.array(old), "beside": machine.array(x)}
        blend = Blend(machine.array(m), 0.9, 0.7) if blended else None
        with use_kernels(machine.kernels):
            new = primitives.encode(
                compressor, arrays["x"], arrays["residual"], KEY, out=arrays[where], blend=blend
            ).residual
        assert (new is arrays[where]) == (where != "residual")
        assert machine.numpy(new).tobytes() == expected
        assert machine.numpy(arrays["residual"]).tobytes() == old.tobytes()
        if blend is not None:
            assert machine.numpy(blend.m).tobytes() == m.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compressor", SMALL_AND_LARGE[4:7] + SMALL_AND_LARGE[-5:], ids=spec)
def test_the_encoder_blends_the_momentum(emulated_library, compressor, dtype):
    machine = Emulated(emulated_library)
    x, m = vector("gaussian", 100, 0), vector("gaussian", 100, 1)
    with use_kernels(machine.kernels):
        primitives.encode(compressor, x.astype(DTYPES[dtype]), m, KEY, blend=Blend(m, 0.9, 0.7))
    (launch,) = machine.runtime.launches
    large = "_large" if compressor.traits.bucket_size > 16384 else ""
    assert re.fullmatch(f"(sign|qsgd|minmax)_encode_blended{large}_{dtype}", launch.name)


def test_the_primitives_without_a_compressor_keep_subnormals(machine):
    x, g = vector("subnormal", 1003, 0), vector("subnormal", 1003, 1)
    v = np.abs(vector("subnormal", 1003, 2))
    v[::5], v[1] = 0, 2.0**-149
    results = []
    for each, shift in ((Pure(), 0), (machine, 0), (machine, 1)):
        with use_kernels(each.kernels):
            new_m = primitives.momentum(each.array(x, shift), each.array(g, shift), 0.9, 0.5)
            p, masked = primitives.frozen_step(
                *(each.array(values, shift) for values in (x, g, v)),
                StepNumbers(rate=1e-3, correction=0.2, eps=1e-8, weight_decay=0.01),
            )
            mean = primitives.finish_mean(each.array(x, shift), 3)
        results.append([each.numpy(part).tobytes() for part in (new_m, p, masked, mean)])
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_results_keep_the_shape_of_the_vector(emulated_library):
    kernels = Emulated(emulated_library).kernels
    x, old = (vector("gaussian", 6 * 35, seed).reshape(6, 5, 7) for seed in (0, 1))
    c = qcomp.ScaledSign(bucket_size=64)
    m = vector("gaussian", x.size, 2)
    for blend, same in ((None, None), (Blend(m, 0.9, 0.7), Blend(m.reshape(x.shape), 0.9, 0.7))):
        found = kernels.encode(c, x, old, None, out=None, blend=blend)
        with use_kernels(None):
            expected = primitives.encode(c, x, old, None, blend=same)
        assert found.residual.shape == x.shape
        assert found.residual.tobytes() == expected.residual.tobytes()
    assert kernels.decode(c, found.data, x, out=None, accumulate=False).shape == x.shape


def test_kernels_decline_unsupported_arguments(emulated_library):
    kernels = Emulated(emulated_library).kernels
    x, sign, qsgd = vector("gaussian", 64, 0), qcomp.ScaledSign(), qcomp.QSGD()

    class OtherSign(qcomp.ScaledSign):
        pass

    def encode(compressor, x, residual=None, *, key=KEY, out=None, m=None):
        blend = None if m is None else Blend(m, 0.9, 0.7)
        return kernels.encode(compressor, x, residual, key, out=out, blend=blend)

    assert kernels.takes(x)
    assert not kernels.takes(x.astype(np.float64))
    assert not kernels.takes([1.0])
    assert encode(sign, x[::2]) is None
    assert encode(sign, x, x.astype(np.float64)) is None
    assert encode(sign, x, x, out=np.zeros(128, dtype=np.float32)[::2]) is None
    assert encode(sign, x, m=x[::-1]) is None
    assert encode(sign, x, m=x[:-1]) is None
    assert encode(sign, x.astype(np.float16), m=x.astype(np.float16)) is None
    assert encode(OtherSign(), x) is None
    assert encode(qcomp.Identity(), x) is None
    assert encode(qsgd, x, key=None) is None
    assert encode(qsgd, x, key=Key(seed=np.asarray(1, dtype=np.int32))) is None
    with replace_draws(lambda key, block: 0):
        assert encode(qsgd, x) is None
    data = np.zeros(sign.payload_spec(64).nbytes, dtype=np.uint8)
    assert kernels.decode(sign, data, x, out=x[::-1], accumulate=False) is None
    assert kernels.decode(sign, np.repeat(data, 2)[::2], x, out=None, accumulate=False) is None
    assert kernels.finish_mean(x.astype(np.float16), 2) is None
    assert kernels.finish_mean(x[::2], 2) is None
    assert kernels.momentum(x, x[::-1], 0.9, 1.0) is None
    numbers = StepNumbers(0.1, 0.1, 1e-8, 0.0)
    assert kernels.frozen_step(x[::-1], x, x, numbers) is None
    assert kernels.runtime.launches == []


def test_the_cupy_set_takes_only_cupy_arrays():
    assert KERNELS.name == "cupy"
    assert not KERNELS.takes(np.zeros(3, dtype=np.float32))
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 64, None, 0), 16)  # never read
    taken = {np.float32: True, np.float16: True, DTYPES["bfloat16"]: True, np.float64: False}
    for dtype, expected in taken.items():
        x = cupy.ndarray((4,), dtype=dtype, memptr=memory)
        assert KERNELS.takes(x) is expected
        assert KERNELS.runtime.address(x[1:]) == 4096 + 16 + x.itemsize


AS_CUPY_COMPILES = (*OPTIONS, "-ftz=true", "--device-as-default-execution-space")
"""CuPy adds these two to the compiler options of every kernel."""


@functools.cache
def compile_to_ptx(name):
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(sources.source(name), f"{name}.cu", [], [])
    try:
        nvrtc.compileProgram(program, [*AS_CUPY_COMPILES, "--gpu-architecture=compute_80"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    log, ptx = nvrtc.getProgramLog(program), nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    assert not log.strip("\0\n"), log
    return ptx if isinstance(ptx, str) else ptx.decode()


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", sources.KERNELS)
def test_the_compiler_keeps_the_arithmetic(name):
    ptx = compile_to_ptx(name)
    assert f".entry {name}(" in ptx
    operations = r"\b(?:add|sub|mul|mad|fma|div|sqrt|rcp|neg|abs|min|max|setp|cvt)\.[\w.]*f32\b"
    found = set(re.findall(operations, ptx))
    assert found <= {
        *(f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "div", "sqrt")),
        *("cvt.rn.f32", "cvt.rni.s32.f32", "cvt.rzi.s32.f32"),
    }
    assert ".ftz" not in ptx
    assert ".f64" not in ptx
    # Only large buckets need an array that does not fit into registers.
    assert (".local" in ptx) == (re.match("(sign|qsgd)_encode(_blended)?_large", name) is not None)


@pytest.mark.nvrtc
@pytest.mark.parametrize("role", ["encode", "encode_blended"])
@pytest.mark.parametrize("family", ["sign", "qsgd", "minmax"])
def test_sixteen_bytes_are_read_and_written_at_a_time(family, role):
    ptx = compile_to_ptx(f"{family}_{role}_float32")
    vectors_read = {"encode": 2, "encode_blended": 3}[role]  # x, the residual, the momentum
    assert len(re.findall(r"ld\.global\.v4", ptx)) == 8 * vectors_read
    assert len(re.findall(r"st\.global\.wb\.v4", ptx)) == 8
