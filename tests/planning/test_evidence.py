"""What is known of steps to a loss: from committed studies, only for the methods studied."""

from dataclasses import replace

import pytest

import qcomp
from qcomp.planning import Method, MuonMethod, OuterMethod, PowerSGDMethod, evidence_of
from qcomp.planning.evidence import STUDIED, TASKS, UNMEASURED, Evidence, studies

SIGN = Method("two_phase", qcomp.ScaledSign())


def test_there_are_studies_of_all_tasks():
    assert {record.task for record in studies()} == set(TASKS)


def test_a_compressor_selects_the_study_of_its_optimizer():
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


def test_methods_without_a_study_have_no_evidence():
    sparse = STUDIED["SparseLoCo"]
    loops = (qcomp.outer.diloco(), sparse(7), sparse(30, decay=0.5), qcomp.outer.sparse_loco(30))
    low_rank = [
        PowerSGDMethod(averaging=qcomp.PowerSGD(rank=8)),
        PowerSGDMethod(compressor=qcomp.Cast("bfloat16")),
    ]
    for method in (Method("ring"), *low_rank, *(OuterMethod(loop=loop) for loop in loops)):
        assert evidence_of(method) is None


def test_an_outer_loop_is_known_with_the_settings_of_the_study_in_every_topology():
    loop = STUDIED["SparseLoCo"](30, seed=7)
    elsewhere = replace(loop, averaging=replace(loop.averaging, topology="hierarchical"))
    for each in (loop, elsewhere):
        known = evidence_of(OuterMethod(loop=each))
        assert known.method == "SparseLoCo every 30 steps"
        assert known.ratio > 1


def test_among_similar_records_the_least_favourable_counts():
    known = evidence_of(PowerSGDMethod(averaging=qcomp.PowerSGD(rank=1)))
    alike = [record for record in studies() if record.method == "PowerSGD rank 1"]
    assert len(alike) > 1
    compared = [record for record in alike if (record.seeds, record.ranks) == (known.seeds, known.ranks)]
    assert len(compared) > 1
    assert known.ratio == max(record.ratio for record in compared)


def test_a_record_with_a_curve_comes_before_one_without():
    """For Muon, one study has final losses, another has curves."""
    nearest = qcomp.Muon(learning_rate=0.1, compressor=qcomp.LloydMax(4, coding="range"))
    known = evidence_of(MuonMethod(optimizer=nearest))
    assert (known.method, known.reference) == ("Muon, 4 + 1 bits", "Muon")
    assert known.ratio is not None
    assert any(record.method == known.method and record.ratio is None for record in studies())
    exact = evidence_of(MuonMethod(optimizer=qcomp.Muon(learning_rate=0.1), replicated=True))
    assert (exact.method, exact.reference, exact.counted) == ("Muon, exact", "AdamW", 1.0)
    for compressor in (qcomp.ScaledSign(), qcomp.LloydMax(2)):
        other = qcomp.Muon(learning_rate=0.1, compressor=compressor)
        assert evidence_of(MuonMethod(optimizer=other)) is None
    blocks = qcomp.Muon(learning_rate=0.1, block_rows=64, newton_schulz_steps=3)
    known = evidence_of(MuonMethod(optimizer=blocks))
    assert (known.method, known.reference) == ("Muon in blocks, 4 + 1 bits", "Muon in blocks")
    assert evidence_of(MuonMethod(optimizer=blocks, replicated=True)) is None


BASE = {"task": TASKS[0], "method": "m", "label": "m", "warmup": 0.0, "gap": -0.25, "seeds": 1, "steps": 480}
BASE |= {"ranks": 2, "parameters": 1, "reference": "AdamW", "source": "here"}


def test_without_a_curve_the_final_loss_is_reported():
    unknown = Evidence(**BASE, ratio=None)
    assert unknown.counted == UNMEASURED
    assert unknown.text.startswith("steps not measured; after 480 steps 0.25 below the loss of AdamW (")


def test_fewer_steps_than_exact_training_count_as_equally_many():
    assert Evidence(**BASE, ratio=0.5).counted == 1.0
    assert Evidence(**BASE, ratio=2.5).counted == 2.5


def test_an_unknown_task_is_an_error():
    with pytest.raises(ValueError, match="task is 'chess'; expected one of language model, "):
        evidence_of(SIGN, task="chess")


def test_the_study_with_the_closest_number_of_ranks_counts():
    """An outer round loses more with more ranks, so few ranks say little of many."""
    often = OuterMethod(loop=STUDIED["SparseLoCo"](5))
    found = [evidence_of(often, ranks=ranks) for ranks in (1, 2, 3, 4, 64)]
    assert [known.ranks for known in found] == [2, 2, 4, 4, 4]
    assert found[1].ratio < found[3].ratio
    assert evidence_of(often).ranks == 2
    assert evidence_of(SIGN, warmup=0.15, ranks=64).method == "onebit_adam"
