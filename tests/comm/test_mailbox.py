"""A mailbox in a folder or a store: of several ranks that make the same file, one wins, and files are whole."""

import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import qcomp
from qcomp.comm import FolderMailbox


@pytest.fixture(params=["folder", "store"])
def place(request, tmp_path):
    if request.param == "folder":
        return tmp_path / "new"
    pytest.importorskip("fsspec")
    return f"memory://{tmp_path.name}"


def test_files_are_made_once(place):
    mailbox = FolderMailbox(place)
    assert mailbox.names("sent") == []
    assert mailbox.read("sent/1") is None
    assert mailbox.create("sent/1", b"first")
    assert not mailbox.create("sent/1", b"second")
    assert mailbox.create("sent/2", b"")
    other = FolderMailbox(place)
    assert other.read("sent/1") == b"first"
    assert other.read("sent/2") == b""
    assert sorted(other.names("sent")) == ["1", "2"]
    other.delete("sent/1")
    other.delete("sent/1")
    assert mailbox.names("sent") == ["2"]


def test_one_rank_wins(place):
    with ThreadPoolExecutor(8) as pool:
        for number in range(30):
            won = list(
                pool.map(lambda i, n=number: FolderMailbox(place).create(f"rounds/{n}", b"%d" % i), range(8))
            )
            assert sum(won) == 1
            assert FolderMailbox(place).read(f"rounds/{number}") == b"%d" % won.index(True)


def test_a_file_that_is_damaged_is_not_there(tmp_path):
    mailbox = FolderMailbox(tmp_path)
    mailbox.create("sent/1", b"some bytes")
    whole = (tmp_path / "sent" / "1").read_bytes()
    for data in (b"", whole[:10], whole[:-1], whole[:-1] + b"t"):
        (tmp_path / "sent" / "1").write_bytes(data)
        assert mailbox.read("sent/1") is None


def test_nothing_is_left_beside_the_files(tmp_path):
    mailbox = FolderMailbox(tmp_path)
    for _ in range(3):
        mailbox.create("sent/1", b"x")
    assert [path.name for path in (tmp_path / "sent").iterdir()] == ["1"]


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    """Else each attempt would take more of the little space that is left."""
    mailbox = FolderMailbox(tmp_path)
    mailbox.create("sent/1", b"x")

    class Full(io.BytesIO):
        def writelines(self, parts):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        make = Path.open
        patch.setattr(Path, "open", lambda self, mode: make(self, mode).close() or Full())
        for use in (mailbox.create, mailbox._store.write):
            with pytest.raises((qcomp.CommunicatorError, OSError), match="No space left"):
                use("sent/2", b"x")
    assert [path.name for path in (tmp_path / "sent").iterdir()] == ["1"]


def test_a_link_whose_answer_was_lost_counts_as_made(tmp_path, monkeypatch):
    """A client of NFS then asks again, and hears that the file exists."""
    link = os.link

    def twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    mailbox = FolderMailbox(tmp_path)
    assert mailbox.create("sent/1", b"first")
    assert not mailbox.create("sent/1", b"second")


def test_a_file_that_was_replaced_while_it_is_read_is_not_there(tmp_path, monkeypatch):
    mailbox = FolderMailbox(tmp_path)

    def stale(self):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_bytes", stale)
    assert mailbox.read("sent/1") is None


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    mailbox = FolderMailbox(tmp_path / "file")
    for use in (
        lambda: mailbox.create("sent/1", b""),
        lambda: mailbox.read("sent/1"),
        lambda: mailbox.names("sent"),
    ):
        with pytest.raises(qcomp.CommunicatorError, match=r"the mailbox '.*file' cannot be used: "):
            use()


def test_a_store_that_writes_over_files_is_refused(tmp_path):
    pytest.importorskip("fsspec")
    with pytest.raises(
        ValueError, match="expected a path, or a store whose fsspec method pipe_file takes mode='create'"
    ):
        FolderMailbox(f"file://{tmp_path}")
