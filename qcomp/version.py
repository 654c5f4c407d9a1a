"""The version of qcomp, and a digest of its sources, which tells apart different sources with the same version."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__version__ = "1.0.0rc1"
"""The release, such as "1.0.0"."""

_DIGITS = 12


@functools.cache
def version_and_sources() -> str:
    """Return the release, and a digest of the installed sources that decide what ranks exchange.

    The digest is the same on all machines, Python versions and file systems, and for all line endings. It is computed
    once in a process.

    Examples
    --------
    >>> import qcomp
    >>> version_and_sources().startswith(f"{qcomp.__version__}+")
    True
    """
    from importlib import resources  # noqa: PLC0415  (slow)

    digest = digest_of(resources.files("qcomp.core"))
    return f"{__version__}+{digest}" if digest else f"{__version__} without sources"


def digest_of(folder: Traversable) -> str:
    """Return a digest of the Python sources in a folder, or an empty text if there are none."""
    sources = sorted(_sources(folder, ""))
    if not sources:
        return ""
    digest = hashlib.sha256()
    for name, text in sources:
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()[:_DIGITS]


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield each source's name and text."""
    for entry in folder.iterdir():
        if entry.name.endswith(".py"):
            yield f"{prefix}{entry.name}", entry.read_bytes().replace(b"\r\n", b"\n")
        elif entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry, f"{prefix}{entry.name}/")
