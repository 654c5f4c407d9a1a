"""Measures compressors and steps and, together with the links between ranks, all inputs of a prediction."""

import statistics
import time
from collections.abc import Callable, Sequence

from qcomp.core import feedback
from qcomp.core.compressor import Compressor
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.mean.costs import Cluster, Load
from qcomp.core.mean.stages import Transport
from qcomp.core.mean.topologies.two_phase import TwoPhase
from qcomp.core.numeric.arrays import Array, array_namespace
from qcomp.core.numeric.random import Key
from qcomp.planning.machine import Machine, Speed
from qcomp.planning.measurement import Measured
from qcomp.planning.network import BYTES, ROUNDS, Clock, agreed, measure_network

__all__ = ["measure", "measure_speed", "measure_step"]

_FEW = 64
"""Elements of tensors so small that only the calls take time."""
_MANY = 17
"""Number of these that are averaged together, compared with one."""


def measure_speed(
    compressor: Compressor, like: Array, *, rounds: int = ROUNDS, clock: Clock = time.perf_counter
) -> Speed:
    """Measure how fast this process encodes and decodes.

    Parameters
    ----------
    compressor : Compressor
    like : array
        A vector of the library, device and dtype that will be compressed, ideally as large as the real ones.
    rounds : int
        Number of timings of each call, after a warm-up call; the median counts.
    clock : callable
        Seconds.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> speed = measure_speed(qcomp.ScaledSign(), np.ones(10_000, dtype=np.float32), rounds=3)
    >>> speed.encode > 0
    True
    """
    size, key = like.shape[0], Key()
    encoding, decoding, adding = [], [], []
    total = array_namespace(like).zeros_like(like)
    for _ in range(rounds + 1):
        residual = array_namespace(like).zeros_like(like)
        start = clock()
        payload, residual = feedback.compress(compressor, like, residual, key=key, donate=True)
        _wait_for(residual)
        encoded = clock()
        result = compressor.decompress(payload, like=like)
        _wait_for(result)
        decoded = clock()
        total = compressor.add(payload, total)
        _wait_for(total)
        added = clock()
        encoding.append((encoded - start) / size)
        decoding.append((decoded - encoded) / size)
        adding.append((added - decoded) / size)
    return Speed(*(statistics.median(times[1:]) for times in (encoding, decoding, adding)))


def measure_step(
    step: Callable[[], object], *, rounds: int = ROUNDS, clock: Clock = time.perf_counter
) -> float:
    """Return the median seconds of a step, after a warm-up step.

    Parameters
    ----------
    step : callable
        Computes gradients and updates parameters, without arguments and without communication. On a GPU it must wait
        for the device before it returns.
    rounds : int
    clock : callable
        Seconds.
    """
    step()
    times = []
    for _ in range(rounds):
        start = clock()
        step()
        times.append(clock() - start)
    return statistics.median(times)


def measure(
    comm: Transport,
    compressors: Sequence[Compressor],
    *,
    like: Array,
    step: Callable[[], object] | None = None,
    size: int = BYTES,
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Measure links, calls, compressors and a step. Collective; all ranks return the figures of the slowest rank.

    Parameters
    ----------
    comm : Communicator
        With one rank there is no link to measure.
    compressors : sequence of Compressor
        The compressors to measure, on all ranks at once, as in a step. The first one also averages small tensors, which
        measures the time of calls.
    like : array
        See `measure_speed`.
    step : callable, optional
        See `measure_step`.
    size, rounds, clock
        See `measure_network`.
    """
    network = None
    if comm.size > 1:
        network = measure_network(comm, like=like, size=size, rounds=rounds, clock=clock)
    figures = [_measure_copy(like, rounds, clock)]
    for compressor in compressors:
        speed = measure_speed(compressor, like, rounds=rounds, clock=clock)
        figures += [speed.encode, speed.decode, speed.add]
    if step is not None:
        figures.append(measure_step(step, rounds=rounds, clock=clock))
    cluster = None if network is None else network.cluster
    if cluster is not None and compressors:
        calls = _measure_calls(comm, compressors[0], cluster, like=like, rounds=rounds, clock=clock)
    else:
        calls = 0.0, 0.0  # no exchange
    figures = [*calls, *figures]
    call, tensor, *slowest = (max(values) for values in zip(*agreed(comm, figures, like), strict=True))
    compute = slowest.pop() if step is not None else None
    speeds = {c.spec: Speed(*slowest[1 + 3 * i : 4 + 3 * i]) for i, c in enumerate(compressors)}
    source = f"measured on the slowest of {comm.size} ranks, vectors of {like.shape[0]} elements"
    return Measured(
        cluster,
        Machine(source, slowest[0], speeds, call, tensor),
        compute,
        {} if network is None else network.spreads,
    )


def _measure_copy(like: Array, rounds: int, clock: Clock) -> float:
    times: list[float] = []
    for _ in range(rounds + 1):
        start = clock()
        _wait_for(array_namespace(like).asarray(like, copy=True))
        times.append((clock() - start) / int(like.shape[0]))
    return statistics.median(times[1:])


def _measure_calls(
    comm: Transport, compressor: Compressor, cluster: Cluster, *, like: Array, rounds: int, clock: Clock
) -> tuple[float, float]:
    """Return the fixed seconds of an exchange and of a tensor, from means of one and of many small tensors."""
    mean = CompressedMean(compressor, feedback=not compressor.traits.unbiased)

    def seconds(tensors: int) -> float:
        x = [like[:_FEW]] * tensors
        state, times = mean.init(x, comm), []
        for _ in range(rounds + 1):
            start = clock()
            means, state = mean(x, state, comm, key=Key(rank=comm.rank))
            _wait_for(means[-1])
            times.append(clock() - start)
        return statistics.median(times[1:])

    one = seconds(1)
    tensor = max(0.0, (seconds(_MANY) - one) / (_MANY - 1))
    nothing = Load(0, 0, variable_length=False, encode=0.0, decode=0.0, add=0.0, copy=0.0)
    return max(0.0, (one - tensor - TwoPhase().cost(nothing, cluster).wire) / 2), tensor


def _wait_for(x: Array) -> None:
    """Wait until x is computed, by reading a value: devices and some libraries compute later."""
    if x.shape[0]:
        float(x[0])
