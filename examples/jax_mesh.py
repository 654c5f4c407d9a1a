"""A classifier of handwritten digits, trained with optax on a mesh whose devices send eight bits per element.

Run ``python examples/jax_mesh.py``. Without GPUs it splits the CPU into eight devices. On several machines run a
process on each, ``mpirun -n 2 python -m mpi4py examples/jax_mesh.py``: the mesh has the devices of all machines.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI
from sklearn.datasets import load_digits

import qcomp.jax.optax

TRAIN, STEPS, BATCH, WIDTH = 1500, 200, 256, 128

Params = dict[str, Any]


def first_params(key: Any) -> Params:
    """Return a network of two layers."""
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (64, WIDTH)) / 8, "b": jnp.zeros(WIDTH)},
        "out": {"w": jax.random.normal(second, (WIDTH, 10)) / np.sqrt(WIDTH), "b": jnp.zeros(10)},
    }


def logits(params: Params, images: Any) -> Any:
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss(params: Params, images: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def tell(line: str) -> None:
    """Print a line, once for all processes."""
    if jax.process_index() == 0:
        print(line, flush=True)


def main() -> None:
    """Train, check that all devices agree, and print the accuracy."""
    if MPI.COMM_WORLD.size > 1:
        jax.distributed.initialize(cluster_detection_method="mpi4py")
    else:
        jax.config.update("jax_num_cpu_devices", 8)
    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images, jnp.float32) / 16, jnp.asarray(labels)

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    schedule = optax.cosine_decay_schedule(0.01, STEPS)
    tx = optax.chain(
        qcomp.jax.optax.compressed(  # biases stay exact
            qcomp.MinMaxUInt8(), "data", exact=qcomp.ExactBelow(1000)
        ),
        optax.apply_if_finite(optax.adam(schedule), 5),
    )

    def step(params: Params, state: Any, images: Any, labels: Any) -> tuple[Params, Any, Any]:
        varying = jax.lax.pcast(
            params, "data", to="varying"
        )  # otherwise jax.grad adds up the gradients of all devices
        value, grads = jax.value_and_grad(loss)(varying, images, labels)  # of this device's part of the batch
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    params = first_params(jax.random.key(0))
    with jax.set_mesh(mesh):
        state = tx.init(params)
    specs = qcomp.jax.partition_specs(
        state, "data"
    )  # residuals differ between devices, everything else is the same
    state = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    params, cut = jax.device_put(params, NamedSharding(mesh, P())), NamedSharding(mesh, P("data"))
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P("data"), P("data")),
            out_specs=(P(), specs, P()),
        ),
        donate_argnums=(0, 1),
    )
    rng = np.random.default_rng(0)
    for number in range(STEPS):
        batch = rng.choice(TRAIN, BATCH, replace=False)
        params, state, value = step(params, state, *jax.device_put((images[batch], labels[batch]), cut))
        if (number + 1) % 50 == 0:
            tell(f"step {number + 1:3}  loss {float(value):.4f}")

    for leaf in jax.tree.leaves(params):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        if any(other.tobytes() != first.tobytes() for other in others):
            raise SystemExit("the devices hold different parameters")
        multihost_utils.assert_equal(first, "the processes hold different parameters")
    tell(f"all {jax.device_count()} devices hold identical parameters")
    right = jnp.argmax(logits(params, images[TRAIN:]), axis=1) == labels[TRAIN:]
    tell(f"accuracy {float(right.mean()):.3f} on digits not seen in training")


if __name__ == "__main__":
    main()
