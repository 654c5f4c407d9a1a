"""Whether a set of kernels returns the same bytes as the pure version."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qcomp.core import feedback, primitives
from qcomp.core.arrays import is_mutable
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import QSGD, MinMaxUInt8, Scaled, ScaledSign, WholeFields
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import Blend, KernelSet, StepNumbers, use_kernels
from qcomp.core.random import Key
from qcomp.testing.contract import ContractError
from qcomp.testing.inputs import FAMILIES, flushed, sizes, vector, vectors
from qcomp.testing.libraries import Namespace, has_dtype, library_name, to_library, to_numpy

__all__ = ["check_kernels"]

Vector = np.ndarray[Any, Any]

COMPRESSORS: tuple[Compressor, ...] = (
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
    MinMaxUInt8(bucket_size=64),
    MinMaxUInt8(bucket_size=2048),
)
"""One of each width and norm, with buckets that fit into a vector register and buckets that do not; of the widths that
only a coder sees, the narrowest, the widest and one between, also with a factor that rounds to 1; and buckets that are
not full."""


class _Results(NamedTuple):
    """All that kernels compute from one vector and one residual."""

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
    """What is compressed, and how."""

    compressor: Compressor
    x: Vector
    dtype: str = "float32"
    bucket: int = 0


_WHERE = ("in an array of its own", "in the buffer of the old one", "in the buffer of x", "in a given buffer")
"""Where a new residual may lie."""


def check_kernels(
    kernels: KernelSet,
    xp: Namespace = np,
    *,
    compressors: Sequence[Compressor] = COMPRESSORS,
    max_examples: int = 30,
) -> None:
    """Check that a set of kernels returns the same bytes as the pure version.

    Payload, residual (in a buffer of its own, in the donated one, in that of x, in a given one), decompressed vector,
    and the sum with another one; the mean of two and of three payloads, compressed or not; the end of a mean over
    ranks, the momentum, and the step with a frozen variance: equal to the last bit, for sizes at which tails and
    padding show, for values with zeros, subnormals, ties and huge magnitudes, in every dtype that is computed in
    float32. A vector that the pure version refuses is refused, and a donated residual is then as it was.

    Parameters
    ----------
    kernels : KernelSet
    xp : namespace
        The array library to run on.
    compressors : sequence of Compressor
        What to compress with.
    max_examples : int
        How many vectors Hypothesis draws for each compressor.

    Raises
    ------
    ContractError
        Naming every compressor or primitive for which bytes differ, and in what.

    Examples
    --------
    >>> import qcomp
    >>> from qcomp.backends.numba_cpu.kernel_set import KERNELS
    >>> check_kernels(KERNELS, compressors=[qcomp.ScaledSign(bucket_size=8)], max_examples=5)
    """
    broken = []
    try:
        for size in (0, 1, 7, 1000, 4097):
            _compare_updates(kernels, xp, size, seed=size)
    except AssertionError as error:
        broken.append(f"- mean, momentum or step with a frozen variance: {error}")
    for compressor in compressors:
        try:
            _search(kernels, xp, compressor, max_examples)
        except AssertionError as error:
            broken.append(f"- {compressor.spec}: {error}")
    if broken:
        where = f"kernels {kernels.name!r} on {library_name(xp)}"
        raise ContractError(f"{where} differ from the pure version:\n" + "\n".join(broken))


def _search(kernels: KernelSet, xp: Namespace, compressor: Compressor, max_examples: int) -> None:
    of_sizes = sizes(compressor.traits.bucket_size)
    cases = [_Case(compressor, vector(family, size, 0)) for family in FAMILIES for size in of_sizes]
    for name in ("float16", "bfloat16"):
        if has_dtype(xp, name):
            cases += [_Case(compressor, vector("gaussian", size, 0), name) for size in of_sizes]
    for case in cases:
        _compare(kernels, xp, case, _WHERE)
    for bad in (np.nan, np.inf, -np.inf, 2.0**100):
        _compare_refusals(kernels, xp, compressor, bad)

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(vectors(of_sizes), st.integers(0, 2**20), st.sampled_from(_WHERE))
    def run(x: Vector, bucket: int, where: str) -> None:
        _compare(kernels, xp, _Case(compressor, x, bucket=bucket), [where])

    run()


def _compare(kernels: KernelSet, xp: Namespace, case: _Case, places: Sequence[str]) -> None:
    expected = _compute(None, xp, case, _WHERE[0])
    for where in places:
        got = _compute(kernels, xp, case, where)
        for name, a, b in zip(_Results._fields, got, expected, strict=True):
            assert a == b, f"{name} of {case.x.size} elements of {case.dtype}, with the new residual {where}"


def _compute(kernels: KernelSet | None, xp: Namespace, case: _Case, where: str) -> _Results:
    compressor, x, dtype, bucket = case

    def fresh() -> Any:
        return to_library(xp, x, dtype)

    key = Key(seed=5, step=3, tensor=2, rank=1, hop=1, bucket=bucket)
    given = fresh()
    old, m = (to_library(xp, flushed(np.roll(x, 1) * np.float32(0.5))) for _ in range(2))
    buffers = [None, old, given, to_library(xp, np.ones(x.size, dtype=np.float32))]
    out = buffers[_WHERE.index(where)]
    if out is not None and (out.dtype != old.dtype or not is_mutable(out)):
        out = None  # what was converted, or is immutable, cannot be donated
    with use_kernels(kernels):
        plain = compressor.compress(given, key=key)
        encoded = primitives.encode(compressor, given, old, key, out=out)
        primitives.require_accepted(compressor, encoded)
        payload = compressor.payload(old, encoded.data)
        like = fresh()
        decoded = compressor.decompress(payload, like=like)
        written = compressor.decompress(payload, like=like, out=like) if is_mutable(like) else decoded
        total = fresh()
        added = compressor.add(payload, total)
        last = encoded.residual
        mixed = primitives.encode(compressor, fresh(), last, key, blend=Blend(m, 0.9, 0.7))
        primitives.require_accepted(compressor, mixed)
        three = [compressor.payload(m, sent) for sent in (plain.data, mixed.data, encoded.data)]
        # Dividing by two may be multiplying, dividing by three may not.
        averages = [primitives.average(compressor, several, m) for several in (three, three[:2])]
        means = [primitives.compress_mean(compressor, three, m, r, key) for r in (None, m)]
        for of_mean in means:
            primitives.require_accepted(compressor, of_mean)
    parts = [plain.data, encoded.data, last, decoded, written, added, mixed.data, mixed.residual]
    parts += [*averages, means[0].data, means[1].data, means[1].residual]
    return _Results(*(to_numpy(part).tobytes() for part in parts))


def _compress_mean_of(compressor: Compressor, x: Any, residual: Any) -> None:
    sent = compressor.compress(x, key=Key())
    of_mean = primitives.compress_mean(compressor, [sent, sent], x, residual, Key())
    primitives.require_accepted(compressor, of_mean)


def _compare_updates(kernels: KernelSet, xp: Namespace, size: int, seed: int) -> None:
    """Compare the primitives that have no compressor."""
    wide, g = vector("wide", size, seed), vector("gaussian", size, seed + 1)
    v = np.abs(vector("sparse", size, seed + 2))  # zeros: elements that never had a gradient
    for decay in (0.0, 0.1):
        results = []
        for chosen in (None, kernels):
            with use_kernels(chosen):
                halves = primitives.finish_mean(to_library(xp, wide), 2)
                mean = primitives.finish_mean(to_library(xp, wide), 3)
                m = primitives.momentum(mean, to_library(xp, g), 0.9, 0.7)
                numbers = StepNumbers(rate=1e-3, correction=0.19, eps=1e-8, weight_decay=decay)
                p, masked = primitives.frozen_step(to_library(xp, g), m, to_library(xp, v), numbers)
            results.append([to_numpy(part).tobytes() for part in (halves, mean, masked, p)])
        for name, a, b in zip(("mean of two", "mean", "momentum", "parameters"), *results, strict=True):
            assert a == b, f"{name} of {size} elements"


def _compare_refusals(kernels: KernelSet, xp: Namespace, compressor: Compressor, bad: float) -> None:
    size = compressor.traits.bucket_size + 9
    old = vector("gaussian", size, 1)
    calls: tuple[tuple[str, Callable[[Any, Any], object]], ...] = (
        ("compressed", lambda x, _: compressor.compress(x, key=Key())),
        ("with feedback", lambda x, r: feedback.compress(compressor, x, r, key=Key(), donate=True)),
        ("owed by a server", lambda x, r: _compress_mean_of(compressor, r, x)),
    )
    for position, (what, call) in product((0, size // 2, size - 1), calls):
        x = vector("gaussian", size, 0)
        x[position] = bad
        residual = to_library(xp, old)
        with use_kernels(kernels):
            try:
                call(to_library(xp, x), residual)
            except NonFiniteError:
                pass
            else:
                raise AssertionError(f"{bad} at {position} of {size} was {what} without an error")
        assert to_numpy(residual).tobytes() == old.tobytes(), (
            f"{bad} at {position} changed a donated residual"
        )
