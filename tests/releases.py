"""The files that a release keeps, and the one rule for them: once a version has its tag, nobody rewrites its files.

``tests/golden/VERSION/`` has payloads, saved states and public names of a version. A file that is missing there is
equal to the one of an earlier version. ``tests/vectors/`` has vectors of the payload format; entries may be added to
its files, but none of a released version may change, except in messages, whose format is that of one release.

Every later version reads the payloads, loads the states and has the names of each folder, as docs/compatibility.md
promises. The recorders, ``python -m tests.record_golden`` and ``python -m tests.record_vectors``, ask this module
before they write. 0.1.0 was never released; its folder has the names of 28 November 2026, which scripts have used.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from packaging.version import Version

from qcomp.version import __version__

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"


class ReleasedError(Exception):
    """A recorder would rewrite what a release has."""


def versions(file: str = "*", folder: Path = GOLDEN) -> list[str]:
    """Return the versions that have a golden file, the oldest first."""
    return sorted({path.parent.name for path in folder.glob(f"*/{file}.json")}, key=Version)


def newest(file: str, folder: Path = GOLDEN) -> Path:
    """Return the golden file of this version, which may be the one of an earlier version."""
    return folder / versions(file, folder)[-1] / f"{file}.json"


def content(file: str, version: str, folder: Path = GOLDEN) -> dict[str, Any]:
    """Return the golden file of a version."""
    found: dict[str, Any] = json.loads((folder / version / f"{file}.json").read_text())
    return found


def to_write(file: str, folder: Path = GOLDEN) -> Path:
    """Return where to record a golden file of this version.

    Raises
    ------
    ReleasedError
        This version is released.
    """
    if f"v{__version__}" in tags(folder):
        raise ReleasedError(
            f"{__version__} is released, and {file} would change; set the next version in qcomp/version.py"
        )
    return folder / __version__ / f"{file}.json"


def require_kept(path: Path, text: str) -> None:
    """Raise ReleasedError if the new text of a JSON file lacks or changes an entry that a release has."""
    for tag in tags(path.parent):
        shown = git("show", f"{tag}:./{path.name}", folder=path.parent)
        if shown.returncode == 0 and not keeps(json.loads(shown.stdout), json.loads(text)):
            raise ReleasedError(
                f"{path.name} would change entries of the release {tag[1:]}; add new ones instead"
            )


def keeps(old: Any, new: Any) -> bool:
    """Return whether new content has every entry of the old one, down to the entries of its lists and mappings."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and keeps(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return all(entry in new for entry in old)
    return bool(old == new)


def tags(folder: Path = ROOT) -> list[str]:
    """Return the tags of releases, such as v1.0.0."""
    listed = git("tag", "--list", "v[0-9]*", folder=folder)
    listed.check_returncode()
    return listed.stdout.split()


def git(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run git in a folder."""
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
