"""Stores that bypass the caches, for results larger than the caches.

An ordinary store first reads the line that it will overwrite, which doubles a decoder's traffic. Stores past the caches
avoid that; the C library uses them for large copies. Whether they pay depends on the processor. With them a sign
decoder takes a third less time on an Ice Lake Xeon. It takes two thirds more on a Zen 4 EPYC, which writes past its
caches at a fifth of its read rate.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import extending, types

from qcomp.backends.numba_cpu.jit import Floats, inline
from qcomp.backends.numba_cpu.primitives import by_width

_LANES = 8
"""Elements of a vector store: in float32 32 bytes, the width of AVX. Without AVX the compiler splits it."""
_LARGE = 1 << 23
"""An array with at least this many elements is no longer in the caches when it is read."""
_SLOW = binding.get_host_cpu_name().startswith("znver")


def pays(size: int) -> bool:
    """Return whether to stream this many elements: if they exceed the caches, and the processor streams fast."""
    return size >= _LARGE and not _SLOW


@extending.intrinsic
def _stream_vector(typing_context: Any, target: Any, source: Any, start: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Copy a vector, beginning at ``start``, where the target is aligned."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size = target.dtype.bitwidth // 8
        vector = ir.VectorType(context.get_value_type(target.dtype), _LANES)
        to, come = (
            builder.bitcast(
                builder.gep(context.make_array(kind)(context, builder, array).data, [arguments[2]]),
                vector.as_pointer(),
            )
            for kind, array in zip(signature.args[:2], arguments[:2], strict=True)
        )
        past_the_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        values = builder.load(come)
        values.align = size
        store = builder.store(values, to)
        store.align = size * _LANES
        store.set_metadata("nontemporal", past_the_caches)
        return context.get_dummy_value()

    return types.void(target, source, types.int64), generate


@extending.intrinsic
def finish_streams(typing_context: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Wait until all streamed data is visible to other threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@inline
def stream(target: Floats, source: Floats) -> None:
    """Copy an array past the caches."""
    head = min(target.size, -(target.ctypes.data // by_width(target, 4, 8)) & (_LANES - 1))
    for i in range(head):
        target[i] = source[i]
    end = head + (target.size - head) // _LANES * _LANES
    for i in range(head, end, _LANES):
        _stream_vector(target, source, i)
    for i in range(end, target.size):
        target[i] = source[i]
