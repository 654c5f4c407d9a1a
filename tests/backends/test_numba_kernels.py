"""The numba kernels return the bytes of the pure versions: payload, residual and decoded values, for every input."""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qcomp
from qcomp.core import feedback, primitives
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.numeric.arrays import divide, flush
from qcomp.testing.inputs import FAMILIES, sizes, vector, vectors

pytest.importorskip("numba")

from qcomp.backends import numba_cpu as kernels
from qcomp.backends.numba_cpu import codec, threads
from qcomp.backends.numba_cpu import vectors as passes
from qcomp.backends.numba_cpu.frames import kernels_of
from qcomp.backends.numba_cpu.stream import pays
from qcomp.backends.numba_cpu.tables import decoded_vectors

F = np.float32
KEY = qcomp.Key(seed=2**40 + 5, step=3, tensor=2, rank=1, hop=1, bucket=7)

# The first example of a configuration compiles its kernel unless the cache has it.
checked = settings(
    max_examples=80, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True)
def one_thread():
    kernels.set_num_threads(1)
    yield
    kernels.set_num_threads(None)


@dataclass(frozen=True)
class Case:
    """A compressor, and the kernels with its configuration."""

    compressor: Any

    @property
    def kernels(self):
        return kernels_of(self.compressor)

    @property
    def bucket(self):
        """The number of elements in a bucket of the kernels."""
        return self.kernels.bucket_size

    def encode(self, x, residual, data, out):
        encoder = codec.encoder_of(self.kernels.encode(KEY), self.bucket, x, data, None, KEY.bucket)
        return codec.encode(encoder, residual, out)

    def decode(self, data, out, *, accumulate=False):
        table = decoded_vectors([data], self.bucket, out)
        streams = not accumulate and pays(out.size)
        codec.run_decoder(self.kernels.decode, self.bucket, table, accumulate=accumulate, streams=streams)

    def buffer(self, size):
        """Return a buffer for the payload at an odd address, filled with bytes that the kernel must overwrite."""
        nbytes = self.compressor.payload_spec(size).nbytes
        return np.full(nbytes + 1, 0xA5, dtype=np.uint8)[1:]

    def check(self, x, residual):
        """Compare everything that the kernels return with what the pure version returns."""
        c = self.compressor
        with np.errstate(all="ignore"):
            plain = c.compress(x, key=KEY).data
            payload, rest = feedback.compensated(c, x, residual, key=KEY)
            decoded = c.decompress(payload, like=x)

        data = self.buffer(x.size)
        assert self.encode(x, None, data, None)
        same(data, plain)

        data, fresh = self.buffer(x.size), np.full_like(x, np.nan)
        assert self.encode(x, residual, data, fresh)
        same(data, payload.data)
        same(fresh, rest)

        data, donated = self.buffer(x.size), residual.copy()
        assert self.encode(x, donated, data, donated)
        same(data, payload.data)
        same(donated, rest)

        out = np.full_like(x, np.nan)
        self.decode(data, out)
        same(out, decoded)
        out = residual.copy()
        self.decode(data, out, accumulate=True)
        with np.errstate(all="ignore"):
            same(out, residual + decoded)


def same(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()


SIGN = [qcomp.ScaledSign(bucket_size=b, scale=s) for b in (8, 64, 4096) for s in ("l1", "rms")]
QSGD = [
    *(qcomp.QSGD(levels=n, bucket_size=64) for n in (1, 2, 7, 15, 31, 63, 100, 127)),
    *(qcomp.QSGD(levels=7, bucket_size=b, norm=norm) for b in (8, 512) for norm in ("max", "l2")),
    qcomp.QSGD(levels=5, bucket_size=1024),
    qcomp.QSGD(levels=127, bucket_size=16, norm="l2"),
    *(WideQSGD(levels=2**bits - 1, bucket_size=64) for bits in range(8, 16)),
    WideQSGD(levels=128, bucket_size=512, norm="l2"),
    WideQSGD(levels=20_000, bucket_size=1024, norm="l2"),
    WideQSGD(levels=300, bucket_size=8),
]
FIELDS = [
    qcomp.WholeFields(qcomp.QSGD(levels=7, bucket_size=8), field=5),
    qcomp.WholeFields(qcomp.QSGD(levels=127, bucket_size=64, norm="l2"), field=9),
    qcomp.WholeFields(qcomp.QSGD(levels=1, bucket_size=512), field=9),
    qcomp.WholeFields(qcomp.QSGD(levels=7, bucket_size=1024), field=3 * 257),
    qcomp.WholeFields(qcomp.QSGD(levels=7, bucket_size=32), field=1),
    qcomp.WholeFields(WideQSGD(levels=500, bucket_size=64), field=25),
]
MINMAX = [qcomp.MinMaxUInt8(bucket_size=b) for b in (8, 64, 2048)]
IDENTITY = [qcomp.Identity()]
EVERY = [Case(c) for c in (*SIGN, *QSGD, *FIELDS, *MINMAX, *IDENTITY)]


@st.composite
def inputs(draw, compressors):
    """Draw a case, a vector and a residual of the same size."""
    case = Case(draw(st.sampled_from(compressors)))
    x = draw(vectors(sizes(case.bucket)))
    residual = draw(vectors((x.size,)))
    return case, x, residual


@given(inputs(SIGN))
@checked
def test_sign(drawn):
    case, x, residual = drawn
    case.check(x, residual)


@given(inputs(QSGD))
@checked
def test_qsgd(drawn):
    case, x, residual = drawn
    case.check(x, residual)


@given(inputs(FIELDS))
@checked
def test_buckets_that_are_filled_up(drawn):
    case, x, residual = drawn
    case.check(x, residual)


@given(inputs(MINMAX))
@checked
def test_minmax(drawn):
    case, x, residual = drawn
    case.check(x, residual)


@given(inputs(IDENTITY))
@checked
def test_identity(drawn):
    case, x, residual = drawn
    case.check(x, residual)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.compressor.spec)
def test_every_size(case):
    for number, size in enumerate(sizes(case.bucket)):
        family = FAMILIES[number % len(FAMILIES)]
        case.check(vector(family, size, 1), vector("gaussian", size, 2))


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.compressor.spec)
def test_a_value_that_is_refused_leaves_a_donated_residual_alone(case):
    x = vector("gaussian", 2 * case.bucket + 5, 1)
    residual = vector("wide", x.size, 2)
    data, fresh = case.buffer(x.size), np.empty_like(x)
    positions = (0, case.bucket, x.size - 1)
    for index, value in itertools.product(positions, (np.nan, -np.nan, np.inf, -np.inf, 2.0**100, -3e38)):
        bad = x.copy()
        bad[index] = value
        assert not case.encode(bad, None, data, None)
        assert not case.encode(bad, residual, data, fresh)
        assert not case.encode(residual, bad, data, fresh)
        for other, old in ((bad, residual), (residual, bad), (bad, bad)):
            donated = old.copy()
            assert not case.encode(other, donated, data, donated)
            same(donated, old)


@pytest.mark.quick_cases(15)
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.compressor.spec)
def test_only_the_sum_is_refused(case):
    size = case.bucket + 3
    x, residual = vector("gaussian", size, 1), vector("gaussian", size, 2)
    below = np.nextafter(F(2.0**100), F(0))
    x[1], x[-1] = below, -F(1.5 * 2.0**99)
    case.check(x, residual)
    x[:], residual[:] = below, 1  # the largest sums and norms there are
    case.check(x, residual)
    x[0], residual[0] = F(2.0**100), -F(2.0**99)
    donated = residual.copy()
    case.encode(x, donated, case.buffer(size), donated)
    with np.errstate(all="ignore"):
        _, rest = feedback.compensated(case.compressor, x, residual, key=KEY)
    same(donated, rest)


@pytest.mark.parametrize(
    "case",
    [
        EVERY[4],
        Case(qcomp.QSGD()),
        Case(qcomp.QSGD(levels=15)),
        Case(WideQSGD(levels=1000)),
        Case(FIELDS[2]),
        Case(MINMAX[-1]),
        Case(IDENTITY[0]),
    ],
    ids=lambda c: c.compressor.spec,
)
def test_threads_do_not_change_bytes(case, monkeypatch):
    monkeypatch.setattr(threads, "_LEAST_ELEMENTS", 1 << 12)
    size = 5 * 4096 + 77
    x, residual = vector("wide", size, 1), vector("gaussian", size, 2)
    for count in (2, 3):
        kernels.set_num_threads(count)
        case.check(x, residual)
    bad = x.copy()
    bad[-1] = np.nan
    donated = residual.copy()
    assert not case.encode(bad, donated, case.buffer(size), donated)
    same(donated, residual)


def test_ranks_that_are_threads_may_call_at_once(monkeypatch):
    monkeypatch.setattr(threads, "_LEAST_ELEMENTS", 1 << 12)
    kernels.set_num_threads(2)
    case = Case(qcomp.ScaledSign())
    x, residual = vector("wide", 40_000, 1), vector("gaussian", 40_000, 2)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(case.check, x, residual) for _ in range(8)]:
            done.result()


def test_read_only_inputs_need_no_other_compilation():
    case = Case(qcomp.ScaledSign(bucket_size=64))
    x, residual = vector("gaussian", 100, 1), vector("gaussian", 100, 2)
    data = case.buffer(100)
    for array in (x, residual):
        array.flags.writeable = False
    case.encode(x, residual, data, np.empty_like(x))
    data.flags.writeable = False
    case.decode(data, np.empty_like(x))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_mean_over_ranks(count):
    case = Case(qcomp.QSGD(levels=7, bucket_size=64))
    size = 5000
    payloads = [case.compressor.compress(vector("tiny", size, rank), key=KEY) for rank in range(count)]
    like = np.empty(size, dtype=F)
    expected = case.compressor.decompress(payloads[0], like=like)
    for payload in payloads[1:]:
        expected = expected + case.compressor.decompress(payload, like=like)
    expected = flush(divide(expected, count))
    total = np.empty(size, dtype=F)
    for rank, payload in enumerate(payloads):
        case.decode(payload.data, total, accumulate=rank > 0)
    passes.finish_mean(total, count)
    same(total, expected)


@pytest.mark.parametrize("family", ["tiny", "wide"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_an_average_is_divided_as_a_sum_is(count, family):
    """By a power of two it is a multiplication, which rounds alike, also to and from subnormals (which count as 0)."""
    compressor = qcomp.MinMaxUInt8(bucket_size=64)
    xs = [vector(family, 5000, rank) for rank in range(count)]
    xs[0][:64] = F(2.0**-126) * (1 + np.arange(64, dtype=F) / 64)  # halves of it are subnormal, and zero
    payloads = [compressor.compress(x) for x in xs]
    with qcomp.backends.use("pure"):
        expected = primitives.average(compressor, payloads, xs[0])
    with qcomp.backends.use("numba"):
        same(primitives.average(compressor, payloads, xs[0]), expected)


@given(vectors((0, 1, 9, 4095, 4097)), st.data())
@checked
def test_momentum(m, data):
    g = data.draw(vectors((m.size,)))
    beta1, scale = data.draw(st.sampled_from([0.0, 0.9, 0.95])), data.draw(st.sampled_from([1.0, 0.37]))
    expected = beta1 * m + (1 - beta1) * scale * g
    out = np.empty_like(m)
    passes.momentum(m, g, beta1, scale, out)
    same(out, expected)
    passes.momentum(m, g, beta1, scale, m)
    same(m, expected)


@given(vectors((0, 1, 9, 2047, 2049, 4097)), st.data())
@checked
def test_nesterov(m, data):
    g, beta1 = data.draw(vectors((m.size,))), data.draw(st.sampled_from([0.0, 0.9, 0.95]))
    new, ahead = np.empty_like(m), np.empty_like(m)
    passes.nesterov(m, g, beta1, new, ahead)
    same(new, beta1 * m + (1 - beta1) * g)
    same(ahead, beta1 * new + (1 - beta1) * g)


@pytest.mark.parametrize("size", [1, 9, 4095, 4097, 70_000])
def test_in_range(size):
    """True exactly where `compensate` changes nothing and refuses nothing."""
    x = vector("gaussian", size, 0)
    assert passes.in_range(x)
    assert passes.in_range(np.zeros_like(x))
    largest = np.nextafter(np.float32(2.0**100), np.float32(0))
    for place in {0, size // 2, size - 1}:
        for value in (2.0**-126, -(2.0**-126), largest, -largest):
            x[place] = value
            assert passes.in_range(x)
        for value in (-0.0, 2.0**-127, -(2.0**-149), 2.0**100, -(2.0**100), np.inf, -np.inf, np.nan):
            x[place] = value
            assert not passes.in_range(x)
        x[place] = 0.0


@given(vectors((0, 1, 9, 4095, 4097)), st.data())
@checked
def test_descend(p, data):
    d = data.draw(vectors((p.size,)))
    rate, decay = data.draw(st.sampled_from([1e-3, 0.3])), data.draw(st.sampled_from([0.0, 1e-50, 0.01]))
    with np.errstate(all="ignore"):
        expected = p - rate * (d + decay * p if decay else d)
    out = np.empty_like(p)
    passes.descend(p, d, rate, decay, out)
    same(out, expected)
    passes.descend(p, d, rate, decay, p)
    same(p, expected)


@given(vectors((0, 1, 9, 4095, 4097)), st.sampled_from([0.95, 0.0, 2.0**-120]))
@checked
def test_scale(x, factor):
    scaled = np.float32(factor) * x
    out = np.empty_like(x)
    passes.scale(x, factor, out)
    same(out, np.where(np.abs(scaled) < 2.0**-126, np.float32(0), scaled))


def test_largest_sum():
    x, y = vector("wide", 9000, 1), vector("gaussian", 9000, 2)
    assert passes.largest_sum(x, y) == np.max(np.abs(x) + np.abs(y))
    y[77] = np.nan
    assert np.isnan(passes.largest_sum(x, y))


def test_largest_sum_reports_nan_wherever_it_is(monkeypatch):
    nothing = np.empty(0, dtype=F)
    assert passes.largest_sum(nothing, nothing) == 0
    monkeypatch.setattr(threads, "_LEAST_ELEMENTS", 1 << 12)
    kernels.set_num_threads(2)
    x = vector("wide", 3 * passes._RUN, 1)
    zeros = np.zeros_like(x)
    assert passes.largest_sum(x, zeros) == np.max(np.abs(x))
    for index in (0, x.size // 2, x.size - 1):
        bad = x.copy()
        bad[index] = -np.nan
        assert np.isnan(passes.largest_sum(bad, zeros))


def test_default_threads_are_shared_by_the_ranks_of_a_node():
    cores = threads.default_threads({})
    assert cores >= 1
    assert threads.default_threads({"MPI_LOCALNRANKS": str(cores)}) == 1
    assert threads.default_threads({"OMPI_COMM_WORLD_LOCAL_SIZE": str(4 * cores)}) == 1
    with pytest.raises(ValueError, match="threads is 0"):
        kernels.set_num_threads(0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_makes_its_own_threads():
    script = (
        "import os, numpy as np\n"
        "from qcomp.backends import numba_cpu as k\n"
        "from qcomp.backends.numba_cpu.vectors import largest_sum\n"
        "k.set_num_threads(2)\n"
        "x = np.ones(1 << 18, dtype=np.float32)\n"
        "assert largest_sum(x, x) == 2\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if largest_sum(x, x) == 2 else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


@pytest.mark.slow
def test_a_script_may_replace_print_before_kernels_are_imported():
    """So that rank 0 alone prints, as the references of torchvision do; numba looks builtins up as it is imported."""
    pytest.importorskip("numba")
    script = """if True:
        import builtins, functools, sys

        def setup_for_distributed(is_master):
            builtin_print = builtins.print
            def print(*args, **kwargs):
                if is_master:
                    builtin_print(*args, **kwargs)
            builtins.print = functools.partial(print) if sys.argv[1] == "partial" else print

        setup_for_distributed(True)
        replaced = builtins.print
        from qcomp.backends import registry
        registry.load("numba")
        assert builtins.print is replaced
    """
    for way in ("function", "partial"):
        subprocess.run([sys.executable, "-c", script, way], check=True, timeout=60)
