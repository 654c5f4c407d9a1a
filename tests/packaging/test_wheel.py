"""The distribution is complete: a wheel made from the sdist works outside the repository."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "qcomp"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import sys
import numpy as np
import qcomp

assert qcomp.__file__.startswith(sys.prefix), qcomp.__file__
opt = qcomp.OneBitAdam(learning_rate=0.05, betas=(0.9, 0.9), freeze=10, exact=None)

def rank_main(comm):
    params = np.zeros(1000, dtype=np.float32)
    state = opt.init(params, comm)
    for _ in range(20):
        params, state = opt.step(params, params - 1 - comm.rank, state, comm)
    return params, state.stage

(first, stage), (second, _) = qcomp.comm.run_local(2, rank_main)
assert stage == "compressed" and np.array_equal(first, second)
"""


def run(*command, **options):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        env=clean,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the sdist, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """The commands of an environment with the wheel and this environment's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    bin = folder / "bin"
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", bin / "python", "install", "--no-deps", "--no-index", wheel)
    packages = run(bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A line of a .pth file adds a folder, but not the folders in that folder's own .pth files, such as this repository.
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return bin


def shipped():
    """Yield the files of the package as they are in the repository."""
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(ROOT))


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == set(shipped())
    assert {"qcomp/py.typed", "qcomp/backends/cupy_cuda/sign.cu"} <= names


def test_the_sdist_has_the_files_that_its_tests_and_pages_need(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(shipped()) <= names
    for needed in (
        "conftest.py",
        "tests/conftest.py",
        "docs/conf.py",
        "examples/mpi_numpy.py",
        "constraints.txt",
    ):
        assert needed in names


def test_two_ranks_step_outside_of_the_repository(installed, tmp_path):
    run(installed / "python", "-W", "ignore:the variance is frozen", "-c", PROGRAM, cwd=tmp_path)


def test_the_command_is_installed(installed, tmp_path):
    assert "numpy on cpu" in run(installed / "qcomp", "info", cwd=tmp_path)
    assert "ompress" in run(
        *(
            installed / "qcomp",
            "plan",
            "--params",
            "1M",
            "--compute-ms",
            "10",
            "--ranks",
            "4",
            "--link",
            "1gbit",
        ),
        cwd=tmp_path,
    )
