"""Files that are whole or absent."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

__all__ = ["write_whole"]


def write_whole(path: "str | os.PathLike[str]", write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that readers find either the old content or the new one, whenever this process dies.

    Parameters
    ----------
    path : str or path
        The file. Its folder must exist, and have room for a second file, whose name ends with ``.unfinished``. If this
        call does not finish, the next one replaces that second file.
    write : callable
        Writes the content to a file that is open for writing bytes. If it raises, the old content stays.

    Notes
    -----
    It writes to the second file, waits until the content is on the disk (fsync), and renames that file.

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
    unfinished = path + ".unfinished"
    try:
        with open(unfinished, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(unfinished)
        raise
    if os.name == "posix":  # the new name is on the disk only after an fsync of its folder
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
