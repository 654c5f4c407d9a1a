"""Error feedback: what compression lost is added to the next vector, so that nothing is lost for ever."""

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.numeric.arrays import Array, compute_dtype_name, dtype_name, is_mutable
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload

__all__ = ["compress", "require_contraction"]


def compress(
    compressor: Compressor,
    x: Array,
    residual: Array,
    *,
    key: Key | None = None,
    donate: bool = False,
) -> tuple[Payload, Array]:
    """Compress x plus the residual, and return what that lost as the new residual.

    With p = fl(x + residual) and q = ``decompress(payload)``, the new residual is fl(p - q) bit for bit, where fl
    rounds to nearest and what is below 2^-126 in magnitude counts as +0, in x as in the results. So over T steps
    the decompressed vectors add up to the sum of the inputs plus the first residual minus the last, for any
    compressor.

    Parameters
    ----------
    compressor : Compressor
        Any; the residual stays bounded for contractions (``traits.delta``).
    x : array
        This step's vector, any shape.
    residual : array
        Of the shape of x, in float64 for float64 and in float32 otherwise; zeros at first.
    key : Key, optional
        For compressors that draw.
    donate : bool
        Whether the new residual may take the buffer of the old one, whose values are lost then. Arrays of an
        immutable library are not reused.

    Returns
    -------
    payload : Payload
    residual : array
        Of the shape and dtype of the old one.

    Raises
    ------
    NonFiniteError
        If x is not finite; the residual is as it was, also with ``donate``.

    Notes
    -----
    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, algorithm 1. The residual is of the
    compensated value p, without which the sum does not telescope.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> x = np.asarray([3.0, 1.0], dtype=np.float32)
    >>> payload, residual = compress(qcomp.ScaledSign(bucket_size=8), x, np.zeros_like(x))
    >>> residual
    array([ 1., -1.], dtype=float32)
    """
    if tuple(residual.shape) != tuple(x.shape):
        raise ValueError(f"residual has shape {tuple(residual.shape)}; x has {tuple(x.shape)}")
    expected = compute_dtype_name(dtype_name(x.dtype))
    if dtype_name(residual.dtype) != expected:
        raise TypeError(f"residual has dtype {dtype_name(residual.dtype)}; expected {expected}")
    out = residual if donate and is_mutable(residual) else None
    compressor = compressor.for_shape(tuple(x.shape))
    encoded = primitives.encode(compressor, x, residual, key, out=out)
    primitives.require_accepted(compressor, encoded)
    return compressor.payload(x, encoded.data), encoded.residual


def require_contraction(compressor: Compressor) -> None:
    """Raise ValueError if error feedback around this compressor would explode.

    Around an unbiased compressor without scaling, and with no new input, E ||e'||^2 = omega ||e||^2.
    """
    traits = compressor.traits
    if traits.unbiased and traits.omega is not None and traits.omega >= 1:
        raise ValueError(
            f"feedback=True around {compressor.spec}, which is unbiased with omega = {traits.omega:.3g} >= 1: the "
            f"residual would grow without bound; wrap it as qcomp.Scaled(...), take more levels or smaller "
            "buckets, or set feedback=False"
        )
