"""Settings: numbers of other libraries count as Python's, and what is none is refused by name."""

from dataclasses import dataclass, fields, replace
from fractions import Fraction

import numpy as np
import pytest

import qcomp
from qcomp.comm.local import LocalCommunicator
from qcomp.core.optimizers.groups import group_of_each
from tests.optimizers.every import EVERY, SHAPES


def foreign(value):
    """Return a number, or a pair of numbers, as NumPy's, and what is neither as it is."""
    if isinstance(value, tuple) and value and all(isinstance(each, float) for each in value):
        return tuple(map(np.float64, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return np.float64(value) if isinstance(value, float) else np.int64(value)


def foreign_numbers(settings):
    """Return the fields of a dataclass that have numbers, with those of NumPy."""
    given = {
        f.name: (getattr(settings, f.name), foreign(getattr(settings, f.name))) for f in fields(settings)
    }
    return {name: new for name, (old, new) in given.items() if new is not old}


@pytest.mark.parametrize("name", EVERY)
def test_numbers_of_numpy_become_numbers_of_python(name):
    """A scalar of float64 would make float32 moments float64."""
    opt = EVERY[name].opt
    changes = foreign_numbers(opt)
    assert {"weight_decay", "seed"} <= changes.keys()
    same = replace(opt, **changes)
    assert repr(same) == repr(opt)
    params = [np.ones(shape, np.float32) for shape in SHAPES]
    state = same.init(params, LocalCommunicator.alone())
    assert all(m.dtype == np.float32 for m in state.momentum)


@pytest.mark.parametrize(
    "settings",
    [
        qcomp.Group("*", learning_rate_factor=0.3, weight_decay=0.1),
        qcomp.VarianceWatch(),
        qcomp.VarianceStable(),
        qcomp.DoublingIntervals(4, longest=8),
        qcomp.OuterLoop(every=4, decay=0.9, mixing=0.5, delay=1),
    ],
    ids=lambda settings: type(settings).__name__,
)
def test_numbers_of_numpy_in_other_settings(settings):
    changes = foreign_numbers(settings)
    assert changes
    assert repr(replace(settings, **changes)) == repr(settings)


def test_a_group_of_numpy_does_not_stand_for_an_equal_one_of_python():
    """Equal settings share a cache, which returned the group that came first to whoever asked."""
    for factor in (np.float64(0.3), 0.3):
        (group,) = group_of_each((qcomp.Group("w", learning_rate_factor=factor),), ("w",))
        assert type(group.learning_rate_factor) is float


def test_clipping_by_a_number_of_numpy_keeps_the_dtype_of_moments():
    comm, x = LocalCommunicator.alone(), np.ones(100, np.float32)
    for norm in (np.float64(1), np.float32(1), Fraction(1)):
        opt = qcomp.Adam(learning_rate=np.float64(0.1), clip_norm=norm)
        _, state = opt.step(x, x, opt.init(x, comm), comm)
        assert state.momentum[0].dtype == np.float32
        assert opt.load_state_dict(opt.state_dict(state), x, comm).step == 1


def test_derived_class_with_another_default_still_takes_schedules():
    @dataclass(frozen=True, kw_only=True)
    class Slow(qcomp.SGD):
        learning_rate: float = 0.01

    rate = lambda step: 0.1 / (1 + step)  # noqa: E731 - held to compare it
    assert Slow(learning_rate=rate).learning_rate is rate
    assert type(Slow(learning_rate=np.float64(0.5)).learning_rate) is float
    with pytest.raises(TypeError, match="momentum is 'x'; expected a number"):
        Slow(momentum="x")


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (qcomp.Adam, {"weight_decay": "0.1"}, "weight_decay is '0.1'; expected a number"),
        (qcomp.Adam, {"clip_norm": "1"}, "clip_norm is '1'; expected a number, or None"),
        (qcomp.Adam, {"eps": None}, "eps is None; expected a number"),
        (qcomp.Adam, {"betas": 0.9}, "betas is 0.9; expected two numbers"),
        (qcomp.Adam, {"betas": (0.9, "x")}, "expected two numbers"),
        (qcomp.SGD, {"momentum": True}, "momentum is True; expected a number"),
        (qcomp.OneBitAdam, {"watch": True}, "watch is True; expected a qcomp.VarianceWatch, or None"),
        (qcomp.OneBitAdam, {"variance_steps": 5}, "variance_steps is 5; expected a schedule"),
        (qcomp.QAdam, {"variance_steps": 5}, "variance_steps is 5; expected a schedule"),
        (qcomp.ZeroOneAdam, {"variance_steps": 5}, "variance_steps is 5; expected a schedule"),
        (qcomp.ZeroOneAdam, {"sync_steps": 5}, "sync_steps is 5; expected a schedule"),
        (qcomp.Muon, {"whiten_steps": 5}, "whiten_steps is 5; expected a schedule"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(kind, settings, said):
    with pytest.raises(TypeError, match=said):
        kind(learning_rate=0.1, **settings)


def test_weight_decay_is_finite():
    with pytest.raises(ValueError, match="weight_decay is inf; expected a finite number >= 0"):
        qcomp.Adam(learning_rate=0.1, weight_decay=float("inf"))
    with pytest.raises(ValueError, match="weight_decay is inf; expected a finite number >= 0, or None"):
        qcomp.Group("*", weight_decay=float("inf"))
