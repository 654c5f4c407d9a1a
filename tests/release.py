"""Runs the checklist of RELEASE.md: ``make release``, which writes to build/release/ alone and pushes nothing.

``python -m tests.release collect`` moves the files in changes/ into CHANGELOG.md.
"""

import datetime
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from qcomp.version import __version__
from tests.releases import ROOT, ReleasedError, git, require_kept, tags

BUILD = Path("build", "release")
KINDS = ("added", "changed", "removed", "fixed")
OLD = 180
"""Days after which figures of benchmarks are told to be old."""
NO_DEVICE = "not gpu and not nvrtc and not peers"
README_COMMANDS = ("demo --steps 50", "info", "bench --help", "check --help", "warmup --help")
"""All commands except for `qcomp plan`, which the tests of the pages run as it stands there."""
SMOKE = """
import hashlib, sys
from importlib.util import find_spec
import numpy as np
import qcomp

assert qcomp.__file__.startswith(sys.prefix), qcomp.__file__
assert not find_spec("torch")
comm = qcomp.comm.world()
opt = qcomp.OneBitAdam(learning_rate=0.05, betas=(0.9, 0.9), freeze=10, exact=None)
params = np.zeros(1000, dtype=np.float32)
state = opt.init(params, comm)
for _ in range(20):
    params, state = opt.step(params, params - 1 - comm.rank, state, comm)
assert state.stage == "compressed"
print(f"{comm.size} ranks, parameters {hashlib.sha256(params.tobytes()).hexdigest()[:8]}")
"""


class Problem(Exception):  # noqa: N818 - what a step found
    """Why this is not ready to be released."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command outside of this checkout's environment; return its output, or raise Problem with the end of it."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "QCOMP_"))}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=7200,
    )
    if done.returncode:
        raise Problem(f"{' '.join(map(str, command))}\n" + "\n".join(done.stdout.splitlines()[-30:]))
    return done.stdout


def clean_tree(root: Path) -> str:
    """Check that all files are committed."""
    changed = git("status", "--porcelain", folder=root).stdout
    if changed:
        raise Problem(f"uncommitted:\n{changed}")
    return git("rev-parse", "--short", "HEAD", folder=root).stdout.strip()


def version_everywhere(root: Path, version: str = __version__) -> str:
    """Check that the version has no tag, and that the changelog begins with it and a date."""
    if f"v{version}" in tags(root):
        raise Problem(f"{version} has a tag; set the next version in qcomp/version.py")
    first = re.search(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    dated = first and re.fullmatch(re.escape(version) + r" \((\d{4}-\d\d-\d\d)\)", first[1])
    if not dated:
        raise Problem(f"CHANGELOG.md begins with {first and first[1]!r}; expected '{version} (YYYY-MM-DD)'")
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        version if dated[1] == str(today) else f"{version}; the changelog says {dated[1]}, today is {today}"
    )


def fragments(root: Path) -> list[Path]:
    """Return the files in changes/, in the order of the changelog.

    Raises
    ------
    Problem
        A file has another name or form than changes/README.md says.
    """
    files = sorted(path for path in (root / "changes").iterdir() if path.name != "README.md")
    for path in files:
        lines = path.read_text().splitlines()
        if path.suffixes[-2:] not in [[f".{kind}", ".md"] for kind in KINDS]:
            raise Problem(f"changes/{path.name} is not named NAME.KIND.md, KIND one of {', '.join(KINDS)}")
        if not lines or not all(line.startswith(("- ", "  ")) for line in lines):
            raise Problem(f"changes/{path.name} has a line that begins with neither '- ' nor two spaces")
        if "](docs/" in path.read_text():
            raise Problem(f"changes/{path.name} has a link, which breaks on the site: write `docs/PAGE.md`")
    return sorted(files, key=lambda path: KINDS.index(path.suffixes[-2][1:]))


def no_changes_left(root: Path) -> str:
    """Check that changes/ is collected."""
    if left := fragments(root):
        names = ", ".join(path.name for path in left)
        raise Problem(f"changes/ has {names}; run python -m tests.release collect")
    return "none"


def collect(root: Path, version: str = __version__) -> None:
    """Move the files in changes/ into the changelog, to the end of what it says of the version, under today's date."""
    files = fragments(root)
    heading = f"## {version} ({datetime.datetime.now(datetime.UTC).date()})\n"
    text = ""
    for kind in KINDS:
        found = [path.read_text().rstrip() for path in files if path.suffixes[-2] == f".{kind}"]
        text += f"\n### {kind.capitalize()}\n" + "\n".join(found) + "\n" if found else ""
    before, *sections = re.split(r"^(?=## )", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    if sections and sections[0].startswith(f"## {version} ("):  # collected before, and not yet tagged
        text = "\n" + sections.pop(0).partition("\n")[2].strip("\n") + "\n" + text
    after = "".join(f"\n{section}" if number == 0 else section for number, section in enumerate(sections))
    (root / "CHANGELOG.md").write_text(before + heading + text + after)
    for path in files:
        path.unlink()


def released_files(root: Path) -> str:
    """Check that the folder of each tagged version is as it was, and that test vectors were only added."""
    found = tags(root)
    for tag in found:
        folder = f"tests/golden/{tag[1:]}"
        changed = git("diff", "--name-only", tag, "--", folder, folder=root).stdout
        if changed:
            raise Problem(f"changed since {tag}:\n{changed}")
    for path in sorted((root / "tests" / "vectors").glob("*.json")):
        if path.stem != "messages":
            require_kept(path, path.read_text())
    return f"unchanged since {', '.join(found)}" if found else "nothing is released yet"


def bytes_unchanged(root: Path) -> str:
    """Run the tests of payloads, states, names and vectors."""
    return tested(root, "tests/golden", "tests/vectors", "tests/core/test_payload.py")


def tested(root: Path, *arguments: str) -> str:
    """Run tests in this environment, and return pytest's summary."""
    options = ("-n", "2", "--dist", "worksteal", "-q", "-m", NO_DEVICE, "--timeout", "1200")
    return run(sys.executable, "-m", "pytest", *options, *arguments, cwd=root).splitlines()[-1]


def distributions(root: Path) -> str:
    """Build the sdist, and the wheel from it, with this version."""
    shutil.rmtree(root / BUILD, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", root / BUILD, root)
    names = sorted(path.name for path in (root / BUILD).iterdir())
    expected = [f"qcomp-{__version__}-py3-none-any.whl", f"qcomp-{__version__}.tar.gz"]
    if names != expected:
        raise Problem(f"built {names}; expected {expected}")
    return ", ".join(names)


def installed(root: Path, pattern: str) -> str:
    """Install a distribution in an empty environment, and use it outside of the repository."""
    (file,) = (root / BUILD).glob(pattern)
    environment = root / BUILD / pattern.rpartition(".")[2]
    venv.create(environment, with_pip=True, clear=True)
    bin_ = environment / "bin"
    pip = ("-m", "pip", "install", "--quiet", "--no-compile", "--constraint", root / "constraints.txt")
    run(bin_ / "python", *pip, f"{file}[mpi]")
    (environment / "smoke.py").write_text(SMOKE)
    if (said := run(bin_ / "qcomp", "--version", cwd=environment)) != f"qcomp {__version__}\n":
        raise Problem(f"qcomp --version says {said!r}")
    run(bin_ / "qcomp", "--help", cwd=environment)
    ranks = run(
        *(bin_ / "mpirun", "-n", "2", bin_ / "python", "-W", "ignore", "-m", "mpi4py", "smoke.py"),
        cwd=environment,
        OMP_NUM_THREADS="1",
    )
    lines = [line for line in ranks.splitlines() if line.startswith("2 ranks, ")]
    if len(lines) != 2 or len(set(lines)) != 1:
        raise Problem(f"two ranks printed\n{ranks}")
    return lines[0]


def readme(root: Path) -> str:
    """Run README's commands in the wheel's environment, its Python and its plans; check its links and tables."""
    environment = root / BUILD / "whl"
    for command in README_COMMANDS:
        run(environment / "bin" / "qcomp", *command.split(), cwd=environment)
    return tested(root, "tests/docs/test_pages.py", "-k", "README or readme or tables")


def site(root: Path) -> str:
    """Make the documentation, with warnings as errors."""
    run("make", "docs", cwd=root)
    return "build/docs"


def old_figures(root: Path) -> str:
    """Return the files with figures of benchmarks that have been committed long ago, with their dates."""
    today = datetime.datetime.now(datetime.UTC).date()
    old = []
    for path in sorted((root / "docs" / "benchmarks").rglob("*.json*")):
        day = git("log", "-1", "--format=%cs", "--", str(path), folder=root).stdout.strip()
        if day and (today - datetime.date.fromisoformat(day)).days > OLD:
            old.append(f"{path.relative_to(root)} ({day})")
    return f"older than {OLD} days: {', '.join(old) or 'none'}"


STEPS: dict[str, Callable[[Path], str]] = {
    "tree": clean_tree,
    "version": version_everywhere,
    "changes": no_changes_left,
    "released files": released_files,
    "distributions": distributions,
    "wheel": lambda root: installed(root, "*.whl"),
    "sdist": lambda root: installed(root, "*.tar.gz"),
    "bytes": bytes_unchanged,
    "README": readme,
    "docs": site,
    "benchmarks": old_figures,
}


def main(root: Path = ROOT) -> int:
    """Run all steps, print what each has found, and say how to tag; return 1 if there was a problem."""
    failed = []
    for name, step in STEPS.items():
        try:
            print(f"ok      {name}: {step(root)}", flush=True)
        except (Problem, ReleasedError) as problem:
            failed.append(name)
            print(f"FAILED  {name}: {problem}", flush=True)
    if failed:
        print(f"\nNot ready: {', '.join(failed)}.")
        return 1
    print(f"\nReady. Then, by hand:\n\n    git tag -a v{__version__} -m 'qcomp {__version__}'")
    print(f"    git push origin v{__version__}\n\nand upload the two files in {BUILD}.")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["collect"]:
        collect(ROOT)
    else:
        sys.exit(main())
