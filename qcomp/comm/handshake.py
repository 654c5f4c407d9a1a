"""Whether all ranks were started alike, asked once before they work together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qcomp.core import handshake as core

if TYPE_CHECKING:
    from qcomp.comm.base import Communicator

__all__ = ["handshake"]


def handshake(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Make sure that all ranks agree about some facts.

    Sends 8 bytes and the facts' JSON text to every other rank; the version of qcomp is always among the facts.

    Parameters
    ----------
    comm : Communicator
    facts : mapping of str to object
        What must be the same everywhere: version, compressor, sizes, seed and the like. A value that JSON
        cannot hold counts as its `str`.

    Raises
    ------
    MismatchError
        On every rank, with the same text: each fact that differs, and which ranks hold which value. Of a list
        or mapping, the first entry that differs.

    Examples
    --------
    >>> from qcomp.comm.local import run_local
    >>> from qcomp.core.errors import MismatchError
    >>> run_local(2, lambda comm: handshake(comm, {"seed": 0}))
    [None, None]
    >>> try:
    ...     run_local(3, lambda comm: handshake(comm, {"seed": comm.rank // 2}))
    ... except MismatchError as error:
    ...     print(error)
    the ranks were not started alike: seed is 0 on ranks 0 and 1, but 1 on rank 2
    """
    import numpy as np  # noqa: PLC0415  (`import qcomp.comm` loads no array library)

    core.handshake(comm, facts, like=np.empty(0, dtype=np.uint8))
