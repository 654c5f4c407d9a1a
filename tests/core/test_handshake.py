import math

import numpy as np
import pytest

import qcomp
from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.core.errors import MismatchError
from qcomp.core.handshake import handshake
from qcomp.core.numeric.arrays import flushes_subnormals

LIKE = np.zeros(0)
FACTS = {"version": "0.1.0", "sizes": [3, 5], "policy": {"below": 10, "names": ["bias"]}, "seed": 0}


def mismatch(*facts):
    """Return the text that every rank raises if rank r holds facts[r]."""
    texts = []

    def shake(comm):
        try:
            handshake(comm, facts[comm.rank], like=LIKE)
        except MismatchError as error:
            texts.append(str(error))

    run_local(len(facts), shake, timeout=30)
    assert len(texts) == len(facts), "some rank did not notice"
    assert len(set(texts)) == 1, "the ranks say different things"
    prefix, _, difference = texts[0].partition(": ")
    assert prefix == "the ranks were not started alike"
    return difference


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ranks_that_agree_pass(n):
    run_local(n, lambda comm: handshake(comm, FACTS, like=LIKE), timeout=30)


def test_order_and_nan_and_tuples_make_no_difference():
    facts = [{"a": math.nan, "b": (1, 2)}, {"b": [1, 2], "a": math.nan}]
    run_local(2, lambda comm: handshake(comm, facts[comm.rank], like=LIKE), timeout=30)


def test_a_value_that_differs_is_named_with_its_ranks():
    sign, qsgd = {"compressor": "sign:scale=l1"}, {"compressor": "qsgd:levels=7"}
    assert mismatch(sign, qsgd, sign) == (
        "compressor is 'sign:scale=l1' on ranks 0 and 2, but 'qsgd:levels=7' on rank 1"
    )


def test_every_key_that_differs_is_named_and_no_other():
    assert mismatch(FACTS, FACTS | {"seed": 1, "version": "0.2.0"}) == (
        "seed is 0 on rank 0, but 1 on rank 1; version is '0.1.0' on rank 0, but '0.2.0' on rank 1"
    )


def test_three_values():
    assert (
        mismatch({"seed": 0}, {"seed": 1}, {"seed": 2}) == "seed is 0 on rank 0, 1 on rank 1, but 2 on rank 2"
    )


def test_a_number_is_not_its_text():
    assert mismatch({"seed": 1}, {"seed": "1"}) == "seed is 1 on rank 0, but '1' on rank 1"


def test_a_missing_key_is_absent():
    assert mismatch({"seed": 0}, {}) == "seed is 0 on rank 0, but absent on rank 1"


def test_in_a_long_list_the_first_entry_that_differs_is_named():
    sizes = list(range(10_000))
    others = sizes.copy()
    others[700], others[9000] = -1, -1
    assert mismatch({"sizes": sizes}, {"sizes": others}) == "sizes[700] is 700 on rank 0, but -1 on rank 1"


def test_if_one_list_is_longer_its_first_additional_entry_is_named():
    assert (
        mismatch({"sizes": [1, 2]}, {"sizes": [1, 2, 3, 4]})
        == "sizes[2] is absent on rank 0, but 3 on rank 1"
    )


def test_in_a_mapping_the_entry_that_differs_is_named():
    other = FACTS | {"policy": {"below": 10, "names": ["norm"]}}
    assert mismatch(FACTS, other) == "policy.names[0] is 'bias' on rank 0, but 'norm' on rank 1"


def test_a_long_value_is_cut():
    assert (
        mismatch({"x": "a" * 1000}, {"x": "b" * 1000})
        == f"x is '{'a' * 99}... on rank 0, but '{'b' * 99}... on rank 1"
    )


def test_text_beyond_ascii_passes():
    assert mismatch({"x": "Ångström"}, {"x": "naïve"}) == "x is 'Ångström' on rank 0, but 'naïve' on rank 1"


def test_values_that_json_cannot_hold_are_compared_as_text():
    assert mismatch({"x": 1j}, {"x": 2j}) == "x is '1j' on rank 0, but '2j' on rank 1"


def test_it_sends_the_size_and_the_text_to_each_other_rank():
    def shake(comm):
        handshake(comm, {"version": "1"}, like=LIKE)
        return comm.bytes_sent

    text = '{"subnormal numbers": "kept", "version": "1"}'
    assert run_local(3, shake, timeout=30) == [2 * (8 + len(text))] * 3
    alone = LocalCommunicator.alone()
    handshake(alone, FACTS, like=LIKE)
    assert alone.bytes_sent == 0


class TestSubnormalNumbers:
    """A processor that takes them for 0 changes bits of updates, so all ranks must be in the same mode."""

    @staticmethod
    def run(flushing, rank_main, ranks=2):
        torch = pytest.importorskip("torch")

        def in_mode(comm):  # the mode is that of the rank's thread
            assert torch.set_flush_denormal(comm.rank in flushing)
            return rank_main(comm)

        return run_local(ranks, in_mode, timeout=60)

    def test_the_mode_is_noticed(self):
        assert self.run({1}, lambda _: flushes_subnormals()) == [False, True]

    def test_one_rank_in_another_mode_is_an_error_on_all(self):
        def rank_main(comm):
            text = "subnormal numbers is 'kept' on ranks 0 and 2, but 'flushed to 0' on rank 1. The processor is in"
            for begin in (
                lambda: handshake(comm, FACTS, like=LIKE),
                lambda: qcomp.Adam(learning_rate=0.1).init(LIKE, comm),
                lambda: qcomp.CompressedMean(qcomp.ScaledSign()).init(LIKE, comm),
            ):
                with pytest.raises(MismatchError, match=text):
                    begin()

        self.run({1}, rank_main, 3)

    def test_ranks_in_the_same_mode_pass(self):
        self.run({0, 1}, lambda comm: handshake(comm, FACTS, like=LIKE))

    def test_one_that_changes_later_is_noticed_by_optimizers_of_torch(self):
        torch = pytest.importorskip("torch")
        import qcomp.torch

        def rank_main(comm):
            p = torch.nn.Parameter(torch.ones(4))
            optimizer = qcomp.torch.OneBitAdam([p], lr=0.1, exact=None, freeze=9, comm=comm)
            p.grad = torch.full((4,), 1.0 + comm.rank)
            optimizer.step()
            torch.set_flush_denormal(comm.rank == 1)
            with pytest.raises(
                MismatchError, match="the settings of step 2 differ between rank 0, and rank 1"
            ):
                optimizer.step()
            return p.tolist()

        first, second = self.run((), rank_main)
        assert first == second
