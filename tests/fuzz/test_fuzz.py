"""A short run of the fuzzers with fixed inputs; ``make fuzz`` tries new ones."""

import numpy as np
import pytest

import qcomp
from tests.fuzz.fuzzing import LEAST_BYTES, fuzz
from tests.fuzz.targets import OTHERS, TARGETS, Reading

INPUTS = 200


def quick_or_slow(number, target):
    """Of the compressors, every fourth is marked quick."""
    marks = [pytest.mark.exhaustive] if number % 4 and target in TARGETS[: -len(OTHERS)] else []
    return pytest.param(target, id=target.name, marks=marks)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [quick_or_slow(*each) for each in enumerate(TARGETS)])
def test_readers_raise_only_refusals(target):
    report = fuzz(target, range(INPUTS))
    assert not report.faults
    assert report.inputs == INPUTS
    assert report.refused > INPUTS // 20 or target is OTHERS[0]  # enough inputs are wrong


class Planted:
    """A target with a planted fault."""

    errors = (qcomp.PayloadError,)
    name = "planted"

    def __init__(self, read):
        self.read = read

    def make(self, rng):
        return Reading(rng.bytes(20), 0, self.read)


def refuse():
    raise qcomp.PayloadError("refused")


def test_refusals_do_not_count_as_faults():
    report = fuzz(Planted(refuse), range(5))
    assert (report.inputs, report.refused, report.faults) == (5, 5, [])


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (lambda: dict[int, int]()[3], "KeyError: 3"),
        (lambda: int("x"), "ValueError: invalid literal"),
        (lambda: np.zeros(LEAST_BYTES + 64 * 20 + 1000, dtype=np.uint8).sum(), "allocates"),
    ],
    ids=["another error", "an error of the same family", "much memory"],
)
def test_faults_are_reported(read, fault):
    report = fuzz(Planted(read), range(3))
    assert len(report.faults) == 3
    assert all(fault in text and "of planted" in text for text in report.faults)
    assert "3 faults" in str(report)


def test_a_number_makes_the_same_input_again():
    for target in TARGETS[::5]:
        first, again, other = (target.make(np.random.default_rng(n)).data for n in (7, 7, 8))
        assert first == again != other
