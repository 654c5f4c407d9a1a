"""What the quick run and CI leave out: all but n of ``quick_cases(n)``, and nine tenths of the exhaustive tests."""

import pytest

from tests.conftest import _is_in_tenth, _thin_out


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
        Item(f"a.py::test[{i}]", *marks, *[pytest.mark.exhaustive.mark for _ in range(i in slow)])
        for i in range(cases)
    ]
    others = [Item("a.py::other[0]"), Item("b.py::test[0]")]
    _thin_out([*items, *others])
    assert not any("exhaustive" in other.markers for other in others)
    return [i for i, item in enumerate(items) if "exhaustive" not in item.markers]


def test_n_cases_stay_quick_the_same_ones_in_every_run():
    assert len(quick(30, 7)) == 7
    assert quick(30, 7) == quick(30, 7)
    assert quick(3, 7) == [0, 1, 2]


def test_slow_cases_are_not_among_them():
    found = quick(10, 4, slow=range(3, 10))
    assert found == [0, 1, 2]
    assert len(quick(10, 2, slow=[0, 1])) == 2


def test_ten_tenths_are_all_exhaustive_tests_and_each_has_the_others():
    exhaustive = [Item(f"a.py::test[{i}]", pytest.mark.exhaustive.mark) for i in range(200)]
    other = Item("a.py::other")
    parts = [{item for item in [*exhaustive, other] if _is_in_tenth(item, tenth)} for tenth in range(10)]
    assert set().union(*parts) == {*exhaustive, other}
    assert sum(map(len, parts)) == len(exhaustive) + 10
    assert all(other in part and 10 <= len(part) <= 32 for part in parts)
