"""Training on a mesh sends the bytes of the core and ends with its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import qcomp
import qcomp.jax.optax
from qcomp.jax import spmd
from tests.docs import pages
from tests.jax_face.on_devices.problems import (
    BUCKET,
    DATA,
    SHAPES,
    SIGN,
    gradient,
    mesh_of,
    own,
    quadratics,
    rows,
    tree_of,
)

STEPS = 50
DRAWING = qcomp.Scaled(qcomp.QSGD(levels=7, bucket_size=BUCKET))


def test_the_page_runs_on_all_devices(monkeypatch):
    scope = pages.run(pages.DOCS / "jax.md", monkeypatch)
    x = scope["x"]
    assert len(x.sharding.device_set) == 8
    params = {"w": jax.device_put(jnp.zeros((128, 128)), jax.NamedSharding(scope["mesh"], P()))}
    ours, residuals = jax.jit(scope["compute_gradients"])(params, scope["residuals"], x)
    assert int(residuals.step) == 6
    own = np.asarray(x)
    exact = -2 * own.T @ own / own.size
    assert_allclose(np.asarray(ours["w"]), exact, atol=0.02 * np.abs(exact).max())


class Recorder:
    """A communicator that records what it sends."""

    compares_owners = True  # so that nothing is joined to messages

    def __init__(self, comm):
        self.comm = comm
        self.rank, self.size, self.sent = comm.rank, comm.size, []

    def all_to_all(self, send, receive):
        self.sent.append([np.asarray(message).copy() for message in send])
        return self.comm.all_to_all(send, receive)

    def all_gather(self, send, receive):
        self.sent.append([np.asarray(send).copy()])
        return self.comm.all_gather(send, receive)


def begins_with(padded, message):
    """Return whether a message is another one, padded with zeros."""
    padded = np.asarray(padded)
    return padded[: len(message)].tobytes() == message.tobytes() and not padded[len(message) :].any()


def train_by_the_core(n, optimizer, shapes=SHAPES):
    """Train with the core on NumPy; return each rank's parameters, and its messages by step and exchange."""
    curvatures, minima = quadratics(n, shapes)
    leaves, structure = jax.tree.flatten(tree_of(0, shapes))
    names = qcomp.jax.names_of(tree_of(0, shapes))

    def rank_main(comm):
        params, recorder = leaves, Recorder(comm)
        state = optimizer.init(params, comm, names)
        of_steps = []
        for step in range(STEPS):
            problem = (jax.tree.map(lambda x: x[comm.rank], tree) for tree in (curvatures, minima))
            grads = jax.tree.leaves(gradient(structure.unflatten(params), *problem))
            recorder.sent = []
            params, state = optimizer.step(params, grads, state, recorder)
            # Without the comparisons in the first step: of gradients, and of zeros that a compressor may move.
            moves = step == 0 and not optimizer.compressor.traits.keeps_zero
            of_steps.append(recorder.sent[step == 0 : -1 if moves else None])
        return params, of_steps

    return qcomp.comm.run_local(n, rank_main)


def train_on_mesh(n, tx, monkeypatch, shapes=SHAPES):
    """Return the stacked parameters, and the stacked messages of each step and exchange."""
    mesh = mesh_of(n)
    params = tree_of(0, shapes)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    specs = qcomp.jax.partition_specs(state, "data")
    answer, sent = spmd._answer, []

    def record(request, axis_name):
        messages = request.send if isinstance(request.send, tuple) else (request.send,)
        sent.append(jnp.stack(messages)[None])
        return answer(request, axis_name)

    monkeypatch.setattr(spmd, "_answer", record)

    def step(params, state, curvatures, minima):
        sent.clear()
        params = own(params)
        updates, state = tx.update(gradient(params, own(curvatures), own(minima)), state, params)
        inside_cond = any("onebit" in type(part).__name__.lower() for part in state)
        return rows(optax.apply_updates(params, updates)), state, [] if inside_cond else list(sent)

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(DATA, specs, DATA, DATA),
            out_specs=(DATA, specs, DATA),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )
    params = jax.tree.map(lambda x: jnp.stack([x] * n), params)
    of_steps = []
    for _ in range(STEPS):
        params, state, messages = run(params, state, *quadratics(n, shapes))
        of_steps.append([np.asarray(message) for message in messages])
    return params, of_steps


def assert_same_on_all_devices(tree):
    for leaf in jax.tree.leaves(tree):
        assert all(row.tobytes() == np.asarray(leaf)[0].tobytes() for row in np.asarray(leaf))


class TestTheSameAsTheCore:
    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        "compressor", [qcomp.Identity(), qcomp.QSGD(127, BUCKET)], ids=["exact", "drawing"]
    )
    def test_messages_of_factors(self, compressor, monkeypatch):
        """Those of three devices, whose factors have owners in the core, too.

        Only in the first step: XLA's matrix products differ in some bits, so that later a few codes differ.
        """
        matrices = {"w": (40, 30), "x": (24, 16)}
        settings = {"compressor": compressor, "exact": None, "averaging": qcomp.PowerSGD(rank=1), "seed": 5}
        opt = qcomp.CompressedSGD(learning_rate=0.125, momentum=0, **settings)
        by_core = train_by_the_core(3, opt, matrices)
        tx = optax.chain(qcomp.jax.optax.compressed(axis_name="data", **settings), optax.sgd(0.125))
        params, of_steps = train_on_mesh(3, tx, monkeypatch, matrices)
        assert_same_on_all_devices(params)
        for rank, (_, messages) in enumerate(by_core):
            assert len(of_steps[0]) == len(messages[0]) == 4
            for of_mesh, of_core in zip(of_steps[0], messages[0], strict=True):
                for padded, message in zip(of_mesh[rank], of_core, strict=True):
                    found = padded[: len(message)]
                    if compressor.traits.lossless:
                        whole = len(message) // 4 * 4  # the verdict follows
                        pair = (x[:whole].view(np.float32) for x in (found, message))
                        assert_allclose(*pair, rtol=1e-4, atol=1e-5)
                    else:
                        assert (found == message).mean() > 0.95

    @pytest.mark.parametrize(
        ("n", "compressor", "topology"),
        [
            (2, SIGN, "two_phase"),
            pytest.param(8, SIGN, "two_phase", marks=pytest.mark.exhaustive),
            pytest.param(4, SIGN, "all_gather", marks=pytest.mark.exhaustive),
            pytest.param(4, DRAWING, "two_phase", marks=pytest.mark.exhaustive),
            pytest.param(2, DRAWING, "all_gather", marks=pytest.mark.exhaustive),
            pytest.param(2, qcomp.MinMaxUInt8(bucket_size=32), "two_phase", marks=pytest.mark.exhaustive),
        ],
    )
    def test_bytes_and_parameters(self, n, compressor, topology, monkeypatch):
        opt = qcomp.CompressedSGD(
            learning_rate=0.125,
            momentum=0.5,
            nesterov=True,
            compressor=compressor,
            averaging=qcomp.Averaging(topology=topology),
            exact=None,
            seed=5,
        )
        tx = optax.chain(
            qcomp.jax.optax.compressed(compressor, "data", topology=topology, exact=None, seed=5),
            optax.sgd(0.125, momentum=0.5, nesterov=True),
        )
        of_core = train_by_the_core(n, opt)
        params, messages = train_on_mesh(n, tx, monkeypatch)
        assert_same_on_all_devices(params)
        for rank, (expected, sent) in enumerate(of_core):
            for found, wanted in zip(jax.tree.leaves(params), expected, strict=True):
                assert_array_equal(found[rank], wanted)
            for step in range(STEPS):
                assert len(sent[step]) == len(messages[step]) == (2 if topology == "two_phase" else 1)
                for of_exchange, wanted in zip(messages[step], sent[step], strict=True):
                    assert len(of_exchange[rank]) == len(wanted)
                    assert all(map(begins_with, of_exchange[rank], wanted))

    @pytest.mark.parametrize(
        ("deep", "wide"),
        [
            (qcomp.TopK(k=2, bucket_size=BUCKET), qcomp.Cast("bfloat16")),
            pytest.param(DRAWING, SIGN, marks=pytest.mark.exhaustive),
        ],
        ids=["topk-cast", "drawing-sign"],
    )
    def test_a_compressor_for_each_tensor(self, deep, wide, monkeypatch):
        """Also one whose fields do not follow the buckets, and one without buckets."""
        settings = {"exact": None, "compressors": qcomp.ByName({"deep/0": deep, "wide": wide}), "seed": 5}
        opt = qcomp.CompressedSGD(learning_rate=0.125, momentum=0, compressor=wide, **settings)
        tx = optax.chain(qcomp.jax.optax.compressed(wide, "data", **settings), optax.sgd(0.125))
        of_core = train_by_the_core(4, opt)
        params, messages = train_on_mesh(4, tx, monkeypatch)
        assert_same_on_all_devices(params)
        for rank, (expected, sent) in enumerate(of_core):
            for found, wanted in zip(jax.tree.leaves(params), expected, strict=True):
                assert_array_equal(found[rank], wanted)
            for of_step, wanted_of_step in zip(messages, sent, strict=True):
                for of_exchange, wanted in zip(of_step, wanted_of_step, strict=True):
                    assert all(map(begins_with, of_exchange[rank], wanted))

    @pytest.mark.exhaustive
    def test_exact_tensors_travel_in_the_same_messages(self, monkeypatch):
        shapes = {"b": (32,), "w": (64, 3)}
        opt = qcomp.CompressedSGD(
            learning_rate=0.125, momentum=0, compressor=SIGN, exact=qcomp.ExactBelow(100)
        )
        tx = optax.chain(
            qcomp.jax.optax.compressed(SIGN, "data", exact=qcomp.ExactBelow(100)), optax.sgd(0.125)
        )
        of_core = train_by_the_core(4, opt, shapes)
        params, messages = train_on_mesh(4, tx, monkeypatch, shapes)
        assert_same_on_all_devices(params)
        for rank, (expected, sent) in enumerate(of_core):
            for found, wanted in zip(jax.tree.leaves(params), expected, strict=True):
                assert_array_equal(found[rank], wanted)
            for of_step, wanted_of_step in zip(messages, sent, strict=True):
                for of_exchange, wanted in zip(of_step, wanted_of_step, strict=True):
                    assert all(map(begins_with, of_exchange[rank], wanted))

    @pytest.mark.exhaustive
    def test_one_bit_adam_averages_half_precision_gradients_in_float32(self):
        """A mean that is rounded to bfloat16 would cost the moments bits that the core keeps."""
        gradients = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64)), jnp.bfloat16)
        settings = {"compressor": SIGN, "exact": None}
        tx = qcomp.jax.optax.onebit_adam(2**-7, 3, "data", b1=0.9, b2=0.95, **settings)
        params, mesh = jnp.zeros(gradients.shape[1:], jnp.bfloat16), mesh_of(2)
        with jax.set_mesh(mesh):
            state = tx.init(params)
        specs = qcomp.jax.partition_specs(state, "data")

        def step(g, state):
            return tx.update(g[0], state)[1]

        run = jax.shard_map(step, mesh=mesh, in_specs=(DATA, specs), out_specs=specs, check_vma=False)
        after = jax.jit(run)(gradients, state)
        (momentum,) = [np.asarray(each.momentum) for each in after if hasattr(each, "momentum")]
        opt = qcomp.OneBitAdam(learning_rate=2**-7, freeze=3, betas=(0.9, 0.95), watch=None, **settings)

        def rank_main(comm):
            _, new = opt.step(params, gradients[comm.rank], opt.init(params, comm), comm)
            return np.asarray(new.momentum[0])

        assert_array_equal(momentum, qcomp.comm.run_local(2, rank_main)[0])

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        ("n", "optimizer", "changes"),
        [
            (2, qcomp.OneBitAdam, {"compressor": SIGN, "variance_floor": 0.3}),  # which raises many elements
            (4, qcomp.OneBitAdam, {"compressor": SIGN, "variance_floor": 1e-3}),
            (2, qcomp.QAdam, {"variance_steps": qcomp.DoublingIntervals(2)}),
            (4, qcomp.QAdam, {"variance_steps": qcomp.DoublingIntervals(4, 2), "variance_floor": 0.3}),
        ],
    )
    def test_frozen_variance(self, n, optimizer, changes, monkeypatch):
        compressor = qcomp.MinMaxUInt8(bucket_size=32)
        settings = {"eps": 0.01, "compressor": compressor, "exact": None, **changes}
        opt = optimizer(learning_rate=2**-7, freeze=20, betas=(0.9, 0.95), watch=None, **settings)
        tx = qcomp.jax.optax.onebit_adam(2**-7, 20, "data", b1=0.9, b2=0.95, **settings)
        of_core = train_by_the_core(n, opt)
        params, _ = train_on_mesh(n, tx, monkeypatch)
        assert_same_on_all_devices(params)
        for found, wanted in zip(jax.tree.leaves(params), of_core[0][0], strict=True):
            assert_array_equal(found[0], wanted)
