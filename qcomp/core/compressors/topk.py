"""`TopK`: keeps the largest elements of every bucket, exactly or rounded to a few levels; zeros elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.positions import join_bytes, split_bytes, validate_sparsity
from qcomp.core.compressors.sparse_levels import MOST_BITS, kept_delta, levels_of, scales_of, values_of
from qcomp.core.numeric.arrays import Array, array_namespace, device, flush
from qcomp.core.numeric.buckets import blocks, bucket_count, bytes_below, join_blocks
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Field, PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits

if TYPE_CHECKING:
    from qcomp.core.compressors.sparse_coder import GapCoder


@register
@dataclass(frozen=True)
class TopK(Compressor):
    """C(v)_i = v_i for the k elements of largest magnitude in every bucket, and 0 for the others.

    Among equal magnitudes the lowest index wins. With fewer than 32 bits per value, each kept element is rounded to the
    nearest of a few levels of its bucket, and elements that are 0 are never kept.

    Parameters
    ----------
    k : int
        Number of elements kept per bucket, 1 to ``bucket_size``.
    bucket_size : int
        Elements to choose from, a power of two from 8 to 65536.
    value_bits : int
        32 sends the values in float32. 1 to 4 round each value to a sign and one of 2^(value_bits - 1) magnitudes. With
        1, this is the mean magnitude of the kept elements of the bucket. With 2, it is the mean of the magnitudes below
        that mean, or the mean of the others. With 3 and 4, magnitudes are evenly spaced from the smallest to the
        largest.
    coding : "fixed", optional
        For values of fewer than 32 bits. ``"fixed"`` sends positions in whole bytes, so that payloads have a fixed
        length. By default a coder on the host, which a compiler cannot trace, shortens payloads; see
        `qcomp.core.coding.gaps`.

    Notes
    -----
    With 32 bits, ||C(v) - v||^2 is exactly the squared norm of the dropped elements, at most (1 - k / bucket_size)
    ||v||^2, with equality only if all magnitudes are equal. Sends 40 bits for each kept element: its value in float32,
    and its index in a byte. If a bucket has more than 256 elements, an element takes 48 bits. Source: Stich et al.,
    NeurIPS 2018, definition 2.1.

    With fewer bits, the rounding error of the kept elements is added. With up to 2 bits, delta is min(k / bucket_size,
    1 / k). With more bits, it is min(k / bucket_size, 1 / (1 + 1.25 k / q)) with q = 4 (2^(value_bits - 1) - 1)^2. The
    rounding of levels reduces delta by a fraction of at most 2^-7. The worst case needs one element far above k - 1
    small ones; on gradients, the rounding error with 2 bits is one or two percent of the squared norm of the kept
    elements. A payload of fixed length has 64 bits for each bucket, and 1 to 3 bytes for each kept element: its index
    and, in the lower bits, its value. With 2 bits, the coder sends at most 9.6 bits for each of 64 elements of 4096;
    the positions alone need at least log2 binom(4096, 64) / 64 = 7.36 of these. The 2-bit values are after SparseLoCo,
    arXiv 2508.15706.

    Examples
    --------
    >>> import numpy as np
    >>> c = TopK(k=2, bucket_size=8)
    >>> x = np.asarray([1.0, -5.0, 0.5, 3.0, -3.0], dtype=np.float32)
    >>> c.decompress(c.compress(x), like=x)
    array([ 0., -5.,  0.,  3.,  0.], dtype=float32)
    >>> coded = TopK(k=64, bucket_size=4096, value_bits=2)
    >>> x = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    >>> payload = coded.compress(x)
    >>> 9.4 < 8 * payload.nbytes / (64 * 256) < 9.6
    True
    """

    name: ClassVar[str] = "topk"

    k: int = 32
    bucket_size: int = 1024
    value_bits: int = 32
    coding: Literal["fixed"] | None = None

    def __post_init__(self) -> None:
        validate_sparsity(self.k, self.bucket_size)
        if type(self.value_bits) is not int or not (
            1 <= self.value_bits <= MOST_BITS or self.value_bits == 32
        ):
            raise ValueError(
                f"value_bits is {self.value_bits!r}; expected an integer from 1 to {MOST_BITS}, or 32"
            )
        if self.coding not in ("fixed", None):
            raise ValueError(f"coding is {self.coding!r}; expected 'fixed' or None")
        if self.coding and self.value_bits == 32:
            raise ValueError(
                "coding is 'fixed', but payloads with value_bits=32 always have a fixed length; expected None, or "
                "fewer value_bits"
            )

    @cached_property
    def spec(self) -> str:
        """The spec string, without default ``value_bits`` and ``coding``, so that old payloads keep their name."""
        return super().spec.replace(",value_bits=32", "").replace(",coding=None", "")

    @cached_property
    def coder(self) -> "GapCoder | None":
        """The coder of positions and values, or None."""
        if self.coding == "fixed" or self.value_bits == 32:
            return None
        from qcomp.core.compressors.sparse_coder import GapCoder  # noqa: PLC0415 - few coders are used

        return GapCoder(replace(self, coding="fixed"), self.k, self.bucket_size, self.value_bits)

    @cached_property
    def traits(self) -> Traits:
        """A contraction with delta k / bucket_size, or less with fewer bits per value."""
        n = self.bucket_size
        delta = self.k / n if self.value_bits == 32 else kept_delta(self.k, n, self.value_bits)
        return Traits(n, delta=delta, keeps_zero=True, kept=self.k)

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:  # noqa: ARG002
        """Return the layout: the bytes of the indices, the low ones first, and the values.

        With fewer bits per value: the bytes of index * 2^value_bits + value, then the lowest level and the step of each
        bucket. With a coder: the coder's bytes.
        """
        if self.coder is not None:
            return self.coder.payload_spec(size)
        full, rest = divmod(size, self.bucket_size)
        count = full * self.k + min(rest, self.k)
        entries = Field("entries", "uint8", self._width * count)
        if self.value_bits == 32:
            return PayloadSpec((entries, Field("values", "float32", count)))
        buckets = bucket_count(size, self.bucket_size)
        return PayloadSpec((entries, Field("lowest", "float32", buckets), Field("step", "float32", buckets)))

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:  # noqa: ARG002
        """Return the indices within each bucket, in rising order, and the values there."""
        xp = array_namespace(x)
        exact = self.value_bits == 32
        entries, values, lowests, steps = [], [], [], []
        for block in blocks(x.shape[0], self.bucket_size):
            rows = flush(block.read(x))[:, : block.filled]
            order = xp.argsort(-xp.abs(rows), axis=1, stable=True)
            chosen = order[:, : min(self.k, block.filled)]
            if exact:
                chosen = xp.sort(chosen, axis=1)
                entries.append(xp.reshape(chosen, (-1,)))
                values.append(xp.reshape(_at(rows, chosen), (-1,)))
                continue
            last = xp.full_like(chosen, block.filled)  # replaces elements that are 0
            chosen = xp.sort(xp.where(_at(rows, chosen) == 0, last, chosen), axis=1)
            there = chosen < last
            chosen = xp.where(there, chosen, xp.zeros_like(chosen))
            kept = _at(rows, chosen)
            kept = xp.where(there, kept, xp.zeros_like(kept))
            entry, lowest, step = self._rounded(chosen, kept)
            entries.append(xp.reshape(entry, (-1,)))
            lowests.append(lowest)
            steps.append(step)
        parts = {"entries": split_bytes(join_blocks(entries, dtype=xp.uint8, like=x), self._width)}
        if exact:
            kept = xp.astype(join_blocks(values, dtype=x.dtype, like=x), xp.float32, copy=False)
            return {**parts, "values": flush(kept)}
        scales = {"lowest": lowests, "step": steps}
        return parts | {name: join_blocks(of, dtype=xp.float32, like=x) for name, of in scales.items()}

    @cached_property
    def _width(self) -> int:
        """Bytes of an entry."""
        return bytes_below(self.bucket_size << (0 if self.value_bits == 32 else self.value_bits))

    def _rounded(self, chosen: Array, kept: Array) -> tuple[Array, Array, Array]:
        """Return the entries of kept values in rows (index, sign and level; 0 if absent), and the scales."""
        xp = array_namespace(kept)
        magnitudes, bits = xp.abs(kept), self.value_bits
        lowest, step = scales_of(magnitudes, bits)
        level = levels_of(magnitudes, lowest, step, bits)
        sign = xp.astype(kept < 0, xp.int32) * (1 << bits - 1)
        entry = xp.astype(chosen, xp.int32) * (1 << bits) + sign + level
        return xp.where(magnitudes > 0, entry, xp.zeros_like(entry)), lowest, step

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return zeros with the values at their indices; each element searches for its index among the entries.

        With fewer bits per value, an entry is unused unless its index is above the index of the previous entry.
        """
        data = parts["entries"]
        xp = array_namespace(data)
        entries = join_bytes(data, self._width)
        count = entries.shape[0]
        if not count:
            return xp.zeros((size,), dtype=dtype, device=device(data))
        elements = xp.arange(size, device=device(data))
        numbers = xp.arange(count, device=device(data))
        bucket = xp.floor_divide(numbers, xp.full_like(numbers, self.k))
        if self.value_bits == 32:
            values = xp.astype(parts["values"], dtype, copy=False)
            within = xp.astype(entries, numbers.dtype)
        else:
            bits = self.value_bits
            lowest, step = (
                xp.astype(xp.take(parts[name], bucket, axis=0), dtype, copy=False)
                for name in ("lowest", "step")
            )
            code = xp.bitwise_and(entries, xp.full_like(entries, (1 << bits) - 1))
            sign = 1 << bits - 1
            level = xp.bitwise_and(code, xp.full_like(code, sign - 1))
            values = values_of(level, code >= sign, lowest, step)
            within = xp.astype(xp.bitwise_right_shift(entries, xp.full_like(entries, bits)), numbers.dtype)
            before = xp.concat([within[:1], within[:-1]])
            nothing = (within <= before) & (bucket * self.k < numbers)
            last = xp.full_like(within, self.bucket_size - 1)
            last = xp.where(
                bucket < size // self.bucket_size, last, xp.full_like(last, (size - 1) % self.bucket_size)
            )
            within = xp.where(nothing, last, within)
            values = xp.where(nothing, xp.zeros_like(values), values)
        places = bucket * self.bucket_size + within
        found = xp.searchsorted(places, elements)
        found = xp.where(found < count, found, xp.full_like(found, count - 1))
        there = xp.take(places, found, axis=0) == elements
        kept = xp.take(values, found, axis=0)
        return xp.where(there, kept, xp.zeros_like(kept))


def _at(rows: Array, chosen: Array) -> Array:
    """Return the elements of each row at some indices."""
    xp = array_namespace(rows)
    starts = xp.arange(rows.shape[0], dtype=chosen.dtype, device=device(rows)) * rows.shape[1]
    places = xp.reshape(chosen + starts[:, None], (-1,))
    return xp.reshape(xp.take(xp.reshape(rows, (-1,)), places, axis=0), chosen.shape)
