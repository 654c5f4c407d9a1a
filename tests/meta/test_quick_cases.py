"""The mark ``quick_cases(n)``: n cases stay quick, the same ones in every run."""

import pytest

from tests.conftest import _thin_out


class Item:
    """A case of a test, as far as the mark needs it."""

    def __init__(self, name, *markers):
        self.nodeid, self.markers = name, {marker.name: marker for marker in markers}

    def get_closest_marker(self, name):
        return self.markers.get(name)

    def add_marker(self, name):
        self.markers[name] = getattr(pytest.mark, name).mark


def quick(cases, n, *, slow=()):
    marks = [pytest.mark.quick_cases(n).mark]
    items = [
        Item(f"a.py::test[{i}]", *marks, *[pytest.mark.slow.mark for _ in range(i in slow)])
        for i in range(cases)
    ]
    others = [Item("a.py::other[0]"), Item("b.py::test[0]")]
    _thin_out([*items, *others])
    assert not any("slow" in other.markers for other in others)
    return [i for i, item in enumerate(items) if "slow" not in item.markers]


def test_n_cases_stay_quick_the_same_ones_in_every_run():
    assert len(quick(30, 7)) == 7
    assert quick(30, 7) == quick(30, 7)
    assert quick(3, 7) == [0, 1, 2]


def test_slow_cases_are_not_among_them():
    found = quick(10, 4, slow=range(3, 10))
    assert found == [0, 1, 2]
    assert len(quick(10, 2, slow=[0, 1])) == 2
