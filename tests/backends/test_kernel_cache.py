"""Compiled kernels are cached only where nobody else can write, because loading one runs its code."""

import gc
import importlib
import importlib.util
import logging
import os
import pkgutil
import stat
import subprocess
import sys

import numba
import pytest

from qcomp.backends import numba_cpu
from qcomp.backends.numba_cpu import jit
from qcomp.backends.private_folder import private_folder


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Return an empty directory as the user's cache directory."""
    caches = tmp_path / "caches"
    caches.mkdir(mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    jit._folder.cache_clear()
    yield caches
    jit._folder.cache_clear()


def test_no_two_kernels_have_one_place_in_the_cache():
    """Otherwise one of them would run as the other, in the processes that read it from there."""
    for module in pkgutil.iter_modules(numba_cpu.__path__, f"{numba_cpu.__name__}."):
        importlib.import_module(module.name)
    kernels = [each for each in gc.get_objects() if type(each) is jit.Kernel]
    places = [(k.function.__name__, k.function.__code__, k.signature) for k in kernels]
    assert len(places) == len(set(places)) > 40


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


class TestFolder:
    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_it_is_private_whatever_the_umask(self, caches, umask):
        before = os.umask(umask)
        try:
            folder = private_folder("a")
        finally:
            os.umask(before)
        assert folder == caches / "qcomp" / "a"
        assert mode_of(folder) == mode_of(folder.parent) == 0o700
        assert private_folder("a") == folder

    def test_a_folder_that_others_can_read_is_made_private(self, caches):
        private_folder("a").chmod(0o755)
        assert mode_of(private_folder("a")) == 0o700

    @pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
    @pytest.mark.parametrize("which", ["a", "."])
    def test_a_folder_that_others_can_write_to_is_refused(self, caches, mode, which):
        private_folder("a")
        (caches / "qcomp" / which).chmod(mode)
        with pytest.raises(PermissionError, match=r"^other users can write to .*qcomp"):
            private_folder("a")

    def test_a_folder_of_another_user_is_refused(self, caches, monkeypatch):
        private_folder("a")
        somebody = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: somebody)
        with pytest.raises(
            PermissionError, match=f"qcomp belongs to user {somebody - 1}, not to user {somebody}$"
        ):
            private_folder("a")

    def test_a_link_is_refused(self, caches, tmp_path):
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (caches / "qcomp").mkdir(mode=0o700)
        (caches / "qcomp" / "a").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(PermissionError, match=r"a is a link$"):
            private_folder("a")

    def test_a_parent_where_everybody_can_replace_the_folder_is_refused(self, caches):
        caches.chmod(0o777)
        with pytest.raises(PermissionError, match=r"^every user can replace the files in .*caches$"):
            private_folder("a")
        caches.chmod(0o1777)  # like /tmp: only the owner of a file can replace it
        private_folder("a")

    @pytest.mark.parametrize("given", ["", "relative/folder"])
    def test_a_relative_cache_directory_is_ignored(self, tmp_path, monkeypatch, given):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert private_folder("a") == tmp_path / ".cache" / "qcomp" / "a"


MODULE = """
from qcomp.backends.numba_cpu.jit import inline, kernel

@inline
def multiplied(x):
    return {factor} * x

def driver(function):
    def times(x):
        return function(x)
    return kernel("int64(int64)")(times)

times = driver(multiplied)
"""


@pytest.fixture
def times(tmp_path, monkeypatch):
    """Return a function that writes a module with a kernel and returns that kernel."""
    # Python would take the bytecode for up to date if the next source had the same second and size.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(factor):
        path = tmp_path / "module_with_a_kernel.py"
        path.write_text(MODULE.format(factor=factor))
        spec = importlib.util.spec_from_file_location("module_with_a_kernel", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.times

    return write


def hits(kernel):
    return sum(kernel.compiled.stats.cache_hits.values())


class TestKernels:
    def test_compiled_kernels_are_kept_in_the_cache(self, caches, times):
        first, second = times(2), times(2)
        assert (first(21), hits(first)) == (42, 0)
        assert (second(21), hits(second)) == (42, 1)
        (folder,) = (caches / "qcomp").iterdir()
        assert folder.name.startswith(f"numba-{numba.__version__}-")
        assert {path.suffix for path in folder.iterdir()} == {".nbi", ".nbc", ".lock"}

    @pytest.mark.slow
    def test_processes_that_start_together_compile_once(self, caches, tmp_path):
        (tmp_path / "module_with_a_kernel.py").write_text(MODULE.format(factor=2))
        code = "from module_with_a_kernel import times as t; t(21); print(sum(t.compiled.stats.cache_hits.values()))"
        ranks = [
            subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        assert sorted(rank.communicate(timeout=100)[0].split() for rank in ranks) == [["0"], ["1"], ["1"]]

    def test_another_source_is_compiled_again(self, caches, times):
        """Its bytecode is the same; only a constant differs."""
        assert times(2)(21) == 42
        other = times(3)
        assert (other(21), hits(other)) == (63, 0)

    def test_the_user_may_choose_another_place(self, caches, times, tmp_path, monkeypatch):
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "chosen"))
        assert times(2)(21) == 42
        assert list((tmp_path / "chosen").rglob("*.nbi"))
        assert not list(caches.iterdir())

    def test_nothing_is_read_or_written_where_others_can_write(self, caches, times, caplog):
        times(2)(21)
        (folder,) = (caches / "qcomp").iterdir()
        before = sorted(folder.iterdir())
        folder.chmod(0o777)
        jit._folder.cache_clear()
        with caplog.at_level(logging.WARNING, logger="qcomp"):
            again = [times(2), times(5)]
            assert [kernel(21) for kernel in again] == [42, 105]
        assert [hits(kernel) for kernel in again] == [0, 0]
        assert sorted(folder.iterdir()) == before
        (said,) = [text for text in caplog.messages if "again" in text]  # once, for all kernels
        assert said == (
            "compiled kernels cannot be stored, so every process compiles them again: "
            f"other users can write to {folder}; set NUMBA_CACHE_DIR to a folder of your own"
        )

    def test_numba_functions_of_users_stay_in_the_cache_of_numba(self, caches):
        @numba.njit(cache=True)
        def of_a_user(x):
            return x + 1

        assert of_a_user(1) == 2
        assert str(caches) not in of_a_user.stats.cache_path
