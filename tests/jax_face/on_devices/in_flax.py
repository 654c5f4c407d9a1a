"""Optimizers of flax.nnx, which give variables to ``init`` and their arrays to ``update``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qcomp
import qcomp.jax.optax
from tests.jax_face.on_devices.problems import ALL, DATA, SIGN, bits, mesh_of

nnx = pytest.importorskip("flax.nnx")

CHOSEN = qcomp.ByName(
    {"first/kernel": qcomp.Scaled(qcomp.QSGD(levels=7, bucket_size=16)), "*/kernel": SIGN, "*/bias": None}
)
TRANSFORMATIONS = {
    "compressed": optax.chain(
        qcomp.jax.optax.compressed(SIGN, "data", exact=None, compressors=CHOSEN), optax.sgd(0.125)
    ),
    "onebit_adam": qcomp.jax.optax.onebit_adam(0.02, 3, "data", exact=None, compressors=CHOSEN),
}


class Model(nnx.Module):  # type: ignore[name-defined]  # not exported by name
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(6, 20, rngs=rngs), nnx.Linear(20, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def batches(steps=8):
    return np.random.default_rng(0).normal(size=(steps, 16, 6)).astype(np.float32)


def trained_by_nnx(tx, mesh):
    """Return the parameters and the state after steps of `nnx.Optimizer`."""
    model = Model()
    with jax.set_mesh(mesh):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    specs = qcomp.jax.partition_specs(optimizer, "data")

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))
        return model, optimizer

    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(ALL, specs, DATA), out_specs=(ALL, specs), check_vma=False)
    )
    for x in batches():
        model, optimizer = run(model, optimizer, x)
    return nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(optimizer.opt_state)


def trained_by_hand(tx, mesh):
    """Return the parameters and the state after steps with plain arrays."""
    graph, params = nnx.split(Model(), nnx.Param)
    params = nnx.as_pure(params)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    specs = qcomp.jax.partition_specs(state, "data")

    def step(params, state, x):
        grads = jax.grad(lambda params: loss(nnx.merge(graph, params), x))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(ALL, specs, DATA), out_specs=(ALL, specs), check_vma=False)
    )
    for x in batches():
        params, state = run(params, state, x)
    return params, state


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_optimizer_of_nnx_trains_in_the_same_bits(name):
    mesh, tx = mesh_of(2), TRANSFORMATIONS[name]
    params, state = trained_by_nnx(tx, mesh)
    by_hand, state_by_hand = trained_by_hand(tx, mesh)
    assert bits(params) == bits(by_hand)
    assert bits(state) == bits(state_by_hand)
    assert float(loss(nnx.merge(nnx.split(Model(), nnx.Param)[0], params), batches()[0])) < 0.9 * float(
        loss(Model(), batches()[0])
    )


def test_a_variable_has_the_name_of_its_array():
    params = nnx.state(Model(), nnx.Param)
    names = "first/bias", "first/kernel", "second/bias", "second/kernel"
    assert qcomp.jax.names_of(params) == qcomp.jax.names_of(nnx.as_pure(params)) == names
    assert qcomp.jax.names_of({"value": jnp.ones(1)}) == ("value",)


def test_other_gradients_are_named():
    """The error does not speak of the mesh."""
    tx, params = (
        qcomp.jax.optax.compressed(SIGN, "data", exact=None),
        {"first": {"kernel": jnp.ones((6, 20))}},
    )
    with jax.set_mesh(mesh_of(2)):
        state = tx.init(params)
    specs = qcomp.jax.partition_specs(state, "data")
    other = {"second": {"kernel": jnp.ones((6, 20))}}
    run = jax.shard_map(
        lambda g, s: tx.update(g, s)[0],
        mesh=mesh_of(2),
        in_specs=(ALL, specs),
        out_specs=ALL,
        check_vma=False,
    )
    with pytest.raises(
        ValueError, match=r"arrays at \['first/kernel'\], which tree lacks, .*\['second/kernel'\]"
    ):
        jax.jit(run).trace(other, state)
