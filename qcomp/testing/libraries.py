"""Conversion of arrays between NumPy and the array library that a check runs on."""

from types import ModuleType
from typing import Any

import numpy as np

from qcomp.core.numeric.arrays import array_namespace, dtype_name, host_bytes, itemsize


class _ReadOnlyNumPy:
    """NumPy whose arrays are read-only, so that writes into the input raise."""

    __name__ = "read_only_numpy"
    float16, float32, float64, uint8 = np.float16, np.float32, np.float64, np.uint8

    @staticmethod
    def asarray(values: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
        array = np.array(values, dtype=dtype)
        array.flags.writeable = False
        return array


read_only_numpy = _ReadOnlyNumPy()
"""Pass as ``xp`` to `check_compressor` to find a compressor that writes into its input."""

Vector = np.ndarray[Any, Any]
Namespace = ModuleType | _ReadOnlyNumPy


def library_name(xp: Namespace) -> str:
    """Return a short name of a namespace."""
    return xp.__name__.removeprefix("array_api_compat.")


def dtype_of(xp: Namespace, name: str) -> Any:
    """Return the dtype of this name in the library, or None.

    NumPy's bfloat16 comes from ml_dtypes, if that is imported.
    """
    dtype = getattr(xp, name, None)
    if dtype is None and library_name(xp) in ("numpy", "read_only_numpy"):
        try:
            return np.dtype(name)
        except TypeError:
            return None
    return dtype


def has_dtype(xp: Namespace, name: str) -> bool:
    """Return whether the library can make arrays of this dtype."""
    if dtype_of(xp, name) is None:
        return False
    if name in (
        "float16",
        "bfloat16",
    ):  # the standard does not have these dtypes, so the namespace does not list them
        return True
    namespace = array_namespace(xp.asarray([0.0], dtype=xp.float32))
    return name in namespace.__array_namespace_info__().dtypes(kind="real floating")


def to_library(xp: Namespace, values: np.ndarray[Any, Any], dtype: str | None = None) -> Any:
    """Return a NumPy array as an array of the library, in the same dtype unless another is given."""
    return xp.asarray(values.copy(), dtype=dtype_of(xp, dtype or values.dtype.name))


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Return an array of any library and device as a NumPy array, bfloat16 as the same values in float32."""
    name = dtype_name(x.dtype)
    data = np.frombuffer(host_bytes(x), dtype="uint16" if name == "bfloat16" else name)
    assert data.nbytes == data.size * itemsize(name)
    if name == "bfloat16":  # which plain NumPy lacks
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.reshape(tuple(x.shape))
