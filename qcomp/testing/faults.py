"""Simulates the death of a rank in the middle of an exchange, deterministically, in one thread."""

from collections.abc import Collection, Generator, Sequence
from typing import Any, NamedTuple

from qcomp.core.errors import CommunicatorError
from qcomp.testing.one_thread import deliver


class Death(NamedTuple):
    """When and how a rank dies.

    Parameters
    ----------
    rank : int
        The rank that dies.
    exchange : int
        The number, from 0, of the exchange that the rank begins but does not complete.
    reached : collection of int
        The ranks for which this exchange completes nevertheless; for the others it fails.
    """

    rank: int
    exchange: int
    reached: Collection[int] = ()


def until_death(
    computations: Sequence[Generator[Any, Any, Any]], death: Death, *, order: Sequence[int] | None = None
) -> list[Any]:
    """Run one computation in stages per rank until a rank dies and the others notice its death.

    An exchange needs all ranks, so ranks whose exchange completes still fail in their next exchange, if they make one.

    Parameters
    ----------
    computations : sequence of generators
        The stages of rank 0, of rank 1 and so on.
    death : Death
    order : sequence of int, optional
        The order in which the ranks compute between two exchanges; by default in the order of their numbers.

    Returns
    -------
    list
        For each rank the result of its computation, or the `CommunicatorError` that it raised because its exchange
        failed; None for the dead rank. If all computations end before the death, no rank dies.

    Examples
    --------
    >>> import numpy as np
    >>> from qcomp.extend import AllGather
    >>> def total(x):
    ...     arrived = yield AllGather(np.asarray([x], dtype=np.uint8), (1, 1, 1))
    ...     return sum(int(each[0]) for each in arrived)
    >>> until_death([total(1), total(2), total(3)], Death(rank=2, exchange=0, reached=[0]))
    [6, CommunicatorError('rank 2 is dead'), None]
    """
    ranks = range(len(computations))
    turns = ranks if order is None else order
    results: dict[int, Any] = {}
    arrived: dict[int, Any] = dict.fromkeys(ranks)
    exchange = 0
    while True:
        requests: dict[int, Any] = {}
        for rank in turns:
            if rank not in arrived:
                continue
            try:
                requests[rank] = computations[rank].send(arrived[rank])
            except StopIteration as stop:
                results[rank] = stop.value
        if not requests:
            return [results.get(rank) for rank in ranks]
        complete: dict[int, Any] = {}
        if exchange <= death.exchange:
            assert not results, (
                f"ranks {list(results)} have ended, but ranks {list(requests)} want an exchange"
            )
            complete = dict(enumerate(deliver(requests)))
        if exchange >= death.exchange:
            reached = set(death.reached) - {death.rank}
            complete = {rank: buffers for rank, buffers in complete.items() if rank in reached}
            for rank in requests.keys() - complete.keys():
                results[rank] = _failure(computations[rank], death) if rank != death.rank else None
                computations[rank].close()
        arrived = complete
        exchange += 1


def _failure(stages: Generator[Any, Any, Any], death: Death) -> CommunicatorError:
    """Let the exchange of a computation fail, and return the error that it raises."""
    reason = f"rank {death.rank} is dead"
    try:
        stages.throw(CommunicatorError(reason))
    except CommunicatorError as error:
        return error
    except StopIteration:
        pass
    raise AssertionError("a computation goes on after an exchange that failed")
