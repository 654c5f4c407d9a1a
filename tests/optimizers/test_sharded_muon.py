"""Muon of shards: equal to Muon of whole matrices without loss, and with feedback that loses nothing, on any mesh."""

import dataclasses
import re
import warnings
from math import prod

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.core.mean import owned_shards
from qcomp.core.mean.sharding import Sharding
from qcomp.core.optimizers.sharded_muon import ShardedMuon

SHAPES = ((24, 10), (10, 24), (16, 3, 2), (7,), (12, 12), (20, 6), (3, 5), (2, 40))
NAMES = ("tall", "wide", "kernel", "bias", "stack", "embedding", "few", "two")
EXACT = {"compressor": qcomp.Identity(), "update_compressor": qcomp.Identity()}
COARSE = {"compressor": qcomp.QSGD(7, 16), "update_compressor": qcomp.ScaledSign(16, "rms")}
CODED = {"compressor": qcomp.QSGD(7, 16, coding="range"), "update_compressor": qcomp.TopK(2, 16)}
MESHES = {
    "1": ((0,),),
    "2": ((0, 1),),
    "3": ((2, 0, 1),),
    "4": ((0, 1, 2, 3),),
    "7": (tuple(range(7)),),
    "2 x 2": ((0, 1), (2, 3)),
    "3 x 1": ((0,), (1,), (2,)),
    "3 x 2": ((0, 4), (5, 1), (3, 2)),
}
"""The rank of each shard of each replica. Shards of 3 or 2 rows on 7 ranks are uneven, and many are empty."""
AXES = {"first": (), "last": (1, 1, 2, 0, 1, 1, 1, 1), "mixed": (0, 1, 1, 0, 1, 0, 1, 0)}
"""The axis along which each tensor is cut."""


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a state of|Muon orthogonalises")
        yield


def muon(sharding=None, **changes):
    settings = {"learning_rate": 0.05, "others": ("embedding",), "weight_decay": 0.1, **COARSE, **changes}
    return qcomp.Muon(**settings) if sharding is None else ShardedMuon(**settings, shards=sharding)


def whole(of, step, dtype=np.float32):
    """Return tensors whose elements have few bits, so that sums over ranks are exact in any order."""
    rng = np.random.default_rng([of, step])
    return [(np.round(rng.standard_normal(shape) * 64) / 64).astype(dtype) for shape in SHAPES]


def place(sharding, tensor, rank):
    """Return where a rank's shard lies in a tensor, as `torch.chunk` cuts it."""
    axis, shape = sharding.axes[tensor] if sharding.axes else 0, SHAPES[tensor]
    most, (_, shard) = -(-shape[axis] // len(sharding.ranks[0])), sharding.places[rank]
    return (*[slice(None)] * axis, slice(shard * most, (shard + 1) * most))


def cut(tensors, sharding, rank):
    return [x[place(sharding, i, rank)].ravel() for i, x in enumerate(tensors)]


def joined(of_ranks, sharding):
    """Return whole tensors from the shards of all ranks; shards of replicas must be equal."""
    whole = [np.zeros(shape, of_ranks[0][0].dtype) for shape in SHAPES]
    for rank, shards in enumerate(of_ranks):
        for i, shard in enumerate(shards):
            where = place(sharding, i, rank)
            whole[i][where] = shard.reshape(whole[i][where].shape)
    for rank, shards in enumerate(of_ranks):
        assert b"".join(x.tobytes() for x in cut(whole, sharding, rank)) == b"".join(
            x.tobytes() for x in shards
        )
    return whole


class Job:
    """The ranks of one job, with the sum of the gradients and of the updates of each matrix, in float64."""

    def __init__(self, lockstep, sharding, **changes):
        self.lockstep, self.sharding, self.changes = lockstep, sharding, changes
        self.ranks = range(len(sharding.places))
        self.opt = muon(sharding, **changes)
        self.params = [cut(whole(99, 0), sharding, rank) for rank in self.ranks]
        self.states = lockstep(
            [
                self.opt.init_stages(p, rank=rank, size=len(self.ranks), names=NAMES)
                for rank, p in enumerate(self.params)
            ]
        )

    def grads(self, rank, step):
        of = 0 if self.sharding.averaged else self.sharding.places[rank][0]
        return cut(whole(of, step), self.sharding, rank)

    def steps(self, *steps):
        for step in steps:
            stages = [
                self.opt.stages(p, self.grads(rank, step), s)
                for rank, (p, s) in enumerate(zip(self.params, self.states, strict=True))
            ]
            results = self.lockstep(stages)
            self.params, self.states = [p for p, _ in results], [s for _, s in results]
        return self

    def moved_to(self, sharding):
        """Return a job on another mesh, each rank of which has the dicts of some old ranks."""
        new, size = object.__new__(Job), len(sharding.places)
        saved = [self.opt.state_dict(state) for state in self.states]
        new.lockstep, new.sharding, new.changes = self.lockstep, sharding, self.changes
        new.ranks, new.opt = range(size), muon(sharding, **self.changes)
        new.params = [cut(joined(self.params, self.sharding), sharding, rank) for rank in new.ranks]
        new.states = self.lockstep(
            [
                new.opt.load_stages(saved[rank::size], p, rank=rank, size=size, names=NAMES)
                for rank, p in enumerate(new.params)
            ]
        )
        return new

    def residuals(self):
        """Return of each matrix the mean residual of the ranks that send an element, and the owner's two arrays."""
        sums, counts, owned = {}, {}, {}
        for state in self.states:
            mean, kept = self.opt.mean_of(state), state.exchange
            names = [name for name, is_exact in zip(NAMES, state.exact, strict=True) if not is_exact]
            layout = mean.layout(kept.shapes, rank=state.rank, size=state.size)
            for part, residual in zip(layout.residuals.worker, kept.worker, strict=bool(kept.worker)):
                name = names[part.tensor]
                i = NAMES.index(name)
                for sum_of, value in ((sums, residual), (counts, np.ones_like(residual))):
                    add(sum_of.setdefault(name, np.zeros(SHAPES[i])), value, self.sharding, i, state.rank)
            mine = layout.residuals.server
            for place, part in enumerate(mine):
                assert names[part.tensor] not in owned
                owned[names[part.tensor]] = kept.server[place], kept.server[len(mine) + place]
        return {name: sums[name] / counts[name] for name in sums}, owned


def reference(lockstep, replicas, steps, **changes):
    """Return the parameters after steps of Muon on whole tensors, and a state."""
    opt, ranks = muon(**changes), range(replicas)
    params = [whole(99, 0) for _ in ranks]
    states = lockstep(
        [opt.init_stages(p, rank=rank, size=replicas, names=NAMES) for rank, p in enumerate(params)]
    )
    for step in range(steps):
        stages = [
            opt.stages(p, whole(rank, step), s)
            for rank, (p, s) in enumerate(zip(params, states, strict=True))
        ]
        results = lockstep(stages)
        params, states = [p for p, _ in results], [s for _, s in results]
    return params[0]


def add(whole, shard, sharding, tensor, rank):
    """Add a rank's shard to a whole tensor, unless the rank does not send it."""
    if shard.size:
        where = place(sharding, tensor, rank)
        whole[where] += shard.reshape(whole[where].shape)


def equal(xs, ys):
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(xs, ys, strict=True))


FORMS = {"splits": {"wide": 2, "tall": (8, 16)}, "stacks": ("kernel",)}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "changes", [{}, FORMS, {"block_rows": 5, "clip_norm": 3.0, "nesterov": False}], ids=str
)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("axes", ["first", "mixed"])
def test_without_loss_it_equals_muon_of_whole_tensors(lockstep, axes, mesh, changes):
    """Bit for bit: clipping too, since norms of numbers with few bits are exact."""
    ref = reference(lockstep, 1, 3, **EXACT, **changes)
    job = Job(lockstep, Sharding(SHAPES, MESHES[mesh], axes=AXES[axes]), **EXACT, **changes).steps(0, 1, 2)
    assert equal(joined(job.params, job.sharding), ref)
    assert not any(state.exchange.worker for state in job.states)


@pytest.mark.parametrize("mesh", ["2 x 2", pytest.param("3 x 2", marks=pytest.mark.slow)])
def test_without_loss_the_mean_over_replicas_is_that_of_whole_tensors(lockstep, mesh):
    sharding = Sharding(SHAPES, MESHES[mesh], averaged=False, axes=AXES["mixed"])
    job = Job(lockstep, sharding, **EXACT).steps(0, 1, 2)
    assert equal(joined(job.params, sharding), reference(lockstep, len(sharding.ranks), 3, **EXACT))


class Sums:
    """A rule whose updates are linear in the means, so that sums show what was lost."""

    def cost(self, tensor, shape):
        return prod(shape)

    def sides(self, tensor, shape):
        return shape[0], prod(shape[1:])

    def updates(self, means, momenta, tensors, shapes):
        assert [m.shape for m in means] == [(prod(s),) for s in shapes]
        return [3 * mean for mean in means], [m + mean for m, mean in zip(momenta, means, strict=True)]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("mesh", ["1", "3", "2 x 2", "3 x 2"])
@pytest.mark.parametrize(("pair", "repaid"), [(COARSE, 0.5), (CODED, 1.0)], ids=["coarse", "coded"])
def test_feedback_loses_nothing_on_either_way(lockstep, pair, mesh, averaged, repaid):
    """Sum of the means = sum of the exact means - mean_i e_i; sum of the updates = 3 sum of the means - e."""
    sharding = Sharding(SHAPES, MESHES[mesh], averaged, AXES["mixed"])
    ranks, replicas = range(len(sharding.places)), len(sharding.ranks)
    mean = owned_shards.ShardedMean(
        pair["compressor"], updates=pair["update_compressor"], rule=Sums(), repaid=repaid, sharding=sharding
    )

    def values(rank, step):
        of = 0 if averaged else sharding.places[rank][0]
        return cut(whole(of, step, np.float64), sharding, rank)

    states = lockstep([mean.init_stages(values(r, 0), rank=r, size=len(ranks)) for r in ranks])
    decoded = [[np.zeros_like(x) for x in values(rank, 0)] for rank in ranks]
    exact = [np.zeros(shape) for shape in SHAPES]
    for step in range(4):
        key = qcomp.Key(seed=3, step=step)
        results = lockstep([mean.stages(values(r, step), states[r], key=key) for r in ranks])
        states = [state for _, state in results]
        for rank, (updates, _) in enumerate(results):
            decoded[rank] = [total + update for total, update in zip(decoded[rank], updates, strict=True)]
        for of in range(1 if averaged else replicas):
            share = 1 if averaged else 1 / replicas
            exact = [total + share * x for total, x in zip(exact, whole(of, step, np.float64), strict=True)]
    sums = [x.ravel() for x in joined(decoded, sharding)]
    owed, counts = [np.zeros(shape) for shape in SHAPES], [np.zeros(shape) for shape in SHAPES]
    for rank, state in enumerate(states):
        layout = mean.layout(state.shapes, rank=rank, size=len(ranks))
        for part, residual in zip(layout.residuals.worker, state.worker, strict=True):
            add(owed[part.tensor], residual / repaid, sharding, part.tensor, rank)
            add(counts[part.tensor], np.ones_like(residual), sharding, part.tensor, rank)
    assert all((count == (1 if averaged else replicas)).all() for count in counts)
    assert any(map(np.any, owed))
    found = set()
    for rank, state in enumerate(states):
        mine = mean.layout(state.shapes, rank=rank, size=len(ranks)).residuals.server
        for place, part in enumerate(mine):
            i = part.tensor
            total, residual = state.server[place], state.server[len(mine) + place]
            np.testing.assert_allclose(total, (exact[i] - owed[i] / counts[i]).ravel(), rtol=0, atol=1e-12)
            np.testing.assert_allclose(sums[i], 3 * total - residual, rtol=0, atol=1e-12)
            found.add(i)
    assert found == set(range(len(SHAPES)))


def test_each_shard_is_sent_once(lockstep):
    """A rank of N sends (N - 1) / N^2 of the payloads of both ways; of equal replicas only one sends gradients."""
    shape = ((64, 64),) * 8

    def sent(ranks, averaged):
        sharding = Sharding(shape, ranks, averaged)
        mean = owned_shards.ShardedMean(
            qcomp.QSGD(7, 64), updates=qcomp.ScaledSign(64), rule=Sums(), sharding=sharding
        )
        size = len(sharding.places)
        layouts = [mean.layout((), rank=rank, size=size) for rank in range(size)]
        gradients = sum(f.nbytes for x in layouts for to, f in enumerate(x.frames) if to != x.rank)
        updates = sum(
            f.nbytes for x in layouts for owner, f in enumerate(x.answers_arriving) if owner != x.rank
        )
        return gradients, updates

    b, c = 8 * 64 * (32 + 4), 8 * 64 * (8 + 4)
    for ranks, averaged, ways in (
        (((0, 1, 2, 3),), True, (3 / 4, 3 / 4)),
        (((0, 1), (2, 3)), True, (1 / 2, 2 - 1 / 2)),
        (((0, 1), (2, 3)), False, (2 - 1 / 2, 2 - 1 / 2)),
    ):
        for found, expected in zip(sent(ranks, averaged), (ways[0] * b, ways[1] * c), strict=True):
            assert expected <= found <= expected + 16 * 16 + 8 * 8 * 16  # verdicts and padding


def test_no_two_shards_of_an_update_share_draws():
    """An owner compresses all shards with one key, so buckets must have different numbers."""
    sharding = Sharding(SHAPES, MESHES["3"])
    mean = owned_shards.ShardedMean(
        qcomp.Identity(), updates=qcomp.QSGD(7, 16), rule=Sums(), sharding=sharding
    )
    frames = [frame for rank in range(3) for frame in mean.layout((), rank=rank, size=3).answers_arriving]
    numbers = [
        number for f in frames for s in f.chunk for number in range(s.bucket, s.bucket - (-s.size // 16))
    ]
    assert len(set(numbers)) == len(numbers)
    assert sum(s.size for f in frames for s in f.chunk) == sum(map(prod, SHAPES))


CHAIN = [
    Sharding(SHAPES, MESHES[mesh], axes=AXES[axes])
    for mesh, axes in [
        ("4", "first"),
        ("2", "mixed"),
        ("2", "last"),
        ("2", "first"),
        ("3", "last"),
        ("2 x 2", "last"),
        ("7", "mixed"),
        ("1", "first"),
    ]
]
"""With 2 ranks, the shards of a tensor have the same sizes along all axes."""


def test_a_checkpoint_goes_on_bit_for_bit_on_other_meshes(lockstep):
    """Moments and owners' arrays move unchanged; without loss the whole run is that of one rank."""
    job = Job(lockstep, CHAIN[0], **EXACT).steps(0)
    for step, sharding in enumerate(CHAIN[1:], 1):
        job = job.moved_to(sharding).steps(step)
    assert equal(joined(job.params, job.sharding), reference(lockstep, 1, len(CHAIN), **EXACT))


@pytest.mark.parametrize("averaged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_other_meshes_owe_the_same(lockstep, averaged):
    """Clipped gradients are copies, whose memory new residuals take, but not where another replica sends."""
    job = Job(lockstep, Sharding(SHAPES, MESHES["2 x 2"], averaged), clip_norm=1.0).steps(0, 1)
    before, owned = job.residuals()
    assert len(before) == len(owned) == 6
    for mesh, axes in (("3", "last"), ("3 x 2", "last"), ("2", "mixed"), ("2", "first")):
        job = job.moved_to(Sharding(SHAPES, MESHES[mesh], averaged, AXES[axes]))
        after, now = job.residuals()
        for name in before:
            np.testing.assert_allclose(after[name], before[name], rtol=0, atol=1e-6)
            assert np.any(before[name])
            assert equal(now[name], owned[name])


@pytest.mark.slow
def test_the_same_mesh_goes_on_bit_for_bit(lockstep):
    sharding = Sharding(SHAPES, MESHES["3 x 2"], averaged=False)
    one, other = (Job(lockstep, sharding).steps(0, 1) for _ in range(2))
    other = other.moved_to(sharding)
    assert equal(joined(one.steps(2, 3).params, sharding), joined(other.steps(2, 3).params, sharding))


def test_a_dict_that_is_missing_or_damaged_is_refused_on_every_rank(lockstep):
    sharding = Sharding(SHAPES, MESHES["4"])
    job = Job(lockstep, sharding, **EXACT).steps(0)
    saved = [job.opt.state_dict(state) for state in job.states]

    def refused(dicts, **options):
        two = Sharding(SHAPES, MESHES["2"])

        def rank_main(comm):
            params = cut(whole(99, 0), two, comm.rank)
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the text
                muon(two, **EXACT).load_state_dict(dicts[comm.rank :: 2], params, comm, NAMES, **options)
            return str(caught.value)

        (text,) = set(run_local(2, rank_main))
        return text

    assert "no rank passes the dict of old rank 3" in refused(saved[:3])
    assert "expected ranges that cover each" in refused(saved[:3], lost="drop")
    (key,) = [key for key in saved[1] if key.startswith("momentum.embedding@")]
    for changed in ({key: saved[1][key][:-1]}, {"momentum.embedding@0": saved[1][key]}):
        one = {k: v for k, v in saved[1].items() if k not in (key, "digests")} | changed
        assert "expected ranges that cover each" in refused([saved[0], one, *saved[2:]])
    for start, text in (
        ("0*7", "no such tensor"),
        ("4*8", "not whole columns"),
        ("30*2", "not whole columns"),
    ):
        one = {k: v for k, v in saved[1].items() if k not in (key, "digests")}
        assert text in refused([saved[0], {**one, f"momentum.embedding@{start}": saved[1][key]}, *saved[2:]])
    again = {**saved[0], "momentum.embedding@00": np.zeros(120, np.float32)}
    assert "expected disjoint ranges" in refused(
        [{k: v for k, v in again.items() if k != "digests"}, *saved[1:]]
    )
    assert "does not keep" in refused([{**saved[0], "momentum.tall@0": np.zeros(3, np.float32)}, *saved[1:]])
    changed = saved[1] | {key: saved[1][key] + 1}
    assert "differ from their digests" in refused([saved[0], changed, *saved[2:]])


@pytest.mark.parametrize("bad", ["wide", "embedding"])
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_counts_on_every_rank(lockstep, bad, averaged, nonfinite):
    """Of a matrix or of a tensor that AdamW moves, and on a rank whose replicas see nothing of it."""
    job = Job(lockstep, Sharding(SHAPES, MESHES["2 x 2"], averaged), nonfinite=nonfinite).steps(0)
    before = joined(job.params, job.sharding)
    grads = [job.grads(rank, 1) for rank in job.ranks]
    grads[3][NAMES.index(bad)][2] = np.nan
    stages = [job.opt.stages(*each) for each in zip(job.params, grads, job.states, strict=True)]
    if nonfinite == "raise":
        with pytest.raises(qcomp.NonFiniteError, match=f"'{bad}' on rank 3"):
            lockstep(stages)
        return
    results = lockstep(stages)
    assert [state.skipped for _, state in results] == [1] * 4
    assert equal(joined([p for p, _ in results], job.sharding), before)


def test_what_does_not_fit_is_refused(lockstep):
    sharding = Sharding(SHAPES, MESHES["2"])
    params = [cut(whole(99, 0), sharding, rank) for rank in range(2)]

    def start(shardings=(sharding, sharding), params=params, **changes):
        return lockstep(
            [
                muon(s, **changes).init_stages(p, rank=rank, size=2, names=NAMES)
                for rank, (s, p) in enumerate(zip(shardings, params, strict=True))
            ]
        )

    start()
    with pytest.raises(qcomp.MismatchError, match="the shard of 'bias', has shape"):
        start(params=params[::-1])
    other = dataclasses.replace(sharding, ranks=((1, 0),))
    with pytest.raises(qcomp.MismatchError, match="shards"):
        start((sharding, other))
    columns = dataclasses.replace(sharding, axes=AXES["last"])
    with pytest.raises(qcomp.MismatchError, match="shards"):
        start((sharding, columns), [params[0], cut(whole(99, 0), columns, 1)])
    with pytest.raises(ValueError, match="shards has 3 ranks; comm has 2 ranks"):
        start((Sharding(SHAPES, MESHES["3"]),) * 2)
    with pytest.raises(ValueError, match=r"whiten_steps is .*; expected None"):
        muon(sharding, whiten_steps=qcomp.DoublingIntervals(1))
    with pytest.raises(ValueError, match=re.escape("ranks is ((0, 1), (1, 2))")):
        Sharding(SHAPES, ((0, 1), (1, 2)))
    for axes in ((0,) * 7, (0, 2) + (0,) * 6, (-1,) * 8):
        with pytest.raises(ValueError, match=re.escape(f"axes is {axes}; expected an axis of each")):
            Sharding(SHAPES, MESHES["2"], axes=axes)
    replicas = Sharding(SHAPES, ((0,), (1,)))
    both = [[x.ravel() for x in whole(99, 0)] for _ in range(2)]
    both[1][4] = both[1][4] + 1
    with pytest.raises(qcomp.MismatchError, match="'stack' differ between ranks 0 and 1"):
        start((replicas, replicas), params=both)

    def resume(comm):
        opt, params = muon(replicas), both[comm.rank]
        saved = opt.state_dict(opt.init(both[0], comm, NAMES))
        with pytest.raises(qcomp.MismatchError, match="'stack' differ between ranks 0 and 1"):
            opt.load_state_dict(saved, params, comm, NAMES)

    run_local(2, resume)
