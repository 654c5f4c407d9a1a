"""Names of other libraries that qcomp uses although they are private or undocumented: one module for each library.

No other module of qcomp uses such names. A missing name raises ImportError where a feature needs it; all else works.
"""

from importlib.metadata import version
from types import ModuleType
from typing import Any

__all__ = ["require"]


def require(owner: Any, name: str, purpose: str, *, library: str, versions: str) -> Any:
    """Return an attribute that its library may drop.

    Raises ImportError if the installed version lacks it. ``purpose`` says what qcomp needs it for; the error says this
    after "to". ``versions``, in the notation of pip, are known to have the attribute.

    Examples
    --------
    >>> import numpy
    >>> require(numpy, "_nothing", "show this", library="numpy", versions=">=2.0")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ImportError: qcomp needs numpy._nothing to show this, but numpy ... lacks it; install numpy>=2.0
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = owner if isinstance(owner, type | ModuleType) else type(owner)
        inside = "" if isinstance(kind, ModuleType) else f"{kind.__module__}."
        missing = f"{inside}{kind.__name__}.{name}"
        raise ImportError(
            f"qcomp needs {missing} to {purpose}, but {library} {version(library)} lacks it; "
            f"install {library}{versions}"
        ) from error
