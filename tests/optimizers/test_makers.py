"""A saved state says which optimizer made it, and resuming with another one is noticed."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.comm.local import LocalCommunicator

PARAMS = [np.zeros((4, 50), dtype=np.float32), np.zeros(7, dtype=np.float32)]
NAMES = ["weight", "bias"]
ONE_BIT = qcomp.OneBitAdam(learning_rate=0.1, betas=(0.9, 0.9), freeze=2, exact=qcomp.ExactBelow(20))
SGD = qcomp.CompressedSGD(learning_rate=0.1, compressor=qcomp.QSGD(7, 64), exact=None)


def saved_by(opt, steps=3):
    comm, params = LocalCommunicator.alone(), PARAMS
    state = opt.init(params, comm, NAMES)
    for _ in range(steps):
        params, state = opt.step(params, [np.ones_like(p) for p in params], state, comm)
    return opt.state_dict(state)


def load(opt, saved, **options):
    return opt.load_state_dict(saved, PARAMS, LocalCommunicator.alone(), NAMES, **options)


FORMS = {
    "a dict": lambda saved: saved,
    "a list": lambda saved: [saved],
    "arrays": lambda saved: qcomp.checkpoint.to_arrays(saved, PARAMS[0]),
}


@pytest.mark.parametrize("form", FORMS)
class TestEveryForm:
    def test_the_same_optimizer_resumes_without_a_warning(self, form):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load(ONE_BIT, FORMS[form](saved_by(ONE_BIT))).stage == "compressed"

    def test_another_optimizer_is_an_error_that_names_both(self, form):
        """QAdam keeps the same arrays, so nothing else would reveal it."""
        other = qcomp.QAdam(learning_rate=0.1, betas=(0.9, 0.9), freeze=2, exact=qcomp.ExactBelow(20))
        saved = FORMS[form](saved_by(ONE_BIT))
        with pytest.raises(ValueError, match="the state was saved by OneBitAdam; this is QAdam"):
            load(other, saved)
        assert load(other, saved, strict=False).stage == "compressed"

    def test_another_compressor_is_an_error_that_names_both(self, form):
        other = replace(SGD, compressor=qcomp.QSGD(15, 64))
        saved = FORMS[form](saved_by(SGD))
        expected = "saved with compressor=qsgd:levels=7,.*; this CompressedSGD has qsgd:levels=15,"
        with pytest.raises(ValueError, match=expected):
            load(other, saved)
        assert load(other, saved, strict=False).step == 3

    def test_other_settings_are_a_warning_that_names_them(self, form):
        other = replace(ONE_BIT, learning_rate=0.2, eps=1e-6, freeze=9)
        saved = FORMS[form](saved_by(ONE_BIT))
        with pytest.warns(UserWarning, match="saved by OneBitAdam with") as caught:
            load(other, saved)
        (text,) = [str(each.message) for each in caught]
        assert "learning_rate=0.1 (now 0.2)" in text
        assert "eps=1e-08 (now 1e-06)" in text
        assert "freeze=FreezeAt(step=2) (now FreezeAt(step=9))" in text
        assert "betas" not in text
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(other, saved, strict=False)


def test_a_policy_is_compared_like_a_compressor():
    other = replace(SGD, compressors=qcomp.ByName({"*": qcomp.QSGD(15, 64)}))
    with pytest.raises(ValueError, match="compressors=None; this CompressedSGD has ByName"):
        load(other, saved_by(SGD))


def test_every_rank_raises():
    saved, other = saved_by(ONE_BIT), saved_by(SGD)
    del saved["digests"]

    def rank_main(comm):
        mine = [{**s, "rank": comm.rank, "size": 2} for s in (saved, other)][comm.rank]
        with pytest.raises((ValueError, qcomp.MismatchError)) as caught:
            ONE_BIT.load_state_dict(mine, PARAMS, comm, NAMES)
        return str(caught.value)

    first, second = run_local(2, rank_main, timeout=20)
    assert "saved by CompressedSGD; this is OneBitAdam" in second
    assert "rank 1 cannot load its state: ValueError: the state was saved by CompressedSGD" in first


def test_a_rank_that_turns_warnings_into_errors_does_not_block_others():
    saved = saved_by(ONE_BIT)
    del saved["digests"]

    def rank_main(comm):
        opt = ONE_BIT if comm.rank else replace(ONE_BIT)
        with pytest.raises((UserWarning, qcomp.MismatchError)):
            replace(opt, eps=1e-6).load_state_dict(
                {**saved, "rank": comm.rank, "size": 2}, PARAMS, comm, NAMES
            )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_local(2, rank_main, timeout=20)


class TestSentences:
    def test_a_state_of_torch(self):
        torch = pytest.importorskip("torch")
        weight = torch.nn.Parameter(torch.zeros(4))
        saved = torch.optim.Adam([weight]).state_dict()
        expected = re.escape(
            "saved has the keys 'state', 'param_groups', but not 'history', 'rank', 'schema', 'size', 'skipped' and 2 "
            "more; expected a dict from state_dict of an optimizer of qcomp"
        )
        with pytest.raises(ValueError, match=expected):
            load(ONE_BIT, saved)

    def test_keys_that_are_missing_or_too_many(self):
        saved = saved_by(ONE_BIT)
        without = {key: value for key, value in saved.items() if key != "variance.bias"}
        with pytest.raises(
            ValueError, match=r"does not fit: it lacks 'variance.bias'\. It was saved by another"
        ):
            load(ONE_BIT, without)
        with pytest.raises(
            ValueError, match=r"does not fit: it has 'variance.head', which this optimizer does not keep"
        ):
            load(ONE_BIT, saved | {"variance.head": saved["variance.bias"]})

    def test_savez_keeps_the_maker(self, tmp_path: Path):
        saved = saved_by(ONE_BIT)
        np.savez(tmp_path / "state.npz", **saved)
        with np.load(tmp_path / "state.npz") as file, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load(ONE_BIT, dict(file)).step == 3
