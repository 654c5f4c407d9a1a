"""`FolderMailbox`: a folder or object store where ranks of an asynchronous outer loop leave files for each other."""

from __future__ import annotations

import os
import time
from hashlib import blake2b

from qcomp.comm.stores import store_at
from qcomp.comm.verbs import described
from qcomp.core.errors import CommunicatorError

_DIGEST = 16
"""Bytes of the digest at the start of a file."""


class FolderMailbox:
    """A folder or an object store in which the ranks of a `qcomp.outer.Asynchronous` loop leave files for each other.

    Making a mailbox is not collective, and a mailbox does not know the ranks.

    Parameters
    ----------
    folder : str
        A folder that all ranks see, such as one on NFS, or a URL of a store for fsspec, such as ``"s3://bucket/path"``.
        It is created. Only one job may use it; if that job starts again, it goes on from the files there.

    Raises
    ------
    ValueError
        If the store, or fsspec for it, has no request that creates an object only if none of that name exists. S3,
        Google Cloud Storage and folders that have hard links have one.
    CommunicatorError
        From the methods, if the folder cannot be used.

    Notes
    -----
    Each file begins with 16 bytes, the BLAKE2b digest of the rest; a file that does not match it counts as missing. In
    a folder, a file is written under a temporary name, and then linked to its own. A store must list all objects that
    were written before.

    Examples
    --------
    >>> import qcomp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mailbox = qcomp.comm.FolderMailbox(folder)
    ...     print(mailbox.create("sent/1", b"first"), mailbox.create("sent/1", b"second"), mailbox.read("sent/1"))
    True False b'first'
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._place = os.fspath(folder)
        self._store = store_at(folder)
        if not self._store.creates:
            raise ValueError(
                f"folder is {self._place!r}; expected a path, or a store whose fsspec method pipe_file takes "
                "mode='create', as in recent s3fs and gcsfs: otherwise ranks could overwrite each other's files"
            )

    def __repr__(self) -> str:
        return f"FolderMailbox({self._place!r})"

    def now(self) -> float:
        """Return seconds on this machine's monotonic clock."""
        return time.monotonic()

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder of the mailbox; empty if there is none.

        Parameters
        ----------
        folder : str
            The name of the folder.
        """
        with _Usable(self._place):
            return self._store.names(folder)

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if the file is not there or not whole.

        Parameters
        ----------
        name : str
            The name of the folder, a slash, and the name of the file.
        """
        with _Usable(self._place):
            found = self._store.read(name)
        if found is None or found[:_DIGEST] != _digest(found[_DIGEST:]):
            return None
        return found[_DIGEST:]

    def create(self, name: str, data: bytes) -> bool:
        """Make a file and return True, or return False if there is one of this name already.

        Parameters
        ----------
        name : str
            As for `read`.
        data : bytes
            The content of the file.
        """
        with _Usable(self._place):
            return self._store.create(name, _digest(data), data)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there.

        Parameters
        ----------
        name : str
            As for `read`.
        """
        with _Usable(self._place):
            self._store.delete(name)


class _Usable:
    """Turns errors of a store into CommunicatorError."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise CommunicatorError(
                f"the mailbox {self._place!r} cannot be used: {described(error)}"
            ) from error


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST).digest()
