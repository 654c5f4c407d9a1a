"""Which kernels run for an array: a context beats a setting, a setting beats the best available kernel set."""

import importlib.metadata
import logging
import sys

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import qcomp
from qcomp.backends import choice, registry
from qcomp.core.kernels import chosen

pytest.importorskip("numba")

X = np.ones(3, dtype=np.float32)


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    """Select kernels automatically, with all earlier choices forgotten."""
    monkeypatch.setattr(choice, "_default", ("auto", None))
    monkeypatch.setattr(choice, "_choices", {})
    monkeypatch.setattr(choice, "_told", set())
    registry.load.cache_clear()
    yield
    registry.load.cache_clear()


def name(x):
    kernels = chosen(x)
    return "pure" if kernels is None else kernels.name


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (X, "numba"),
        (X.astype(np.float16), "numba"),
        (X.astype(np.float64), "numba"),
        (torch.ones(3), "numba"),
        (torch.ones(3, dtype=torch.bfloat16), "numba"),
        (torch.nn.Parameter(torch.ones(3)), "numba"),
        (array_api_strict.ones(3), "pure"),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{type(v).__name__}-{v.dtype}",
)
def test_the_library_the_device_and_the_dtype_decide(x, expected):
    assert name(x) == expected
    assert qcomp.backends.explain(x).kernels == expected


def test_a_context_overrides_a_setting_and_a_setting_the_automatic_choice():
    assert name(X) == "numba"
    qcomp.backends.set_default("pure")
    assert name(X) == "pure"
    with qcomp.backends.use("numba"):
        assert name(X) == "numba"
        with qcomp.backends.use("pure"):
            assert name(X) == "pure"
        with qcomp.backends.use("auto"):
            assert name(X) == "numba"
    assert name(X) == "pure"
    qcomp.backends.set_default("numba")
    assert name(X) == "numba"
    assert name(jnp.ones(3)) == "pure"  # numba was requested, but cannot take JAX arrays


def test_the_environment_is_the_first_setting(monkeypatch):
    monkeypatch.setattr(choice, "_default", None)
    monkeypatch.setenv("QCOMP_KERNELS", "pure")
    assert name(X) == "pure"
    monkeypatch.setattr(choice, "_default", None)
    monkeypatch.setenv("QCOMP_KERNELS", "numbers")
    with pytest.raises(ValueError, match=r"name is 'numbers'; expected one of auto, pure, numba"):
        qcomp.ScaledSign().compress(X)


def test_the_ranks_of_a_local_world_inherit_the_context():
    with qcomp.backends.use("pure"):
        assert qcomp.comm.run_local(2, lambda comm: name(X)) == ["pure", "pure"]
    assert qcomp.comm.run_local(2, lambda comm: name(X)) == ["numba", "numba"]


def test_devices_need_no_hash():
    """CuPy's have none."""

    class Place:
        __hash__ = None

        def __str__(self):
            return "somewhere"

    class Array(np.ndarray):
        device = Place()

    x = np.zeros(3, np.float32).view(Array)
    assert choice.automatic(x) is choice.automatic(x) is None


def test_the_choice_is_made_once(monkeypatch):
    loads = []
    monkeypatch.setattr(choice, "load", lambda name: loads.append(name) or registry.load(name))
    for _ in range(3):
        assert name(X) == "numba"
    assert loads == ["numba"]


@pytest.mark.parametrize("call", [qcomp.backends.use, qcomp.backends.set_default])
def test_an_unknown_set_is_an_error(call):
    with pytest.raises(
        ValueError, match="name is 'numbers'; expected one of auto, pure, numba, triton, cupy, jax"
    ):
        call("numbers")


@pytest.fixture
def no_numba(monkeypatch):
    missing = registry.BUILT_IN["numba"]._replace(module="qcomp_numba_is_missing")
    monkeypatch.setitem(registry.BUILT_IN, "numba", missing)


@pytest.mark.parametrize("call", [qcomp.backends.use, qcomp.backends.set_default])
def test_a_requested_set_that_is_not_installed_is_an_error_with_a_hint(no_numba, call):
    with pytest.raises(ImportError, match=r"the kernels 'numba' need .*: pip install 'qcomp\[numba\]'"):
        call("numba")
    assert name(X) == "pure"


def test_a_missing_set_that_was_not_requested_is_logged_once(no_numba, caplog):
    with caplog.at_level(logging.WARNING, logger="qcomp"):
        for x in (X, X, torch.ones(3), X.astype(np.float16)):
            assert name(x) == "pure"
    (record,) = caplog.records
    assert "numpy arrays on cpu are compressed by the pure version" in record.message
    assert "pip install 'qcomp[numba]'" in record.message
    assert "pip install 'qcomp[numba]'" in qcomp.backends.explain(X).reason


def test_large_arrays_of_float64_are_logged_once_if_only_float32_has_kernels(caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, logger="qcomp"):
        assert name(np.ones(20_000)) == "numba"
        choice._choices.clear()
        numba = type(registry.load("numba"))  # as if it were one of the sets for GPUs
        monkeypatch.setattr(numba, "takes", lambda _, x: "float32" in str(x.dtype))
        for x in (
            np.ones(9_999),
            np.ones(20_000, np.float32),
            jnp.ones(20_000),
            array_api_strict.ones(20_000),
        ):
            name(x)
        with qcomp.backends.use("pure"):
            name(np.ones(20_000))
        assert not caplog.records
        for x in (np.ones(10_000), np.ones((100, 200)), torch.ones(20_000, dtype=torch.float64)):
            assert name(x) == "pure"
    (record,) = caplog.records
    assert record.message.startswith(
        "numpy arrays of float64 on cpu are compressed by the pure version, which is "
    )
    assert record.message.endswith(
        "none for float64; convert the arrays to float32 if that is precise enough"
    )


def test_large_arrays_of_float64_without_numba(no_numba, caplog):
    with caplog.at_level(logging.WARNING, logger="qcomp"):
        assert name(np.ones(20_000)) == "pure"
    (record,) = caplog.records
    assert "pip install 'qcomp[numba]'" in record.message


def test_an_exception_of_a_running_kernel_is_not_swallowed(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(type(registry.load("numba")), "encode", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        qcomp.ScaledSign().compress(X)


def test_arrays_traced_by_jax_use_the_pure_version():
    """A traced array becomes a part of the caller's program."""
    x, c = jnp.linspace(-1, 1, 100), qcomp.ScaledSign(bucket_size=64)
    seen = []

    def program(x):
        seen.append(name(x))
        payload, residual = qcomp.feedback.compress(c, x, jnp.zeros(100))
        return payload.data, residual

    data, residual = jax.jit(program)(x)
    assert seen == ["pure"]
    assert name(x) == "jax"
    expected, rest = qcomp.feedback.compress(c, x, jnp.zeros(100))
    assert np.asarray(data).tobytes() == np.asarray(expected.data).tobytes()
    assert np.asarray(residual).tobytes() == np.asarray(rest).tobytes()


def test_a_kernel_set_of_another_package_is_used_on_request(monkeypatch):
    class Theirs:
        name = "theirs"

        def takes(self, x):
            return isinstance(x, np.ndarray)

        def encode(self, *args, **options):
            return None

    class Announced:
        name = "theirs"

        def load(self):
            return Theirs()

    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [Announced()] if group == "qcomp.kernels" else []
    )
    assert "theirs" in qcomp.backends.names()
    with qcomp.backends.use("theirs"):
        assert name(X) == "theirs"
        qcomp.ScaledSign().compress(X)  # it has no kernel for this, so the pure version runs
    assert name(X) == "numba"


@pytest.mark.parametrize("old", ["3.2.0", "3.3.1", "2.1.0"])
def test_a_triton_version_that_rounds_differently_is_not_used(monkeypatch, old):
    """torch 2.6 and 2.7 ship such a Triton; on their GPUs the pure version runs, and a warning says what to install."""
    triton = pytest.importorskip("triton")
    module = registry.BUILT_IN["triton"].module
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(triton, "__version__", old)
    with pytest.raises(
        registry.UnavailableError,
        match=rf"need Triton 3\.4 or newer, which comes with torch 2\.8, instead of {old}: pip",
    ):
        registry.load("triton")
