"""The folder of compiled kernels: loading one runs code in it, so only this user may write there."""

import os
import stat
from pathlib import Path

__all__ = ["private_folder"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(name: str) -> Path:
    """Return a folder for compiled code in the user's cache directory, which only this user can read or write.

    It is ``qcomp/NAME`` in ``XDG_CACHE_HOME``, by default ``~/.cache``, and is made if it does not exist.

    Raises
    ------
    PermissionError
        If others can write to it, everybody can replace it, it belongs to somebody else, or it is a link.
    OSError
        If it cannot be made or written to.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path.home() / ".cache"
    folder = base.resolve() / "qcomp" / name
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in folder.parents[1:]:
        mode = each.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"everybody can replace what is in {each}")
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        found = each.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise PermissionError(f"{each} is a link")
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            raise PermissionError(f"{each} belongs to user {found.st_uid}, not to user {os.getuid()}")
        if found.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"others can write to {each}")
        each.chmod(0o700)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to")
    return folder
