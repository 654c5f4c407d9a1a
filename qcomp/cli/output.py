"""Common parts of the commands: printing, colours, tables, imports, and errors that the commands explain."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TextIO


class UsageError(ValueError):
    """The user asked for something impossible; the command ends with status 2."""


@dataclass(frozen=True)
class Style:
    """Adds colours to text if the output shows them."""

    coloured: bool = False

    def good(self, text: str) -> str:
        """Return text in green."""
        return self.number(text, 32)

    def bad(self, text: str) -> str:
        """Return text in red."""
        return self.number(text, 31)

    def strong(self, text: str) -> str:
        """Return text in bold."""
        return self.number(text, 1)

    def number(self, text: str, code: int) -> str:
        """Return text in a colour of the terminal, by its number."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.coloured else text


def style_for(stream: TextIO) -> Style:
    """Return colours for a terminal, unless the user has switched them off: see https://no-color.org."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Style(wanted and stream.isatty())


def say(text: str) -> None:
    """Print a line without buffering; raises UsageError if it cannot be written, as on a full disk."""
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:
        raise
    except OSError as error:
        write_no_more()
        raise UsageError(f"the output cannot be written: {error}") from error


def write_no_more() -> None:
    """Make Python discard the rest of the output when it ends, since writing it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(document: Any) -> None:
    """Print a document."""
    say(json.dumps(document, indent=1))


@contextmanager
def set_aside(wanted: bool) -> Iterator[None]:
    """If wanted, redirect to standard error what the user's code prints, so that standard output has only JSON."""
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def guess(name: str, known: Sequence[str]) -> str:
    """Return "did you mean ...?" for an error text, if a known name is close to this one."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def table(rows: Sequence[Sequence[str]], *, right: bool = False) -> Iterator[str]:
    """Align all columns but the last to the left; with ``right``, align all columns but the first to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for cells in rows:
        if right:
            first, *others = cells
            aligned = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        else:
            aligned = [*map(str.ljust, cells[:-1], widths), cells[-1]]
        yield "  ".join(aligned).rstrip()


def explained(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser whose error texts argparse prints, although it does not print the text of a ValueError."""

    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_or_explain


def import_named(name: str, option: str, *, what: str = "function") -> Any:
    """Return the object that ``module:name`` names; as with ``python -m``, it finds modules in the working directory.

    Raises UsageError if the text has another form, or there is no such module or name.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError(f"{option} is {name!r}; expected module:{what}")
    if module.endswith(".py") or "/" in module:
        wanted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise UsageError(f"{option} is {name!r}, which names a file; expected {wanted}:{attribute}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = import_module(module)
    except ImportError as error:
        raise UsageError(f"{option} is {name!r}; {module} cannot be imported: {error}") from error
    except Exception as error:  # whatever the module raises
        text = f"{type(error).__name__}: {error}"
        raise UsageError(f"{option} is {name!r}; importing {module} raises {text}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{option} is {name!r}; {module} has no {what} {attribute!r}")
        found = getattr(found, part)
    return found


def vector(arrays: str, size: int) -> Any:
    """Return gradient-like float32 values of a library and device: normally distributed, and the same in every call.

    Raises UsageError if the library is not installed, or has no such device.
    """
    try:
        numpy = import_module("numpy")
        values = numpy.random.default_rng(0).standard_normal(size, dtype=numpy.float32)
        if arrays == "numpy":
            return values
        if arrays in ("cupy", "jax"):
            return import_module({"cupy": "cupy", "jax": "jax.numpy"}[arrays]).asarray(values)
        torch = import_module("torch")
        return torch.from_numpy(values).to("cuda" if arrays == "torch-cuda" else "cpu")
    except ImportError as error:
        raise UsageError(f"--arrays is {arrays!r}, which is not installed: {error}") from error
    except ValueError as error:  # from NumPy
        raise UsageError(f"--elements is {size}: {error}") from error
    except (RuntimeError, AssertionError) as error:  # from a library without a device
        raise UsageError(f"--arrays is {arrays!r}; {str(error).partition(chr(10))[0]}") from error
