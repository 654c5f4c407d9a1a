"""Large means in groups of tensors: the same bits as in one, and no more messages than groups."""

import random
from dataclasses import fields

import numpy as np
import pytest

import qcomp
from qcomp.core import grouping
from qcomp.core.chunks import cut, keep
from qcomp.core.exchange import CompressedMean
from qcomp.core.grouping import GroupedMean, group
from qcomp.core.transport import AllGather, drive, fuse, pipeline

SHAPES = [(11, 3), (8, 8), (0, 4), (13, 10), (5, 5), (1, 3), (257, 1), (8, 5), (8, 9)]
BYTES = 256
"""Of a group, in these tests: 64 float32."""


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(grouping, "GROUP_BYTES", BYTES)


# --- which tensors share a group -------------------------------------------------------------------------------------


def test_groups_hold_every_tensor_once_and_enough_bytes():
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.choice([0, 1, 7, 50, 100, 1000]) for _ in range(draw.randint(1, 20))]
        positions = [draw.randint(0, 1000) for _ in sizes]
        groups = group(sizes, positions, 100)
        assert sorted(t for members in groups for t in members) == list(range(len(sizes)))
        assert all(list(members) == sorted(members) for members in groups)
        filled = [sum(sizes[t] for t in members) for members in groups]
        assert len(groups) == 1 or min(filled) >= 100
        # None could be cut in two: without its largest tensor, or the rest, it has less than two groups need.
        assert all(f - max(sizes) < 2 * 100 for f in filled)


def test_every_group_has_a_part_of_every_chunk():
    sizes = [64] * 32
    chunks = cut(sizes, 8, 4)
    for members in group([4 * s for s in sizes], grouping._positions(chunks, 32), 4 * 64 * 4):
        assert [len(chunk) for chunk in keep(chunks, members)] == [1, 1, 1, 1]
    in_order = group([4 * s for s in sizes], range(32), 4 * 64 * 4)
    assert [len(chunk) for chunk in keep(chunks, in_order[0])] == [4, 0, 0, 0]  # what that is for


def test_kept_segments_are_those_of_the_whole():
    chunks = cut([20, 9, 40, 3], 8, 3)
    kept = [keep(chunks, members) for members in ((0, 2), (1, 3))]
    for members, parts in zip(((0, 2), (1, 3)), kept, strict=True):
        for chunk, part in zip(chunks, parts, strict=True):
            back = tuple(s._replace(tensor=members[s.tensor]) for s in part)
            assert back == tuple(s for s in chunk if s.tensor in members)


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
COMMON = {"learning_rate": 0.01, "exact": qcomp.ExactBelow(30)}
POLICY = qcomp.ByName({"[13]": COMPRESSORS["topk"], "*": COMPRESSORS["sign"]})
OPTIMIZERS = {
    "adam": qcomp.Adam(learning_rate=0.01),
    "onebit_adam": qcomp.OneBitAdam(freeze=1, **COMMON),
    "onebit_adam_all_gather": qcomp.OneBitAdam(freeze=1, topology="all_gather", **COMMON),
    "onebit_adam_hierarchical": qcomp.OneBitAdam(freeze=1, topology="hierarchical", **COMMON),
    "qadam": qcomp.QAdam(freeze=1, clip_norm=1.0, **COMMON),
    "onebit_lamb": qcomp.OneBitLamb(freeze=1, **COMMON),
    "zero_one_adam": qcomp.ZeroOneAdam(freeze=2, sync_steps=qcomp.LocalSteps(2, 2), **COMMON),
    "sgd": qcomp.CompressedSGD(compressor=COMPRESSORS["elias"], feedback=False, **COMMON),
    "sgd_sign": qcomp.CompressedSGD(compressor=COMPRESSORS["sign"], **COMMON),
    "sgd_by_name": qcomp.CompressedSGD(compressor=COMPRESSORS["sign"], compressors=POLICY, **COMMON),
    "ef21": qcomp.EF21SGD(compressor=COMPRESSORS["scaled"], eta=0.5, **COMMON),
}


def gradient(rank, step, shapes=SHAPES):
    rng = np.random.default_rng([3, rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def leaves(value):
    """Every array and number within a value, as bytes."""
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


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_groups_is_bit_for_bit_the_fused_one(name, n, monkeypatch):
    fused = train(OPTIMIZERS[name], n)
    monkeypatch.setattr(grouping, "GROUP_BYTES", BYTES)
    assert train(OPTIMIZERS[name], n) == fused


def test_every_optimizer_that_compresses_is_among_them():
    from qcomp.core.optimizers.compression import CompressingOptimizer

    def below(kind):
        return {kind} | {c for child in kind.__subclasses__() for c in below(child)}

    public = {kind for kind in below(CompressingOptimizer) if getattr(qcomp, kind.__name__, None) is kind}
    assert public == {type(opt) for opt in OPTIMIZERS.values()} - {qcomp.Adam} | {qcomp.QSVRG} & public


def means_of(mean, n, runner, *, steps=2, shapes=SHAPES, library=None):
    put = (lambda x: x) if library is None else library.array

    def rank_main(comm):
        xs = [[put(x) for x in gradient(comm.rank, step, shapes)] for step in range(steps)]
        state = mean.init(xs[0], comm)
        found = []
        for step, x in enumerate(xs):
            means, state = runner(mean, x, state, qcomp.Key(seed=5, step=step), comm)
            found += [np.asarray(m).tobytes() for m in means]
        return found + [np.asarray(r).tobytes() for r in (*state.worker, *state.server)]

    return qcomp.comm.run_local(n, rank_main)


def in_groups(mean, x, state, key, comm):
    grouped = GroupedMean(mean, x, state, key=key, donate=False)
    assert len(grouped.shares) > 3
    return grouped.joined(drive(pipeline(grouped.computations()), comm))


def at_once(mean, x, state, key, comm):
    return mean(x, state, comm, key=key)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_draws_and_sends_as_in_the_whole(name, topology, n, small_groups):
    for feedback in (True, False):
        if feedback and name in ("qsgd", "elias"):
            continue  # no contraction
        mean = CompressedMean(COMPRESSORS[name], topology=topology, feedback=feedback)
        assert means_of(mean, n, in_groups) == means_of(mean, n, at_once)


def test_every_library_gives_the_same(library, small_groups):
    shapes = [(64,)] * 4
    mean = CompressedMean(qcomp.ScaledSign(bucket_size=8))
    found = means_of(mean, 2, in_groups, steps=1, shapes=shapes, library=library)
    assert found == means_of(mean, 2, at_once, steps=1, shapes=shapes)


def test_groups_that_number_their_buckets_themselves_are_noticed(small_groups):
    def renumbering(mean, x, state, key, comm):
        grouped = GroupedMean(mean, x, state, key=key, donate=False)
        grouped.shares = [
            share._replace(
                chunks=mean.segments_of_shapes([x[t].shape for t in share.tensors], comm.size),
            )
            for share in grouped.shares
        ]
        return grouped.joined(drive(pipeline(grouped.computations()), comm))

    mean = CompressedMean(COMPRESSORS["qsgd"], feedback=False)
    assert means_of(mean, 2, renumbering) != means_of(mean, 2, at_once)


def test_residuals_that_go_to_another_tensor_are_noticed(small_groups):
    def mixing(mean, x, state, key, comm):
        grouped = GroupedMean(mean, x, state, key=key, donate=False)
        results = drive(pipeline(grouped.computations()), comm)
        served = [share.served for share in grouped.shares]
        grouped.shares = [
            share._replace(served=other) for share, other in zip(grouped.shares, served[::-1], strict=True)
        ]
        return grouped.joined(results)

    mean = CompressedMean(COMPRESSORS["sign"])
    shapes = [(40,)] * 16
    assert means_of(mean, 2, in_groups, shapes=shapes) == means_of(mean, 2, at_once, shapes=shapes)
    assert means_of(mean, 2, mixing, shapes=shapes) != means_of(mean, 2, at_once, shapes=shapes)


# --- messages --------------------------------------------------------------------------------------------------------


def requests_of(opt):
    """What a step of the only rank wants to exchange."""
    params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
    state = opt.start(params, tuple(map(str, range(len(params)))), 0, 1)
    stages, found, arrived = opt.stages(params, gradient(0, 0), state), [], None
    while True:
        try:
            request = next(stages) if arrived is None else stages.send(arrived)
        except StopIteration:
            return found
        found.append(request)
        arrived = [request.send if isinstance(request, AllGather) else request.send[0]]


def test_a_small_model_sends_what_it_always_did():
    opt = OPTIMIZERS["sgd_sign"]
    found = requests_of(opt)
    assert [type(r).__name__ for r in found] == ["AllToAll", "AllGather"]
    assert not any(r.later for r in found)


def test_a_large_one_sends_a_message_a_group_and_phase(small_groups):
    opt = OPTIMIZERS["sgd_sign"]
    found = requests_of(opt)
    groups = len(found) // 2
    assert 3 < groups <= 4 * sum(int(np.prod(s)) for s in SHAPES) // BYTES
    assert [type(r).__name__ for r in found] == ["AllToAll"] * groups + ["AllGather"] * groups
    assert all(r.later for r in found)


def test_what_groups_send_is_what_one_message_holds_but_for_verdicts_and_padding(small_groups, monkeypatch):
    opt = OPTIMIZERS["sgd_sign"]

    def sent():
        def rank_main(comm):
            params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
            state = opt.init(params, comm)
            before = comm.bytes_sent
            opt.step(params, gradient(comm.rank, 0), state, comm)
            return comm.bytes_sent - before

        return qcomp.comm.run_local(2, rank_main)

    groups = len(requests_of(opt)) // 2
    in_pieces = sent()
    monkeypatch.setattr(grouping, "GROUP_BYTES", 1 << 20)
    # A verdict of 8 bytes for each further message, of which a rank sends one in each phase.
    assert in_pieces == [whole + 2 * 8 * (groups - 1) for whole in sent()]


def test_the_first_groups_carry_the_exact_tensors_along(small_groups):
    opt = OPTIMIZERS["sgd_sign"]
    params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
    state = opt.start(params, tuple(map(str, range(len(params)))), 0, 1)
    exact, compressed = opt.prepare(gradient(0, 0), state).parts
    counts = [
        len(GroupedMean(p.mean, p.values, p.state, key=p.key, donate=False).shares)
        for p in (exact, compressed)
    ]
    assert counts[0] == 1 < counts[1]
    assert len(requests_of(opt)) == 2 * counts[1]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", range(len(SHAPES)))
def test_a_value_out_of_range_in_any_group_is_an_error_on_all_ranks_and_touches_nothing(tensor, small_groups):
    if not np.prod(SHAPES[tensor]):
        pytest.skip("an empty tensor has no value")
    opt = OPTIMIZERS["sgd_sign"]

    def rank_main(comm):
        params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
        state = opt.init(params, comm)
        params, state = opt.step(params, gradient(comm.rank, 0), state, comm)
        before = leaves([params, state])
        bad = gradient(comm.rank, 1)
        if comm.rank == 1:
            bad[tensor].flat[-1] = np.nan
        with pytest.raises(qcomp.NonFiniteError, match="a value on rank 1 is not finite"):
            opt.step(params, bad, state, comm)
        untouched = leaves([params, state]) == before
        params, state = opt.step(
            params, gradient(comm.rank, 1), state, comm
        )  # and the communicator still works
        return untouched, leaves(params)

    (first, params), (second, others), (third, last) = qcomp.comm.run_local(3, rank_main)
    assert all((first, second, third))
    assert params == others == last


def test_what_does_not_fit_is_refused_as_ever(small_groups):
    mean = CompressedMean(COMPRESSORS["sign"])
    comm = qcomp.comm.LocalCommunicator.alone()
    x = gradient(0, 0)
    state = mean.init(x, comm)
    grouped = GroupedMean(mean, x[1:], state, key=None, donate=False)
    with pytest.raises(ValueError, match=r"x has arrays of .* elements; state is for"):
        drive(fuse(grouped.computations()), comm)
    mixed = [x[0].astype(np.float64), *x[1:]]
    assert len(GroupedMean(mean, mixed, mean.init(mixed, comm), key=None, donate=False).shares) == 1


def test_a_group_is_a_mean_with_the_same_settings(small_groups):
    """Whatever field a mean may get, a group of it has the same."""
    mean = CompressedMean([COMPRESSORS["sign"]] * len(SHAPES), topology="all_gather", feedback=False)
    x = gradient(0, 0)
    grouped = GroupedMean(mean, x, mean.zeros(x, rank=0, size=2), key=None, donate=False)
    of_group = [stages.gi_frame.f_locals["self"] for stages in grouped.computations()]
    assert {f.name for f in fields(mean)} >= {"compressor", "topology", "feedback"}
    assert all((m.topology, m.feedback) == ("all_gather", False) for m in of_group)
    assert [len(m.compressors) for m in of_group] == [len(s.tensors) for s in grouped.shares]
