"""Keyed checksums: which changes in transit are possible, and which ranks detect them."""

import hashlib
import re
from functools import partial

import numpy as np
import pytest

import qcomp
from qcomp.comm import AuthenticatedCommunicator, authenticated
from qcomp.comm.base import Communicator
from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import AllGather, AllToAll
from qcomp.testing import check_communicator

LONG = 30.0
KEY = bytes(range(16))
FIRST = 2
"""The number of the caller's first exchange among those of the inner communicator."""


def zeros(n):
    return np.zeros(n, dtype=np.uint8)


class Wire:
    """A communicator over another one, with an attacker between the ranks who may replace received messages.

    ``arriving(wire, exchange, received)`` changes the list of messages that arrive here. ``log[exchange][rank]`` has
    what that rank gave the wire for each rank.
    """

    def __init__(self, comm, arriving=lambda wire, exchange, received: None, log=None):
        self.comm, self.arriving = comm, arriving
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host
        self.log = {} if log is None else log
        self.count = 0

    @property
    def bytes_sent(self):
        return self.comm.bytes_sent

    def all_to_all(self, send, receive):
        exchange, self.count = self.count, self.count + 1
        self.log.setdefault(exchange, {})[self.rank] = [x.copy() for x in send]
        received = self.comm.all_to_all(send, receive)
        self.arriving(self, exchange, received)
        return received

    def all_gather(self, send, receive):
        return self.all_to_all([send] * self.size, receive)


def converse(comm):
    """Send the same three zeros in every exchange, so that only the tags differ."""
    for _ in range(2):
        comm.all_to_all([zeros(3)] * comm.size, [3] * comm.size)
    for _ in range(2):
        comm.all_gather(zeros(3), [3] * comm.size)


def attacked(arriving, *, victim=1, talk=converse, size=3, log=None, kind=AuthenticatedCommunicator):
    """Return the error of the victim while an attacker is on its wire, None if it detects nothing."""
    log = {} if log is None else log

    def rank_main(comm):
        wire = Wire(comm, arriving if comm.rank == victim else lambda *_: None, log)
        try:
            talk(kind(wire, KEY))
        except CommunicatorError as error:
            if "finished without calling it" not in str(error):  # then the victim has left
                return error
        return None

    errors = run_local(size, rank_main, timeout=LONG)
    assert all(error is None for rank, error in enumerate(errors) if rank != victim)
    return errors[victim]


class TestLaws:
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_it_keeps_the_laws_of_communicators(self, n):
        run_local(
            n,
            lambda comm: check_communicator(AuthenticatedCommunicator(comm, KEY), failures=True),
            timeout=LONG,
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["array_api_compat.torch", "array_api_strict", "jax.numpy"])
    def test_it_carries_arrays_of_any_library(self, name):
        xp = pytest.importorskip(name)
        run_local(2, lambda comm: check_communicator(AuthenticatedCommunicator(comm, KEY), xp), timeout=LONG)

    def test_it_wraps_communicators_without_start(self):
        run_local(
            2, lambda comm: check_communicator(AuthenticatedCommunicator(Wire(comm), KEY)), timeout=LONG
        )

    def test_bytes_sent_includes_the_tags(self):
        def rank_main(comm):
            comm = AuthenticatedCommunicator(comm, KEY)
            before = comm.bytes_sent
            comm.all_gather(zeros(5), [5] * 3)
            return before, comm.bytes_sent - before

        assert run_local(3, rank_main, timeout=LONG) == [(2 * (16 + 16), 2 * (5 + 16))] * 3

    def test_rank_size_and_host_are_those_of_the_inner_communicator(self):
        def rank_main(comm):
            above = AuthenticatedCommunicator(comm, KEY)
            assert isinstance(above, Communicator)
            return above.rank, above.size, above.host

        assert run_local(2, rank_main, hosts=["a", "b"], timeout=LONG) == [(0, 2, "a"), (1, 2, "b")]

    def test_training_has_the_same_bits(self):
        averaging = qcomp.Averaging(topology="hierarchical")
        opt = qcomp.OneBitAdam(
            learning_rate=0.05, betas=(0.9, 0.9), freeze=4, exact=None, averaging=averaging
        )

        def train(wrap, comm):
            comm = wrap(comm)
            params = np.zeros(300, dtype=np.float32)
            state = opt.init(params, comm)
            for _ in range(8):
                params, state = opt.step(params, params - 1 - comm.rank, state, comm)
            return params

        plain, checked = (
            run_local(4, partial(train, wrap), hosts="aabb", timeout=LONG)
            for wrap in (lambda comm: comm, lambda comm: AuthenticatedCommunicator(comm, KEY))
        )
        assert plain[0].any()
        for one, other in zip(plain, checked, strict=True):
            assert one.tobytes() == other.tobytes()


class TestKeys:
    @pytest.mark.parametrize("n", [0, 1, 15, 65])
    def test_too_short_and_too_long_ones_are_refused(self, n):
        with pytest.raises(ValueError, match=f"^key must have 16 to 64 bytes, got {n}$"):
            AuthenticatedCommunicator(LocalCommunicator.alone(), bytes(n))

    @pytest.mark.slow
    @pytest.mark.parametrize("n", [16, 64])
    def test_the_shortest_and_the_longest_serve(self, n):
        run_local(2, lambda comm: check_communicator(AuthenticatedCommunicator(comm, bytes(n))), timeout=LONG)

    def test_text_is_refused(self):
        with pytest.raises(TypeError, match=r"^key must be bytes, got str$"):
            AuthenticatedCommunicator(LocalCommunicator.alone(), "a password of some length")

    def test_the_key_is_not_shown(self):
        key = b"sixteen or more bytes"
        comm = AuthenticatedCommunicator(LocalCommunicator.alone(), key)
        assert repr(comm) == "AuthenticatedCommunicator(LocalCommunicator(rank=0, size=1))"
        assert key not in vars(comm).values()

    def test_another_key_on_one_rank_is_an_error_on_all(self):
        def rank_main(comm):
            with pytest.raises(CommunicatorError) as caught:
                AuthenticatedCommunicator(comm, KEY[::-1] if comm.rank == 1 else KEY)
            return re.search(r"message from (ranks? [\d and]*\d) fails its check", str(caught.value))[1]

        assert run_local(3, rank_main, timeout=LONG) == ["rank 1", "ranks 0 and 2", "rank 1"]


class Flip:
    """Flip a bit of the message of rank 0."""

    def __init__(self, exchange, bit):
        self.exchange, self.bit = exchange, bit

    def __call__(self, wire, exchange, received):
        if exchange == self.exchange:
            received[0][self.bit // 8] ^= 1 << self.bit % 8


def replay(wire, exchange, received):
    """Deliver rank 0's message of the previous exchange again."""
    if exchange == FIRST + 1:
        received[0] = wire.log[FIRST][0][wire.rank]


def swap_senders(wire, exchange, received):
    """Swap the messages of ranks 0 and 2."""
    if exchange == FIRST:
        received[0], received[2] = received[2], received[0]


def redirect(wire, exchange, received):
    """Deliver what rank 0 sent to rank 2."""
    if exchange == FIRST:
        received[0] = wire.log[FIRST][0][2]


def reflect(wire, exchange, received):
    """Deliver this rank's own message to rank 0 in place of that from rank 0."""
    if exchange == FIRST:
        received[0] = wire.log[FIRST][1][0]


def invent(wire, exchange, received):
    """Deliver zeros with a tag of zeros."""
    if exchange == FIRST:
        received[0] = zeros(19)


def call_another_verb(comm):
    """Let ranks call different verbs, and hide that on the wire."""
    if comm.rank == 1:
        comm.all_gather(zeros(3), [3] * 3)
    else:
        comm.all_to_all([zeros(3)] * 3, [3] * 3)


class TestAttacks:
    @pytest.mark.parametrize("exchange", [FIRST, FIRST + 2], ids=["all_to_all", "all_gather"])
    def test_every_flipped_bit_is_noticed(self, exchange):
        for bit in range(8 * (3 + 16)):
            error = attacked(Flip(exchange, bit), size=2)
            assert "a message from rank 0 fails its check" in str(error), bit

    @pytest.mark.parametrize("bit", [0, 127])
    def test_a_flipped_bit_of_the_random_numbers_at_the_start_is_noticed(self, bit):
        assert attacked_at_start(Flip(0, bit))

    @pytest.mark.parametrize("attack", [replay, swap_senders, redirect, reflect, invent])
    def test_messages_meant_for_another_place_are_noticed(self, attack):
        assert "rank" in str(attacked(attack))

    def test_without_an_attack_nothing_is_noticed(self):
        assert attacked(lambda *_: None) is None

    def test_swapped_exchanges_are_noticed(self):
        """Two exchanges under way at once are swapped on the wire."""

        class Swaps(Wire):
            held = None

            def start(self, request):
                mine = self.comm.start(request)
                wire = self

                class Other:
                    def wait(self):
                        first, second = (pending.wait() for pending in wire.started)
                        return second if mine is wire.started[0] else first

                self.started = [*getattr(self, "started", []), mine]
                return Other() if wire.rank == 1 else mine

        def rank_main(comm):
            comm = AuthenticatedCommunicator(Swaps(comm), KEY)
            pending = [comm.start(AllGather(zeros(3), (3, 3))) for _ in range(2)]
            if comm.rank == 0:
                return [each.wait() for each in pending] and None
            for each in pending:
                with pytest.raises(
                    CommunicatorError, match=r"all_gather: .*a message from ranks 0 and 1 fails"
                ):
                    each.wait()
            return None

        run_local(2, rank_main, timeout=LONG)

    def test_verbs_are_not_mixed_up(self):
        found = []

        def rank_main(comm):
            above = AuthenticatedCommunicator(Wire(comm), KEY)
            with pytest.raises(CommunicatorError, match="fails its check") as caught:
                call_another_verb(above)
            found.append(str(caught.value))

        run_local(3, rank_main, timeout=LONG)
        assert len(found) == 3

    def test_messages_replayed_from_an_earlier_job_are_noticed(self):
        """An attacker replays all messages of rank 0 from then; their numbers, verbs, ranks and key are the same."""
        log = {}
        assert attacked(lambda *_: None, log=log) is None
        earlier = {exchange: ranks[0] for exchange, ranks in log.items()}

        def play(wire, exchange, received):
            received[0] = earlier[exchange][wire.rank]

        assert attacked_at_start(play)

    @pytest.mark.parametrize("verb", ["all_to_all", "all_gather"])
    def test_a_failed_check_closes_the_communicator(self, verb):
        def rank_main(comm):
            comm = AuthenticatedCommunicator(
                Wire(comm, Flip(FIRST, 3) if comm.rank else lambda *_: None), KEY
            )
            request = (
                AllGather(zeros(3), (3, 3))
                if verb == "all_gather"
                else AllToAll((zeros(3), zeros(3)), (3, 3))
            )
            if comm.rank == 0:
                return comm.start(request).wait() and None
            with pytest.raises(CommunicatorError, match="rank 0 fails its check"):
                comm.start(request).wait()
            with pytest.raises(
                CommunicatorError, match=f"^{verb}: this communicator is closed: .* fails its check"
            ):
                comm.start(request)
            with pytest.raises(CommunicatorError, match=r"^all_gather: this communicator is closed"):
                comm.all_gather(zeros(1), [1, 1])
            return None

        run_local(2, rank_main, timeout=LONG)

    def test_the_failure_frees_the_others(self):
        def rank_main(comm):
            comm = AuthenticatedCommunicator(
                Wire(comm, Flip(FIRST, 3) if comm.rank == 1 else lambda *_: None), KEY
            )
            for _ in range(3):
                comm.all_gather(zeros(3), [3] * 3)

        with pytest.raises(CommunicatorError, match="message from rank 0 fails its check") as caught:
            run_local(3, rank_main, timeout=LONG)
        assert caught.value.__notes__ == ["(raised on rank 1 of 3)"]


def attacked_at_start(play, kind=AuthenticatedCommunicator):
    """Return whether rank 1 detects, when it starts, that its wire replaces messages of rank 0."""
    noticed = []

    def rank_main(comm):
        try:
            kind(Wire(comm, play if comm.rank == 1 else lambda *_: None), KEY)
        except CommunicatorError as error:
            noticed.append(comm.rank if "fails its check" in str(error) else None)

    run_local(3, rank_main, timeout=LONG)
    return 1 in noticed


class NoNumber(AuthenticatedCommunicator):
    def _tag(self, verb, number, *rest):
        return super()._tag(verb, 0, *rest)


class NoSender(AuthenticatedCommunicator):
    def _tag(self, verb, number, sender, *rest):
        return super()._tag(verb, number, 0, *rest)


class NoReceiver(AuthenticatedCommunicator):
    def _tag(self, verb, number, sender, receiver, content):
        return super()._tag(verb, number, sender, 0, content)


class NoVerb(AuthenticatedCommunicator):
    def _tag(self, verb, *rest):
        return super()._tag("all_gather", *rest)


class NoContent(AuthenticatedCommunicator):
    def _tag(self, *rest):
        return super()._tag(*rest[:-1], zeros(0))


class NoRanks(AuthenticatedCommunicator):
    def _tag(self, verb, number, sender, receiver, content):
        return super()._tag(verb, number, 0, 0, content)


class TestBrokenOnesAreSeen:
    """Each attack above succeeds against a version without the measure that stops it."""

    @pytest.mark.parametrize(
        ("kind", "attack"),
        [
            (NoNumber, replay),
            (NoSender, swap_senders),
            (NoReceiver, redirect),
            (NoRanks, reflect),
            (NoContent, Flip(FIRST, 3)),
        ],
    )
    def test_tags_that_omit_a_fact(self, kind, attack):
        assert attacked(attack, kind=kind) is None

    def test_tags_without_the_verb(self):
        run_local(3, lambda comm: call_another_verb(NoVerb(Wire(comm), KEY)), timeout=LONG)

    def test_receivers_that_do_not_check(self, monkeypatch):
        monkeypatch.setattr(authenticated.hmac, "compare_digest", lambda one, other: True)
        assert attacked(Flip(FIRST, 3)) is None

    def test_receivers_that_compare_only_a_prefix(self, monkeypatch):
        monkeypatch.setattr(authenticated.hmac, "compare_digest", lambda one, other: one[:8] == other[:8])
        unnoticed = [bit for bit in range(8 * 19) if attacked(Flip(FIRST, bit), size=2) is None]
        assert unnoticed == list(range(8 * (3 + 8), 8 * 19))

    def test_jobs_without_random_numbers(self, monkeypatch):
        monkeypatch.setattr(authenticated.secrets, "token_bytes", bytes)
        log = {}
        assert attacked(lambda *_: None, log=log) is None

        def play(wire, exchange, received):
            received[0] = log[exchange][0][wire.rank]

        assert not attacked_at_start(play)


def test_tags_are_computed_as_documented():
    """BLAKE2b of the header and the bytes, under a key derived from the key and the random numbers."""
    log = {}
    assert attacked(lambda *_: None, log=log) is None
    nonces = b"".join(log[0][rank][0].tobytes() for rank in range(3))
    key = hashlib.blake2b(nonces, key=KEY, digest_size=32).digest()
    for exchange, text in (
        (FIRST, "all_to_all 1 from 2 to 0\n"),
        (FIRST + 2, "all_gather 3 from 2 to all\n"),
    ):
        tag = hashlib.blake2b(text.encode() + bytes(3), key=key, digest_size=16).digest()
        assert log[exchange][2][0].tobytes() == bytes(3) + tag
