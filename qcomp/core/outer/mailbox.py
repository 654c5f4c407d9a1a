"""`Mailbox`: the interface of a store in which the ranks of an asynchronous outer loop leave files for each other.

This module also has the requests to such a store, and the formats of its files.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from qcomp.core.checkpoint.format import from_state_dict, named_arrays, read_scalars, to_state_dict
from qcomp.core.checkpoint.schema import from_json, shown
from qcomp.core.errors import MismatchError, PayloadError
from qcomp.core.mean.compressed_mean import EXACT
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bytes_of,
    dtype_name,
    flat,
    from_bytes_of,
    from_host_bytes,
    host_bytes,
    itemsize,
)
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.payload import Payload
from qcomp.core.state import OptimizerState

RANKS, SENT, ROUNDS, SHARED = "ranks", "sent", "rounds", "shared"
"""The folders of a mailbox. They hold the numbers of ranks, the ranks' contributions, a file per round that names the
contributions it merges, and the shared parameters after some rounds."""

Result = TypeVar("Result")


class Names(NamedTuple):
    """Asks for the names of the files in a folder; the answer is a list of str."""

    folder: str


class Read(NamedTuple):
    """Asks for a file's content; the answer is bytes, or None if the file is missing or incomplete."""

    name: str


class Create(NamedTuple):
    """Makes a file, if no file has this name; the answer is True if it was made."""

    name: str
    data: bytes


class Delete(NamedTuple):
    """Deletes a file, if it is there; the answer is None."""

    name: str


Requests = Generator[Names | Read | Create | Delete, Any, Result]
"""A computation that asks a mailbox between its pure parts, and never waits for another rank."""


class Mailbox(Protocol):
    """A place where every rank leaves files, and reads other ranks' files; see `qcomp.comm.FolderMailbox`."""

    def now(self) -> float:
        """Return the time in seconds on a clock of this rank; the clock never goes back."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; empty if there is none."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if the file is missing or incomplete."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Make a file, complete when it appears; of several ranks that make the same file, only one gets True."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        ...


def answer(requests: Requests[Result], mailbox: Mailbox) -> Result:
    """Run a computation that asks a mailbox, and return its result."""
    found: Any = None
    while True:
        try:
            request = requests.send(found)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        match request:
            case Names():
                found = mailbox.names(request.folder)
            case Read():
                found = mailbox.read(request.name)
            case Create():
                found = mailbox.create(request.name, request.data)
            case Delete():
                mailbox.delete(request.name)
                found = None


class Sending(NamedTuple):
    """The name of a contribution, which is the name of its file in `SENT`."""

    version: int
    """The last round that the rank had applied when it sent the contribution."""
    rank: int
    number: int
    """How many contributions the rank had sent, including this one."""

    @property
    def path(self) -> str:
        """The path of the contribution's file in the mailbox."""
        return f"{SENT}/{self.version}.{self.rank}.{self.number}"

    @classmethod
    def named(cls, name: str) -> "Sending | None":
        """Parse a name in `SENT`; None if the file is not a contribution."""
        parts = name.split(".")
        if len(parts) != len(cls._fields) or not all(part.isascii() and part.isdigit() for part in parts):
            return None
        return cls(*map(int, parts))


class Member(NamedTuple):
    """A contribution that a round has merged."""

    rank: int
    """The rank that sent it."""
    number: int
    """How many contributions this rank had sent, including this one."""
    age: int
    """Rounds that closed after it was sent and before the round that merged it; 0 if it came in time."""
    weight: float
    """How much it counts, such as the number of tokens of its inner steps."""


class Contribution(NamedTuple):
    """An outer gradient of one rank."""

    weight: float
    is_weighted: bool
    """Whether the caller has given weights; if not, the weight is the number of inner steps."""
    payloads: tuple[Payload, ...]

    def to_bytes(self) -> bytes:
        """Return the contribution as bytes."""
        parts = [payload.to_bytes() for payload in self.payloads]
        head = [self.weight, self.is_weighted, [len(part) for part in parts]]
        return b"".join([json.dumps(head).encode(), b"\n", *parts])

    @classmethod
    def from_bytes(cls, data: bytes, like: Array) -> "Contribution":
        """Return a contribution from its bytes; raise PayloadError if they are not a contribution."""
        start = data.find(b"\n") + 1
        try:
            weight, is_weighted, sizes = from_json(data[:start])
            weight, sizes = float(weight), [int(size) for size in sizes]
        except (TypeError, ValueError) as error:
            raise PayloadError(f"the contribution has a damaged first line: {error}") from error
        parts = []
        for size in sizes:
            parts.append(Payload.from_bytes(memoryview(data)[start : start + size], like=like))
            start += size
        return cls(weight, bool(is_weighted), tuple(parts))


class SharedSnapshot(NamedTuple):
    """The state that all ranks share after a round."""

    facts: Mapping[str, Any]
    """The facts that must be equal on all ranks, see `Asynchronous`."""
    is_weighted: bool | None
    """Whether the ranks give weights; None before the first round."""
    counted: Mapping[int, tuple[int, int]]
    """For each rank the number of its last contribution that was merged, and the round that merged it."""
    shared: OptimizerState
    """Shared parameters and outer moments; its ``step`` counts rounds."""

    def to_bytes(self) -> bytes:
        """Return the snapshot as bytes: a line of JSON, and the arrays."""
        arrays = dict(named_arrays(self.shared, EXACT))
        entries = to_state_dict(self.shared, EXACT)
        head = {
            "facts": self.facts,
            "is_weighted": self.is_weighted,
            "counted": [[rank, *last] for rank, last in sorted(self.counted.items())],
            "scalars": {key: value for key, value in entries.items() if key not in arrays},
            "arrays": [[key, dtype_name(x.dtype), list(x.shape)] for key, x in arrays.items()],
        }
        parts = [host_bytes(bytes_of(flat(x))) for x in arrays.values()]
        return b"".join([json.dumps(head).encode(), b"\n", *parts])

    @classmethod
    def facts_in(cls, data: bytes) -> Mapping[str, Any]:
        """Return only the facts, so that they can be checked before the rest is read."""
        facts: Mapping[str, Any] = cls._head(data)["facts"]
        return facts

    @classmethod
    def from_bytes(cls, data: bytes, like: OptimizerState, outer: Optimizer) -> "SharedSnapshot":
        """Return a snapshot from its bytes; its arrays must be like the arrays of the state ``like``."""
        head, start = cls._head(data), data.find(b"\n") + 1
        (first, *_) = (x for _, x in named_arrays(like, EXACT))
        found: dict[str, Any] = {}
        for key, dtype, shape in head["arrays"]:
            size = itemsize(dtype)
            for axis in shape:
                size *= axis
            x = from_bytes_of(from_host_bytes(data[start : start + size], first), dtype)
            found[key] = array_namespace(x).reshape(x, tuple(shape))
            start += size
        shared = from_state_dict(
            read_scalars(head["scalars"]) | found,
            lambda step, stage: like._replace(step=step, stage=stage),
            EXACT,
            outer.limits,
        )
        counted = {rank: (number, last) for rank, number, last in head["counted"]}
        return cls(head["facts"], head["is_weighted"], counted, shared)

    @staticmethod
    def _head(data: bytes) -> dict[str, Any]:
        try:
            head = from_json(data[: data.find(b"\n") + 1])
        except ValueError:
            head = None
        if not isinstance(head, dict) or head.keys() != {
            "facts",
            "is_weighted",
            "counted",
            "scalars",
            "arrays",
        }:
            raise ValueError(
                f"the folder {SHARED!r} of the mailbox has a file that is no snapshot of this release: use an empty "
                "mailbox"
            )
        return head


def numbers_of(names: Sequence[str]) -> list[int]:
    """Return the numbers among names, ascending."""
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def require_alike(own: Mapping[str, Any], of_job: Mapping[str, Any]) -> None:
    """Raise MismatchError for the first fact in which this rank differs from the job of a mailbox."""
    own = from_json(json.dumps(own))
    for name in sorted({*own, *of_job}):
        if own.get(name) != of_job.get(name):
            raise MismatchError(
                f"{name} is {shown(own.get(name))} here, and {shown(of_job.get(name))} in the job of this mailbox: "
                "give all ranks the same value, or use another mailbox"
            )
