"""Transformations in optax: chains, donation, checkpoints, skipped steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose

import qcomp
import qcomp.jax.optax
from tests.jax_face.on_devices.problems import (
    ALL,
    DATA,
    SIGN,
    bits,
    mesh_of,
    own,
    quadratics,
    stacked,
    tree_of,
)


class TestInOptax:
    def trained(self, tx, *, check_vma=False, steps=30, params=None, state=None, n=2):
        """Return parameters, state and losses after some steps with the same gradients on all devices."""
        mesh = mesh_of(n)
        params = jax.tree.map(jnp.asarray, tree_of(0)) if params is None else params
        if state is None:
            with jax.set_mesh(mesh):
                state = tx.init(params)
        specs = qcomp.jax.partition_specs(state, "data")

        def loss(params, curvatures, minima):
            parts = jax.tree.map(lambda x, c, m: jnp.sum(c * (x - m) ** 2), params, curvatures, minima)
            return sum(jax.tree.leaves(parts))

        def step(params, state, curvatures, minima):
            varying = jax.lax.pcast(params, "data", to="varying") if check_vma else params
            value, grads = jax.value_and_grad(loss)(varying, own(curvatures), own(minima))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

        run = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(ALL, specs, DATA, DATA),
                out_specs=(ALL, specs, ALL),
                check_vma=check_vma,
            ),
            donate_argnums=(0, 1),
        )
        put = lambda tree, specs: jax.tree.map(  # noqa: E731
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
        )
        params = put(params, jax.tree.map(lambda _: ALL, params))
        state = put(state, specs)
        given = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.size > 1]
        problem, losses = quadratics(n), []
        for _ in range(steps):
            params, state, value = run(params, state, *problem)
            losses.append(float(value))
        assert all(leaf.is_deleted() for leaf in given)
        return params, state, losses

    def test_in_a_chain_with_a_schedule(self):
        tx = optax.chain(
            optax.clip_by_global_norm(50.0),
            qcomp.jax.optax.compressed(SIGN, "data", exact=qcomp.ExactBelow(20)),
            optax.apply_if_finite(optax.adam(optax.cosine_decay_schedule(0.2, 30)), 3),
        )
        params, _, losses = self.trained(tx)
        assert losses[-1] < 0.6 * losses[0]
        for leaf in jax.tree.leaves(params):
            first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
            assert len(others) == 1
            assert all(other.tobytes() == first.tobytes() for other in others)

    @pytest.mark.exhaustive
    def test_an_injected_learning_rate(self):
        def of_rate(learning_rate):
            return qcomp.jax.optax.onebit_adam(learning_rate, 3, "data", exact=None)

        expected, _, _ = self.trained(of_rate(0.25), steps=6)
        params, state, _ = self.trained(optax.inject_hyperparams(of_rate)(learning_rate=0.25), steps=6)
        assert float(state.hyperparams["learning_rate"]) == 0.25
        assert bits(params) == bits(expected)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("kind", ["compressed", "onebit_adam"])
    def test_the_types_of_shard_map_hold(self, kind):
        """With check_vma, JAX itself proves that parameters stay the same on all devices."""
        if kind == "compressed":
            tx = optax.chain(qcomp.jax.optax.compressed(SIGN, "data", exact=None), optax.adam(0.1))
        else:
            tx = qcomp.jax.optax.onebit_adam(0.1, 10, "data", b2=0.9, exact=None, weight_decay=0.01)
        checked, _, losses = self.trained(tx, check_vma=True)
        unchecked, _, _ = self.trained(tx)
        assert losses[-1] < losses[0]
        for found, wanted in zip(jax.tree.leaves(checked), jax.tree.leaves(unchecked), strict=True):
            assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("kind", ["onebit_adam", "onebit_lamb"])
    def test_a_state_knows_whether_its_variance_is_frozen(self, kind):
        """A job that resumes with another freeze does not take a frozen variance for one of the warm-up."""

        def freezing_at(freeze):
            if kind == "onebit_adam":
                return qcomp.jax.optax.onebit_adam(0.1, freeze, "data", b2=0.9, exact=None)
            settings = {"betas": (0.9, 0.9), "exact": None, "watch": None, "nonfinite": "skip"}
            return qcomp.jax.optax.onebit_lamb(
                qcomp.OneBitLamb(learning_rate=0.1, freeze=freeze, **settings), "data"
            )

        expected, _, _ = self.trained(freezing_at(4), steps=8)
        params, state, _ = self.trained(freezing_at(100), steps=3)
        params, state, _ = self.trained(freezing_at(2), steps=2, params=params, state=state)
        assert int((state[0] if kind == "onebit_adam" else state).frozen) == 4
        params, _, _ = self.trained(freezing_at(100), steps=3, params=params, state=state)
        assert bits(params) == bits(expected)

    def test_gradients_already_summed_by_jax_are_refused(self):
        mean = qcomp.jax.MeshMean(SIGN, "data", exact=None)
        tree = {"w": jnp.ones(32)}
        with jax.set_mesh(mesh_of(2)):
            state = mean.init(tree)
        specs = qcomp.jax.partition_specs(state, "data")
        run = jax.shard_map(mean, mesh=mesh_of(2), in_specs=(ALL, specs), out_specs=(ALL, specs))
        with pytest.raises(ValueError, match=r"'w' has the same values on all devices .*pcast"):
            jax.jit(run)(tree, state)

    @pytest.mark.parametrize("kind", ["onebit_adam", "zero_one_adam"])
    def test_a_weight_does_not_hide_gradients_already_summed_by_jax(self, kind):
        """Weighted gradients differ between devices, also if JAX has summed them."""
        optimizer = qcomp.ZeroOneAdam(learning_rate=0.1, exact=None, nonfinite="skip")
        makers = {
            "onebit_adam": lambda: qcomp.jax.optax.onebit_adam(0.1, 2, "data", exact=None),
            "zero_one_adam": lambda: qcomp.jax.optax.zero_one_adam(optimizer, "data"),
        }
        tx, params = makers[kind](), {"w": jnp.ones(32)}
        with jax.set_mesh(mesh_of(2)):
            state = tx.init(params)

        def step(gradients, state, weight):
            local = {} if kind == "onebit_adam" else {"local": qcomp.jax.optax.local_params(params, state)}
            return tx.update(gradients, state, params, weight=weight[0], **local)

        specs = qcomp.jax.partition_specs(state, "data")
        run = jax.shard_map(
            step, mesh=mesh_of(2), in_specs=(ALL, specs, PartitionSpec("data")), out_specs=(ALL, specs)
        )
        with pytest.raises(ValueError, match=r"'w' has the same values on all devices .*pcast"):
            jax.jit(run)(params, state, jnp.ones(2))

    @pytest.mark.exhaustive
    def test_a_refused_step_of_one_bit_adam_changes_nothing(self):
        n = 2
        tx = qcomp.jax.optax.onebit_adam(
            optax.linear_schedule(0.5, 0.0, 10), 2, "data", exact=None, compressor=SIGN, weight_decay=0.1
        )
        params = jax.tree.map(jnp.asarray, tree_of(0))
        with jax.set_mesh(mesh_of(n)):
            state = tx.init(params)
        specs = qcomp.jax.partition_specs(state, "data")

        @jax.jit
        def update(grads, state, params):
            def call(grads, state, params):
                return tx.update(own(grads), state, params)

            return jax.shard_map(
                call, mesh=mesh_of(n), in_specs=(DATA, specs, ALL), out_specs=(ALL, specs), check_vma=False
            )(grads, state, params)

        for step in range(5):
            bad = stacked(n, step)
            bad["wide"][1, 3, 4] = np.nan
            updates, refused = update(bad, state, params)
            assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(updates))
            (before, after), (rest, rest_after) = zip(state, refused, strict=True)
            assert bits(after._replace(skipped=before.skipped)) == bits(before)
            assert int(after.skipped) == int(before.skipped) + 1
            assert bits(rest.inner_state) == bits(rest_after.inner_state)
            updates, state = update(stacked(n, step), refused, params)
            assert int(state[0].step) == step + 1
            params = optax.apply_updates(params, updates)

    @pytest.mark.exhaustive
    def test_orbax_restores_a_state(self, tmp_path):
        checkpoint = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
        tx = optax.chain(qcomp.jax.optax.compressed(SIGN, "data", exact=None), optax.adam(0.1))
        params, state, _ = self.trained(tx, steps=4)
        with checkpoint.StandardCheckpointer() as saver:
            saver.save(tmp_path / "state", {"params": params, "state": state})
            saver.wait_until_finished()
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                {"params": params, "state": state},
            )
            restored = saver.restore(tmp_path / "state", like)
        self.assert_goes_on_alike(tx, (params, state), (restored["params"], restored["state"]))

    @pytest.mark.exhaustive
    def test_flax_restores_a_state(self):
        serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")
        tx = optax.chain(qcomp.jax.optax.compressed(SIGN, "data", exact=None), optax.adam(0.1))
        params, state, _ = self.trained(tx, steps=4)
        data = serialization.to_bytes({"params": params, "state": state})
        like = jax.tree.map(jnp.zeros_like, {"params": params, "state": state})
        restored = serialization.from_bytes(like, data)
        self.assert_goes_on_alike(tx, (params, state), (restored["params"], restored["state"]))

    def assert_goes_on_alike(self, tx, first, second):
        assert jax.tree.structure(first) == jax.tree.structure(second)
        assert bits(first) == bits(second)
        assert any(np.asarray(e).any() for e in jax.tree.leaves(first[1][0].residuals))
        copies = (jax.tree.map(lambda x: jnp.array(np.asarray(x)), both) for both in (first, second))
        (one, *_), (other, *_) = (self.trained(tx, steps=3, params=p, state=s) for p, s in copies)
        assert bits(one) == bits(other)

    @pytest.mark.exhaustive
    def test_parameters_of_flax(self):
        nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
        model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
        graph, params = nnx.split(model)
        tx = optax.chain(
            qcomp.jax.optax.compressed(SIGN, "data", exact=qcomp.ExactBelow(100)), optax.sgd(0.5)
        )
        mesh = mesh_of(4)
        with jax.set_mesh(mesh):
            state = tx.init(params)
        (worker,) = state[0].residuals.worker.values()
        assert worker.shape == (4, 512)
        specs = qcomp.jax.partition_specs(state, "data")

        def loss(params, x):
            return jnp.mean((nnx.merge(graph, params)(x) - 1) ** 2)

        def step(params, state, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

        run = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=(ALL, specs, DATA), out_specs=(ALL, specs, ALL), check_vma=False
            )
        )
        x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
        losses = []
        for _ in range(20):
            params, state, value = run(params, state, x)
            losses.append(float(value))
        assert losses[-1] < 0.5 * losses[0]
