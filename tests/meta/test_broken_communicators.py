"""`check_communicator` catches communicators with one fault each."""

import numpy as np
import pytest

from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.extend import AllGather, CommunicatorError, Completed, Verbs
from qcomp.testing import ContractError, check_communicator

LONG = 30.0


class Wrapped:
    """A communicator over another one; broken subclasses change a method."""

    def __init__(self, comm):
        self.comm = comm
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host

    @property
    def bytes_sent(self):
        return self.comm.bytes_sent

    def all_to_all(self, send, receive):
        return self.comm.all_to_all(send, receive)

    def all_gather(self, send, receive):
        return self.comm.all_gather(send, receive)

    def start(self, request):
        return self.comm.start(request)


class CountsItsOwnShare(Wrapped):
    @property
    def bytes_sent(self):
        return self.count

    def __init__(self, comm):
        super().__init__(comm)
        self.count = 0

    def all_to_all(self, send, receive):
        self.count += sum(x.size for x in send)
        return super().all_to_all(send, receive)


class CountsMoreThanItsTags(Wrapped):
    tag_bytes = 4

    def all_to_all(self, send, receive):
        tags = [np.zeros(8, dtype=np.uint8)] * self.size
        found = super().all_to_all(
            [np.concatenate(x) for x in zip(send, tags, strict=True)], [n + 8 for n in receive]
        )
        return [x[:-8] for x in found]


class MixesUpRanks(Wrapped):
    def all_to_all(self, send, receive):
        return super().all_to_all(send, receive)[::-1]


class Truncates(Wrapped):
    def all_gather(self, send, receive):
        return [x[:1000] for x in super().all_gather(send, receive)]


class SharesMemory(Wrapped):
    def all_gather(self, send, receive):
        received = super().all_gather(send, receive)
        received[self.rank] = send
        return received


class ReturnsBytes(Wrapped):
    def all_gather(self, send, receive):
        return [x.tobytes() for x in super().all_gather(send, receive)]


class CallsEverybodyZero(Wrapped):
    def all_gather(self, send, receive):
        return [super().all_gather(send, receive)[0]] * self.size


class KeepsOneUnderWay(Wrapped):
    """Every `wait` returns the exchange that was started last."""

    def start(self, request):
        self.last = Completed(
            self.all_gather(request.send, request.receive)
            if isinstance(request, AllGather)
            else self.all_to_all(request.send, request.receive)
        )
        comm = self

        class Late:
            def wait(self):
                return comm.last.wait()

        return Late()


class PadsWhatIsShort(Wrapped):
    """A message of the wrong size is made to fit without an error."""

    overhead = 0

    @property
    def bytes_sent(self):
        return self.comm.bytes_sent - self.overhead

    def all_to_all(self, send, receive):
        mine = np.array([x.size for x in send], dtype="<u8").view(np.uint8)
        self.overhead += mine.size * (self.size - 1)
        sizes = [each.view("<u8") for each in self.comm.all_gather(mine, [mine.size] * self.size)]
        found = self.comm.all_to_all(send, [int(of_rank[self.rank]) for of_rank in sizes])
        return [np.resize(x, n) for x, n in zip(found, receive, strict=True)]


class Copies(Wrapped):
    """Sends copies of buffers, which broken subclasses change."""

    def copy(self, buffer):
        return buffer

    def all_to_all(self, send, receive):
        return super().all_to_all([self.copy(x) for x in send], receive)

    def all_gather(self, send, receive):
        return super().all_gather(self.copy(send), receive)


class LosesTheLastPiece(Copies):
    """Of a message that is cut into pieces of 2 MiB, what is left after whole pieces is lost."""

    def copy(self, buffer):
        cut = buffer.copy()
        cut[buffer.size // 2**21 * 2**21 or buffer.size :] = 0
        return cut


class SendsFromTheBase(Copies):
    """Reads from the beginning of the memory that a buffer is a part of."""

    def copy(self, buffer):
        return buffer if buffer.base is None else buffer.base[: buffer.size]


class NumbersInAByte(Copies):
    number = 0

    def copy(self, buffer):
        self.number += 1
        return buffer

    def all_gather(self, send, receive):
        found = super().all_gather(send, receive)
        return found if self.number < 256 else [0 * x for x in found]


class DropsRepeats(Wrapped):
    """Takes a message that equals the last one for a duplicate."""

    last = ()

    def all_gather(self, send, receive):
        found = super().all_gather(send, receive)
        held = [x.tobytes() for x in found]
        repeated, self.last = held == self.last and sum(receive) > 100, held
        return [0 * x for x in found] if repeated else found


class CountsNoStarts(Wrapped):
    uncounted = 0

    @property
    def bytes_sent(self):
        return self.comm.bytes_sent - self.uncounted

    def start(self, request):
        before = self.comm.bytes_sent
        pending = Completed(self.comm.start(request).wait())
        self.uncounted += self.comm.bytes_sent - before
        return pending


class SharesLargeBuffers(Wrapped):
    """A rank's own share of a large exchange is what was sent, not a copy."""

    def all_to_all(self, send, receive):
        found = super().all_to_all(send, receive)
        if send[self.rank].nbytes >= 1 << 20:
            found[self.rank] = send[self.rank]
        return found


class StartsWhenWaitedFor(Wrapped):
    """An exchange begins with `wait`, so ranks that wait in other orders mix them up."""

    def start(self, request):
        comm = self

        class Late:
            def wait(self):
                if isinstance(request, AllGather):
                    return comm.all_gather(request.send, request.receive)
                return comm.all_to_all(request.send, request.receive)

        return Late()


class CallsEachRankAHost(Wrapped):
    def __init__(self, comm):
        super().__init__(comm)
        self.host = f"{comm.host}:{comm.rank}"


class FillsPieces(Wrapped):
    """Messages are filled to whole pieces of 64 KiB, and these are counted."""

    more = 0

    @property
    def bytes_sent(self):
        return self.comm.bytes_sent + self.more

    def start(self, request):
        if isinstance(request, AllGather):
            self.more += -request.send.size % 65_536 * (self.size - 1)
        return super().start(request)


class ClaimsToCompareOwners(Verbs):
    """Says that it compares owners, and exchanges for different ones."""

    compares_owners = True

    def __init__(self, comm):
        self._comm = comm
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host

    @property
    def bytes_sent(self):
        return self._comm.bytes_sent

    def _exchange(self, verb, send, receive, owner=None):
        return self._comm.all_to_all(send, receive)


class LeavesOwnersToQcomp(ClaimsToCompareOwners):
    """Correct: a frame around each message has the owner."""

    compares_owners = False


class ReturnsReadOnly(Wrapped):
    """Correct: what arrives need not be writable."""

    def all_gather(self, send, receive):
        return [np.frombuffer(x.tobytes(), np.uint8) for x in super().all_gather(send, receive)]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (LosesTheLastPiece, "all_to_all_delivers"),
        (SendsFromTheBase, "all_to_all_delivers"),
        (NumbersInAByte, "exchanges_keep_their_order"),
        (DropsRepeats, "all_gather_delivers"),
        (CountsNoStarts, "starts_wait_in_any_order"),
        (CountsItsOwnShare, "all_to_all_delivers"),
        (CountsMoreThanItsTags, "all_to_all_delivers"),
        (MixesUpRanks, "all_to_all_delivers"),
        (Truncates, "all_gather_delivers"),
        (SharesMemory, "memory_is_its_own"),
        (ReturnsBytes, "has_a_place"),
        (CallsEverybodyZero, "has_a_place"),
        (KeepsOneUnderWay, "stages_run_over_it"),
        (PadsWhatIsShort, "another_size_closes_it"),
        (SharesLargeBuffers, "memory_is_its_own"),
        (StartsWhenWaitedFor, "starts_wait_in_any_order"),
        (CallsEachRankAHost, "has_a_place"),
        (FillsPieces, "starts_wait_in_any_order"),
    ],
)
def test_broken_communicator_is_caught_by_its_law(broken, law):
    told = {}

    def rank_main(comm):
        try:
            check_communicator(broken(comm), failures=True)
        except ContractError as error:
            told[comm.rank] = str(error)
            raise

    with pytest.raises((ContractError, CommunicatorError)):
        run_local(3, rank_main, timeout=LONG)
    assert any(f"- {law}: " in text and broken.__name__ in text for text in told.values()), told


@pytest.mark.parametrize("correct", [Wrapped, ReturnsReadOnly])
def test_a_correct_communicator_passes(correct):
    run_local(3, lambda comm: check_communicator(correct(comm), failures=True), timeout=LONG)


@pytest.mark.parametrize("correct", [Wrapped, LeavesOwnersToQcomp, lambda comm: comm])
def test_a_communicator_that_compares_owners_passes(correct):
    run_local(3, lambda comm: check_communicator(correct(comm), owners=True), timeout=LONG)


def test_a_communicator_that_only_claims_to_compare_owners_is_caught_on_all_ranks():
    def rank_main(comm):
        with pytest.raises(
            ContractError, match=f"other_owners_are_a_mismatch: .* rank {comm.rank} raises nothing"
        ):
            check_communicator(ClaimsToCompareOwners(comm), owners=True)

    run_local(3, rank_main, timeout=LONG)


def test_an_object_that_is_not_a_communicator_is_refused():
    with pytest.raises(TypeError, match="comm is 3; expected a communicator, but it lacks rank, size"):
        check_communicator(3)
    alone = LocalCommunicator.alone()
    check_communicator(alone)
    with pytest.raises(ValueError, match="failures and owners are True; expected only one of them"):
        check_communicator(alone, failures=True, owners=True)
