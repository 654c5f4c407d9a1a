"""`plain_numbers` converts a dataclass's numbers to Python's own; `require` raises ValueError for a bad argument."""

from dataclasses import fields
from numbers import Integral, Real
from typing import Any

_PAIR = tuple[float, float]
_EXPECTED: dict[Any, str] = {
    float: "a number",
    float | None: "a number, or None",
    _PAIR: "two numbers",
    _PAIR | None: "two numbers, or None",
}


def plain_numbers(settings: Any) -> None:
    """Replace the numbers of a frozen dataclass by Python's own; raise TypeError if a number field holds anything else.

    A NumPy scalar of float64 would make float32 arrays float64. Also, it equals the Python number, so a cache could
    return what was computed for the other. The class that introduces a field determines its type: a derived class that
    writes ``learning_rate: float = 0.1`` sets a new default, but the field still takes schedules.
    """
    for field in fields(settings):
        given, kind = getattr(settings, field.name), _introduced_as(type(settings), field.name)
        pair = kind in (_PAIR, _PAIR | None) and isinstance(given, list | tuple)
        plain = tuple(map(_plain, given)) if pair else _plain(given)
        if kind in _EXPECTED and not _fits(plain, kind):
            has_array = any(hasattr(x, "shape") for x in (plain if pair else [plain]))
            cure = ": convert an array to a number with float()" if has_array else ""
            raise TypeError(f"{field.name} is {given!r:.200}; expected {_EXPECTED[kind]}{cure}")
        if plain is not given:
            object.__setattr__(settings, field.name, plain)


def _introduced_as(kind: type, name: str) -> Any:
    """Return the type of a field in the base class that introduces it."""
    classes = (vars(each).get("__dataclass_fields__", {}) for each in reversed(kind.__mro__))
    return next(declared[name].type for declared in classes if name in declared)


def _plain(value: object) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _fits(value: object, kind: object) -> bool:
    if value is None:
        return kind in (float | None, _PAIR | None)
    if kind in (_PAIR, _PAIR | None):
        return isinstance(value, tuple) and all(_fits(each, float) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(name: str, value: object, holds: bool, expected: str) -> None:
    """Raise ValueError unless a condition of an argument holds."""
    if not holds:
        raise ValueError(f"{name} is {value!r}; expected {expected}")
