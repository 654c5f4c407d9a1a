"""Both codes: round trips, refusal of other bytes, and the same bytes from the compiled loops."""

import itertools
import logging
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp.backends import choice, registry
from qcomp.core import coding, kernels
from qcomp.core.coding import PURE, qsgd_codes, range_coder
from qcomp.core.errors import PayloadError

SIZES = (0, 1, 2, 7, 8, 100, 4097, (1 << 14) - 1, 1 << 14, (1 << 14) + 3)
LARGEST = (1, 2, 7, 100, 127, 128, 1000, 32767)
FAMILIES = {
    "zeros": lambda rng, n, s: np.zeros(n),
    "largest": lambda rng, n, s: np.full(n, s),
    "last": lambda rng, n, s: np.where(np.arange(n) == n - 1, s, 0),
    "sparse": lambda rng, n, s: (rng.random(n) < 0.002) * rng.integers(0, s + 1, n),
    "skewed": lambda rng, n, s: np.minimum(rng.geometric(0.6, n) - 1, s),
    "gaussian": lambda rng, n, s: np.minimum(np.rint(np.abs(rng.standard_normal(n)) * s / 4), s),
    "uniform": lambda rng, n, s: rng.integers(0, s + 1, n),
    "ends": lambda rng, n, s: rng.choice([0, s], n),
}


def drawn(family, size, largest):
    """Return levels and signs of a vector of a family, as bytes."""
    rng = np.random.default_rng([size, largest])
    levels = FAMILIES[family](rng, size, largest).astype("<u2")
    return levels.tobytes(), ((rng.random(size) < 0.5) & (levels > 0)).astype(np.uint8).tobytes()


@st.composite
def vectors(draw):
    """Draw the largest level, the levels and the signs."""
    largest = draw(st.sampled_from(LARGEST))
    level = st.sampled_from([0, 0, 0, 1, largest]) | st.integers(0, largest)
    signed = draw(st.lists(st.tuples(level, st.booleans()), max_size=60))
    levels = b"".join(k.to_bytes(2, "little") for k, _ in signed)
    return largest, levels, bytes(negative and k > 0 for k, negative in signed)


def encode(name, levels, negative, largest):
    return coding.encode(name, levels, negative, largest=largest)


def decode(name, data, size, largest):
    return coding.decode(name, data, size=size, largest=largest)


def compiled():
    pytest.importorskip("numba")
    return registry.load_coders()


@pytest.fixture(params=["pure", pytest.param("numba", marks=pytest.mark.slow)])
def name_of_kernels(request):
    if request.param == "numba":
        compiled()
    return request.param


def check(name, levels, negative, largest):
    """Raise AssertionError unless a vector round-trips, and damaged copies of its code are refused."""
    size = len(negative)
    data = encode(name, levels, negative, largest)
    assert decode(name, data, size, largest) == (levels, negative)
    for wrong in (data[:-1], data[: len(data) // 2], b"", data + b"\0", data + b"\0\0"):
        assert refused(name, wrong, size, largest), f"{wrong.hex()} of {data.hex()}"
    most = max(array("H", levels), default=0)
    if most > 1:
        for less in {1, most - 1}:
            assert refused(name, data, size, less) or decode(name, data, size, less)[0] != levels


def check_families(name):
    for family, size in itertools.product(FAMILIES, (1, 8, 100)):
        check(name, *drawn(family, size, 7), 7)


def refused(name, data, size, largest):
    try:
        levels, negative = decode(name, data, size, largest)
    except PayloadError:
        return True
    assert (len(levels), len(negative)) == (2 * size, size)
    k = np.frombuffer(levels, "<u2")
    assert np.max(k, initial=0) <= largest
    assert np.all(np.frombuffer(negative, np.uint8) <= np.minimum(k, 1))
    return False


@pytest.mark.parametrize("name", coding.CODINGS)
class TestBothCodes:
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("largest", [1, 7, 32767])
    def test_families_come_back(self, name, name_of_kernels, largest):
        with qcomp.backends.use(name_of_kernels):
            for family, size in itertools.product(FAMILIES, (0, 1, 8, 100, 1001)):
                check(name, *drawn(family, size, largest), largest)

    @pytest.mark.slow
    @pytest.mark.quick_cases(1)
    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(vector=vectors())
    def test_vectors_come_back(self, name, vector):
        largest, *vector = vector
        for kernels_name in ("pure", "numba"):
            with qcomp.backends.use(kernels_name):
                check(name, *vector, largest)

    def test_every_vector_of_three_elements_has_a_code_of_its_own(self, name):
        found = {}
        for signed in itertools.product((-2, -1, 0, 1, 2), repeat=3):
            levels = b"".join(abs(k).to_bytes(2, "little") for k in signed)
            negative = bytes(k < 0 for k in signed)
            check(name, levels, negative, 2)
            found[encode(name, levels, negative, 2)] = signed
        assert len(found) == 125

    @pytest.mark.slow
    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(data=st.binary(max_size=40), size=st.integers(0, 60), largest=st.sampled_from(LARGEST))
    def test_random_bytes_decode_to_a_vector_or_are_an_error(self, name, data, size, largest):
        self.compare_decoders(name, data, size, largest)

    @pytest.mark.slow
    @pytest.mark.quick_cases(1)
    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(vector=vectors(), data=st.data())
    def test_damaged_bytes_decode_to_a_vector_or_are_an_error(self, name, vector, data):
        largest, levels, negative = vector
        damaged = bytearray(encode(name, levels, negative, largest))
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        self.compare_decoders(name, bytes(damaged), len(negative), largest)

    @pytest.mark.slow
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("size", [1000, (1 << 14) + 3])
    def test_flipped_bits_of_longer_vectors(self, name, size):
        compiled()
        levels, negative = drawn("gaussian", size, 15)
        data = encode(name, levels, negative, 15)
        rng = np.random.default_rng(size)
        for at in [*range(16), *rng.integers(0, 8 * len(data), 6)]:
            damaged = bytearray(data)
            damaged[at // 8] ^= 1 << at % 8
            self.compare_decoders(name, bytes(damaged), size, 15)

    def compare_decoders(self, name, data, size, largest):
        """Only PayloadError is raised, and the compiled loops accept the same bytes as the pure ones."""
        found = []
        for kernels_name in ("pure", "numba"):
            with qcomp.backends.use(kernels_name):
                ok = not refused(name, data, size, largest)
                found.append(decode(name, data, size, largest) if ok else None)
        assert found[0] == found[1]

    @pytest.mark.slow
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("largest", LARGEST)
    def test_compiled_loops_make_the_same_bytes(self, name, largest):
        compare_loops(compiled(), name, largest, SIZES)

    def test_any_buffer_is_accepted(self, name, name_of_kernels):
        levels, negative = drawn("gaussian", 1001, 7)
        with qcomp.backends.use(name_of_kernels):
            data = encode(name, levels, negative, 7)
            arrays = np.frombuffer(levels, "<u2"), np.frombuffer(negative, np.uint8)
            for as_buffer in (bytearray, memoryview):
                assert encode(name, as_buffer(levels), as_buffer(negative), 7) == data
                assert decode(name, as_buffer(data), 1001, 7) == (levels, negative)
            assert encode(name, *map(memoryview, arrays), 7) == data
            none = memoryview(np.empty(0, "<u2"))
            assert decode(name, encode(name, none, none, 7), 0, 7) == (b"", b"")

    @pytest.mark.parametrize(
        ("levels", "negative", "message"),
        [
            ([3, 8, 9], [0, 0, 0], "element 1 has level 8 and negative 0; expected a level from 0 to 7"),
            ([3, 7, 0], [0, 1, 1], "element 2 has level 0 and negative 1"),
            ([3, 7, 1], [0, 1, 2], "element 2 has level 1 and negative 2"),
            ([3, 7], [0, 1, 0], "levels has 4 bytes; expected 6"),
        ],
    )
    def test_arguments_that_are_not_a_vector_are_refused(
        self, name, name_of_kernels, levels, negative, message
    ):
        with qcomp.backends.use(name_of_kernels), pytest.raises(ValueError, match=message):
            encode(name, array("H", levels).tobytes(), bytes(negative), 7)

    @pytest.mark.parametrize("largest", [0, -1, 32768])
    def test_the_largest_level_is_checked(self, name, largest):
        with pytest.raises(ValueError, match=f"largest is {largest}; expected an integer from 1 to 32767"):
            encode(name, b"", b"", largest)
        with pytest.raises(ValueError, match=f"largest is {largest}"):
            decode(name, b"", 0, largest)

    def test_sizes_are_checked(self, name):
        with pytest.raises(ValueError, match="size is -1; expected at least 0"):
            decode(name, b"\0", -1, 1)


def test_an_unknown_code_is_an_error():
    with pytest.raises(ValueError, match="coding is 'zip'; expected one of elias, range"):
        encode("zip", b"", b"", 1)


def test_a_decoder_takes_no_more_time_than_its_size(name_of_kernels):
    """If bytes announce more than the vector holds, they are read only up to its size."""
    with qcomp.backends.use(name_of_kernels):
        for data in (b"\x01" + b"\xff" * 100_000, b"\0" + bytes(100_000), b"\xff" * 100_000):
            for name in coding.CODINGS:
                assert refused(name, data, 5, 7)


@pytest.mark.slow
def test_only_dense_codes_of_an_encoder_are_accepted():
    """Of all two-byte bodies for three elements, as many are accepted as vectors have a dense code of that length."""
    short = 0
    for signed in itertools.product(range(-3, 4), repeat=3):
        short += 8 < qsgd_codes.dense_length(array("H", map(abs, signed))) <= 16
    bodies = (i.to_bytes(2, "big") for i in range(1 << 16))
    assert sum(not refused("elias", b"\0" + body, 3, 3) for body in bodies) == short > 100


def compare_loops(coders, name, largest, sizes):
    """Raise AssertionError where loops produce other bytes than the pure ones."""
    for family, size in itertools.product(FAMILIES, sizes):
        if size > 5000 and family not in ("gaussian", "uniform", "sparse"):
            continue
        levels, negative = (memoryview(part) for part in drawn(family, size, largest))
        if name == "elias":
            data = PURE.paper_encode(levels, negative)
            assert coders.paper_encode(levels, negative) == data, (family, size)
            found = coders.paper_decode(memoryview(data), size, largest)
        else:
            data = range_coder.encode(PURE, levels, negative, largest)
            assert range_coder.encode(coders, levels, negative, largest) == data, (family, size)
            found = range_coder.decode(coders, memoryview(data), size, largest)
        assert found == (levels, negative), (family, size)


class TestBrokenOnesAreFound:
    """Each check above fails for a coder that violates it."""

    @pytest.mark.parametrize(
        ("name", "broken"),
        [
            ("elias", {"paper_decode": lambda data, n, s: PURE.paper_decode(cut(data), n, s)}),
            ("elias", {"paper_decode": lambda data, n, s: PURE.paper_decode(filled(data), n, s)}),
            ("range", {"pop": lambda data, n, s, *rest: PURE.pop(filled(data), n, s, *rest)}),
            ("elias", {"paper_encode": lambda k, signs: PURE.paper_encode(k, memoryview(bytes(len(signs))))}),
            ("range", {"push": lambda k, signs, *rest: PURE.push(k, memoryview(bytes(len(signs))), *rest)}),
            ("range", {"push": lambda *of: PURE.push(*of)[:-2]}),
        ],
        ids=["goes on", "ends early", "no end", "no signs", "no signs pushed", "a word short"],
    )
    def test_codes(self, monkeypatch, name, broken):
        monkeypatch.setattr(kernels, "_coders", lambda by_setting: PURE._replace(**broken))
        with qcomp.backends.use("auto"), pytest.raises((AssertionError, PayloadError)):
            check_families(name)

    @pytest.mark.parametrize(
        ("name", "broken"),
        [
            ("elias", {"paper_encode": lambda *of: PURE.paper_encode(*of) + b"\0"}),
            ("range", {"push": lambda k, signs, model, lanes: PURE.push(k, signs, model, min(lanes, 1))}),
            ("range", {"count_classes": lambda k, s, fine: [c + 9 for c in PURE.count_classes(k, s, fine)]}),
        ],
        ids=["a byte more", "one lane", "other counts"],
    )
    def test_loops(self, name, broken):
        with pytest.raises(AssertionError):
            compare_loops(PURE._replace(**broken), name, 7, SIZES)


def cut(data):
    """Accept data whose trailing zeros were dropped."""
    return memoryview(bytes(data).rstrip(b"\0") or b"\0")


def filled(data):
    """Accept data that is followed by zeros."""
    return memoryview(bytes(data) + bytes(64))[: len(data) + 64]


class TestChoice:
    """Coders work on host bytes, so no array selects their loops: contexts and the setting select them."""

    @pytest.fixture(autouse=True)
    def automatic(self, monkeypatch):
        compiled()
        monkeypatch.setattr(choice, "_default", ("auto", None))
        monkeypatch.setattr(choice, "_told", set())

    def name(self):
        found = kernels.chosen_coders()
        return "pure" if found is None else found.name

    def test_compiled_loops_are_used_unless_the_pure_version_is_requested(self):
        assert self.name() == "numba"
        with qcomp.backends.use("pure"):
            assert self.name() == "pure"
            with kernels.use_kernels(SimpleNamespace(takes=lambda x: True)):  # for arrays of any device
                assert self.name() == "numba"
        qcomp.backends.set_default("pure")
        assert self.name() == "pure"
        with qcomp.backends.use("numba"):
            assert self.name() == "numba"
        with qcomp.backends.use("auto"):
            assert self.name() == "numba"

    def test_the_environment_is_the_first_setting(self, monkeypatch):
        monkeypatch.setattr(choice, "_default", None)
        monkeypatch.setenv("QCOMP_KERNELS", "pure")
        assert self.name() == "pure"

    def test_without_numba_the_pure_loops_are_used_and_this_is_logged_once(self, monkeypatch, caplog):
        monkeypatch.setattr(registry, "CODERS", "qcomp_numba_is_missing")
        levels, negative = drawn("gaussian", 100, 7)
        with caplog.at_level(logging.WARNING, logger="qcomp"):
            for name in coding.CODINGS:
                check(name, levels, negative, 7)
        assert self.name() == "pure"
        (record,) = caplog.records
        assert "vectors are coded by the pure version, which is many times slower" in record.message
        assert "pip install 'qcomp[numba]'" in record.message

    def test_ranks_use_the_loops_of_the_context(self):
        with qcomp.backends.use("pure"):
            assert qcomp.comm.run_local(2, lambda comm: self.name()) == ["pure", "pure"]
