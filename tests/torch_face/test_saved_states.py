"""What torch documents of saved states: hooks around saving and loading, names, groups, and entries of no parameter."""

import copy

import pytest
import torch

import qcomp
import qcomp.torch
from qcomp.comm import LocalCommunicator, run_local
from tests.torch_face.every import FACES

every_face = pytest.mark.parametrize("name", FACES)
pytestmark = pytest.mark.filterwarnings(
    "ignore:the variance is frozen after", "ignore:a state of 1 ranks resumes with 2"
)


def params_of(names="abc"):
    return [(name, torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))) for name in names]


def made(params, comm=None, name="OneBitAdam", **changes):
    freeze = {"freeze": 2} if "freeze" in FACES[name][1] else {}
    settings = freeze | ({"others": False} if name == "Muon" else {"exact": None}) | {"lr": 0.01, **changes}
    return getattr(qcomp.torch, name)(params, comm=comm or LocalCommunicator.alone(), **settings)


def train(optimizer, steps=3):
    for step in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.sin(torch.arange(12.0).reshape(3, 4) + step + optimizer.comm.rank)
        optimizer.step()


def trained(comm=None, name="OneBitAdam", steps=3, named=True, **changes):
    params = params_of()
    optimizer = made(params if named else [p for _, p in params], comm, name, **changes)
    train(optimizer, steps)
    return optimizer


def content(optimizer):
    return str(optimizer.state_dict()), [p.tolist() for g in optimizer.param_groups for p in g["params"]]


# --- hooks -----------------------------------------------------------------------------------------------------------


@every_face
def test_hooks_around_saving_see_the_whole_state_and_may_return_another(name):
    optimizer, seen = trained(name=name), []
    expected = str(optimizer.state_dict())

    def first(o, saved):
        seen.append(("after, first", str(saved) == expected))

    def second(o, saved):
        seen.append(("after, second", str(saved) == expected))
        return {**saved, "mine": 2}

    optimizer.register_state_dict_pre_hook(lambda o: seen.append(("before", o is optimizer)))
    optimizer.register_state_dict_post_hook(second)
    optimizer.register_state_dict_post_hook(first, prepend=True)
    saved = optimizer.state_dict()
    assert seen == [("before", True), ("after, first", True), ("after, second", True)]
    assert saved.pop("mine") == 2
    assert str(saved) == expected


@every_face
def test_hooks_around_loading_see_the_state_before_and_after(name):
    optimizer, other, seen = trained(name=name), trained(name=name, steps=1), []
    saved = optimizer.state_dict()

    def change_in_place(o, found):
        seen.append(("before, first", found is not saved, str(found) == str(saved), o.core_state.step))
        found["param_groups"] = [{**group, "lr": 0.5} for group in found["param_groups"]]

    def return_another(o, found):
        seen.append(("before, second", found["param_groups"][0]["lr"]))
        return {**found, "param_groups": [{**group, "lr": 0.25} for group in found["param_groups"]]}

    other.register_load_state_dict_post_hook(
        lambda o: seen.append(("after", o.core_state.step, o.param_groups[0]["lr"]))
    )
    other.register_load_state_dict_pre_hook(return_another)
    other.register_load_state_dict_pre_hook(change_in_place, prepend=True)
    with torch.no_grad():
        for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
            q.copy_(p)
    other.load_state_dict(saved)
    assert seen == [("before, first", True, True, 1), ("before, second", 0.5), ("after", 3, 0.25)]
    assert saved["param_groups"][0]["lr"] == 0.01
    other.param_groups[0]["lr"] = 0.01
    assert content(other) == content(optimizer)


def test_each_state_of_a_list_passes_the_hooks():
    def main(comm):
        optimizer, seen = trained(comm), []
        saved = [trained().state_dict()]
        optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(len(s["state"])))
        optimizer.load_state_dict([] if comm.rank else saved)
        return seen, optimizer.core_state.step

    assert run_local(2, main) == [([3], 3), ([], 3)]


def raises(*_):
    raise KeyError("of a hook")


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_hook_that_raises_on_one_rank_is_an_error_on_all(kind, bad):
    """Nothing has changed if it is a pre-hook; after a post-hook all have loaded the state."""

    def main(comm):
        optimizer, other = trained(comm, steps=4), trained(comm)
        if comm.rank == bad:
            handle = getattr(other, f"register_load_state_dict_{kind}_hook")(raises)
        before, saved = content(other), optimizer.state_dict()
        when = "before it loads" if kind == "pre" else "after it has loaded"
        error, text = (
            (KeyError, "of a hook")
            if comm.rank == bad
            else (
                qcomp.MismatchError,
                f"rank {bad} cannot run the hooks {when} its state: KeyError: 'of a hook'",
            )
        )
        with pytest.raises(error, match=text):
            other.load_state_dict(saved)
        if kind == "pre":
            assert content(other) == before
        else:
            assert content(other)[0] == content(optimizer)[0]
        if comm.rank == bad:
            handle.remove()
        other.load_state_dict(saved)
        train(other)
        return other.core_state.step

    assert run_local(2, main, timeout=20) == [7, 7]


def test_a_hook_may_gather_the_states_of_all_ranks():
    def main(comm):
        optimizer = trained(comm)
        optimizer.register_state_dict_pre_hook(lambda o: o.gather_states())
        saved = optimizer.state_dict()
        return sorted(key for key in saved["state"][0] if key.startswith("rank"))

    assert run_local(2, main, timeout=20)[0] == ["rank 0 of 2", "rank 1 of 2"]


def test_a_hook_that_takes_away_the_moments_is_an_error():
    optimizer = trained()
    before, saved = content(optimizer), optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda o, s: {**s, "state": {}})
    with pytest.raises(ValueError, match="not those of an optimizer of qcomp"):
        optimizer.load_state_dict(saved)
    assert content(optimizer) == before


# --- entries of no parameter -----------------------------------------------------------------------------------------


def test_entries_of_no_parameter_are_saved_and_loaded_as_in_torch():
    optimizer, other = trained(), trained(steps=1)
    optimizer.state["mine"] = {"count": 7}
    other.state["stale"] = 1
    saved = optimizer.state_dict()
    assert saved["state"]["mine"] == {"count": 7}
    other.load_state_dict(saved)
    assert other.state["mine"] == {"count": 7}
    assert "stale" not in other.state
    optimizer.gather_states()
    train(other)
    assert other.state["mine"] == {"count": 7}


def test_entries_of_the_callers_under_a_parameter_do_not_hinder_saving():
    optimizer = trained()
    expected = str(optimizer.state_dict())
    optimizer.state[optimizer.param_groups[0]["params"][0]]["ema"] = torch.ones(3, 4)
    assert str(optimizer.state_dict()) == expected


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_named", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_names_are_kept(was_named, is_named):
    other = trained(named=is_named, steps=1)
    other.load_state_dict(trained(named=was_named).state_dict())
    expected = ["a", "b", "c"] if was_named or is_named else None
    assert other.param_groups[0].get("param_names") == expected
    assert other.state_dict()["param_groups"][0].get("param_names") == expected
    train(other)


@pytest.mark.parametrize("names", ["abc", ["a", "b"], [1, 2, 3]])
def test_names_that_do_not_fit_are_an_error(names):
    saved, optimizer = trained().state_dict(), trained(named=False)
    saved["param_groups"][0]["param_names"] = names
    before = content(optimizer)
    with pytest.raises(
        ValueError, match=r"param_groups\[0\] has param_names=.*; expected a list with the name of each"
    ):
        optimizer.load_state_dict(saved)
    assert content(optimizer) == before


# --- groups ----------------------------------------------------------------------------------------------------------


def in_groups(*sizes):
    params = iter(params_of("abcdef"))
    return [{"params": [next(params) for _ in range(size)]} for size in sizes]


@pytest.mark.parametrize(
    ("saved", "now"), [((3,), (2, 1)), ((2, 1), (3,)), ((2, 1), (2, 2)), ((1, 2), (2, 1))]
)
def test_other_groups_are_named_on_every_rank(saved, now):
    """Also on a rank that has no state and groups of its own."""

    def main(comm):
        one, other = made(in_groups(*saved), comm), made(in_groups(*now), comm)
        for optimizer in (one, other):
            train(optimizer)
        before, state = content(other), one.state_dict()
        text = rf"{len(saved)} param_groups of \[{', '.join(map(str, saved))}\] parameters; this optimizer has \["
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(state)
        assert content(other) == before
        with pytest.raises((ValueError, qcomp.MismatchError), match="param_groups of"):
            other.load_state_dict([] if comm.rank else [state])

    run_local(2, main, timeout=20)


def test_groups_that_were_extended_by_hand_are_named_where_the_state_is_saved():
    """A state of other parameters than those whose moments there are would not be whole."""
    optimizer = trained()
    saved = optimizer.state_dict()
    optimizer.param_groups.extend(optimizer.param_groups)
    text = "the parameters in param_groups, or their shapes, have changed since the optimizer was made"
    with pytest.raises(RuntimeError, match=text):
        optimizer.state_dict()
    with pytest.raises(ValueError, match=f"state_dict does not fit: {text}"):
        optimizer.load_state_dict(saved)


def test_keys_of_the_callers_in_groups_are_kept():
    optimizer, key = trained(), object()
    optimizer.param_groups[0] |= {"note": key, "scale": torch.tensor([1.0, 2.0])}
    other = trained()
    other.load_state_dict(optimizer.state_dict())
    assert isinstance(other.param_groups[0]["note"], object)
    assert other.param_groups[0]["scale"].tolist() == [1.0, 2.0]
    assert copy.copy(other.param_groups[0]).keys() == optimizer.param_groups[0].keys()
