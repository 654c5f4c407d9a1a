"""Runs the fast tests with other versions: the lowest that are promised, the newest, and without an optional package.

Run it from the root of the project with any Python::

    python3 tests/versions.py [--case lowest] [--python python3.13] [PYTEST ARGUMENTS]

Each case has an environment of its own in .venv-versions/, made anew. Without options it runs every case on each of
Python 3.11 to 3.14 that is installed.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("mpi", "torch", "jax", "numba", "testing", "plot")
TOOLS = ("array-api-strict", "ml_dtypes", "pytest-timeout", "pytest-xdist", "safetensors", "tqdm")
CASES = {
    "lowest": (*EXTRAS, "frameworks"),
    "newest": (*EXTRAS, "frameworks", "ft", "triton"),
    **{
        f"no-{out}": tuple(extra for extra in EXTRAS if extra != out)
        for out in ("numba", "jax", "torch", "mpi")
    },
}
"""The extras that each case installs. torchft and Triton need newer versions of torch than the lowest."""
NAMED = (
    "numpy",
    "array-api-compat",
    "torch",
    "jax",
    "optax",
    "numba",
    "mpi4py",
    "mpich",
    "hypothesis",
    "pytest",
)
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")


def main() -> int:
    """Run the chosen cases, print a line for each, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append", help="(default: all)")
    parser.add_argument("--python", action="append", help="(default: every one that is installed)")
    options, arguments = parser.parse_known_args()
    pythons = options.python or [name for name in PYTHONS if runs(name)]
    results = []
    for python in pythons:
        for case in options.case or CASES:
            results.append((python, case, *try_case(python, case, arguments)))
            print("\n" + "\n".join("  ".join(result) for result in results) + "\n", flush=True)
    return int(any(outcome != "passed" for *_, outcome in results))


def runs(python: str) -> bool:
    """Return whether a Python is there; a version manager may know a name without having it."""
    return shutil.which(python) is not None and not subprocess.run([python, "-c", ""], check=False).returncode


def try_case(python: str, case: str, arguments: list[str]) -> tuple[str, str]:
    """Return the versions of a new environment, and how its tests ended."""
    environment = ROOT / ".venv-versions" / f"{Path(python).name}-{case}"
    shutil.rmtree(environment, ignore_errors=True)
    own = environment / "bin" / "python"
    constraints = "constraints-lowest.txt" if case == "lowest" else "constraints.txt"
    pins = [] if case == "newest" else ["--constraint", str(ROOT / constraints)]
    subprocess.run([python, "-m", "venv", environment], check=True)
    install = [str(own), "-m", "pip", "install", "--quiet", "--no-compile", *pins]
    if subprocess.run(
        [*install, "--editable", f"{ROOT}[{','.join(CASES[case])}]", *TOOLS], check=False
    ).returncode:
        return "", "not installed"
    listed = subprocess.run(
        [own, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    versions = dict(line.split("==", 1) for line in listed.stdout.splitlines() if "==" in line)
    shown = " ".join(f"{name} {versions[name]}" for name in NAMED if name in versions)
    marks = "not gpu and not nvrtc and not peers and not slow"
    tests = [
        str(own),
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        marks,
        "--ignore",
        "tests/benchmarks",
    ]
    ended = subprocess.run([*tests, *arguments], cwd=ROOT, check=False).returncode
    return shown, "passed" if ended == 0 else f"failed with status {ended}"


if __name__ == "__main__":
    sys.exit(main())
