"""`check_kernels`: checks whether a kernel set returns the same bytes as the pure version."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qcomp.core import feedback, primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import (
    QSGD,
    Identity,
    LloydMax,
    MinMaxUInt8,
    Scaled,
    ScaledSign,
    TopK,
    WholeFields,
)
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import Blend, Encoded, KernelSet, use_kernels
from qcomp.core.numeric.arrays import LIMIT, exact_bounds, is_mutable
from qcomp.core.numeric.random import SHARED_RANK, Key
from qcomp.testing.environments import ENVIRONMENTS
from qcomp.testing.inputs import FAMILIES, doubles, flushed, sizes, vector, vectors
from qcomp.testing.kernel_arithmetic import BLENDS, check_low_rank, check_steps, check_updates
from qcomp.testing.kernel_chunks import check_chunks
from qcomp.testing.kernel_memory import LONG, Untouched, around_powers_of_two, laid_out
from qcomp.testing.law_groups import Attempt, Contract
from qcomp.testing.libraries import Namespace, Vector, has_dtype, library_name, to_library, to_numpy
from qcomp.testing.state_laws import FilesOfAuthor, interrupted

COMPRESSORS: tuple[Compressor, ...] = (
    Identity(),
    ScaledSign(bucket_size=8),
    ScaledSign(bucket_size=128, scale="rms"),
    ScaledSign(bucket_size=4096),
    *(QSGD(levels=levels, bucket_size=64) for levels in (1, 3, 7, 15, 31, 63, 127)),
    QSGD(levels=5, bucket_size=512, norm="l2"),
    Scaled(QSGD(levels=7, bucket_size=64)),
    WideQSGD(levels=128, bucket_size=64),
    WideQSGD(levels=32767, bucket_size=512, norm="l2"),
    Scaled(WideQSGD(levels=1000, bucket_size=64)),
    Scaled(WideQSGD(levels=32767, bucket_size=8)),
    WholeFields(QSGD(levels=7, bucket_size=64), field=9),
    WholeFields(Scaled(QSGD(levels=3, bucket_size=512, norm="l2")), field=25),
    LloydMax(bits=1, bucket_size=64),
    LloydMax(bits=2, bucket_size=8),
    LloydMax(bits=3, bucket_size=128),
    LloydMax(bits=4, bucket_size=512),
    MinMaxUInt8(bucket_size=64),
    MinMaxUInt8(bucket_size=2048),
    TopK(k=5, bucket_size=64),
    TopK(k=20, bucket_size=512, value_bits=2, coding="fixed"),
    TopK(k=40, bucket_size=64, value_bits=4, coding="fixed"),
    TopK(k=1, bucket_size=8, value_bits=1, coding="fixed"),
)
"""One compressor of each width and norm, with buckets that fit into a vector register and buckets that do not. Of the
widths that only coders use, the narrowest, the widest and one between them are included, also with a factor that rounds
to 1. Some buckets are not full."""


class _Results(NamedTuple):
    """All results of kernels for one vector and one residual."""

    payload: bytes
    payload_with_feedback: bytes
    residual: bytes
    decoded: bytes
    written: bytes
    added: bytes
    payload_of_momentum: bytes
    residual_of_momentum: bytes
    mean: bytes
    mean_of_two: bytes
    payload_of_mean: bytes
    payload_of_mean_with_feedback: bytes
    residual_of_mean: bytes


class _Case(NamedTuple):
    """The inputs of a comparison."""

    compressor: Compressor
    x: Vector
    dtype: str = "float32"
    key: Key = Key(seed=5, step=3, tensor=2, rank=1, hop=1)
    blend: tuple[float, ...] = (0.9, 0.7)
    """The numbers of the blend: beta1 and scale of the momentum, perhaps factors."""
    layout: str = "dense"


_WEIGHTED = ((0.9, 0.7, 0.37, 1.0), (0.9, 1.0, 1.0, 2.3), (0.5, 0.3, 3.1, 1e-3))
"""The numbers of blends with a factor or a weight other than 1."""
_WHERE = ("in a new array", "in the buffer of the old one", "in the buffer of x", "in a given buffer")
"""Possible buffers of a new residual."""

_KEYS = (
    Key(),
    Key(seed=2**32),
    Key(seed=2**63 + 5, step=2**31, rank=2**31),
    Key(seed=2**64 - 1, step=2**64 - 1, tensor=2**32 - 1, rank=SHARED_RANK, hop=2**32 - 1, bucket=2**20),
    Key(seed=1, step=2**33 + 1, tensor=2**16, rank=255, hop=2**31),
    Key(seed=1, bucket=2**24 + 3),
    Key(seed=1, hop=7, bucket=2**31 - 1),
    Key(seed=1, rank=1, bucket=2**32 - 2),
)
"""Keys with high bits in every part, and with buckets whose lane numbers exceed 32 bits."""

_LAYOUTS = ("strided", "offset", "backwards")
_LONG_CALLS = 12
"""Calls with long vectors, in several threads. In fewer calls, threads may miss each other."""


def check_kernels(
    kernels: KernelSet,
    xp: Namespace = np,
    *,
    compressors: Sequence[Compressor] = COMPRESSORS,
    max_examples: int = 30,
) -> None:
    """Check that a kernel set returns the same bytes as the pure version.

    Results must be equal to the last bit. For one vector these are the payload, the residual (in a new buffer, the
    donated one, the buffer of x, and a given one), the decompressed vector, and its sum with another vector. For
    several ranks: the mean of two and of three payloads, compressed or not, and the division of a sum. For optimizers:
    the momentum, and the steps of Adam, also of several tensors at once and in donated buffers. For chunks of several
    tensors: messages and their decompressed contents. For PowerSGD: the product of two factors, and a matrix minus this
    product. Sizes are chosen so that tails and padding matter. Values include zeros, subnormals, ties and huge
    magnitudes. The dtypes are all dtypes that are computed in float32, and float64 if the kernel set takes it. A vector
    that the pure version refuses must be refused, and a donated residual must then be unchanged. Calls of several
    threads must not disturb each other.

    Parameters
    ----------
    kernels : KernelSet
        The kernels to check.
    xp : namespace
        The array library to run on.
    compressors : sequence of Compressor
        The compressors to use.
    max_examples : int
        Number of vectors that Hypothesis draws for each compressor.

    Raises
    ------
    ContractError
        If bytes differ. The error names every compressor or primitive with a difference, and the difference.

    Examples
    --------
    >>> import qcomp
    >>> from qcomp.backends.numba_cpu.kernel_set import KERNELS
    >>> check_kernels(KERNELS, compressors=[qcomp.ScaledSign(bucket_size=8)], max_examples=5)
    """
    kernel_contract(kernels, xp, compressors, max_examples).require()


def kernel_contract(
    kernels: KernelSet,
    xp: Namespace,
    compressors: Sequence[Compressor] = COMPRESSORS,
    max_examples: int = 30,
) -> Contract:
    """Return the laws about a kernel set: one for each compressor, and one for each kind of primitive."""
    laws: list[Attempt] = [
        ("mean, momentum or step with a frozen variance", lambda: check_updates(kernels, xp)),
        ("steps of Adam", lambda: check_steps(kernels, xp)),
        ("matrices of low rank", lambda: check_low_rank(kernels, xp)),
        ("buffers", lambda: _check_buffers(kernels, xp)),
        ("threads", lambda: _check_threads(kernels, xp, compressors)),
        ("environment", lambda: _check_environments(kernels, xp, compressors)),
        ("chunks", lambda: check_chunks(kernels, xp, compressors)),
    ]
    laws += [
        (compressor.spec, partial(_search, kernels, xp, compressor, max_examples))
        for compressor in compressors
    ]
    return Contract(f"the kernel set {kernels.name!r} on {library_name(xp)}", [laws])


def _search(kernels: KernelSet, xp: Namespace, compressor: Compressor, max_examples: int) -> None:
    bucket = compressor.traits.bucket_size
    of_sizes = sizes(bucket)
    cases = [
        _Case(compressor, vector(family, size, 0))
        for family in FAMILIES
        for size in (9, 2 * max(bucket, 8) + 5)
    ]
    for name in ("float16", "bfloat16", "float64"):
        if has_dtype(xp, name):
            drawn = [vector("gaussian", size, 0) for size in of_sizes]
            cases += [_Case(compressor, doubles(x, 0) if name == "float64" else x, name) for x in drawn]
    exact = compressor.traits.lossless
    limit = exact_bounds(to_library(xp, vector("gaussian", 1, 0)))[1] if exact else LIMIT
    for bad in (np.nan, np.inf, -np.inf, limit, -limit):
        _compare_refusals(kernels, xp, compressor, bad)
    for case in cases:
        _compare(kernels, xp, case, _WHERE[1:])
    wide = vector("gaussian", 2 * bucket + 5, 1)
    others = [_Case(compressor, wide, key=key) for key in _KEYS]
    others += [_Case(compressor, wide, blend=blend) for blend in (*BLENDS, *_WEIGHTED)]
    others += [_Case(compressor, x) for x in _ties(compressor)]
    others += [
        _Case(compressor, vector("wide", size, 2))
        for size in around_powers_of_two(1 << 13)
        if size <= 1 << 13
    ]
    others += [_Case(compressor, vector("uniform", size, 3)) for size in LONG]
    for number, case in enumerate(others):
        _compare(kernels, xp, case, [_WHERE[1 + number % 3]])
    for layout in _LAYOUTS:
        for size in (9, 2 * bucket + 5):
            case = _Case(compressor, vector("gaussian", size, 4), layout=layout)
            _compare(kernels, xp, case, _WHERE[1:])
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17):
        _compare_means(kernels, xp, compressor, count)
    _check_repeated(kernels, xp, compressor)
    _compare_payload_of_float64(kernels, xp, compressor)

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(vectors(of_sizes), st.integers(0, 2**20), st.sampled_from(_WHERE[1:]))
    def run(x: Vector, bucket: int, where: str) -> None:
        _compare(kernels, xp, _Case(compressor, x, key=_KEYS[1].at(bucket=bucket)), [where])

    run()


def _ties(compressor: Compressor) -> list[Vector]:
    """Return vectors with ties in rounding, and with several largest elements."""
    size = 2 * compressor.traits.bucket_size + 5
    rng = np.random.default_rng([size, 9])
    found = []
    for top in sorted({1, 5, 127, 255, int(getattr(compressor, "levels", 7))}):
        steps = rng.integers(-2 * top, 2 * top + 1, size) / 2.0
        steps[:: max(8, compressor.traits.bucket_size // 4)] = top
        found.append(steps)
        halves = rng.integers(-top, top, size) + rng.integers(0, 1 << 17, size) / 2.0**17  # halves of a draw
        halves[:: max(8, compressor.traits.bucket_size // 4)] = top
        found.append(halves)
    levels = rng.integers(0, 256, size) + rng.choice([0.0, 0.5], size)
    levels[::7], levels[3::7] = 0.0, 255.0
    found += [
        levels,
        levels + 3.0,
        -levels,
        np.where(rng.random(size) < 0.5, -0.0, 0.0),
        np.full(size, 2.0**-126),
    ]
    found += [np.where(rng.random(size) < 0.5, -1.0, 1.0), np.full(size, 1.5 * 2.0**98)]
    return [np.asarray(x, dtype=np.float32) for x in found]


def _compare(kernels: KernelSet, xp: Namespace, case: _Case, places: Sequence[str]) -> None:
    """Compare all results once, with the new residual in each of these places."""
    x = laid_out(xp, case.x, case.layout, case.dtype)[0]
    if case.dtype == "float64" and not kernels.takes(x):
        return  # the kernels leave it to the pure version
    try:
        expected = _compute(None, xp, case)
    except NonFiniteError:  # a sum of values below 2^100 may exceed 2^100, which leaves nothing to compare
        return
    what = f"of {case.x.size} elements of {case.dtype}, {case.layout}, under {case.key}"
    got = _compute(kernels, xp, case)
    for name, a, b in zip(_Results._fields, got, expected, strict=True):
        assert a == b, f"{name} {what}"
    for where in places:
        untouched = Untouched()
        with use_kernels(kernels):
            encoded, check_memory = _with_feedback(xp, case, where, untouched)
        untouched.check()
        check_memory()
        assert to_numpy(encoded.data).tobytes() == expected.payload_with_feedback, (
            f"payload_with_feedback {what}, with the new residual {where}"
        )
        assert to_numpy(encoded.residual).tobytes() == expected.residual, (
            f"residual {what}, with the new residual {where}"
        )


def _with_feedback(
    xp: Namespace, case: _Case, where: str, untouched: Untouched
) -> tuple[Encoded, Callable[[], None]]:
    """Compress with feedback, with the new residual in one of the places; also return a check of the memory around it.

    Inputs that must not change are added to ``untouched``.
    """
    compute = "float64" if case.dtype == "float64" else "float32"
    given, given_memory = laid_out(xp, case.x, case.layout, case.dtype)
    old, old_memory = laid_out(xp, _half(case.x), case.layout, compute)
    room, room_memory = laid_out(xp, np.ones(case.x.size, dtype=np.float32), case.layout, compute)
    out = [None, old, given, room][_WHERE.index(where)]
    if out is not None and (out.dtype != old.dtype or not is_mutable(out)):
        out = None  # converted or immutable arrays cannot be donated
    around = to_numpy(room_memory) if is_mutable(room_memory) else None
    if out is not given:
        untouched.keep("x", given_memory)
    if out is not old:
        untouched.keep("the old residual", old_memory)
    encoded = primitives.encode(case.compressor, given, old, case.key, out=out)
    primitives.require_accepted(case.compressor, encoded)
    if out is not None and out is not old:  # the old residual may stay unchanged
        _check_same(encoded.residual, out, "the new residual is not in the given buffer")

    def check_memory() -> None:
        if around is not None and out is room:
            _check_around(room_memory, around, case.layout, case.x.size)

    return encoded, check_memory


def _half(x: Vector) -> Vector:
    """Return old residuals and momenta: half of x, shifted by one."""
    return flushed(np.roll(x, 1) * np.float32(0.5))


def _compute(kernels: KernelSet | None, xp: Namespace, case: _Case) -> _Results:
    compressor, x, dtype, key, blend, layout = case

    def fresh() -> Any:
        return laid_out(xp, x, layout, dtype)[0]

    untouched = Untouched()
    m, m_memory = laid_out(xp, _half(x), layout, "float64" if dtype == "float64" else "float32")
    untouched.keep("m", m_memory)
    with use_kernels(kernels):
        plain = compressor.compress(fresh(), key=key)
        untouched.keep("a payload", plain.data)
        encoded, _ = _with_feedback(xp, case, _WHERE[0], untouched)
        payload = compressor.payload(m, encoded.data)
        untouched.keep("a payload", payload.data)
        like = fresh()
        decoded = compressor.decompress(payload, like=like)
        written = compressor.decompress(payload, like=like, out=like) if is_mutable(like) else decoded
        total = fresh()
        added = compressor.add(payload, total)
        last = encoded.residual
        untouched.keep("the residual", last)
        mixed = primitives.encode(compressor, fresh(), last, key, blend=Blend(m, *blend))
        primitives.require_accepted(compressor, mixed)
        three = [compressor.payload(m, sent) for sent in (plain.data, mixed.data, encoded.data)]
        # A kernel may divide by two with a multiplication, but not by three.
        averages = [primitives.average(compressor, several, m) for several in (three, three[:2])]
        means = [primitives.compress_mean(compressor, three, m, r, key) for r in (None, m)]
        for of_mean in means:
            primitives.require_accepted(compressor, of_mean)
    untouched.check()
    parts = [plain.data, encoded.data, last, decoded, written, added, mixed.data, mixed.residual]
    parts += [*averages, means[0].data, means[1].data, means[1].residual]
    return _Results(*(to_numpy(part).tobytes() for part in parts))


def _check_same(result: Any, buffer: Any, message: str) -> None:
    """Check that a result is in a buffer, perhaps through another array object."""
    assert to_numpy(result).tobytes() == to_numpy(buffer).tobytes(), message


def _check_around(memory: Any, before: Vector, layout: str, size: int) -> None:
    """Check that a residual in a given buffer left the surrounding memory unchanged."""
    after = to_numpy(memory)
    outside = {"strided": slice(1, None, 2), "offset": slice(0, 5)}.get(layout, slice(0, 0))
    assert after[outside].tobytes() == before[outside].tobytes(), (
        "the memory between the elements of out was written to"
    )
    if layout == "offset":
        assert after[5 + size :].tobytes() == before[5 + size :].tobytes(), (
            "the memory behind out was written to"
        )


def _compare_means(kernels: KernelSet, xp: Namespace, compressor: Compressor, count: int) -> None:
    """Compare the mean of payloads of many ranks, in a new array and in a given one."""
    for size in (9, max(2500, 2 * compressor.traits.bucket_size + 5)):
        sent = [
            compressor.compress(to_library(xp, vector("wide", size, 50 + rank)), key=Key(rank=rank))
            for rank in range(count)
        ]
        results = []
        for chosen in (None, kernels):
            like = to_library(xp, vector("gaussian", size, 49))
            residual = to_library(xp, vector("gaussian", size, 48))
            untouched = Untouched()
            for payload in sent:
                untouched.keep("a payload", payload.data)
            untouched.keep("like", like)
            untouched.keep("the residual of a server", residual)
            room, memory = laid_out(xp, np.ones(size, dtype=np.float32), "offset")
            around = to_numpy(memory)
            owed, owed_memory = laid_out(xp, np.ones(size, dtype=np.float32), "offset")
            with use_kernels(chosen):
                own = primitives.average(compressor, sent, like)
                mutable = is_mutable(room)
                filled = primitives.average(compressor, sent, like, out=room if mutable else None)
                if mutable:
                    _check_same(filled, room, "the mean is not in the given buffer")
                of_mean = primitives.compress_mean(
                    compressor, sent, like, residual, Key(hop=1), out=owed if mutable else None
                )
                primitives.require_accepted(compressor, of_mean)
            untouched.check()
            if mutable:
                _check_around(memory, around, "offset", size)
                _check_around(owed_memory, around, "offset", size)
            results.append(
                [to_numpy(part).tobytes() for part in (own, filled, of_mean.data, of_mean.residual)]
            )
        names = ("mean", "mean in a given buffer", "payload of the mean", "residual of the mean")
        for name, a, b in zip(names, *results, strict=True):
            assert a == b, f"{name} of {count} payloads of {size} elements"


def _check_repeated(kernels: KernelSet, xp: Namespace, compressor: Compressor) -> None:
    """Check that a call neither changes the results of earlier calls nor depends on them."""
    size = 2 * compressor.traits.bucket_size + 5
    x, residual = (to_library(xp, vector("gaussian", size, seed)) for seed in (60, 61))
    other = to_library(xp, -vector("positive", size, 62))

    with use_kernels(kernels):
        first = _several(compressor, x, residual)
        before = [to_numpy(part).tobytes() for part in first]
        _several(compressor, other, residual)
        after = [to_numpy(part).tobytes() for part in first]
        again = [to_numpy(part).tobytes() for part in _several(compressor, x, residual)]
        refilled = _refilled(compressor, x, other)
    assert after == before, "a call wrote to the result of an earlier one"
    assert again == before, "the same call had two results"
    assert refilled, "a payload whose buffer has been filled again has the old decompressed values"


def _compare_payload_of_float64(kernels: KernelSet, xp: Namespace, compressor: Compressor) -> None:
    """Compare the float32 values of a decompressed float64 payload, whose layout may not be that of float32."""
    if not has_dtype(xp, "float64"):
        return
    x = vector("gaussian", 2 * compressor.traits.bucket_size + 5, 64)
    wide, like = (to_library(xp, x.astype(dtype)) for dtype in ("float64", "float32"))
    with use_kernels(None):
        payload = compressor.compress(wide, key=Key(seed=1))
        expected = to_numpy(compressor.decompress(payload, like=like)).tobytes()
    with use_kernels(kernels):
        found = to_numpy(compressor.decompress(payload, like=like)).tobytes()
    assert found == expected, "a payload of float64, decompressed in float32"


def _several(compressor: Compressor, x: Any, residual: Any) -> list[Any]:
    """Return results of several primitives."""
    payload = compressor.compress(x, key=Key(seed=2))
    encoded = primitives.encode(compressor, x, residual, Key(seed=2))
    decoded = compressor.decompress(payload, like=x)
    mean = primitives.average(compressor, [payload, payload, payload], x)
    of_mean = primitives.compress_mean(compressor, [payload] * 3, x, residual, Key(seed=2))
    m = primitives.momentum(residual, x, 0.9, 1.0)
    return [payload.data, encoded.data, encoded.residual, decoded, mean, of_mean.data, of_mean.residual, m]


def _check_threads(kernels: KernelSet, xp: Namespace, compressors: Sequence[Compressor]) -> None:
    """Check that calls in several threads at the same time share no scratch memory, for one compressor of each class.

    Between lines of the author's code, another thread makes a complete call. Compiled code cannot be interrupted so:
    there, threads compress long vectors at the same time.
    """
    files = FilesOfAuthor(type(kernels))
    for compressor in {type(c): c for c in compressors}.values():
        size = 2 * compressor.traits.bucket_size + 5
        x, residual = (to_library(xp, vector("gaussian", size, seed)) for seed in (60, 61))
        other = to_library(xp, -vector("positive", size, 62))

        def call(array: Any, compressor: Compressor = compressor, residual: Any = residual) -> list[bytes]:
            with use_kernels(kernels):
                return [to_numpy(part).tobytes() for part in _several(compressor, array, residual)]

        expected, expected_other = call(x), call(other)
        got, others = interrupted(partial(call, x), partial(call, other), files)
        assert got == expected, (
            f"with {compressor}, a call in another thread at the same time changes the result"
        )
        assert all(of_other == expected_other for of_other in others), (
            f"with {compressor}, a call during another thread's call has another result"
        )
        _check_long_calls(kernels, xp, compressor)


def _check_long_calls(kernels: KernelSet, xp: Namespace, compressor: Compressor) -> None:
    """Check calls with long vectors of four threads at the same time, which compiled code may share between threads."""
    long = [[to_library(xp, vector("gaussian", LONG[-1], 2 * i + j)) for j in range(2)] for i in range(2)]

    def call(number: int, kernels: KernelSet | None = kernels) -> list[bytes]:
        with use_kernels(kernels):
            return [to_numpy(part).tobytes() for part in _several(compressor, *long[number % 2])]

    expected = [call(number, None) for number in range(2)]
    with ThreadPoolExecutor(4) as pool:
        for number, got in enumerate(pool.map(call, range(_LONG_CALLS))):
            assert got == expected[number % 2], (
                f"with {compressor}, calls with long vectors in several threads differ from the pure version"
            )


def _check_environments(kernels: KernelSet, xp: Namespace, compressors: Sequence[Compressor]) -> None:
    """Check that bytes do not depend on the environment, for one compressor of each class."""
    for compressor in {type(c): c for c in compressors}.values():
        case = _Case(compressor, vector("gaussian", 2 * compressor.traits.bucket_size + 5, 63))
        _compare(kernels, xp, case, ())
        for name, context in ENVIRONMENTS.items():
            try:
                with context(2):
                    _compare(kernels, xp, case, ())
            except AssertionError as error:
                raise AssertionError(f"with {name}, another {error}") from error


def _refilled(compressor: Compressor, x: Any, other: Any) -> bool:
    """Return whether a payload decompresses to other values once its buffer holds another payload."""
    first, second = (compressor.compress(array, key=Key(seed=2)) for array in (x, other))
    expected = to_numpy(compressor.decompress(second, like=other)).tobytes()
    compressor.decompress(first, like=x)
    if not is_mutable(first.data) or first.data.shape != second.data.shape:
        return True
    first.data[...] = second.data
    return to_numpy(compressor.decompress(first, like=x)).tobytes() == expected


def _check_buffers(kernels: KernelSet, xp: Namespace) -> None:
    """Check that new buffers have the right shape and dtype, and their own memory."""
    for shape in ((0,), (7,), (3, 5), (4096,), (100_000,)):
        x = to_library(xp, np.zeros(shape, dtype=np.float32))
        if not kernels.takes(x):
            return
        with use_kernels(kernels):
            buffers: list[Any] = [primitives.empty_like(x), primitives.empty_like(x)]
        one, two = buffers
        if one is None or two is None:  # arrays are immutable
            continue
        for buffer in buffers:
            found = tuple(buffer.shape)
            assert found == shape, f"empty_like has shape {found}; expected {shape}"
            assert buffer.dtype == x.dtype, f"empty_like has dtype {buffer.dtype}; expected {x.dtype}"
        one[...], two[...] = 1.0, 2.0
        assert np.all(to_numpy(one) == 1), "two buffers of empty_like share memory"
        assert not np.any(to_numpy(x)), "empty_like shares memory with its argument"


def _compress_mean_of(compressor: Compressor, x: Any, residual: Any) -> None:
    sent = compressor.compress(x, key=Key())
    of_mean = primitives.compress_mean(compressor, [sent, sent], x, residual, Key())
    primitives.require_accepted(compressor, of_mean)


def _compare_refusals(kernels: KernelSet, xp: Namespace, compressor: Compressor, bad: float) -> None:
    size = compressor.traits.bucket_size + 9
    old = vector("gaussian", size, 1)
    calls: tuple[tuple[str, Callable[[Any, Any], object]], ...] = (
        ("compressed", lambda x, _: compressor.compress(x, key=Key())),
        ("with feedback", lambda x, r: feedback.compensated(compressor, x, r, key=Key(), donate=True)),
        ("taken in a server's residual", lambda x, r: _compress_mean_of(compressor, r, x)),
    )
    places = sorted({0, 1, 7, 8, min(13, size - 1), size // 2, size - 9, size - 2, size - 1})
    for position, (what, call) in product(places, calls):
        x = vector("gaussian", size, 0).astype(np.float64)
        x[position] = bad
        residual = to_library(xp, old)
        before = to_numpy(residual).tobytes()
        with use_kernels(kernels):
            try:
                call(to_library(xp, x, "float32"), residual)
            except NonFiniteError:
                pass
            else:
                raise AssertionError(f"{bad} at {position} of {size} was {what} without an error")
        assert to_numpy(residual).tobytes() == before, f"{bad} at {position} changed a donated residual"
