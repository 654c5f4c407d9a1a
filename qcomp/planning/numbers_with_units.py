"""Numbers with units as people write them: 350M parameters, 10gbit, 25us."""

import math
import re
from collections.abc import Mapping
from typing import Any

_WRITTEN = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([A-Za-zµ/]*)")

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BANDWIDTHS = {
    **{f"{p}bit{end}": factor / 8 for p, factor in _PREFIXES.items() for end in ("", "/s")},
    **{f"{p}bps": factor / 8 for p, factor in _PREFIXES.items()},
    **{f"{p}b/s": factor for p, factor in _PREFIXES.items()},
}


def count(text: str) -> int:
    """Return a count, such as of parameters, from ``"350M"``, ``"1.5B"`` or ``"1000"``."""
    return round(_read(text, _COUNTS, "a count such as 350M, 1.5B or 1000"))


def bandwidth(text: str) -> float:
    """Return bytes per second from a text in bits, ``"10gbit"`` or ``"10Gbps"``, or in bytes, ``"1.2GB/s"``.

    In ``Gbps`` and ``GBps`` the case of b decides. ``Gb/s`` and ``GBPS`` may mean bits or bytes, and are refused.
    Elsewhere case does not matter.

    Examples
    --------
    >>> bandwidth("10gbit"), bandwidth("1.25GB/s")
    (1250000000.0, 1250000000.0)
    >>> bandwidth("10Gbps"), bandwidth("10GBps")
    (1250000000.0, 10000000000.0)
    """
    expected = "a bandwidth such as 10gbit, 100mbit or 1.2GB/s"
    if re.search(r"b/[sS]|[bB]P", text):
        raise ValueError(f"{text!r} may mean bits or bytes; expected {expected}")
    found = _read(text.replace("Bps", "B/s"), _BANDWIDTHS, expected)
    if not found:
        raise ValueError(f"{text!r} is no bandwidth; expected more than 0, such as 10gbit")
    return found


def seconds(text: str) -> float:
    """Return seconds from ``"25us"``, ``"300ms"`` or ``"1.5s"``."""
    return _read(text, _SECONDS, "a time such as 25us, 300ms or 1.5s")


def _read(text: str, units: dict[str, float], expected: str) -> float:
    written = _WRITTEN.fullmatch(text.strip())
    if written is None or written[2].lower() not in units:
        raise ValueError(f"{text!r} is not understood; expected {expected}")
    value = float(written[1]) * units[written[2].lower()]
    if value == math.inf:
        raise ValueError(f"{text!r} is too large; expected {expected}")
    return value


def show_seconds(value: float) -> str:
    """Return a time with three digits.

    Examples
    --------
    >>> show_seconds(0.0123), show_seconds(2.5), show_seconds(0)
    ('12.3 ms', '2.5 s', '0 s')
    """
    return _scaled(value, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))


def show_bandwidth(value: float) -> str:
    """Return a bandwidth, given in bytes per second, as a text in bits per second.

    Examples
    --------
    >>> show_bandwidth(1.25e9), show_bandwidth(12.5e6)
    ('10 Gbit/s', '100 Mbit/s')
    """
    return _scaled(8 * value, (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0)))


def show_bytes(value: float) -> str:
    """Return a number of bytes with three digits.

    Examples
    --------
    >>> show_bytes(4_000_000), show_bytes(12)
    ('4 MB', '12 B')
    """
    return _scaled(value, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if value == 0:
        return f"0 {units[0][0] if units[0][1] == 1 else units[-1][0]}"
    name, factor = next(((n, f) for n, f in units if value >= f * 0.9995), units[-1])
    scaled = value / factor
    return f"{scaled:.0f} {name}" if scaled >= 99.95 else f"{scaled:.3g} {name}"


def finite(value: Any) -> Any:
    """Return a document with None for infinity, which JSON cannot represent.

    Examples
    --------
    >>> finite({"streams": math.inf, "ranks": 4})
    {'streams': None, 'ranks': 4}
    """
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    return None if value == math.inf else value
