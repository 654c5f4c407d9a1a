"""The hook for kernels: faster versions of the primitives, which return the same bytes.

The core has no kernel of its own. `qcomp.core.primitives` calls the kernels of the set that was chosen for an array. If
the set has no kernel for a compressor, dtype or library, the pure version of the primitive runs, which also defines the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from qcomp.core.coding.model import Model
    from qcomp.core.numeric.arrays import Array


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Encoded(NamedTuple):
    """The result of the primitive ``encode``."""

    data: Array
    """The data of the payload, uint8 of shape (nbytes,)."""
    residual: Array | None
    """The new residual, of the shape of x; None if no residual was given."""
    refused: Array | None
    """uint8 of shape (1,) on the device of x: 0 if all values were in range; otherwise the other fields are
    meaningless. None if all values are known to be in range. So an `Encoded` can be returned without waiting for the
    device."""


class Blend(NamedTuple):
    """The momentum into which an encoder first blends its input, this step's gradient."""

    m: Array
    """The momentum before this step, with the shape of the input and its compute dtype."""
    beta1: float
    scale: float
    """Factor of the input, in addition to 1 - beta1."""
    factor: float = 1.0
    """Factor of the momentum and of the input before they are blended."""
    weight: float = 1.0
    """Factor of the blend."""

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


class FreshNumbers(NamedTuple):
    """The numbers of the momentum and the fresh variance of 1-bit LAMB."""

    betas: tuple[float, float]
    eps: float
    divisor: float
    """The divisor of the averaged momentum: the factor by which momenta were multiplied before compression."""


class EncodedFrame(NamedTuple):
    """The result of compressing a chunk."""

    message: Array
    """uint8 of shape (nbytes,); it ends with the verdict that no value was out of range."""
    residuals: tuple[Array, ...]
    """The new residual of each segment; empty without feedback."""


class KernelSet(Protocol):
    """A set of kernels for the primitives of `qcomp.core.primitives`, which define every byte.

    All methods but `takes` are kernels, each with the name of the primitive that it replaces. A set may have any of
    them; ``docs/extend/kernels.md`` lists all. A kernel gets all arguments, optional ones too. If it does not support
    them, for instance because arrays have different dtypes, it writes nothing and returns None. It never gets a
    compressor that has a coder, only the plain compressor whose payloads the coder shortens.

    A set whose kernels are compiled once for all shapes has the attribute ``any_shape = True``:
    `qcomp.core.primitives.rehearsal` then calls them before training begins. A set whose encoders apply ``factor`` and
    ``weight`` of a `Blend` has the attribute ``weighs_blends = True``; other sets get only blends in which both are 1.
    """

    name: str

    def takes(self, x: Array) -> bool:
        """Return whether there are kernels for arrays like x; may depend only on its library, device and dtype."""
        ...


class Coders(NamedTuple):
    """The loops of `qcomp.core.coding` over host bytes; `qcomp.core.coding.PURE` defines them.

    The text of each loop names its arguments and, after a colon, its results. Levels are passed and returned as 16-bit
    integers in little endian. Decoders raise PayloadError for bytes that no encoder makes.
    """

    name: str
    unpack: Callable[[memoryview, int, int, int], tuple[bytearray, bytearray]]
    """Packed codes, size, bits, bucket size: levels and signs."""
    pack: Callable[[memoryview, memoryview, int, int], bytearray]
    """Levels, signs, bits, bucket size: packed codes."""
    first_invalid: Callable[[memoryview, memoryview, int], int]
    """Levels, signs, largest level: the index of the first element out of range, or -1."""
    paper_encode: Callable[[memoryview, memoryview], bytes]
    """Levels, signs: the code of `qcomp.core.coding.qsgd_codes`."""
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
    """Return the chosen set of kernels for an array, None for the pure version."""
    chooser = _chooser.get() or _automatic
    return None if chooser is _pure else chooser(x)


def kernel_of(name: str, x: Array) -> Callable[..., Any] | None:
    """Return the kernel of a primitive for arrays like x, None if there is none."""
    chooser = _chooser.get() or _automatic
    return None if chooser is _pure else getattr(chooser(x), name, None)


def primitive(
    like: str, *, several: bool = False
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a pure function, which defines arguments and results, so that kernels of the same name replace it.

    The kernel is chosen for the argument that ``like`` names, or with ``several`` for the first array in that argument.
    The kernel gets all arguments. If it returns None, the pure function runs.
    """

    def decorate(pure: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        name, defaults = pure.__name__, pure.__kwdefaults__ or {}
        place = pure.__code__.co_varnames.index(like)

        @wraps(pure)
        def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
            x: Any = args[place] if place < len(args) else options.get(like)
            if several:
                x = x[0] if x else None
            kernel = None if x is None else kernel_of(name, x)
            found: Result | None = kernel and kernel(*args, **{**defaults, **options})
            return pure(*args, **options) if found is None else found

        return call

    return decorate


def takes_blends(kernels: KernelSet | None, blends: Iterable[Blend]) -> bool:
    """Return whether the encoders of a set may get these blends."""
    weighs: bool = getattr(kernels, "weighs_blends", False)
    return weighs or all(b.factor == 1 and b.weight == 1 for b in blends)


def chosen_coders() -> Coders | None:
    """Return the loops for host bytes, None for the pure ones.

    The choice does not depend on an array. Unless the context uses the pure version, this returns the fastest available
    loops, whichever set the context uses for arrays.
    """
    chooser = _chooser.get()
    return None if chooser is _pure else _coders(chooser is None)


def choose_coders_with(coders: Callable[[bool], Coders | None]) -> None:
    """Let ``coders`` choose the loops for host bytes; its argument is False where a context chooses kernels."""
    global _coders  # noqa: PLW0603
    _coders = coders


def choose_with(chooser: Chooser) -> None:
    """Let ``chooser`` choose the set for an array wherever no context chooses."""
    global _automatic  # noqa: PLW0603
    _automatic = chooser


@contextmanager
def use_chooser(chooser: Chooser) -> Iterator[None]:
    """Let ``chooser`` choose the set for an array inside the context."""
    token = _chooser.set(chooser)
    try:
        yield
    finally:
        _chooser.reset(token)


def use_kernels(kernels: KernelSet | None) -> AbstractContextManager[None]:
    """Inside the context, use a set of kernels for the arrays that it takes; with None, use the pure version."""
    if kernels is None:
        return use_chooser(_pure)
    takes = kernels.takes
    return use_chooser(lambda x: kernels if takes(x) else None)
