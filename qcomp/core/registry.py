"""Registers compressors, and finds them by name or spec string, even in entry points of installed packages."""

from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

from qcomp.core.compressor import Compressor
from qcomp.core.entry_points import offered
from qcomp.core.payload import LONGEST_SPEC, make_compressors_with

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["compressor", "compressor_names", "register"]

_classes: dict[str, type[Compressor]] = {}


def register(cls: type[Compressor]) -> type[Compressor]:
    """Register a compressor class under its name; use it as a class decorator.

    Installed packages need no call: they list the class in the entry point group ``qcomp.compressors``, and qcomp
    imports it on first use.

    Raises
    ------
    ValueError
        If another class has that name already.
    """
    known = _classes.get(cls.name)
    if known is not None and known is not cls:
        raise ValueError(
            f"{cls.__qualname__} has the name {cls.name!r}, which {known.__qualname__} already has; expected another "
            "name"
        )
    _classes[cls.name] = cls
    return cls


@cache
def _offered() -> "dict[str, EntryPoint]":
    """Return the compressors of installed packages, by name."""
    return offered("compressor", _classes)


def compressor_names() -> list[str]:
    """Return the names of all compressors, including compressors of other installed packages."""
    return sorted({*_classes, *_offered()})


def compressor(spec: str) -> Compressor:
    """Return the compressor that a spec string describes.

    Parameters
    ----------
    spec : str
        ``name``, ``name:field=value,...`` or, for a class that wraps a compressor, ``name(spec):...``. Omitted fields
        have their defaults.

    Raises
    ------
    ValueError
        If the name or a field is unknown, a value is invalid for its field, or the spec has more than 1000 characters,
        as given or with all options written out.

    Examples
    --------
    >>> compressor("qsgd:levels=15,norm=l2")
    QSGD(levels=15, bucket_size=512, norm='l2', coding='fixed')
    >>> compressor("scaled(qsgd:levels=7)").traits.delta > 0.3
    True
    """
    _require_short(spec, "")
    head, _, rest = spec.partition("(")
    if rest and ":" not in head:
        inner, closing, tail = rest.rpartition(")")
        if not closing or (tail and not tail.startswith(":")):
            raise ValueError(f"the compressor spec {spec!r} has unbalanced parentheses")
        name, options = head, tail[1:]
    else:
        inner = ""
        name, _, options = spec.partition(":")
    cls = find_class(name)
    arguments: dict[str, Any] = {}
    hints = get_type_hints(cls)
    nested = [f.name for f in fields(cls) if hints[f.name] is Compressor]
    if inner and not nested:
        raise ValueError(f"the compressor {name!r} wraps no other compressor; got {spec!r}")
    if inner:
        arguments[nested[0]] = compressor(inner)
    types = {f.name: hints[f.name] for f in fields(cls) if f.name not in nested}
    for option in options.split(",") if options else ():
        key, equals, text = option.partition("=")
        if not equals or key not in types:
            known = ", ".join(types) or "none"
            raise ValueError(f"the compressor spec {spec!r} has option {option!r}; {name} has: {known}")
        if key in arguments:
            raise ValueError(f"the compressor spec {spec!r} gives {key} twice")
        arguments[key] = _parse(spec, key, text, types[key])
    required = [f.name for f in fields(cls) if f.default is MISSING and f.name not in arguments]
    if required:
        raise ValueError(f"the compressor spec {spec!r} lacks {', '.join(required)}")
    made = cls(**arguments)
    _require_short(made.spec, " with all its options")
    return made


def _require_short(spec: str, how: str) -> None:
    """Raise ValueError if a spec string is too long to be read."""
    if len(spec) > LONGEST_SPEC:
        raise ValueError(
            f"the compressor spec has {len(spec)} characters{how}; at most {LONGEST_SPEC} are read"
        )


def find_class(name: str) -> type[Compressor]:
    """Return the compressor class of a name, imported if an installed package offers it."""
    found = _classes.get(name)
    if found is not None:
        return found
    point = _offered().get(name)
    if point is None:
        raise ValueError(
            f"there is no compressor {name!r}; known: {', '.join(compressor_names())}. To use a class of your own, "
            "pass it to qcomp.register"
        )
    cls: type[Compressor] = point.load()
    if not (isinstance(cls, type) and issubclass(cls, Compressor)):
        raise ValueError(
            f"the entry point {name!r} leads to {cls!r}; expected a subclass of qcomp.Compressor"
        )
    if cls.name != name:
        raise ValueError(
            f"the entry point {name!r} leads to {cls.__qualname__}, whose name is {cls.name!r}; expected the same name"
        )
    return register(cls)


def _parse(spec: str, key: str, text: str, kind: Any) -> Any:
    """Return the value of an option: an int, float or bool if the field has that type, else the text."""
    if kind is bool:
        if text in ("True", "False"):
            return text == "True"
    elif kind in (int, float):
        with suppress(ValueError):
            value = kind(text)
            if str(value) == text:  # as spec strings are written; Python also reads "1_0" and " 1"
                return value
    else:
        return text
    raise ValueError(
        f"the compressor spec {spec!r} has {key}={text!r}; expected a value of type {kind.__name__}"
    )


make_compressors_with(compressor)
