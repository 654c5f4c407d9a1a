"""What is sent, saved and named is what it was; `python -m tests.record_golden` says what has changed."""

import base64
import json

import pytest

from tests import record_golden, releases
from tests.golden.jobs import CASES, continued, run
from tests.golden.names import FRAMEWORKS, described
from tests.record_golden import STATES, TRAJECTORIES, differences

QUICK = [
    *TRAJECTORIES,
    *(case for case in CASES if case.startswith(("1-bit, ", "SGD, ")) and "3 ranks" in case),
]

OPTIONAL = ("qcomp.integrations.transformers", "qcomp.jax.optax", "qcomp.torch.fsdp", "qcomp.torch.ft")


def require_same(file, key, new):
    found = list(differences(record_golden.read(file).get(key, {}), new, f"{key}: "))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_messages_and_parameters(case):
    messages, parameters, _ = run(case)
    require_same("messages", case, messages)
    if case in TRAJECTORIES:
        require_same("parameters", case, parameters)


@pytest.mark.parametrize(
    ("version", "case"),
    [
        (version, case)
        for version in releases.versions("states")
        for case in releases.content("states", version)
    ],
)
def test_saved_states_load_and_continue(version, case):
    state = releases.content("states", version)[case]
    then = continued(case, state["saved"])
    assert then.keys() == state["then"].keys()
    if version == releases.versions("states")[-1]:
        require_same("states", case, {**state, "then": then})


@pytest.mark.parametrize(
    "root", ["qcomp", *(pytest.param(f"qcomp.{name}", marks=pytest.mark.slow) for name in FRAMEWORKS)]
)
def test_names(root):
    for module in () if root == "qcomp" else OPTIONAL:
        pytest.importorskip(module, exc_type=ImportError)
    new = described(root)
    for module, names in new.items():
        require_same("names", module, names)
    known = {module for module in record_golden.read("names") if in_root(module, root)}
    assert known == new.keys()


def in_root(module, root):
    top = ".".join(module.split(".")[:2])
    return top == root if root != "qcomp" else top.removeprefix("qcomp.") not in FRAMEWORKS


def test_the_files_have_exactly_these_entries():
    assert record_golden.read("messages").keys() == CASES.keys()
    assert list(record_golden.read("parameters")) == TRAJECTORIES
    assert list(record_golden.read("states")) == STATES
    assert len(TRAJECTORIES) == 10


def test_a_saved_state_of_an_earlier_run_is_told(monkeypatch, capsys):
    case = next(case for case in STATES if case.startswith("SGD"))
    monkeypatch.setattr(record_golden, "STATES", [case])
    for is_changed in (False, True):
        saved = json.loads(json.dumps(run(case)[2]))
        if is_changed:
            saved["rank 0"]["params 0"] = {"float32 3x6": base64.b64encode(bytes(72)).decode()}
        monkeypatch.setattr(record_golden, "read", lambda _, saved=saved: {case: {"saved": saved}})
        assert record_golden._states()[case]["saved"] == saved
        told = f"states: {case}: `saved` is of an earlier run; delete its entry if it was never released\n"
        assert capsys.readouterr().out == told * is_changed


def test_jobs_pass_through_exact_and_compressed_stages():
    """Every optimizer with a freeze, and every loop."""
    for case, steps in record_golden.read("messages").items():
        stages = [line.partition(" | ")[0] for line in steps.values()]
        maker = CASES[case][0]
        if hasattr(maker, "freeze") or hasattr(maker, "warmup"):
            assert "warmup" in stages
            assert len(set(stages)) > 1, case


def test_differences_are_told_in_words():
    old = {"Adam": {"step 1": "warmup | to all 4:aa 4:bb", "step 2": "0x1p+0 | 0x1p+1"}, "SGD": {}}
    new = {"Adam": {"step 1": "warmup | to all 4:aa 4:cc", "step 2": "0x1p+0 | 0x1p+2"}, "Lion": {}}
    assert list(differences(old, new)) == [
        "Adam: step 1: was to all 4:aa 4:bb, is to all 4:aa 4:cc",
        "Adam: step 2: was 0x1p+1, is 0x1p+2",
        "SGD: is gone",
        "Lion: is new",
    ]
