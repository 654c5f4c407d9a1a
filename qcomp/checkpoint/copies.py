"""`Copies`: keeps each rank's data in the memory of two nodes, so that a killed job can go on from there."""

import io
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from qcomp.backends.private_folder import made_private
from qcomp.checkpoint.files import write_whole
from qcomp.checkpoint.locks import PRESENT, Presence
from qcomp.core.checkpoint.copies import (
    CopyPart,
    Generation,
    carry_stages,
    digest_of,
    intact,
    neighbours,
    newest_whole,
    survives,
)
from qcomp.core.errors import MismatchError
from qcomp.core.handshake import gather_texts, handshake
from qcomp.core.mean.stages import Transport, drive

_END_SECONDS = 5.0
"""How long to wait for the processes of a killed job to end, when the job is started again."""
_PAUSE_SECONDS = 0.05
_LIKE = np.empty(0, dtype=np.uint8)

_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Kept(NamedTuple):
    """The data that the ranks kept after a step."""

    step: int
    parts: list[bytes]
    """This rank's own data; in a world of another size, the data of some old ranks."""

    def files(self) -> list[IO[bytes]]:
        """Return the parts as files that are open for reading."""
        return [io.BytesIO(part) for part in self.parts]


class Copies:
    """Copies of each rank's data, from which a killed job goes on without a disk that all nodes share.

    Every few steps each rank writes its part, that is, its parameters and its own state, to a folder in its node's
    memory that outlives processes. It also sends the part to a rank on the next node, which writes it there. When the
    job is started again, as by ``torchrun --max-restarts``, `newest` returns the parts of the last copy, even if a node
    has since lost its memory. So at most ``every`` steps are repeated, with the same bits.

    The constructor and all methods are collective: all ranks call them, in the same order. If a rank fails, all raise.

    Parameters
    ----------
    comm : Communicator
        Has all ranks of the job. All ranks on a node share its memory, so their communicators must have the same
        ``host``.
    every : int
        The number of steps from one copy to the next.
    folder : str or path, optional
        A folder that exists on every node, and keeps files when processes end.
    job : str, optional
        The name of the job, by default torchrun's ``--rdzv-id``. It must be the same when the job is started again, and
        differ from the names of all other jobs.

    Raises
    ------
    ValueError
        If an argument is wrong, the job has no name, or another job runs under this name on the same node.
    OSError
        If files cannot be kept in the folder.
    MismatchError
        On the other ranks, if some rank raises; on every rank, if they differ in ``every`` or ``job``.

    Notes
    -----
    Each process has a locked file in the folder, by which the ranks notice another job of this name. The lock ends with
    the process, so a job that was killed can be started again at once.

    The files are in ``FOLDER/qcomp-USER-JOB``, with mode 0700. A part ends with a SHA-256 digest of its content, step,
    rank and run; a damaged part counts as missing. The files of the previous copy stay until all ranks have reported
    that they have written the next one. So whenever a rank dies, one copy is whole.

    If a rank's part has P bytes, a node keeps 2 P for each of its ranks, and 4 P while it writes the next copy. A
    single node keeps half of that, since no other node can hold second copies. A rank sends P bytes for each copy.

    Examples
    --------
    >>> import numpy as np, qcomp, tempfile
    >>> opt = qcomp.OneBitAdam(learning_rate=0.1, betas=(0.9, 0.9), freeze=5, exact=None)
    >>> def train(comm, folder, steps):
    ...     copies = qcomp.checkpoint.Copies(comm, every=4, folder=folder, job="example")
    ...     params, kept = np.ones(100), copies.newest()
    ...     if kept:
    ...         parts = [dict(np.load(file, allow_pickle=False)) for file in kept.files()]
    ...         params = parts[0]["params"]
    ...         states = [{key[2:]: x for key, x in part.items() if key[:2] == "s."} for part in parts]
    ...         state = opt.load_state_dict(states, params, comm)
    ...     else:
    ...         state = opt.init(params, comm)
    ...     for step in range(state.step, steps):
    ...         params, state = opt.step(params, params - comm.rank, state, comm)
    ...         saved = {f"s.{key}": x for key, x in opt.state_dict(state).items()}
    ...         copies.keep(step + 1, lambda file: np.savez(file, params=params, **saved))
    ...     return params, kept and kept.step
    >>> with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
    ...     _ = qcomp.comm.run_local(2, lambda comm: train(comm, a, 10))  # ends too soon, after 10 of 20 steps
    ...     again, kept = qcomp.comm.run_local(2, lambda comm: train(comm, a, 20))[0]
    ...     whole, _ = qcomp.comm.run_local(2, lambda comm: train(comm, b, 20))[0]
    >>> kept, np.array_equal(again, whole)
    (8, True)
    """

    def __init__(
        self,
        comm: Transport,
        *,
        every: int,
        folder: "str | os.PathLike[str]" = "/dev/shm",
        job: str | None = None,
    ) -> None:
        self.every = every
        self._comm = comm
        problem: Exception | None = None
        token = ""
        try:
            if type(every) is not int or every < 1:
                raise ValueError(f"every is {every!r}; expected an integer of at least 1")
            job = _name_of(job)
            self._folder = _folder_of(Path(folder), job)
            self._presence = Presence(self._folder)
            token = self._presence.token
        except Exception as error:  # perhaps an error of this rank alone
            problem = error
        host = getattr(comm, "host", None) or f"rank {comm.rank}"
        told = self._tell(problem, "keep copies", host=host, life=secrets.token_hex(8), token=token)
        handshake(comm, {"every": every, "job": job}, like=_LIKE)
        if self._others([str(each["token"]) for each in told]):
            problem = ValueError(
                f"job is {job!r}, but another job of this name on {host} keeps copies in the same folder "
                f"{str(self._folder)!r}; expected a different name for each job"
            )
        self._tell(problem, "keep copies")
        self._life = str(told[0]["life"])
        self._hosts = [str(each["host"]) for each in told]
        self._neighbours = neighbours(self._hosts)

    def _others(self, ranks: Sequence[str]) -> bool:
        """Return whether another job works in the folder; a killed job gets some time to end first."""
        deadline = time.monotonic() + _END_SECONDS
        while others := self._presence.others(ranks):
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_SECONDS)
        return bool(others)

    def keep(self, step: int, write: Callable[[IO[bytes]], Any]) -> bool:
        """Keep this rank's data if a copy is due; call it after every step.

        Parameters
        ----------
        step : int
            The number of steps made so far, the same on all ranks; only multiples of ``every`` are kept.
        write : callable
            Writes everything that this rank needs to go on, in any format, to a file that is open for writing bytes,
            such as ``lambda file: torch.save(saved, file)``.

        Returns
        -------
        bool
            Whether a copy was due.

        Raises
        ------
        Exception
            Any exception of ``write``, or OSError if the folder is full. The previous copy stays whole.
        MismatchError
            On the other ranks, if some rank raises; on every rank, if they differ in ``step``.
        """
        if type(step) is int and step % self.every:
            return False
        self._keep(step, write)
        return True

    def _keep(self, step: int, write: Callable[[IO[bytes]], Any]) -> None:
        """Keep this rank's data."""
        rank, size = self._comm.rank, self._comm.size
        generation, content, problem = Generation(step, self._life, size), b"", None
        own = CopyPart(generation, rank, rank)
        what = f"keep a copy of step {step}"
        try:
            if type(step) is not int or step < 0:
                raise ValueError(f"step is {step!r}; expected an integer of at least 0")
            content = _content(own.name, write)
        except Exception as error:  # perhaps an error of this rank alone
            problem = error
        told = self._tell(problem, what, step=step, bytes=len(content))
        steps = [each["step"] for each in told]
        if len(set(steps)) > 1:
            raise MismatchError(
                f"the ranks keep copies of different steps: {steps}; expected the same step on all ranks"
            )

        lengths = [each["bytes"] for each in told]
        routes = [
            (source, dest, lengths[source])
            for source, dest in enumerate(self._neighbours)
            if dest is not None
        ]
        held = {number: content for number, (source, *_) in enumerate(routes) if source == rank}
        arrived = drive(carry_stages(routes, held, rank=rank, size=size, like=_LIKE), self._comm)
        parts = {own: content} | {
            CopyPart(generation, routes[number][0], rank): data for number, data in arrived.items()
        }
        try:
            for part, data in parts.items():
                write_whole(self._folder / part.name, partial(_put, data=data))
        except Exception as error:  # perhaps an error of this rank alone
            problem = error
        try:
            self._tell(problem, what)
        except Exception as error:
            # If the exchange itself failed, keep the parts: other ranks may already know that all have written.
            if error is problem or isinstance(error, MismatchError):
                self._remove(part.name for part in parts)
            raise
        (self._folder / generation.agreed).touch()
        self._remove(name for name in self._names() if not name.startswith(f"{generation}."))

    def newest(self) -> Kept | None:
        """Return the parts of the last step for which every rank's part still exists on some node.

        Returns
        -------
        Kept or None
            The step, and the parts that were kept after it. In a world of the old size a rank gets its own part. In any
            other world every part goes to some rank, and each rank gets at least one. In both cases ``load_state_dict``
            takes the list of the parts' contents. None if nothing has been kept yet.

        Raises
        ------
        FileNotFoundError
            On every rank, if a part and its copy are both lost or damaged. After this error, `keep` still works.

        Notes
        -----
        If a node has lost its files, `newest` writes them again at once. In a world of another size, the next `keep`
        writes them.
        """
        rank, size = self._comm.rank, self._comm.size
        listings: list[set[str]] = [set(each["names"]) for each in self._tell(None, "", names=self._names())]
        while True:
            found = newest_whole(listings)
            if found is None:
                return None
            generation, routes = found
            own = {route.name: self._read(route.name) for route in routes if route.source == rank}
            sizes = {name: None if data is None else len(data) for name, data in own.items()}
            told: dict[str, int | None] = {}
            for each in self._tell(None, "", sizes=sizes):
                told |= each["sizes"]
            damaged = {name for name, length in told.items() if length is None}
            if not damaged:
                break
            listings = [names - damaged for names in listings]

        away = [route for route in routes if route.source != route.dest]
        ways = [(route.source, route.dest, told[route.name] or 0) for route in away]
        held = {number: own[route.name] for number, route in enumerate(away) if route.source == rank}
        arrived = drive(carry_stages(ways, held, rank=rank, size=size, like=_LIKE), self._comm)
        got = {away[number].name: bytes(data) for number, data in arrived.items()}
        parts = [got.get(route.name) or own[route.name] or b"" for route in routes if route.dest == rank]
        if generation.size == size and not survives(listings, self._hosts, generation):
            self._keep(generation.step, partial(_put, data=parts[0]))
        return Kept(generation.step, parts)

    def forget(self) -> None:
        """Remove all copies at the end of a successful job, to free their memory.

        If a rank fails afterwards, the job has nothing to go on from, so call this last.
        """
        self._tell(None, "")  # wait until all ranks have reached the end
        shutil.rmtree(self._folder, ignore_errors=True)  # other ranks of this node remove the same folder

    def _tell(self, problem: Exception | None, what: str, **facts: Any) -> list[Mapping[str, Any]]:
        """Return the facts of all ranks; raise on all ranks if any has a problem."""
        own = None if problem is None else f"{type(problem).__name__}: {problem}"
        text = json.dumps({**facts, "problem": own}, default=str)
        told = [json.loads(each) for each in drive(gather_texts(text, self._comm.size, _LIKE), self._comm)]
        if problem is not None:
            raise problem
        for rank, each in enumerate(told):
            if each["problem"] is not None:
                raise MismatchError(f"rank {rank} cannot {what}: {each['problem']}")
        return told

    def _names(self) -> list[str]:
        """Return the names of the parts in the folder, and of files that unfinished calls have left."""
        try:
            return [name for name in os.listdir(self._folder) if not name.endswith(PRESENT)]
        except OSError:
            return []

    def _read(self, name: str) -> bytes | None:
        """Return the data in a file, or None if it is missing or damaged."""
        try:
            return intact(name, (self._folder / name).read_bytes())
        except OSError:
            return None

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files; other ranks of this node may remove the same ones."""
        for name in list(names):
            with suppress(FileNotFoundError):
                os.remove(self._folder / name)


def _name_of(job: str | None) -> str:
    """Return the name of the job."""
    found = os.environ.get("TORCHELASTIC_RUN_ID", "none") if job is None else job
    if job is None and found == "none":
        raise ValueError(
            "job is None, and torchrun was given no name either; pass job= or torchrun's --rdzv-id: the same name "
            "each time this job is started again, and a different name for every other job"
        )
    if not _JOB.fullmatch(found):
        raise ValueError(
            f"job is {found!r}; expected at most 100 characters out of letters, digits, _ . and -"
        )
    return found


def _folder_of(folder: Path, job: str) -> Path:
    """Return the folder of a job, and make it if it does not exist."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"folder is {str(folder)!r}; expected an existing folder whose files remain when processes end"
        )
    user = f"{os.getuid()}-" if hasattr(os, "getuid") else ""
    own = folder.resolve() / f"qcomp-{user}{job}"
    made_private(own)
    return own


def _content(name: str, write: Callable[[IO[bytes]], Any]) -> bytes:
    """Return the bytes that a callable writes, followed by their digest.

    ``getvalue`` makes no copy, since the file gives up its buffer. Returning a view of the file instead would make
    Python 3.13 report an ignored exception when it frees file and view in one cycle.
    """
    file = io.BytesIO()
    write(file)
    file.seek(0, io.SEEK_END)
    with file.getbuffer() as data:
        digest = digest_of(name, data)
    file.write(digest)
    return file.getvalue()


def _put(file: IO[bytes], data: "bytearray | bytes") -> None:
    file.write(data)
