"""``qcomp check``: checks whether an object keeps the laws of its contract."""

import argparse
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qcomp.backends.registry import names as kernel_names
from qcomp.cli.output import Style, UsageError, guess, import_named, print_json, say, set_aside, style_for
from qcomp.core.entry_points import offered
from qcomp.core.mean.topologies.registry import names, topology
from qcomp.core.registry import compressor, compressor_names

if TYPE_CHECKING:
    from qcomp.testing import Contract

EPILOG = """
TARGET is module:name, which names an instance, a class without required arguments, or a function that returns an
instance. Or it is the spec of a compressor, or the name of a topology or kernel set, also from an installed package.

examples:
  qcomp check mypackage:MyCompressor
  qcomp check mypackage:MyCompressor --xp numpy,torch --thorough
  qcomp check mypackage:MyCompressor --law unbiased
  qcomp check qsgd:levels=7,bucket_size=64
  qcomp check ring
  qcomp check numba
  mpirun -n 3 qcomp check mypackage:make_communicator
"""

_LIBRARIES = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax.numpy",
    "cupy": "cupy",
    "array_api_strict": "array_api_strict",
    "read_only_numpy": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``qcomp check``."""
    parser.add_argument("target", metavar="TARGET", help="what to check: module:name, or a name")
    parser.add_argument(
        "--xp",
        default="numpy",
        metavar="LIBRARIES",
        help=f"array libraries, separated by commas, out of {', '.join(_LIBRARIES)} (default: numpy)",
    )
    parser.add_argument("--law", metavar="NAME", help="check one law only")
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="more vectors, larger worlds, failures that close a communicator",
    )


def run(options: argparse.Namespace) -> int:
    """Check the target on each library, and print each law; the status is 1 if any law is broken."""
    with set_aside(options.json):
        thing, reports = _checked(options)
    holds = all(report["holds"] for report in reports)
    if options.json and getattr(thing, "rank", 0) == 0:
        print_json({"target": options.target, "holds": holds, "checks": reports})
    return 0 if holds else 1


def _checked(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """Return the checked object, and a report for each library."""
    try:
        from qcomp.testing import contract_of  # noqa: PLC0415 - it needs an extra
    except ImportError as error:
        raise UsageError(str(error)) from error
    thing = _made(_found(options.target), options.target)
    libraries = [_library(name) for name in dict.fromkeys(options.xp.split(","))]
    try:
        contracts = [contract_of(thing, xp, thorough=options.thorough) for xp in libraries]
    except (TypeError, ValueError) as error:
        raise UsageError(f"TARGET is {options.target!r}: {error}") from error
    if options.law is not None:
        known = dict.fromkeys(name for contract in contracts for name in contract.names)
        if options.law not in known:
            close = guess(options.law, list(known))
            raise UsageError(f"--law is {options.law!r}{close}; expected one of {', '.join(known)}")
        contracts = [contract for contract in contracts if options.law in contract.names]
    speaks = not options.json and getattr(thing, "rank", 0) == 0  # only a communicator's first rank prints
    style = style_for(sys.stdout)
    return thing, [_report(contract, options.law, style, speaks=speaks) for contract in contracts]


def _report(contract: "Contract", only: str | None, style: Style, *, speaks: bool) -> dict[str, Any]:
    """Check a contract, and return which laws hold; print each as soon as it is known."""
    if speaks:
        say(style.strong(contract.subject))
    laws = []
    for name, found in contract.verdicts(only=only):
        laws.append({"name": name, "holds": found is None, "counterexample": found})
        if found is not None:
            where = "" if speaks else f"{contract.subject}: "
            text = found.replace("\n", "\n          ")
            if speaks or "rank" in contract.subject:
                say(f"  {where}{style.bad('BROKEN')}  {name}: {text}")
        elif speaks:
            say(f"  {style.good('ok')}      {name}")
    broken = [law["name"] for law in laws if not law["holds"]]
    checked = {law["name"] for law in laws}
    skipped = [name for name in contract.names if only is None and name not in checked]
    if speaks:
        if broken:
            rest = f"; {len(skipped)} that rely on them were skipped" if skipped else ""
            say(style.bad(f"  {len(broken)} of {len(contract.names)} laws broken{rest}"))
        else:
            say(style.good(f"  {len(laws)} {'law holds' if len(laws) == 1 else 'laws hold'}"))
    return {"subject": contract.subject, "holds": not broken, "laws": laws, "skipped": skipped}


def _found(target: str) -> Any:
    """Return the object that a target names; registered names take precedence over modules."""
    name = target.partition(":")[0].partition("(")[0]
    try:
        if name in compressor_names():
            return compressor(target)
        if target in kernel_names():
            return _kernels(target)
        if target in _topologies():
            return topology(target)
    except (ValueError, ImportError) as error:
        raise UsageError(f"TARGET is {target!r}; {error}") from error
    if ":" not in target:
        known = [*compressor_names(), *_topologies(), *kernel_names()[1:]]
        close = guess(target, known)
        raise UsageError(f"TARGET is {target!r}{close}; expected module:name, or one of {', '.join(known)}")
    return import_named(target, "TARGET", what="name")


def _topologies() -> list[str]:
    """Return the names of all topologies, including topologies of other installed packages."""
    return [*names(), *(name for name in offered("topology", {}) if name not in names())]


def _kernels(name: str) -> Any:
    from qcomp.backends.registry import load  # noqa: PLC0415 - beside its name

    if name == "pure":
        raise UsageError(
            "TARGET is 'pure', the version that kernels are compared with; expected another kernel set"
        )
    try:
        return load(name)
    except ImportError as error:
        raise UsageError(f"TARGET is {name!r}; {error}") from error


def _made(found: Any, target: str) -> Any:
    """Return an instance: the result of calling a class or function without arguments, or the object itself."""
    if not (isinstance(found, type) or _is_function(found)):
        return found
    try:
        return found()
    except TypeError as error:
        raise UsageError(
            f"TARGET is {target!r}, which cannot be called without arguments: {error}. Name an instance, or a "
            "function that makes one"
        ) from error
    except Exception as error:
        raise UsageError(
            f"TARGET is {target!r}; calling it raises {type(error).__name__}: {error}"
        ) from error


def _is_function(found: Any) -> bool:
    return callable(found) and hasattr(found, "__code__")


def _library(name: str) -> Any:
    if name not in _LIBRARIES:
        raise UsageError(f"--xp is {name!r}; expected some of {', '.join(_LIBRARIES)}, separated by commas")
    if name == "read_only_numpy":
        from qcomp.testing import read_only_numpy  # noqa: PLC0415 - it needs an extra

        return read_only_numpy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's own warnings are of no interest here
            return import_module(_LIBRARIES[name])
    except ImportError as error:
        raise UsageError(f"--xp is {name!r}, which is not installed: {error}") from error
