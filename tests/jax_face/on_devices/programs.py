"""Programs stay small: their lines before XLA, for each tensor and for each device."""

import functools

import jax
import numpy as np
import optax
import pytest

import qcomp
import qcomp.jax.optax
from tests.jax_face.on_devices.problems import ALL, SIGN, mesh_of

SHAPE = (16, 24)
METHODS = {
    "sign": SIGN,
    "qsgd": qcomp.Scaled(qcomp.QSGD(levels=7, bucket_size=16)),
    "bfloat16": qcomp.Cast("bfloat16"),
    "one-bit Adam": None,
}


@functools.cache
def lines(method, tensors, devices):
    """Return the lines of the program of an update of some tensors."""
    if METHODS[method] is None:
        tx = qcomp.jax.optax.onebit_adam(0.1, 9, "data", exact=None)
    else:
        tx = optax.chain(qcomp.jax.optax.compressed(METHODS[method], "data", exact=None), optax.sgd(0.1))
    mesh = mesh_of(devices)
    params = {f"{number:03}": jax.ShapeDtypeStruct(SHAPE, np.float32) for number in range(tensors)}
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, params)
    specs = qcomp.jax.partition_specs(state, "data")
    update = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(ALL, specs), out_specs=(ALL, specs), check_vma=False
    )
    return jax.jit(update).lower(params, state).as_text().count("\n")


@pytest.mark.parametrize("method", METHODS)
def test_lines_for_each_tensor(method):
    """`jax.lax.pmean` has 4."""
    most = {"one-bit Adam": 130}.get(method, 60)
    assert (lines(method, 24, 4) - lines(method, 4, 4)) / 20 < most


@pytest.mark.parametrize("method", METHODS)
def test_lines_for_each_device(method):
    assert lines(method, 24, 8) < 1.3 * lines(method, 24, 2)
