"""`write_whole`: writes a file so that readers find either the old content or the new one, even if the writer dies."""

import os
import platform
import re
import secrets
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from qcomp.checkpoint.locks import create_locked, removed_if_left


def write_whole(path: "str | os.PathLike[str]", write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that readers find either the old content or the new one, even if this process dies meanwhile.

    Parameters
    ----------
    path : str or path
        The file. Its folder must exist, and have room for a second file, whose name ends with ``.unfinished``. If a
        process dies while it writes, the next call for the same path removes the unfinished file.
    write : callable
        Writes the content to a file that is open for writing bytes. If it raises, the old content stays.

    Warns
    -----
    RuntimeWarning
        If another process writes the same path at the same time, for instance because all ranks save to one name. The
        process that finishes last wins, and its content is whole.

    Notes
    -----
    `write_whole` writes the second file, waits until the content is on the disk (fsync), and renames it. Each call
    locks a second file of its own. If a second file has no lock, its writer has died.

    Examples
    --------
    >>> import numpy as np, pathlib, qcomp, tempfile
    >>> opt, comm = qcomp.Adam(learning_rate=0.1), qcomp.comm.LocalCommunicator.alone()
    >>> params = np.ones(4)
    >>> saved = opt.state_dict(opt.init(params, comm))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "rank0.npz")
    ...     qcomp.checkpoint.write_whole(path, lambda file: np.savez(file, **saved))
    ...     with np.load(path) as archive:
    ...         opt.load_state_dict(dict(archive), params, comm).step
    0
    """
    path = os.fspath(path)
    folder, name = os.path.split(path)
    folder = folder or "."
    own = os.path.join(folder, f"{name}.{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}.unfinished")
    _look_for_others(folder, name)
    try:
        with create_locked(own) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if os.name == "posix":
                os.replace(own, path)  # while the new file is locked
        if os.name != "posix":
            os.replace(own, path)  # after closing it: Windows cannot rename an open file
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(own)
        raise
    if os.name == "posix":  # the new name is on the disk only after an fsync of its folder
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _look_for_others(folder: str, name: str) -> None:
    """Remove what dead processes have left beside a file, and warn if a living process is writing the file."""
    pattern = re.compile(rf"{re.escape(name)}\.(.+)-[0-9a-f]{{8}}\.unfinished")
    for other in os.listdir(folder):
        found = pattern.fullmatch(other)
        if found is None:
            continue
        with suppress(FileNotFoundError):
            if removed_if_left(os.path.join(folder, other)) is False:
                warnings.warn(
                    f"another process ({found[1]}) writes {os.path.join(folder, name)!r} at the same time, so what "
                    "one of the two processes writes will be lost: give each rank its own file",
                    RuntimeWarning,
                    stacklevel=3,
                )
