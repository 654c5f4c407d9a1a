"""Chooses the snapshot from which ranks with different histories resume, from facts that they exchange."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Report = dict[str, float]


class Meeting(NamedTuple):
    """What the ranks that resume agree on."""

    label: int
    """The label of the snapshot to which the ranks go back."""
    next_label: int
    members: Mapping[int, int]
    """For each rank of the old world that is still present, its new number."""
    copies: Mapping[int, int]
    """For each absent rank of the old world whose arrays were copied, the new number of the rank that has the copy."""
    lost: tuple[int, ...]
    """The old numbers of the absent ranks whose arrays were not copied."""
    repeated: int
    dropped: Mapping[str, float]

    def report(self, size: int) -> Report:
        """Return the report for the caller."""
        return {
            "ranks": float(size),
            "joined_ranks": float(size - len(self.members)),
            "restored_ranks": float(len(self.copies)),
            "dropped_ranks": float(len(self.lost)),
            "repeated_steps": float(self.repeated),
            **self.dropped,
        }


class Seat(NamedTuple):
    """What a rank tells the others about one of its snapshots."""

    label: int
    rank: int
    size: int
    step: int
    copied: bool
    """Whether the snapshot has a copy of the arrays that only the rank to the left has."""
    owed: Sequence[Mapping[str, float]]


def meet(told: Sequence[Any], *, restoring: bool) -> Meeting:
    """Return what the ranks agree on, which all of them compute from the same facts.

    The ranks go back to the last snapshot that all present ranks hold, apart from ranks that joined after it. With
    ``restoring``, they prefer the last of these snapshots in which nothing is lost.
    """
    seats = [[Seat(*seat) for seat in facts["seats"]] if facts else [] for facts in told]
    labels = sorted({seat.label for of_rank in seats for seat in of_rank}, reverse=True)
    found = []
    for label in labels:
        of_label = {new: seat for new, own in enumerate(seats) for seat in own if seat.label == label}
        if all(new in of_label for new, facts in enumerate(told) if facts and facts["since"] <= label):
            found.append((label, of_label))
    if not found:
        raise ValueError(
            "the ranks have no snapshot in common; expected at least one rank of the old world, and on each such rank "
            "the last ElasticState that it held"
        )
    steps = max(seat.step for of_rank in seats for seat in of_rank)
    meetings = [_meeting(label, of_label, labels[0] + 1, steps) for label, of_label in found]
    whole = [meeting for meeting in meetings if not meeting.lost]
    return (whole if restoring and whole else meetings)[0]


def _meeting(label: int, of_label: Mapping[int, Seat], next_label: int, steps: int) -> Meeting:
    """Return what ranks agree on if they go back to a snapshot; ``steps`` is the most steps that any rank has made."""
    members = {seat.rank: new for new, seat in of_label.items()}
    sizes = {seat.size for seat in of_label.values()}
    if len(members) < len(of_label) or len(sizes) > 1:
        places = [f"rank {seat.rank} of {seat.size}" for seat in of_label.values()]
        raise ValueError(f"the ranks belong to different jobs: they were {', '.join(places)}")
    size = sizes.pop()
    dead = [rank for rank in range(size) if rank not in members]
    next_to = {rank: members.get((rank + 1) % size) for rank in dead}
    copies = {rank: new for rank, new in next_to.items() if new is not None and of_label[new].copied}
    lost = tuple(rank for rank in dead if rank not in copies)
    first = of_label[min(of_label)]
    owed = [first.owed[rank] for rank in lost] if first.owed else []
    dropped = {
        f"dropped_{kind}": math.hypot(*[norms.get(kind, 0.0) for norms in owed])
        for kind in sorted({kind for norms in owed for kind in norms})
    }
    return Meeting(label, next_label, members, copies, lost, steps - first.step, dropped)
