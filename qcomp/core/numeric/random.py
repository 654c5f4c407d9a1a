"""Counter-based random draws: Philox4x32-10 (Salmon et al., SC'11), and the keys that select the draws.

A draw is a pure function of (seed, step, tensor, rank, hop, element). It depends on no state and on no order of
evaluation, and is the same in every library and on every device.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from numbers import Integral
from operator import add, mul, or_, xor
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from array_api_compat import is_array_api_obj, is_jax_array

from qcomp.core.numeric.arrays import Array, array_namespace, device, is_traced, loop
from qcomp.core.numeric.buckets import Block

SHARED_RANK = 0xFFFFFFFF
"""The rank in keys of draws that all ranks share."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK32 = 0xFFFFFFFF
_ROUNDS = 10
_ROUNDING = 0
"""Counter word that separates the draws for rounding from draws for other purposes."""


class _KeyParts(NamedTuple):
    seed: Any = 0
    step: Any = 0
    tensor: Any = 0
    rank: Any = 0
    hop: Any = 0
    bucket: Any = 0


_ENDS = (1 << 64, 1 << 64, 1 << 32, 1 << 32, 1 << 32, 1 << 32)
"""Upper bounds of the parts of a key."""


class Key(_KeyParts):
    """Selects a stream of random draws.

    Parameters
    ----------
    seed : int
        The experiment's seed, 0 to 2**64 - 1.
    step : int
        The training step, 0 to 2**64 - 1.
    tensor : int
        Distinguishes the vectors compressed in one step, 0 to 2**32 - 1.
    rank : int
        The rank that draws, 0 to 2**32 - 1; `SHARED_RANK` for draws that all ranks share.
    hop : int
        Which compression on the way draws: 0 for a worker's, 1 for a server's. A ring uses 2 and up for its sums;
        PowerSGD uses 2 and 3 for the right factors. The largest is 2**32 - 1. If a server rounded with the draws of its
        own worker, the result would be biased.
    bucket : int
        Index of the vector's first bucket among all buckets that the key covers, 0 to 2**32 - 1.

    Raises
    ------
    ValueError
        If a part is an integer out of its range.

    Notes
    -----
    ``seed``, ``step``, ``tensor``, ``rank`` and ``bucket`` may also be int32 arrays of shape (), including traced ones.

    Examples
    --------
    >>> Key(seed=0, step=3, rank=1).at(hop=1, bucket=8)
    Key(seed=0, step=3, tensor=0, rank=1, hop=1, bucket=8)
    """

    __slots__ = ()

    def __new__(  # noqa: PLR0917 - the parts of the tuple
        cls,
        seed: Any = 0,
        step: Any = 0,
        tensor: Any = 0,
        rank: Any = 0,
        hop: Any = 0,
        bucket: Any = 0,
    ) -> Self:
        """Check the parts and make the key."""
        return cls._checked((seed, step, tensor, rank, hop, bucket))

    @classmethod
    def _checked(cls, parts: Iterable[Any]) -> Self:
        """Return the key of these parts."""
        key = super()._make(parts)
        if set(map(type, key)) == {int} and min(key) >= 0 and max(key[:2]) >> 64 == max(key[2:]) >> 32 == 0:
            return key
        for name, part, end in zip(cls._fields, key, _ENDS, strict=True):
            # Only integers are checked, since an array's value may be on a device, or not exist yet.
            if (type(part) is int or isinstance(part, Integral)) and not 0 <= int(part) < end:
                raise ValueError(f"Key.{name} is {part}; expected 0 to 2**{end.bit_length() - 1} - 1")
        return key

    def at(self, *, hop: int | None = None, bucket: int | None = None) -> "Key":
        """Return this key with a new hop or first bucket.

        Parameters
        ----------
        hop : int, optional
            The new hop; unchanged by default.
        bucket : int, optional
            The new first bucket; unchanged by default.
        """
        seed, step, tensor, rank, old_hop, old_bucket = self
        new = old_hop if hop is None else hop, old_bucket if bucket is None else bucket
        return self._checked((seed, step, tensor, rank, *new))

    if not TYPE_CHECKING:
        _make = _checked  # so that `_replace`, which calls `_make`, checks too; type checkers know both


def _signed(word: int) -> int:
    """Return the int32 with the bits of a word."""
    return word - (1 << 32) if word >> 31 else word


class _Arithmetic:
    """Arithmetic on 32-bit words that are Python integers, or int32 arrays, which wrap around.

    int32 is the only integer dtype that adds, multiplies and shifts the same in every library: torch lacks arithmetic
    on uint32, and JAX without 64-bit mode has no int64. Without int64, products are computed from 16-bit limbs.
    """

    def __init__(self, like: Array | None) -> None:
        self.xp = None if like is None else array_namespace(like)
        self.has_int64 = not is_jax_array(like)

    def word(self, value: Any) -> Any:
        """Return an integer below 2^32, or an int32 array with an axis: NumPy warns of overflow in scalars."""
        if isinstance(value, Integral):
            return int(value) & _MASK32
        assert self.xp is not None
        array = self.xp.astype(value, self.xp.int32, copy=False)
        return array if array.ndim else self.xp.reshape(array, (1,))

    def both(self, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        """Apply a commutative operation, such as addition, to two words."""
        if isinstance(a, int):
            if isinstance(b, int):
                return operation(a, b) & _MASK32
            a, b = b, a
        return operation(a, _signed(b) if isinstance(b, int) else b)

    def high_half(self, x: Array) -> Array:
        """Return the upper 16 bits; the mask undoes the sign extension of the arithmetic shift."""
        return x >> 16 & 0xFFFF

    def multiply(self, constant: int, x: Any) -> tuple[Any, Any]:
        """Return the high and the low word of a product."""
        if isinstance(x, int):
            return constant * x >> 32, constant * x & _MASK32
        assert self.xp is not None
        if self.has_int64:
            # The product may wrap around, which loses no bit.
            product = (self.xp.astype(x, self.xp.int64) & _MASK32) * constant
            high = self.xp.astype(product >> 32, self.xp.int32)
        else:
            x_low, x_high, c_low, c_high = x & 0xFFFF, self.high_half(x), constant & 0xFFFF, constant >> 16
            low = x_low * c_low
            middle = x_high * c_low + self.high_half(low)
            other = x_low * c_high + (middle & 0xFFFF)
            high = x_high * c_high + self.high_half(middle) + self.high_half(other)
        return high, x * _signed(constant)

    def turn(self, number: Any, counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> Any:
        """Return the counter after one round of Philox."""
        c0, c1, c2, c3 = counter
        k0, k1 = (
            self.both(add, word, self.both(mul, number, constant))
            for word, constant in zip(key, (_W0, _W1), strict=True)
        )
        high0, low0 = self.multiply(_M0, c0)
        high1, low1 = self.multiply(_M1, c2)
        first, third = self.both(xor, high1, c1), self.both(xor, high0, c3)
        return self.both(xor, first, k0), low1, self.both(xor, third, k1), low0

    def alike(self, counter: tuple[Any, ...], key: tuple[Any, ...]) -> tuple[Array, ...]:
        """Return the words of a counter in the shape that they have after the rounds: loops must not change shapes."""
        nothing: Any = 0
        for word in (*counter, *key):
            # A sum has the shape of all its words, and varies over every axis of a mesh over which a word varies.
            nothing = self.both(add, nothing, word & 0)
        return tuple(self.both(or_, nothing, word) for word in counter)


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], *, like: Array | None = None) -> Any:
    """Return the four output words of Philox4x32-10 for a counter of four words and a key of two.

    Without ``like`` all words are Python integers. With ``like``, words are int32 arrays of its library, which
    broadcast against each other, or integers.
    """
    words = _Arithmetic(like)
    start: Any = tuple(map(words.word, counter))
    by: Any = tuple(map(words.word, key))
    if like is not None and any(map(is_traced, (*start, *by))):
        return loop(_ROUNDS, lambda number, now: words.turn(number, now, by), words.alike(start, by))
    for number in range(_ROUNDS):
        start = words.turn(number, start, by)
    return start


def _words(name: str, value: Any, count: int) -> tuple[Any, ...]:
    """Return a part of a key as 32-bit words, the low word first; an array is the low word."""
    if not isinstance(value, Integral):
        if not is_array_api_obj(value):
            raise TypeError(f"Key.{name} is {value!r}; expected an integer or an int32 array of shape ()")
        return (value, *(0,) * (count - 1))
    number = int(value)
    return tuple(number >> 32 * i & _MASK32 for i in range(count))


def require_key(key: object, spec: str) -> None:
    """Raise unless the argument is a key, for a compressor that draws: ValueError for None, else TypeError."""
    if not isinstance(key, Key):
        error = ValueError if key is None else TypeError
        raise error(
            f"key is {key!r}; {spec} draws random numbers and needs a qcomp.Key, such as "
            "key=qcomp.Key(seed=0, step=n) for the nth call: with the same key, all calls draw the same"
        )


def fold_key(key: Key, *, like: Array) -> tuple[Any, Any]:
    """Return the two key words of the stream: seed, step, tensor and rank mixed by Philox itself."""
    parts = key.seed, key.step, key.tensor, key.rank
    return _folded(*parts) if all(type(part) is int for part in parts) else _fold(*parts, like=like)


@lru_cache(16)  # the same for all segments of a step
def _folded(seed: int, step: int, tensor: int, rank: int) -> Any:
    return _fold(seed, step, tensor, rank, like=None)


def _fold(seed: Any, step: Any, tensor: Any, rank: Any, *, like: Array | None) -> tuple[Any, Any]:
    words = _words("seed", seed, 2)
    counter = (*_words("step", step, 2), *_words("tensor", tensor, 1), *_words("rank", rank, 1))
    plain = all(isinstance(word, int) for word in (*counter, *words))
    first, second, _, _ = philox4x32(counter, words, like=None if plain else like)
    return first, second


_replacement: ContextVar[Callable[[Key, Block], Any] | None] = ContextVar("qcomp_draws", default=None)


@contextmanager
def replace_draws(source: Callable[[Key, Block], Any]) -> Iterator[None]:
    """Make `draws16` return ``source(key, block)`` inside the context, so that draws can be enumerated.

    The source returns an integer from 0 to 65535, or an array of such integers that broadcasts to (rows, length).
    """
    token = _replacement.set(source)
    try:
        yield
    finally:
        _replacement.reset(token)


def draws_are_replaced() -> bool:
    """Return whether `replace_draws` is in effect; kernels do not support it."""
    return _replacement.get() is not None


def draws16(key: Key, block: Block, *, bucket_size: int, like: Array) -> Array:
    """Return one 16-bit draw for every element of a block, float32 of shape (rows, length), values 0 to 65535.

    A Philox block has four words, and so eight draws. Let W be the length of a bucket divided by 8. Then draw d of
    block ``bucket * bucket_size / 8 + j`` belongs to element d*W + j. Draws 2i and 2i + 1 are the low and the high half
    of word i. So a SIMD lane or GPU thread can compute one block: its eight elements are W apart, and give one byte of
    every bit plane.

    Raises
    ------
    ValueError
        If rows are longer than ``bucket_size``: then neighbouring rows would share draws.
    """
    if _replacement.get() is not None:
        return _replaced(key, block, like)
    words = fold_key(key, like=like)
    return _draws(words, key.hop, key.bucket, block=block, bucket_size=bucket_size, like=like)


def stream_of(key: Key, *, like: Array) -> Array:
    """Return the numbers that determine all draws of a key: two folded words, hop and bucket, int32 of shape (4,)."""
    words, xp = _Arithmetic(like), array_namespace(like)
    parts = [words.word(part) for part in (*fold_key(key, like=like), key.hop, key.bucket)]
    nothing = xp.zeros((1,), dtype=xp.int32, device=device(like))
    return xp.concat([words.both(add, nothing, part) for part in parts])


def draws16_again(stream: Array, block: Block, *, bucket_size: int, like: Array) -> Array:
    """Return the draws of `draws16` for the key from which `stream_of` made this stream."""
    if _replacement.get() is not None:
        return _replaced(Key(), block, like)
    first, second, hop, bucket = (stream[i : i + 1] for i in range(4))
    return _draws((first, second), hop, bucket, block=block, bucket_size=bucket_size, like=like)


def _replaced(key: Key, block: Block, like: Array) -> Array:
    xp, source = array_namespace(like), _replacement.get()
    assert source is not None
    values = xp.asarray(source(key, block), dtype=xp.float32, device=device(like))
    return xp.broadcast_to(values, (block.rows, block.length))


def _draws(
    words_of_key: tuple[Any, Any], hop: Any, bucket: Any, *, block: Block, bucket_size: int, like: Array
) -> Array:
    if block.rows > 1 and bucket_size // 8 * 8 < block.length:
        raise ValueError(
            f"bucket_size is {bucket_size}; expected a multiple of 8, and at least the {block.length} elements of a "
            "row: otherwise neighbouring rows would share random draws"
        )
    xp = array_namespace(like)
    width = block.length // 8
    lanes = xp.reshape(xp.arange(width, dtype=xp.int32, device=device(like)), (1, width))
    rows = xp.reshape(xp.arange(block.rows, dtype=xp.int32, device=device(like)), (block.rows, 1))
    words = _Arithmetic(like)
    first = words.both(add, words.word(bucket), words.word(block.first_bucket))
    start = words.both(mul, first, bucket_size // 8)
    counter = words.both(add, rows * (bucket_size // 8) + lanes, start)
    outputs = philox4x32((counter, hop, _ROUNDING, 0), words_of_key, like=like)
    halves = [half for word in outputs for half in (word & 0xFFFF, words.high_half(word))]
    draws = xp.reshape(xp.stack(halves, axis=1), (block.rows, block.length))
    return xp.astype(draws, xp.float32)
