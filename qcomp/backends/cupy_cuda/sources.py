"""The CUDA C++ sources of the kernels.

Sources that depend on a dtype are templates, and a macro makes a named instance. Each instance is compiled at its first
call, since compiling all of them takes a minute.
"""

from __future__ import annotations

import functools
from pathlib import Path

HEADERS = ("arithmetic.cuh", "elements.cuh", "buckets.cuh", "inputs.cuh")
"""Included before every kernel, in this order."""

_TYPES = {"float32": "float", "float16": "Half", "bfloat16": "BFloat16"}
DTYPES = tuple(_TYPES)
"""Supported dtypes of vectors, and their C++ types."""
_ROLES = {
    "encode": "ENCODE({}, {}, false, PLAIN)",
    "encode_large": "ENCODE({}, {}, true, PLAIN)",
    "encode_blended": "ENCODE({}, {}, false, BLENDED)",
    "encode_blended_large": "ENCODE({}, {}, true, BLENDED)",
    "decode": "DECODE({}, {})",
}


def kernel_name(family: str, role: str, dtype: str) -> str:
    """Return the name of a family's kernel for a role and a dtype."""
    return f"{family}_{role}_{dtype}"


KERNELS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("finish_mean", "momentum", "frozen_step"), ("vectors.cu", "")),
    **{
        kernel_name(family, role, dtype): (
            f"{family}.cu",
            f"{family.upper()}_{macro.format(kernel_name(family, role, dtype), element)}",
        )
        for family in ("sign", "qsgd", "minmax")
        for role, macro in _ROLES.items()
        for dtype, element in _TYPES.items()
    },
}
"""The file of each kernel, and the line that instantiates it from a template in that file."""


def source(name: str) -> str:
    """Return the complete source of a kernel, since CuPy's cache on disk would miss changes of included files."""
    file, instance = KERNELS[name]
    return "\n".join([*(read(header) for header in HEADERS), read(file), instance, ""])


@functools.cache
def read(file: str) -> str:
    """Return the contents of a file of this package."""
    return (Path(__file__).parent / file).read_text(encoding="utf-8")
