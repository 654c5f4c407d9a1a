"""Optimizers and means of pytrees over a communicator."""

import math
import pickle
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import qcomp

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

ALONE = qcomp.comm.LocalCommunicator.alone
OPT = qcomp.OneBitAdam(learning_rate=0.1, freeze=2, betas=(0.9, 0.9), exact=None, watch=None)
pytestmark = pytest.mark.filterwarnings("ignore:all gradients of .* were 0 in the first")


def params_of(seed=0):
    """Return a pytree of NumPy arrays, which need no compiler."""
    rng = np.random.default_rng(seed)
    return {
        "layers": [{"w": rng.normal(size=(8, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}],
        "scale": np.asarray(np.float32(2)),
    }


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_the_steps_are_those_of_the_core():
    opt, names = qcomp.jax.PytreeOptimizer(OPT), ("layers/0/b", "layers/0/w", "scale")

    def of_trees(comm):
        params = params_of()
        state = opt.init(params, comm)
        for step in range(4):
            params, state = opt.step(params, params_of((comm.rank, step)), state, comm)
        return jax.tree.leaves(params), state

    def of_lists(comm):
        params = jax.tree.leaves(params_of())
        state = OPT.init(params, comm, names)
        for step in range(4):
            params, state = OPT.step(params, jax.tree.leaves(params_of((comm.rank, step))), state, comm)
        return params, state

    for (found, state), (expected, expected_state) in zip(
        qcomp.comm.run_local(2, of_trees), qcomp.comm.run_local(2, of_lists), strict=True
    ):
        assert bits(found) == bits(expected)
        assert state.names == names
        assert state.stage == "compressed"
        assert bits(state) == bits(expected_state)


def test_a_loaded_state_has_the_structure_of_the_saved_one():
    """So jax.jit does not compile again; NaN among the numbers, from a file, is another object."""
    opt, comm = qcomp.jax.PytreeOptimizer(replace(OPT, watch=qcomp.VarianceWatch())), ALONE()
    params = params_of()
    state = opt.init(params, comm)
    for _ in range(4):
        params, state = opt.step(params, params, state, comm)
    assert any(math.isnan(number) for number in state.numbers.values())
    loaded = opt.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict(state))), params, comm)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert bits(loaded) == bits(state)


def test_a_mean_of_trees():
    mean = qcomp.CompressedMean(qcomp.QSGD(levels=7, bucket_size=8), feedback=False)

    def rank_main(comm):
        tree, key = params_of(comm.rank), qcomp.Key(seed=1)
        of_trees = qcomp.jax.PytreeMean(mean)
        found, _ = of_trees(tree, of_trees.init(tree, comm), comm, key=key)
        leaves = jax.tree.leaves(tree)
        expected, _ = mean(leaves, mean.init(leaves, comm), comm, key=key)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        return bits(found) == bits(expected)

    assert qcomp.comm.run_local(2, rank_main) == [True, True]


def test_a_mean_of_other_trees_is_an_error_on_every_rank():
    """Otherwise arrays of different names would be averaged with each other."""
    of_trees = qcomp.jax.PytreeMean(qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8)))
    w, v = jnp.ones(9), jnp.full(9, 100.0)

    def rank_main(comm, trees):
        with pytest.raises(qcomp.MismatchError, match=r"names\[0\] is '.' on rank 0, but '.' on rank 1"):
            of_trees.init(trees[comm.rank], comm)

    for trees in (
        [OrderedDict(w=w, v=v), OrderedDict(v=v, w=w)],
        [{"a": w, "b": v}, {"b": w, "c": v}],
    ):
        qcomp.comm.run_local(2, partial(rank_main, trees=trees))


def test_a_state_is_a_pytree_of_its_arrays():
    opt = qcomp.jax.PytreeOptimizer(OPT)
    params, comm = params_of(), ALONE()
    state = opt.init(params, comm)
    for _ in range(3):
        params, state = opt.step(params, params, state, comm)
    state = jax.tree.map(jnp.asarray, state)
    leaves, structure = jax.tree.flatten(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert len(leaves) == 3 * 3 + len(state.exchange.server)
    again = jax.tree.unflatten(structure, leaves)
    assert again == state
    assert hash(structure) == hash(jax.tree.structure(again))
    assert jax.tree.structure(state._replace(step=7)) != structure
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths[0] == ".momentum[0]"
    assert ".exchange.worker[0]" in paths
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: 2 * x, s))(state)
    assert doubled.stage == "compressed"
    assert doubled.numbers == state.numbers
    assert bits(doubled.momentum) == bits([2 * m for m in state.momentum])


def test_the_state_of_a_mean_is_a_pytree_of_its_arrays():
    allreduce, comm = qcomp.jax.PytreeMean(qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8))), ALONE()
    tree = params_of()
    state = jax.tree.map(np.asarray, allreduce.init(tree, comm))
    assert state.names == qcomp.jax.names_of(tree)
    assert bits(state) == bits([*state.mean.worker, *state.mean.server])
    _, state = allreduce(tree, state, comm)
    assert jax.tree.structure(state) == jax.tree.structure(allreduce.init(tree, comm))


def test_training_resumes_from_a_saved_state():
    opt, comm = qcomp.jax.PytreeOptimizer(OPT), ALONE()
    params = params_of()
    state = opt.init(params, comm)
    for _ in range(3):
        params, state = opt.step(params, params_of(1), state, comm)
    saved = opt.state_dict(state)
    assert any("layers/0/w" in key for key in saved)
    loaded = opt.load_state_dict(saved, params, comm)
    first, second = (opt.step(params, params_of(2), s, comm)[0] for s in (state, loaded))
    assert bits(first) == bits(second)


class TestErrors:
    def step(self, params, grads, state=None):
        opt, comm = qcomp.jax.PytreeOptimizer(OPT), ALONE()
        return opt.step(params, grads, state or opt.init(params_of(), comm), comm)

    def test_gradients_of_another_structure(self):
        grads = params_of()
        grads["other"] = grads.pop("scale")
        with pytest.raises(ValueError, match=r"grads has the structure .* differ in 'scale'"):
            self.step(params_of(), grads)

    def test_a_state_of_other_parameters(self):
        with pytest.raises(ValueError, match=r"params has arrays at .*; state has"):
            self.step({"w": jnp.ones(8)}, {"w": jnp.ones(8)})

    def test_a_mean_of_a_tree_with_other_names(self):
        """The residuals of each array would be added to another one."""
        allreduce, comm = qcomp.jax.PytreeMean(qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8))), ALONE()
        one, other = {"a": np.ones(8, np.float32)}, {"b": np.ones(8, np.float32)}
        _, state = allreduce(one, allreduce.init(one, comm), comm)
        with pytest.raises(ValueError, match=r"tree has arrays at \('b',\); state has \('a',\)"):
            allreduce(other, state, comm)
        allreduce(one, state, comm)

    @pytest.mark.parametrize("empty", [{}, [], None, {"a": []}])
    def test_a_tree_without_arrays(self, empty):
        with pytest.raises(ValueError, match="expected a pytree with at least one array"):
            qcomp.jax.names_of(empty)

    def test_two_arrays_with_the_same_path_are_an_error(self):
        with pytest.raises(ValueError, match="several arrays with the path 'a/b'"):
            qcomp.jax.names_of({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})

    def test_an_object_that_is_not_an_optimizer_is_refused(self):
        with pytest.raises(TypeError, match=r"expected an optimizer such as qcomp\.OneBitAdam"):
            qcomp.jax.PytreeOptimizer(qcomp.OneBitAdam)

    def test_an_optimizer_of_pairs_of_gradients(self):
        with pytest.raises(
            TypeError, match="optimizer is a QSVRG; expected one that steps with one gradient"
        ):
            qcomp.jax.PytreeOptimizer(qcomp.QSVRG(learning_rate=0.1))

    def test_a_step_under_jit(self):
        """No NaN could be refused there, and no bytes could be moved."""
        opt, comm = qcomp.jax.PytreeOptimizer(qcomp.Adam(learning_rate=0.1)), ALONE()
        params = {"w": jnp.ones(4)}
        state = opt.init(params, comm)
        with pytest.raises(
            TypeError, match=r"params or grads are traced by jax\.jit; .*use qcomp\.jax\.optax"
        ):
            jax.jit(lambda p: opt.step(p, p, state, comm)[0])(params)
