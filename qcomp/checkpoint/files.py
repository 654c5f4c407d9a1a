"""Files that are whole or absent."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

__all__ = ["write_whole"]


def write_whole(path: "str | os.PathLike[str]", write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that whoever reads it finds the old content or the new one, whenever this process dies.

    Parameters
    ----------
    path : str or path
        The file. Its folder exists, and has room for another file of the name with ``.unfinished`` behind it, which
        the next call replaces if this one does not end.
    write : callable
        Writes the content to a file that is open for writing bytes. If it raises, the old content stays.

    Notes
    -----
    It writes to the other file, waits until the content is on the disk (fsync), and renames it.

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
    if os.name == "posix":  # the name is on the disk once its folder is
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
