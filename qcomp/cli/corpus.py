"""A training text that every Python has: the sources of its standard library."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that are not part of the library proper, or are missing in some installations."""
_VALIDATION_SHARE = 16
"""One file in this many is used for validation."""


@dataclass(frozen=True)
class Corpus:
    """Training bytes and validation bytes; no file is in both."""

    train: npt.NDArray[np.uint8]
    validation: npt.NDArray[np.uint8]

    @classmethod
    def of_standard_library(cls) -> "Corpus":
        """Read the library's ``*.py`` files in the order of their relative paths.

        Only a hash of a file's relative path decides to which part the file belongs, so every rank (and every machine
        with the same Python) makes the same split. Raises RuntimeError if there are too few sources.
        """
        root = Path(sysconfig.get_path("stdlib"))
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        for path in sorted(_sources(root)):
            digest = hashlib.sha256(path.as_posix().encode()).digest()
            parts[digest[0] % _VALIDATION_SHARE == 0].append((root / path).read_bytes())
        train, validation = (
            np.frombuffer(b"\0".join(parts[held_out]), np.uint8) for held_out in (False, True)
        )
        if min(train.size, validation.size) < 100_000:
            raise RuntimeError(f"too few Python sources under {root}: is the standard library zipped?")
        return cls(train, validation)


def _sources(root: Path) -> Iterator[Path]:
    """Yield the paths of the library's own sources, relative to its folder."""
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _LEFT_OUT
        yield from (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))


def training_batch(
    data: npt.NDArray[np.uint8], batch: int, context: int, key: tuple[int, int, int]
) -> npt.NDArray[np.int64]:
    """Draw ``batch`` random windows of ``context + 1`` bytes.

    The draw depends only on ``key`` (seed, rank, step), so a resumed run sees the same batches as a run without a
    stop.
    """
    starts = np.random.default_rng(key).integers(0, data.size - context, size=batch)
    return _windows(data, starts, context)


def validation_windows(data: npt.NDArray[np.uint8], count: int, context: int) -> npt.NDArray[np.int64]:
    """Take ``count`` evenly spaced windows of ``context + 1`` bytes, always the same."""
    return _windows(data, np.linspace(0, data.size - context - 1, count).astype(np.int64), context)


def _windows(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], context: int
) -> npt.NDArray[np.int64]:
    """Cut one window of ``context + 1`` bytes at each start."""
    windows: npt.NDArray[np.int64] = data[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows
