"""Options by name: an optimizer with groups acts like several optimizers side by side."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import Group
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.optimizers import groups as module

SHAPES = {"last.weight": (5, 8), "last.bias": (7,), "body.weight": (33,), "body.bias": (3,)}
NAMES = tuple(SHAPES)
GROUPS = (
    Group("*.bias", weight_decay=0.0),
    Group("last.*", learning_rate_factor=0.125),
    Group("last.bias", learning_rate_factor=99.0),
)
OF_EACH = {"last.weight": (0.125, 0.2), "last.bias": (1, 0.0), "body.weight": (1, 0.2), "body.bias": (1, 0.0)}
"""Factor and decay for each name: the first group that matches counts."""
SIGN = qcomp.ScaledSign(bucket_size=16)
OPTIMIZERS = {
    "adam": qcomp.Adam(learning_rate=0.01, weight_decay=0.2),
    "coupled": qcomp.Adam(learning_rate=0.01, weight_decay=0.2, decoupled_weight_decay=False),
    "schedule": qcomp.Adam(learning_rate=lambda step: 0.01 / (step + 1), weight_decay=0.2),
    "1-bit": qcomp.OneBitAdam(learning_rate=0.01, weight_decay=0.2, freeze=3, exact=None, compressor=SIGN),
    "1-bit coupled": qcomp.OneBitAdam(
        learning_rate=0.01,
        weight_decay=0.2,
        freeze=3,
        exact=None,
        compressor=SIGN,
        decoupled_weight_decay=False,
    ),
    "qadam": qcomp.QAdam(
        learning_rate=0.01,
        weight_decay=0.2,
        freeze=3,
        exact=None,
        compressor=qcomp.MinMaxUInt8(16),
        variance_steps=None,
    ),
    "sgd": qcomp.CompressedSGD(learning_rate=0.01, weight_decay=0.2, exact=None, compressor=SIGN),
}


def draw(grads, rank: int, step: int) -> list[np.ndarray]:
    return grads(list(SHAPES.values()), rank, step)


def alone(opt: qcomp.Optimizer, name: str) -> qcomp.Optimizer:
    """Return an optimizer with the options of one tensor."""
    factor, decay = OF_EACH[name]
    rate = opt.learning_rate
    scaled = (lambda step: rate(step) * factor) if callable(rate) else rate * factor
    return replace(opt, learning_rate=scaled, weight_decay=decay)


def check_side_by_side(job, grads, opt, size):
    """No bucket has elements of two tensors, so only the options differ: the steps are equal bit for bit."""
    start = draw(grads, 99, 0)
    together = job(replace(opt, groups=GROUPS), start, size, NAMES)
    each = [job(alone(opt, name), [p], size) for name, p in zip(NAMES, start, strict=True)]
    for step in range(7):
        of_ranks = [draw(grads, rank, step) for rank in range(size)]
        together.step(of_ranks)
        for i, run in enumerate(each):
            run.step([[g[i]] for g in of_ranks])
            assert together.params[0][i].tobytes() == run.params[0][0].tobytes()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_are_optimizers_side_by_side(job, grads, name, size):
    check_side_by_side(job, grads, OPTIMIZERS[name], size)


def test_the_last_match_is_caught(job, grads, monkeypatch):
    """The check fails if the last matching group counted, or if none did."""
    of_each = module.group_of_each
    for broken in (lambda groups, names: of_each(groups[::-1], names), lambda _, names: of_each((), names)):
        monkeypatch.setattr("qcomp.core.optimizers.base.group_of_each", broken)
        with pytest.raises(AssertionError):
            check_side_by_side(job, grads, OPTIMIZERS["sgd"], 1)


OWN_BETAS = (
    Group("*.bias", betas=(0.5, 0.75), eps=1e-3),
    Group("last.*", betas=(0.8, 0.99)),
    Group("body.*", weight_decay=0.0, eps=1e-5),
)
BETAS: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.2, "betas": (0.9, 0.95), "eps": 1e-7}
FROZEN: dict[str, Any] = BETAS | {"freeze": 3, "exact": None, "compressor": SIGN}
WITH_BETAS = {
    "adam": qcomp.Adam(**BETAS),
    "coupled": qcomp.Adam(**BETAS, decoupled_weight_decay=False),
    "lamb": qcomp.Lamb(**BETAS),
    "1-bit": qcomp.OneBitAdam(**FROZEN),
    "1-bit coupled": qcomp.OneBitAdam(**FROZEN, decoupled_weight_decay=False),
    "1-bit lamb": qcomp.OneBitLamb(**FROZEN),
    "qadam": qcomp.QAdam(
        **FROZEN | {"compressor": qcomp.MinMaxUInt8(16)}, variance_steps=lambda step: step % 2 == 0
    ),
    "0/1": qcomp.ZeroOneAdam(
        **FROZEN, variance_steps=lambda step: step < 3, sync_steps=qcomp.LocalSteps(double_every=1, longest=2)
    ),
    "lion": qcomp.Lion(learning_rate=0.01, weight_decay=0.2),
    "muon": qcomp.Muon(**BETAS, others=("*",)),
}


@pytest.mark.quick_cases(6)
@pytest.mark.filterwarnings(
    "ignore:(AdamW moves all|Muon orthogonalises nothing|the variance is frozen after 3 steps, but)"
)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", WITH_BETAS)
def test_betas_and_eps_of_groups_are_those_of_optimizers_side_by_side(job, grads, name, size):
    """Bit for bit, except where a number of all tensors rounds: a scale of 1-bit LAMB, the weights of 0/1 Adam."""
    opt, start = WITH_BETAS[name], draw(grads, 99, 0)
    size = 1 if name == "0/1" else size  # between synchronisations ranks are apart
    own = OWN_BETAS if name != "lion" else [replace(group, eps=None) for group in OWN_BETAS]
    together = job(replace(opt, groups=own), start, size, NAMES)
    each = []
    for tensor, p in zip(NAMES, start, strict=True):
        (group,) = module.group_of_each(tuple(own), (tensor,))
        settings = {key: getattr(group, key) for key in ("betas", "eps", "weight_decay")}
        each.append(job(replace(opt, **{k: x for k, x in settings.items() if x is not None}), [p], size))
    for step in range(8):
        of_ranks = [draw(grads, rank, step) for rank in range(size)]
        together.step(of_ranks)
        for i, run in enumerate(each):
            run.step([[g[i]] for g in of_ranks])
            found, expected = together.params[0][i], run.params[0][0]
            if name in ("1-bit lamb", "0/1"):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
            else:
                assert found.tobytes() == expected.tobytes()
    assert together.state.stage == run.state.stage


@pytest.mark.parametrize("kind", [qcomp.SGD, qcomp.CompressedSGD, qcomp.EF21SGD, qcomp.QSVRG, qcomp.Lion])
def test_settings_of_groups_that_an_optimizer_does_not_read_are_refused(kind):
    with pytest.raises(
        ValueError,
        match=rf"eps of the group 'x' is 0.1; expected None: {kind.__name__} has one value for all",
    ):
        kind(learning_rate=0.1, groups=[Group("x", eps=0.1)])


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"betas": (0.9, 1.0)}, ValueError, r"betas is \(0.9, 1.0\); expected two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, ValueError, r"betas is \(0.9,\)"),
        ({"betas": 0.9}, TypeError, "betas is 0.9; expected two numbers, or None"),
        ({"eps": -1.0}, ValueError, "eps is -1.0; expected a number >= 0"),
        ({"eps": "small"}, TypeError, "eps is 'small'; expected a number, or None"),
    ],
)
def test_wrong_betas_and_eps_of_groups(settings, error, text):
    with pytest.raises(error, match=text):
        Group("x", **settings)


def test_records_of_groups_without_betas_read_as_before():
    """A saved state has the text, and loading warns of another one."""
    assert repr(Group("x", 0.5)) == "Group(pattern='x', learning_rate_factor=0.5, weight_decay=None)"
    assert repr(Group("x", eps=1e-5)).endswith("weight_decay=None, eps=1e-05)")
    assert repr(Group("x", betas=[0.5, np.float32(0.5)])).endswith("weight_decay=None, betas=(0.5, 0.5))")


def every_optimizer() -> list[type[qcomp.Optimizer]]:
    """Return all public optimizers."""
    values = [getattr(qcomp, name) for name in qcomp.__all__]
    return [
        v
        for v in values
        if isinstance(v, type) and issubclass(v, qcomp.Optimizer) and v is not qcomp.Optimizer
    ]


@pytest.mark.parametrize("kind", every_optimizer(), ids=lambda kind: kind.__name__)
def test_every_optimizer_respects_groups(kind, grads):
    """A factor of 0 leaves a tensor unchanged in every optimizer; the others move."""
    known = {f.name for f in fields(kind)}
    opt = kind(
        learning_rate=0.01,
        weight_decay=0.1,
        groups=[Group("last.*", learning_rate_factor=0.0)],
        **{key: value for key, value in {"freeze": 2, "exact": None}.items() if key in known},
    )
    comm, start = LocalCommunicator.alone(), draw(grads, 99, 0)
    params, state = start, opt.init(start, comm, NAMES)
    if kind is qcomp.QSVRG:
        state = opt.begin_epoch(params, draw(grads, 0, 9), state, comm)
    for step in range(6):
        g = draw(grads, 0, step)
        params, state = opt.step(params, (g, start) if kind is qcomp.QSVRG else g, state, comm)
    for name, before, after in zip(NAMES, start, params, strict=True):
        assert (before.tobytes() == after.tobytes()) == name.startswith("last.")


class TestPatterns:
    def test_one_that_matches_nothing(self):
        """The error is raised on every rank and lists the existing names."""
        opt = replace(OPTIMIZERS["adam"], groups=(Group("*.bias"), Group("haed.*")))

        def rank_main(comm):
            with pytest.raises(ValueError, match=r"groups has the pattern 'haed\.\*', which matches no") as e:
                opt.init([np.zeros(s) for s in SHAPES.values()], comm, NAMES)
            return str(e.value)

        (message,) = set(run_local(2, rank_main, timeout=20))
        assert all(name in message for name in NAMES)

    def test_the_names_are_not_all_listed(self):
        opt, names = replace(OPTIMIZERS["adam"], groups=[Group("x")]), [f"layer.{i}" for i in range(50)]
        with pytest.raises(ValueError, match=r"'layer\.19'\] and 30 more"):
            opt.init([np.zeros(1)] * 50, LocalCommunicator.alone(), names)

    def test_a_group_hidden_by_an_earlier_one_is_no_error(self):
        opt = replace(OPTIMIZERS["adam"], groups=[Group("*"), Group("last.bias")])
        opt.init([np.zeros(s) for s in SHAPES.values()], LocalCommunicator.alone(), NAMES)

    def test_numbers_are_names_too(self, job):
        run = job(qcomp.Adam(learning_rate=0.5, groups=[Group("1", 0.0)]), [np.zeros(2)] * 3, 1)
        run.step([[np.ones(2)] * 3])
        assert [p.any() for p in run.params[0]] == [True, False, True]

    def test_patterns_are_case_sensitive(self):
        opt = replace(OPTIMIZERS["adam"], groups=[Group("Head.*")])
        with pytest.raises(ValueError, match="which matches no name"):
            opt.init([np.zeros(s) for s in SHAPES.values()], LocalCommunicator.alone(), NAMES)


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"pattern": 3}, "pattern is 3; expected a str"),
            ({"learning_rate_factor": -1.0}, "learning_rate_factor is -1.0; expected a finite number >= 0"),
            ({"learning_rate_factor": float("nan")}, "learning_rate_factor is nan"),
            ({"weight_decay": -0.5}, "weight_decay is -0.5; expected a finite number >= 0, or None"),
        ],
    )
    def test_out_of_range(self, arguments, message):
        with pytest.raises((ValueError, TypeError), match=message):
            Group(**{"pattern": "*", **arguments})

    @pytest.mark.parametrize("bad", [Group("*"), "last.*", [("last.*", 0.1)]])
    def test_no_groups(self, bad):
        with pytest.raises(TypeError, match=r"groups is .*; expected a sequence of qcomp\.Group"):
            qcomp.Adam(learning_rate=0.1, groups=bad)

    def test_the_ranks_must_agree(self):
        def rank_main(comm):
            opt = qcomp.Adam(learning_rate=0.1, groups=[Group("*", 1.0 + comm.rank)])
            with pytest.raises(qcomp.MismatchError, match=r"settings\.groups is .*learning_rate_factor=2\.0"):
                opt.init(np.zeros(8), comm)

        run_local(2, rank_main, timeout=20)


class TestExactNames:
    """Named tensors stay exact, in addition to small ones."""

    TENSORS = (
        qcomp.Tensor("embedding", (500, 40), 20_000),
        qcomp.Tensor("norm.scale", (1, 20_000), 20_000),
        qcomp.Tensor("weight", (500, 40), 20_000),
        qcomp.Tensor("small", (5, 4), 20),
    )

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            ((), (False, False, False, True)),
            (("norm*",), (False, True, False, True)),
            (["embed*", "norm.*"], (True, True, False, True)),
            (("*",), (True,) * 4),
        ],
    )
    def test_by_name(self, names, expected):
        assert qcomp.ExactBelow(10_000, names)(self.TENSORS) == expected
        assert qcomp.ExactBelow(0, names)(self.TENSORS)[3] == (names == ("*",))

    def test_a_pattern_that_matches_nothing(self):
        opt = qcomp.OneBitAdam(learning_rate=0.1, exact=qcomp.ExactBelow(10, names=("norm*",)))

        def rank_main(comm):
            with pytest.raises(
                ValueError, match=r"names has the pattern 'norm\*', which matches no name; the"
            ):
                opt.init([np.zeros((9, 9))], comm, ["weight"])

        run_local(2, rank_main, timeout=20)

    def test_in_an_optimizer(self, job, grads):
        policy = qcomp.ExactBelow(4, names=("last.*",))
        run = job(
            replace(OPTIMIZERS["1-bit"], exact=policy), grads([(5, 8), (6, 7)], 99, 0), 2, ("last.w", "w")
        )
        assert run.state.exact == (True, False)

    @pytest.mark.parametrize("bad", ["norm*", (3,)])
    def test_no_names(self, bad):
        with pytest.raises(TypeError, match=r"names is .*; expected a sequence of str"):
            qcomp.ExactBelow(10, bad)

    def test_a_list_of_names_becomes_a_tuple(self):
        """So that policies can be compared and hashed, and have the same description on all ranks."""
        policy: Any = qcomp.ExactBelow(10, ["a"])
        assert policy == qcomp.ExactBelow(10, ("a",))
        assert hash(policy) == hash(qcomp.ExactBelow(10, ("a",)))


def test_names_instead_of_a_pattern():
    """Also names that are patterns for others; the first group that has a name counts, whether by name or pattern."""
    groups = (
        qcomp.Group(["a[0]", "c"], 2.0),
        qcomp.Group("a*", 3.0),
        qcomp.Group(("ab", "b"), 4.0),
    )
    found = module.group_of_each(groups, ("a[0]", "a0", "ab", "b", "c", "d"))
    assert [group.learning_rate_factor for group in found] == [2.0, 3.0, 3.0, 4.0, 2.0, 1.0]


def test_a_name_that_no_parameter_has_is_an_error():
    comm = qcomp.comm.LocalCommunicator.alone()
    opt = qcomp.Adam(learning_rate=0.1, groups=[qcomp.Group(["a[0]", "x"])])
    with pytest.raises(ValueError, match="groups has the pattern 'x', which matches no name"):
        opt.init([np.ones(1), np.ones(1)], comm, names=["a[0]", "a0"])
