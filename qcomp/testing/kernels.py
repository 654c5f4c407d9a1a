"""Whether a set of kernels returns the same bytes as the pure version."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qcomp.core import feedback
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import QSGD, MinMaxUInt8, ScaledSign
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import KernelSet, use_kernels
from qcomp.core.random import Key
from qcomp.testing.contract import ContractError
from qcomp.testing.inputs import FAMILIES, sizes, vector, vectors
from qcomp.testing.laws import flushed
from qcomp.testing.libraries import Namespace, library_name, to_library, to_numpy

__all__ = ["check_kernels"]

Vector = np.ndarray[Any, Any]

COMPRESSORS: tuple[Compressor, ...] = (
    ScaledSign(bucket_size=8),
    ScaledSign(bucket_size=128, scale="rms"),
    ScaledSign(bucket_size=4096),
    *(QSGD(levels=levels, bucket_size=64) for levels in (1, 3, 7, 15, 31, 63, 127)),
    QSGD(levels=5, bucket_size=512, norm="l2"),
    MinMaxUInt8(bucket_size=64),
    MinMaxUInt8(bucket_size=2048),
)
"""One of each width and norm, with buckets that fit into a vector register and buckets that do not."""


class _Results(NamedTuple):
    """All that kernels compute from one vector and one residual."""

    payload: bytes
    payload_with_feedback: bytes
    residual: bytes
    decoded: bytes
    added: bytes


def check_kernels(
    kernels: KernelSet,
    xp: Namespace = np,
    *,
    compressors: Sequence[Compressor] = COMPRESSORS,
    max_examples: int = 30,
) -> None:
    """Check that a set of kernels returns the same bytes as the pure version.

    Payload, residual (in a buffer of its own and in the donated one), decompressed vector, and the sum with
    another one: equal to the last bit, for sizes at which tails and padding show and for values with zeros,
    subnormals, ties and huge magnitudes. A vector that the pure version refuses is refused, and a donated
    residual is then as it was.

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
        Naming every compressor for which bytes differ, and in what.

    Examples
    --------
    >>> import qcomp
    >>> from qcomp.backends.numba_cpu.kernel_set import KERNELS
    >>> check_kernels(KERNELS, compressors=[qcomp.ScaledSign(bucket_size=8)], max_examples=5)
    """
    broken = []
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
    for family in FAMILIES:
        for size in of_sizes:
            _compare(kernels, xp, compressor, vector(family, size, 0), bucket=0)
    for bad in (np.nan, np.inf, -np.inf, 2.0**100):
        _compare_refusals(kernels, xp, compressor, bad)

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(vectors(of_sizes), st.integers(0, 2**20))
    def run(x: Vector, bucket: int) -> None:
        _compare(kernels, xp, compressor, x, bucket)

    run()


def _compare(kernels: KernelSet, xp: Namespace, compressor: Compressor, x: Vector, bucket: int) -> None:
    expected = _compute(use_kernels(None), xp, compressor, x, bucket, donate=False)
    for donate in (False, True):
        got = _compute(use_kernels(kernels), xp, compressor, x, bucket, donate=donate)
        for name, a, b in zip(_Results._fields, got, expected, strict=True):
            assert a == b, f"{name} of {x.size} elements{' with a donated residual' if donate else ''}"


def _compute(
    context: AbstractContextManager[None],
    xp: Namespace,
    compressor: Compressor,
    x: Vector,
    bucket: int,
    *,
    donate: bool,
) -> _Results:
    key = Key(seed=5, step=3, tensor=2, rank=1, hop=1, bucket=bucket)
    old = flushed(np.roll(x, 1) * np.float32(0.5))
    with context:
        plain = compressor.compress(to_library(xp, x), key=key)
        payload, new = feedback.compress(
            compressor, to_library(xp, x), to_library(xp, old), key=key, donate=donate
        )
        decoded = compressor.decompress(payload, like=to_library(xp, x))
        added = compressor.add(payload, to_library(xp, old))
    parts = (plain.data, payload.data, new, decoded, added)
    return _Results(*(to_numpy(part).tobytes() for part in parts))


def _compare_refusals(kernels: KernelSet, xp: Namespace, compressor: Compressor, bad: float) -> None:
    size = compressor.traits.bucket_size + 9
    old = vector("gaussian", size, 1)
    calls: tuple[tuple[str, Callable[[Any, Any], object]], ...] = (
        ("compressed", lambda x, _: compressor.compress(x, key=Key())),
        ("with feedback", lambda x, r: feedback.compress(compressor, x, r, key=Key(), donate=True)),
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
