"""Muon, outer loops, weights and means over two axes take the steps of the core."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import qcomp
import qcomp.jax.optax
from tests.jax_face.on_devices.problems import (
    ALL,
    DATA,
    SHAPES,
    SIGN,
    bits,
    gradient,
    mesh_of,
    own,
    quadratics,
    rows,
    stacked,
    tree_of,
)

HALF = qcomp.SGD(learning_rate=0.5, momentum=0.5, nesterov=True)
"""An outer optimizer whose products are exact, so that XLA rounds as the core does."""
ADAM = qcomp.Adam(learning_rate=0.1, betas=(0.8, 0.95))
ADAM_WITH_ALL = qcomp.Adam(
    learning_rate=lambda rounds: 0.5 / (1 + rounds),
    betas=(0.8, 0.95),
    eps=0.01,
    weight_decay=0.1,
    groups=[qcomp.Group("wide", learning_rate_factor=0.5, betas=(0.5, 0.75))],
)
SPARSE = {
    "compressor": qcomp.TopK(k=2, bucket_size=16, value_bits=2, coding="fixed"),
    "averaging": qcomp.Averaging(topology="all_gather", divisor="senders"),
}
GATHERED = qcomp.Averaging(topology="all_gather")
CODES = qcomp.MinMaxUInt8(bucket_size=32)
OF_MUON = {
    "learning_rate": 2**-5,
    "others": ("embedding",),
    "nonfinite": "skip",
    "adam_learning_rate_factor": 0.125,
    "momentum": 0.5,
    "betas": (0.5, 0.75),
}
MATRICES = {"b": (7,), "embedding": (10, 6), "k": [(12, 20), (16, 8), (9, 9)]}


def core_gradients(n, shapes):
    """Return the parameters, their names, and a function of a rank's parameters that returns its gradients."""
    first = tree_of(0, shapes)
    leaves, structure = jax.tree.flatten(first)

    def gradients(rank, params):
        problem = (jax.tree.map(lambda x: x[rank], tree) for tree in quadratics(n, shapes))
        return jax.tree.leaves(gradient(structure.unflatten(params), *problem))

    return leaves, qcomp.jax.names_of(first), gradients


class TestOuterLoops:
    def of_core(self, n, loop, steps):
        params, names, gradients = core_gradients(n, SHAPES)

        def rank_main(comm):
            mine, state, seen = params, loop.init(params, comm, names), []
            for _ in range(steps):
                means = loop.average(gradients(comm.rank, mine), state, comm)
                moved = zip(mine, means, strict=True)
                mine, state = loop.step([p - np.float32(0.125) * g for p, g in moved], state, comm)
                seen.append(bits(mine))
            return seen

        return qcomp.comm.run_local(n, rank_main)

    def on_mesh(self, n, loop, steps, *, check_vma, break_at=None, without_average=False, after=None):
        """Return the rows of all devices after each step, and the states."""
        outer, mesh, first = qcomp.jax.MeshOuterLoop(loop, "data"), mesh_of(n), tree_of(0, SHAPES)
        with jax.set_mesh(mesh):
            state = outer.init(first)
        params = jax.tree.map(lambda x: jnp.stack([x] * n), first)
        params, state = after or (params, state)
        specs, seen = qcomp.jax.partition_specs(state, "data"), []

        def step(params, state, curvatures, minima):
            params = own(params)
            grads = gradient(params, own(curvatures), own(minima))
            grads = grads if without_average else outer.average(grads, state)
            params, state = outer(jax.tree.map(lambda p, g: p - 0.125 * g, params, grads), state)
            return rows(params), state

        run = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(DATA, specs, DATA, DATA),
                out_specs=(DATA, specs),
                check_vma=check_vma,
            )
        )
        for number in range(1, steps + 1):
            if number == break_at:
                params = jax.tree.map(lambda x: x.at[1].set(jnp.inf), params)
            params, state = jax.block_until_ready(run(params, state, *quadratics(n, SHAPES)))
            seen.append((params, state))
        return seen

    @pytest.mark.parametrize(
        ("n", "check_vma", "settings"),
        [
            (2, True, {"every": 4, "compressor": SIGN, "fragments": 2, "delay": 1, "turn": "apply"}),
            pytest.param(2, False, {"every": 3, "compressor": SIGN}, marks=pytest.mark.exhaustive),
            pytest.param(
                4,
                False,
                {
                    "every": 5,
                    "compressor": CODES,
                    "fragments": 2,
                    "delay": 2,
                    "mixing": 0.5,
                    "decay": 0.5,
                    "scale": 0.5,
                },
                marks=pytest.mark.exhaustive,
            ),
            (2, True, {"every": 2, "warmup": 3, "delay": 1, "outer": ADAM, "compressor": SIGN}),
            pytest.param(
                4,
                False,
                {"every": 4, "warmup": 1, "fragments": 2, "outer": ADAM_WITH_ALL},
                marks=pytest.mark.exhaustive,
            ),
            pytest.param(
                2, True, {"every": 3, "outer": qcomp.Lion(learning_rate=0.1)}, marks=pytest.mark.exhaustive
            ),
            pytest.param(
                2,
                True,
                {"every": 2, "fragments": 2, "outer": qcomp.Lamb(learning_rate=0.1, weight_decay=0.1)},
                marks=pytest.mark.exhaustive,
            ),
            pytest.param(
                4, True, {"every": 3, "warmup": 2, **SPARSE, "decay": 0.5}, marks=pytest.mark.exhaustive
            ),
        ],
    )
    def test_the_same_as_the_core(self, n, check_vma, settings):
        loop = qcomp.OuterLoop(**{"outer": HALF, "exact": None, **settings})
        expected = self.of_core(n, loop, 12)
        for number, (params, state) in enumerate(self.on_mesh(n, loop, 12, check_vma=check_vma)):
            for rank in range(n):
                assert bits(jax.tree.map(lambda x, r=rank: x[r], params)) == expected[rank][number]
            assert int(state.skipped) == 0

    @pytest.mark.exhaustive
    def test_a_value_that_is_not_finite(self):
        """All devices go back to the shared parameters, and the next round is as good as any."""
        loop = qcomp.OuterLoop(every=3, outer=HALF, exact=None, compressor=SIGN)
        seen = self.on_mesh(2, loop, 9, check_vma=True, break_at=5)
        (_, before), (params, after), (_, last) = seen[2], seen[5], seen[8]
        assert int(after.skipped) == int(last.skipped) == 1
        assert bits(after.anchor) == bits(before.anchor)
        assert bits(after.residuals) == bits(before.residuals)
        for name, x in zip(qcomp.jax.names_of(params), jax.tree.leaves(params), strict=True):
            assert_array_equal(np.asarray(x), np.stack([before.anchor[name]] * 2))
        assert bits(last.anchor) != bits(after.anchor)
        assert np.isfinite(last.anchor["wide"]).all()

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("warmup", [2, 0])
    def test_a_state_knows_whether_its_warm_up_has_ended(self, warmup):
        """A job that resumes with a shorter one begins the first round at once, from the parameters that it has."""
        settings = {"every": 2, "outer": HALF, "exact": None, "compressor": SIGN}
        started = self.on_mesh(2, qcomp.OuterLoop(warmup=50, **settings), 3, check_vma=True)[-1]
        shorter = qcomp.OuterLoop(warmup=warmup, **settings)
        params, state = self.on_mesh(2, shorter, 3, check_vma=True, after=started)[-1]
        expected, wanted = self.on_mesh(2, qcomp.OuterLoop(warmup=4, **settings), 6, check_vma=True)[-1]
        assert bits((params, state)) == bits((expected, wanted))
        longer = qcomp.OuterLoop(warmup=50, **settings)
        on = [
            self.on_mesh(2, loop, 2, check_vma=True, after=(params, state))[-1] for loop in (shorter, longer)
        ]
        assert bits(on[0]) == bits(on[1])

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"fragments": 2}, "'fragments': 1}; expected .*'fragments': 2"),
            (
                {"delay": 1},
                "'outer gradients under way': False, .* expected .*'outer gradients under way': True",
            ),
            ({"outer": ADAM}, "'outer second moments': False, .* expected .*'outer second moments': True"),
            (
                {"outer": qcomp.SGD(learning_rate=1.0)},
                "'outer momenta': True, .*; expected .*'outer momenta': F",
            ),
        ],
    )
    def test_a_state_of_another_loop(self, changes, match):
        settings = {"every": 2, "outer": HALF, "exact": None}
        with jax.set_mesh(mesh_of(2)):
            state = qcomp.jax.MeshOuterLoop(qcomp.OuterLoop(**settings), "data").init(tree_of(0))
        rows = jax.tree.map(lambda x: jnp.stack([x] * 2), tree_of(0))
        other = qcomp.OuterLoop(**settings | changes)
        with pytest.raises(ValueError, match=match):
            self.on_mesh(2, other, 1, check_vma=True, after=(rows, state))

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("breaks", ["parameters", "gradients"])
    def test_a_warm_up_that_ends_apart(self, breaks):
        """What differs, or is not finite, becomes NaN on all devices, as no error can be raised."""
        loop = qcomp.OuterLoop(every=2, outer=HALF, exact=None, warmup=3)
        if breaks == "gradients":
            seen = self.on_mesh(2, loop, 3, check_vma=True, break_at=2)
        else:
            seen = self.on_mesh(2, loop, 4, check_vma=True, without_average=True)
        params, state = seen[2]
        assert all(np.isnan(x).all() for x in jax.tree.leaves((params, state.anchor)))


class TestOneBitLamb:
    SHAPES: ClassVar = {"b": (7,), "deep": [(40, 3)], "wide": [(7, 9), (7, 9)]}
    SETTINGS: ClassVar = {
        "betas": (0.9, 0.95),
        "freeze": 6,
        "compressor": SIGN,
        "exact": lambda tensors: [t.size < 10 for t in tensors],
        "watch": None,
        "nonfinite": "skip",
    }

    def of_core(self, n, opt, steps, weights):
        first, names, gradients = core_gradients(n, self.SHAPES)

        def rank_main(comm):
            params, state, seen = first, opt.init(first, comm, names), []
            for _ in range(steps):
                own = gradients(comm.rank, params)
                params, state = opt.step(params, own, state, comm, weight=weights and weights[comm.rank])
                seen.append(bits(params))
            return seen, state.numbers

        return qcomp.comm.run_local(n, rank_main)[0]

    def on_mesh(self, n, opt, steps, weights, *, check_vma):
        """Return the parameters after each step, the state before a refused step, and all after it."""
        tx, mesh, params = qcomp.jax.optax.onebit_lamb(opt, "data"), mesh_of(n), tree_of(0, self.SHAPES)
        with jax.set_mesh(mesh):
            state = tx.init(params)
        specs = qcomp.jax.partition_specs(state, "data")

        def step(params, state, curvatures, minima, weights):
            varying = jax.lax.pcast(params, "data", to="varying") if check_vma else params
            grads = gradient(varying, own(curvatures), own(minima))
            weight = None if weights is None else weights[0]
            updates, state = tx.update(grads, state, params, weight=weight)
            return optax.apply_updates(params, updates), state

        run = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(ALL, specs, DATA, DATA, None if weights is None else DATA),
                out_specs=(ALL, specs),
                check_vma=check_vma,
            )
        )
        curvatures, minima = quadratics(n, self.SHAPES)
        weighed = None if weights is None else np.float32(weights)
        seen = []
        for _ in range(steps):
            params, state = jax.block_until_ready(run(params, state, curvatures, minima, weighed))
            seen.append(bits(params))
        minima["b"][1, 0] = np.nan
        refused = run(params, state, curvatures, minima, weighed)
        return seen, (params, state), refused

    @pytest.mark.parametrize(
        ("n", "check_vma", "changes", "weights"),
        [
            (2, True, {"weight_decay": 0.1}, None),
            pytest.param(
                4,
                False,
                {"learning_rate": lambda step: 0.25 - step / 128, "averaging": GATHERED},
                [3, 1, 0, 2],
                marks=pytest.mark.exhaustive,
            ),
            pytest.param(
                4,
                True,
                {"weight_decay": 0.1, "decoupled_weight_decay": False, "trust_bounds": (0.5, 1.2)},
                None,
                marks=pytest.mark.exhaustive,
            ),
        ],
    )
    def test_the_same_as_the_core(self, n, check_vma, changes, weights):
        """With a rate that is no power of two: no rounding is left to XLA."""
        opt = qcomp.OneBitLamb(**{"learning_rate": 0.03, **self.SETTINGS, **changes})
        expected, numbers = self.of_core(n, opt, 20, weights)
        seen, (params, state), (after, skipped) = self.on_mesh(n, opt, 20, weights, check_vma=check_vma)
        assert seen == expected
        for kind in ("average", "factor"):
            found = np.float64(np.asarray(getattr(state, kind))).sum(0)
            wanted = [numbers[f"{kind}.{name}"] for name in qcomp.jax.names_of(params)]
            assert_allclose(found, wanted, rtol=2.0**-46)
        assert bits(after) == bits(params)
        assert bits(skipped._replace(skipped=state.skipped)) == bits(state)
        assert int(skipped.skipped) == 1


class TestMuon:
    def of_core(self, n, opt, steps):
        first, names, gradients = core_gradients(n, MATRICES)

        def rank_main(comm):
            params, state, seen = first, opt.init(first, comm, names), []
            for _ in range(steps):
                params, state = opt.step(params, gradients(comm.rank, params), state, comm)
                seen.append(params)
            return seen

        return qcomp.comm.run_local(n, rank_main)[0]

    def on_mesh(self, n, opt, steps, *, check_vma):
        tx, mesh, params = qcomp.jax.optax.muon(opt, "data"), mesh_of(n), tree_of(0, MATRICES)
        with jax.set_mesh(mesh):
            state = tx.init(params)
        specs = qcomp.jax.partition_specs(state, "data")

        def step(params, state, curvatures, minima):
            varying = jax.lax.pcast(params, "data", to="varying") if check_vma else params
            updates, state = tx.update(gradient(varying, own(curvatures), own(minima)), state, params)
            return optax.apply_updates(params, updates), state

        run = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(ALL, specs, DATA, DATA),
                out_specs=(ALL, specs),
                check_vma=check_vma,
            )
        )
        seen, problem = [], quadratics(n, MATRICES)
        for _ in range(steps):
            params, state = jax.block_until_ready(run(params, state, *problem))
            seen.append(jax.tree.leaves(params))
        bad = jax.tree.map(np.copy, problem[1])
        bad["k"][1][1, 0, 0] = np.nan
        refused, after = run(params, state, problem[0], bad)
        assert bits(refused) == bits(params)
        assert bits(after[0]._replace(skipped=state[0].skipped)) == bits(state[0])
        assert int(after[0].skipped) == 1
        return seen, state

    @pytest.mark.exhaustive
    def test_exact_muon(self):
        """Only the roundings of matrix products differ; they are small for 4 steps."""
        opt = qcomp.Muon(compressor=qcomp.Identity(), update_compressor=qcomp.Identity(), **OF_MUON)
        found, _ = self.on_mesh(2, opt, 4, check_vma=True)
        for mine, expected in zip(found, self.of_core(2, opt, 4), strict=True):
            for x, wanted in zip(mine, expected, strict=True):
                assert_allclose(x, wanted, atol=1e-5)

    @pytest.mark.exhaustive
    def test_compressed_muon(self):
        """The codes of the first step are those of the core, and so are the exact steps of AdamW."""
        settings = {"output_axis": -1, "weight_decay": 0.125, **OF_MUON}
        ways = {"compressor": qcomp.LloydMax(bits=4, bucket_size=16), "update_compressor": SIGN}
        opt = qcomp.Muon(**ways, **settings)
        found, state = self.on_mesh(4, opt, 3, check_vma=False)
        (first, *_), (expected, *_) = found, self.of_core(4, opt, 3)
        for x, wanted in zip(first, expected, strict=True):
            near = np.isclose(x, wanted, atol=1e-5)
            assert near.mean() > 0.95
        for x in found[-1]:
            one, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
            assert all(other.tobytes() == one.tobytes() for other in others)
        momenta, residuals = state[0].residuals.server
        owned = [np.count_nonzero(np.asarray(row)) for row in momenta]
        assert sum(owned) == 12 * 20 + 16 * 8 + 9 * 9  # each matrix has one owner
        assert residuals.shape == momenta.shape == (4, 240)


@pytest.mark.exhaustive
def test_exact_inside_nodes_and_compressed_between_them():
    """Two transformations make a hierarchical mean: on each node exact, between nodes in one bit."""
    shapes, nodes = {"b": (30,), "w": (64, 3)}, (0, 0, 1, 1)
    tx = optax.chain(
        qcomp.jax.optax.compressed(qcomp.Identity(), "device", exact=None),
        qcomp.jax.optax.compressed(SIGN, "node", exact=None),
    )
    mesh = jax.make_mesh((2, 2), ("node", "device"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        state = tx.init(tree_of(0, shapes))
    specs = (qcomp.jax.partition_specs(state[0], "device"), qcomp.jax.partition_specs(state[1], "node"))
    each = P(("node", "device"))
    run = jax.jit(
        jax.shard_map(
            lambda g, s: tx.update(own(g), s), mesh=mesh, in_specs=(each, specs), out_specs=(ALL, specs)
        )
    )
    values = [stacked(4, step, shapes) for step in range(3)]
    mean = qcomp.CompressedMean(SIGN, "hierarchical")

    def rank_main(comm):
        own_values = [[x[comm.rank] for x in jax.tree.leaves(tree)] for tree in values]
        kept, found = mean.zeros(own_values[0], rank=comm.rank, size=4, nodes=nodes), []
        for x in own_values:
            average, kept = mean(x, kept, comm)
            found.append(average)
        return found

    expected = qcomp.comm.run_local(4, rank_main)[0]
    for x, wanted in zip(values, expected, strict=True):
        average, state = run(x, state)
        for found, core in zip(jax.tree.leaves(average), wanted, strict=True):
            assert_array_equal(found, core)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_weights(check_vma):
    """They are those of the core, also of exact tensors; what does not fit is refused on all devices."""
    shapes = {"b": (3,), "w": (8, 9)}
    tx = optax.chain(
        qcomp.jax.optax.compressed(SIGN, "data", exact=lambda tensors: [t.size < 10 for t in tensors]),
        optax.scale(1.0),
    )
    mesh, values = mesh_of(2), stacked(2, 0, shapes)
    with jax.set_mesh(mesh):
        state = tx.init(own(values))
    specs = qcomp.jax.partition_specs(state, "data")
    run = jax.jit(
        jax.shard_map(
            lambda g, s, w: tx.update(own(g), s, weight=w[0]),
            mesh=mesh,
            in_specs=(DATA, specs, DATA),
            out_specs=(ALL, specs),
            check_vma=check_vma,
        )
    )
    exact, compressed = qcomp.CompressedMean(qcomp.Identity()), qcomp.CompressedMean(SIGN)

    def rank_main(comm):
        b, w = qcomp.weighted([values["b"][comm.rank], values["w"][comm.rank]], [300, 100][comm.rank], comm)
        (w,), _ = compressed([w], compressed.init([w], comm), comm)
        return exact([b], exact.init([b], comm), comm)[0][0], w

    mean, after = run(values, state, np.float32([300, 100]))
    for found, wanted in zip(mean.values(), qcomp.comm.run_local(2, rank_main)[0], strict=True):
        assert_array_equal(found, wanted)
    for unfit in ([0, 0], [np.nan, 1], [1, -1], [np.inf, 1]):
        refused, kept = run(values, after, np.float32(unfit))
        assert all(np.isnan(x).all() for x in jax.tree.leaves(refused))
        assert bits(kept[0].residuals) == bits(after[0].residuals)
        assert int(kept[0].skipped) == 1
    values["w"][1, 0, 0] = np.nan
    alone, _ = run(values, after, np.float32([5, 0]))
    assert np.isfinite(alone["w"]).all()
    assert_array_equal(alone["b"], values["b"][0])


@pytest.mark.exhaustive
def test_gradients_of_several_batches():
    """Added up inside the step, or behind the mean by optax; the rate is the one that the state holds."""
    batches, compressed = stacked(2, 0), qcomp.jax.optax.compressed(SIGN, "data", exact=None)

    def of_rate(learning_rate):
        return optax.MultiSteps(optax.sgd(learning_rate), 2).gradient_transformation()

    tx = optax.chain(compressed, optax.inject_hyperparams(of_rate)(learning_rate=0.5))
    mesh = mesh_of(2)
    with jax.set_mesh(mesh):
        state = tx.init(own(batches))
    specs = qcomp.jax.partition_specs(state, "data")
    run = jax.jit(
        jax.shard_map(
            lambda g, s: tx.update(own(g), s), mesh=mesh, in_specs=(DATA, specs), out_specs=(ALL, specs)
        )
    )
    mean = qcomp.CompressedMean(SIGN)

    def rank_main(comm):
        x = [leaf[comm.rank] for leaf in jax.tree.leaves(batches)]
        kept, means = mean.init(x, comm), []
        for _ in range(4):
            average, kept = mean(x, kept, comm)
            means.append(average)
        return means

    means = qcomp.comm.run_local(2, rank_main)[0]
    for rate in (0.5, 0.25):
        state[1].hyperparams["learning_rate"] = jnp.float32(rate)
        none, state = run(batches, state)
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(none))
        updates, state = run(batches, state)
        one, other = means[:2] if rate == 0.5 else means[2:]
        for found, x, y in zip(jax.tree.leaves(updates), one, other, strict=True):
            atol = 2.0**-22 * max(np.abs(x).max(), np.abs(y).max())  # of roundings of what may cancel
            assert_allclose(found, -rate * (x + y) / 2, rtol=0, atol=atol)
