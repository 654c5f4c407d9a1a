"""The hook for kernels: faster versions of the primitives, which return the same bytes.

The core has no kernel of its own. `qcomp.core.primitives` asks the kernel set that was chosen for an array. If the set
has no kernel for a compressor, dtype or library, the pure version runs, which is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Protocol

from qcomp.core.traits import AnyCompressor

if TYPE_CHECKING:
    from qcomp.core.coding.model import Model
    from qcomp.core.numeric.arrays import Array
    from qcomp.core.numeric.random import Key

__all__ = [
    "AdamNumbers",
    "AnyFrame",
    "Blend",
    "Chooser",
    "Coders",
    "Encoded",
    "EncodedFrame",
    "KernelSet",
    "Partial",
    "StepNumbers",
    "choose_coders_with",
    "choose_with",
    "chosen",
    "chosen_coders",
    "use_chooser",
    "use_kernels",
]


class Encoded(NamedTuple):
    """The result of the primitive ``encode``."""

    data: Array
    """The data of the payload, uint8 of shape (nbytes,)."""
    residual: Array | None
    """The new residual, of the shape of x; None without a residual."""
    refused: Array | None
    """uint8 of shape (1,) on the device of x: 0, or else a value was out of range and the other fields are meaningless.
    None if all values are known to be in range. An `Encoded` can be returned without waiting for the device."""


class Blend(NamedTuple):
    """The momentum into which an encoder first blends its input, this step's gradient."""

    m: Array
    """The momentum before this step, with the shape of the input and its compute dtype."""
    beta1: float
    scale: float
    """Factor of the input besides 1 - beta1."""

    def cut(self, part: slice) -> Blend:
        """Return the blend of a part of a flat input."""
        return self._replace(m=self.m[part])


class StepNumbers(NamedTuple):
    """The numbers of a step of Adam."""

    rate: float
    """Learning rate."""
    correction: float
    """The divisor of the momentum, 1 - beta1^step."""
    eps: float
    weight_decay: float


class AdamNumbers(NamedTuple):
    """The numbers of a step of Adam that also updates the variance."""

    betas: tuple[float, float]
    variance_correction: float
    """The divisor of the new variance, usually 1 - beta2^step."""
    coupled_decay: float
    """Multiplied by the parameters and added to the gradient; 0 with decoupled weight decay."""
    step: StepNumbers


class AnyFrame(Protocol):
    """The layout of a chunk's message, a `qcomp.core.mean.framing.Frame`: the same object in every step."""

    @property
    def chunk(self) -> Sequence[tuple[int, int, int, int]]:
        """For each segment: its tensor, its start and stop in the tensor, and the number of its first bucket."""
        ...

    @property
    def compressors(self) -> Sequence[AnyCompressor]:
        """The compressor of each segment."""
        ...

    @property
    def dtypes(self) -> Sequence[str]:
        """The name of the dtype in which each segment is computed."""
        ...

    @property
    def variable_length(self) -> bool:
        """Whether the message begins with the lengths of its payloads."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each payload and of the verdict."""
        ...

    @property
    def offsets(self) -> Sequence[int]:
        """Where each payload and the verdict start."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        ...


class EncodedFrame(NamedTuple):
    """The result of compressing a chunk."""

    message: Array
    """uint8 of shape (nbytes,), with the verdict that nothing was out of range."""
    residuals: tuple[Array, ...]
    """The new residual of each segment; empty without feedback."""


class KernelSet(Protocol):
    """A set of kernels for the primitives of `qcomp.core.primitives`, which define every byte.

    A method returns None, or False, if it has no kernel for its arguments; it has then written nothing. Methods are
    never called with a compressor that has a coder, only with the plain compressor whose payloads the coder shortens.
    """

    name: str
    any_shape: bool
    """Whether kernels compiled for one shape serve all shapes: `qcomp.core.rehearsal` then compiles them."""

    def takes(self, x: Array) -> bool:
        """Return whether there are kernels for arrays like x; may depend only on its library, device and dtype."""
        ...

    def encode(
        self,
        compressor: AnyCompressor,
        x: Array,
        residual: Array | None,
        key: Key | None,
        *,
        out: Array | None,
        blend: Blend | None,
    ) -> Encoded | None:
        """Compress x, or the momentum that x is blended into, plus the residual if there is one.

        If ``out`` is given, the new residual goes into it, unless None is returned. ``out`` is the old residual, x, or
        a buffer that shares memory with neither. A set that finds a value out of range before it returns may return
        None: the pure version then reports it. If ``out`` is the residual and a value is out of range, the residual
        must stay as it is; so a set that finds such a value only later uses a new array instead.
        """
        ...

    def decode(
        self, compressor: AnyCompressor, data: Array, like: Array, *, out: Array | None, accumulate: bool
    ) -> Array | None:
        """Return the decompressed payload, with the shape and dtype of ``like``.

        The payload was computed in the dtype in which arrays like ``like`` are: the layout may depend on it.
        The result goes into ``out`` if that is given; with ``accumulate``, it is added to the values there. Arrays of
        an immutable library are not written to: the result is then a new array.
        """
        ...

    def empty_like(self, x: Array) -> Array | None:
        """Return a writable buffer of the shape and dtype of x, with any values."""
        ...

    def average(
        self, compressor: AnyCompressor, payloads: Sequence[Array], like: Array, *, out: Array | None
    ) -> Array | None:
        """Return the mean of the decompressed payloads, added in their order, with the shape and dtype of ``like``.

        The result goes into ``out`` if that is given.
        """
        ...

    def compress_mean(
        self,
        compressor: AnyCompressor,
        payloads: Sequence[Array],
        like: Array,
        residual: Array | None,
        key: Key | None,
        *,
        out: Array | None,
    ) -> Encoded | None:
        """Compress the mean that `average` returns, plus the residual if there is one, which is not written to.

        The new residual goes into ``out`` if that is given, which shares memory with nothing else.

        A set that finds a value out of range before it returns must return None: the pure version then reports it.
        """
        ...

    def empty_likes(self, arrays: Sequence[Array]) -> Sequence[Array | None] | None:
        """Return `empty_like` of each of several arrays."""
        ...

    def encode_frames(
        self,
        frames: Sequence[AnyFrame],
        tensors: Sequence[Array],
        residuals: Sequence[Array],
        outs: Sequence[Array | None],
        key: Key,
        *,
        blends: Sequence[Blend],
    ) -> list[Array] | None:
        """Return the message of each chunk: `encode` of all segments at once.

        ``tensors``, ``residuals``, ``outs`` (for the new residuals) and ``blends`` have an entry for each whole tensor;
        without feedback, ``residuals`` and ``outs`` are empty. ``outs`` are the tensors themselves if these may be used
        up, or else share memory with nothing.

        A set that finds a value out of range returns None, or raises NonFiniteError if the tensors are used up.
        """
        ...

    def decode_frames(
        self, frames: Sequence[AnyFrame], messages: Sequence[Array], outs: Sequence[Array]
    ) -> bool:
        """Write the decompressed message of each frame into buffers like all tensors; return whether it did."""
        ...

    def average_frame(self, frame: AnyFrame, messages: Sequence[Array], outs: Sequence[Array]) -> bool:
        """Write the mean of several messages into buffers like all tensors, see `average`; return whether it did."""
        ...

    def compress_mean_frame(
        self,
        frame: AnyFrame,
        messages: Sequence[Array],
        like: Array,
        residuals: Sequence[Array],
        key: Key,
        *,
        into: Sequence[Array | None],
    ) -> EncodedFrame | None:
        """Compress the mean of several messages, plus the residuals: `compress_mean` of all segments at once.

        The new residuals go into ``into`` if that is given. Also returns None if a value is out of range: the pure
        version then reports it.
        """
        ...

    def finish_mean(self, total: Array, count: int) -> Array | None:
        """Return a sum over ranks divided by their number, in its buffer if that can be written to."""
        ...

    def momentum(self, m: Array, g: Array, beta1: float, scale: float) -> Array | None:
        """Return ``beta1 * m + (1 - beta1) * scale * g`` in a new array."""
        ...

    def nesterov(self, m: Array, g: Array, beta1: float) -> tuple[Array, Array] | None:
        """Return ``n = momentum(m, g, beta1, 1)`` and ``momentum(n, g, beta1, 1)``, in new arrays."""
        ...

    def frozen_step(self, p: Array, m: Array, v: Array, numbers: StepNumbers) -> tuple[Array, Array] | None:
        """Return the parameters after a step with a frozen variance, in a new array, and the masked momentum.

        The masked momentum may take the buffer of m.
        """
        ...

    def frozen_steps(
        self,
        params: Sequence[Array],
        momenta: Sequence[Array],
        variances: Sequence[Array],
        numbers: Sequence[StepNumbers],
        *,
        donate: bool,
    ) -> list[tuple[Array, Array]] | None:
        """Return `frozen_step` of each of several tensors; with ``donate`` in the buffers of the parameters."""
        ...

    def adam_steps(
        self,
        params: Sequence[Array],
        momenta: Sequence[Array],
        variances: Sequence[Array],
        gradients: Sequence[Array],
        numbers: Sequence[AdamNumbers],
        *,
        donate: bool,
    ) -> list[tuple[Array, Array, Array]] | None:
        """Return the parameters, momentum and variance of each of several tensors after a step of Adam.

        In new arrays, or with ``donate`` in the buffers of the old ones.
        """
        ...

    def descend(self, p: Array, d: Array, rate: float, decay: float, *, out: Array | None) -> Array | None:
        """Return ``p - rate * (d + decay * p)``, in ``out`` if that is given, which may be p."""
        ...

    def scale(self, x: Array, factor: float) -> Array | None:
        """Return ``factor * x`` in a new array, magnitudes below 2^-126 replaced by +0."""
        ...

    def in_range(self, x: Array) -> bool:
        """Return whether every value is known to be +0, or of a magnitude from 2^-126 to below 2^100."""
        ...

    def compensate(
        self, x: Array, residual: Array | None, *, out: Array | None
    ) -> tuple[Array, float] | None:
        """Return x plus the residual, if there is one, and the largest magnitude of the sum, or NaN if it has a NaN.

        The sum goes into ``out`` if that is given, which may be x.
        """
        ...

    def take_low_rank(
        self, left: Array, right: Array, matrix: Array, *, out: Array | None
    ) -> tuple[Array, Array] | None:
        """Return the product of two factors, in ``out`` if that is given, and a matrix minus the product, in place."""
        ...

    def orthonormal(self, rows: Array) -> Array | None:
        """Return what `qcomp.core.numeric.low_rank.orthonormal` returns for a factor."""
        ...

    def next_factor(self, new: Array, old: Array) -> Array | None:
        """Return what `qcomp.core.numeric.low_rank.next_factor` returns for a factor."""
        ...


class Partial:
    """Base of sets that leave these methods to the pure version, which calls the other kernels one after the other."""

    any_shape = False

    def empty_like(self, x: Array) -> Array | None:  # noqa: ARG002
        """Return None."""
        return None

    def empty_likes(self, arrays: Sequence[Array]) -> Sequence[Array | None] | None:  # noqa: ARG002
        """Return None."""
        return None

    def encode_frames(
        self,
        frames: Sequence[AnyFrame],  # noqa: ARG002
        tensors: Sequence[Array],  # noqa: ARG002
        residuals: Sequence[Array],  # noqa: ARG002
        outs: Sequence[Array | None],  # noqa: ARG002
        key: Key,  # noqa: ARG002
        *,
        blends: Sequence[Blend],  # noqa: ARG002
    ) -> list[Array] | None:
        """Return None."""
        return None

    def decode_frames(
        self,
        frames: Sequence[AnyFrame],  # noqa: ARG002
        messages: Sequence[Array],  # noqa: ARG002
        outs: Sequence[Array],  # noqa: ARG002
    ) -> bool:
        """Return False."""
        return False

    def average_frame(self, frame: AnyFrame, messages: Sequence[Array], outs: Sequence[Array]) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def compress_mean_frame(
        self,
        frame: AnyFrame,  # noqa: ARG002
        messages: Sequence[Array],  # noqa: ARG002
        like: Array,  # noqa: ARG002
        residuals: Sequence[Array],  # noqa: ARG002
        key: Key,  # noqa: ARG002
        *,
        into: Sequence[Array | None],  # noqa: ARG002
    ) -> EncodedFrame | None:
        """Return None."""
        return None

    def average(
        self,
        compressor: AnyCompressor,  # noqa: ARG002
        payloads: Sequence[Array],  # noqa: ARG002
        like: Array,  # noqa: ARG002
        *,
        out: Array | None,  # noqa: ARG002
    ) -> Array | None:
        """Return None."""
        return None

    def compress_mean(
        self,
        compressor: AnyCompressor,  # noqa: ARG002
        payloads: Sequence[Array],  # noqa: ARG002
        like: Array,  # noqa: ARG002
        residual: Array | None,  # noqa: ARG002
        key: Key | None,  # noqa: ARG002
        *,
        out: Array | None,  # noqa: ARG002
    ) -> Encoded | None:
        """Return None."""
        return None

    def nesterov(self, m: Array, g: Array, beta1: float) -> tuple[Array, Array] | None:  # noqa: ARG002
        """Return None."""
        return None

    def frozen_steps(
        self,
        params: Sequence[Array],  # noqa: ARG002
        momenta: Sequence[Array],  # noqa: ARG002
        variances: Sequence[Array],  # noqa: ARG002
        numbers: Sequence[StepNumbers],  # noqa: ARG002
        *,
        donate: bool,  # noqa: ARG002
    ) -> list[tuple[Array, Array]] | None:
        """Return None."""
        return None

    def adam_steps(
        self,
        params: Sequence[Array],  # noqa: ARG002
        momenta: Sequence[Array],  # noqa: ARG002
        variances: Sequence[Array],  # noqa: ARG002
        gradients: Sequence[Array],  # noqa: ARG002
        numbers: Sequence[AdamNumbers],  # noqa: ARG002
        *,
        donate: bool,  # noqa: ARG002
    ) -> list[tuple[Array, Array, Array]] | None:
        """Return None."""
        return None

    def descend(
        self,
        p: Array,  # noqa: ARG002
        d: Array,  # noqa: ARG002
        rate: float,  # noqa: ARG002
        decay: float,  # noqa: ARG002
        *,
        out: Array | None,  # noqa: ARG002
    ) -> Array | None:
        """Return None."""
        return None

    def scale(self, x: Array, factor: float) -> Array | None:  # noqa: ARG002
        """Return None."""
        return None

    def in_range(self, x: Array) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def compensate(
        self,
        x: Array,  # noqa: ARG002
        residual: Array | None,  # noqa: ARG002
        *,
        out: Array | None,  # noqa: ARG002
    ) -> tuple[Array, float] | None:
        """Return None."""
        return None

    def take_low_rank(
        self,
        left: Array,  # noqa: ARG002
        right: Array,  # noqa: ARG002
        matrix: Array,  # noqa: ARG002
        *,
        out: Array | None,  # noqa: ARG002
    ) -> tuple[Array, Array] | None:
        """Return None."""
        return None

    def orthonormal(self, rows: Array) -> Array | None:  # noqa: ARG002
        """Return None."""
        return None

    def next_factor(self, new: Array, old: Array) -> Array | None:  # noqa: ARG002
        """Return None."""
        return None


class Coders(NamedTuple):
    """The loops of `qcomp.core.coding` over host bytes; `qcomp.core.coding.PURE` defines them.

    Levels are passed and returned as 16-bit integers in little endian. Decoders raise PayloadError for bytes that no
    encoder makes.
    """

    name: str
    unpack: Callable[[memoryview, int, int, int], tuple[bytearray, bytearray]]
    """Packed codes, size, bits, bucket size: levels and signs."""
    pack: Callable[[memoryview, memoryview, int, int], bytearray]
    """Levels, signs, bits, bucket size: packed codes."""
    first_invalid: Callable[[memoryview, memoryview, int], int]
    """Levels, signs, largest level: the index of the first element out of range, or -1."""
    paper_encode: Callable[[memoryview, memoryview], bytes]
    """Levels, signs: the code of `qcomp.core.coding.paper`."""
    paper_decode: Callable[[memoryview, int, int], tuple[bytearray, bytearray]]
    """Code, size, largest level: levels and signs."""
    count_classes: Callable[[memoryview, int, int], list[int]]
    """Levels, largest level, fine bits: the number of levels in each class."""
    push: Callable[[memoryview, memoryview, Model, int], bytes]
    """Levels, signs, model, lanes: the states and words of `qcomp.core.coding.range_coder`."""
    pop: Callable[[memoryview, int, int, Model, int], tuple[bytearray, bytearray]]
    """States and words, size, largest level, model, lanes: levels and signs."""
    gaps_encode: Callable[[memoryview, int, int, int, int], bytes]
    """Sparse payload, size, k, bucket size, bits: its code, see `qcomp.core.coding.gaps`."""
    gaps_decode: Callable[[memoryview, int, int, int, int], bytearray]
    """Code, size, k, bucket size, bits: the sparse payload."""


Chooser = Callable[["Array"], KernelSet | None]
"""Returns the set of kernels for an array, None for the pure version."""


def _pure(x: Array) -> KernelSet | None:  # noqa: ARG001
    return None


def _no_coders(by_setting: bool) -> Coders | None:  # noqa: ARG001
    return None


_automatic: Chooser = _pure
_coders: Callable[[bool], Coders | None] = _no_coders
_chooser: ContextVar[Chooser | None] = ContextVar("qcomp_kernels", default=None)


def chosen(x: Array) -> KernelSet | None:
    """Return the set of kernels for an array, None for the pure version."""
    return (_chooser.get() or _automatic)(x)


def chosen_coders() -> Coders | None:
    """Return the loops for host bytes, None for the pure ones.

    The choice does not depend on an array: whichever set a context uses for arrays, these are the fastest available
    loops, unless the context uses the pure version.
    """
    chooser = _chooser.get()
    return None if chooser is _pure else _coders(chooser is None)


def choose_coders_with(coders: Callable[[bool], Coders | None]) -> None:
    """Let this function choose the loops for host bytes; its argument says whether no context overrides the setting."""
    global _coders  # noqa: PLW0603
    _coders = coders


def choose_with(chooser: Chooser) -> None:
    """Let this function choose the set for an array wherever no context says which to use."""
    global _automatic  # noqa: PLW0603
    _automatic = chooser


@contextmanager
def use_chooser(chooser: Chooser) -> Iterator[None]:
    """Let this function choose the set for an array inside the context."""
    token = _chooser.set(chooser)
    try:
        yield
    finally:
        _chooser.reset(token)


def use_kernels(kernels: KernelSet | None) -> AbstractContextManager[None]:
    """Use a set of kernels for the arrays that it takes, or with None the pure version, inside the context."""
    if kernels is None:
        return use_chooser(_pure)
    takes = kernels.takes
    return use_chooser(lambda x: kernels if takes(x) else None)
