"""A topology written by a stranger, with what `qcomp.topologies` hands out: a binary tree."""

import math

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key, NonFiniteError, topologies
from qcomp.comm import run_local
from qcomp.planning import CPU, Cluster, Job, Link, advise
from qcomp.planning.picture import draw


class Tree(topologies.Topology):
    """Sums go up a binary tree to rank 0, whose compressed mean goes down as bytes.

    In exchange d a rank r with r mod 2^(d + 1) = 2^d sends the sum of its subtree to r - 2^d.
    """

    name = "tree_of_two"
    roundings = None

    def lay_out(self, operands, chunks=None):
        """Every rank feeds back what it lost of its sum, the root what it lost of the mean."""
        (whole,) = operands.chunks(1)
        nothing = tuple(topologies.Segment(i, 0, 0, 0) for i in range(len(operands.sizes)))
        root = operands.rank == 0
        residuals = topologies.Residuals(nothing if root else operands.whole, whole if root else ())
        return topologies.Layout(operands, (whole,), residuals)

    def stages(self, call):
        """Go up and down."""
        layout, codec = call.layout, topologies.Codec(call.values)
        (frame,), rank, world = layout.frames, layout.rank, layout.world
        height = (world - 1).bit_length()
        values, residuals, refused, sent = [x + 0 for x in call.values], (), False, None
        for d in range(height):
            sender, step = rank % 2 ** (d + 1) == 2**d, 2**d
            if sender:
                mine = codec.encode(layout.frames, values, call.worker, call.key.at(hop=2), donate=True)
                residuals, sent = mine.residuals, mine
                message = mine.messages[0] if not refused else codec.refusals([frame], None).messages[0]
            receiver = rank % 2 ** (d + 1) == 0 and rank + step < world
            arrived = yield self.between(
                codec, layout, {rank - step: message} if sender else {}, [rank + step] * receiver
            )
            if receiver and codec.refuses(arrived[rank + step], frame, rank + step):
                refused = True
            elif receiver:
                payloads = codec.payloads(arrived[rank + step], frame, rank + step)
                decoded = codec.decode(payloads, frame, [None] * len(payloads))
                for segment, x in zip(frame.chunk, decoded, strict=True):
                    part = values[segment.tensor][segment.start : segment.stop]
                    part += x
        mean = None
        if rank == 0:
            owed = call.server
            mine = codec.encode(
                layout.frames, [x / world for x in values], owed, call.key.at(hop=1), donate=True
            )
            sent, residuals = mine, mine.residuals
            mean = codec.refusals([frame], None).messages[0] if refused else mine.messages[0]
        for d in reversed(range(height)):
            step = 2**d
            gets = rank % 2 ** (d + 1) == step
            gives = rank % 2 ** (d + 1) == 0 and rank + step < world
            arrived = yield self.between(
                codec, layout, {rank + step: mean} if gives else {}, [rank - step] * gets
            )
            mean = arrived[rank - step] if gets else mean
        if codec.refuses(mean, frame, 0):
            raise NonFiniteError("a value on some rank is not finite") from sent.error
        means = topologies.decode_means(codec, [codec.payloads(mean, frame, 0)], layout.frames, call)
        if rank == 0:
            return topologies.Averaged(means, tuple(call.worker), residuals)
        return topologies.Averaged(means, residuals, ())

    @staticmethod
    def between(codec, layout, send, sources):
        """An exchange with a few ranks."""
        nothing = codec.like[:0].view(np.uint8)
        return topologies.AllToAll(
            tuple(send.get(rank, nothing) for rank in range(layout.world)),
            tuple(layout.message_sizes[0] if rank in sources else 0 for rank in range(layout.world)),
        )

    def cost(self, load, cluster):
        """Twice the height of the tree."""
        height = math.ceil(math.log2(cluster.ranks))
        wire = 2 * height * cluster.link.seconds(load.payload, ranks=1, messages=1)
        return topologies.Cost(load.packed * (load.encode + height * load.add), wire, 2 * load.payload)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The tree is known in one test."""
    from qcomp.core.mean.topologies import registry

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    topologies.register(Tree())


SHAPES = [(40,), (3, 30), ()]
SIGN = qcomp.ScaledSign(bucket_size=16)


def inputs(rank, step, dtype=np.float64):
    rng = np.random.default_rng([rank, step])
    return [np.asarray(rng.standard_normal(shape), dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_sum_identity_holds(size):
    mean = CompressedMean(SIGN, "tree_of_two")

    def rank_main(comm):
        state, sums = mean.init(inputs(0, 0), comm), [np.zeros(shape) for shape in SHAPES]
        for step in range(5):
            means, state = mean(inputs(comm.rank, step), state, comm, key=Key(step=step))
            sums = [s + m for s, m in zip(sums, means, strict=True)]
        return sums, state

    results = run_local(size, rank_main)
    ranges = CompressedMean(SIGN, "tree_of_two").layout(SHAPES, rank=0, size=size).residuals.server
    for i, _ in enumerate(SHAPES):
        exact = sum(inputs(rank, step)[i] for rank in range(size) for step in range(5)) / size
        owed = sum(state.worker[i] for _, state in results[1:]) / size if size > 1 else 0
        served = [e for e, s in zip(results[0][1].server, ranges, strict=True) if s.tensor == i]
        owed = (owed + np.concatenate(served)).reshape(SHAPES[i])
        for sums, _ in results:
            assert (sums[i] == results[0][0][i]).all()
            np.testing.assert_allclose(sums[i], exact - owed, rtol=0, atol=1e-12)


def test_a_value_that_is_not_finite_is_an_error_everywhere():
    mean = CompressedMean(SIGN, "tree_of_two")

    def rank_main(comm):
        x = inputs(comm.rank, 0)
        state = mean.init(x, comm)
        if comm.rank == 2:
            x[1][0, 0] = np.nan
        with pytest.raises(NonFiniteError):
            mean(x, state, comm)

    run_local(5, rank_main)


def trained(size, saved, steps):
    opt = qcomp.CompressedSGD(
        learning_rate=0.1, compressor=SIGN, exact=None, averaging=qcomp.Averaging(topology="tree_of_two")
    )

    def rank_main(comm):
        params = [np.zeros(shape) for shape in SHAPES]
        state = opt.load_state_dict(saved, params, comm) if saved else opt.init(params, comm)
        for step in range(steps):
            params, state = opt.step(params, inputs(comm.rank, step), state, comm)
        return opt.state_dict(state)

    return run_local(size, rank_main)


def test_an_optimizer_saves_and_loads_it():
    saved = trained(3, None, 2)
    assert {"worker_residual.0", "worker_residual.1"} <= saved[1].keys()
    again = trained(3, saved, 0)
    for before, after in zip(saved, again, strict=True):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.filterwarnings("ignore:a state of 3 ranks resumes with 4")
def test_another_world_goes_on_with_what_is_owed():
    saved = trained(3, None, 2)
    total = sum(np.ravel(s["worker_residual.0"]) for s in saved[1:]) / 3
    total += np.concatenate([np.ravel(v) for k, v in saved[0].items() if k.startswith("server_residual.0@")])
    again = trained(4, saved, 0)
    found = sum(np.ravel(s["worker_residual.0"]) for s in again[1:]) / 4
    found += np.concatenate([np.ravel(v) for k, v in again[0].items() if k.startswith("server_residual.0@")])
    np.testing.assert_allclose(found, total, rtol=0, atol=1e-12)


def test_the_automatic_choice_and_the_planner_know_it(tmp_path):
    class Free(Tree):
        name = "free"
        roundings = 1

        def cost(self, load, cluster):
            return topologies.Cost(0.0, 0.0, 0.0)

    topologies.register(Free())
    assert CompressedMean(SIGN, "auto").chosen([(1000,)], 4).topology == "free"
    advice = advise(Job(params=10**8, compute=0.1), Cluster(4, Link(1e8)), CPU)
    assert advice.best.time.method.topology == "free"
    assert any(row.time.method.topology == "tree_of_two" for row in advice.rows)
    draw(advice, tmp_path / "plan.svg")


@pytest.mark.parametrize("name", ["ring", "auto"])
def test_a_name_that_is_taken_is_refused(name):
    taken = type("Taken", (Tree,), {"name": name})
    with pytest.raises(ValueError, match=f"topology has the name '{name}', which is taken"):
        topologies.register(taken())
    with pytest.raises(TypeError, match="expected an instance of"):
        topologies.register(taken)
