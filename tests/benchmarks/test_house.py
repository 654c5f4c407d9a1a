import house


def test_few_parameters_may_be_anything():
    shares = house.untyped()
    assert shares["any"] < 0.1
    assert shares["any_within"] < 0.14


def test_other_names_of_any_are_found(monkeypatch, tmp_path):
    (tmp_path / "one.py").write_text(
        "from typing import Any\n\nArray = Any\ndef f(x: Array, y: int | Any): ...\n"
    )
    (tmp_path / "two.py").write_text(
        "from qcomp.one import Array\n\ndef g(x: Array, y: list[Array], z: int): ...\n"
    )
    (tmp_path / "three.py").write_text("from numpy import Array\n\ndef h(x: Array, self): ...\n")
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    assert house.untyped() == {"any": 3 / 6, "any_within": 4 / 6}
