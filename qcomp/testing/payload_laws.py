"""Laws about payload lengths, coders and damage; see `qcomp.testing.laws`."""

from typing import Any

import numpy as np

from qcomp.core.errors import PayloadError
from qcomp.core.numeric.arrays import array_namespace, device
from qcomp.core.payload import Payload
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import flushed, sizes, tested_bucket, vector
from qcomp.testing.libraries import Vector, to_numpy


def payload_size(case: Case) -> None:
    """A payload has exactly as many bytes as its spec says, or at most as many with `Compressor.variable_length`.

    It is a uint8 array on the device of the vector.
    """
    varies = case.compressor.variable_length
    for size in sizes(case.compressor.traits.bucket_size):
        x = case.array(vector("gaussian", size, 0))
        payload = case.payload(vector("gaussian", size, 0))
        spec = case.compressor.payload_spec(size, "float32")
        assert spec.variable_length == varies, f"{size} elements: the spec and `variable_length` differ"
        assert spec.admits(payload.nbytes), (
            f"{size} elements: {payload.nbytes} bytes; the spec says {'at most ' if varies else ''}{spec.nbytes}"
        )
        assert tuple(payload.data.shape) == (payload.nbytes,), (
            f"{size} elements: shape {tuple(payload.data.shape)}"
        )
        xp = array_namespace(x)
        assert payload.data.dtype == xp.uint8, f"the payload has dtype {payload.data.dtype}"
        assert device(payload.data) == device(x), (
            f"the payload is on {device(payload.data)}, x on {device(x)}"
        )


def announced_length(case: Case, x: Vector) -> None:
    """No payload is longer than its spec announces, whatever the vector."""
    spec, nbytes = case.compressor.payload_spec(x.size), len(case.compress(x).data)
    assert spec.admits(nbytes), f"{nbytes} bytes; the spec says {spec.shortest} to {spec.nbytes}"


def coder_loses_nothing(case: Case, x: Vector) -> None:
    """A coder restores the payload that it has shortened, that is, the compressor's payload without coder."""
    coder = case.compressor.coder
    assert coder is not None
    plain = case.plain
    residual = flushed(np.roll(x, 2) * np.float32(0.5))
    got, expected = (each.compress_with_feedback(x, residual) for each in (case, plain))
    restored = coder.restore(case.array(np.frombuffer(got.data, np.uint8)), x.size)
    assert to_numpy(restored).tobytes() == expected.data, "the coder does not restore what it has shortened"
    assert got.decoded.tobytes() == expected.decoded.tobytes(), (
        "with and without the coder, it decompresses to different vectors"
    )
    assert got.residual.tobytes() == expected.residual.tobytes(), (
        "with and without the coder, residuals differ"
    )


def damaged_payload_is_an_error(case: Case) -> None:
    """A truncated or extended payload raises PayloadError; other damage raises it too, or gives some vector."""
    size = tested_bucket(case.compressor.traits.bucket_size) + 9
    x = vector("sparse", size, 11)
    like, good = case.array(x), to_numpy(case.payload(x).data)
    n = good.size

    def decompress(data: Vector) -> Any:
        payload = Payload(case.compressor.spec, size, "float32", case.array(data))
        return case.compressor.decompress(payload, like=like)

    for length in {0, 1, n // 2, max(0, n - 1), n + 1} - {n}:
        try:
            decompress(np.resize(good, length))
        except PayloadError:
            continue
        raise AssertionError(f"{length} of {n} bytes were decompressed without an error")
    for position in np.unique(np.linspace(0, n - 1, 16 if n else 0).astype(int)):
        for bit in (0, 3, 7):
            damaged = good.copy()
            damaged[position] ^= np.uint8(1 << bit)
            try:
                with np.errstate(all="ignore"):  # a damaged scale may be anything
                    shape = tuple(decompress(damaged).shape)
            except PayloadError:
                continue
            assert shape == x.shape, f"with a bit flipped in byte {position}, it has shape {shape}"
