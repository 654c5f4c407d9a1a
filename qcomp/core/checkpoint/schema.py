"""The kinds of entries of a saved state, such as `Number`: each checks a value before the value is used."""

import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from qcomp.core.numeric.arrays import dtype_name, host_bytes, itemsize, require_dense

LARGEST = 1 << 53
"""The largest integer in a saved state; float64 represents all integers up to it."""

_LONGEST_TEXT = 1 << 26
"""The most bytes of JSON text. The digests of a model take about a hundred bytes for each array."""

_LONGEST = 60
"""The most characters of a value in a message."""


_CURE = "it is damaged, or not from qcomp; load an earlier one"


class Kind(Protocol):
    """The accepted values of an entry."""

    @property
    def expected(self) -> str:
        """The values that are accepted, in words."""
        ...

    def read(self, value: Any) -> Any:
        """Return a value in its original type, whatever the file format; raises ValueError or TypeError."""
        ...


class Whole(NamedTuple):
    """An integer; booleans and floats are refused."""

    least: int = 0
    most: int = LARGEST

    @property
    def expected(self) -> str:
        """The range."""
        return f"an integer from {self.least} to {self.most}"

    def read(self, value: Any) -> int:
        """Return the integer."""
        if not _is_scalar(value, "int", "uint"):
            raise TypeError
        found = operator.index(value)
        if not self.least <= found <= self.most:
            raise ValueError
        return found


class Number(NamedTuple):
    """A real number in a saved state, finite by default.

    Parameters
    ----------
    least, most : float
        The range, with both ends.
    whole : bool
        Whether the number must be whole.
    finite : bool
        Whether the number must be finite. If not, the range only applies with ``whole``.

    Examples
    --------
    >>> from qcomp.extend import Number
    >>> steps = Number(least=0, whole=True)
    >>> steps.expected, steps.read(3)
    ('a whole number, at least 0', 3.0)
    """

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    finite: bool = True

    @property
    def expected(self) -> str:
        """The range."""
        what = "a whole number" if self.whole else "a finite number" if self.finite else "a number"
        least = f", at least {self.least:g}" if self.least > -math.inf else ""
        return what + least + (f", at most {self.most:g}" if self.most < math.inf else "")

    def read(self, value: Any) -> float:
        """Return the number as a float."""
        if not _is_scalar(value, "int", "uint", "float", "bfloat"):
            raise TypeError
        found = float(value)
        if self.finite or self.whole:
            if not (math.isfinite(found) and self.least <= found <= self.most):
                raise ValueError
            if self.whole and not found.is_integer():
                raise ValueError
        return found


class Numbers:
    """A list of real numbers, which need not be finite."""

    most = 1 << 17
    expected = f"a list of at most {most} numbers"

    def read(self, value: Any) -> list[float]:
        """Return the numbers as floats."""
        if not isinstance(value, list | tuple) and not (_is_array(value) and len(value.shape) == 1):
            raise TypeError
        if len(value) > self.most:
            raise ValueError
        return [Number(finite=False).read(each) for each in value]


class Text:
    """A text."""

    expected = "a text"

    def read(self, value: Any) -> str:
        """Return the text."""
        if not isinstance(value, str) and not (
            _is_array(value) and value.shape == () and value.dtype.kind == "U"
        ):
            raise TypeError
        return str(value)


class NumericArray:
    """An array of numbers."""

    expected = "an array of numbers"

    def read(self, value: Any) -> Any:
        """Return the array."""
        if not _is_array(value):
            raise TypeError
        itemsize(dtype_name(value.dtype))  # raises for dtypes without a size, such as dtypes of texts
        return value


class Entries:
    """A dict."""

    expected = "a dict"

    def read(self, value: Any) -> Mapping[Any, Any]:
        """Return the dict."""
        if not isinstance(value, Mapping):
            raise TypeError
        return value


class Several:
    """A list or a tuple."""

    expected = "a list"

    def read(self, value: Any) -> Sequence[Any]:
        """Return the list."""
        if not isinstance(value, list | tuple):
            raise TypeError
        return value


def read(saved: Any, key: Any, kind: Kind, where: str = "the state") -> Any:
    """Return an entry in its original type, which does not depend on the file format.

    Raises ValueError, which names the entry, its value and what was expected, if the entry is missing or not accepted.
    ``saved`` may read the entry from a file only when asked for it. Messages call ``saved`` what ``where`` says.
    """
    try:
        value = saved[key]
    except LookupError:
        raise ValueError(f"{where} lacks {shown(key)}; expected {kind.expected}: {_CURE}") from None
    except Exception as error:  # any error of the library that reads the file
        raise ValueError(
            f"{where} has {shown(key)}, which cannot be read ({type(error).__name__}: {shown(str(error))}): it is "
            "damaged; load an earlier one"
        ) from error
    try:
        return kind.read(value if isinstance(kind, NumericArray) else plain(value))
    except (TypeError, ValueError, OverflowError, AttributeError, LookupError) as error:
        raise ValueError(
            f"{where} has {str(key)[:_LONGEST]}={shown(value)}; expected {kind.expected}: {_CURE}"
        ) from error


def plain(value: Any) -> Any:
    """Return an entry in its original form; if `to_arrays` has encoded it, decode it."""
    if _is_array(value) and len(value.shape) == 1 and dtype_name(value.dtype) == "uint8":
        if value.shape[0] > _LONGEST_TEXT:
            raise ValueError(f"a text of {value.shape[0]} bytes; expected at most {_LONGEST_TEXT}")
        return from_json(host_bytes(value))
    return value


def from_json(text: str | bytes) -> Any:
    """Return the value of JSON text; raise ValueError if it is malformed, or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


def shown(value: Any) -> str:
    """Return a short text for any value, however large or deeply nested it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST else f"{value[:_LONGEST]}...")
    if isinstance(value, int) and value.bit_length() > _LONGEST:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if _is_scalar(value, "bool", "int", "uint", "float", "bfloat"):
        return f"{value}"
    if _is_array(value):
        return f"an array of shape {tuple(value.shape)} and dtype {str(value.dtype)[:_LONGEST]}"
    count = f" of {len(value)} entries" if isinstance(value, list | tuple | Mapping) else ""
    return f"a {type(value).__name__}{count}"


def _is_scalar(value: Any, *dtypes: str) -> bool:
    """Return whether a value is a Python number, or an array without axes of one of these dtypes."""
    if hasattr(value, "shape"):
        return (
            _is_array(value) and value.shape == () and dtype_name(value.dtype).rstrip("0123456789") in dtypes
        )
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of some library, or a scalar of NumPy."""
    try:
        require_dense(value, "value")
    except TypeError:
        return False
    return not isinstance(value, type)
