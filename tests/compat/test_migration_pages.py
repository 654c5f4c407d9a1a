"""The page on migrating from DeepSpeed covers every key; `tests/docs` runs its Python."""

import inspect
from pathlib import Path

import pytest

from qcomp.compat import deepspeed

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "deepspeed.md"


@pytest.mark.parametrize("make", [deepspeed.onebit_adam, deepspeed.zero_one_adam, deepspeed.onebit_lamb])
def test_deepspeed_names_every_parameter(make):
    page = PAGE.read_text()
    for name in inspect.signature(make).parameters.keys() - {"clip_norm", "seed"}:
        assert f"`{name}" in page or f'"{name}' in page or f'`{name}="' in page, name
