"""The settings of an optimizer of torch reach the optimizer of the core, which they have in common."""

import inspect
from dataclasses import fields

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
