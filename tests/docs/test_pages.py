"""Pages keep their promises: their Python runs as written, and the files and targets that they name exist."""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import qcomp
import qcomp.outer
import qcomp.torch
from qcomp.cli import main
from tests.docs import pages
from tests.docs.pages import DOCS, PAGES, ROOT

WITH_PYTHON = [
    page
    for page in PAGES
    if any(language == "python" for language, _ in pages.blocks(page)) and page.stem != "frameworks"
]
"""Pages that run as a whole; `test_frameworks` runs the recipes of the other."""
LANGUAGES = {"python", "sh", "text", "diff", "toml", "yaml", "{toctree}", "{include}"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:a state of 2 ranks resumes with 3"),  # done by the page on torch
    pytest.mark.filterwarnings("ignore:a state of 2 ranks resumes with 2, without the residuals of rank 1"),
    # The gradients of the page on Bagua shrink to a thousandth after the freeze, and the watch warns of it.
    pytest.mark.filterwarnings("ignore:the variance of QAdam no longer fits the gradients"),
]


def ids(paths):
    return [pages.name_of(path) for path in paths]


SLOW = {"ddp", "extend/optimizer", "extend/topology", "jax", "sharded"}
"""Pages that import much of torch, which run on two ranks anyway, and those that check a topology or an optimizer."""


def once(page):
    name = pages.name_of(page)
    return pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("page", [once(page) for page in WITH_PYTHON])
def test_python_runs(page, reader, monkeypatch):
    scope = pages.run(page, monkeypatch)
    check = CHECKS.get(pages.name_of(page))
    if check is not None:
        check(scope)


OF_THE_READER = [
    "qcomp.torch.Muon(block_rows=68)",
    'qcomp.backends.set_default("packbits")',
    'qcomp.compressor("terngrad")',
]
"""Calls in sentences that lack the reader's model, or name what the reader has registered."""


def test_calls_in_sentences_run():
    """Such as `qcomp.outer.diloco(100, compressor=...)`, with values for all arguments."""
    importlib.import_module("qcomp.backends.numba_cpu")
    found = []
    for page in PAGES:
        sentences = pages.FENCE.sub("", page.read_text())
        calls = [" ".join(call.split()) for call in re.findall(r"`(qcomp\.[^`]*\))`", sentences)]
        found += [call for call in calls if "..." not in call and call not in OF_THE_READER]
    for call in found:
        names = {node.id for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name)}
        if names == {"qcomp"}:
            eval(call, {"qcomp": qcomp})  # raises if it does not
    assert "qcomp.outer.sparse_loco(every=5)" in found


def check_features(scope):
    (announced,) = re.findall(r"payload\.nbytes +# (\d+)", (DOCS / "features.md").read_text())
    assert scope["payload"].nbytes == int(announced)


def check_deepspeed(scope):
    assert scope["stages"] == [("compressed", 60)] * 2
    assert (scope["state"].step, scope["state"].stage) == (5000, "compressed")
    assert scope["state"].momentum[0].tolist() == pytest.approx([0.9 * 0.1 + 0.1] * 3)
    assert scope["params"].tolist() == pytest.approx([-0.02 * 0.19 / 0.2**0.5] * 3)


def check_bagua(scope):
    assert max(scope["distances"]) < 0.2
    assert scope["means"] == pytest.approx([0.5, 0.5], abs=1e-2)
    assert (scope["closest"].mean.feedback, scope["closest"].mean.topology) == (False, "hierarchical")


def check_torchft(scope):
    assert scope["means"] == pytest.approx([1.0] * 3, abs=1e-2)


def check_choose(scope):
    assert max(scope["errors"].values()) < 0.1


CHECKS = {
    "features": check_features,
    "migrate/deepspeed": check_deepspeed,
    "migrate/bagua": check_bagua,
    "migrate/torchft": check_torchft,
    "choose": check_choose,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["torch", "ddp", "sharded"])
def test_runs_on_two_ranks_of_torchrun(name, tmp_path):
    (tmp_path / "page.py").write_text(pages.code(DOCS / f"{name}.md"))
    launcher = Path(sys.executable).parent / "torchrun"
    command = [sys.executable, launcher, "--standalone", "--nproc-per-node", "2", "page.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.mpi
def test_runs_on_two_ranks_of_mpirun(mpirun, tmp_path, monkeypatch):
    (tmp_path / "page.py").write_text(pages.code(DOCS / "mpirun.md"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    mpirun(2, ["-m", "mpi4py", "page.py"])


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_block_says_its_language(page):
    """All Python is run, so every block must declare its language."""
    assert {language for language, _ in pages.blocks(page)} <= LANGUAGES
    prose = pages.FENCE.sub("", page.read_text())
    assert not re.search(r"^    (import |from |\w+ = |with |def |qcomp\.)", prose, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_a_heading_is_no_paragraph(page):
    for heading in re.findall(r"^#+ .*$", pages.FENCE.sub("", page.read_text()), re.MULTILINE):
        assert len(heading) < 120, heading


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page):
    """Sphinx checks links to headings."""
    for link in re.findall(r"\]\(((?!http|#)[^)#\s]+)", pages.FENCE.sub("", page.read_text())):
        if link != "api/index.rst":  # made with the site
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_make_targets_on_pages_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"(?:^    |`|sudo )make ([a-z-]+)", page.read_text(), re.MULTILINE)
    for target in commands:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def commands(page):
    """Return the ``qcomp plan ...`` commands of a page that need no other files."""
    lines = re.findall(r"^(?:    )?(qcomp plan .*)$", page.read_text(), re.MULTILINE)
    return [line for line in lines if "--measured" not in line]


PLANS = [(page, command) for page in PAGES for command in commands(page)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), PLANS, ids=[pages.name_of(page) for page, _ in PLANS])
def test_commands_of_pages_make_plans(page, command, reader, capsys):
    assert main(shlex.split(command)[1:]) == 0
    advice = capsys.readouterr().out.splitlines()[-1]
    assert "ompress" in advice or advice.startswith(("Exchange ", "Try "))


def test_tables_list_every_compressor_optimizer_and_topology():
    names = ("features", "topologies", "format")
    features, topologies, messages = ((DOCS / f"{name}.md").read_text() for name in names)
    values = {name: getattr(qcomp, name) for name in qcomp.__all__}
    bases = (qcomp.Compressor, qcomp.Optimizer)
    kinds = [n for n, v in values.items() if isinstance(v, type) and issubclass(v, bases) and v not in bases]
    rows = [(features, rf"`{name}\b") for name in kinds]
    own = qcomp.topologies.names()
    rows += [(topologies, f'`"{name}"`') for name in own] + [(messages, f" `{name}` ") for name in own]
    assert [row for page, row in rows if not re.search(rf"^\|.*{row}", page, re.MULTILINE)] == []


@pytest.mark.parametrize(
    "file", ["core/mean/averaging.py", "core/mean/compressed_mean.py", "integrations/ddp/hook.py"]
)
def test_docstrings_list_every_topology(file):
    text = (ROOT / "qcomp" / file).read_text()
    (entry,) = re.findall(r"^    topology : .*?(?=^    \w+ : )", text, re.MULTILINE | re.DOTALL)
    assert [name for name in qcomp.topologies.names() if f'"{name}"' not in entry] == []


def test_the_page_on_the_demo_shows_the_committed_run():
    for run in json.loads((DOCS / "demo" / "summary.json").read_text()):
        loss, sent = f"{run['validation_loss']:.3f}", f"{run['bytes_sent_per_rank'] / 1e6:.0f} MB"
        row = f"| {loss} | {sent} | {run['compression_ratio']:.2f}x |"
        if run["compressed_stage_ratio"] is not None:
            row += f" {run['compressed_stage_ratio']:.1f}x |"
        assert row in (DOCS / "demo" / "README.md").read_text()


def test_the_readme_fits_on_a_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 75
