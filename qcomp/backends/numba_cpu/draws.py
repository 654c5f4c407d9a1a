"""Compiled generator of the random draws of consecutive buckets, as in `qcomp.core.numeric.random.draws16`."""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu.jit import Halves, Words, inline
from qcomp.backends.numba_cpu.primitives import U

L = np.uint64


@inline
def philox(counter: int, hop: int, k0: np.uint32, k1: np.uint32, words: Words) -> None:
    """Fill four runs of words with the four outputs of Philox4x32-10 for consecutive counters.

    Words are kept in the lower halves of 64-bit lanes, so a lane multiplies 32 by 32 bits in one instruction, without
    shuffles.
    """
    width = words.size // 4
    out0, out1, out2, out3 = (
        words[:width],
        words[width : 2 * width],
        words[2 * width : 3 * width],
        words[3 * width :],
    )
    low = L(0xFFFFFFFF)
    for j in range(out0.size):
        c0, c1, c2, c3 = L(counter + j) & low, L(hop), L(0), L(0)
        a, b = L(k0), L(k1)
        for _ in range(10):
            product0 = L(0xD2511F53) * (c0 & low)
            product1 = L(0xCD9E8D57) * (c2 & low)
            c0, c1, c2, c3 = product1 >> L(32) ^ c1 ^ a, product1, product0 >> L(32) ^ c3 ^ b, product0
            a = a + L(0x9E3779B9) & low
            b = b + L(0xBB67AE85) & low
        out0[j] = U(c0 & low)
        out1[j] = U(c1 & low)
        out2[j] = U(c2 & low)
        out3[j] = U(c3 & low)


@inline
def spread(words: Words, count: int, width: int, draws: Halves) -> None:
    """Store the halves of the words of ``count`` buckets in the order of their elements."""
    for bucket in range(count):
        for i in range(4):
            at = (bucket * 8 + 2 * i) * width
            start = (i * count + bucket) * width
            _split(words[start : start + width], draws[at : at + width], draws[at + width : at + 2 * width])


@inline
def _split(words: Words, low: Halves, high: Halves) -> None:
    for j in range(words.size):
        low[j] = np.uint16(words[j] & U(0xFFFF))
        high[j] = np.uint16(words[j] >> U(16))


@inline
def spread_64(words: Words, count: int, draws: Halves) -> None:
    """Store what `spread` stores for buckets of 512 elements, three times as fast, since the inner loop is unrolled."""
    for bucket in range(count):
        for i in range(4):
            source = words[(i * count + bucket) * 64 : (i * count + bucket + 1) * 64]
            target = draws[bucket * 512 + i * 128 : bucket * 512 + (i + 1) * 128]
            for j in range(64):
                target[j] = np.uint16(source[j] & U(0xFFFF))
                target[j + 64] = np.uint16(source[j] >> U(16))
