"""`rehearse`: compiles kernels before training begins, not in the middle of it."""

from collections.abc import Iterable
from dataclasses import fields

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.kernels import AdamNumbers, Blend, FreshNumbers, StepNumbers, chosen
from qcomp.core.numeric.arrays import Array, array_namespace, device, to_compute_dtype
from qcomp.core.numeric.random import Key
from qcomp.core.primitives import empty_like

_SIZE = 1001
"""Number of elements: enough for coding to shorten payloads, and not a whole number of buckets of any compressor."""
_APART = (64, 3)
"""Distances between nonzero elements: a coder may have one code for sparse vectors, and another for dense ones."""
_STEP = StepNumbers(rate=0.0, correction=1.0, eps=1.0, weight_decay=0.0)


def rehearse(compressors: Iterable[Compressor], like: Array, *, steps: bool, low_rank: bool = False) -> None:
    """Call every primitive once, so that its kernel is compiled, or read from a cache.

    This does nothing without kernels, or if kernels are compiled anew for each shape. It skips compressors of other
    packages: qcomp has no kernels for them, and they may not expect this artificial vector. ``like`` gives the library,
    the device and the dtype of the vectors that will be compressed, ``steps`` says whether there will be steps of an
    optimizer, and ``low_rank`` whether matrices will be approximated by factors.
    """
    if not getattr(chosen(like), "any_shape", False):
        return
    xp = array_namespace(like)
    different = {c.spec: c for c in compressors if _is_ours(c)}.values()
    for apart in _APART:
        values = [float(i % apart == 0) for i in range(_SIZE)]
        x = xp.asarray(values, dtype=like.dtype, device=device(like))
        for compressor in different:
            _exchange(compressor.for_shape((_SIZE,)), x)
    if steps:
        _step(x)
    if low_rank:
        wide = to_compute_dtype(x)
        matrix, _ = primitives.compensate(wide, wide, what="a rehearsal", out=empty_like(wide))
        row = array_namespace(wide).reshape(wide, (1, _SIZE))
        primitives.take_low_rank(row[:, :1], row, matrix)


def _is_ours(compressor: Compressor) -> bool:
    """Return whether a compressor, and all compressors inside it, are this package's own."""
    inside = (getattr(compressor, f.name) for f in fields(compressor))
    return type(compressor).__module__.startswith("qcomp.") and all(
        _is_ours(c) for c in inside if isinstance(c, Compressor)
    )


def _exchange(compressor: Compressor, x: Array) -> None:
    """Compress and average a vector, with feedback and without, as gradients and means are compressed."""
    values = to_compute_dtype(x)
    residual, key = array_namespace(values).zeros_like(values), Key()
    data = [
        primitives.encode(compressor, x, None, key).data,
        primitives.encode(
            compressor, x, residual, key, out=empty_like(residual), blend=Blend(residual, 0.5, 1.0)
        ).data,
    ]
    payloads = [compressor.payload(values, each) for each in data]
    primitives.compress_mean(compressor, payloads, values, residual, key)
    primitives.average(compressor, payloads, values)
    if compressor.traits.lossless:  # a single rank only checks its values
        primitives.in_range(values)
        primitives.compensate(values, None, what="a rehearsal")


def _step(x: Array) -> None:
    values = to_compute_dtype(x)
    m, v, g = (array_namespace(values).zeros_like(values) for _ in range(3))
    primitives.momentum(m, g, 0.5, 1.0)
    primitives.nesterov(m, g, 0.5)
    primitives.descend(x, g, 0.0, 0.0)
    primitives.scale(m, 0.0)
    primitives.adam_steps([x], [m], [v], [g], [AdamNumbers((0.5, 0.5), 1.0, 0.0, _STEP)])
    primitives.adam_directions([x], [m], [v], [g], [AdamNumbers((0.5, 0.5), 1.0, 0.0, _STEP)])
    primitives.frozen_steps([x], [m], [v], [_STEP])
    primitives.sums_of_squares([g])
    primitives.fresh_variances([g], [m], [v], [v], [FreshNumbers((0.5, 0.5), 1.0, 1.0)])
