"""Runs all ranks of a world in one thread, where their computations in stages take turns."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from qcomp.core.mean.stages import AllToAll, Exchange


def lockstep(
    computations: Sequence[Generator[Any, Any, Any]],
    *,
    catch: type[Exception] | tuple[type[Exception], ...] = (),
) -> list[Any]:
    """Run a computation in stages for each rank to its end, without threads and without a communicator.

    Parameters
    ----------
    computations : sequence of generators
        The stages of rank 0, of rank 1 and so on.
    catch : type or tuple of types, optional
        Exceptions to return instead of raising. If a rank raises one of these, all ranks must do so in the same stage.

    Returns
    -------
    list
        What each computation returned, or the exception that it raised.

    Raises
    ------
    AssertionError
        If the ranks yield different kinds or numbers of exchanges, or a rank sends another size than the receiver
        announces.

    Examples
    --------
    >>> import numpy as np
    >>> from qcomp.extend import AllGather
    >>> def total(x):
    ...     arrived = yield AllGather(np.asarray([x], dtype=np.uint8), (1, 1))
    ...     return sum(int(each[0]) for each in arrived)
    >>> lockstep([total(3), total(4)])
    [7, 7]
    """
    ranks = range(len(computations))
    arrived: list[Any] = [None for _ in ranks]
    while True:
        requests, results = {}, {}
        for rank, stages in enumerate(computations):
            try:
                requests[rank] = stages.send(arrived[rank])
            except StopIteration as stop:
                results[rank] = stop.value
            except catch as error:
                results[rank] = error
        if not requests:
            return [results[rank] for rank in ranks]
        assert not results, f"ranks {list(results)} have ended, but ranks {list(requests)} want an exchange"
        arrived = deliver(requests)


def watched(stages: Generator[Any, Any, Any], look: Callable[[Exchange], None]) -> Generator[Any, Any, Any]:
    """Run a computation in stages, and show each of its requests to a function."""
    arrived = None
    while True:
        try:
            request = stages.send(arrived)
        except StopIteration as stop:
            return stop.value
        look(request)
        arrived = yield request


def bytes_to_others(request: Exchange, rank: int) -> int:
    """Return the bytes that a rank sends other ranks in an exchange."""
    if isinstance(request, AllToAll):
        return sum(int(buffer.shape[0]) for other, buffer in enumerate(request.send) if other != rank)
    return int(request.send.shape[0]) * (len(request.receive) - 1)


def deliver(requests: Mapping[int, Exchange]) -> list[list[Any]]:
    """Return each rank's arriving buffers, once all ranks have requested an exchange; raises as `lockstep` does."""
    ranks = range(len(requests))
    kinds = {rank: type(request).__name__ for rank, request in requests.items()}
    assert len(set(kinds.values())) == 1, f"the ranks want different exchanges: {kinds}"

    def sent(source: int, rank: int) -> Any:
        request = requests[source]
        return request.send[rank] if isinstance(request, AllToAll) else request.send

    arrived = [[sent(source, rank) for source in ranks] for rank in ranks]
    for rank in ranks:
        for source, (buffer, size) in enumerate(zip(arrived[rank], requests[rank].receive, strict=True)):
            assert buffer.shape == (size,), (
                f"rank {source} sends rank {rank} a buffer of shape {tuple(buffer.shape)}; it expects ({size},)"
            )
    return arrived
