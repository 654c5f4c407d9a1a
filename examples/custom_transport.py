"""A transport of your own: 1-bit Adam over asyncio streams, without a communicator.

Start it with ``python examples/custom_transport.py``. The ranks are tasks of one event loop, connected by TCP. Nothing
blocks: optimizers yield the exchanges that they need, and `drive` awaits them. The same works between machines.
"""

import asyncio
import hashlib
from typing import Any

import numpy as np

import qcomp
from qcomp import extend

RANKS, FEATURES, STEPS = 3, 3_000, 60
LENGTH_BYTES = 8

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Peers:
    """The streams of one rank to all others."""

    def __init__(self, rank: int, streams: dict[int, Stream]) -> None:
        self.rank, self.size = rank, len(streams) + 1
        self.bytes_sent = 0
        self._streams = streams

    async def exchange(self, request: extend.Exchange) -> list[Any]:
        """Send each rank its buffer, and return a buffer from each, in the library of the sent buffers."""
        to_each = isinstance(request, extend.AllToAll)
        send: Any = request.send if to_each else (request.send,) * self.size
        async with asyncio.TaskGroup() as both:  # if ranks sent first and received later, all could block
            for peer in self._streams:
                both.create_task(self._send(peer, extend.host_bytes(send[peer])))
            arriving = {
                peer: both.create_task(self._receive(peer, request.receive[peer])) for peer in self._streams
            }
        arrived = {peer: task.result() for peer, task in arriving.items()}
        arrived[self.rank] = extend.host_bytes(send[self.rank])
        return [extend.from_host_bytes(arrived[rank], like=send[rank]) for rank in range(self.size)]

    async def _send(self, peer: int, data: bytes) -> None:
        _, writer = self._streams[peer]
        writer.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
        await writer.drain()
        self.bytes_sent += len(data)

    async def _receive(self, peer: int, expected: int) -> bytes:
        reader, _ = self._streams[peer]
        try:
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
            if length == expected:  # never read a length that this rank does not expect
                return await reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise extend.CommunicatorError(f"rank {peer} is gone: {error}") from error
        raise extend.CommunicatorError(
            f"rank {peer} sends {length} bytes; rank {self.rank} expects {expected}"
        )

    async def close(self) -> None:
        """Close all streams."""
        for _, writer in self._streams.values():
            writer.close()
            await writer.wait_closed()


async def drive(stages: extend.Stages[Any], peers: Peers) -> Any:
    """Run a computation in stages to its end, and return its result."""
    arrived = None
    try:
        while True:
            request = next(stages) if arrived is None else stages.send(arrived)
            arrived = await peers.exchange(request)
    except StopIteration as stop:
        return stop.value


async def connect(rank: int, ports: list[asyncio.Future[int]]) -> Peers:
    """Connect a rank to all others: it connects to lower ranks, and accepts connections from higher ones."""
    streams: dict[int, Stream] = {}
    complete = asyncio.Event()

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams[int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")] = reader, writer
        complete.set()

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    ports[rank].set_result(server.sockets[0].getsockname()[1])
    for peer in range(rank):
        reader, writer = await asyncio.open_connection("127.0.0.1", await ports[peer])
        writer.write(rank.to_bytes(LENGTH_BYTES, "little"))
        streams[peer] = reader, writer
    while len(streams) < len(ports) - 1:
        complete.clear()
        await complete.wait()
    server.close()
    return Peers(rank, streams)


async def train(rank: int, ports: list[asyncio.Future[int]]) -> tuple[str, float, int]:
    """Fit a hidden vector; return a digest of the weights, the remaining distance, and the bytes sent."""
    peers = await connect(rank, ports)
    hidden = np.random.default_rng(0).standard_normal(FEATURES).astype(np.float32)
    opt = qcomp.OneBitAdam(learning_rate=0.05, betas=(0.9, 0.9), freeze=20, exact=None)
    weights = np.zeros(FEATURES, dtype=np.float32)
    state = await drive(opt.init_stages(weights, rank=peers.rank, size=peers.size), peers)
    noise = np.random.default_rng(rank + 1)
    for _ in range(STEPS):
        gradient = weights - hidden + 0.1 * noise.standard_normal(FEATURES).astype(np.float32)
        weights, state = await drive(opt.stages(weights, gradient, state), peers)
    await peers.close()
    left = float(np.linalg.norm(weights - hidden) / np.linalg.norm(hidden))
    return hashlib.sha256(weights.tobytes()).hexdigest(), left, peers.bytes_sent


async def main() -> None:
    """Run all ranks as tasks."""
    loop = asyncio.get_running_loop()
    ports = [loop.create_future() for _ in range(RANKS)]
    async with asyncio.TaskGroup() as group:
        ranks = [group.create_task(train(rank, ports)) for rank in range(RANKS)]
    digests, left, sent = zip(*(task.result() for task in ranks), strict=True)
    if len(set(digests)) > 1:
        raise SystemExit("the ranks hold different weights")
    print(f"all {RANKS} ranks hold identical weights: sha256 {digests[0][:16]}...")
    print(f"{left[0]:.1%} of the distance is left after {STEPS} steps; rank 0 sent {sent[0]:,} bytes")


if __name__ == "__main__":
    asyncio.run(main())
