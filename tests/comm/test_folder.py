"""Ranks that exchange through files keep the promises of a communicator, also beside what earlier jobs have left."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import qcomp
from qcomp.comm import FolderCommunicator
from qcomp.comm import stores as module
from qcomp.comm.beats import Beats
from qcomp.core.mean.stages import AllGather, Owner


def together(folder, function, size=3, **settings):
    """Return what a function returns on each rank, in threads; a rank's error is its result."""

    def rank_main(rank):
        try:
            comm = FolderCommunicator(folder, rank, size, **{"timeout": 60, **settings})
            try:
                return function(comm)
            finally:
                comm.close()
        except qcomp.CommunicatorError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_main, range(size), timeout=120))


def steps(comm):
    opt = qcomp.OneBitAdam(learning_rate=0.01, freeze=2, exact=None, watch=None)
    params = np.zeros(3000, np.float32)
    state = opt.init(params, comm)
    for step in range(5):
        draws = np.random.default_rng((comm.rank, step)).normal(size=3000).astype(np.float32)
        params, state = opt.step(params, params - draws, state, comm)
    return params


@pytest.mark.parametrize("place", ["folder", "store"])
def test_it_keeps_the_promises(tmp_path, monkeypatch, place):
    pytest.importorskip("fsspec")
    monkeypatch.setattr(module._Objects, "longest_pause", 0.02)
    where = str(tmp_path) if place == "folder" else f"memory://{tmp_path.name}"
    assert together(where, lambda comm: qcomp.testing.check_communicator(comm, failures=True)) == [None] * 3


def test_a_training_has_the_bytes_that_it_has_elsewhere(tmp_path):
    expected = qcomp.comm.run_local(2, steps)
    assert all(np.array_equal(x, y) for x, y in zip(together(tmp_path, steps, 2), expected, strict=True))


def rounds(comm):
    """Outer rounds whose messages travel while inner steps go on, as the page on outer loops recommends."""
    loop = qcomp.outer.sparse_loco(every=4, delay=2, exact=None)
    params = np.zeros(5000, np.float32)
    state, running = loop.init(params, comm), qcomp.outer.Overlapped(loop, comm)
    for step in range(15):
        draws = np.random.default_rng((comm.rank, step)).normal(size=5000).astype(np.float32)
        params, state = running.step(params - draws, state, weight=1 + comm.rank)
    running.close()
    return loop.shared(params, state)


def test_outer_rounds_have_the_bytes_that_they_have_elsewhere(tmp_path):
    expected = qcomp.comm.run_local(2, rounds)
    assert expected[0].any()
    assert all(np.array_equal(x, expected[0]) for x in together(tmp_path, rounds, 2))


def test_files_are_deleted(tmp_path):
    held = []

    def rank_main(comm):
        for _ in range(30):
            comm.all_to_all([np.zeros(5, np.uint8)] * 3, [5] * 3)
            held.append(sum(1 for _ in tmp_path.rglob("*")))

    together(tmp_path, rank_main)
    assert max(held) < 40  # messages of two or three exchanges
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"hello.0", "hello.1", "hello.2", "session"}


def test_a_job_begins_where_another_was_killed(tmp_path):
    def leaves_messages(comm):
        comm.all_gather(np.full(3, comm.rank, np.uint8), [3] * 3)
        comm._leave.detach()
        return sum(1 for path in tmp_path.rglob("*") if path.is_file())

    assert min(together(tmp_path, leaves_messages)) > 6
    found = together(
        tmp_path, lambda comm: [int(x[0]) for x in comm.all_gather(np.uint8([comm.rank + 7]), [1] * 3)]
    )
    assert found == [[7, 8, 9]] * 3


def test_all_ranks_hear_of_a_rank_that_ends(tmp_path):
    def rank_main(comm):
        if comm.rank != 1:
            comm.all_gather(np.zeros(3, np.uint8), [3] * 3)
        return "gone"

    found = together(tmp_path, rank_main)
    assert found[1] == "gone"
    assert "all_gather: rank 1 has finished" in str(found[0])
    assert "rank 1 has finished" in str(found[2])


def test_a_rank_that_never_comes_is_named_in_time(tmp_path):
    with pytest.raises(qcomp.CommunicatorError, match=r"creation: waited 0\.3 s for a file from rank 1"):
        FolderCommunicator(tmp_path, 0, 2, timeout=0.3)
    with pytest.raises(qcomp.CommunicatorError, match=r"creation: waited 0\.3 s for a file from rank 0"):
        FolderCommunicator(tmp_path / "else", 1, 2, timeout=0.3)


@pytest.mark.parametrize("twice", [0, 1])
def test_a_second_process_with_the_same_rank_takes_its_place(tmp_path, twice):
    """Else two processes would write the messages of one rank, and the others read those of either."""
    hello = tmp_path / "job" / f"hello.{twice}"

    def come(rank):
        return pool.submit(FolderCommunicator, tmp_path, rank, 2, timeout=20)

    with ThreadPoolExecutor(3) as pool:
        first = come(twice)
        while not hello.exists():
            pass
        of_first, rest = hello.read_bytes(), [come(twice)]
        while hello.read_bytes() == of_first:
            pass
        rest.append(come(1 - twice))
        with pytest.raises(
            qcomp.CommunicatorError, match=f"another process joined 'job' as rank {twice} after"
        ):
            first.result(timeout=60)
        comms = [each.result(timeout=60) for each in rest]
        found = [pool.submit(comm.all_gather, np.uint8([comm.rank]), [1] * 2) for comm in comms]
        assert [[int(x[0]) for x in each.result(timeout=60)] for each in found] == [[0, 1]] * 2
        for comm in comms:
            comm.close()


def test_other_sizes_are_an_error_on_both_ranks(tmp_path):
    def rank_main(rank):
        with pytest.raises(qcomp.CommunicatorError, match=r"creation: size is \d on rank \d and \d on rank"):
            FolderCommunicator(tmp_path, rank, 2 + rank, timeout=20)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank_main, range(2), timeout=120))


def test_a_script_may_change_its_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comm = FolderCommunicator("shared", 0, 1)
    mailbox = qcomp.comm.FolderMailbox("shared")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    comm._store.write("there", b"")
    mailbox.create("sent/1", b"")
    assert (tmp_path / "shared" / "there").exists()
    assert (tmp_path / "shared" / "sent" / "1").exists()
    assert not any((tmp_path / "else").iterdir())


@pytest.mark.parametrize("silence", [0.4, None])
def test_a_rank_that_died_is_named_after_a_silence(tmp_path, silence):
    """Without signs of life, only the timeout ends the wait."""

    def rank_main(comm):
        if comm.rank == 1:
            comm._leave.detach()
            if silence:
                comm._session.beats.end()
            return "dead"
        comm.all_gather(np.zeros(3, np.uint8), [3] * 3)
        raise AssertionError

    found = together(tmp_path, rank_main, silence=silence, timeout=60 if silence else 0.5)
    text = "rank 1 has given no sign of life for 0.4 s" if silence else "waited 0.5 s for a file from rank 1"
    assert any(text in str(found[rank]) for rank in (0, 2))  # the other may hear of that rank's failure first
    assert all(isinstance(found[rank], qcomp.CommunicatorError) for rank in (0, 2))


class TestBeats:
    def looks(self, signs, times):
        """Return what looks at these times say, if a rank's sign of life is then as given."""
        beats = Beats(lambda _: None, lambda _: next(left), 4e6)
        beats.end()
        left = iter(signs)
        return [beats.is_silent(1, now * 1e6) for now in times]

    def test_a_sign_that_stays_the_same_in_four_more_looks_is_a_death(self):
        assert self.looks([b"5"] * 5, range(5)) == [False] * 4 + [True]

    def test_a_new_sign_counts_as_life(self):
        assert not any(self.looks([b"5", b"5", b"5", b"5", b"6", b"6", b"6", b"6"], range(8)))

    def test_looks_in_quick_succession_count_once(self):
        assert not any(self.looks([b"5"] * 2, np.linspace(0, 1.9, 20)))

    def test_one_look_after_a_store_has_stalled_is_no_death(self):
        assert not any(self.looks([b"5", b"5", b"6"], [0, 100, 101]))

    def test_a_rank_that_gives_no_signs_is_not_dead(self):
        assert not any(self.looks([None] * 9, range(9)))

    def test_a_store_that_fails_for_a_while_is_no_end(self):
        written, done = [], threading.Event()

        def write(sign):
            written.append(sign)
            if len(written) == 2:
                raise OSError
            if len(written) == 4:
                done.set()

        beats = Beats(write, lambda _: None, 0.04)
        assert done.wait(timeout=20)
        beats.end()
        assert written[:4] == [b"0", b"1", b"2", b"3"]


def test_other_owners_are_a_mismatch_on_all_ranks(tmp_path):
    def rank_main(comm):
        owner = Owner("SGD", 1 + comm.rank // 2, ("w",), 0, "step 3")
        comm.run(AllGather(np.zeros(1, np.uint8), (1,) * 3, owner=owner))

    found = together(tmp_path, rank_main)
    assert all(isinstance(error, qcomp.CommunicatorError) for error in found)
    assert isinstance(found[2], qcomp.MismatchError)
    assert "step 3 of SGD number 1" in str(found[2])


def test_other_verbs_are_an_error_on_all_ranks(tmp_path):
    def rank_main(comm):
        x = np.zeros(4, np.uint8)
        if comm.rank:
            comm.all_gather(x, [4] * 3)
        comm.all_to_all([x] * 3, [4] * 3)

    found = together(tmp_path, rank_main)
    assert all(isinstance(error, qcomp.CommunicatorError) for error in found)
    assert "rank 0 called all_to_all where rank 1 called all_gather" in str(found[0])


@pytest.mark.parametrize("kept", [0, 10, -1], ids=["empty", "cut in its first line", "cut at its end"])
def test_a_message_that_is_not_whole_is_not_yet_there(tmp_path, monkeypatch, kept):
    """A store may show a part of a file; the rest comes later."""
    looked, lock = set(), threading.Lock()
    read = module._Folder.read

    def of_part(self, name):
        found = read(self, name)
        with lock:
            if not found or (name, found) in looked:
                return found
            looked.add((name, found))
        return found[:kept]

    monkeypatch.setattr(module._Folder, "read", of_part)
    found = together(
        tmp_path, lambda comm: [int(x[2]) for x in comm.all_gather(np.full(3, comm.rank, np.uint8), [3] * 3)]
    )
    assert found == [[0, 1, 2]] * 3
    assert sum(name.endswith(".all") for name, _ in looked) == 3


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="rank is 2 and size 2; expected a rank from 0 to size - 1"):
        FolderCommunicator(tmp_path, 2, 2)
    with pytest.raises(ValueError, match=r"job is '\.\./x'; expected a valid name of a folder"):
        FolderCommunicator(tmp_path, 0, 1, job="../x")
