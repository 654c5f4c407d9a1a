"""The migration pages keep their promises: their Python runs and does what they say, and every key is accounted for."""

import inspect
import re
from pathlib import Path

import pytest

from qcomp.compat import deepspeed

PAGES = Path(__file__).parents[2] / "docs" / "migrate"


def scope_of(name: str) -> dict:
    """Run the blocks of a page one after the other and return what they have defined."""
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / name).read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    scope: dict = {}
    for block in blocks:
        exec(block, scope)
    return scope


def test_deepspeed():
    scope = scope_of("deepspeed.md")
    assert scope["stages"] == [("compressed", 60)] * 2
    assert scope["state"].step == 21
    assert scope["state"].momentum[0].tolist() == pytest.approx([0.9 * 0.1 + 0.1] * 3)
    assert scope["new"].freeze.step == 20


@pytest.mark.parametrize("make", [deepspeed.onebit_adam, deepspeed.zero_one_adam, deepspeed.onebit_lamb])
def test_deepspeed_names_every_parameter(make):
    page = (PAGES / "deepspeed.md").read_text()
    for name in inspect.signature(make).parameters:
        assert f"`{name}" in page or f'"{name}' in page or f'`{name}="' in page, name


@pytest.mark.filterwarnings("ignore:the variance of QAdam no longer fits the gradients")
def test_bagua():
    """Its gradients shrink to a thousandth after the freeze, of which the watch warns."""
    scope = scope_of("bagua.md")
    assert max(scope["distances"]) < 0.2
    assert scope["means"] == pytest.approx([0.5, 0.5], abs=1e-2)
    assert (scope["closest"].mean.feedback, scope["closest"].mean.topology) == (False, "hierarchical")
