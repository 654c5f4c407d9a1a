"""Facts that hold bit for bit across the ranks of a job, and faults that break them."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key
from qcomp.comm import run_local

SHAPES = [(70,), (6, 11)]
OPTIMIZERS = {
    "adam": qcomp.Adam(learning_rate=0.01),
    "1-bit adam": qcomp.OneBitAdam(learning_rate=0.01, freeze=2, exact=None, compressor=qcomp.ScaledSign(16)),
    "qadam": qcomp.QAdam(learning_rate=0.01, freeze=2, exact=None, variance_steps=None),
    "sgd with qsgd": qcomp.CompressedSGD(learning_rate=0.01, exact=None, compressor=qcomp.QSGD(7, 16)),
    "sgd with 1-bit sgd": qcomp.CompressedSGD(learning_rate=0.01, exact=None, compressor=qcomp.OneBitSGD()),
    "sgd with top-k": qcomp.CompressedSGD(learning_rate=0.01, exact=None, compressor=qcomp.TopK(3, 16)),
    "sgd with random-k": qcomp.CompressedSGD(
        learning_rate=0.01, exact=None, compressor=qcomp.Scaled(qcomp.RandK(4, 16))
    ),
    "sgd by all-gather": qcomp.CompressedSGD(
        learning_rate=0.01,
        exact=None,
        compressor=qcomp.ScaledSign(16),
        averaging=qcomp.Averaging(topology="all_gather"),
    ),
}


def values(rank: int, step: int, dtype=np.float32) -> list:
    rng = np.random.default_rng([11, rank, step])
    return [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]


def held(arrays) -> bytes:
    return b"".join(np.asarray(a).tobytes() for a in arrays)


def train(opt, size: int, *, steps: int = 5, data: Callable = values) -> list[list[str]]:
    """Return, for each rank, the digests of the parameters after each step."""

    def rank_main(comm):
        params, digests = values(99, 0), []
        state = opt.init(params, comm)
        for step in range(steps):
            params, state = opt.step(params, data(comm.rank, step), state, comm)
            digests.append(hashlib.sha256(held(params)).hexdigest())
        return digests

    return run_local(size, rank_main, timeout=30)


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestEveryOptimizer:
    @pytest.mark.quick_cases(4)
    def test_all_ranks_hold_the_same_after_every_step(self, name):
        first, *others = train(OPTIMIZERS[name], 3)
        assert len(set(first)) == len(first)
        assert all(digests == first for digests in others)

    @pytest.mark.quick_cases(3)
    def test_a_replay_is_the_same(self, name):
        assert train(OPTIMIZERS[name], 2) == train(OPTIMIZERS[name], 2)

    @pytest.mark.quick_cases(5)
    @pytest.mark.filterwarnings("ignore:all . ranks have the same gradients")
    def test_two_ranks_with_the_same_data_train_like_one(self, name):
        """(x + x) / 2 is x, and both ranks send the same, except that each rank has draws of its own."""
        opt = OPTIMIZERS[name]
        two, one = (train(opt, size, data=lambda _, step: values(0, step)) for size in (2, 1))
        draws = getattr(opt, "compressor", qcomp.Identity()).traits.random
        assert (two[0] == one[0]) != draws


class TestReferences:
    @pytest.mark.parametrize("size", [1, 3])
    def test_without_loss_it_is_the_plain_optimizer(self, size):
        """Bit for bit, against a reference written out by hand, on one rank and with sums in rank order on three."""
        opt = qcomp.CompressedSGD(
            learning_rate=0.05,
            momentum=0.9,
            weight_decay=0.1,
            nesterov=True,
            exact=None,
            compressor=qcomp.Identity(),
        )
        params, momenta, digests = values(99, 0), [np.zeros(s, np.float32) for s in SHAPES], []
        for step in range(5):
            of_ranks = [values(rank, step) for rank in range(size)]
            for i, p in enumerate(params):
                total = of_ranks[0][i]
                for other in of_ranks[1:]:
                    total = total + other[i]
                d = total / np.float32(size) + np.float32(0.1) * p
                momenta[i] = np.float32(0.9) * momenta[i] + d
                params[i] = p - np.float32(0.05) * (d + np.float32(0.9) * momenta[i])
            digests.append(hashlib.sha256(held(params)).hexdigest())
        assert train(opt, size) == [digests] * size

    @pytest.mark.quick_cases(7)
    @pytest.mark.parametrize("c", [qcomp.ScaledSign(16), qcomp.MinMaxUInt8(16), qcomp.TopK(3, 16)], ids=str)
    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_results_do_not_depend_on_the_assignment_of_servers(self, lockstep, c, size):
        """One server for everything, with one residual, gives the results of sharded servers."""
        mean = CompressedMean(c)
        states = [mean.zeros(values(0, 0), rank=rank, size=size) for rank in range(size)]
        worker = [[np.zeros(t.size, np.float32) for t in values(0, 0)] for _ in range(size)]
        server = [np.zeros(t.size, np.float32) for t in values(0, 0)]
        for step in range(3):
            results = lockstep([mean.stages(values(rank, step), s) for rank, s in enumerate(states)])
            states = [state for _, state in results]
            for i in range(len(SHAPES)):
                total = 0
                for rank in range(size):
                    g = values(rank, step)[i].reshape(-1)
                    payload, worker[rank][i] = qcomp.feedback.compress(c, g, worker[rank][i])
                    total = total + c.decompress(payload, like=g)
                payload, server[i] = qcomp.feedback.compress(c, total / np.float32(size), server[i])
                expected = c.decompress(payload, like=total)
                assert all(means[i].tobytes() == expected.tobytes() for means, _ in results)


class TestFaults:
    """The comparison of digests finds each of these faults; all of them have occurred in other libraries."""

    MEAN = CompressedMean(qcomp.ScaledSign(16), topology="all_gather")

    def digests(self, lockstep, faulty: Callable | None, *, mean=None, steps: int = 3) -> set[bytes]:
        """Return the distinct means that the three ranks hold after some steps; a fault is put into the last rank."""
        mean = mean or self.MEAN
        states = [mean.zeros(values(0, 0), rank=rank, size=3) for rank in range(3)]
        held_by: list[bytes] = [b""] * 3
        for step in range(steps):
            stages = [mean.stages(values(rank, step), s, key=Key(step=step)) for rank, s in enumerate(states)]
            if faulty is not None:
                stages[2] = faulty(stages[2], step)
            results = lockstep(stages)
            states = [state for _, state in results]
            held_by = [
                held + b"".join(m.tobytes() for m in means)
                for held, (means, _) in zip(held_by, results, strict=True)
            ]
        return set(held_by)

    def test_without_a_fault_all_digests_agree(self, lockstep):
        assert len(self.digests(lockstep, None)) == 1

    def test_a_sum_in_the_order_of_arrival(self, lockstep):
        def reversed_order(stages, step):
            request = next(stages)
            while True:
                arrived = yield request
                try:
                    request = stages.send(arrived[::-1])
                except StopIteration as stop:
                    return stop.value

        assert len(self.digests(lockstep, reversed_order)) == 2

    def test_a_rank_that_uses_its_own_values_instead_of_what_it_sent(self, lockstep):
        def own_contribution(stages, step):
            means, state = yield from stages
            sent = [
                qcomp.ScaledSign(16).decompress(qcomp.ScaledSign(16).compress(g), like=g)
                for g in values(2, step)
            ]
            return [m + (g - s) / 3 for m, g, s in zip(means, values(2, step), sent, strict=True)], state

        assert len(self.digests(lockstep, own_contribution, steps=1)) == 2

    def test_a_rank_that_skips_a_step_on_its_own(self, lockstep):
        def skips(stages, step):
            means, state = yield from stages
            return ([m * 0 for m in means] if step == 1 else means), state

        assert len(self.digests(lockstep, skips)) == 2

    def test_a_rank_that_decodes_in_another_precision(self, lockstep):
        def rounds(stages, step):
            means, state = yield from stages
            return [m.astype(np.float16).astype(np.float32) for m in means], state

        assert len(self.digests(lockstep, rounds)) == 2


class TestOrderOfRanks:
    """Exact sums do not depend on which rank has which data; only these do not."""

    def means(self, lockstep, c, order, make) -> bytes:
        mean = CompressedMean(c, feedback=False)
        states = [mean.zeros(values(0, 0), rank=rank, size=4) for rank in range(4)]
        results = lockstep([mean.stages(make(of), s) for of, s in zip(order, states, strict=True)])
        return held(results[0][0])

    def test_integers_add_up_in_any_order(self, lockstep):
        def integers(rank):
            return [np.round(8 * v) for v in values(rank, 0)]

        for c in (qcomp.Identity(), qcomp.TopK(16, 16)):
            assert self.means(lockstep, c, (0, 1, 2, 3), integers) == self.means(
                lockstep, c, (2, 0, 3, 1), integers
            )

    def test_float_sums_depend_on_the_order(self, lockstep):
        def numbers(rank):
            return values(rank, 0)

        c = qcomp.Identity()
        assert self.means(lockstep, c, (0, 1, 2, 3), numbers) != self.means(
            lockstep, c, (2, 0, 3, 1), numbers
        )

    def test_seeds_and_steps_change_the_draws(self, lockstep):
        mean = CompressedMean(qcomp.QSGD(3, 16), feedback=False)

        def run(key):
            states = [mean.zeros(values(0, 0), rank=rank, size=2) for rank in range(2)]
            stages = [mean.stages(values(rank, 0), s, key=key) for rank, s in enumerate(states)]
            return held(lockstep(stages)[0][0])

        keys = [Key(), Key(seed=1), Key(step=1), Key(tensor=1)]
        assert len({run(key) for key in keys}) == 4
        assert run(Key(seed=1)) == run(Key(seed=1))
