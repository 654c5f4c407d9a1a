"""Philox, the layout of draws, keys, and the one function that can replace draws."""

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import array_api_compat.numpy
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcomp.core.numeric import random
from qcomp.core.numeric.buckets import Block, blocks
from qcomp.core.numeric.random import SHARED_RANK, Key, draws16, fold_key, philox4x32, replace_draws
from qcomp.testing.libraries import to_numpy

KNOWN_ANSWERS = [
    ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
    ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
    ("243f6a8885a308d313198a2e03707344", "a4093822299f31d0", "d16cfe0994fdcceb5001e42024126ea1"),
]
"""Counter, key and output of the Random123 distribution, in hexadecimal."""

WORD = st.integers(0, 2**32 - 1)


def words(text: str) -> tuple[int, ...]:
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))


def reference_philox(*words: int) -> tuple[int, ...]:
    """Philox4x32-10 as written by Salmon et al., with one wide product for high and low word."""
    c0, c1, c2, c3, k0, k1 = words
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def reference_draws(key: Key, size: int, bucket_size: int) -> list[int]:
    """Return the draw of every element, one by one, by the definition of Philox."""
    seed = key.seed % 2**32, key.seed >> 32
    stream = reference_philox(key.step % 2**32, key.step >> 32, key.tensor, key.rank, *seed)[:2]
    draws = []
    for element in range(size):
        bucket, inside = divmod(element, bucket_size)
        count = min(bucket_size, size - bucket * bucket_size)
        length = bucket_size if count == bucket_size else max(8, 1 << (count - 1).bit_length())
        d, j = divmod(inside, length // 8)
        block = (key.bucket + bucket) * (bucket_size // 8) + j
        word = reference_philox(block, key.hop, 0, 0, *stream)[d // 2]
        draws.append(word >> 16 if d % 2 else word & 0xFFFF)
    return draws


def draws(key: Key, size: int, bucket_size: int, like: Any) -> np.ndarray:
    """Return the draws of all elements of a vector, without those of the padding."""
    parts = [
        to_numpy(block.flat(draws16(key, block, bucket_size=bucket_size, like=like)))
        for block in blocks(size, bucket_size)
    ]
    assert all(part.dtype == np.float32 for part in parts)
    return np.concatenate(parts)


LIKE = np.zeros(1, dtype=np.float32)


class TestPhilox:
    @pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
    def test_known_answers_of_integers(self, counter, key, expected):
        assert philox4x32(words(counter), words(key)) == words(expected)

    def test_known_answers_of_int32_arrays(self, library):
        columns = (
            np.array([words(c) + words(k) for c, k, _ in KNOWN_ANSWERS], dtype=np.uint32).view(np.int32).T
        )
        counter = tuple(library.array(column) for column in columns[:4])
        key = tuple(library.array(column) for column in columns[4:])
        out = [library.numpy(w) for w in philox4x32(counter, key, like=counter[0])]
        assert {w.dtype for w in out} == {np.dtype(np.int32)}
        assert [tuple(int(w) for w in row) for row in np.array(out).view(np.uint32).T] == [
            words(expected) for _, _, expected in KNOWN_ANSWERS
        ]

    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
    def test_both_arithmetics_equal_the_reference(self, counter, key):
        expected = reference_philox(*counter, *key)
        assert philox4x32(counter, key) == expected
        # Integers and arrays may be mixed.
        c0 = np.array([counter[0]], dtype=np.uint32).view(np.int32)
        mixed = philox4x32((c0, *counter[1:]), key, like=c0)
        assert tuple(int(w.view(np.uint32)[0]) for w in mixed) == expected

    def test_known_answers_of_a_compiled_program(self):
        """Some words are traced, the others are integers, and the shapes differ."""
        counter, key, expected = map(words, KNOWN_ANSWERS[2])
        c0, k1 = np.array([counter[0], key[1]], dtype=np.uint32).view(np.int32)

        @jax.jit
        def run(c0, k1):
            return philox4x32((c0, *counter[1:]), (key[0], k1), like=c0)

        out = run(np.full((2, 3), c0), k1)
        assert [{int(word) for word in w.view(np.uint32).flat} for w in map(np.asarray, out)] == [
            {word} for word in expected
        ]

    def test_constants_do_not_become_arrays(self, monkeypatch):
        """For a short vector, making them would take longer than the arithmetic."""
        made = []
        as_array = array_api_compat.numpy.asarray
        monkeypatch.setattr(
            array_api_compat.numpy, "asarray", lambda *a, **o: made.append(a) or as_array(*a, **o)
        )
        x = np.zeros(8, dtype=np.int32)
        philox4x32((x, 0, 0, 0), (1, 2), like=x)
        assert not made

    @staticmethod
    def flips() -> Iterator[list[int]]:
        """For each bit of counter and key: how many of the 4 * 32 output bits flip, for 20 random inputs."""
        inputs = np.random.default_rng(1).integers(0, 2**32, (20, 6)).tolist()
        before = [philox4x32(tuple(row[:4]), tuple(row[4:])) for row in inputs]
        for bit in range(192):
            count = []
            for row, old in zip(inputs, before, strict=True):
                changed = list(row)
                changed[bit // 32] ^= 1 << bit % 32
                new = philox4x32(tuple(changed[:4]), tuple(changed[4:]))
                count.append(sum((a ^ b).bit_count() for a, b in zip(old, new, strict=True)))
            yield count

    @classmethod
    def check_avalanche(cls):
        # 128 fair coins per input: mean 64, variance 32. Allow six standard deviations of each mean.
        flips = np.array(list(cls.flips()))
        assert abs(flips.mean() - 64) < 6 * np.sqrt(32 / flips.size)
        assert np.abs(flips.mean(axis=1) - 64).max() < 6 * np.sqrt(32 / flips.shape[1])

    def test_one_input_bit_flips_half_of_the_output_bits(self):
        self.check_avalanche()

    def test_too_few_rounds_are_caught(self, monkeypatch):
        monkeypatch.setattr(random, "_ROUNDS", 3)
        with pytest.raises(AssertionError):
            self.check_avalanche()


class TestDraws:
    @pytest.mark.parametrize("size", [70, 64, 1, 9, 33])
    def test_equal_the_reference_element_by_element(self, size):
        key = Key(seed=2**40 + 7, step=2**33 + 5, tensor=3, rank=2, hop=1, bucket=11)
        assert draws(key, size, 32, LIKE).tolist() == reference_draws(key, size, 32)

    def test_are_the_same_in_every_library(self, library):
        key = Key(seed=5, step=3, tensor=1, rank=2, hop=0, bucket=4)
        like = library.array([0.0], dtype=np.float32)
        assert draws(key, 70, 32, like).tolist() == reference_draws(key, 70, 32)

    def test_rows_that_would_share_draws_are_refused(self):
        """With rows of 64 and a stride of 8, each row would have most draws of the last one."""
        for bucket_size in (8, 32, 63):
            rows = next(iter(blocks(200, 64)))
            with pytest.raises(
                ValueError, match=f"bucket_size is {bucket_size}; .* the 64 elements of a row"
            ):
                draws16(Key(), rows, bucket_size=bucket_size, like=LIKE)

    def test_another_layout_is_caught(self):
        """Neighbouring elements do not share a block: the reference distinguishes such a layout from the one above."""
        key = Key()
        first = reference_philox(0, 0, 0, 0, *fold_key(key, like=LIKE))
        neighbours = [half for word in first for half in (word & 0xFFFF, word >> 16)]
        assert draws(key, 32, 32, LIKE)[:8].tolist() != neighbours
        assert draws(key, 32, 32, LIKE)[::4].tolist() == neighbours

    @settings(derandomize=True, deadline=None, max_examples=50)
    @given(st.integers(0, 5), st.integers(1, 200), st.sampled_from([8, 16, 64]), st.integers(0, 2**20))
    def test_of_a_sub_range_are_the_slice_of_the_whole(self, skipped, size, bucket_size, bucket):
        whole = draws(Key(bucket=bucket), skipped * bucket_size + size, bucket_size, LIKE)
        part = draws(Key(bucket=bucket + skipped), size, bucket_size, LIKE)
        assert part.tolist() == whole[skipped * bucket_size :].tolist()

    def test_every_part_of_a_key_changes_the_stream(self):
        changes = [{}, {"hop": 1}, {"hop": 2}, {"rank": SHARED_RANK}, {"bucket": 1 << 20}]
        for name, bits in [("seed", 64), ("step", 64), ("tensor", 32), ("rank", 32)]:
            changes += [{name: 1 << bit} for bit in (0, 1, 15, 16, 31, 32, 48, 63) if bit < bits]
        streams = [draws(Key()._replace(**change), 4096, 512, LIKE) for change in changes]
        # Two independent streams agree in 4096 / 65536 places on average: Poisson with mean 1/16; eight or more
        # have a probability of 4e-15.
        for i, one in enumerate(streams):
            for other in streams[:i]:
                assert (one == other).sum() < 8

    def test_are_uniform(self):
        sample = draws(Key(seed=1), 1 << 16, 512, LIKE)
        assert sample.min() >= 0
        assert sample.max() <= 65535
        assert (sample == np.floor(sample)).all()
        # chi-square of 256 cells: mean 255, standard deviation sqrt(510).
        for digit in (sample // 256, sample % 256):
            counts = np.bincount(digit.astype(int), minlength=256)
            assert abs(((counts - 256) ** 2 / 256).sum() - 255) < 6 * np.sqrt(510)


class TestKey:
    @pytest.mark.parametrize(
        ("name", "bits"),
        [("seed", 64), ("step", 64), ("tensor", 32), ("rank", 32), ("hop", 32), ("bucket", 32)],
    )
    def test_out_of_range_says_what(self, name, bits):
        block = Block(0, 1, 8, 8, 0)
        draws16(Key(**{name: 2**bits - 1}), block, bucket_size=8, like=LIKE)
        for value in (-1, 2**bits, np.int64(-1)):
            for make in (Key, Key()._replace):
                with pytest.raises(
                    ValueError, match=rf"Key\.{name} is {value}; expected 0 to 2\*\*{bits} - 1"
                ):
                    make(**{name: value})

    def test_at_refuses_values_out_of_range(self):
        with pytest.raises(ValueError, match=r"Key\.hop is -1"):
            Key().at(hop=-1)
        with pytest.raises(ValueError, match=r"Key\.bucket is -1"):
            Key().at(bucket=-1)

    def test_is_a_tuple_that_compilers_and_pickle_can_rebuild(self):
        key = Key(1, 2, 3, 4, 5, 6)
        assert pickle.loads(pickle.dumps(key)) == copy.deepcopy(key) == jax.tree.map(lambda part: part, key)
        assert type(jax.tree.map(lambda part: None, key)) is Key

    def test_at_changes_hop_and_bucket_only(self):
        key = Key(1, 2, 3, 4, 5, 6)
        assert key.at() == key
        assert key.at(hop=0) == Key(1, 2, 3, 4, 0, 6)
        assert key.at(bucket=0) == Key(1, 2, 3, 4, 5, 0)

    @pytest.mark.parametrize("kind", [np.int64, np.uint8, np.uint64])
    def test_integers_of_numpy_are_integers(self, library, kind):
        plain = draws(Key(7, 6, 5, 4, 3, 2), 32, 32, LIKE)
        like = library.array([0.0], dtype=np.float32)
        assert draws(Key(*map(kind, (7, 6, 5, 4, 3, 2))), 32, 32, like).tolist() == plain.tolist()

    def test_arrays_equal_integers(self, library):
        like = library.array([0.0], dtype=np.float32)
        key = Key(*(library.array(value, dtype=np.int32) for value in (7, 6, 5, 4)))
        assert draws(key, 32, 32, like).tolist() == reference_draws(Key(7, 6, 5, 4), 32, 32)

    def test_traced_equals_integers(self):
        jax = pytest.importorskip("jax")

        @jax.jit
        def traced(x, seed, step, tensor, rank):
            key = Key(seed, step, tensor, rank, hop=1, bucket=3)
            return draws16(key, Block(0, 2, 32, 32, 1), bucket_size=32, like=x)

        for values in [(7, 6, 5, 4), (2**31 - 1, 0, 1, 0)]:
            got = traced(jax.numpy.zeros(1), *(jax.numpy.asarray(v, dtype="int32") for v in values))
            expected = reference_draws(Key(*values, hop=1, bucket=4), 64, 32)
            assert np.array(got).ravel().tolist() == expected


class TestReplaceDraws:
    block = Block(0, 2, 8, 8, 3)

    def read(self) -> np.ndarray:
        return to_numpy(draws16(Key(rank=1, bucket=5), self.block, bucket_size=8, like=LIKE))

    def test_source_gets_key_and_block_and_is_broadcast(self, library):
        like = library.array([0.0], dtype=np.float32)
        seen = []

        def source(key, block):
            seen.append((key, block))
            return np.arange(8) * 9362

        key = Key(rank=1, bucket=5)
        with replace_draws(source):
            got = library.numpy(draws16(key, self.block, bucket_size=8, like=like))
        assert seen == [(key, self.block)]
        assert got.dtype == np.float32
        assert got.tolist() == [[float(9362 * i) for i in range(8)]] * 2

    def test_constants_are_broadcast(self):
        with replace_draws(lambda key, block: 65535):
            assert (self.read() == np.full((2, 8), 65535.0)).all()

    def test_the_real_draws_return_afterwards(self):
        before = self.read()
        with replace_draws(lambda key, block: 1):
            with pytest.raises(ZeroDivisionError), replace_draws(lambda key, block: 1 / 0):
                self.read()
            assert (self.read() == 1).all()
        assert (self.read() == before).all()

    def test_other_threads_keep_the_real_draws(self):
        before, got = self.read(), []
        with replace_draws(lambda key, block: 1):
            thread = threading.Thread(target=lambda: got.append(self.read()))
            thread.start()
            thread.join()
        assert (got[0] == before).all()
