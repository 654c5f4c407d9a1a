"""Stores where ranks leave files for each other: a folder that all ranks see, or an object store."""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """A place that holds files."""

    longest_pause: float
    """The most seconds between two looks for a file."""

    @property
    def creates(self) -> bool:
        """Whether `create` finds out in one request whether there is a file already."""
        ...

    def write(self, name: str, *parts: bytes) -> None:
        """Make a file that is whole as soon as it can be read."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is no such file."""
        ...

    def create(self, name: str, *parts: bytes) -> bool:
        """Make a file like `write`, and return True; return False if there is one already."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; empty if there is none."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        ...

    def delete_folder(self, name: str) -> None:
        """Delete a folder, if it is there and empty."""
        ...


class _Folder:
    """Files of the operating system."""

    longest_pause = 0.02
    creates = True

    def __init__(self, path: str) -> None:
        self._path = Path(path).absolute()  # a script may change its working directory later

    def write(self, name: str, *parts: bytes) -> None:
        with self._beside(name, parts) as beside:
            beside.replace(self._path / name)

    def create(self, name: str, *parts: bytes) -> bool:
        with self._beside(name, parts) as beside:
            try:
                os.link(beside, self._path / name)
            except FileExistsError:
                return (
                    beside.stat().st_nlink > 1
                )  # NFS may have made the link, lost its answer, and tried again
        return True

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self._path / folder)
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _beside(self, name: str, parts: tuple[bytes, ...]) -> Iterator[Path]:
        """Write a file under a temporary name in its folder; delete this name in the end, even if the disk is full."""
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            with beside.open("wb") as file:
                file.writelines(parts)
            yield beside
        finally:
            beside.unlink(missing_ok=True)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except OSError as error:
            if error.errno in (
                errno.ENOENT,
                errno.ESTALE,
            ):  # stale: replaced or deleted over NFS while this rank reads
                return None
            raise

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def delete_folder(self, name: str) -> None:
        with contextlib.suppress(OSError):  # others have files there
            (self._path / name).rmdir()


class _Objects:
    """Objects of a store that fsspec knows."""

    longest_pause = 1.0

    def __init__(self, url: str) -> None:
        self._files, self._path = importlib.import_module("fsspec").core.url_to_fs(url)

    def write(self, name: str, *parts: bytes) -> None:
        path = f"{self._path}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, b"".join(parts))

    def create(self, name: str, *parts: bytes) -> bool:
        path = f"{self._path}/{name}"
        try:
            self._files.pipe_file(path, b"".join(parts), mode="create")
        except Exception:
            # Each store raises its own errors, even if a request is repeated because its answer was lost.
            self._files.invalidate_cache()
            if not self._files.exists(path):
                raise
            return False
        return True

    def names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            return [
                path.rpartition("/")[2] for path in self._files.ls(f"{self._path}/{folder}", detail=False)
            ]
        except FileNotFoundError:
            return []

    @property
    def creates(self) -> bool:
        method = self._files.pipe_file
        is_own = method.__module__ not in ("fsspec.spec", "fsspec.asyn")
        return is_own and "mode" in inspect.signature(method).parameters

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(f"{self._path}/{name}"))
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")

    def delete_folder(self, name: str) -> None:
        pass  # an object store has no folders


def store_at(place: str | os.PathLike[str]) -> Store:
    """Return the store at a path, or at a URL for fsspec."""
    name = os.fspath(place)
    return _Objects(name) if "://" in name else _Folder(name)
