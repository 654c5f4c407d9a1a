"""The Triton kernels return the bytes of the pure version: in Triton's interpreter, and on a device if there is one.

The interpreter must be selected before Triton is imported, and would then run in all other tests too. So this file,
run as a program with the names of checks, performs these on the CPU.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import qcomp
from qcomp.core import primitives
from qcomp.core.kernels import Blend, StepNumbers, use_kernels
from qcomp.core.numeric.random import fold_key, philox4x32
from qcomp.testing.compressor_case import Case
from qcomp.testing.dtype_laws import half_precision
from qcomp.testing.inputs import FAMILIES, vector
from qcomp.testing.key_laws import key_names_the_draws
from qcomp.testing.laws import FORM_LAWS, VALUE_LAWS, VECTOR_LAWS, non_finite_is_an_error
from qcomp.testing.vector_laws import applies

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qcomp.backends.torch_triton import sign
from qcomp.backends.torch_triton.kernel_set import KERNELS
from qcomp.backends.torch_triton.philox import draws16

CASES = (
    (qcomp.ScaledSign(8), 3),
    (qcomp.ScaledSign(32), 9),
    (qcomp.ScaledSign(128, scale="rms"), 77),
    (qcomp.ScaledSign(1024), 600),
    *(
        (qcomp.QSGD(levels, 32), tail)
        for levels, tail in ((1, 1), (3, 7), (7, 9), (15, 31), (31, 0), (63, 23), (127, 16))
    ),
    (qcomp.QSGD(5, 1024, "l2"), 100),
    (qcomp.Scaled(qcomp.QSGD(7, 32)), 5),
    (qcomp.LloydMax(1, 32), 9),
    (qcomp.LloydMax(2, 8), 3),
    (qcomp.LloydMax(3, 128), 77),
    (qcomp.LloydMax(4, 1024), 600),
    (qcomp.MinMaxUInt8(8), 5),
    (qcomp.MinMaxUInt8(512), 130),
)
"""Compressors, and the size of the tail: codes of every width, tiles of one bucket and of many."""
ONE_OF_EACH = (qcomp.ScaledSign(64), qcomp.QSGD(7, 64), qcomp.LloydMax(4, 64), qcomp.MinMaxUInt8(64))
LARGEST = (
    qcomp.ScaledSign(32768),
    qcomp.QSGD(7, 32768),
    qcomp.LloydMax(4, 32768),
    qcomp.MinMaxUInt8(32768),
)
KEY = qcomp.Key(seed=2**64 - 3, step=2**33, tensor=5, rank=1, hop=3, bucket=2**30 - 3)
"""A key of a stream whose counters wrap around within buckets of 32."""


def on(device, x):
    return torch.from_numpy(np.array(x)).to(device)


def raw(x):
    return x.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def encode(c, x, residual=None, *, key=KEY, out=None, blend=None):
    return KERNELS.encode(c, x, residual, key, out=out, blend=blend)


def every_family(bucket_size, tail):
    """Return a vector with values of all families, in at least two buckets and a tail."""
    size = max(320, 2 * bucket_size)
    parts = [
        vector(family, size, 0)[i * size // 10 : (i + 1) * size // 10] for i, family in enumerate(FAMILIES)
    ]
    return np.concatenate([*parts, vector("wide", tail, 1)])


def halves(bucket_size, tail, dtype):
    """Return 16-bit floating-point numbers: a wide range down to subnormals, ties and zeros."""
    x = np.concatenate([vector("wide", bucket_size, 0) * 1e-3, vector("ties", bucket_size + tail, 0)])
    return torch.from_numpy(np.clip(x, -9e3, 9e3)).to(dtype)


def compare(device, c, x, residual):
    """Compare all results for one vector with those of the pure version."""
    there, old = x.to(device), residual.to(device)
    with use_kernels(None):
        plain = primitives.encode(c, x, None, KEY)
        expected = primitives.encode(c, x, residual, KEY)
        blended = primitives.encode(c, x, residual, KEY, blend=Blend(residual, 0.9, 0.7))
        payload = c.payload(x, expected.data)
        decoded = c.decompress(payload, like=x)
        added = c.add(payload, x.clone())
    what = f"{c} of {x.numel()} elements of {x.dtype}"
    got = encode(c, there)
    assert raw(got.data) == raw(plain.data), f"payload of {what}"
    assert got.residual is None
    got = encode(c, there, old)
    assert raw(got.data) == raw(expected.data), f"payload with feedback of {what}"
    assert raw(got.residual) == raw(expected.residual), f"residual of {what}"
    assert got.residual.shape == x.shape
    assert raw(got.refused) == b"\0"
    mixed = encode(c, there, old, blend=Blend(old, 0.9, 0.7))
    assert raw(mixed.data) == raw(blended.data), f"payload of a momentum, {what}"
    assert raw(mixed.residual) == raw(blended.residual), f"residual of a momentum, {what}"
    if x.dtype == torch.bfloat16 and device == "cpu":
        return  # Triton's interpreter truncates where devices round to the nearest bfloat16
    result = KERNELS.decode(c, got.data, there, out=None, accumulate=False)
    assert raw(result) == raw(decoded), f"decompressed {what}"
    assert result.shape == x.shape
    total = there.clone()
    assert KERNELS.decode(c, got.data, total, out=total, accumulate=True) is total
    assert raw(total) == raw(added), f"sum with {what}"


def check_float32(device):
    for c, tail in CASES:
        x = every_family(c.traits.bucket_size, tail)
        compare(device, c, torch.from_numpy(x), torch.from_numpy(np.roll(x, 1) * np.float32(0.5)))


def check_16_bits(device):
    for c, tail in CASES[::3]:
        for dtype in (torch.float16, torch.bfloat16):
            x = halves(c.traits.bucket_size, tail, dtype)
            compare(device, c, x, torch.from_numpy(vector("gaussian", x.numel(), 1)))


def check_nearest_levels(device):
    """Many buckets, as truncated steps hide most differences of sums; root mean squares near the smallest number."""
    many, old = vector("gaussian", 4099, 0), torch.zeros(4099)
    for bits in (2, 3, 4):
        for x in (many, many * np.float32(2.0**-126)):
            compare(device, qcomp.LloydMax(bits, 8), torch.from_numpy(x), old)


def check_shapes(device):
    """A lone tail, one element, several dimensions, and the largest buckets."""
    for c in ONE_OF_EACH:
        for shape in ((1,), (23,), (4, 5, 16)):
            x = torch.from_numpy(vector("gaussian", int(np.prod(shape)), 0).reshape(shape))
            compare(device, c, x, torch.from_numpy(vector("ties", x.numel(), 1).reshape(shape)))
    for c in LARGEST:
        x = vector("gaussian", 32768 + 5000, 0)
        compare(device, c, torch.from_numpy(x), torch.from_numpy(vector("ties", x.size, 1)))


def check_buffers(device):
    """The new residual goes into the buffer of x or into a given one, never into that of the old residual."""
    x, old = vector("gaussian", 201, 0), vector("ties", 201, 1)
    for c in ONE_OF_EACH:
        with use_kernels(None):
            expected = primitives.encode(c, torch.from_numpy(x), torch.from_numpy(old), KEY)
        used_up, residual, given = on(device, x), on(device, old), torch.ones(201, device=device)
        for source, out, reused in (
            (on(device, x), given, True),
            (used_up, used_up, True),
            (on(device, x), residual, False),
        ):
            got = encode(c, source, residual, out=out)
            assert raw(got.data) == raw(expected.data)
            assert raw(got.residual) == raw(expected.residual)
            assert (got.residual is out) == reused
            assert raw(residual) == raw(on(device, old))


def check_offsets(device):
    """Slices of tensors that start at unaligned addresses."""
    x, old = vector("gaussian", 201, 0), vector("ties", 201, 1)
    for c in ONE_OF_EACH:
        with use_kernels(None):
            expected = primitives.encode(c, torch.from_numpy(x), torch.from_numpy(old), KEY)
            decoded = c.decode(c.payload_spec(201).split(expected.data), 201, torch.float32)

        def at(offset, values):
            return on(device, np.concatenate([np.ones(offset, values.dtype), values]))[offset:]

        out = torch.ones(205, device=device)
        got = encode(c, at(1, x), at(2, old), out=out[3:204])
        assert raw(got.data) == raw(expected.data)
        assert raw(got.residual) == raw(out[3:204]) == raw(expected.residual)
        for offset in (1, 2, 4):
            result = torch.ones(205, device=device)
            data = at(offset, expected.data.numpy())
            KERNELS.decode(c, data, result[3:204], out=result[3:204], accumulate=False)
            assert raw(result[3:204]) == raw(decoded)
            for buffer in (out, result):
                assert raw(buffer[:3]) + raw(buffer[204:]) == raw(torch.ones(4))


def check_refusals(device):
    old = on(device, vector("gaussian", 150, 1))
    kept = raw(old)
    with_squares = qcomp.ScaledSign(64, scale="rms"), qcomp.QSGD(7, 64, "l2")
    for c in (*ONE_OF_EACH, *with_squares):
        for position, bad in ((0, np.nan), (70, -np.inf), (149, 2.0**100), (0, -np.nan)):
            x = vector("gaussian", 150, 0)
            x[position] = bad
            for residual in (None, old):
                got = encode(c, on(device, x), residual, out=residual)
                assert raw(got.refused) == b"\1", f"{bad} at {position} was compressed by {c}"
            assert raw(old) == kept
        with use_kernels(KERNELS), pytest.raises(qcomp.NonFiniteError):
            qcomp.feedback.compress(c, on(device, x), old, key=KEY, donate=True)
        assert raw(old) == kept
        # The sum of a bucket is above the limit although no element is.
        x = torch.full((150,), 2.0**100 * (1 - 2**-24))
        with use_kernels(None):
            expected = primitives.encode(c, x, torch.zeros(150), KEY)
        got = encode(c, x.to(device), torch.zeros(150, device=device))
        assert raw(got.data) + raw(got.residual) == raw(expected.data) + raw(expected.residual)
        assert raw(got.refused) == b"\0"


def check_updates(device):
    for size in (7, 2048, 5001):
        wide, g = vector("wide", size, 0), vector("gaussian", size, 1)
        wide[:1] = -(2.0**-126)
        v = np.abs(vector("sparse", size, 2))  # zeros: elements that never had a gradient
        for count, decay in ((3, 0.0), (2, 0.1)):
            settings = StepNumbers(1e-3, 0.19, 1e-8, decay)
            results = []
            for kernels, place in ((None, "cpu"), (KERNELS, device)):
                with use_kernels(kernels):
                    total = on(place, wide)
                    mean = primitives.finish_mean(total, count)
                    assert kernels is None or mean is total
                    m = primitives.momentum(mean, on(place, g), 0.9, 0.7)
                    kept = raw(m)
                    p, masked = primitives.frozen_step(on(place, g), m, on(place, v), settings)
                results.append([raw(part) for part in (mean, p, masked)] + [kept])
            assert results[0] == results[1], f"{size} elements"


def check_draws(device):
    """The published answer for key and counter zero, and other draws."""
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    keys = [((0, 0), 0, 0, words)]
    for seed, hop, first in ((0, 1, 2**32 - 1), (2**64 - 1, 2**32 - 1, 5), (1, 0, 2**31)):
        key = fold_key(qcomp.Key(seed=seed), like=torch.zeros(1))
        keys.append((key, hop, first, philox4x32(((first + 1) & 0xFFFFFFFF, hop, 0, 0), key)))
    for (k0, k1), hop, first, expected in keys:
        drawn = torch.zeros(8, dtype=torch.int32, device=device)
        _draw[(1,)](drawn, k0 | k1 << 32, hop, first, AT=int(expected != words))
        assert drawn.tolist() == [word >> shift & 0xFFFF for word in expected for shift in (0, 16)]


@triton.jit(do_not_specialize=["seed", "hop", "first_block"])
def _draw(drawn, seed: tl.uint64, hop: tl.uint32, first_block: tl.uint32, AT: tl.constexpr):  # noqa: N803
    draws = draws16(seed, hop, first_block, tl.program_id(0) + AT, 1, 8)
    tl.store(drawn + tl.arange(0, 8), tl.reshape(draws, (8,)))


class _Operations(TorchDispatchMode):
    """Counts the operations that torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def check_waits_for_nothing(device):
    """Nothing is read from the device, and only the results are allocated."""
    for c in ONE_OF_EACH:
        x, old = on(device, vector("gaussian", 700, 0)), on(device, vector("gaussian", 700, 1))
        total = x.clone()
        with _Operations() as operations:
            got = encode(c, x, old, out=old)
            KERNELS.decode(c, got.data, total, out=total, accumulate=True)
        seen = operations.names
        assert seen["_local_scalar_dense"] == seen["_to_copy"] == seen["clone"] == seen["cat"] == 0, seen
        made = sum(
            count for name, count in seen.items() if name in ("empty", "zeros", "empty_like", "new_empty")
        )
        # Payload, residual and flag; the interpreter makes empty shells around its arguments.
        assert made == 3 or device == "cpu", seen


def check_what_is_left_to_the_pure_version(device):
    x = on(device, vector("gaussian", 700, 0))
    assert KERNELS.takes(x)
    assert not KERNELS.takes(x.double())
    for other in (x[::2], x.clone().requires_grad_()):
        assert KERNELS.takes(other)  # the choice is made by library, device and dtype
        nothing = {"out": None, "blend": None}
        assert KERNELS.encode(qcomp.ScaledSign(), other, None, None, **nothing) is None
    assert not KERNELS.takes(np.ones(3, dtype=np.float32))

    class Louder(qcomp.ScaledSign):
        pass

    assert encode(Louder(), x) is None
    assert encode(qcomp.ScaledSign(65536), x) is None
    assert encode(qcomp.QSGD(), x, key=None) is None
    assert encode(qcomp.QSGD(), x, key=KEY._replace(step=torch.tensor(3, dtype=torch.int32))) is None
    assert encode(qcomp.ScaledSign(), x[:0]) is None
    assert encode(qcomp.ScaledSign(), x, x.double()) is None
    assert encode(qcomp.ScaledSign(), x, x, blend=Blend(x.double(), 0.9, 1.0)) is None
    assert encode(qcomp.ScaledSign(), x, x, out=torch.ones(1400, device=device)[::2]) is None
    data = torch.zeros(100, dtype=torch.uint8, device=device)
    assert KERNELS.decode(Louder(), data, x, out=None, accumulate=False) is None
    assert KERNELS.decode(qcomp.ScaledSign(), data, x, out=x.double(), accumulate=False) is None
    assert KERNELS.finish_mean(x.half(), 2) is None
    assert KERNELS.momentum(x, x[::2], 0.9, 1.0) is None


def check_signs_of_zeros(device):
    """A negative code times a step of zero is -0, also in versions of Triton that compute -x as 0 - x."""
    from triton.language.semantic import TritonSemantic

    def minus(self, x):
        zero = self.make_tensor(self.builder.get_null_value(x.type.scalar.to_ir(self.builder)), x.type.scalar)
        return self.sub(zero, x, True)

    TritonSemantic.minus = minus
    for c in (qcomp.ScaledSign(64), qcomp.QSGD(7, 64), qcomp.LloydMax(1, 64), qcomp.LloydMax(4, 64)):
        layout, like = c.payload_spec(100), torch.zeros(100, device=device)
        data = torch.zeros(layout.nbytes, dtype=torch.uint8)
        data[: layout.fields[0].size] = 255  # all codes are negative, and the steps of both buckets are zero
        expected = c.decode(layout.split(data), 100, torch.float32)
        assert torch.signbit(expected).all()
        assert raw(KERNELS.decode(c, data.to(device), like, out=None, accumulate=False)) == raw(expected), c


class _NoDevice:
    """A driver that lets Triton compile for a device that is absent."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(*target):
    """Let launches only compile for an absent device, and return the list that receives what they compile."""
    triton.runtime.driver.set_active(_NoDevice(GPUTarget(*target)))
    run, launched = JITFunction.run, []

    def compile_one(self, *arguments, grid, warmup, **options):
        launched.append(run(self, *arguments, grid=grid, warmup=True, **options))

    JITFunction.run = compile_one
    return launched


def add(c, total):
    data = torch.zeros(c.payload_spec(total.numel()).nbytes, dtype=torch.uint8)
    KERNELS.decode(c, data, total, out=total, accumulate=True)


def check_contract(compressor):
    """The laws hold with these kernels; the laws about vectors are checked for one vector with values of all families.

    Laws about dependence on inputs are the same for all kernels, and laws about averages concern bytes. Three laws take
    minutes in the interpreter: `check_16_bits`, `check_draws` and `check_refusals` try fewer cases of the same.
    """
    case, x = Case(compressor, torch), every_family(compressor.bucket_size, 5)
    with use_kernels(KERNELS):
        for law in (*FORM_LAWS, *VALUE_LAWS):
            if law not in (half_precision, key_names_the_draws, non_finite_is_an_error):
                law(case)
        for law in filter(partial(applies, case), VECTOR_LAWS):
            law(case, x)


def check_compiled_code(device):
    """Code compiled for a GPU rounds every operation, loads 16 bytes at a time, and serves all sizes and keys."""
    launched = compile_only("cuda", 90, 32)
    f32, f16, bf16 = (
        torch.ones(5008, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
    )
    settings = StepNumbers(1e-3, 0.1, 1e-8, 0.1)
    ptx = ""
    for what, wide_loads, launch in (
        # 16 elements of each input per thread; the masked loads of a tail are single loads besides.
        ("sign", 8, lambda: encode(qcomp.ScaledSign(), f32, f32)),
        ("sign of float16", 6, lambda: encode(qcomp.ScaledSign(scale="rms"), f16, f32)),
        ("sign of a momentum", 12, lambda: encode(qcomp.ScaledSign(), f32, f32, blend=Blend(f32, 0.9, 1.0))),
        ("levels", 8, lambda: encode(qcomp.QSGD(), f32, f32)),
        ("nearest levels", 8, lambda: encode(qcomp.LloydMax(4), f32, f32)),
        ("codes", 8, lambda: encode(qcomp.MinMaxUInt8(), f32, f32)),
        ("sum of signs", 4, lambda: add(qcomp.ScaledSign(), f32)),
        ("sum of signs in bfloat16", 2, lambda: add(qcomp.ScaledSign(), bf16)),
        ("sum of levels", 4, lambda: add(qcomp.QSGD(), f32)),
        ("sum of nearest levels", 4, lambda: add(qcomp.LloydMax(4), f32)),
        ("sum of scaled levels", 4, lambda: add(qcomp.Scaled(qcomp.QSGD(3)), f32)),
        ("sum of codes", 5, lambda: add(qcomp.MinMaxUInt8(), f32)),
        ("mean", 4, lambda: KERNELS.finish_mean(f32, 3)),
        ("momentum", 8, lambda: KERNELS.momentum(f32, f32, 0.9, 1.0)),
        ("step", 12, lambda: KERNELS.frozen_step(f32, f32.clone(), f32, settings)),
    ):
        before = ptx
        launch()
        ptx = launched[-1].asm["ptx"]
        assert ptx != before
        for inexact in (
            r"\bfma\.",
            r"\.ftz",
            r"\b(div|sqrt|rcp|rsqrt)\.(full|approx)",
            r"\b(add|sub|mul)\.f32",
        ):
            assert not re.search(inexact, ptx), f"{inexact} in {what}"
        assert not launched[-1].metadata.enable_fp_fusion
        loads = len(re.findall(r"\bld\.global\S*\.v4\.b32", ptx))
        assert loads == wide_loads, f"{loads} loads of 16 bytes in {what}"
        assert "in bfloat16" not in what or "cvt.rn.bf16" in ptx
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx

    known = set(map(id, launched))
    for size in (1, 513, 4096, 5000):
        for key in (qcomp.Key(), qcomp.Key(seed=1, step=7, bucket=16), qcomp.Key(hop=1, bucket=1)):
            encode(qcomp.QSGD(), f32[:size], f32[:size], key=key)
        encode(qcomp.ScaledSign(), f32[:size], f32[:size])
        encode(qcomp.LloydMax(4), f32[:size], f32[:size])
        add(qcomp.QSGD(), f32[:size])
        KERNELS.finish_mean(f32[:size], size)
    assert {id(kernel) for kernel in launched} == known


def check_code_for_amd(device):
    """AMD's compiler takes the kernels of every family, and their tiles stay in registers."""
    sign._REGISTERS.clear()  # only NVIDIA's compiler knows the option
    launched, x = compile_only("hip", "gfx942", 64), torch.ones(5008)
    for c in (*ONE_OF_EACH, *LARGEST, qcomp.Scaled(qcomp.QSGD(3))):
        encode(c, x, x, blend=Blend(x, 0.9, 1.0))
        add(c, x)
    for kernel in launched:
        assert re.findall(r"vgpr_spill_count: +(\d+)", kernel.asm["amdgcn"]) == ["0"], kernel.name


CHECKS = {
    check.__name__: check
    for check in (
        check_float32,
        check_16_bits,
        check_nearest_levels,
        check_shapes,
        check_buffers,
        check_offsets,
        check_refusals,
        check_updates,
        check_draws,
        check_waits_for_nothing,
        check_what_is_left_to_the_pure_version,
    )
}


ALONE = {check.__name__: check for check in (check_compiled_code, check_code_for_amd, check_signs_of_zeros)}
"""Checks that change Triton, for a process of their own."""


CONTRACTS = {
    f"contract of {c}": lambda device, c=c: check_contract(c)
    for c in (
        qcomp.ScaledSign(16, "rms"),
        qcomp.QSGD(3, 16),
        qcomp.LloydMax(3, 16),
        qcomp.MinMaxUInt8(16),
    )
}


def run_this_file(*checks, cache, timeout=110, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, *checks],
        env={**inherited, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


LONGER = ("check_16_bits", "check_nearest_levels"), ("check_shapes",)
QUICK_CHECKS = [name for name in CHECKS if name not in ("check_float32", *LONGER[0], *LONGER[1])]
"""Checks so short that running several together takes less time than one start."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(["check_float32"], id="check_float32"),
        *(
            pytest.param(checks, marks=pytest.mark.exhaustive, id=",".join(checks))
            for checks in (*LONGER, QUICK_CHECKS[::2], QUICK_CHECKS[1::2])
        ),
    ],
)
def test_in_the_interpreter(checks, tmp_path):
    run_this_file(*checks, cache=tmp_path, timeout=220, TRITON_INTERPRET="1")


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_contract_in_the_interpreter(contract, tmp_path):
    run_this_file(contract, cache=tmp_path, timeout=390, TRITON_INTERPRET="1")


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", ["check_compiled_code", "check_code_for_amd"])
def test_compiled_code(check, tmp_path):
    run_this_file(check, cache=tmp_path)


@pytest.mark.exhaustive
def test_signs_of_zeros(tmp_path):
    run_this_file("check_signs_of_zeros", cache=tmp_path, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_device(check):
    CHECKS[check]("cuda")


if __name__ == "__main__":
    # Values out of range are intended here; a device does not warn about them either.
    np.seterr(all="ignore")
    for name in sys.argv[1:]:
        {**CHECKS, **CONTRACTS, **ALONE}[name]("cpu")
