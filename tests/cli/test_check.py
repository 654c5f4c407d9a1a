"""``qcomp check``: checking the contract from the shell; its text, JSON and status."""

import json
import re
import subprocess
import sys

import pytest

from qcomp.cli import main
from qcomp.core import registry

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar
import qcomp

@dataclass(frozen=True)
class Fine(qcomp.Identity):
    name: ClassVar[str] = "fine_of_test"

@dataclass(frozen=True)
class Needs(qcomp.Identity):
    name: ClassVar[str] = "needs_of_test"
    times: int

@dataclass(frozen=True)
class Negates(qcomp.Identity):
    """Claims to be lossless, but is not."""
    name: ClassVar[str] = "negates_of_test"

    def decode(self, parts, size, dtype):
        return -super().decode(parts, size, dtype)

for cls in (Fine, Needs, Negates):
    qcomp.register(cls)

class Holder:
    inner = Fine()

instance = Fine()
number = 3

def make():
    return Fine()

def communicator():
    return qcomp.comm.LocalCommunicator.alone()

def optimizer():
    return qcomp.CompressedSGD(learning_rate=0.1)

def fails():
    raise RuntimeError("no such luck")
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    (tmp_path / "checked_of_test.py").write_text(MODULE)
    (tmp_path / "raises_of_test.py").write_text("raise ValueError('at import')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "checked_of_test", raising=False)
    return "checked_of_test"


def refused(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["check", *arguments])
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["Fine", "instance", "make", "Holder.inner"])
def test_a_target_may_be_a_class_an_instance_or_a_function(capsys, module, name):
    assert main(["check", f"{module}:{name}", "--law", "lossless"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fine_of_test on numpy",
        "  ok      lossless",
        "  1 law holds",
    ]


@pytest.mark.slow
def test_a_target_that_holds_ends_with_status_0(capsys):
    assert main(["check", "identity"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("identity on numpy\n  ok      sound_traits\n")
    assert re.search(r"\n  \d\d laws hold\n$", out)
    assert "\x1b" not in out  # not a terminal, so no colour


def test_a_broken_target_ends_with_status_1_and_a_description(capsys, module):
    assert main(["check", f"{module}:Negates"]) == 1
    out = capsys.readouterr().out
    assert "  BROKEN  lossless: " in out
    assert re.search(r"\d+ of \d+ laws broken; \d+ that rely on them were skipped\n$", out)


@pytest.mark.slow
def test_json_has_the_results_of_the_text(capsys, module):
    assert main(["check", f"{module}:Negates", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (report,) = document["checks"]
    assert not document["holds"]
    assert not report["holds"]
    broken = [law["name"] for law in report["laws"] if not law["holds"]]
    assert "lossless" in broken
    assert all(law["counterexample"] for law in report["laws"] if not law["holds"])
    assert report["skipped"]
    assert main(["check", "identity", "--json", "--law", "lossless", "--xp", "numpy,read_only_numpy"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["holds"]
    assert [check["subject"] for check in document["checks"]] == [
        "identity on numpy",
        "identity on read_only_numpy",
    ]
    assert all(check["skipped"] == [] for check in document["checks"])


@pytest.mark.parametrize(
    ("target", "subject"),
    [
        ("sign:bucket_size=64", "sign:bucket_size=64,scale=l1 on numpy"),
        ("checked_of_test:communicator", "rank 0 of LocalCommunicator on numpy"),
    ],
)
def test_known_compressors_and_communicators_are_found_by_name(capsys, module, target, subject):
    law = "sound_traits" if target.startswith("sign") else "all_gather_delivers"
    assert main(["check", target, "--law", law]) == 0
    assert capsys.readouterr().out.splitlines()[0] == subject


@pytest.mark.parametrize(
    ("target", "law", "subject"),
    [
        ("ring", "costs_make_sense", "the topology 'ring' on numpy"),
        ("checked_of_test:optimizer", "against_the_gradient", "CompressedSGD on numpy"),
    ],
)
def test_topologies_and_optimizers(capsys, module, target, law, subject):
    assert main(["check", target, "--law", law]) == 0
    assert capsys.readouterr().out.splitlines() == [subject, f"  ok      {law}", "  1 law holds"]


def test_a_law_of_one_library_only(capsys):
    pytest.importorskip("torch")
    assert main(["check", "all_gather", "--law", "same_as_on_numpy", "--xp", "numpy,torch"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "the topology 'all_gather' on torch"


def test_kernels(capsys):
    pytest.importorskip("numba")
    assert main(["check", "numba", "--law", "buffers"]) == 0
    assert "the kernel set 'numba' on numpy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_thing"], "TARGET is 'no_such_thing'; expected module:name, or one of cast, identity"),
        (["auto"], "ring, all_gather, hierarchical, numba, triton"),
        (["raises_of_test:Thing"], "importing raises_of_test raises ValueError: at import"),
        (["no_such_module:Thing"], "no_such_module cannot be imported"),
        (["{}:Nothing"], "has no name 'Nothing'"),
        (["{}:"], "expected module:name"),
        (["{}:number"], "expected an instance of a compressor, a topology, an optimizer"),
        (["{}:Needs"], "cannot be called without arguments"),
        (["{}:fails"], "RuntimeError: no such luck"),
        (["sign:bucket_size=100"], "bucket_size is 100; expected a power of two"),
        (["pure"], "expected another kernel set"),
        (["identity", "--xp", "numpie"], "--xp is 'numpie'; expected some of numpy, torch"),
        (["identity", "--law", "gravity"], "--law is 'gravity'; expected one of sound_traits"),
        ([], "the following arguments are required: TARGET"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_wrong(
    capsys, monkeypatch, module, arguments, message
):
    known = {name: kind for name, kind in registry._classes.items() if kind.__module__.startswith("qcomp.")}
    monkeypatch.setattr(registry, "_classes", known)  # other tests register compressors of their own
    assert message in refused(capsys, *(argument.format(module) for argument in arguments))


def test_a_library_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "--xp is 'cupy', which is not installed" in refused(capsys, "identity", "--xp", "cupy")


def test_it_runs_as_a_command(module, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "qcomp", "check", f"{module}:Negates", "--law", "lossless"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert "BROKEN  lossless" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.mpi
def test_the_ranks_of_a_communicator_check_it_together(mpirun, module, tmp_path):
    (tmp_path / "ranks_of_test.py").write_text(
        "import qcomp\n\ndef connect():\n    return qcomp.comm.world()\n"
    )
    job = mpirun(2, ["-m", "qcomp", "check", "ranks_of_test:connect"])
    lines = job.stdout.splitlines()
    assert lines[0] == "rank 0 of MPICommunicator on numpy"
    assert lines[-1] == "  7 laws hold"
    assert len(lines) == 9  # the other rank prints nothing


def test_output_of_the_checked_code_is_not_in_the_json(capsys, tmp_path, monkeypatch):
    (tmp_path / "loud_module.py").write_text(
        'print("importing")\nimport qcomp\ndef make():\n    print("making")\n    return qcomp.Identity()\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["check", "loud_module:make", "--law", "lossless", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["holds"]
    assert printed.err == "importing\nmaking\n"


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "def make():\n    raise SystemExit(0)"])
def test_code_that_exits_does_not_count_as_success(capsys, tmp_path, monkeypatch, code):
    name = f"exits_{len(code)}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        main(["check", f"{name}:make"])
    assert "called sys.exit(0); expected code that returns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qsdg"], "TARGET is 'qsdg' (did you mean 'qsgd'?)"),
        (["sign", "--law", "unbiasd"], "--law is 'unbiasd' (did you mean 'unbiased'?)"),
        (["./mine/plain.py:X"], "which names a file; expected mine.plain:X"),
    ],
)
def test_errors_suggest_what_was_probably_meant(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["check", *arguments])
    assert message in capsys.readouterr().err
