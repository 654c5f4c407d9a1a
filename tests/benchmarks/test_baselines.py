"""The baselines that the kernels are compared with do what they claim."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

import baselines

SIZE, BUCKET = 4096, 512


@pytest.fixture
def vectors():
    rng = np.random.default_rng(1)
    return rng.standard_normal(SIZE, dtype=np.float32), rng.standard_normal(SIZE, dtype=np.float32)


def test_numpy_packs_the_signs_and_keeps_the_residual(vectors):
    x, residual = vectors
    codes, scales, lost = baselines.numpy_sign_encode(x, residual, BUCKET)
    p = x + residual
    assert codes.nbytes == SIZE // 8
    assert np.array_equal(np.unpackbits(codes) == 1, p < 0)
    assert scales == pytest.approx(np.abs(p.astype(np.float64)).reshape(-1, BUCKET).mean(axis=1), rel=1e-6)
    decoded = baselines.numpy_sign_decode(codes, scales, BUCKET)
    assert np.array_equal(np.sign(decoded), np.sign(p))
    assert np.array_equal(lost, p - decoded)
    assert lost.dtype == decoded.dtype == np.float32


def test_deepspeed_packs_the_signs_with_one_scale(vectors):
    x, residual = (torch.from_numpy(v.copy()) for v in vectors)
    p = (x + residual).numpy()
    codes, scale = baselines.deepspeed_encode(x, residual, baselines.packbits_numpy)
    assert np.array_equal(np.unpackbits(codes) == 1, p >= 0)
    assert float(scale) == pytest.approx(np.sqrt(np.mean(p.astype(np.float64) ** 2)), rel=1e-6)
    decoded = baselines.deepspeed_decode(codes, scale, baselines.unpackbits_numpy).numpy()
    assert np.array_equal(decoded, np.where(p >= 0, float(scale), -float(scale)).astype(np.float32))
    assert np.array_equal(residual.numpy(), p - decoded)


def test_deepspeed_treats_zero_as_positive():
    codes, _ = baselines.deepspeed_encode(torch.zeros(8), torch.zeros(8), baselines.packbits_numpy)
    assert codes.tolist() == [255]
