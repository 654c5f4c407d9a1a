"""The promises of a mean on a mesh."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import qcomp
from qcomp.core.mean.chunks import cut
from qcomp.core.numeric.random import replace_draws
from tests.jax_face.on_devices.problems import (
    ALL,
    BUCKET,
    DATA,
    SHAPES,
    SIGN,
    bits,
    mesh_of,
    own,
    rows,
    stacked,
    tree_of,
)


class Averager:
    """A `MeshMean` for stacked trees; it returns stacked means, one row for each device."""

    def __init__(self, n, mean, shapes=SHAPES):
        mesh = mesh_of(n)
        with jax.set_mesh(mesh):
            self.first = self.state = mean.init(tree_of(0, shapes))
        specs = qcomp.jax.partition_specs(self.state, "data")

        def call(values, state, draws):
            source = (lambda key, block: draws[key.hop][0]) if draws else None
            with replace_draws(source) if draws else contextlib.nullcontext():
                means, state = mean(own(values), state)
            return rows(means), state

        self.run = jax.jit(
            jax.shard_map(
                call, mesh=mesh, in_specs=(DATA, specs, DATA), out_specs=(DATA, specs), check_vma=False
            )
        )

    def __call__(self, values, draws=()):
        means, self.state = self.run(values, self.state, draws)
        return means


LAYERS = {"layers": [(8,), (8,), (40,), *[(8,)] * 7, (24,)]}
CHOSEN = "layers/2", "layers/10"


@functools.cache
def program_of_some(topology):
    """Return a mean on two devices that compresses two layers and keeps the others exact."""

    def policy(tensors):
        return [tensor.name not in CHOSEN for tensor in tensors]

    return Averager(2, qcomp.jax.MeshMean(SIGN, "data", topology, exact=policy), LAYERS)


def of_some(topology):
    """Return that mean in its first state; several tests share its program."""
    average = program_of_some(topology)
    average.state = average.first
    return average


class TestTheMean:
    @pytest.mark.parametrize(
        "topology", ["two_phase", pytest.param("all_gather", marks=pytest.mark.exhaustive)]
    )
    def test_the_sum_identity(self, topology):
        """The means add up to the exact means minus mean_i e_i + e_s; "layers/10" sorts after "layers/9"."""
        n = 2
        average = of_some(topology)
        sums = exact = 0.0
        for step in range(12):
            values = stacked(n, step, LAYERS)
            means = average(values)
            sums += np.concatenate([np.asarray(means["layers"][i][0], np.float64) for i in (2, 10)])
            exact += np.concatenate([values["layers"][i].mean(axis=0, dtype=np.float64) for i in (2, 10)])
            for i in (0, 9):
                assert_allclose(means["layers"][i][0], values["layers"][i].mean(axis=0), rtol=1e-5, atol=1e-6)
        worker, server = average.state.residuals
        owed = np.concatenate([np.asarray(worker[name], np.float64).mean(axis=0) for name in CHOSEN])
        if topology == "two_phase":
            served = [sum(segment.size for segment in chunk) for chunk in cut((40, 24), BUCKET, n)]
            of_devices = [np.asarray(row) for row in server[0]]
            assert not any(row[size:].any() for row, size in zip(of_devices, served, strict=True))
            owed += np.concatenate([row[:size] for row, size in zip(of_devices, served, strict=True)])
        assert np.abs(owed).max() > 0.1
        assert_allclose(sums + owed, exact, atol=2e-5)

    @pytest.mark.parametrize(
        "topology", ["two_phase", pytest.param("all_gather", marks=pytest.mark.exhaustive)]
    )
    def test_it_is_unbiased_over_all_draws(self, topology):
        """Values are multiples of a quarter of a step, so four draws stand for all."""
        n, shapes = 2, [(12,)]
        compressor = qcomp.QSGD(levels=1, bucket_size=8)
        average = Averager(
            n, qcomp.jax.MeshMean(compressor, "data", topology, feedback=False, exact=None), shapes
        )
        rng = np.random.default_rng(0)
        values = [np.concatenate([rng.integers(-4, 5, (n, 12)) / 4], axis=0).astype(np.float32)]
        values[0][:, [0, 8]] = 1  # sets the step
        draws = np.arange(4, dtype=np.float32)[:, None] * 16384
        total, count = 0, 0
        servers = range(4) if topology == "two_phase" else range(1)
        for first in range(4):
            for second in range(4):
                for server in servers:
                    of_worker = np.stack([draws[first], draws[second]])
                    of_server = np.stack([draws[server], draws[server]])
                    (mean,) = average(values, (of_worker, of_server))
                    total = total + np.asarray(mean[0], np.float64)
                    count += 1
        assert_allclose(total / count, values[0].mean(axis=0), atol=1e-6)

    @pytest.mark.parametrize(
        ("bad", "where"),
        [
            (np.nan, 0),
            (np.nan, 2),
            pytest.param(np.inf, 0, marks=pytest.mark.exhaustive),
            (np.float32(2.0**101), 2),
        ],
    )
    def test_a_value_that_is_not_finite_is_refused_on_all_devices(self, bad, where):
        """In an exact tensor as well as in a compressed one."""
        n = 2
        average = of_some("two_phase")
        average(stacked(n, 1, LAYERS))
        before = average.state
        values = stacked(n, 2, LAYERS)
        values["layers"][where][1, 5] = bad
        means = average(values)
        assert all(np.isnan(np.asarray(leaf)).all() for leaf in jax.tree.leaves(means))
        assert bits(average.state.residuals) == bits(before.residuals)
        assert (int(average.state.step), int(average.state.skipped)) == (1, 1)
        means = average(stacked(n, 2, LAYERS))
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(means))
        assert (int(average.state.step), int(average.state.skipped)) == (2, 1)

    @pytest.mark.exhaustive
    def test_tensors_of_all_kinds(self):
        """Empty ones, scalars, half precision, and fewer buckets than devices."""
        n = 8
        tree = {"e": jnp.zeros((0, 3)), "s": jnp.float32(2), "h": jnp.full((5,), 3, jnp.bfloat16)}
        mean = qcomp.jax.MeshMean(SIGN, "data", exact=None)
        values = jax.tree.map(lambda x: jnp.stack([x] * n), tree)
        with jax.set_mesh(mesh_of(n)):
            state = mean.init(tree)
        specs = qcomp.jax.partition_specs(state, "data")
        run = jax.jit(
            jax.shard_map(
                lambda x, s: mean(own(x), s)[0],
                mesh=mesh_of(n),
                in_specs=(DATA, specs),
                out_specs=ALL,
                check_vma=False,
            )
        )
        found = run(values, state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
            lambda x: (x.shape, x.dtype), tree
        )
        assert float(found["s"]) == 2
        assert_array_equal(np.asarray(found["h"], np.float32), 3)

    @pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2])
    @pytest.mark.parametrize("how", [lambda f: f, jax.jit])
    def test_each_device_holds_only_its_own_row_of_residuals(self, kind, how):
        """No device holds the rows of others, and the types that JAX tracks agree with `partition_specs`."""
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
        mean = qcomp.jax.MeshMean(SIGN, "data", exact=None)
        with jax.set_mesh(mesh):
            state = how(mean.init)({"w": jnp.ones((4, 16))})
        specs = qcomp.jax.partition_specs(state, "data")
        for row in jax.tree.leaves(state.residuals):
            assert [shard.data.shape[0] for shard in row.addressable_shards] == [1] * 4
        run = jax.shard_map(mean, mesh=mesh, in_specs=(ALL, specs), out_specs=(ALL, specs), check_vma=False)
        found, state = jax.jit(run)({"w": jnp.ones((4, 16))}, state)
        assert_array_equal(found["w"], 1)

    def test_compressing_nothing_warns(self):
        mean = qcomp.jax.MeshMean(SIGN, "data")
        with jax.set_mesh(mesh_of(2)), pytest.warns(UserWarning, match="compresses nothing"):
            state = mean.init(tree_of(0))
        assert state.residuals == qcomp.jax.Residuals({}, ())


MATRICES = {"conv": (3, 3, 4, 6), "layers": [(12, 10), (40,)]}
"""Two matrices, and a vector that stays exact."""


def of_low_rank(**changes):
    averaging = qcomp.PowerSGD(rank=2, min_compression=0)
    return qcomp.jax.MeshMean(
        **{
            "compressor": qcomp.Identity(),
            "axis_name": "data",
            "exact": None,
            "averaging": averaging,
            **changes,
        }
    )


class TestPowerSGD:
    @pytest.mark.exhaustive
    @pytest.mark.parametrize("n", [2, 3])
    def test_it_agrees_with_the_core_and_loses_nothing(self, n):
        """Matrix products round differently; the means add up to the exact means minus mean_i e_i."""
        average, core = Averager(n, of_low_rank(), MATRICES), qcomp.PowerSGDMean(rank=2, min_compression=0)
        steps = [jax.tree.leaves(stacked(n, step, MATRICES)) for step in range(6)]

        def rank_main(comm):
            state, found = core.init([x[comm.rank] for x in steps[0]], comm), []
            for values in steps:
                means, state = core([x[comm.rank] for x in values], state, comm)
                found.append(means)
            return found

        expected = qcomp.comm.run_local(n, rank_main)[0]
        lost = [
            np.zeros(shape) for shape in jax.tree.leaves(MATRICES, is_leaf=lambda s: isinstance(s, tuple))
        ]
        for step, values in enumerate(steps):
            means = jax.tree.leaves(average(stacked(n, step, MATRICES)))
            for i, (of_devices, mean) in enumerate(zip(means, expected[step], strict=True)):
                rows = np.asarray(of_devices)
                assert len({row.tobytes() for row in rows}) == 1
                assert_allclose(rows[0], mean, atol=1e-4)
                lost[i] += values[i].mean(axis=0, dtype=np.float64) - rows[0]
        worker, factors = average.state.residuals
        for i, name in ((0, "conv"), (1, "layers/0")):
            owed = np.asarray(worker[name], np.float64).mean(axis=0)
            assert np.abs(owed).max() > 0.1
            assert_allclose(np.ravel(lost[i]), owed, atol=2e-5)
        assert np.abs(lost[2]).max() < 1e-5
        assert all(len({row.tobytes() for row in np.asarray(rows)}) == 1 for rows in factors)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("value", [np.nan, 2.0**100], ids=["NaN", "too large"])
    def test_a_value_that_is_out_of_range_is_refused_on_all_devices(self, value):
        average = Averager(2, of_low_rank(), MATRICES)
        average(stacked(2, 1, MATRICES))
        before = average.state
        values = stacked(2, 2, MATRICES)
        values["layers"][0][1, [3, 4], [5, 6]] = value  # with factors that are not too large
        means = average(values)
        assert all(np.isnan(np.asarray(leaf)).all() for leaf in jax.tree.leaves(means))
        assert bits(average.state.residuals) == bits(before.residuals)
        assert (int(average.state.step), int(average.state.skipped)) == (1, 1)

    def test_a_matrix_of_zeros_can_start_later(self):
        """Until then its factors stay the first ones, which zeros in a new state stand for."""
        average = Averager(2, of_low_rank(averaging=qcomp.PowerSGD(rank=1, min_compression=0)), [(4, 6)])
        zeros, ones = [np.zeros((2, 4, 6), np.float32)], [np.ones((2, 4, 6), np.float32)]
        assert not np.asarray(average(zeros)[0]).any()
        assert_allclose(average(ones)[0], 1, rtol=1e-6)

    @pytest.mark.parametrize(
        ("changes", "error", "match"),
        [
            (
                {"averaging": qcomp.Averaging()},
                TypeError,
                "averaging is Averaging.*expected a qcomp.PowerSGD",
            ),
            ({"topology": "all_gather"}, ValueError, "topology is 'all_gather' beside averaging="),
            ({"feedback": False}, ValueError, "feedback is False beside averaging="),
            ({"compressor": SIGN}, ValueError, "PowerSGD of rank 2 needs"),
            ({"compressor": qcomp.QSGD(127, coding="range")}, ValueError, "payloads vary in length"),
        ],
    )
    def test_incompatible_settings_are_refused(self, changes, error, match):
        with pytest.raises(error, match=match):
            of_low_rank(**changes)


@pytest.mark.parametrize(
    "mean", [qcomp.jax.MeshMean(SIGN, "data"), pytest.param(of_low_rank(), marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("n", [1, 2])
def test_jax_knows_that_all_devices_hold_the_mean(mean, n):
    """With shard_map's default checks; also on one device, where exact tensors are sent to nobody."""
    mesh = mesh_of(n)
    tree = {"large": np.ones((n, 100, 120), np.float32), "small": np.ones((n, 3), np.float32)}
    with jax.set_mesh(mesh):
        state = mean.init(own(tree))
    specs = qcomp.jax.partition_specs(state, "data")
    run = jax.shard_map(
        lambda x, s: mean(own(x), s), mesh=mesh, in_specs=(DATA, specs), out_specs=(ALL, specs)
    )
    means, state = jax.jit(run)(tree, state)
    assert_allclose(means["large"], 1, rtol=1e-5)
    assert_array_equal(means["small"], 1)
    assert int(state.step) == 1


class TestErrors:
    def test_outside_a_mesh(self):
        mean = qcomp.jax.MeshMean(SIGN, "data", exact=None)
        with pytest.raises(
            ValueError, match=r"axis_name is 'data', which no jax.shard_map and no jax.set_mesh"
        ):
            mean.init(tree_of(0))
        with jax.set_mesh(mesh_of(2)):
            state = mean.init(tree_of(0))
            with pytest.raises(ValueError, match=r"expected a call inside jax\.shard_map"):
                mean(tree_of(0), state)

    def test_a_state_of_other_tensors(self):
        mean = qcomp.jax.MeshMean(SIGN, "data", exact=None)
        with jax.set_mesh(mesh_of(2)):
            state = mean.init({"w": jnp.ones(8)})
        specs = qcomp.jax.partition_specs(state, "data")
        run = jax.shard_map(
            mean, mesh=mesh_of(2), in_specs=(ALL, specs), out_specs=(ALL, specs), check_vma=False
        )
        with pytest.raises(ValueError, match="state has residuals "):
            jax.jit(run)({"w": jnp.ones(9)}, state)
        run = jax.shard_map(mean, mesh=mesh_of(2), in_specs=(ALL, ALL), out_specs=(ALL, ALL), check_vma=False)
        with pytest.raises(ValueError, match="cut as partition_specs says"):
            jax.jit(run)({"w": jnp.ones(8)}, state)

    def test_integers(self):
        with jax.set_mesh(mesh_of(2)), pytest.raises(TypeError, match="the array at 'a/w' has dtype int32"):
            qcomp.jax.MeshMean(SIGN, "data").init({"a": {"w": jnp.arange(9)}})


def test_means_over_two_axes_draw_apart():
    """Equal draws would make a mean of means biased. Over the first axis, draws are those on a mesh of one axis."""
    compressor = qcomp.QSGD(levels=1, bucket_size=16)
    x = stacked(2, 0, (64,))

    def over(axis, mesh):
        mean = qcomp.jax.MeshMean(compressor, axis, feedback=False, exact=None)

        def call(x):
            own = x[jax.lax.axis_index(axis)]
            return mean(own, mean.init(own))[0]

        return np.asarray(
            jax.jit(jax.shard_map(call, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False))(x)
        )

    both = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "pod"))
    of_data, of_pod = over("data", both), over("pod", both)
    assert bits(of_data) == bits(over("data", mesh_of(2)))
    assert (of_data != of_pod).sum() > 16
