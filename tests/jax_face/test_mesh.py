"""Means and optimizers on a mesh: runs the tests in ``on_devices``, and tests that need no devices.

The former run in a process of their own with eight devices, because JAX counts devices only once.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qcomp

pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

CASES = [
    "steps",
    *(
        pytest.param(case, marks=pytest.mark.exhaustive)
        for case in ("means", "optimizers", "zero_one", "in_optax", "misuse")
    ),
]


def run_on_devices(marked: str, case: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    path = str(Path(__file__).parent / "on_devices" / f"{case}.py")
    job = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", marked, path],
        env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert job.returncode == 0, job.stdout[-8000:] + job.stderr[-2000:]
    assert " passed" in job.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*CASES, "programs", pytest.param("recipes", marks=pytest.mark.exhaustive)])
def test_on_devices(case):
    run_on_devices("not slow", case)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_flax():
    pytest.importorskip("flax", reason="flax is not installed")
    run_on_devices("not slow", "in_flax")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_slow_cases_on_devices(case):
    run_on_devices("slow", case)


TRAINING = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np, optax, qcomp, qcomp.jax.optax
from jax.sharding import NamedSharding, PartitionSpec as P

if sys.argv[1] == "processes":
    jax.distributed.initialize(cluster_detection_method="mpi4py")
else:
    jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("data",))
tx = qcomp.jax.optax.onebit_adam(0.1, freeze=3, axis_name="data", exact=None)
params = {"w": jnp.zeros((8, 40)), "b": jnp.zeros(5)}
with jax.set_mesh(mesh):
    state = tx.init(params)
specs = qcomp.jax.partition_specs(state, "data")

def step(params, state, x):
    grads = jax.tree.map(lambda p: (p.sum() - x[0]) * jnp.arange(p.size).reshape(p.shape), params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
x = jax.device_put(np.float32([3, -1]), NamedSharding(mesh, P("data")))
for _ in range(8):
    params, state = step(params, state, x)
held = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
print(f"it is {hashlib.sha256(held).hexdigest()}")
if sys.argv[1] == "processes":
    try:
        qcomp.jax.PytreeOptimizer(qcomp.Adam(learning_rate=0.1)).init(params, qcomp.comm.world())
    except TypeError as error:
        print(error)
"""
"""Trains some steps on two devices, of two processes or of one; PytreeOptimizer refuses arrays of two."""


@pytest.mark.exhaustive
@pytest.mark.mpi
def test_devices_of_two_processes_train_like_those_of_one(mpirun, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    of_two = mpirun(2, ["-m", "mpi4py", script, "processes"], timeout=200).stdout
    of_one = mpirun(1, ["-m", "mpi4py", script, "devices"], timeout=200).stdout
    (found,) = set(re.findall("it is ([0-9a-f]+)", of_two))
    assert of_two.count(found) == 2
    assert re.findall("it is ([0-9a-f]+)", of_one) == [found]
    assert of_two.count("the first parameter of shape (5,) is also on devices of other processes") == 2


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"topology": "ring"}, "topology is 'ring'; expected 'two_phase' or 'all_gather'"),
        ({"topology": "auto"}, "topology is 'auto'; expected 'two_phase' or 'all_gather'"),
        (
            {"axis_name": ("data", "model")},
            r"axis_name is \('data', 'model'\); expected the name of one axis",
        ),
        ({"seed": -1}, "seed is -1"),
        (
            {"compressor": qcomp.QSGD(levels=7, coding="elias"), "feedback": False},
            "vary in length; expected one with payloads of fixed length",
        ),
        ({"compressor": qcomp.QSGD(levels=1, bucket_size=512)}, "Scaled"),
    ],
)
def test_incompatible_settings_are_refused(settings, match):
    with pytest.raises((TypeError, ValueError), match=match):
        qcomp.jax.MeshMean(**{"compressor": qcomp.ScaledSign(), "axis_name": "data", **settings})


@pytest.mark.parametrize("freeze", [0, 1.5, True, None])
def test_a_freeze_that_is_not_a_step_is_refused(freeze):
    import qcomp.jax.optax

    with pytest.raises(ValueError, match=f"freeze is {freeze!r}; expected the number of exact steps"):
        qcomp.jax.optax.onebit_adam(1e-3, freeze, "data")


def outer(**settings):
    return qcomp.jax.MeshOuterLoop(qcomp.OuterLoop(every=2, **settings), "data")


def lamb(**settings):
    import qcomp.jax.optax

    fitting = {"learning_rate": 0.1, "freeze": 2, "nonfinite": "skip", "watch": None}
    return qcomp.jax.optax.onebit_lamb(qcomp.OneBitLamb(**{**fitting, **settings}), "data")


def zero_one(**settings):
    import qcomp.jax.optax

    fitting = {"learning_rate": 0.1, "nonfinite": "skip"}
    return qcomp.jax.optax.zero_one_adam(qcomp.ZeroOneAdam(**{**fitting, **settings}), "data")


def muon(**settings):
    import qcomp.jax.optax

    return qcomp.jax.optax.muon(qcomp.Muon(**{"learning_rate": 0.1, "nonfinite": "skip", **settings}), "data")


@pytest.mark.parametrize(
    ("make", "settings", "match"),
    [
        (
            outer,
            {"outer": qcomp.SGD(learning_rate=lambda rounds: 1.0 if rounds < 9 else 0.5)},
            r"loop has an outer optimizer with learning_rate=.*, which cannot be traced by jax\.jit",
        ),
        (outer, {"compressor": qcomp.outer.sparse_loco().compressor}, "vary in length; .*coding='fixed'"),
        (
            outer,
            {"compressor": qcomp.MinMaxUInt8(), "averaging": qcomp.Averaging(topology="ring")},
            "topology is 'ring'; expected 'two_phase' or",
        ),
        (lamb, {"nonfinite": "raise"}, "optimizer has nonfinite='raise'; expected 'skip' on a mesh"),
        (lamb, {"watch": qcomp.VarianceWatch()}, "optimizer has watch=Variance.*; expected None on a mesh"),
        (lamb, {"freeze": qcomp.VarianceStable()}, "optimizer has freeze=Variance.*; expected a number"),
        (lamb, {"groups": [qcomp.Group("b")]}, r"optimizer has groups=.*; expected \(\) on a mesh"),
        (lamb, {"averaging": qcomp.PowerSGD(), "compressor": qcomp.Identity()}, "has averaging=PowerSGD"),
        (zero_one, {"nonfinite": "raise"}, "optimizer has nonfinite='raise'; expected 'skip' on a mesh"),
        (
            zero_one,
            {"freeze": qcomp.VarianceStable()},
            "freeze=Variance.*; expected a number of steps or None",
        ),
        (zero_one, {"clip_norm": 1.0}, r"optimizer has clip_norm=1\.0; expected None on a mesh"),
        (zero_one, {"rounding": "stochastic"}, "optimizer has rounding='stochastic'; expected 'nearest'"),
        (zero_one, {"averaging": qcomp.PowerSGD(), "compressor": qcomp.Identity()}, "has averaging=PowerSGD"),
        (
            zero_one,
            {"sync_steps": lambda step: step > 3 and step % 2 == 0},
            r"sync_steps is .*, which cannot be traced by jax\.jit",
        ),
        (
            zero_one,
            {"learning_rate": lambda step: 1.0 if step < 3 else 0.5},
            r"learning_rate is .*, which cannot be traced by jax\.jit",
        ),
        (muon, {"nonfinite": "raise"}, "optimizer has nonfinite='raise'; expected 'skip' on a mesh"),
        (muon, {"clip_norm": 1.0}, r"optimizer has clip_norm=1\.0; expected None on a mesh"),
        (
            muon,
            {"whiten_steps": qcomp.DoublingIntervals()},
            "optimizer has whiten_steps=Doubling.*; expected None",
        ),
        (
            muon,
            {"compressor": qcomp.QSGD(levels=7, coding="elias")},
            "vary in length; expected one with payloads of",
        ),
    ],
)
def test_settings_that_a_program_lacks(make, settings, match):
    with pytest.raises((TypeError, ValueError), match=match):
        make(**settings)


def test_schedules_of_traced_steps():
    """They select the same steps as on the host; one with branches is refused."""
    import jax
    import jax.numpy as jnp

    from qcomp.jax.transforms import selected

    steps = [*range(1, 500), 2**20, 2**31 - 1]
    for schedule in (
        qcomp.DoublingIntervals(4),
        qcomp.DoublingIntervals(3, longest=8),
        qcomp.LocalSteps(7, 6),
        qcomp.LocalSteps(),
    ):
        traced = jax.jit(jax.vmap(schedule))(jnp.asarray(steps, jnp.int32))
        assert traced.tolist() == [schedule(step) for step in steps]
    with pytest.raises(TypeError, match=r"variance_steps is .*, which cannot be traced by jax\.jit"):
        jax.eval_shape(
            lambda step: selected("variance_steps", lambda n: n > 3 and n % 2 == 0, step), jnp.int32(0)
        )


def test_traced_bias_corrections_of_momenta():
    """They are those of Python to the last bit: 0/1 Adam adds up weights that are divided by them."""
    import jax
    import jax.numpy as jnp

    from qcomp.core.variance.arithmetic import bias_corrections

    counts = [*range(1, 500), 10_000]
    with jax.enable_x64(True):
        traced = jax.jit(jax.vmap(lambda count: jnp.asarray(bias_corrections([(0.9, 0.5)], 0, [count])[0])))
        found = traced(jnp.asarray(counts, jnp.int32)).tolist()
    assert found == [1 - 0.9**count for count in counts]


def test_joined_variances_get_the_floor_of_each_alone():
    """Those of one size are one array in a program; exact ones have no floor."""
    import jax.numpy as jnp
    import numpy as np

    from qcomp.core.variance.arithmetic import floored
    from qcomp.jax.vectors import floored_like

    draws = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32) ** 8
    parts = [draws[0], draws[1, :5], draws[2], np.zeros(0, np.float32), draws[3], draws[4, :5]]
    exact = [False, False, True, False, False, True]
    joined = floored_like(jnp.concatenate(parts), [jnp.asarray(x) for x in parts], exact, 0.3)
    assert np.array_equal(joined, np.concatenate(floored(parts, exact, 0.3)))
    assert not np.array_equal(joined, np.concatenate(floored(parts, [False] * 6, 0.3)))


class TestInjectedSettings:
    """`optax.inject_hyperparams` makes arrays of numbers, and calls all that can be called with the step."""

    STATIC = ("freeze", "axis_name", "b1", "b2", "eps", "weight_decay", "variance_floor", "exact", "seed")

    def injected(self, static_args, **settings):
        import optax

        import qcomp.jax.optax

        make = optax.inject_hyperparams(qcomp.jax.optax.onebit_adam, static_args=static_args)
        return make(0.1, freeze=2, axis_name="data", **settings).init({"w": 0.0})

    @pytest.mark.parametrize("name", ["freeze", "b1", "b2", "eps", "weight_decay", "variance_floor"])
    def test_a_number_that_must_be_static(self, name):
        others = [static for static in self.STATIC if static != name]
        with pytest.raises(TypeError, match=rf"{name} is Array\(.* Inject the learning rate only: .*lambda"):
            self.injected(others)

    @pytest.mark.parametrize(
        "policy", [{}, {"exact": None, "compressors": qcomp.ByName({"*": qcomp.ScaledSign()})}]
    )
    def test_a_policy_that_must_be_static(self, policy):
        with pytest.raises(TypeError, match=r"tensors is .* Inject the learning rate only: .*lambda"):
            self.injected((), **policy)


def test_residuals_without_their_type_have_no_specs():
    """As in nnx.state(optimizer): P() for all of them would keep those of one device, without an error."""
    import jax.numpy as jnp

    residuals = qcomp.jax.Residuals({"w": jnp.zeros((4, 9))}, ())
    state = qcomp.jax.MeshState(jnp.zeros(()), jnp.zeros(()), residuals)
    plain = {"step": state.step, "residuals": {"worker": residuals.worker, "server": {}}}
    with pytest.raises(
        ValueError, match=r"state has at \['0'\]\['residuals'\]\['worker'\]\['w'\] residuals that are no "
    ):
        qcomp.jax.partition_specs({"0": plain, "1": {"trace": jnp.zeros(9)}}, "data")
