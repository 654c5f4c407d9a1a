"""File locks, which show whether the process that holds one is still alive."""

from __future__ import annotations

import os
import secrets
import sys
import weakref
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

PRESENT = ".present"
"""The suffix of the files that show which processes work in a folder."""


def create_locked(path: str | os.PathLike[str]) -> IO[bytes]:
    """Create a file, and lock it until it is closed, if its disk has locks."""
    while True:
        file = open(path, "xb")  # noqa: SIM115 - the caller closes it
        if sys.platform != "win32":
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(path):  # else another process removed the file before it was locked
            return file
        file.close()


def removed_if_left(path: str | os.PathLike[str]) -> bool | None:
    """Remove a file that `create_locked` made, if its process has died.

    Returns whether the process has died; None if the disk or the system has no locks. Raises FileNotFoundError if the
    file is gone.
    """
    with open(path, "rb") as file:
        if sys.platform == "win32":
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        os.unlink(path)  # while this process holds the lock
        return True


class Presence:
    """A locked file that shows other processes that this process works in a folder.

    The lock ends when this process ends, or drops the object. ``token`` is the name of the file, without its ending.
    """

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(8)
        self._folder = folder
        path = folder / (self.token + PRESENT)
        self._end = weakref.finalize(self, _end, path, create_locked(path))
        _present.add(self)

    def others(self, known: Collection[str]) -> set[str]:
        """Return the tokens of other processes in the folder, except known ones; remove files of dead processes."""
        own = {each.token for each in list(_present)}
        found = set()
        for path in self._folder.glob(f"*{PRESENT}"):
            if path.stem not in own and path.stem not in known:
                with suppress(FileNotFoundError):
                    if removed_if_left(path) is False:
                        found.add(path.stem)
        return found

    def leave_to_parent(self) -> None:
        """Close a forked child's copy of the file, so that the lock ends with the parent."""
        detached = self._end.detach()
        if detached is not None:
            _, _, (_, file), _ = detached
            file.close()


def _end(path: Path, file: IO[bytes]) -> None:
    file.close()
    path.unlink(missing_ok=True)


_present: weakref.WeakSet[Presence] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_present):
        each.leave_to_parent()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
