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
OPTIMIZERS = {
    "one-bit Adam": qcomp.jax.optax.onebit_adam(0.1, 9, "data", exact=None),
    "QAdam": qcomp.jax.optax.onebit_adam(
        0.1, 9, "data", exact=None, compressor=qcomp.MinMaxUInt8(), variance_steps=qcomp.DoublingIntervals(4)
    ),
    "one-bit LAMB": qcomp.jax.optax.onebit_lamb(
        qcomp.OneBitLamb(learning_rate=0.1, freeze=9, exact=None, watch=None, nonfinite="skip"), "data"
    ),
    "0/1 Adam": qcomp.jax.optax.zero_one_adam(
        qcomp.ZeroOneAdam(learning_rate=0.1, exact=None, nonfinite="skip"), "data"
    ),
    "Muon": qcomp.jax.optax.muon(qcomp.Muon(learning_rate=0.1, nonfinite="skip"), "data"),
}
METHODS = {
    "sign": SIGN,
    "qsgd": qcomp.Scaled(qcomp.QSGD(levels=7, bucket_size=16)),
    "bfloat16": qcomp.Cast("bfloat16"),
    **dict.fromkeys(OPTIMIZERS),
}


@functools.cache
def lines(method, tensors, devices):
    """Return the lines of the program of an update of some tensors."""
    tx = OPTIMIZERS.get(method)
    if tx is None:
        tx = optax.chain(qcomp.jax.optax.compressed(METHODS[method], "data", exact=None), optax.sgd(0.1))
    mesh = mesh_of(devices)
    params = {f"{number:03}": jax.ShapeDtypeStruct(SHAPE, np.float32) for number in range(tensors)}
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, params)
    specs = qcomp.jax.partition_specs(state, "data")
    update = jax.shard_map(
        lambda grads, state, params: tx.update(grads, state, params, local=params),
        mesh=mesh,
        in_specs=(ALL, specs, ALL),
        out_specs=(ALL, specs),
        check_vma=False,
    )
    return jax.jit(update).lower(params, state, params).as_text().count("\n")


@pytest.mark.parametrize("method", METHODS)
def test_lines_for_each_tensor(method):
    """`jax.lax.pmean` has 4."""
    most = {"QAdam": 80, "one-bit LAMB": 110}.get(method, 60)
    assert (lines(method, 24, 4) - lines(method, 4, 4)) / 20 < most


@pytest.mark.parametrize("method", METHODS)
def test_lines_for_each_device(method):
    most = 2.5 if method == "Muon" else 1.3  # it has a branch for each device
    assert lines(method, 24, 8) < most * lines(method, 24, 2)
