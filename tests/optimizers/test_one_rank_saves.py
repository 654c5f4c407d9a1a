"""The state of one rank alone fits every rank where none had arrays of its own; else it is refused, or some dropped."""

import warnings

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.core.checkpoint.manifest import own_kinds_in
from qcomp.testing.means import owed
from tests.optimizers.every import EVERY, SHAPES, advance

pytestmark = pytest.mark.filterwarnings("ignore:the variance of OneBitAdam no longer fits")

SHARED = [(name, stage) for name, entry in EVERY.items() for stage in entry.stages if stage == "warmup"]
"""Optimizers in the stages in which no rank has arrays of its own."""
ONE_BIT, LOCAL = EVERY["1-bit"].opt, EVERY["0/1"].opt
CURES = ("call gather_states() on all ranks before that rank saves", "lost='drop'", "pass")


def trained(opt, stage, size=2, most=14):
    """Return the parameters, the dict and the state of each rank, after the last step before another stage."""

    def rank_main(comm):
        params = [np.ones(s, np.float32) for s in SHAPES]
        state = opt.init(params, comm)
        found = params, opt.state_dict(state), state
        for step in range(most):
            params, state = advance(opt, params, state, comm, step)
            if state.stage == stage:
                found = params, opt.state_dict(state), state
        return found

    return run_local(size, rank_main, timeout=20)


def loaded(opt, params, of_rank, size=2, **options):
    """Load on every rank; return the states, or the errors, and the warnings of all ranks."""

    def rank_main(comm):
        try:
            return opt.load_state_dict(of_rank(comm.rank), params, comm, **options)
        except (ValueError, qcomp.MismatchError) as error:
            return error

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = run_local(size, rank_main, timeout=20)
    return found, [str(one.message) for one in told if "resumes with" in str(one.message)]


def bits(opt, state):
    return {key: str(value) if isinstance(value, str | list) else np.asarray(value).tobytes()
            for key, value in opt.state_dict(state).items() if key != "digests"}  # fmt: skip


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("name", "stage"), SHARED)
def test_it_fits_every_rank_where_no_rank_has_arrays_of_its_own(name, stage):
    opt = EVERY[name].opt
    (params, first, _), (_, second, _) = trained(opt, stage)
    own, _ = loaded(opt, params, [first, second].__getitem__)
    for of_rank in (lambda _: first, lambda _: second, lambda _: [first]):
        alone, told = loaded(opt, params, of_rank)
        assert [bits(opt, s) for s in alone] == [bits(opt, s) for s in own]
        assert not told
    everything, _ = loaded(opt, params, lambda _: [first, second], 3)
    for of_rank in (lambda _: first, lambda _: [second]):
        alone, told = loaded(opt, params, of_rank, 3)
        assert [bits(opt, s) for s in alone] == [bits(opt, s) for s in everything]
        assert not told


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "stage"),
    [(name, stage) for name, entry in EVERY.items() for stage in entry.stages if stage != "warmup"],
)
def test_what_one_rank_has_is_refused_on_every_rank_with_the_cures_or_dropped(name, stage):
    opt = EVERY[name].opt
    (params, first, state), (_, second, _) = trained(opt, stage)
    if not own_kinds_in(opt, second):  # no feedback, or the owner of no matrix: it fits every rank
        assert name in ("1-bit, automatic", "Muon, clipped", "QSVRG")
        found, told = loaded(opt, params, lambda _: [first] if own_kinds_in(opt, first) else first)
        assert not told
        assert [s.step for s in found] == [state.step] * 2
        return
    for of_rank, size in ((lambda _: first, 2), (lambda _: [first], 2), (lambda _: [first], 3)):
        errors, _ = loaded(opt, params, of_rank, size)
        for error in errors:
            assert isinstance(error, ValueError | qcomp.MismatchError), error
            assert all(cure in str(error) for cure in CURES), error
        found, told = loaded(opt, params, of_rank, size, lost="drop")
        assert len(told) == size, told
        assert all("without the " in text and "of rank 1: every rank starts with" in text for text in told)
        mine = set(first) - {"rank", "size", "digests", "topology"}
        mine -= {
            key
            for key in first
            if key.partition(".")[0].endswith(("_residual", "owner_momentum", "estimate"))
        }
        for of_new in found:
            saved = opt.state_dict(of_new)
            for key in mine:
                assert np.allclose(saved[key], first[key]) if hasattr(first[key], "shape") else True, key


def test_what_is_dropped_is_the_share_of_the_missing_ranks():
    """E = mean_i e_i + e_s loses e_d / N + e_s of each missing rank d, and nothing else."""
    results = trained(ONE_BIT, "compressed", 3)
    params, dicts = results[0][0], [saved for _, saved, _ in results]
    tensors = [p for p, exact in zip(params, results[0][2].exact, strict=True) if not exact]
    for kept in ([0], [0, 2], [1]):
        states = [state.exchange for _, _, state in results]
        for rank in set(range(3)) - set(kept):
            zeros = states[rank]
            states[rank] = zeros._replace(
                worker=tuple(np.zeros_like(x) for x in zeros.worker),
                server=tuple(np.zeros_like(x) for x in zeros.server),
            )
        expected = owed(ONE_BIT.mean, states, tensors)
        assert any(x.any() for x in expected)
        for size in (2, 3):
            found, told = loaded(
                ONE_BIT, params, lambda _, kept=kept: [dicts[r] for r in kept], size, lost="drop"
            )
            now = owed(ONE_BIT.mean, [s.exchange for s in found], tensors)
            assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(now, expected, strict=True))
            assert len(told) == size


def test_own_arrays_become_the_mean_of_those_that_are_there():
    results = trained(LOCAL, "local", 3)
    params, dicts = results[0][0], [saved for _, saved, _ in results]
    found, told = loaded(LOCAL, params, lambda _: [dicts[0], dicts[2]], lost="drop", size=3)
    for state in found:
        for kind, arrays in (("momentum", state.momentum), ("pending", state.arrays["pending"])):
            for name, x in zip(state.names, arrays, strict=True):
                mean = (dicts[0][f"{kind}.{name}"] + dicts[2][f"{kind}.{name}"]) / 2
                assert np.allclose(x, mean, atol=1e-6)
    assert (
        "without the residuals, 'momentum' and 'pending' of rank 1: every rank starts with the total"
        in told[0]
    )


def test_with_all_states_drop_changes_nothing():
    results = trained(ONE_BIT, "compressed")
    params, dicts = results[0][0], [saved for _, saved, _ in results]
    for of_rank in (dicts.__getitem__, lambda _: dicts):
        found, told = loaded(ONE_BIT, params, of_rank, lost="drop")
        assert [bits(ONE_BIT, s) for s in found] == [bits(ONE_BIT, s) for _, _, s in results]
        assert not told


def test_the_topology_of_auto_stays():
    opt = EVERY["1-bit"].make(averaging=qcomp.Averaging(topology="auto"))
    (params, first, _), _ = trained(opt, "warmup")
    other = {key: x for key, x in first.items() if key != "digests"} | {"topology": "ring"}
    found, _ = loaded(opt, params, lambda _: other)
    assert [s.exchange.topology for s in found] == ["ring"] * 2


def test_a_damaged_rank_is_found():
    (params, first, _), _ = trained(ONE_BIT, "warmup")
    errors, _ = loaded(ONE_BIT, params, lambda _: first | {"rank": 5})
    assert all("'rank' differ from their digests" in str(error) for error in errors)


def test_ranks_that_differ_in_lost_or_give_another_are_an_error():
    (params, first, _), _ = trained(ONE_BIT, "compressed")

    def rank_main(comm):
        with pytest.raises(qcomp.MismatchError, match="lost is 'raise' on rank 0, but 'drop' on rank 1"):
            ONE_BIT.load_state_dict(first, params, comm, lost=("raise", "drop")[comm.rank])
        with pytest.raises(ValueError, match="lost is 'keep'; expected 'raise' or 'drop'"):
            ONE_BIT.load_state_dict(first, params, comm, lost="keep")

    run_local(2, rank_main, timeout=20)


def test_a_dict_of_another_optimizer_or_of_a_huge_world_is_refused_as_before():
    (params, first, _), _ = trained(ONE_BIT, "compressed")
    plain = {key: x for key, x in first.items() if key != "digests"}
    errors, _ = loaded(ONE_BIT, params, lambda _: [plain | {"size": 1 << 32}])
    assert all(
        f"and {(1 << 32) - 9} more; expected the dicts of all {1 << 32} old ranks" in str(error)
        for error in errors
    )
    key = next(key for key in plain if key.startswith("server_residual"))
    bad = {k: x for k, x in plain.items() if k != key} | {key.partition("@")[0] + "@39": plain[key]}
    errors, _ = loaded(ONE_BIT, params, lambda _: [bad], lost="drop")
    assert all("expected disjoint ranges within the tensor's" in str(error) for error in errors)


class OfThisNumber(qcomp.OneBitAdam):
    """An optimizer whose arrays fit no other number of ranks."""

    resizes = False


def test_what_fits_one_number_of_ranks_resumes_on_no_other_and_drops_nothing():
    opt = OfThisNumber(learning_rate=0.1, exact=None)
    comm = qcomp.comm.LocalCommunicator.alone()
    params = [np.ones(8, np.float32)]
    saved = opt.state_dict(opt.init(params, comm))
    with pytest.raises(ValueError, match="lost is 'drop'; expected 'raise'"):
        opt.load_state_dict(saved, params, comm, lost="drop")

    def rank_main(comm):
        with pytest.raises(
            ValueError, match="saved comes from another number of ranks; expected 2 instead of 1"
        ):
            opt.load_state_dict([saved], params, comm)

    qcomp.comm.run_local(2, rank_main)


def test_what_one_rank_kept_for_all_is_named_where_it_is_lost():
    opt = EVERY["Muon"].opt
    results = trained(opt, "compressed", 3)
    owners = [
        rank for rank, (_, saved, _) in enumerate(results) if any(key.startswith("owner") for key in saved)
    ]
    assert owners
    assert len(owners) < 3
    for rank, (params, saved, _) in enumerate(results):
        found, told = loaded(opt, params, lambda _, saved=saved: saved, 3, lost="drop")
        is_lost = owners != [rank]
        assert all(("'owner_momentum' and 'owner_residual' of rank" in text) == is_lost for text in told), (
            told
        )
        assert all(("and with zeros where" in text) == is_lost for text in told)
        momenta = [
            x
            for state in found
            for key, x in opt.state_dict(state).items()
            if key.startswith("owner_momentum")
        ]
        assert len(momenta) == 1
        assert bool(momenta[0].any()) == (not is_lost)
