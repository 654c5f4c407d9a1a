"""A damaged state is refused on every rank, clearly, quickly and in little memory; or it is a valid state."""

import errno
import math
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import qcomp
from qcomp import MismatchError
from qcomp.checkpoint import locks, write_whole
from qcomp.core.handshake import agree
from tests.fuzz.damage import STRANGE, deep
from tests.fuzz.states import ALONE, NAMES, TARGETS, attempt, targets
from tests.optimizers.every import EVERY, SHAPES, growing

NAMES_OF_TARGETS = list(TARGETS)


def inputs(first: int, count: int) -> list[str]:
    """Return the faults found with some inputs, for all targets in turn."""
    faults = []
    for number in range(first, first + count):
        name = NAMES_OF_TARGETS[number % len(NAMES_OF_TARGETS)]
        fault = attempt(targets(name), number).fault
        faults += [f"{name}, {number}: {fault}"] if fault else []
    return faults


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", [0, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_damaged_states(first):
    """As `python -m tests.fuzz.states` does for any number of inputs."""
    assert inputs(first, 200 if first == 0 else 2000) == []


ONE_BIT = EVERY["1-bit"].opt
RESIDUAL = "worker_residual.layer.0/weight"


def saved_of(size: int = 1, steps: int = 6) -> list[dict]:
    def rank_main(comm):
        params = [np.ones(shape, np.float32) for shape in SHAPES]
        state = ONE_BIT.init(params, comm, NAMES)
        for step in range(steps):
            params, state = ONE_BIT.step(params, growing(comm.rank, step), state, comm)
        return ONE_BIT.state_dict(state)

    return qcomp.comm.run_local(size, rank_main, timeout=20)


def load(saved, comm=ALONE):
    return ONE_BIT.load_state_dict(saved, [np.ones(shape, np.float32) for shape in SHAPES], comm, NAMES)


def refusal(saved):
    """Return the error with which a state is refused; None if it loads."""
    try:
        load(saved)
    except ValueError as error:
        return error
    return None


class TestEntries:
    @pytest.mark.quick_cases(4)
    @pytest.mark.parametrize(
        "key", ["step", "rank", "size", "skipped", "schema", "stage", "history", "made_by"]
    )
    def test_strange_values_of_entries_are_refused_or_harmless(self, key):
        (saved,) = saved_of()
        del saved["digests"]
        for make in STRANGE:
            error = refusal({**saved, key: make()})
            if error is None:
                state = load({**saved, key: make()})
                assert (type(state.step), type(state.stage), type(state.skipped)) == (int, str, int)
                assert 0 <= min(state.step, state.skipped) <= max(state.step, state.skipped) <= 1 << 53
            else:
                assert 20 < len(str(error)) < 600

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            ("step", -1, "the state has step=-1; expected an integer from 0 to 9007199254740992"),
            ("step", True, "the state has step=True; expected an integer"),
            ("step", 2.0, "the state has step=2.0; expected an integer"),
            (
                "size",
                1 << 70,
                "the state has size=an integer of 71 bits; expected an integer from 1 to 4294967296",
            ),
            ("skipped", "7", "the state has skipped='7'; expected an integer"),
            ("history", deep(), "the state has history=a list of 1 entries; expected a list of at most"),
            ("history", [1.0, "x"], "the state has history=a list of 2 entries; expected a list of at most"),
            ("stage", 3, "the state has stage=3; expected a text"),
            ("made_by", "[" * 100_000, "expected class and settings of an optimizer as JSON text"),
            (
                "momentum.bias",
                [0.0] * 3,
                "has momentum.bias=a list of 3 entries; expected an array of numbers",
            ),
            ("momentum.bias", np.array(["a"] * 3), "expected an array of numbers"),
            ("momentum.bias", np.zeros(3, ">f4"), "expected an array of numbers"),
            ("number.watch_felt", -1.0, "has number.watch_felt=-1.0; expected a whole number, at least 0"),
            ("number.watch_felt", np.inf, "has number.watch_felt=inf; expected a whole number, at least 0"),
            ("number.watch_interval", np.nan, "has number.watch_interval=nan; expected a finite number"),
            ("number.watch_felt", 10**400, "an integer of 1329 bits; expected a number"),
        ],
    )
    def test_messages_name_entry_value_and_what_was_expected(self, key, value, says):
        (saved,) = saved_of()
        text = str(refusal({**saved, key: value}))
        assert says in text
        assert "it is damaged, or not from qcomp; load an earlier one" in text or "is damaged; load" in text

    def test_entries_that_cannot_be_read_from_a_file_are_named(self):
        class File(dict):
            def __getitem__(self, key):
                if key == "momentum.bias":
                    raise OSError("bad sector")
                return super().__getitem__(key)

        with pytest.raises(
            ValueError, match=r"'momentum.bias', which cannot be read \(OSError: 'bad sector'\)"
        ):
            load(File(saved_of()[0]))

    def test_a_huge_array_is_refused_before_its_bytes_are_read(self):
        huge = np.broadcast_to(np.float32(0), (1 << 40,))
        (saved,), (one, other) = saved_of(), saved_of(2)
        for key in ("momentum.bias", RESIDUAL, "history"):
            for given in ({**saved, key: huge}, [one, {**other, key: huge}]):
                assert "; expected" in str(refusal(given))


@pytest.mark.parametrize(
    ("target", "name", "wrong", "right"),
    [
        ("1-bit, after 6 steps", "watch_measured", (-1, 0.5, math.nan, math.inf), (0, 7)),
        ("1-bit, after 6 steps", "watch_felt", (-1, 0.5), (0, 3)),
        ("1-bit, after 6 steps", "watch_interval", (math.nan, math.inf), (-1.0, 0.5)),
        ("1-bit, after 6 steps", "variance_ratio", (), (math.nan, math.inf, 0.5)),
        ("1-bit, measured again, after 6 steps", "variance_steps_since", (-1, 7, 0.5), (0, 6)),
        ("1-bit, measured again, after 6 steps", "variance_measured", (-1, 7, 0.5), (0, 6)),
        ("0/1, after 6 steps", "updates", (0, 7, -1, 0.5), (1, 6)),
        ("0/1, after 6 steps", "frozen", (-1, 7, 0.5), (0, 6)),
        ("0/1, after 1 steps", "frozen", (1,), (0,)),
        ("0/1, after 6 steps", "synced", (-1, 7), (0, 6)),
        ("0/1, while ranks are apart", "weights", (0.0, -1.0, math.inf), (1e-9, 1e9)),
        ("0/1, while ranks are apart", "rates", (0.0, -1.0, math.nan), (1e-9, 1e9)),
        ("0/1, while ranks are apart", "factor.bias", (-1.0, math.nan), (0.0, 2.0)),
        ("0/1, while ranks are apart", "weight.bias", (0.0, -1.0, math.inf), (1e-9, 1e9)),
        ("0/1, while ranks are apart", "decay.bias", (-1.0, math.inf), (0.0, 1.0)),
        ("LAMB, after 1 steps", "trust.bias", (math.nan, math.inf), (0.5,)),
        ("QSVRG, after 4 steps", "steps", (-1, 5, 0.5), (0, 4)),
        ("outer loop, under way", "rounds.0", (-1, 6, 0.5), (0, 5)),
    ],
)
def test_impossible_numbers_are_refused(target, name, wrong, right):
    """They would fail in the middle of a later step, or divide by zero."""
    found = targets(target)
    (saved,) = found.saved
    saved = {key: value for key, value in saved.items() if key != "digests"}
    (key,) = [key for key in saved if key == f"number.{name}" or key.endswith(f"_{name}")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in wrong:
            (error,) = found.load([{**saved, key: value}])
            assert f"{key}={float(value)!r}" in str(error) or f"{key}={value!r}" in str(error)
        for value in right:
            (state,) = found.load([{**saved, key: value}])
            found.use(state)


def test_a_rewarm_without_steps_left_is_refused():
    """A re-warm with no steps left would never end."""
    found = targets("1-bit, watched, in a re-warm")
    saved = {key: value for key, value in found.saved[0].items() if key != "digests"}
    for left in (0, -1, 0.5):
        (error,) = found.load([{**saved, "number.rewarm_steps_left": left}])
        assert "expected a whole number, at least 1" in str(error)


def test_a_warm_up_of_zero_one_adam_must_continue_with_an_exact_step():
    found = targets("0/1, after 1 steps")
    saved = {key: value for key, value in found.saved[0].items() if key != "digests"}
    (error,) = found.load([{**saved, "step": 3}])
    assert "stage is 'warmup' after step 3, but variance_steps=" in str(error)


def test_a_sample_that_is_not_adopted_is_still_limited_in_size():
    """A sample of another size makes the watch start anew; a huge one is refused."""
    found = targets("1-bit, watched, in a re-warm")
    (key,) = [key for key in found.saved[0] if key.startswith("watched_variance.layer")]
    assert "of shape (1099511627776,); expected at most 78 elements" in str(
        found.load([{**found.saved[0], key: np.broadcast_to(np.float32(0), (1 << 40,))}])[0]
    )
    (error,) = found.load([{**found.saved[0], key: found.saved[0][key][:1]}])
    assert f"'{key}' differ from their digests" in str(error)


class TestDigests:
    def test_every_bit_of_every_entry_counts(self):
        (saved,) = saved_of()
        for key, value in saved.items():
            if not hasattr(value, "tobytes") or not value.size:
                continue
            data = bytearray(value.tobytes())
            data[-1] ^= 1
            flipped = np.frombuffer(bytes(data), value.dtype).reshape(value.shape)
            with pytest.raises(ValueError, match="was changed since it was saved") as caught:
                load({**saved, key: flipped})
            assert f"'{key}' differ" in str(caught.value)
        for key in ("step", "skipped", "number.watch_interval"):
            with pytest.raises(ValueError, match=f"saved: '{key}' differ from their digests"):
                load({**saved, key: saved[key] + 1})

    def test_swapped_entries_of_the_same_shape_are_found(self):
        (saved,) = saved_of()
        one, other = "momentum.bias", "variance.bias"
        with pytest.raises(ValueError, match=f"'{one}', '{other}' differ"):
            load({**saved, one: saved[other], other: saved[one]})

    def test_in_a_list_too_on_every_rank(self):
        saved = saved_of(2)
        saved[1][RESIDUAL] = saved[1][RESIDUAL] + np.float32(1)

        def rank_main(comm):
            with pytest.raises(
                ValueError, match=f"on rank 1: the state was changed .*'{RESIDUAL}'"
            ) as caught:
                load(saved[comm.rank : comm.rank + 1], comm)
            return str(caught.value)

        first, second = qcomp.comm.run_local(2, rank_main, timeout=20)
        assert first == second

    def test_a_state_without_digests_loads(self):
        """As one that was changed on purpose."""
        (saved,) = saved_of()
        del saved["digests"]
        assert load(saved).step == 6

    def test_digests_are_equal_in_all_libraries(self, library):
        (saved,) = saved_of()
        params = [library.array(np.ones(shape, np.float32)) for shape in SHAPES]
        state = ONE_BIT.load_state_dict(saved, params, ALONE, NAMES)
        assert ONE_BIT.state_dict(state)["digests"] == saved["digests"]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("form", ["own", "list"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"size": 1 << 70},
        {"stage": None},
        {"stage": "\ud800"},
        {"history": deep()},
        {"momentum.bias": "x"},
        {"number.watch_felt": []},
        {7: 7},
        {"made_by": "["},
        {"digests": "[]"},
    ],
    ids=lambda change: str(next(iter(change))),
)
def test_damage_on_one_rank_is_an_error_on_all(form, victim, change):
    saved = saved_of(3)
    saved[victim] = {**saved[victim], **change}

    def rank_main(comm):
        mine = saved[comm.rank] if form == "own" else saved[comm.rank : comm.rank + 1]
        with pytest.raises((ValueError, MismatchError)) as caught:
            load(mine, comm)
        return caught.type, str(caught.value)

    found = qcomp.comm.run_local(3, rank_main, timeout=20)
    if form == "list":
        assert {kind for kind, _ in found} == {ValueError}
        assert len({text for _, text in found}) == 1
        assert found[0][1].startswith((f"on rank {victim}: ", "the dicts belong to different jobs"))
    else:
        kinds = [ValueError if rank == victim else MismatchError for rank in range(3)]
        assert [kind for kind, _ in found] == kinds


@pytest.mark.parametrize("victim", [0, 1])
def test_damage_to_an_optimizer_for_torch_on_one_rank_is_an_error_on_all(victim):
    """In the groups, which torch reads first, and in the state; both ranks then continue training as before."""
    torch = pytest.importorskip("torch")
    import qcomp.torch

    def altered(saved, path, value):
        if not path:
            return value
        copied = dict(saved) if isinstance(saved, dict) else list(saved)
        copied[path[0]] = altered(saved[path[0]], path[1:], value)
        return type(saved)(copied)

    def rank_main(comm):
        p = torch.nn.Parameter(torch.ones(64))
        optimizer = qcomp.torch.OneBitAdam([p], lr=0.1, freeze=2, exact=None, watch=None, comm=comm)

        def train():
            for step in range(4):
                p.grad = torch.full((64,), 1.0 + comm.rank + step)
                optimizer.step()

        train()
        saved, groups = optimizer.state_dict(), repr(optimizer.param_groups)
        own = f"rank {comm.rank} of 2"
        kinds = []
        for path, value in [
            (("param_groups",), 3),
            (("param_groups", 0), deep()),
            (("param_groups", 0, "lr"), "fast"),
            (("param_groups", 0, "lr"), -1.0),
            (("param_groups", 0, "betas"), deep()),
            (("param_groups", 0, "params"), [0, 1]),
            (("param_groups", 0, "params"), [[0]]),
            (("state",), []),
            (("state", 0), None),
            (("state", 0, "shared"), ()),
            (("state", 0, "shared", 0), {"momentum": "x"}),
            (("state", 0, own), 7),
            (("state", 0, own, 0, "size"), 1 << 70),
            (("state", 0, own, 0, "step"), -1),
            (("state", 0, own, 0), {}),
        ]:
            given = altered(saved, path, value) if comm.rank == victim else saved
            with pytest.raises((ValueError, MismatchError)) as caught:
                optimizer.load_state_dict(given)
            kinds.append(caught.type)
            assert repr(optimizer.param_groups) == groups
        train()
        return kinds

    found = qcomp.comm.run_local(2, rank_main, timeout=60)
    assert set(found[victim]) == {ValueError}
    assert set(found[1 - victim]) == {MismatchError}


def test_a_reason_that_is_not_valid_unicode_reaches_the_others():
    """Such as a file name that UTF-8 cannot encode: a rank that could not report it would leave the others waiting."""

    def rank_main(comm):
        problem = ValueError("\ud800") if comm.rank else None
        with pytest.raises((ValueError, MismatchError)) as caught:
            agree(comm, problem, what="load its state", like=np.zeros(1))
        return type(caught.value), str(caught.value)

    first, second = qcomp.comm.run_local(2, rank_main, timeout=20)
    assert first == (MismatchError, "rank 1 cannot load its state: ValueError: \\ud800")
    assert second == (ValueError, "\ud800")


class TestFiles:
    def test_an_interrupted_write_leaves_the_old_file(self, tmp_path):
        path = tmp_path / "state.npz"
        (saved,) = saved_of()
        write_whole(path, lambda file: np.savez(file, **saved))
        before = path.read_bytes()

        def dies(file):
            np.savez(file, **saved)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_whole(path, dies)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["state.npz"]
        with np.load(path) as archive:
            assert load(dict(archive)).step == 6

    def test_a_killed_writer_leaves_the_old_file_and_the_next_one_removes_its_part(self, tmp_path):
        path = tmp_path / "state"
        write_whole(path, lambda file: file.write(b"old"))
        code = (
            "import os, sys; from qcomp.checkpoint import write_whole\n"
            "write_whole(sys.argv[1], lambda file: (file.write(b'half'), file.flush(), os.kill(os.getpid(), 9)))"
        )
        assert subprocess.run([sys.executable, "-c", code, path], check=False, timeout=60).returncode == -9
        (part,) = set(os.listdir(tmp_path)) - {"state"}
        assert part.endswith(".unfinished")
        assert path.read_bytes() == b"old"
        write_whole(path, lambda file: file.write(b"whole"))
        assert os.listdir(tmp_path) == ["state"]
        assert path.read_bytes() == b"whole"

    def test_two_writers_of_one_path_publish_whole_files_and_hear_of_each_other(self, tmp_path):
        """As ranks that all save to one name."""
        path = tmp_path / "state"

        def first(file):
            file.write(b"first" * 1000)
            file.flush()
            with pytest.warns(RuntimeWarning, match=rf"\(.*-{os.getpid()}\) writes '.*state' at the same"):
                write_whole(path, lambda other: other.write(b"second"))
            assert path.read_bytes() == b"second"

        write_whole(path, first)
        assert path.read_bytes() == b"first" * 1000
        assert os.listdir(tmp_path) == ["state"]

    @pytest.mark.skipif(os.name != "posix", reason="this system has no locks on files")
    def test_a_disk_without_locks_cannot_tell_so_nothing_is_removed(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(locks.fcntl, "flock", refuse)
        other = tmp_path / "state.node-1-00000000.unfinished"
        other.write_bytes(b"half")
        write_whole(tmp_path / "state", lambda file: file.write(b"whole"))
        assert other.read_bytes() == b"half"
        assert (tmp_path / "state").read_bytes() == b"whole"

    @pytest.mark.skipif(os.name != "posix", reason="this system has no locks on files")
    def test_a_file_that_another_writer_takes_for_left_before_it_is_locked_is_created_again(
        self, tmp_path, monkeypatch
    ):
        flock, taken = locks.fcntl.flock, []

        def remove_the_first(file, how):
            if not taken:
                taken.append(file.name)
                os.unlink(file.name)
            return flock(file, how)

        monkeypatch.setattr(locks.fcntl, "flock", remove_the_first)
        write_whole(tmp_path / "state", lambda file: file.write(b"whole"))
        assert (tmp_path / "state").read_bytes() == b"whole"
        assert len(taken) == 1

    def test_a_partly_written_file_is_never_visible(self, tmp_path):
        path = tmp_path / "state"
        path.write_bytes(b"old")

        def write(file):
            file.write(b"new")
            file.flush()
            assert path.read_bytes() == b"old"

        write_whole(str(path), write)
        assert path.read_bytes() == b"new"

    def test_a_full_disk_raises_and_leaves_the_old_file(self, tmp_path):
        """The limit makes writes fail as a full disk does: when a buffer is written, or at the end."""
        resource = pytest.importorskip("resource")
        path = tmp_path / "state"
        path.write_bytes(b"old")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for size in (1 << 20, 1500):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            try:
                with pytest.raises(OSError, match="File too large"):
                    write_whole(path, lambda file, size=size: file.write(bytes(size)))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert os.listdir(tmp_path) == ["state"]
            assert path.read_bytes() == b"old"
