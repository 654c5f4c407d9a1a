"""Runs the CUDA kernels on NumPy arrays: compiles their sources as ordinary C++ with ``cuda_emulation.h``."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from qcomp.backends.cupy_cuda import sources

COMPILER = shutil.which("g++")

_FLAGS = (
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",  # two libraries share no memory
    "-U_FORTIFY_SOURCE",
    "-fPIC",
    "-shared",
)
_GUARD = 64
"""The guard bytes before and after every new array, which no kernel may write."""
_CANARY = 0xA5


def translation_unit(names=tuple(sources.KERNELS)):
    """Return one C++ source that contains the kernels and a table of them."""
    files = dict.fromkeys(sources.KERNELS[name][0] for name in names)
    table = ",".join(f'{{"{name}", entry<{name}>()}}' for name in names)
    return "\n".join(
        [
            (Path(__file__).parent / "cuda_emulation.h").read_text(encoding="utf-8"),
            *(sources.read(header) for header in sources.HEADERS if header != "arithmetic.cuh"),
            *(sources.read(file) for file in files),
            *(sources.KERNELS[name][1] for name in names),
            f"const std::map<std::string, emulation::Entry> emulation::kernels = {{{table}}};",
        ]
    )


def build(directory, code=None, optimise="-O1"):
    """Return the shared library of a translation unit (default: all kernels), compiled unless it is there already."""
    code = code or translation_unit()
    flags = [*_FLAGS, optimise]
    digest = hashlib.sha256("\0".join([code, *flags]).encode()).hexdigest()[:16]
    library = Path(directory) / f"cuda_emulation_{digest}.so"
    if not library.exists():
        mine = library.with_suffix(f".{os.getpid()}")  # several workers may compile it at once
        command = [COMPILER, *flags, "-Wno-unknown-pragmas", "-x", "c++", "-", "-o", str(mine)]
        subprocess.run(command, input=code, text=True, check=True, capture_output=True)
        mine.replace(library)
    loaded = ctypes.PyDLL(str(library))  # keeps the GIL: the emulated device runs one kernel at a time
    loaded.launch.restype = ctypes.c_char_p
    return loaded


class EmulatedRuntime:
    """NumPy arrays as device arrays, and the emulated machine that runs the kernels.

    Parameters
    ----------
    library : ctypes.PyDLL
        From `build`.
    order : int
        The order in which the threads of a block run between two barriers: 0 forwards, 1 backwards, else shuffled.
    """

    def __init__(self, library, order=0):
        self.library = library
        self.order = order
        self.launches = []

    def owns(self, x):
        return isinstance(x, np.ndarray)

    def address(self, x):
        return x.ctypes.data

    def empty(self, shape, dtype, *, like):
        dtype = like.dtype if like.dtype.name == dtype else np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.full(nbytes + 2 * _GUARD + 16, _CANARY, dtype=np.uint8)
        first = -memory.ctypes.data % 16 + _GUARD
        return memory[first : first + nbytes].view(dtype).reshape(shape)

    def zeros(self, shape, dtype, *, like):
        array = self.empty(shape, dtype, like=like)
        array[...] = 0
        return array

    def run(self, launch, *, like):
        self.launches.append(launch)
        values = [np.asarray(value) for value in launch.arguments]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        error = self.library.launch(
            launch.name.encode(),
            launch.grid,
            launch.block,
            "".join(value.dtype.char for value in values).encode(),
            pointers,
            self.order,
        )
        assert error is None, f"{launch}: {error.decode()}"


def guards_are_whole(array):
    """Return whether the guard bytes around an array from `EmulatedRuntime.empty` are unchanged."""
    memory = array
    while memory.base is not None:
        memory = memory.base
    start = array.ctypes.data - memory.ctypes.data
    before, behind = memory[:start], memory[start + array.nbytes :]
    return bool(np.all(before == _CANARY) and np.all(behind == _CANARY))
