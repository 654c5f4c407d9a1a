"""README's recipes for a mesh train as the exact mean does, on tokens of very different frequency."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qcomp
import qcomp.jax.optax
from tests.jax_face.on_devices.problems import ALL, DATA, mesh_of

DEVICES, VOCABULARY, WIDTH, BATCH, STEPS, RATE = 4, 200, 64, 64, 200, 3e-3
WEIGHTS = 1 / np.arange(1, VOCABULARY + 1)  # the law of Zipf
SUCCESSOR = np.random.default_rng(3).permutation(VOCABULARY)


def exact_mean() -> optax.GradientTransformation:
    """Return the mean of the gradients of all devices."""

    def update(updates, state, params=None):
        del params
        return jax.lax.pmean(updates, "data"), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def losses(params, tokens):
    hidden = jax.nn.relu(params["embedding"][tokens] @ params["hidden"])
    return optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["head"], jnp.asarray(SUCCESSOR)[tokens]
    )


def trained(tx: optax.GradientTransformation, steps: int = STEPS) -> float:
    """Return the loss over all tokens after some steps, by frequency."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embedding": (VOCABULARY, WIDTH), "hidden": (WIDTH, 2 * WIDTH), "head": (2 * WIDTH, VOCABULARY)}
    params = {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0] if name != "embedding" else 1)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    mesh = mesh_of(DEVICES)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    specs = qcomp.jax.partition_specs(state, "data")

    def step(params, state, tokens):
        varying = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda params: losses(params, tokens).mean())(varying)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(ALL, specs, DATA), out_specs=(ALL, specs)),
        donate_argnums=(0, 1),
    )
    rng = np.random.default_rng(1)
    for _ in range(steps):
        tokens = rng.choice(VOCABULARY, DEVICES * BATCH, p=WEIGHTS / WEIGHTS.sum())
        # several steps in flight can leave XLA without a thread for one device's part
        params, state = jax.block_until_ready(step(params, state, tokens))
    every = losses(jax.device_get(params), np.arange(VOCABULARY))
    return float((every * WEIGHTS).sum() / WEIGHTS.sum())


def compressed(compressor: qcomp.Compressor, **settings: Any) -> optax.GradientTransformation:
    """Return Adam after a compressed mean."""
    mean = qcomp.jax.optax.compressed(compressor, "data", exact=None, **settings)
    return optax.chain(mean, optax.adam(RATE))


def test_recipes():
    exact = trained(optax.chain(exact_mean(), optax.adam(RATE)))
    assert trained(compressed(qcomp.MinMaxUInt8())) < 1.2 * exact
    assert trained(qcomp.jax.optax.onebit_adam(RATE, 50, "data", b2=0.99, exact=None)) < 1.5 * exact
    assert trained(compressed(qcomp.ScaledSign())) > 4 * exact  # what pages warn of
