"""Help texts are complete: exactly the parameters of a public name are documented."""

import dataclasses
import inspect
import re

import pytest

import qcomp

OPTIMIZERS = [
    value
    for value in (getattr(qcomp, name) for name in qcomp.__all__)
    if inspect.isclass(value) and issubclass(value, qcomp.Optimizer)
]
CLASSES = [
    value
    for value in (getattr(qcomp, name) for name in qcomp.__all__)
    if inspect.isclass(value)
    and not issubclass(value, BaseException)
    # `CompressedMean` and its state have methods for the core only, whose arguments are not explained.
    and not issubclass(value, qcomp.CompressedMean | qcomp.MeanState)
]
FUNCTIONS = [value for value in (getattr(qcomp, name) for name in qcomp.__all__) if inspect.isfunction(value)]


def section(documented, title="Parameters"):
    """Return the text of each entry of a section, by name; ``a, b : int`` is an entry for both."""
    text = inspect.cleandoc(documented.__doc__ or "")
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\S[^\n]*\n-{{3,}}$|\Z)", text, re.DOTALL | re.MULTILINE)
    entries = {}
    names = []
    for line in found[1].splitlines() if found else ():
        if line and not line.startswith(" "):
            names = line.partition(" : ")[0].split(", ")
            entries.update(dict.fromkeys(names, ""))
        for name in names if line.startswith(" ") else ():
            entries[name] += line.strip()
    return entries


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def own_methods(cls):
    """Yield the functions that a class of qcomp defines or inherits, by name."""
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__.startswith("qcomp"):
            yield name, value


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_each_field_of_an_optimizer_has_an_entry_of_its_own(cls):
    entries = section(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    assert [name for name in fields if not entries.get(name)] == []
    assert [name for name in entries if name not in parameters(cls)] == []
    assert not re.search(r"^\w+, \w+.* : ", inspect.getdoc(cls), re.MULTILINE), (
        "an entry names several parameters"
    )
    assert not any(re.fullmatch(r"See `\w+`\.", text) for text in entries.values())


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_each_default_of_an_optimizer_is_in_its_entry(cls):
    for field in dataclasses.fields(cls):
        (entry,) = re.findall(rf"^{field.name} : (.*)$", inspect.getdoc(cls), re.MULTILINE)
        if field.default is not dataclasses.MISSING:
            assert "default" in entry or "optional" in entry, field.name
        if isinstance(field.default, bool | str):
            assert entry.endswith(f"default {field.default!r}".replace("'", '"')), field.name


@pytest.mark.parametrize(
    "documented",
    [*CLASSES, *FUNCTIONS, qcomp.CompressedMean, qcomp.EF21Mean, qcomp.PowerSGDMean, qcomp.PowerSGD],
    ids=lambda value: value.__name__,
)
def test_each_parameter_of_a_public_name_is_documented(documented):
    entries = section(documented)
    assert {name: entries[name] for name in entries if not entries[name]} == {}
    assert sorted(entries) == sorted(parameters(documented))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_parameter_of_a_public_method_is_documented(cls):
    """A method that overrides another may rely on the documentation of that method for its parameters."""
    for name, method in own_methods(cls):
        documented = {}
        for base in reversed(cls.__mro__):
            documented |= section(vars(base)[name]) if name in vars(base) else {}
        missing = [parameter for parameter in parameters(method) if not documented.get(parameter)]
        assert not missing, f"{cls.__name__}.{name} does not document {missing}"
        extra = [entry for entry in section(method) if entry not in parameters(method)]
        assert not extra, f"{cls.__name__}.{name} documents {extra}"
