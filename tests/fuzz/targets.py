"""The functions that read foreign bytes: each target makes an input and reads it."""

from typing import NamedTuple

import numpy as np

import qcomp
from qcomp.core.handshake import handshake_stages
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.framing import Frame, unseal
from qcomp.core.mean.stages import AllGather, announce_lengths
from qcomp.core.payload import Payload
from tests.contract.compressors import COMPRESSORS
from tests.fuzz.inputs import fields_of, mutated, payload_of, sizes_of, with_checksum

GUARD = np.float32(3.5)


class Reading(NamedTuple):
    """One input, and the function that reads it."""

    data: bytes
    vector_bytes: int
    """Bytes of the vectors that the reader expects."""
    read: object


class PayloadTarget:
    """Decompresses the data of a payload into memory with guards before and after it."""

    errors = (qcomp.PayloadError,)

    def __init__(self, compressor):
        self.compressor = compressor
        self.name = f"payload of {compressor}"

    def make(self, rng):
        """Return an input."""
        compressor = self.compressor
        size = int(rng.choice(sizes_of(compressor)))
        good = payload_of(compressor, size, rng).data.tobytes()
        data = mutated(good, fields_of(compressor.payload_spec(size)), rng)

        def read():
            payload = Payload(compressor.spec, size, "float32", np.frombuffer(data, np.uint8))
            memory = np.full(size + 2, GUARD)
            out = memory[1:-1]
            try:
                compressor.decompress(payload, like=out, out=out)
            finally:
                assert memory[0] == memory[-1] == GUARD, "it writes beyond the vector"

        return Reading(data, 4 * size, read)


class BlobTarget:
    """Reads a serialized payload with a correct checksum, and decompresses it to a vector of the expected size."""

    errors = (qcomp.PayloadError,)
    header = ((4, 5, "uint8"), (5, 6, "uint8"), (6, 8, "uint16"), (8, 16, "uint64"), (16, 24, "uint64"))

    def __init__(self, compressor):
        self.compressor = compressor
        self.name = f"file of {compressor}"

    def make(self, rng):
        """Return an input."""
        size = int(rng.choice(sizes_of(self.compressor)))
        good = payload_of(self.compressor, size, rng).to_bytes()
        spec = (24, 24 + len(self.compressor.spec), "uint8")
        data = with_checksum(mutated(good, (*self.header, spec), rng))
        like = np.zeros(size, dtype=np.float32)

        def read():
            payload = Payload.from_bytes(data, like=like)
            found = self.compressor.decompress(payload, like=like)
            assert (found.shape, found.dtype) == (like.shape, like.dtype)

        return Reading(data, 4 * size, read)


class FrameTarget:
    """Opens a message with the payloads of two tensors, and decompresses them."""

    errors = (qcomp.PayloadError,)

    def __init__(self, compressor, *, variable_length):
        self.compressor, self.variable_length = compressor, variable_length
        self.name = f"message of {compressor}" + (", with lengths" if variable_length else "")

    def make(self, rng):
        """Return an input."""
        compressor, sizes = self.compressor, [int(n) for n in rng.choice(sizes_of(self.compressor), 2)]
        chunk = tuple(Segment(index, 0, n, 0) for index, n in enumerate(sizes))
        frame = Frame(chunk, (compressor,) * 2, ("float32",) * 2, self.variable_length)
        payloads = [payload_of(compressor, n, rng).data for n in sizes]
        good = frame.join(payloads, np.zeros(1, dtype=np.uint8)).tobytes()
        lengths = tuple((at, at + 8, "uint64") for at in range(0, 24, 8)) if self.variable_length else ()
        data = mutated(good, (*lengths, (len(lengths) * 8, len(good), "uint8")), rng)

        def read():
            opened = frame.open(np.frombuffer(data, np.uint8))
            assert opened.verdict.shape == (1,)
            for payload, n in zip(opened.payloads, sizes, strict=True):
                compressor.decompress(payload, like=np.zeros(n, dtype=np.float32))

        return Reading(data, 4 * sum(sizes), read)


class VerdictTarget:
    """Reads from the end of a relayed message which ranks are to blame; every byte but 0 counts as yes."""

    errors = ()
    name = "sealed message"

    def make(self, rng):
        """Return an input."""
        ranks = int(rng.integers(1, 20))
        data = rng.bytes(-(-ranks // 8) * 8 + 8 * int(rng.integers(4)))

        def read():
            message, blamed = unseal(np.frombuffer(data, np.uint8), ranks)
            assert blamed <= set(range(ranks))
            assert message.shape[0] == len(data) - -(-ranks // 8) * 8

        return Reading(data, 0, read)


class AnnouncementTarget:
    """Reads the lengths of the next messages from another rank, before memory is allocated for them."""

    errors = (qcomp.PayloadError,)
    name = "announced lengths"

    def make(self, rng):
        """Return an input."""
        good = np.array([3, 100, 40, 100], dtype="<u8").tobytes()
        data = bytearray(mutated(good, tuple((at, at + 8, "uint64") for at in range(0, 32, 8)), rng))
        data = bytes(data[:32].ljust(32, b"\0"))  # a communicator accepts no other size

        def read():
            stages = announce_lengths(one_exchange(), rank=0)
            request = next(stages)
            later = stages.send([request.send, np.frombuffer(data, np.uint8)])
            assert all(0 <= n <= 100 for n in later.receive)

        return Reading(data, 0, read)


def one_exchange():
    yield AllGather(np.zeros(5, dtype=np.uint8), (100, 100))


FACTS = {"seed": 3, "shapes": [[4, 5], [7]], "compressor": "sign"}
NO_FACTS = [b"[" * 5000, b"3", b"null", b"[]", b'{"a":' * 3000, b"1" * 5000, b'"\\ud800"']


class HandshakeTarget:
    """Reads the settings of another rank."""

    errors = (qcomp.MismatchError,)
    name = "handshake"

    def make(self, rng):
        """Return an input."""
        good = next_text(handshake_stages(FACTS, size=2, like=np.zeros(1))).tobytes()
        data = mutated(good, (), rng)
        if not rng.integers(8):
            data = [b"[" * 5000, b"3", b"null", b"[]", b'{"a":' * 3000, b"1" * 5000, b'"\\ud800"'][
                rng.integers(7)
            ]

        def read():
            stages = handshake_stages(FACTS, size=2, like=np.zeros(1))
            own = next_text(stages, len(data))
            try:
                stages.send([own, np.frombuffer(data, np.uint8)])
            except StopIteration:
                assert data == own.tobytes(), "another text passes"

        return Reading(data, 0, read)


def next_text(stages, length=0):
    """Return the text that a handshake sends after it was told the length of another rank's text."""
    own_length = next(stages).send
    return stages.send([own_length, np.frombuffer(length.to_bytes(8, "little"), np.uint8)]).send


OTHERS = [VerdictTarget(), AnnouncementTarget(), HandshakeTarget()]
TARGETS = [
    *map(PayloadTarget, COMPRESSORS),
    *map(BlobTarget, COMPRESSORS[::4]),
    *(FrameTarget(c, variable_length=False) for c in COMPRESSORS[::5] if not c.variable_length),
    *(FrameTarget(c, variable_length=True) for c in COMPRESSORS[1::5]),
    *OTHERS,
]
