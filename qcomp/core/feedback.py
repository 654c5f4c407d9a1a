"""Error feedback: adds to the next vector what compression lost, so that nothing is lost for good."""

from typing import cast

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.numeric.arrays import (
    Array,
    Kind,
    compute_dtype_name,
    detached,
    dtype_name,
    is_mutable,
    require_dense,
)
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload


def compress(
    compressor: Compressor,
    x: Array,
    residual: Kind,
    *,
    key: Key | None = None,
    donate: bool = False,
) -> tuple[Payload, Kind]:
    """Compress x plus the residual, and return the compression error as the new residual.

    With p = fl(x + residual) and q = ``decompress(payload)``, the new residual is fl(p - q) bit for bit, where fl
    rounds to nearest; magnitudes below 2^-126 count as +0, in x and in the results. So over T steps the
    decompressed vectors add up to the sum of the inputs plus the first residual minus the last.

    Parameters
    ----------
    compressor : Compressor
        A compressor that keeps the residual bounded: a contraction (``traits.delta``), or an unbiased compressor with
        ``traits.omega`` or ``traits.peak`` below 1.
    x : array
        This step's vector, any shape.
    residual : array
        Has the shape of x, and dtype float64 if x has it, else float32. Start with zeros.
    key : Key, optional
        Determines the random draws; required by compressors that draw.
    donate : bool
        Whether the new residual may overwrite the old one. Arrays of an immutable library are not reused.

    Returns
    -------
    payload : Payload
    residual : array
        Has the shape and dtype of the old one.

    Raises
    ------
    ValueError
        If the residual would grow without bound, or the shapes differ.
    NonFiniteError
        If x is not finite; the residual is then unchanged, even with ``donate``.

    Notes
    -----
    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, algorithm 1. The residual is the error of the
    compensated value p; otherwise the sum would not telescope.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> x = np.asarray([3.0, 1.0], dtype=np.float32)
    >>> payload, residual = compress(qcomp.ScaledSign(bucket_size=8), x, np.zeros_like(x))
    >>> residual
    array([ 1., -1.], dtype=float32)
    """
    require_contraction(compressor)
    return compensated(compressor, x, residual, key=key, donate=donate)


def compensated(
    compressor: Compressor, x: Array, residual: Kind, *, key: Key | None = None, donate: bool = False
) -> tuple[Payload, Kind]:
    """Compress as `compress` does, but accept a compressor whose residuals would diverge over many calls."""
    require_dense(x, "x")
    require_dense(residual, "residual")
    if tuple(residual.shape) != tuple(x.shape):
        raise ValueError(f"residual has shape {tuple(residual.shape)}; x has {tuple(x.shape)}")
    expected = compute_dtype_name(dtype_name(x.dtype))
    if dtype_name(residual.dtype) != expected:
        raise TypeError(f"residual has dtype {dtype_name(residual.dtype)}; expected {expected}")
    out = residual if donate and is_mutable(residual) else None
    compressor = compressor.for_shape(tuple(x.shape))
    (x,) = detached([x])
    encoded = primitives.encode(compressor, x, residual, key, out=out)
    primitives.require_accepted(compressor, encoded)
    return compressor.payload(x, encoded.data), cast("Kind", encoded.residual)


def require_contraction(compressor: Compressor) -> None:
    """Raise ValueError if error feedback with this compressor would diverge.

    If the input is zero, an unscaled unbiased compressor turns the residual e into e' with E ||e'||^2 = omega ||e||^2.
    With omega of 1 or more, residuals stay bounded only if ``traits.peak`` is below 1.
    """
    traits = compressor.traits
    if not traits.unbiased or traits.omega is None or traits.omega < 1:
        return
    if traits.peak is None or traits.peak >= 1:
        raise ValueError(
            f"feedback=True around {compressor.spec}, which is unbiased with omega = {traits.omega:.3g} >= 1: the "
            "residual would grow without bound; wrap the compressor in qcomp.Scaled(...), use more levels or smaller "
            "buckets, or do without feedback: pass feedback=False, or call the compressor's own compress"
        )
