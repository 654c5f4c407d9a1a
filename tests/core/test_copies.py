"""Copies in the memory of nodes: whenever a rank dies or a node is lost, the job continues with the same bits."""

import hashlib
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import qcomp
import qcomp.checkpoint.copies
from qcomp.checkpoint import Copies
from qcomp.checkpoint.locks import PRESENT, Presence, create_locked
from qcomp.comm import run_local
from qcomp.core.checkpoint.copies import CopyPart, Generation, carry_stages, neighbours, newest_whole
from qcomp.testing import lockstep
from qcomp.testing.means import owed
from tests.optimizers.every import EVERY, SHAPES, advance
from tests.outer import jobs

pytestmark = [
    pytest.mark.filterwarnings("ignore:the variance of OneBitAdam no longer fits"),
    pytest.mark.timeout(60),
]

STEPS, KEPT_EVERY = 8, 3
OPT = qcomp.CompressedSGD(
    learning_rate=0.1,
    momentum=0.0,
    exact=None,
    compressor=qcomp.ScaledSign(16),
    averaging=qcomp.Averaging(feedback=True),
)


QUICK = ("1-bit", "0/1", "EF21", "QSVRG", "Muon")


class Dead(BaseException):
    """The rank was killed: none of its code runs any more."""


class End(NamedTuple):
    """How a rank's job ended."""

    bits: dict[str, bytes]
    kept: int | None
    """The step from which it resumed."""


def entries_of(opt: Any, params: Sequence[Any], state: Any) -> dict[str, Any]:
    saved = {f"state.{key}": value for key, value in opt.state_dict(state).items()}
    return saved | {f"parameter.{i}": p for i, p in enumerate(params)}


def read(part: bytes) -> tuple[list[np.ndarray], dict[str, Any]]:
    with np.load(io.BytesIO(part), allow_pickle=False) as archive:
        params = [archive[f"parameter.{i}"] for i in range(len(SHAPES))]
        return params, {key[6:]: archive[key] for key in archive if key.startswith("state.")}


class Mixing:
    """A job with a few bytes of state: each rank mixes its own with those of all others."""

    def __init__(self, comm: Any, part: bytes | None) -> None:
        self.comm, self.own = comm, part or bytes([comm.rank] * 32)

    def step(self, step: int) -> None:
        held = np.frombuffer(self.own, np.uint8)
        parts = self.comm.all_gather(held, [32] * self.comm.size)
        told = bytes([step, self.comm.rank]) + self.own + b"".join(part.tobytes() for part in parts)
        self.own = hashlib.sha256(told).digest()

    def write(self, file: Any) -> None:
        file.write(self.own)

    @property
    def bits(self) -> dict[str, bytes]:
        return {"own": self.own}


class Training:
    """A job of an optimizer, in float32."""

    def __init__(self, comm: Any, parts: Sequence[bytes], opt: Any) -> None:
        self.comm, self.opt = comm, opt
        if parts:
            found = [read(part) for part in parts]
            self.params = found[0][0]
            self.state = opt.load_state_dict([saved for _, saved in found], self.params, comm)
        else:
            self.params = [np.ones(s, np.float32) for s in SHAPES]
            self.state = opt.init(self.params, comm)

    def step(self, step: int) -> None:
        self.params, self.state = advance(self.opt, self.params, self.state, self.comm, step)

    def write(self, file: Any) -> None:
        np.savez(file, **entries_of(self.opt, self.params, self.state))

    @property
    def bits(self) -> dict[str, bytes]:
        entries = entries_of(self.opt, self.params, self.state)
        return {key: np.asarray(value).tobytes() for key, value in entries.items()}


def train(
    comm: Any,
    root: Path,
    *,
    opt: Any = None,
    steps: int = STEPS,
    dies: tuple[int, int] | None = None,
    draws: int = 0,
) -> End:
    """Train, resuming from existing copies; each host has a folder of its own in ``root``."""
    folder = root / comm.host
    folder.mkdir(exist_ok=True)
    copies = Copies(comm, every=KEPT_EVERY, folder=folder, job="job")
    kept = copies.newest()
    parts = kept.parts if kept else []
    job = Training(comm, parts, opt) if opt else Mixing(comm, parts[0] if parts else None)
    for step in range(kept.step if kept else 0, steps):
        if dies == (comm.rank, step):
            raise Dead
        job.step(step + draws)
        copies.keep(step + 1, job.write)
    return End(job.bits, kept and kept.step)


def run(root: Path, hosts: Sequence[str] = "abc", **options: Any) -> list[End]:
    return run_local(len(hosts), lambda comm: train(comm, root, **options), hosts=list(hosts), timeout=20)


def bits(ends: Sequence[End]) -> list[dict[str, bytes]]:
    return [end.bits for end in ends]


def files(root: Path, host: str) -> list[Path]:
    """Return the parts that a host has."""
    return sorted(path for path in (root / host).glob("qcomp-*/*") if path.suffix != PRESENT)


@pytest.fixture(scope="module")
def memory():
    """Return a folder in memory, if there is one: writing to a disk takes long."""
    base = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="qcomp-test-", dir=base if base.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(memory):
    """A folder for each test."""
    return Path(tempfile.mkdtemp(dir=memory))


@pytest.fixture(scope="module")
def whole(memory):
    """Return the final bits of each rank if nothing happens, for any hosts and optimizer."""
    known: dict[Any, list[dict[str, bytes]]] = {}

    def ends(hosts: Sequence[str] = "abc", **options: Any) -> list[dict[str, bytes]]:
        key = (hosts, *sorted((name, id(value)) for name, value in options.items()))
        if key not in known:
            known[key] = bits(run(Path(tempfile.mkdtemp(dir=memory)), hosts, **options))
        return known[key]

    return ends


def errors_of(n: int, rank_main: Any, hosts: Sequence[str] | None = None) -> list[Exception | None]:
    """Return the error of each rank; every rank runs until it ends or fails."""

    def caught(comm: Any) -> Exception | None:
        try:
            rank_main(comm)
        except Exception as error:
            return error
        return None

    return run_local(n, caught, hosts=hosts, timeout=20)


def lose(folder: Path) -> None:
    """Remove a folder, from which what nothing refers to any more may remove its own files at the same time."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            Path(parent, name).unlink(missing_ok=True)
        os.rmdir(parent)


class Killer:
    """Counts a rank's operations on files, and kills it before, during or after one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, victim: int, number: int, moment: str) -> None:
        self.thread, self.left, self.moment = f"rank {victim} of ", number, moment
        self.struck: str | None = None
        write, remove, touch = qcomp.checkpoint.write_whole, os.remove, Path.touch

        def torn(path: Any, content: Any) -> None:
            with open(f"{path}.unfinished", "wb") as file:
                content(file)
                file.truncate(file.tell() // 2)

        monkeypatch.setattr(
            qcomp.checkpoint.copies,
            "write_whole",
            lambda path, content: self.at("write", lambda: write(path, content), lambda: torn(path, content)),
        )
        monkeypatch.setattr(os, "remove", lambda path: self.at("remove", lambda: remove(path), lambda: None))
        monkeypatch.setattr(Path, "touch", lambda path: self.at("touch", lambda: touch(path), lambda: None))

    def at(self, what: str, do: Any, half: Any) -> None:
        if not threading.current_thread().name.startswith(self.thread) or self.struck:
            do()
            return
        self.left -= 1
        if self.left >= 0:
            do()
            return
        self.struck = what
        {"before": lambda: None, "during": half, "after": do}[self.moment]()
        raise Dead


class Cut:
    """A communicator whose exchange after the first few reaches only rank 0; then rank 2 is dead and rank 1 notices."""

    most = 0

    def __init__(self, comm: Any) -> None:
        self._comm, self._calls = comm, 0
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host

    def all_gather(self, *arguments: Any) -> Any:
        return self._checked(self._comm.all_gather(*arguments))

    def all_to_all(self, *arguments: Any) -> Any:
        return self._checked(self._comm.all_to_all(*arguments))

    def _checked(self, found: Any) -> Any:
        self._calls += 1
        if self._calls <= self.most or not self.rank:
            return found
        raise Dead if self.rank == 2 else qcomp.CommunicatorError("rank 2 is dead")


def keep_twice(comm: Any, root: Path) -> None:
    (root / comm.host).mkdir(exist_ok=True)
    copies = Copies(comm, every=1, folder=root / comm.host, job="job")
    copies._comm = Cut(comm)
    for step in (1, 2):
        copies.keep(step, lambda file, step=step: file.write(b"%d of %d" % (step, comm.rank)))  # type: ignore[misc]  # a lambda's default


class TestAnyRankMayDie:
    """At any moment; at most the steps since the last copy are repeated, with the same bits."""

    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("moment", ["before", "during", "after"])
    @pytest.mark.parametrize("hosts", ["abc", "aab", "aa"])
    @pytest.mark.parametrize("with_node", [False, True], ids=["", "with its node"])
    def test_while_a_copy_is_kept(self, tmp_path, whole, hosts, moment, with_node):
        if with_node and len(set(hosts)) == 1:
            return
        found = set()
        for number in itertools.count():
            root, victim = tmp_path / str(number), number % len(hosts)
            root.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                killer = Killer(patch, victim, number // len(hosts), moment)
                try:
                    run(root, hosts)
                except Dead:
                    pass
                else:
                    break
            if with_node:
                lose(root / hosts[victim])
            ends = run(root, hosts)
            assert bits(ends) == whole(hosts)
            (kept,) = {end.kept for end in ends}
            found.add((killer.struck, kept))
        # If there is another node, it has the victim's part before anybody writes a file.
        expected = {("write", 3), ("touch", 3), ("touch", 6)}
        assert found >= (
            expected if len(set(hosts)) > 1 else {*expected, ("write", 6 if moment == "after" else None)}
        )
        assert {kept for what, kept in found if what != "write"} == {3, 6}

    @pytest.mark.parametrize("hosts", ["abc", "aa"])
    def test_between_copies(self, tmp_path, whole, hosts):
        for step in range(STEPS):
            root = tmp_path / str(step)
            root.mkdir()
            with pytest.raises(Dead):
                run(root, hosts, dies=(step % len(hosts), step))
            ends = run(root, hosts)
            assert {end.kept for end in ends} == {step // KEPT_EVERY * KEPT_EVERY or None}
            assert bits(ends) == whole(hosts)

    def test_several_ranks_may_die_one_after_the_other(self, tmp_path, whole):
        for step in (2, 4, 5, 7):
            with pytest.raises(Dead):
                run(tmp_path, dies=(step % 3, step))
            lose(tmp_path / "abc"[step % 3])
        assert bits(run(tmp_path)) == whole()

    def test_when_its_last_message_reaches_only_some(self, tmp_path):
        """Rank 2 dies after an exchange that rank 0 completes and rank 1 does not."""
        counts = []
        for number in itertools.count():
            root = tmp_path / str(number)
            root.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tests.core.test_copies.Cut.most", number)
                try:
                    run_local(
                        3, lambda comm, root=root: keep_twice(comm, root), hosts=list("abc"), timeout=20
                    )
                except (Dead, qcomp.CommunicatorError):
                    pass
                else:
                    break

            def newest(comm: Any, root: Path = root) -> Any:
                return Copies(comm, every=1, folder=root / comm.host, job="job").newest()

            kept = run_local(3, newest, hosts=list("abc"), timeout=20)
            step = kept[0] and kept[0].step
            assert kept == [step and (step, [b"%d of %d" % (step, rank)]) for rank in range(3)]
            counts.append(step)
        assert set(counts) == {None, 1, 2}
        assert counts == sorted(counts, key=lambda step: step or 0)

    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize(
        "name",
        [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in EVERY],
    )
    def test_with_every_optimizer(self, tmp_path, whole, name):
        opt = EVERY[name].opt
        with pytest.raises(Dead):
            run(tmp_path, "aab", opt=opt, steps=12, dies=(2, 11))
        lose(tmp_path / "b")
        ends = run(tmp_path, "aab", opt=opt, steps=12)
        assert {end.kept for end in ends} == {9}
        assert bits(ends) == whole("aab", opt=opt, steps=12)

    def test_with_an_outer_loop(self, tmp_path):
        loop = jobs.loop_of()

        def rank_main(comm: Any, root: Path, steps: int) -> list[bytes]:
            root.mkdir(exist_ok=True)
            copies = Copies(comm, every=3, folder=root, job="outer")
            kept = copies.newest()
            params = jobs.begun()
            if kept is None:
                state = loop.init(params, comm)
            else:
                parts = [dict(np.load(file, allow_pickle=False)) for file in kept.files()]
                params, state = loop.load_state_dict(parts, params, comm)
            for step in range(0 if kept is None else kept.step, steps):
                params = [p - move for p, move in zip(params, jobs.moves(comm.rank, step), strict=True)]
                params, state = loop.step(params, state, comm)
                saved = loop.state_dict(params, state)
                copies.keep(step + 1, lambda file, saved=saved: np.savez(file, **saved))  # type: ignore[misc]  # a lambda's default
            return [p.tobytes() for p in params]

        run_local(2, lambda comm: rank_main(comm, tmp_path / "cut", 11))
        again = run_local(2, lambda comm: rank_main(comm, tmp_path / "cut", 14))
        assert again == run_local(2, lambda comm: rank_main(comm, tmp_path / "whole", 14))


class TestWhatIsLost:
    def test_losing_two_neighbours_is_an_error_that_names_their_parts(self, tmp_path):
        run(tmp_path, "abcd")
        for host in "bc":
            lose(tmp_path / host)
        errors = errors_of(4, lambda comm: train(comm, tmp_path), list("abcd"))
        assert [type(error) for error in errors] == [FileNotFoundError] * 4
        (text,) = {str(error) for error in errors}
        assert text.startswith("no copy is left of the state that rank 1 of 4 had after step 6: ")

    @pytest.mark.parametrize(("gone", "missing"), [("bcd", "ranks 1 and 2"), ("abd", "ranks 0 and 3")])
    def test_losing_several_nodes(self, tmp_path, gone, missing):
        run(tmp_path, "abcd")
        for host in gone:
            lose(tmp_path / host)
        for error in errors_of(4, lambda comm: train(comm, tmp_path), list("abcd")):
            assert f"the state that {missing} of" in str(error)

    def test_losing_two_nodes_apart_loses_nothing(self, tmp_path, whole):
        run(tmp_path, "abcd")
        for host in "ac":
            lose(tmp_path / host)
        ends = run(tmp_path, "abcd")
        assert {end.kept for end in ends} == {6}
        assert bits(ends) == whole("abcd")

    def test_training_goes_on_after_the_error(self, tmp_path):
        """For instance from a checkpoint; the next copy replaces the remaining files."""
        run(tmp_path, "ab")
        for path in [*files(tmp_path, "a"), *files(tmp_path, "b")]:
            if path.suffix.startswith(".1"):
                path.unlink()

        def rank_main(comm: Any) -> Any:
            copies = Copies(comm, every=1, folder=tmp_path / comm.host, job="job")
            with pytest.raises(FileNotFoundError):
                copies.newest()
            copies.keep(1, lambda file: file.write(b"x"))
            return copies.newest()

        assert run_local(2, rank_main, hosts=["a", "b"]) == [(1, [b"x"])] * 2
        assert len(files(tmp_path, "a")) == 3

    def test_if_all_copies_are_gone_the_job_starts_anew(self, tmp_path, whole):
        run(tmp_path)
        lose(tmp_path)
        tmp_path.mkdir()
        ends = run(tmp_path)
        assert bits(ends) == whole()
        assert {end.kept for end in ends} == {None}


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


class TestDamage:
    """A damaged file counts as missing."""

    @pytest.mark.parametrize("damage", [flipped, cut_off, emptied])
    def test_any_damaged_file_is_replaced(self, tmp_path, whole, damage):
        run(tmp_path / "", steps=6)
        for number in range(6):
            parts = [path for host in "abc" for path in files(tmp_path, host) if path.suffix != ".agreed"]
            assert len(parts) == 6
            damage(parts[number])
            ends = run(tmp_path, steps=6)
            assert {end.kept for end in ends} == {6}
        assert bits(run(tmp_path)) == whole()

    def test_lost_copies_are_made_again_at_once(self, tmp_path, whole):
        """So that one node after another may be lost before the next copy is due."""
        run(tmp_path, steps=6)
        for host in "abcab":
            lose(tmp_path / host)
            assert {end.kept for end in run(tmp_path, steps=6)} == {6}
        before = files(tmp_path, "a")
        assert bits(run(tmp_path, steps=7)) == whole(steps=7)
        assert files(tmp_path, "a") == before  # if none is lost, nothing is written

    def test_damage_to_both_files_of_a_part_is_an_error(self, tmp_path):
        run(tmp_path)
        for host in "abc":
            for path in files(tmp_path, host):
                if path.suffix.startswith(".1-"):
                    flipped(path)
        for error in errors_of(3, lambda comm: train(comm, tmp_path), list("abc")):
            assert isinstance(error, FileNotFoundError)
            assert "the state that rank 1 of 3 had after step 6" in str(error)

    def test_swapped_files_of_two_ranks_are_rejected(self, tmp_path, whole):
        """Their content is whole, but under the wrong name."""
        run(tmp_path, "aab")
        first, second, *_ = (path for path in files(tmp_path, "a") if path.suffix in (".0-0", ".1-1"))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        assert bits(run(tmp_path, "aab")) == whole("aab")

    def test_files_of_another_run_are_not_mixed_in(self, tmp_path):
        """Half of the files are from one run and half from another: they are not mixed."""
        one, other = tmp_path / "one", tmp_path / "other"
        for root, draws in ((one, 0), (other, 4)):
            root.mkdir()
            run(root, "ab", draws=draws)
        for path in files(one, "a"):  # keep only rank 0's files of one
            if path.suffix.startswith(".1-"):
                path.unlink()
        lose(one / "b")
        shutil.copytree(other / "b", one / "b")
        for path in files(one, "b"):  # and rank 1's of the other
            if path.suffix.startswith(".0-"):
                path.unlink()
        for error in errors_of(2, lambda comm: train(comm, one), ["a", "b"]):
            assert isinstance(error, FileNotFoundError)

    def test_unknown_files_are_ignored_and_later_removed(self, tmp_path, whole):
        run(tmp_path, steps=5)
        folder = files(tmp_path, "a")[0].parent
        for name in ("x", "3-0-1.0-0", "a.unfinished"):
            (folder / name).write_bytes(b"x")
        assert bits(run(tmp_path)) == whole()
        assert {path.name.partition("-")[0] for path in files(tmp_path, "a")} == {f"{6:016d}"}


class TestAnotherWorld:
    @pytest.mark.quick_cases(3)
    @pytest.mark.parametrize(
        ("before", "now"), [("abc", "ab"), ("ab", "abc"), ("aab", "a"), ("a", "ab"), ("ab", "cd")]
    )
    def test_goes_on_from_the_list_of_all(self, tmp_path, before, now):
        """As if every rank had loaded the list of all states."""
        saved: dict[int, bytes] = {}

        def first(comm: Any) -> None:
            (tmp_path / comm.host).mkdir(exist_ok=True)
            copies = Copies(comm, every=6, folder=tmp_path / comm.host, job="job")
            job = Training(comm, [], OPT)
            for step in range(6):
                job.step(step)
            file = io.BytesIO()
            job.write(file)
            saved[comm.rank] = file.getvalue()
            copies.keep(6, lambda file: file.write(saved[comm.rank]))

        def direct(comm: Any) -> dict[str, bytes]:
            job = Training(comm, [part for _, part in sorted(saved.items())], OPT)
            for step in range(6, STEPS):
                job.step(step)
            return job.bits

        run_local(len(before), first, hosts=list(before))
        if now == "cd":  # the processes have moved, and their memory with them
            for old, new in zip(before, now, strict=True):
                (tmp_path / old).rename(tmp_path / new)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("qcomp.core.checkpoint.reshard.warn_caller", lambda message: None)
            ends = run(tmp_path, now, opt=OPT)
            expected = run_local(len(now), direct, hosts=list(now))
        assert {end.kept for end in ends} == {6}
        assert bits(ends) == expected

    def test_ranks_that_have_moved_get_their_own(self, tmp_path, whole):
        run(tmp_path, "abc", steps=6)
        ends = run(tmp_path, "bca")
        assert {end.kept for end in ends} == {6}
        assert bits(ends) == whole("abc")

    def test_every_part_goes_to_some_rank_and_every_rank_gets_one(self):
        for old, new in itertools.product(range(1, 6), repeat=2):
            generation = Generation(4, "0" * 16, old)
            names = {CopyPart(generation, rank, rank).name for rank in range(old)}
            found, routes = newest_whole([names, *[set()] * (new - 1)])
            assert found == generation
            assert {route.dest for route in routes} == set(range(new))
            assert {route.name for route in routes} == names
            assert {route.source for route in routes} == {0}
            assert len({(route.dest, route.name) for route in routes}) == len(routes)


class TestJobs:
    """One name stands for one job."""

    def newest(self, root: Path, **options: Any) -> Any:
        return Copies(qcomp.comm.LocalCommunicator.alone(), every=1, folder=root, **options).newest()

    def kept(self, root: Path, job: str) -> Copies:
        copies = Copies(qcomp.comm.LocalCommunicator.alone(), every=1, folder=root, job=job)
        copies.keep(1, lambda file: file.write(job.encode()))
        return copies

    def test_do_not_see_each_other(self, tmp_path):
        one, _ = self.kept(tmp_path, "one"), self.kept(tmp_path, "another")
        assert self.newest(tmp_path, job="one") == (1, [b"one"])
        assert self.newest(tmp_path, job="another") == (1, [b"another"])
        assert self.newest(tmp_path, job="third") is None
        one.forget()
        assert self.newest(tmp_path, job="one") is None
        assert self.newest(tmp_path, job="another") == (1, [b"another"])

    def test_end_without_a_trace(self, tmp_path):
        def rank_main(comm: Any) -> None:
            copies = Copies(comm, every=1, folder=tmp_path, job="job")
            copies.keep(1, lambda file: file.write(b"x"))
            copies.forget()

        run_local(4, rank_main)
        assert list(tmp_path.iterdir()) == []

    def test_are_named_by_torchrun(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "given")
        self.kept(tmp_path, "given")
        assert self.newest(tmp_path) == (1, [b"given"])
        assert self.newest(tmp_path, job="none") is None

    @pytest.mark.parametrize("given", ["none", None])
    def test_without_a_name_are_refused(self, tmp_path, monkeypatch, given):
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if given:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", given)
        with pytest.raises(ValueError, match="job is None, and torchrun was given no name either"):
            self.newest(tmp_path)

    @pytest.mark.parametrize("job", ["", ".", "..", "a/b", "../a", "a" * 101, "-a", "a\n"])
    def test_names_must_be_usable_as_file_names(self, tmp_path, job):
        with pytest.raises(ValueError, match="job is "):
            self.newest(tmp_path, job=job)

    @pytest.mark.skipif(os.name != "posix", reason="this system cannot tell which processes work in a folder")
    def test_that_run_at_the_same_time_need_names_of_their_own(self, tmp_path, monkeypatch):
        code = (
            "import os, sys\n"
            "import numpy\n"
            "import qcomp\n"
            "comm = qcomp.comm.LocalCommunicator.alone()\n"
            "copies = qcomp.checkpoint.Copies(comm, every=1, folder=sys.argv[1], job='job')\n"
            "copies.keep(1, lambda file: file.write(b'first'))\n"
            "if os.fork() == 0:\n"  # as a data loader's worker, which outlives its rank
            "    del copies\n"
            "    print('ready', flush=True)\n"
            "sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as first:
            assert first.stdout.readline() == b"ready\n"
            monkeypatch.setattr(qcomp.checkpoint.copies, "_END_SECONDS", 0.0)
            errors = errors_of(2, lambda comm: Copies(comm, every=1, folder=tmp_path, job="job"))
            text = r"job is 'job', but another job of this name on .*; expected a different name for each job"
            assert all(isinstance(error, ValueError) and re.match(text, str(error)) for error in errors)
            assert self.newest(tmp_path, job="another") is None
            first.kill()
            first.wait(timeout=30)
            assert self.newest(tmp_path, job="job") == (1, [b"first"])  # at once
            first.stdin.close()

    def test_whose_processes_take_a_moment_to_end_are_waited_for(self, tmp_path, monkeypatch):
        monkeypatch.setattr(qcomp.checkpoint.copies, "_PAUSE_SECONDS", 0.0)
        folder = qcomp.checkpoint.copies._folder_of(tmp_path, "job")
        ending = create_locked(folder / f"f00d{PRESENT}")
        looked = []

        class Looking(Presence):
            def others(self, known):
                looked.append(super().others(known))
                if len(looked) == 3:
                    ending.close()
                return looked[-1]

        monkeypatch.setattr(qcomp.checkpoint.copies, "Presence", Looking)
        assert self.newest(tmp_path, job="job") is None
        assert looked == [{"f00d"}] * 3 + [set()]
        assert list(folder.iterdir()) == []

    def test_in_one_process_may_follow_each_other(self, tmp_path):
        """As when a job in Python goes on with other ranks while references to the old copies are left."""
        old = self.kept(tmp_path, "job")
        assert self.newest(tmp_path, job="job") == (1, [b"job"])
        assert old.newest() == (1, [b"job"])

    def test_keep_their_folder_private(self, tmp_path):
        self.kept(tmp_path, "job")
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o770)
        errors = errors_of(
            2, lambda comm: Copies(comm, every=1, folder=tmp_path, job=f"job{comm.rank or ''}")
        )
        assert isinstance(errors[0], PermissionError)
        assert str(errors[1]).startswith(
            "rank 0 cannot keep copies: PermissionError: other users can write to "
        )
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(PermissionError, match="is a link"):
            self.newest(tmp_path, job="job")


class TestAllRanksRaise:
    """An error of one rank is raised on all, and the previous copy stays whole."""

    def errors(self, tmp_path: Path, **of_rank_1: Any) -> list[Exception | None]:
        ordinary: dict[str, Any] = {"every": 2, "folder": tmp_path, "job": "job"}
        return errors_of(
            2,
            lambda comm: Copies(comm, **ordinary | (of_rank_1 if comm.rank else {})),
        )

    @pytest.mark.parametrize(
        ("wrong", "kind", "text"),
        [
            ({"every": 0}, ValueError, "every is 0; expected an integer of at least 1"),
            ({"every": 2.0}, ValueError, "every is 2.0; expected"),
            ({"job": "a b"}, ValueError, "job is 'a b'; expected"),
            (
                {"folder": "/nowhere"},
                FileNotFoundError,
                "folder is '/nowhere'; expected an existing folder",
            ),
            ({"folder": None}, TypeError, ""),
        ],
    )
    def test_for_a_wrong_argument(self, tmp_path, wrong, kind, text):
        errors = self.errors(tmp_path, **wrong)
        assert isinstance(errors[1], kind)
        assert text in str(errors[1])
        assert isinstance(errors[0], qcomp.MismatchError)
        assert str(errors[0]).startswith(f"rank 1 cannot keep copies: {kind.__name__}: {text}")

    @pytest.mark.parametrize(
        ("other", "text"), [({"every": 3}, "every is 2"), ({"job": "b"}, "job is 'job'")]
    )
    def test_for_different_arguments(self, tmp_path, other, text):
        errors = self.errors(tmp_path, **other)
        assert [type(error) for error in errors] == [qcomp.MismatchError] * 2
        assert text in str(errors[0])
        assert str(errors[0]) == str(errors[1])

    def keeping(self, root: Path, wrong: Any) -> tuple[Any, ...]:
        """Keep step 1, let rank 1 fail, keep step 3; return the errors, and the newest whole copy in between."""

        def rank_main(comm: Any) -> Any:
            (root / comm.host).mkdir()
            copies = Copies(comm, every=1, folder=root / comm.host, job="job")
            copies.keep(1, lambda file: file.write(b"1"))
            try:
                wrong(comm, copies)
            except Exception as caught:
                error = caught
            assert {path.name.partition("-")[0] for path in files(root, comm.host)} == {f"{1:016d}"}
            between = copies.newest()
            copies.keep(3, lambda file: file.write(b"3"))
            assert copies.newest() == (3, [b"3"])
            return error, between

        return tuple(zip(*run_local(3, rank_main, hosts=list("abc")), strict=True))

    def test_for_a_state_that_cannot_be_written(self, tmp_path):
        def wrong(comm: Any, copies: Copies) -> None:
            copies.keep(2, lambda file: file.write("text" if comm.rank == 1 else b"2"))  # type: ignore[arg-type]  # wrong on purpose

        errors, between = self.keeping(tmp_path, wrong)
        assert [type(error) for error in errors] == [qcomp.MismatchError, TypeError, qcomp.MismatchError]
        assert str(errors[0]).startswith("rank 1 cannot keep a copy of step 2: TypeError: ")
        assert between == ((1, [b"1"]),) * 3

    @pytest.mark.parametrize("number", [0, 1], ids=["its own", "its neighbour's"])
    def test_for_a_full_folder(self, tmp_path, monkeypatch, number):
        write, calls = qcomp.checkpoint.copies.write_whole, []

        def full(path: Path, content: Any) -> None:
            if path.name.startswith(f"{2:016d}") and path.name.endswith("-1"):
                calls.append(path)
                if len(calls) == number + 1:
                    raise OSError(28, "No space left on device")
            write(path, content)

        monkeypatch.setattr(qcomp.checkpoint.copies, "write_whole", full)
        errors, between = self.keeping(
            tmp_path, lambda comm, copies: copies.keep(2, lambda file: file.write(b"2"))
        )
        assert [type(error) for error in errors] == [qcomp.MismatchError, OSError, qcomp.MismatchError]
        assert "No space left" in str(errors[2])
        assert between == ((1, [b"1"]),) * 3

    @pytest.mark.parametrize("step", [-1, 2.0, None, "2"])
    def test_for_no_step(self, tmp_path, step):
        def wrong(comm: Any, copies: Copies) -> None:
            copies.keep(step if comm.rank == 1 else 2, lambda file: file.write(b"2"))

        errors, between = self.keeping(tmp_path, wrong)
        assert isinstance(errors[1], ValueError)
        assert f"step is {step!r}; expected" in str(errors[0])
        assert between == ((1, [b"1"]),) * 3

    def test_for_different_steps(self, tmp_path):
        def wrong(comm: Any, copies: Copies) -> None:
            copies.keep(2 + comm.rank, lambda file: file.write(b"2"))

        errors, between = self.keeping(tmp_path, wrong)
        assert [type(error) for error in errors] == [qcomp.MismatchError] * 3
        assert "different steps: [2, 3, 4]" in str(errors[0])
        assert between == ((1, [b"1"]),) * 3


class TestParts:
    def test_neighbours_are_on_other_nodes_and_share_the_work(self):
        for size in range(1, 7):
            for hosts in itertools.product("abc", repeat=size):
                found = neighbours(hosts)
                if len(set(hosts)) == 1:
                    assert found == [None] * size
                    continue
                assert all(hosts[other] != host for other, host in zip(found, hosts, strict=True))
                for host in set(hosts):
                    loads = [found.count(rank) for rank in range(size) if hosts[rank] == host]
                    assert max(loads) - min(loads) <= 1

    @pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
    def test_arrive_whole_for_any_piece_size(self, monkeypatch, piece):
        monkeypatch.setattr("qcomp.core.checkpoint.copies._PIECE", piece)
        rng = np.random.default_rng(piece)
        routes = [tuple(map(int, route)) for route in rng.integers(0, [3, 3, 90], (9, 3))]
        data = [rng.bytes(length) for *_, length in routes]
        held = [{n: data[n] for n, (source, *_) in enumerate(routes) if source == rank} for rank in range(3)]
        like = np.empty(0, np.uint8)
        arrived = lockstep(
            [carry_stages(routes, held[rank], rank=rank, size=3, like=like) for rank in range(3)]
        )
        for rank, found in enumerate(arrived):
            assert found == {n: data[n] for n, (_, dest, _) in enumerate(routes) if dest == rank}

    def test_stay_on_a_single_node(self, tmp_path):
        """Copies there would not survive the node anyway, so ranks send nothing and write one file each."""
        run(tmp_path, "aa")
        assert len(files(tmp_path, "a")) == 3
        sent = [0, 0]

        def rank_main(comm: Any) -> None:
            copies = Copies(comm, every=1, folder=tmp_path, job="job")
            before = comm.bytes_sent
            copies.keep(1, lambda file: file.write(bytes(100_000)))
            sent[comm.rank] = comm.bytes_sent - before

        run_local(2, rank_main)
        assert max(sent) < 1000
        run_local(2, rank_main, hosts=["a", "b"])
        assert min(sent) > 100_000

    def test_are_kept_every_so_many_steps(self, tmp_path):
        copies = Copies(qcomp.comm.LocalCommunicator.alone(), every=3, folder=tmp_path, job="job")
        assert [copies.keep(step, lambda file: None) for step in range(1, 8)] == [
            s in (3, 6) for s in range(1, 8)
        ]
        assert copies.newest() == (6, [b""])


class TestWithoutStates:
    """The loss at a restart from states of step s, or from its parameters only, if the job died at step t."""

    S, T = 7, 12

    def test_a_restart_from_parameters_loses_exactly_what_was_owed(self):
        """Parameters move by all gradients except what is owed at the end and what was owed at step s."""
        opt = qcomp.CompressedSGD(learning_rate=0.5, momentum=0.0, exact=None, compressor=qcomp.ScaledSign(8))
        begin = [np.ones(s) for s in SHAPES]

        def rank_main(comm: Any, *, restart: bool) -> Any:
            params, state = begin, opt.init(begin, comm)
            for step in range(self.T):
                if step == self.S:
                    at_s = state
                    state = opt.init(params, comm) if restart else state
                params, state = opt.step(params, growing_of(comm.rank, step), state, comm)
            return params, state, at_s

        grads = [
            np.mean([[growing_of(rank, step)[i] for rank in range(3)] for step in range(self.T)], axis=1).sum(
                0
            )
            for i in range(len(SHAPES))
        ]
        for restart in (False, True):
            ranks = run_local(3, lambda comm, restart=restart: rank_main(comm, restart=restart))
            params = ranks[0][0]
            mean = opt.mean_of(ranks[0][1])
            at_end = owed(mean, [state.exchange for _, state, _ in ranks], begin)
            at_s = owed(mean, [state.exchange for *_, state in ranks], begin)
            assert min(np.abs(e).max() for e in at_s) > 1e-2
            for i, x in enumerate(begin):
                moved = (x - params[i]) / 0.5
                lost = grads[i] - moved - at_end[i]
                assert np.abs(lost - (at_s[i] if restart else 0)).max() < 1e-9

    def test_a_restart_from_states_loses_only_time(self, tmp_path, whole):
        """The steps from s to t are repeated, with the same bits."""
        with pytest.raises(Dead):
            run(tmp_path, "aaa", opt=OPT, dies=(1, 5))
        ends = run(tmp_path, "aaa", opt=OPT)
        assert {end.kept for end in ends} == {3}
        assert bits(ends) == whole("aaa", opt=OPT)


def growing_of(rank: int, step: int) -> list[np.ndarray]:
    rng = np.random.default_rng([12, rank, step])
    return [rng.standard_normal(s) + 0.5 for s in SHAPES]
