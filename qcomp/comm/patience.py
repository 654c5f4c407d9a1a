"""`patience`: returns a communicator's timeouts: from its arguments, else from `world`, the environment or defaults."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

SILENCE = 20.0
"""Seconds without a sign of life after which a rank is reported as silent, and a machine counts as cut off."""

_TIMEOUT = 300.0
_LONGEST = 1e9
"""The seconds that stand for an infinite time, since timers of torch and of the system cannot take infinity."""

_inherited: dict[str, float] = {}


class Patience(NamedTuple):
    """How long a rank waits for the others."""

    timeout: float
    """Seconds that an exchange may take."""
    silence: float | None
    """Seconds without a sign of life after which a rank counts as lost; None: a silent rank is only reported."""


def patience(*, timeout: Any = None, silence: Any = None, default: float | None = None) -> Patience:
    """Return these settings. None becomes the inherited value, else the value in the environment, else the default.

    ``default`` is the timeout if nothing else sets one, by default 300 seconds.
    """
    waits, silent = _setting("timeout", timeout), _setting("silence", silence)
    if waits is None:
        waits = _TIMEOUT if default is None else default
    return Patience(waits, silent)


def inherit(*, timeout: Any = None, silence: Any = None) -> None:
    """Make these settings, except those that are None, the defaults of communicators that are made later."""
    given = {"timeout": timeout, "silence": silence}
    _inherited.update({name: _seconds(name, x) for name, x in given.items() if x is not None})


def _setting(name: str, given: Any) -> float | None:
    if given is not None:
        return _seconds(name, given)
    if name in _inherited:
        return _inherited[name]
    variable = f"QCOMP_{name.upper()}"
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return _seconds(variable, float(text))
    except ValueError:
        raise ValueError(f"{variable} is {text!r}; expected a positive number of seconds") from None


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool | str) or not hasattr(value, "__float__") or not float(value) > 0:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    seconds: float = min(value, _LONGEST)  # as it was given, for messages
    return seconds
