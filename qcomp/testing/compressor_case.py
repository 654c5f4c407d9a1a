"""A compressor that runs on an array library, called with NumPy arrays."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from qcomp.core import feedback
from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.numeric.buckets import Block
from qcomp.core.numeric.random import Key, replace_draws
from qcomp.core.payload import Payload
from qcomp.testing.libraries import Namespace, Vector, has_dtype, library_name, to_library, to_numpy

Source = Callable[[Key, Block], Any]


class Encoding(NamedTuple):
    """The result of compressing a vector."""

    data: bytes
    """The payload."""
    decoded: Vector
    residual: Vector
    """The residual after error feedback; zeros without feedback."""


class Case:
    """A compressor, an array library, and whether it runs under `jax.jit`."""

    def __init__(
        self, compressor: Compressor, xp: Namespace, *, jit: bool = False, thorough: bool = False
    ) -> None:
        self.compressor = compressor
        self.xp = xp
        self.jit = jit
        self.thorough = thorough
        self.first_calls: list[tuple[bytes, bytes]] = []
        """Results of the very first calls, to compare with later ones."""

    def __repr__(self) -> str:
        return f"{self.compressor.spec} on {library_name(self.xp)}{' under jit' if self.jit else ''}"

    @cached_property
    def on_numpy(self) -> "Case":
        """The same compressor on NumPy."""
        return Case(self.compressor, np, thorough=self.thorough)

    def array(self, values: Vector, dtype: str | None = None) -> Any:
        """Return a NumPy array in the library of the case, in the same dtype unless another is given."""
        return to_library(self.xp, values, dtype)

    def compress(self, x: Vector, *, key: Key = Key(seed=1), source: Source | None = None) -> Encoding:  # noqa: B008
        """Compress and decompress x."""
        return self._run([self.array(x)], key, source)

    def compress_with_feedback(
        self,
        x: Vector,
        residual: Vector,
        *,
        key: Key = Key(seed=1),  # noqa: B008
        dtype: str | None = None,
    ) -> Encoding:
        """Compress x plus the residual, in another dtype if given, and decompress."""
        return self._run([self.array(x, dtype), self.array(residual)], key, None)

    def _run(self, arrays: list[Any], key: Key, source: Source | None) -> Encoding:
        run = self._jitted if self.jit else self._eager
        with np.errstate(all="ignore"):  # NumPy warns of overflow before the documented error
            data, decoded, lost = run(arrays, key, source)
        return Encoding(to_numpy(data).tobytes(), to_numpy(decoded), to_numpy(lost))

    def _eager(self, arrays: list[Any], key: Key, source: Source | None) -> tuple[Any, Any, Any]:
        x, *residual = arrays
        with nullcontext() if source is None else replace_draws(source):
            if residual:
                payload, lost = feedback.compensated(self.compressor, x, residual[0], key=key)
            else:
                payload, lost = self.compressor.compress(x, key=key), x * 0
            return payload.data, self.compressor.decompress(payload, like=x), lost

    def _jitted(self, arrays: list[Any], key: Key, source: Source | None) -> tuple[Any, Any, Any]:
        if source not in self._compiled:
            import jax  # noqa: PLC0415 - only a case under jit needs it

            self._compiled[source] = jax.jit(lambda arrays, key: self._eager(arrays, key, source))
        results: tuple[Any, Any, Any] = self._compiled[source](arrays, key)
        return results

    @cached_property
    def _compiled(self) -> dict[Source | None, Callable[..., Any]]:
        """The compiled functions, one for each source of draws; jit itself caches a program for each shape."""
        return {}

    @cached_property
    def plain(self) -> "Case":
        """The case without its coder; a separate law says that the coder is lossless."""
        coder = self.compressor.coder
        if coder is None:
            return self
        assert isinstance(coder.plain, Compressor)
        return Case(coder.plain, self.xp, jit=self.jit, thorough=self.thorough)

    @cached_property
    def of_shapes(self) -> tuple["Case", ...]:
        """The case itself and, if buckets depend on a tensor's shape, the cases for narrow matrices."""
        shaped = [self.compressor.for_shape(shape) for shape in ((32, 9), (64, 3))]
        others = [each for each in dict.fromkeys(shaped) if each != self.compressor]
        made = [Case(each, self.xp, jit=self.jit, thorough=self.thorough) for each in others]
        return (self, *made)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the library can compute in."""
        return ("float32", "float64") if has_dtype(self.xp, "float64") else ("float32",)

    def takes(self, x: Vector) -> bool:
        """Return whether the compressor accepts the values of x, that is, does not raise its documented error."""
        if float(np.max(np.abs(x), initial=0.0)) < 8:
            return True  # ordinary values must be accepted
        try:
            self.compressor.compress(self.array(x), key=Key(seed=1))
        except NonFiniteError:
            return False
        return True

    def decoded(self, x: Vector, key: Key) -> Vector:
        """Compress x, of any dtype, and return the decompressed values in float64."""
        array = self.array(x)
        payload = self.compressor.compress(array, key=key)
        return to_numpy(self.compressor.decompress(payload, like=array)).astype(np.float64)

    def payload(self, x: Vector, key: Key = Key(seed=1)) -> Payload:  # noqa: B008
        """Return the payload itself."""
        array = self.array(x)
        if self.jit:
            return Payload(self.compressor.spec, x.size, "float32", self._jitted([array], key, None)[0])
        with np.errstate(all="ignore"):
            return self.compressor.compress(array, key=key)
