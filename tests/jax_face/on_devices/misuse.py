"""Misuse that would give wrong results or hang: other axes, other shapes, derivatives, and optax wrappers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import qcomp
import qcomp.jax.optax
from tests.jax_face.on_devices.problems import ALL, DATA, SIGN, bits, mesh_of, own, rows, stacked

SHAPES = {"b": (7,), "w": (8, 9)}
MEAN = qcomp.jax.MeshMean(SIGN, "data", exact=None)


def two_axes():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def started(tx, mesh, like):
    """Return the state of a mean or a transformation before the first step, and its partition specs."""
    with jax.set_mesh(mesh):
        state = tx.init(like)
    return state, qcomp.jax.partition_specs(state, "data")


def trace(function, mesh, specs, *args, **options):
    """Trace a program on a mesh without compiling it."""
    options = {"check_vma": False, **options}
    jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=ALL, **options)).trace(*args)


FACES = pytest.mark.parametrize(
    "face",
    [
        qcomp.jax.PytreeOptimizer(qcomp.CompressedSGD(learning_rate=0.1, exact=None)),
        qcomp.jax.PytreeOuterLoop(qcomp.OuterLoop(every=1, warmup=1, exact=None)),
    ],
)
PLAIN = {"b": jnp.ones(7), "w": jnp.asarray(np.arange(80, dtype=np.float32).reshape(8, 10) / 8)}


def placed(how):
    """Return `PLAIN` on two devices: "b" on both, and "w" placed as given."""
    mesh = mesh_of(2)
    places = {"b": NamedSharding(mesh, ALL), "w": NamedSharding(mesh, how)}
    return jax.tree.map(jax.device_put, PLAIN, places)


def stepped(face, params, grads, start):
    """Return the parameters after a first step outside a program."""
    comm = qcomp.comm.LocalCommunicator.alone()
    state = face.init(start, comm)
    if isinstance(face, qcomp.jax.PytreeOptimizer):
        return face.step(params, grads, state, comm)[0]
    means = face.average(grads, state, comm)
    return face.step(jax.tree.map(jnp.subtract, params, means), state, comm)[0]


@pytest.mark.parametrize("spec", [DATA, PartitionSpec(None, "data")])
@pytest.mark.parametrize("argument", ["params", "grads"])
@FACES
def test_sharded_arrays_outside_a_program_are_refused(face, argument, spec):
    """Each device would otherwise have another tensor."""
    cut = placed(spec)
    with pytest.raises(
        TypeError, match=rf"{argument}\[1\] of shape \(8, 10\) is cut over 2 devices by Named"
    ):
        stepped(face, PLAIN, cut, cut if argument == "params" else PLAIN)


@FACES
def test_replicated_arrays_outside_a_program(face):
    """They give the same bits as arrays on one device, and stay replicated."""
    whole = placed(ALL)
    moved = stepped(face, whole, whole, whole)
    assert bits(moved) == bits(stepped(face, PLAIN, PLAIN, PLAIN))
    assert moved["w"].sharding == whole["w"].sharding


def test_parameters_on_different_devices_are_refused():
    opt, comm = qcomp.jax.PytreeOptimizer(qcomp.Adam(learning_rate=0.1)), qcomp.comm.LocalCommunicator.alone()
    params = {n: jax.device_put(jnp.ones(3), device) for n, device in zip("ab", jax.devices(), strict=False)}
    with pytest.raises(
        TypeError, match=r"params\[1\] of shape \(3,\) is on .*1.*; expected it on .*0.*, as the"
    ):
        opt.init(params, comm)
    assert opt.init({"a": jnp.ones(3), "b": params["b"]}, comm).names == (
        "a",
        "b",
    )  # JAX moves an array that is not placed on a device


@pytest.mark.parametrize("axes", [{"data"}, {"data", "model"}])
def test_an_axis_left_to_the_compiler_is_refused(axes):
    """Along such an axis, all devices would wait for each other."""
    like = own(stacked(2, 0, SHAPES))
    state, specs = started(MEAN, two_axes(), like)
    args = two_axes(), (DATA, specs), stacked(2, 0, SHAPES), state
    if "model" in axes:
        trace(lambda x, s: MEAN(own(x), s)[0], *args, axis_names=axes)
        return
    with pytest.raises(
        ValueError, match=r"axis_name is 'data', .* axes of this mesh to the compiler: 'model';"
    ):
        trace(lambda x, s: MEAN(own(x), s)[0], *args, axis_names=axes)


@pytest.mark.exhaustive
def test_an_axis_of_the_compiler_in_all_gather():
    mean, x = qcomp.jax.MeshMean(SIGN, "data", "all_gather", exact=None), stacked(2, 0, SHAPES)
    found = []
    for mesh in (two_axes(), mesh_of(2)):
        state, specs = started(mean, mesh, own(x))
        cut = PartitionSpec("data", "model") if mesh.size == 4 else DATA
        x["w"] = jax.device_put(x["w"], jax.sharding.NamedSharding(mesh, cut))
        run = jax.shard_map(
            lambda x, s: mean(own(x), s)[0],
            mesh=mesh,
            in_specs=(DATA, specs),
            out_specs=ALL,
            axis_names={"data"},
        )
        found.append(bits(jax.jit(run)(x, state)))
    assert found[0] == found[1]


@pytest.mark.parametrize("check_vma", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_step_is_refused_along_all_axes(check_vma):
    """The NaN is in one part of a tensor that is also cut along another axis."""
    mesh, mean = two_axes(), qcomp.jax.MeshMean(SIGN, "data", exact=None)
    cut, of_data = {"w": PartitionSpec("model")}, {"w": PartitionSpec("data", "model")}
    with jax.set_mesh(mesh):
        specs = qcomp.jax.partition_specs(mean.init({"w": np.ones((4, 8), np.float32)}), ("data", "model"))

    def twice(x, bad):
        state = mean.init(own(x))
        means, state = mean(own(x), state)
        refused, state = mean(own(bad), state)
        return means, refused, state

    run = jax.shard_map(
        twice, mesh=mesh, in_specs=(of_data, of_data), out_specs=(cut, cut, specs), check_vma=check_vma
    )
    x = stacked(2, 0, {"w": (8, 8)})
    bad = {"w": x["w"].copy()}
    bad["w"][1, 0, 0] = np.nan
    means, refused, state = jax.jit(run)(x, bad)
    assert np.isfinite(means["w"]).all()
    assert np.isnan(refused["w"]).all()
    assert state.residuals.worker["w"].shape == (4, 32)
    assert [int(part.data) for part in state.step.addressable_shards] == [1, 1, 1, 1]
    assert [int(part.data) for part in state.skipped.addressable_shards] == [1, 1, 1, 1]


@pytest.mark.exhaustive
def test_vmap_with_a_named_axis_gives_the_same():
    """`jax.vmap` with a named axis simulates the devices on one."""
    values = stacked(2, 1, SHAPES)

    def call(x):
        return MEAN(x, MEAN.init(x))[0]

    simulated = jax.jit(jax.vmap(call, axis_name="data"))(values)
    run = jax.shard_map(
        lambda x: rows(call(own(x))), mesh=mesh_of(2), in_specs=(DATA,), out_specs=DATA, check_vma=False
    )
    assert bits(simulated) == bits(jax.jit(run)(values))


def test_a_mean_has_no_derivative():
    values = stacked(2, 0, SHAPES)
    state, specs = started(MEAN, mesh_of(2), own(values))

    def gradient_of(x, state):
        return jax.grad(lambda x: jnp.sum(MEAN(x, state)[0]["w"]))(own(x))

    with pytest.raises(TypeError, match=r"residuals are differentiated; .* jax\.lax\.stop_gradient"):
        trace(gradient_of, mesh_of(2), (DATA, specs), values, state)


def test_residuals_have_no_derivative():
    values = stacked(2, 0, SHAPES)
    state, specs = started(MEAN, mesh_of(2), own(values))

    def gradient_of(x, state):
        def mean_of(residuals):
            return jnp.sum(MEAN(own(x), state._replace(residuals=residuals))[0]["w"])

        return jax.grad(mean_of)(state.residuals)

    with pytest.raises(TypeError, match="residuals are differentiated"):
        trace(gradient_of, mesh_of(2), (DATA, specs), values, state)


@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (lambda tx: optax.apply_if_finite(tx, 3), r"inside ApplyIfFiniteState: .*put it after the mean"),
        (lambda tx: optax.MultiSteps(tx, 2), r"inside MultiStepsState: .*add up inside the step"),
        (
            lambda tx: optax.conditionally_transform(tx, lambda step: step % 2 == 0),
            r"inside ConditionallyTransformState: .*put it after the mean",
        ),
        (lambda tx: optax.masked(tx, {"w": True}), r"inside MaskedState: .*keep arrays exact with exact="),
        (
            lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a"}),
            r"not the one of 'b', whose gradients would differ between devices",
        ),
        (
            lambda tx: optax.partition({"a": optax.MultiSteps(tx, 2).gradient_transformation()}, {"w": "a"}),
            "inside MultiStepsState",
        ),
    ],
)
@pytest.mark.parametrize(
    "inner",
    [
        optax.chain(qcomp.jax.optax.compressed(SIGN, "data", exact=None), optax.sgd(0.5)),
        qcomp.jax.optax.onebit_adam(0.1, 2, "data", exact=None),
    ],
)
def test_wrappers_that_act_on_gradients_of_one_device_are_refused(wrap, match, inner):
    with jax.set_mesh(mesh_of(2)):
        state = optax.chain(wrap(inner), optax.identity()).init({"w": jnp.ones(8)})
    with pytest.raises(ValueError, match=match):
        qcomp.jax.partition_specs(state, "data")


def test_wrappers_that_act_on_the_mean_are_allowed():
    compressed = qcomp.jax.optax.compressed(SIGN, "data", exact=None)
    behind = optax.apply_if_finite(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), 3)
    state, specs = started(optax.chain(compressed, behind), mesh_of(2), {"w": jnp.ones(8)})
    assert specs[0].residuals.worker == {"w": DATA}
    assert set(jax.tree.leaves(specs[1])) == {ALL}
    assert jax.tree.structure(specs) == jax.tree.structure(state)


def test_a_mean_for_each_label():
    """Arrays that do not move need none."""
    means = {
        label: qcomp.jax.optax.compressed(SIGN, "data", exact=None, seed=n) for n, label in enumerate("ab")
    }
    tx = optax.partition({**means, "c": optax.set_to_zero()}, {"w": "a", "b": "b", "frozen": "c"})
    state, specs = started(tx, mesh_of(2), {"w": jnp.ones(8), "b": jnp.ones(16), "frozen": jnp.ones(3)})
    assert jax.tree.leaves(specs).count(DATA) == 4
    assert jax.tree.structure(specs) == jax.tree.structure(state)


def test_gradients_of_another_shape():
    """An exact tensor has no residual that would reveal it."""
    tx = qcomp.jax.optax.onebit_adam(0.1, 2, "data", exact=qcomp.ExactBelow(50), compressor=SIGN)
    values = stacked(2, 0, SHAPES)
    state, specs = started(tx, mesh_of(2), own(values))
    values["b"] = values["b"][:, :1]
    with pytest.raises(ValueError, match=r"the array of updates at 'b' has shape \(1,\); state has \(7,\)"):
        trace(lambda g, s: tx.update(own(g), s)[0], mesh_of(2), (DATA, specs), values, state)


def test_gradients_of_another_dtype():
    with jax.enable_x64(True):
        values = stacked(2, 0, SHAPES)
        state, specs = started(MEAN, mesh_of(2), own(values))
        values = jax.tree.map(lambda x: x.astype(np.float64), values)
        with pytest.raises(ValueError, match=r"state has residuals .*float32.*; expected .*float64"):
            trace(lambda x, s: MEAN(own(x), s)[0], mesh_of(2), (DATA, specs), values, state)


def test_a_state_may_be_made_inside_shard_map():
    """With the types of shard_map, in the branches of 1-bit Adam."""
    tx = qcomp.jax.optax.onebit_adam(0.1, 2, "data", exact=None, compressor=SIGN)
    values = stacked(2, 0, SHAPES)

    def begin(g):
        return tx.update(own(g), tx.init(own(g)))[0]

    trace(begin, mesh_of(2), (DATA,), values, check_vma=True)
