"""Folders for kept copies and for compiled kernels. Only this user can write there: loading a kernel runs its code."""

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(name: str) -> Path:
    """Return the folder ``qcomp/NAME`` for compiled code in ``XDG_CACHE_HOME``, by default ``~/.cache``.

    It is made if it does not exist. Raises PermissionError unless only this user can read or write it, and OSError if
    it cannot be made or written to.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path.home() / ".cache"
    folder = base.resolve() / "qcomp" / name
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    made_private(folder.parent, folder)
    return folder


def made_private(*folders: Path) -> None:
    """Make nested folders, outermost first, that only this user can read or write; raises as `private_folder` does."""
    for each in folders[0].parents:
        mode = each.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"every user can replace the files in {each}")
    for each in folders:
        each.mkdir(mode=0o700, exist_ok=True)
        found = each.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise PermissionError(f"{each} is a link")
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            raise PermissionError(f"{each} belongs to user {found.st_uid}, not to user {os.getuid()}")
        if found.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"other users can write to {each}")
        each.chmod(0o700)
    if not os.access(folders[-1], os.W_OK):
        raise PermissionError(f"{folders[-1]} cannot be written to")
