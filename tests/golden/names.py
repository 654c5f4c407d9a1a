"""Every public name: its signature without types, and a digest of its help."""

import hashlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

FRAMEWORKS = ("comm", "integrations", "jax", "testing", "torch")
"""Modules whose imports take seconds, or optional packages."""
MEMBERS = (FunctionType, cached_property, property)


def public(name: str, module: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a module and the public ones in it, each with its public names; `qcomp` without those of frameworks."""
    keys = [key for key in sorted(module.__all__) if name != "qcomp" or key not in FRAMEWORKS]
    found = {key: getattr(module, key) for key in keys}
    yield name, {key: value for key, value in found.items() if not isinstance(value, ModuleType)}
    for key, value in found.items():
        if isinstance(value, ModuleType):
            yield from public(f"{name}.{key}", value)


def described(root: str) -> dict[str, dict[str, str]]:
    """Return the descriptions of all names in a module and in the public ones in it."""
    modules = dict(public(root, import_module(root)))
    homes: dict[int, str] = {}
    for module, names in modules.items():
        for key, value in names.items():
            if inspect.isclass(value) or inspect.isroutine(value):
                homes.setdefault(id(value), f"{module}.{key}")
    return {
        module: dict(line for key, value in names.items() for line in _lines(module, key, value, homes))
        for module, names in modules.items()
    }


def _lines(module: str, key: str, value: Any, homes: dict[int, str]) -> Iterator[tuple[str, str]]:
    """Yield the descriptions of a name and, if it is a class, of what other public classes do not describe."""
    home = homes.get(id(value), f"{module}.{key}")
    if home != f"{module}.{key}":
        yield key, f"the same as {home}"
        return
    yield key, _description(value)
    if not inspect.isclass(value):
        return
    bases = [base for base in value.__mro__ if base.__module__.startswith("qcomp.")]
    for name in sorted({name for base in bases for name in vars(base) if not name.startswith("_")}):
        base = next(base for base in bases if name in vars(base) and not _is_copied(vars(base)[name], base))
        member = getattr(vars(base)[name], "__func__", vars(base)[name])
        if isinstance(member, MEMBERS) and (base is value or id(base) not in homes):
            yield f"{key}.{name}", _description(member)


def _is_copied(member: Any, kind: type) -> bool:
    """Return whether a method is that of another class, as torch copies ``step`` when it first makes an optimizer."""
    return getattr(member, "hooked", False) and not member.__qualname__.startswith(f"{kind.__name__}.")


def _description(value: Any) -> str:
    if not (inspect.isclass(value) or isinstance(inspect.unwrap(value), MEMBERS)):
        return "a value"
    text = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    return f"{_signature(value)} | help {hashlib.sha256(inspect.cleandoc(text).encode()).hexdigest()[:8]}"


def _signature(value: Any) -> str:
    """Return a signature without types: names, kinds and defaults."""
    if inspect.isclass(value):
        own = [base for base in value.__mro__ if {"__init__", "__new__"} & vars(base).keys()]
        if not own[0].__module__.startswith("qcomp."):
            return "a class"
        value = vars(own[0]).get("__init__") or vars(own[0])["__new__"]
    if isinstance(value, property | cached_property):
        return "a property"
    signature = inspect.signature(value)
    untyped = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    plain = signature.replace(parameters=untyped, return_annotation=signature.empty)
    return re.sub(r" at 0x[0-9a-f]+| from '[^']*'", "", str(plain))
