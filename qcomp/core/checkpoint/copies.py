"""Copies of a job's state in the memory of nodes: which rank keeps which part, and the newest complete generation."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from qcomp.core.mean.stages import AllToAll, Stages
from qcomp.core.numeric.arrays import Array, from_host_bytes, host_bytes
from qcomp.core.reporting import name_ranks

_PIECE = 16 << 20
"""The most bytes of a part in one exchange."""

_DIGEST_BYTES = 32

_GENERATION = r"(\d{1,16})-([0-9a-f]{16})-(\d{1,10})"
_PART = re.compile(_GENERATION + r"\.(\d{1,10})-(\d{1,10})")
_AGREED = re.compile(_GENERATION + r"\.agreed")


class Generation(NamedTuple):
    """The parts that all ranks kept after one step. Generations are ordered by step: the greatest is the newest."""

    step: int
    life: str
    """A random name, drawn whenever the ranks start, so that parts of different runs are never mixed."""
    size: int

    def __str__(self) -> str:
        return f"{self.step:016d}-{self.life}-{self.size}"

    @property
    def agreed(self) -> str:
        """The name of the file that shows that all ranks kept their parts."""
        return f"{self}.agreed"


class CopyPart(NamedTuple):
    """A copy of one rank's state, kept by its holder."""

    generation: Generation
    rank: int
    holder: int

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.generation}.{self.rank}-{self.holder}"


class Route(NamedTuple):
    """A transfer of a part from one rank to another."""

    source: int
    dest: int
    name: str


def _generation_of(step: str, life: str, size: str) -> Generation:
    return Generation(int(step), life, int(size))


def neighbours(hosts: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the rank on the next node that keeps a copy of its part; None if there is only one node.

    Examples
    --------
    >>> neighbours(["a", "a", "b", "b"]), neighbours(["a", "a"])
    ([2, 3, 0, 1], [None, None])
    """
    nodes = defaultdict(list)
    for rank, host in enumerate(hosts):
        nodes[host].append(rank)
    order = list(nodes.values())
    found: list[int | None] = [None] * len(hosts)
    for number, ranks in enumerate(order if len(order) > 1 else ()):
        others = order[(number + 1) % len(order)]
        for place, rank in enumerate(ranks):
            found[rank] = others[place % len(others)]
    return found


def newest_whole(listings: Sequence[Collection[str]]) -> tuple[Generation, list[Route]] | None:
    """Return the newest generation of which every part is in some folder, and the routes of the parts to the ranks.

    ``listings`` holds the file names in each rank's folder; ranks may share a folder. A route may begin and end on the
    same rank. In a world of the same size, each rank gets its own part; otherwise every part goes to some rank, and
    every rank gets at least one. The result is None if all ranks together never kept a generation. Raises
    FileNotFoundError if they did, but no generation is complete any more.
    """
    held: dict[Generation, dict[int, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    agreed = set()
    for rank, names in enumerate(listings):
        for name in sorted(names):
            if found := _PART.fullmatch(name):
                held[_generation_of(*found.groups()[:3])][int(found[4])][rank] = name
            elif found := _AGREED.fullmatch(name):
                agreed.add(_generation_of(*found.groups()))
    whole = [generation for generation, parts in held.items() if len(parts) == generation.size]
    if whole:
        newest = max(whole)
        return newest, _routes(held[newest], len(listings))
    if agreed:
        newest = max(agreed)
        missing = name_ranks(set(range(newest.size)) - held[newest].keys())
        raise FileNotFoundError(
            f"no copy is left of the state that {missing} of {newest.size} had after step {newest.step}: the nodes "
            "that kept copies are gone, or files are damaged; resume from a checkpoint"
        )
    return None


def survives(listings: Sequence[Collection[str]], hosts: Sequence[str], generation: Generation) -> bool:
    """Return whether a generation survives the loss of any one node; with a single node, return True."""
    nodes = defaultdict(set)
    for host, names in zip(hosts, listings, strict=True):
        for name in names:
            if (found := _PART.fullmatch(name)) and _generation_of(*found.groups()[:3]) == generation:
                nodes[found[4]].add(host)
    return all(len(having) >= min(2, len(set(hosts))) for having in nodes.values())


def _routes(parts: Mapping[int, Mapping[int, str]], size: int) -> list[Route]:
    """Return the routes of the parts of a generation to ``size`` ranks."""
    routes = []
    for dest in range(size):
        for old in range(dest, len(parts), size) if dest < len(parts) else (dest % len(parts),):
            having = sorted(parts[old])
            source = dest if dest in having else having[old % len(having)]
            routes.append(Route(source, dest, parts[old][source]))
    return routes


def digest_of(name: str, data: Any) -> bytes:
    """Return the digest of a part's data and name; the same for all holders."""
    found = hashlib.sha256(name.rpartition("-")[0].encode())
    found.update(data)
    return found.digest()


def intact(name: str, content: bytes) -> bytes | None:
    """Return a file's data without the digest at the end; None if the data are damaged, or of a different file."""
    data, digest = memoryview(content)[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return bytes(data) if digest == digest_of(name, data) else None


def carry_stages(
    routes: Sequence[tuple[int, int, int]], held: Mapping[int, Any], *, rank: int, size: int, like: Array
) -> Stages[dict[int, bytearray]]:
    """Send buffers between ranks in pieces, all routes in parallel, and return the buffers that this rank receives.

    A route is the source, the destination and the number of bytes of a buffer. All ranks pass the same routes. A buffer
    is identified by the index of its route. ``like`` gives the library and the device of the exchanged buffers.
    """
    outgoing: list[list[int]] = [[] for _ in range(size)]
    incoming: list[list[int]] = [[] for _ in range(size)]
    for number, (source, dest, _) in enumerate(routes):
        if source == rank:
            outgoing[dest].append(number)
        if dest == rank:
            incoming[source].append(number)
    arrived = {number: bytearray() for numbers in incoming for number in numbers}
    for start in range(0, max((length for *_, length in routes), default=0), _PIECE):
        lengths = [min(max(0, length - start), _PIECE) for *_, length in routes]
        send = [
            b"".join(memoryview(held[number])[start : start + _PIECE] for number in numbers)
            for numbers in outgoing
        ]
        pieces = yield AllToAll(
            tuple(from_host_bytes(piece, like) for piece in send),
            tuple(sum(lengths[number] for number in numbers) for numbers in incoming),
        )
        for numbers, piece in zip(incoming, pieces, strict=True):
            data, first = host_bytes(piece), 0
            for number in numbers:
                arrived[number] += data[first : first + lengths[number]]
                first += lengths[number]
    return arrived
