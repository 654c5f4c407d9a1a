"""A third-party topology works in optimizers, checkpoints and planning; `test_topologies` checks its laws."""

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, topologies
from qcomp.comm import run_local
from qcomp.planning import CPU, Cluster, Job, Link, advise
from qcomp.planning.picture import draw
from tests.core.tree import Tree

pytestmark = pytest.mark.usefixtures("tree")

SHAPES = [(40,), (3, 30), ()]
SIGN = qcomp.ScaledSign(bucket_size=16)


def inputs(rank, step, dtype=np.float64):
    rng = np.random.default_rng([rank, step])
    return [np.asarray(rng.standard_normal(shape), dtype=dtype) for shape in SHAPES]


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


def test_an_optimizer_with_it_saves_and_loads():
    saved = trained(3, None, 2)
    assert {"worker_residual.0", "worker_residual.1"} <= saved[1].keys()
    again = trained(3, saved, 0)
    for before, after in zip(saved, again, strict=True):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.filterwarnings("ignore:a state of 3 ranks resumes with 4")
def test_another_world_resumes_with_what_is_owed():
    saved = trained(3, None, 2)
    total = sum(np.ravel(s["worker_residual.0"]) for s in saved[1:]) / 3
    total += np.concatenate([np.ravel(v) for k, v in saved[0].items() if k.startswith("server_residual.0@")])
    again = trained(4, saved, 0)
    found = sum(np.ravel(s["worker_residual.0"]) for s in again[1:]) / 4
    found += np.concatenate([np.ravel(v) for k, v in again[0].items() if k.startswith("server_residual.0@")])
    np.testing.assert_allclose(found, total, rtol=0, atol=1e-12)


@pytest.mark.exhaustive
def test_the_automatic_choice_and_the_planner_know_it(tmp_path):
    class Free(Tree):
        name = "free"
        roundings = 1

        def cost(self, load, cluster):
            return qcomp.extend.Cost(0.0, 0.0, 0.0)

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
