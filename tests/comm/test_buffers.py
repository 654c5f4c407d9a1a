import array_api_compat
import array_api_strict
import numpy as np
import pytest

from qcomp.comm.buffers import from_host, stage_exchange, to_host


def library(name):
    """Return the namespace of a library, or skip."""
    if name == "array_api_strict":
        return array_api_strict
    return pytest.importorskip(
        {"numpy": "numpy", "torch": "array_api_compat.torch", "jax": "jax.numpy"}[name]
    )


LIBRARIES = ["numpy", "torch", "jax", "array_api_strict"]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("values", [[], [0], [3, 255, 0, 7, 1]], ids=str)
def test_to_host_and_from_host_keep_bytes_library_and_device(name, values):
    xp = library(name)
    x = xp.asarray(np.asarray(values, dtype=np.uint8))
    host = to_host(x)
    assert type(host) is np.ndarray
    assert host.dtype == np.uint8
    assert host.tolist() == values
    back = from_host(host.copy(), like=x)
    assert type(back) is type(x)
    assert back.dtype == xp.uint8
    assert array_api_compat.device(back) == array_api_compat.device(x)
    assert np.asarray(back).tolist() == values


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_to_host_shares_host_memory(name):
    x = library(name).asarray(np.zeros(4, dtype=np.uint8))
    host = to_host(x)
    x[2] = 9
    assert host.tolist() == [0, 0, 9, 0]


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_to_host_makes_strided_input_contiguous(name):
    host = to_host(library(name).asarray(np.arange(6, dtype=np.uint8))[::2])
    assert host.flags.c_contiguous
    assert host.tolist() == [0, 2, 4]


@pytest.mark.parametrize("name", LIBRARIES)
def test_to_host_rejects_another_dtype(name):
    xp = library(name)
    with pytest.raises(TypeError, match=r"payload must have dtype uint8, got .*int8"):
        to_host(xp.asarray(np.zeros(3, dtype=np.int8)), name="payload")


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_to_host_rejects_another_shape(name, shape):
    xp = library(name)
    with pytest.raises(ValueError, match=r"x must be one-dimensional, got shape \("):
        to_host(xp.asarray(np.zeros(shape, dtype=np.uint8)))


@pytest.mark.parametrize("thing", [b"abc", [1, 2], None, bytearray(2)])
def test_to_host_rejects_objects_that_are_not_arrays(thing):
    with pytest.raises(TypeError, match=f"x must be an array, got {type(thing).__name__}"):
        to_host(thing)


def stage(send, receive, *, rank=0, size=2):
    return stage_exchange([np.zeros(n, dtype=np.uint8) for n in send], receive, rank=rank, size=size)


def test_stage_exchange_rejects_arguments_that_do_not_fit_the_world():
    with pytest.raises(ValueError, match="send must hold one buffer for each of 2 ranks, got 3"):
        stage([1, 1, 1], [1, 1])
    with pytest.raises(ValueError, match="receive must hold one size for each of 2 ranks, got 1"):
        stage([1, 1], [1])
    with pytest.raises(ValueError, match="receive must hold sizes of at least 0 bytes, got -4"):
        stage([1, 1], [1, -4])
    with pytest.raises(TypeError, match="integer"):
        stage([1, 1], [1, 1.0])
    with pytest.raises(ValueError, match=r"receive\[1\] is 5, but rank 1 sends itself 4 bytes"):
        stage([1, 4], [1, 5], rank=1)


def test_stage_exchange_names_the_buffer_that_is_wrong():
    good, bad = np.zeros(1, dtype=np.uint8), np.zeros(1)
    with pytest.raises(TypeError, match=r"send\[1\] must have dtype uint8, got float64"):
        stage_exchange([good, bad], [1, 1], rank=0, size=2)


def test_from_host_goes_to_the_device():
    like = array_api_strict.zeros(3, device=array_api_strict.Device("device1"))
    assert from_host(np.zeros(2, dtype=np.uint8), like=like).device == like.device
