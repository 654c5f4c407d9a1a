"""The hook for kernels: faster versions of the primitives, which return the same bytes.

The core has no kernel of its own. `qcomp.core.primitives` asks the set that was chosen for an array; whatever the set
has no kernel for, by compressor, dtype or library, is done by the pure version, which is the definition.
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
    """What the primitive ``encode`` returns."""

    data: Array
    """The data of the payload, uint8 of shape (nbytes,)."""
    residual: Array | None
    """What compression lost, of the shape of x; None without a residual."""
    refused: Array | None
    """uint8 of shape (1,) on the device of x: 0, or a value was out of range and the rest means nothing. None if it is
    known that none was; a device need not be waited for to return an `Encoded`."""


class Blend(NamedTuple):
    """What an encoder is to put its input into first: a momentum, before this step's gradient."""

    m: Array
    """Of the shape of the input, in the dtype in which it is computed."""
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
    """Of the momentum, 1 - beta1^step."""
    eps: float
    weight_decay: float


class AdamNumbers(NamedTuple):
    """The numbers of a step of Adam that updates the variance, too."""

    betas: tuple[float, float]
    variance_correction: float
    """What the new variance is divided by, usually 1 - beta2^step."""
    coupled_decay: float
    """Times the parameters, it is added to the gradient; 0 with decoupled weight decay."""
    step: StepNumbers


class AnyFrame(Protocol):
    """How the payloads of a chunk lie in a message, `qcomp.core.mean.framing.Frame`: the same object in every step."""

    @property
    def chunk(self) -> Sequence[tuple[int, int, int, int]]:
        """Of each segment: its tensor, where it starts and stops there, and the number of its first bucket."""
        ...

    @property
    def compressors(self) -> Sequence[AnyCompressor]:
        """One for each segment."""
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
    """What compresses a chunk returns."""

    message: Array
    """uint8 of shape (nbytes,), with the verdict that nothing was out of range."""
    residuals: tuple[Array, ...]
    """The new residual of each segment; empty without feedback."""


class KernelSet(Protocol):
    """A set of kernels for the primitives of `qcomp.core.primitives`, which define every byte.

    A method returns None where it has no kernel for such arguments; nothing was written then. No set is asked for a
    compressor with a coder, only for the plain one whose payloads the coder shortens.
    """

    name: str
    any_shape: bool
    """Whether what is compiled for arrays of one shape serves all: `qcomp.core.rehearsal` then compiles it."""

    def takes(self, x: Array) -> bool:
        """Return whether there are kernels for arrays of the library, device and dtype of x, by nothing else."""
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

        The new residual goes into ``out`` if that is given and not None is returned: the old residual, x, or a buffer
        that shares memory with neither. A set that finds a value out of range before it returns may return
        None: the pure version then says so. If ``out`` is the residual and a value is out of range, the residual
        stays as it is; so a set that finds it later takes a new array instead.
        """
        ...

    def decode(
        self, compressor: AnyCompressor, data: Array, like: Array, *, out: Array | None, accumulate: bool
    ) -> Array | None:
        """Return what a payload decompresses to, of the shape and dtype of ``like``.

        In ``out`` if that is given; with ``accumulate``, added to what is there. Arrays of an immutable library are
        not written to: the result is a new one then.
        """
        ...

    def empty_like(self, x: Array) -> Array | None:
        """Return a buffer of the shape and dtype of x with anything in it, which can be written to."""
        ...

    def average(
        self, compressor: AnyCompressor, payloads: Sequence[Array], like: Array, *, out: Array | None
    ) -> Array | None:
        """Return the mean of what payloads of the shape and dtype of ``like`` decompress to, added in their order.

        In ``out`` if that is given.
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
        """Compress that mean, plus the residual if there is one, which is not written to.

        The new residual goes into ``out`` if that is given, which shares memory with nothing else.

        A set that finds a value out of range before it returns returns None: the pure version then says so.
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
        """Return the message of each of some chunks: `encode` of all their segments at once.

        ``tensors``, ``residuals``, ``outs`` for the new residuals, and ``blends`` are of whole tensors; without
        feedback, ``residuals`` and ``outs`` are empty. ``outs`` are the tensors themselves if these may be used up, or
        share memory with nothing.

        A set that finds a value out of range returns None, or raises NonFiniteError if the tensors are used up.
        """
        ...

    def decode_frames(
        self, frames: Sequence[AnyFrame], messages: Sequence[Array], outs: Sequence[Array]
    ) -> bool:
        """Write what a message of each frame decompresses to into buffers like all tensors; return whether it did."""
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
        """Compress that mean, plus the residual of each segment: `compress_mean` of all segments at once.

        The new residuals go into ``into`` if that is given. None also if a value is out of range: the pure version then
        says so.
        """
        ...

    def finish_mean(self, total: Array, count: int) -> Array | None:
        """Return a sum over ranks divided by their number, in its buffer if that can be written to."""
        ...

    def momentum(self, m: Array, g: Array, beta1: float, scale: float) -> Array | None:
        """Return ``beta1 * m + (1 - beta1) * scale * g`` in a new array."""
        ...

    def nesterov(self, m: Array, g: Array, beta1: float) -> tuple[Array, Array] | None:
        """Return ``momentum(m, g, beta1, 1)``, and that of the result and g, in new arrays."""
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
        """Return x, plus a residual if there is one, and the largest magnitude of that, NaN if there is one.

        In ``out`` if that is given, which may be x.
        """
        ...

    def take_low_rank(
        self, left: Array, right: Array, matrix: Array, *, out: Array | None
    ) -> tuple[Array, Array] | None:
        """Return the product of two factors, in ``out`` if that is given, and what it leaves of a matrix, in place."""
        ...


class Partial:
    """Base of sets that leave these to the pure version, which calls the other kernels one after the other."""

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


class Coders(NamedTuple):
    """The loops of `qcomp.core.coding` over host bytes; `qcomp.core.coding.PURE` defines them.

    Levels come and go as 16-bit integers in little endian; what decodes raises PayloadError on any other bytes than
    those of an encoder.
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
    """Levels, largest level, fine bits: how many are of each class."""
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

    They have no array to be chosen by: whatever set works on arrays in a context, these are the best there are,
    unless the context says pure.
    """
    chooser = _chooser.get()
    return None if chooser is _pure else _coders(chooser is None)


def choose_coders_with(coders: Callable[[bool], Coders | None]) -> None:
    """Let this function choose the loops for host bytes; it is told whether there is no context, only the setting."""
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
