"""`check_communicator`: checks, on all ranks together, whether a communicator keeps its promises."""

from functools import partial

import numpy as np

from qcomp.comm.base import Communicator
from qcomp.testing.communicator_laws import (
    COMMUNICATOR_LAWS,
    another_size_closes_it,
    other_owners_are_a_mismatch,
)
from qcomp.testing.law_groups import Contract
from qcomp.testing.libraries import Namespace, library_name

_HAS = ("rank", "size", "host", "bytes_sent", "all_to_all", "all_gather")


def check_communicator(
    comm: Communicator, xp: Namespace = np, *, failures: bool = False, owners: bool = False
) -> None:
    """Check that a communicator keeps the promises of `qcomp.comm.Communicator`. Collective.

    Every message arrives whole and in order, whatever its size and whichever rank runs ahead. Results are arrays of the
    same library as the sent arrays, and share no memory with them. ``bytes_sent`` counts the bytes sent to other ranks,
    plus ``tag_bytes`` for each message if the communicator has that attribute. Several exchanges in flight do not mix.

    Parameters
    ----------
    comm : Communicator
        The communicator to check. Every rank must make this call; three ranks show more than two.
    xp : namespace
        The array library of the buffers.
    failures : bool
        Whether to check, as the last law, that a message of a wrong size is an error. The communicator is then closed.
    owners : bool
        Whether to check, as the last law, that all ranks raise `MismatchError` if they exchange for different owners,
        such as two optimizers. That may close the communicator too, so check either this or ``failures``.

    Raises
    ------
    ContractError
        If a law is broken on this rank. Other ranks then wait for this one in the next law, until their communicator
        gives up.
    TypeError
        If ``comm`` is not a communicator.
    ValueError
        If both ``failures`` and ``owners`` are True.

    Examples
    --------
    >>> import qcomp
    >>> qcomp.comm.run_local(3, qcomp.testing.check_communicator)
    [None, None, None]
    """
    communicator_contract(comm, xp, failures=failures, owners=owners).require()


def communicator_contract(
    comm: Communicator, xp: Namespace = np, *, failures: bool = False, owners: bool = False
) -> Contract:
    """Return the laws about a communicator, each in a group of its own, since a broken law leaves ranks out of step."""
    lacking = [name for name in _HAS if not hasattr(comm, name)]
    if lacking:
        raise TypeError(f"comm is {comm!r}; expected a communicator, but it lacks {', '.join(lacking)}")
    if failures and owners:
        raise ValueError(
            "failures and owners are True; expected only one of them, since either may close the communicator"
        )
    last = [another_size_closes_it] * failures + [other_owners_are_a_mismatch] * owners
    laws = (*COMMUNICATOR_LAWS, *last)
    groups = [[(law.__name__, partial(law, comm, xp))] for law in laws]
    return Contract(f"rank {comm.rank} of {type(comm).__name__} on {library_name(xp)}", groups)
