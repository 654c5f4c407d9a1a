"""The README keeps its promises: its Python runs, and the targets and files that it names exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    scope = {}
    for block in blocks:
        exec(block, scope)
    (announced,) = re.findall(r"payload\.nbytes +# (\d+)", README)
    assert scope["payload"].nbytes == int(announced)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", README))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_figures_are_those_of_the_committed_run():
    for run in json.loads((ROOT / "docs" / "demo" / "summary.json").read_text()):
        loss, sent = f"{run['validation_loss']:.3f}", f"{run['bytes_sent_per_rank'] / 1e6:.0f} MB"
        row = f"| {loss} | {sent} | {run['compression_ratio']:.2f}x |"
        if run["compressed_stage_ratio"] is not None:
            row += f" {run['compressed_stage_ratio']:.1f}x |"
        assert row in README
