"""Array libraries as the checks see them: into the library, and back to NumPy."""

from types import ModuleType
from typing import Any

import numpy as np

from qcomp.core.arrays import array_namespace, dtype_name, host_bytes, itemsize

__all__ = ["has_dtype", "library_name", "read_only_numpy", "to_library", "to_numpy"]


class _ReadOnlyNumPy:
    """NumPy with read-only arrays: whatever writes into its input is found out."""

    __name__ = "read_only_numpy"
    float16, float32, float64, uint8 = np.float16, np.float32, np.float64, np.uint8

    @staticmethod
    def asarray(values: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
        array = np.array(values, dtype=dtype)
        array.flags.writeable = False
        return array


read_only_numpy = _ReadOnlyNumPy()
"""Pass as ``xp`` to `check_compressor` to find a compressor that writes into its input."""

Namespace = ModuleType | _ReadOnlyNumPy


def library_name(xp: Namespace) -> str:
    """Return a short name of a namespace."""
    return xp.__name__.removeprefix("array_api_compat.")


def has_dtype(xp: Namespace, name: str) -> bool:
    """Return whether arrays of this dtype can be made in the library."""
    if not hasattr(xp, name):
        return False
    namespace = array_namespace(xp.asarray([0.0], dtype=xp.float32))
    info = namespace.__array_namespace_info__()
    return name == "float16" or name in info.dtypes(kind="real floating")


def to_library(xp: Namespace, values: np.ndarray[Any, Any]) -> Any:
    """Return a NumPy array as an array of the library, of the same dtype."""
    return xp.asarray(values.copy(), dtype=getattr(xp, values.dtype.name))


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Return an array of any library and device as a NumPy array."""
    name = dtype_name(x.dtype)
    data = np.frombuffer(host_bytes(x), dtype=name)
    assert data.nbytes == data.size * itemsize(name)
    return data.reshape(tuple(x.shape))
