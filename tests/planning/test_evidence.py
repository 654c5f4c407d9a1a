"""What is known of steps to a loss: from committed studies, and for the methods that were studied alone."""

import pytest

import qcomp
from qcomp.planning import Method, MuonMethod, OuterMethod, PowerSGDMethod, evidence_of
from qcomp.planning.evidence import TASKS, UNMEASURED, Evidence, studies

SIGN = Method("two_phase", qcomp.ScaledSign())


def test_all_tasks_were_studied():
    assert {record.task for record in studies()} == set(TASKS)


def test_a_compressor_stands_for_the_optimizer_that_was_studied():
    assert evidence_of(SIGN, warmup=0.15).method == "onebit_adam"
    assert evidence_of(SIGN).method == "sign_hook"
    assert evidence_of(Method("ring", qcomp.QSGD(levels=7))).method == "qsgd4_hook"
    assert evidence_of(Method("ring", qcomp.QSGD(levels=3))) is None
    minmax = Method("two_phase", qcomp.MinMaxUInt8())
    assert [evidence_of(minmax, warmup=w).method for w in (0.1, 0.3, 0.6)] == [
        "qadam_measured",
        "qadam_longer",
        "qadam_half",
    ]
    assert evidence_of(minmax) is None
    assert (
        evidence_of(SIGN, warmup=0.15, task="adversarial network").ratio
        > evidence_of(SIGN, warmup=0.15).ratio
    )


def test_what_was_not_studied_is_not_known():
    for method in (Method("ring"), PowerSGDMethod(), OuterMethod(loop=qcomp.outer.diloco())):
        assert evidence_of(method) is None


def test_muon_has_a_loss_and_no_curve():
    exact = evidence_of(MuonMethod(optimizer=qcomp.Muon(learning_rate=0.1), replicated=True))
    nearest = qcomp.Muon(learning_rate=0.1, compressor=qcomp.LloydMax(4, coding="range"))
    own = evidence_of(MuonMethod(optimizer=nearest))
    assert exact.method == "Muon, exact"
    assert own.method == "Muon, 4 + 1 bits"
    assert own.ratio is None
    assert own.counted == UNMEASURED
    assert "steps not measured; after 480 steps" in own.text
    for compressor in (qcomp.ScaledSign(), qcomp.LloydMax(2)):
        other = qcomp.Muon(learning_rate=0.1, compressor=compressor)
        assert evidence_of(MuonMethod(optimizer=other)) is None


def test_fewer_steps_than_those_of_adam_count_as_equally_many():
    base = {"task": TASKS[0], "method": "m", "label": "m", "warmup": 0.0, "gap": 0.0, "seeds": 1, "steps": 1}
    base |= {"ranks": 2, "parameters": 1, "source": "here"}
    assert Evidence(**base, ratio=0.5).counted == 1.0
    assert Evidence(**base, ratio=2.5).counted == 2.5


def test_an_unknown_task_is_an_error():
    with pytest.raises(ValueError, match="task is 'chess'; expected one of language model, "):
        evidence_of(SIGN, task="chess")
