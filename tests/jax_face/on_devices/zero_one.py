"""0/1 Adam on a mesh takes the steps of the core, also those that each device makes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_array_equal

import qcomp
import qcomp.jax.optax
from tests.jax_face.on_devices.optimizers import GATHERED, core_gradients
from tests.jax_face.on_devices.problems import (
    ALL,
    DATA,
    SIGN,
    bits,
    gradient,
    mesh_of,
    own,
    quadratics,
    rows,
    tree_of,
)

SHAPES = {"b": (7,), "deep": [(40, 3)], "wide": [(7, 9), (7, 9)]}
SETTINGS = {
    "learning_rate": 0.03,
    "betas": (0.9, 0.95),
    "compressor": SIGN,
    "exact": lambda tensors: [t.size < 10 for t in tensors],
    "variance_steps": qcomp.DoublingIntervals(3),
    "sync_steps": qcomp.LocalSteps(7, 4),
    "variance_floor": 0.3,
    "nonfinite": "skip",
}
BAD = (1, 1), (6, 0), (12, 1), (20, 1), (22, 0), (26, 1), (29, 0)
"""The calls, and the devices, with gradients that are not finite."""
KINDS = {"warmup": 0, "compressed": 1, "local": 2}


def sometimes_zero(step):
    """Return a rate that float32 holds, and that is 0 in steps of both kinds."""
    return (0.25 - step / 256) * (step % 7 != 3)


class Job:
    """A job on some devices, and in the core."""

    def __init__(self, n, changes=None, *, check_vma=True, weights=None):
        self.n, self.weights = n, weights
        self.opt = qcomp.ZeroOneAdam(**SETTINGS | (changes or {}))
        self.tx, self.mesh = qcomp.jax.optax.zero_one_adam(self.opt, "data"), mesh_of(n)
        with jax.set_mesh(self.mesh):
            self.first = self.tx.init(tree_of(0, SHAPES))
        self.specs = specs = qcomp.jax.partition_specs(self.first, "data")
        self.run = jax.jit(
            jax.shard_map(
                self.step,
                mesh=self.mesh,
                in_specs=(ALL, specs, DATA, DATA, DATA),
                out_specs=(ALL, specs, DATA),
                check_vma=check_vma,
            )
        )

    def step(self, params, state, problem, bad, weights):
        local = qcomp.jax.optax.local_params(params, state)
        grads = gradient(local, *map(own, problem))
        grads["b"] = jnp.where(bad[0] != 0, bad[0], grads["b"])
        weight = None if self.weights is None else weights[0]
        updates, state = self.tx.update(grads, state, params, local=local, weight=weight)
        params = optax.apply_updates(params, updates)
        return params, state, rows(qcomp.jax.optax.local_params(params, state))

    def on_mesh(self, steps, bad=None, after=None):
        """Return the common parameters, the state, and the parameters of each device after each step."""
        params, state = after or (tree_of(0, SHAPES), self.first)
        specs = jax.tree.map(lambda _: ALL, params), self.specs
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(self.mesh, spec))  # noqa: E731
        params, state = jax.tree.map(put, (params, state), specs)  # else the second step is compiled again
        weights, seen = np.float32(self.weights or [1] * self.n), []
        for number in range(steps):
            values = np.float32([(bad or {}).get((number, rank), 0) for rank in range(self.n)])
            found = self.run(params, state, quadratics(self.n, SHAPES), values, weights)
            params, state, _ = jax.block_until_ready(found)
            seen.append(found)
        return seen

    def of_core(self, steps, bad):
        """Return the parameters and the state of each rank after each step."""
        first, names, gradients = core_gradients(self.n, SHAPES)

        def rank_main(comm):
            params, state, seen = first, self.opt.init(first, comm, names), []
            weight = self.weights and self.weights[comm.rank]
            for number in range(steps):
                grads = gradients(comm.rank, params)
                if (number, comm.rank) in bad:
                    grads[0] = np.full_like(grads[0], bad[number, comm.rank])
                params, state = self.opt.step(params, grads, state, comm, weight=weight)
                seen.append((bits(params), state))
            return seen

        return qcomp.comm.run_local(self.n, rank_main)


@pytest.mark.parametrize(
    ("n", "check_vma", "changes", "weights", "kinds"),
    [
        (2, True, {"weight_decay": 0.1}, None, {(0, 0), (0, 1), (1, 1), (1, 2), (2, 1), (2, 2)}),
        pytest.param(
            4,
            False,
            {"freeze": 9, "learning_rate": sometimes_zero, "averaging": GATHERED},
            [3, 1, 0, 2],
            {(0, 0), (0, 1), (1, 1), (1, 2), (2, 1), (2, 2)},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            4,
            True,
            {"freeze": 3, "sync_steps": qcomp.LocalSteps(2, 3), "exact": None},
            None,
            {(0, 0), (0, 1), (1, 1), (1, 2), (2, 1), (2, 2)},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_same_as_the_core(n, check_vma, changes, weights, kinds):
    """With a rate that is no power of two, and gradients that are not finite in steps of every kind."""
    job, bad = Job(n, changes, check_vma=check_vma, weights=weights), dict.fromkeys(BAD, np.nan)
    if "freeze" not in changes:  # only the exact mean refuses this gradient, not the compressed one beside it
        bad[20, 1] = 2.0**100
    expected, seen, stage = job.of_core(36, bad), job.on_mesh(36, bad), 0
    found, refused, common = set(), 0, tree_of(0, SHAPES)
    for number, (params, state, local) in enumerate(seen):
        for rank in range(n):
            wanted, core = expected[rank][number]
            assert bits(jax.tree.map(lambda x, r=rank: x[r], local)) == wanted
            assert int(state.skipped) + int(state.apart.repeated[rank]) == core.skipped
        assert (int(state.step), int(state.stage)) == (core.step, KINDS[core.stage])
        assert (int(state.updates), int(state.frozen)) == (core.numbers["updates"], core.numbers["frozen"])
        if int(state.stage) == 2:
            assert bits(params) == bits(common)
            assert_array_equal(
                np.asarray(state.apart.pending[n - 1]),
                np.concatenate([np.ravel(u) for u in core.arrays["pending"]]),
            )
        else:
            assert bits(params) == wanted
            assert bits(jax.tree.leaves(state.momentum)) == bits(core.momentum)
        assert bits(jax.tree.leaves(state.variance)) == bits(core.variance)
        found.add((stage, int(state.stage)))
        stage, common, refused = int(state.stage), params, int(state.skipped)
    assert found == kinds
    assert refused
    assert any(int(x) for x in seen[-1][1].apart.repeated)


@pytest.mark.exhaustive
def test_a_saved_state():
    """A job goes on from the arrays of a state, and from a variance that was frozen by another setting."""
    job = Job(2, {"freeze": 6})
    seen = job.on_mesh(20)
    for number in (2, 9, 15):
        params, state, _ = jax.tree.map(np.asarray, seen[number])
        for freeze in (6, 100) if number > 5 else (6,):
            resumed = Job(2, {"freeze": freeze}) if freeze != 6 else job
            after = resumed.on_mesh(19 - number, after=(params, state))
            assert bits(after[-1]) == bits(seen[-1])
    assert {int(seen[number][1].stage) for number in (2, 9, 15)} == {0, 1, 2}


@pytest.mark.exhaustive
def test_a_warm_up_that_another_schedule_ends():
    """The step after the warm-up of the saved state is exact, since there were no compressed ones before."""
    params, state, _ = Job(2).on_mesh(2)[-1]
    other = Job(2, {"variance_steps": lambda step: step == 1})
    seen = other.on_mesh(2, after=(params, state))
    assert [int(state.updates) for _, state, _ in seen] == [3, 3]
    assert [int(state.stage) for _, state, _ in seen] == [1, 1]


def test_gradients_of_other_parameters():
    """Local steps at the common parameters would be other steps: they are refused as if they were not finite."""
    job = Job(2)
    with pytest.raises(ValueError, match=r"local is None; .*optax\.local_params\(params, state\)"):
        job.tx.update(job.first.momentum, job.first, job.first.momentum)
    seen = job.on_mesh(16)
    (params, state, _), *_ = (each for each in seen if int(each[1].stage) == 2)

    def wrong(params, state, curvatures, minima):
        grads = gradient(jax.lax.pcast(params, "data", to="varying"), own(curvatures), own(minima))
        return job.tx.update(grads, state, params, local=params)

    specs = qcomp.jax.partition_specs(state, "data")
    run = jax.shard_map(wrong, mesh=job.mesh, in_specs=(ALL, specs, DATA, DATA), out_specs=(ALL, specs))
    for _ in range(5):
        updates, state = jax.jit(run)(params, state, *quadratics(2, SHAPES))
        assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))
    assert int(state.skipped) + int(state.apart.repeated[0]) >= 5
    assert int(state.skipped)


def test_wrappers():
    """The state is found in a chain, and refused in what withholds gradients from it."""
    job = Job(2)
    tx = optax.chain(optax.clip_by_global_norm(1.0), job.tx)
    params = tree_of(0, SHAPES)
    with jax.set_mesh(job.mesh):
        state, wrapped = tx.init(params), optax.MultiSteps(job.tx, 2).init(params)
    specs = qcomp.jax.partition_specs(state, "data")
    assert specs[1].apart.pending == specs[1].residuals.server[0] == DATA
    assert specs[1].momentum["b"] == specs[1].stage == ALL
    found = jax.shard_map(
        lambda params, state: rows(qcomp.jax.optax.local_params(params, state)),
        mesh=job.mesh,
        in_specs=(ALL, specs),
        out_specs=DATA,
    )(params, state)
    assert bits(own(found)) == bits(params)
    with pytest.raises(ValueError, match="compressed mean inside MultiStepsState"):
        qcomp.jax.partition_specs(wrapped, "data")
    with pytest.raises(ValueError, match="state has 0 states of zero_one_adam; expected one"):
        qcomp.jax.optax.local_params(params, wrapped.acc_grads)
    with pytest.raises(ValueError, match=r"at 'b' the shape \(2, 7\); expected \(1, 7\), this device's row"):
        qcomp.jax.optax.local_params(params, job.first)
