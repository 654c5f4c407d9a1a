"""Large means in rounds: the same bits as in one message, and no more messages than rounds."""

import random

import numpy as np
import pytest

import qcomp
from qcomp.core.kernels import Blend
from qcomp.core.mean import rounds
from qcomp.core.mean.chunks import cut
from qcomp.core.mean.compressed_mean import CompressedMean, Terms
from qcomp.core.mean.rounds import count_rounds, cut_rounds
from qcomp.core.mean.stages import AllGather, drive, pipeline
from qcomp.core.mean.topologies.registry import names, topology
from qcomp.core.numeric.arrays import host_bytes
from tests.optimizers.every import COMPRESSING, EVERY

SHAPES = [(11, 3), (8, 8), (0, 4), (13, 10), (5, 5), (1, 3), (257, 1), (8, 5), (8, 9)]
IN_ROUNDS = [name for name in names() if topology(name).allows_rounds]
BYTES = 128
"""The shortest round in these tests has 32 float32."""


@pytest.fixture
def small_rounds(monkeypatch):
    monkeypatch.setattr(rounds, "ROUND_BYTES", BYTES)


# --- the contents of a round -----------------------------------------------------------------------------------------


def test_rounds_hold_every_bucket_once_in_order_with_its_number():
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.choice([0, 1, 7, 50, 100, 1000]) for _ in range(draw.randint(1, 8))]
        lengths = [draw.choice([1, 8, 9, 64]) for _ in sizes]
        chunks = cut(sizes, lengths, draw.randint(1, 4))
        found = cut_rounds(chunks, lengths, draw.randint(1, 9))
        for rank, chunk in enumerate(chunks):
            in_order = sorted(
                (s for of_round in found for s in of_round[rank]), key=lambda s: (s.tensor, s.start)
            )
            rest = {s.tensor: s for s in chunk}
            for s in in_order:
                whole = rest[s.tensor]
                assert s.size > 0
                assert (s.start, s.bucket) == (whole.start, whole.bucket)
                assert (s.stop - whole.start) % lengths[s.tensor] == 0 or s.stop == whole.stop
                number = whole.bucket + -(-s.size // lengths[s.tensor])
                rest[s.tensor] = whole._replace(start=s.stop, bucket=number)
            assert all(s.size == 0 for s in rest.values())


@pytest.mark.parametrize(
    ("elements", "count"), [(0, 1), (63, 1), (64, 2), (191, 2), (192, 3), (640, 10), (703, 10), (704, 11)]
)
def test_the_number_of_rounds_grows_with_the_size(small_rounds, elements, count):
    x = np.zeros(elements, dtype=np.float32)
    assert (
        count_rounds([x.dtype.name], [x.size]) == count_rounds([x.dtype.name] * 2, [5, x.size - 5]) == count
    )
    assert count_rounds([x.dtype.name, "float64"], [x.size, elements]) == 1


def test_rounds_have_the_same_length_up_to_a_bucket():
    chunks = cut([5000, 3, 0, 700, 9000], [8, 16, 8, 32, 8], 3)
    for count in (2, 5, 16):
        found = cut_rounds(chunks, [8, 16, 8, 32, 8], count)
        for rank, chunk in enumerate(chunks):
            even = sum(s.size for s in chunk) / count
            # Each of its two ends moves by less than the largest bucket, and so does that of the tail of a tensor.
            assert all(abs(sum(s.size for s in of_round[rank]) - even) <= 2 * 32 for of_round in found)


# --- the same bits ---------------------------------------------------------------------------------------------------

COMPRESSORS = {
    "sign": qcomp.ScaledSign(bucket_size=8),
    "qsgd": qcomp.QSGD(levels=7, bucket_size=16),
    "elias": qcomp.QSGD(levels=7, bucket_size=16, coding="elias"),
    "onebit_sgd": qcomp.OneBitSGD(),
    "minmax": qcomp.MinMaxUInt8(bucket_size=32),
    "topk": qcomp.TopK(k=2, bucket_size=8),
    "scaled": qcomp.Scaled(qcomp.RandK(k=2, bucket_size=8)),
    "identity": qcomp.Identity(),
}
SMALL: dict = {"exact": qcomp.ExactBelow(30), "freeze": 2}
POLICY = qcomp.ByName({"[13]": COMPRESSORS["topk"], "*": COMPRESSORS["sign"]})
OPTIMIZERS = {
    **{name: EVERY[name].make(**SMALL) for name in COMPRESSING if EVERY[name].opt.mean.topology != "auto"},
    "Adam": EVERY["Adam"].opt,
    "1-bit, hierarchical": EVERY["1-bit"].make(**SMALL, averaging=qcomp.Averaging(topology="hierarchical")),
    "QAdam, clipped": EVERY["QAdam"].make(**SMALL, clip_norm=1.0),
    "SGD, coded": EVERY["SGD"].make(
        **SMALL, compressor=COMPRESSORS["elias"], averaging=qcomp.Averaging(feedback=False)
    ),
    "SGD, by name": EVERY["SGD"].make(**SMALL, compressor=COMPRESSORS["sign"], compressors=POLICY),
}
SGD = EVERY["SGD"].make(**SMALL, compressor=COMPRESSORS["sign"])


def gradient(rank, step, shapes=SHAPES):
    rng = np.random.default_rng([3, rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def leaves(value):
    """Return every array and number within a value, as bytes."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [np.asarray(value).tobytes() if hasattr(value, "shape") else repr(value).encode()]


def train(opt, n, steps=4):
    def rank_main(comm):
        params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
        state = opt.init(params, comm)
        for step in range(steps):
            params, state = opt.step(params, gradient(comm.rank, step), state, comm)
        return leaves([params, state])

    return qcomp.comm.run_local(n, rank_main)


@pytest.mark.quick_cases(2)
@pytest.mark.filterwarnings("ignore:the variance of OneBitAdam no longer fits")
@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2)), 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_rounds_has_the_bits_of_a_step_in_one_message(name, n, monkeypatch):
    fused = train(OPTIMIZERS[name], n)
    monkeypatch.setattr(rounds, "ROUND_BYTES", BYTES)
    assert train(OPTIMIZERS[name], n) == fused


def means_of(mean, n, runner, *, steps=2, shapes=SHAPES, library=None):
    put = (lambda x: x) if library is None else library.array

    def rank_main(comm):
        xs = [[put(x) for x in gradient(comm.rank, step, shapes)] for step in range(steps)]
        state = mean.init(xs[0], comm)
        found = []
        for step, x in enumerate(xs):
            means, state = runner(mean, x, state, qcomp.Key(seed=5, step=step), comm)
            found += [host_bytes(m) for m in means]
        return found + [host_bytes(r) for r in (*state.worker, *state.server)]

    return qcomp.comm.run_local(n, rank_main)


def in_rounds(mean, x, state, key, comm, **how):
    running = mean.begin(x, state, Terms(key, **how))
    assert len(running.rounds) > 3
    return running.finish(drive(pipeline(running.rounds), comm))


def at_once(mean, x, state, key, comm, **how):
    running = mean.begin(x, state, Terms(key, at_once=True, **how))
    assert len(running.rounds) == 1
    return running.finish(drive(pipeline(running.rounds), comm))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("n", "shapes"),
    [pytest.param(2, [(100, 15)], id="2", marks=pytest.mark.exhaustive), pytest.param(3, SHAPES, id="3")],
)
@pytest.mark.parametrize("topology", IN_ROUNDS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_has_the_same_draws_and_residuals_in_rounds(name, topology, n, shapes, small_rounds):
    for feedback in (True, False):
        if feedback and name in ("qsgd", "elias"):
            continue  # not a contraction
        mean = CompressedMean(COMPRESSORS[name], topology=topology, feedback=feedback)
        assert means_of(mean, n, in_rounds, shapes=shapes) == means_of(mean, n, at_once, shapes=shapes)


def test_every_library_gives_the_same(library, small_rounds):
    shapes = [(256,), (0,)]  # the rounds have the same length, because JAX compiles for each length
    mean = CompressedMean(qcomp.ScaledSign(bucket_size=8))
    found = means_of(mean, 2, in_rounds, steps=2, shapes=shapes, library=library)
    assert found == means_of(mean, 2, at_once, steps=2, shapes=shapes)


@pytest.mark.parametrize("topology", IN_ROUNDS)
def test_rounds_write_into_the_buffers_of_the_whole_mean(topology, small_rounds):
    """The residual is in the buffer of x, the mean in one buffer: nothing is assembled from copies."""
    mean = CompressedMean(qcomp.ScaledSign(bucket_size=8), topology=topology)

    def rank_main(comm):
        found = []
        for donate in (False, True):
            x = gradient(comm.rank, 0, [(700,)])[0]
            before = x.copy()
            state = mean.init(x, comm)
            (result,), after = in_rounds(mean, [x], state, None, comm, donate=donate)
            assert np.shares_memory(after.worker[0], x) == donate
            assert donate or x.tobytes() == before.tobytes()
            assert all(
                r.base is None or r.base.size == r.size for r in (result, *after.worker, *after.server)
            )
            assert not np.shares_memory(result, x)
            assert all((r == 0).all() for r in (*state.worker, *state.server))
            found.append([result.tobytes(), *(r.tobytes() for r in (*after.worker, *after.server))])
        return found[0] == found[1]

    assert all(qcomp.comm.run_local(2, rank_main))


def test_a_mean_that_may_overwrite_its_values_has_one_round(small_rounds):
    mean = CompressedMean(qcomp.ScaledSign(bucket_size=8))
    x = gradient(0, 0, [(700,)])[0]
    state = mean.zeros([x], rank=0, size=1)
    assert len(mean.begin([x], state, Terms(overwrite=True)).rounds) == 1


def test_calling_a_mean_also_uses_rounds(small_rounds):
    mean = CompressedMean(qcomp.ScaledSign(bucket_size=8))

    def called(mean, x, state, key, comm):
        return mean(x, state, comm, key=key)

    assert means_of(mean, 3, called) == means_of(mean, 3, at_once)
    found = []
    x = gradient(0, 0)
    stages = mean.stages(x, mean.zeros(x, rank=0, size=1))
    request = next(stages)
    while len(found) < 4:
        found.append(request.later)
        request = stages.send([request.send if isinstance(request, AllGather) else request.send[0]])
    assert all(found)


def test_half_precision_is_cut_into_rounds_like_float32(small_rounds):
    mean = CompressedMean(qcomp.ScaledSign(bucket_size=8))

    def halves(runner):
        def rank_main(comm):
            x = [g.astype(np.float16) for g in gradient(comm.rank, 0)]
            means, state = runner(mean, x, mean.init(x, comm), None, comm)
            return [m.tobytes() for m in means] + [r.tobytes() for r in (*state.worker, *state.server)]

        return qcomp.comm.run_local(2, rank_main)

    assert halves(in_rounds) == halves(at_once)


def test_momenta_are_blended_in_the_rounds(small_rounds):
    mean = CompressedMean(qcomp.ScaledSign(bucket_size=8))

    def blended(runner):
        def rank_main(comm):
            x = gradient(comm.rank, 0)
            blends = [Blend(m, 0.9, 0.5) for m in gradient(7, 0)]
            means, state = runner(mean, x, mean.init(x, comm), None, comm, blends=blends)
            return [m.tobytes() for m in means] + [r.tobytes() for r in (*state.worker, *state.server)]

        return qcomp.comm.run_local(2, rank_main)

    assert blended(in_rounds) == blended(at_once)


@pytest.mark.parametrize("fault", ["numbers", "residuals", "order"])
def test_faults_in_rounds_are_noticed(fault, small_rounds, monkeypatch):
    compressor = COMPRESSORS["qsgd" if fault == "numbers" else "sign"]
    mean = CompressedMean(compressor, feedback=fault != "numbers")
    expected = means_of(mean, 2, at_once)
    assert means_of(mean, 2, in_rounds) == expected
    if fault == "numbers":
        right = rounds.cut_rounds

        def renumbered(chunks, bucket_sizes, count):
            return [
                tuple(tuple(s._replace(bucket=0) for s in chunk) for chunk in of_round)
                for of_round in right(chunks, bucket_sizes, count)
            ]

        monkeypatch.setattr(rounds, "cut_rounds", renumbered)
        rounds.lay_out_rounds.cache_clear()
    if fault == "residuals":
        monkeypatch.setattr(
            rounds._Wholes,
            "parts",
            lambda self, places: tuple(0 * p for p in rounds._parts(self._arrays, places)),
        )
    if fault == "order":
        joined = rounds._Wholes.joined
        monkeypatch.setattr(
            rounds._Wholes, "joined", lambda self, results: joined(self, [*results[1:], results[0]])
        )
    try:
        found = means_of(mean, 2, in_rounds)
    except Exception:  # parts that do not fit each other
        found = None
    assert found != expected


# --- messages --------------------------------------------------------------------------------------------------------


def requests_of(opt):
    """Return the exchanges that a step requests in a world of one."""
    params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
    state = opt.initial_state(params, tuple(map(str, range(len(params)))), 0, 1)
    stages, found, arrived = opt.stages(params, gradient(0, 0), state), [], None
    while True:
        try:
            request = next(stages) if arrived is None else stages.send(arrived)
        except StopIteration:
            return found
        found.append(request)
        arrived = [request.send if isinstance(request, AllGather) else request.send[0]]


def test_a_small_model_sends_one_message_per_phase():
    opt = SGD
    found = requests_of(opt)
    assert [type(r).__name__ for r in found] == ["AllToAll", "AllGather"]
    assert not any(r.later for r in found)


def test_a_large_model_sends_one_message_per_round_and_phase(small_rounds):
    opt = SGD
    found = requests_of(opt)
    count = len(found) // 2
    compressed = sum(int(np.prod(s)) for s in SHAPES if np.prod(s) >= 30)
    assert count == 4 * compressed // (2 * BYTES) > 3
    assert [type(r).__name__ for r in found] == ["AllToAll"] * count + ["AllGather"] * count
    assert all(r.later for r in found)


def test_rounds_add_only_verdicts_and_padding_to_the_bytes(small_rounds, monkeypatch):
    opt = SGD

    def sent():
        def rank_main(comm):
            params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
            state = opt.init(params, comm)
            before = comm.bytes_sent
            opt.step(params, gradient(comm.rank, 0), state, comm)
            return comm.bytes_sent - before

        return qcomp.comm.run_local(2, rank_main)

    further = len(requests_of(opt)) // 2 - 1
    in_rounds = sent()
    monkeypatch.setattr(rounds, "ROUND_BYTES", 1 << 20)
    for whole, pieces in zip(sent(), in_rounds, strict=True):
        # In each phase 8 bytes of verdict for each further message, and less than 12 of padding for each cut payload.
        assert 2 * 8 * further <= pieces - whole < 2 * (8 + 12) * further


def test_the_first_rounds_also_carry_the_exact_tensors(small_rounds):
    opt = SGD
    params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
    state = opt.initial_state(params, tuple(map(str, range(len(params)))), 0, 1)
    exact, compressed = opt.prepare(gradient(0, 0), state).parts
    counts = [len(p.mean.begin(p.values, p.state, p.terms).rounds) for p in (exact, compressed)]
    assert counts[0] == 1 < counts[1]
    assert len(requests_of(opt)) == 2 * counts[1]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("tensor", [i for i, shape in enumerate(SHAPES) if np.prod(shape)])
def test_a_value_out_of_range_in_any_round_is_an_error_on_all_ranks_and_touches_nothing(tensor, small_rounds):
    opt = SGD

    def rank_main(comm):
        params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
        state = opt.init(params, comm)
        params, state = opt.step(params, gradient(comm.rank, 0), state, comm)
        before = leaves([params, state])
        bad = gradient(comm.rank, 1)
        if comm.rank == 1:
            bad[tensor].flat[-1] = np.nan
        with pytest.raises(qcomp.NonFiniteError, match=f"the gradient of '{tensor}' on rank 1 is not finite"):
            opt.step(params, bad, state, comm)
        untouched = leaves([params, state]) == before
        params, state = opt.step(
            params, gradient(comm.rank, 1), state, comm
        )  # and the communicator is still usable
        return untouched, leaves(params)

    (first, params), (second, others), (third, last) = qcomp.comm.run_local(3, rank_main)
    assert all((first, second, third))
    assert params == others == last


def test_values_that_do_not_fit_the_state_are_refused(small_rounds):
    mean = CompressedMean(COMPRESSORS["sign"])
    comm = qcomp.comm.LocalCommunicator.alone()
    x = gradient(0, 0)
    state = mean.init(x, comm)
    with pytest.raises(ValueError, match=r"x has arrays of .* elements; state is for"):
        mean.begin(x[1:], state, Terms())


def test_tensors_of_several_dtypes_form_one_round(small_rounds):
    mean = CompressedMean(COMPRESSORS["sign"])
    x = gradient(0, 0)
    mixed = [x[0].astype(np.float64), *x[1:]]
    state = mean.zeros(mixed, rank=0, size=1)
    assert len(mean.begin(mixed, state, Terms()).rounds) == 1
