"""The settings of an optimizer of torch reach the optimizer of the core, which they have in common."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import qcomp
import qcomp.torch
from qcomp.core.variance.rules import FreezeAt
from tests.torch_face.every import FACES

OTHER_VALUES = {
    "exact": None,
    "compressor": qcomp.MinMaxUInt8(),
    "update_compressor": qcomp.MinMaxUInt8(),
    "averaging": qcomp.Averaging(topology="all_gather"),
    "seed": 7,
    "clip_norm": 3.0,
    "nonfinite": "skip",
    "freeze": FreezeAt(5),
    "watch": None,
    "variance_floor": 0.25,
    "variance_steps": qcomp.DoublingIntervals(3),
    "rounding": "stochastic",
    "block_rows": 4,
    "newton_schulz_steps": 3,
}
"""A value other than the default for each setting."""


@pytest.mark.parametrize("name", FACES)
def test_every_setting_reaches_the_core(name):
    kind = getattr(qcomp.torch, name)
    taken = inspect.signature(kind).parameters
    settings = {key: value for key, value in OTHER_VALUES.items() if key in taken}
    params = {"w": torch.nn.Parameter(torch.ones(8, 8))}.items()
    own = kind(params, lr=0.1, **settings)
    core = own._core(own._state)
    shared = {field.name for field in fields(core)} & set(settings)
    assert len(shared) > 4
    assert {key: getattr(core, key) for key in shared} == {key: settings[key] for key in shared}


PAGE = Path(__file__).parents[2] / "docs" / "torch.md"
SAME_MEANING = {"adjust_lr_fn", "eps"}
"""Of Muon: None means "original" in torch; torch's ``eps`` is the one of the iterations, qcomp's the one of AdamW."""


def defaults(kind):
    return {name: p.default for name, p in inspect.signature(kind).parameters.items()}


@pytest.mark.parametrize(
    ("of_torch", "own"),
    [
        ("SGD", "CompressedSGD"),
        ("AdamW", "OneBitAdam"),
        ("AdamW", "QAdam"),
        ("AdamW", "ZeroOneAdam"),
        ("Muon", "Muon"),
    ],
)
def test_the_page_names_every_default_that_differs_from_torchs(of_torch, own):
    theirs, ours = defaults(getattr(torch.optim, of_torch)), defaults(getattr(qcomp.torch, own))
    differing = {key for key in theirs.keys() & ours.keys() - SAME_MEANING if theirs[key] != ours[key]}
    (row,) = re.findall(
        rf"^\| `{of_torch}` \| `(.*=.*)` \| .*`{own}`.* \| `(.*)` \|$", PAGE.read_text(), re.M
    )
    for shown, found in zip(row, (theirs, ours), strict=True):
        named = {key: float(value) for key, value in (pair.split("=") for pair in shown.split(", "))}
        assert named == {key: found[key] for key in differing}
