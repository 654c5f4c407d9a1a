"""Measures all inputs of a prediction: compressors, steps, and the links between ranks."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

from qcomp.core import feedback
from qcomp.core.compressor import Compressor
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.mean.costs import Cluster, Load
from qcomp.core.mean.powersgd import PowerSGDMean
from qcomp.core.mean.stages import Transport
from qcomp.core.mean.topologies.two_phase import TwoPhase
from qcomp.core.numeric.arrays import Array, array_namespace, matmul
from qcomp.core.numeric.random import Key
from qcomp.planning.machine import LowRankSpeed, Machine, Speed
from qcomp.planning.measurement import Measured
from qcomp.planning.network import BYTES, ROUNDS, Clock, agreed, measure_network

_FEW = 64
"""Elements of a tensor that is so small that only the calls take time."""
_MANY = 17
"""How many small tensors are averaged together, for comparison with a single one."""
_RANKS = (1, 4)
"""Ranks of PowerSGD's approximation; the difference of their times gives the cost per column of a factor."""
_SIDE = 512
"""Rows and columns of the largest matrices whose product is timed."""


def measure_speed(
    compressor: Compressor, like: Array, *, rounds: int = ROUNDS, clock: Clock = time.perf_counter
) -> Speed:
    """Measure how fast this process encodes and decodes vectors like ``like``, ideally as large as the real ones.

    The median of ``rounds`` timings of each call counts, after a warm-up call.
    """
    size, key = like.shape[0], Key()
    encoding, decoding, adding = [], [], []
    total = array_namespace(like).zeros_like(like)
    for _ in range(rounds + 1):
        residual = array_namespace(like).zeros_like(like)
        start = clock()
        payload, residual = feedback.compensated(compressor, like, residual, key=key, donate=True)
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

    The step is a function without arguments that computes gradients and updates parameters, without communication. On a
    GPU it must wait for the device before it returns.
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
    """Measure links, calls, compressors, matrix products and a step. Collective; returns the slowest rank's figures.

    Parameters
    ----------
    comm : Communicator
        With one rank there is no link to measure.
    compressors : sequence of Compressor
        The compressors to measure, on all ranks at once, as in a step. The first one also averages small tensors, to
        measure the time of calls.
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
    figures = [_measure_copy(like, rounds, clock), _measure_product(like, rounds, clock)]
    figures += _measure_low_rank(like, rounds, clock)
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
    call, tensor, copy, product, fixed, column, *slowest = (
        max(values) for values in zip(*agreed(comm, figures, like), strict=True)
    )
    compute = slowest.pop() if step is not None else None
    speeds = {c.spec: Speed(*slowest[3 * i : 3 + 3 * i]) for i, c in enumerate(compressors)}
    source = f"measured on the slowest of {comm.size} ranks, vectors of {like.shape[0]} elements"
    return Measured(
        cluster,
        Machine(source, copy, speeds, call, tensor, LowRankSpeed(fixed, column), product),
        compute,
        {} if network is None else network.spreads,
        network is not None and network.on_one_node,
    )


def _measure_copy(like: Array, rounds: int, clock: Clock) -> float:
    times: list[float] = []
    for _ in range(rounds + 1):
        start = clock()
        _wait_for(array_namespace(like).asarray(like, copy=True))
        times.append((clock() - start) / int(like.shape[0]))
    return statistics.median(times[1:])


def _measure_product(like: Array, rounds: int, clock: Clock) -> float:
    """Return the seconds per multiplication in a product of square matrices."""
    square = _square(like, _SIDE)
    times: list[float] = []
    for _ in range(rounds + 1):
        start = clock()
        result = matmul(square, square)
        _wait_for(result[0, ...])
        times.append((clock() - start) / square.shape[0] ** 3)
    return statistics.median(times[1:])


def _measure_low_rank(like: Array, rounds: int, clock: Clock) -> tuple[float, float]:
    """Return PowerSGD's seconds per element: the fixed part, and the part for each column of a factor."""
    square = _square(like)
    seconds = []
    for rank in _RANKS:
        mean = PowerSGDMean(rank=rank, min_compression=0)
        state, times = mean.zeros([square], rank=0, size=1), []
        for _ in range(rounds + 1):
            start = clock()
            means, state = mean([square], state, _Alone())
            _wait_for(means[0][0, ...])
            times.append((clock() - start) / (square.shape[0] * square.shape[1]))
        seconds.append(statistics.median(times[1:]))
    column = max(0.0, (seconds[1] - seconds[0]) / (_RANKS[1] - _RANKS[0]))
    return max(0.0, seconds[0] - _RANKS[0] * column), column


def _square(like: Array, most: int | None = None) -> Array:
    """Return the largest square matrix that the values of a vector fill, of at most ``most`` rows."""
    side = math.isqrt(like.shape[0])
    side = side if most is None else min(side, most)
    return array_namespace(like).reshape(like[: side * side], (side, side))


class _Alone:
    """A communicator with a single rank."""

    rank, size = 0, 1
    compares_owners = True

    def all_to_all(self, send: Sequence[Array], receive: Sequence[int]) -> list[Array]:  # noqa: ARG002
        """Return what this rank sends to itself."""
        return list(send)

    def all_gather(self, send: Array, receive: Sequence[int]) -> list[Array]:  # noqa: ARG002
        """Return what this rank sends to itself."""
        return [send]


def _measure_calls(
    comm: Transport, compressor: Compressor, cluster: Cluster, *, like: Array, rounds: int, clock: Clock
) -> tuple[float, float]:
    """Return the fixed seconds per exchange and per tensor, from means of one and of many small tensors."""
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
