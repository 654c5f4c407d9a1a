"""The outer loop of pytrees."""

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local

jax = pytest.importorskip("jax", reason="jax is not installed")
LOOP = qcomp.OuterLoop(every=2, delay=1, warmup=1, compressor=qcomp.ScaledSign(8), exact=qcomp.ExactBelow(10))


def params_of(seed=0):
    """Return a pytree of NumPy arrays, which need no compiler."""
    rng = np.random.default_rng(seed)
    return {"layers": [{"w": rng.normal(size=(8, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}]}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_it_agrees_with_the_loop_of_the_core():
    outer = qcomp.jax.PytreeOuterLoop(LOOP)

    def of_trees(comm):
        params = params_of()
        state = outer.init(params, comm)
        for step in range(6):
            grads = outer.average(params_of((comm.rank, step)), state, comm)
            params = jax.tree.map(lambda p, g: p - g, params, grads)
            params, state = outer.step(params, state, comm)
            params, state = outer.load_state_dict(outer.state_dict(params, state), params_of(), comm)
        return bits(params), bits(outer.shared(params, state)), bits(state), state.names

    def of_lists(comm):
        params = jax.tree.leaves(params_of())
        state = LOOP.init(params, comm, ("layers/0/b", "layers/0/w"))
        for step in range(6):
            grads = LOOP.average(jax.tree.leaves(params_of((comm.rank, step))), state, comm)
            params = [p - g for p, g in zip(params, grads, strict=True)]
            params, state = LOOP.step(params, state, comm)
        return bits(params), bits(LOOP.shared(params, state)), bits(state), state.names

    assert run_local(2, of_trees, timeout=20) == run_local(2, of_lists, timeout=20)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"delay": 1}, marks=pytest.mark.exhaustive),
        {"warmup": 2, "fragments": 2, "delay": 1, "mixing": 0.5},
        {"exact": None, "outer": qcomp.Adam(learning_rate=0.1)},
    ],
)
def test_inner_steps_may_donate_their_parameters(changes):
    """As compiled steps do: the state keeps no array that an inner step takes or returns."""
    loop = qcomp.OuterLoop(**{"every": 2, "compressor": qcomp.ScaledSign(8), "exact": LOOP.exact, **changes})
    outer, comm = qcomp.jax.PytreeOuterLoop(loop), qcomp.comm.LocalCommunicator.alone()

    def train(inner, array):
        params = jax.tree.map(array, params_of())
        state, seen = outer.init(params, comm), []
        for _ in range(7):
            params, state = outer.step(inner(params), state, comm)
            seen += [bits(params), bits(outer.shared(params, state))]
            outer.state_dict(params, state)
        return seen

    def inner(params):
        return jax.tree.map(lambda p: p - 0.125, params)

    assert train(jax.jit(inner, donate_argnums=0), jax.numpy.asarray) == train(inner, np.array)


def test_other_structures_are_refused():
    outer, comm = qcomp.jax.PytreeOuterLoop(LOOP), qcomp.comm.LocalCommunicator.alone()
    state = outer.init(params_of(), comm)
    with pytest.raises(ValueError, match="grads has arrays at"):
        outer.average({"other": np.zeros(3)}, state, comm)
    with pytest.raises(TypeError, match="loop is 3"):
        qcomp.jax.PytreeOuterLoop(3)
