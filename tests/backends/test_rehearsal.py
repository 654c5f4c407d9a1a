"""All kernels that training needs are compiled when it begins."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

import qcomp

pytest.importorskip("numba")

SCRIPT = """
import functools, json, sys
import numpy as np, qcomp
from qcomp.backends.numba_cpu import jit
from qcomp.core.optimizers import replica

loaded = []
compile_ = jit.Kernel.compile

def noted(self):
    loaded.append(self.function.__name__)
    return compile_(self)

jit.Kernel.compile = noted
if "lazily" in sys.argv:
    replica.rehearse = lambda *_, **__: None
elif "for the first compressor" in sys.argv:
    replica.rehearse = lambda compressors, *a, real=replica.rehearse, **o: real(compressors[:1], *a, **o)
options = {"learning_rate": 1e-3, "freeze": 2, "exact": None, "weight_decay": 0.1}
qsgd = qcomp.Scaled(qcomp.QSGD(levels=7, bucket_size=64))
optimizers = {
    "sign": qcomp.OneBitAdam(**options),
    "coupled": qcomp.OneBitAdam(**options, decoupled_weight_decay=False),
    "range": qcomp.OneBitAdam(**options, compressor=qcomp.MinMaxUInt8()),
    "levels": qcomp.OneBitAdam(**options, compressor=qsgd, averaging=qcomp.Averaging("all_gather")),
    "coded": qcomp.OneBitAdam(**options, compressor=qcomp.QSGD(levels=7, bucket_size=64, coding="range")),
    "elias": qcomp.OneBitAdam(
        **options,
        compressor=qcomp.QSGD(levels=1, bucket_size=64, coding="elias"),
        averaging=qcomp.Averaging(feedback=False),
    ),
    "local": qcomp.ZeroOneAdam(learning_rate=1e-3, freeze=2, exact=None),
    "lamb": qcomp.OneBitLamb(**options),
    "momentum": qcomp.CompressedSGD(learning_rate=1e-3, momentum=0.9, exact=None),
}

def rank_main(comm, *, opt):
    params = [np.linspace(-1, 1, n, dtype=np.float32) for n in (1000, 7)]
    state = opt.init(params, comm)
    comm.all_gather(np.zeros(1, dtype=np.uint8), [1, 1])  # all ranks have begun
    before = len(loaded)
    for _ in range(6):
        params, state = opt.step(params, [p + comm.rank for p in params], state, comm)
    return loaded[before:], state.stage

late = {}
for name, opt in optimizers.items():
    for kernel in [x for module in list(sys.modules.values()) for x in vars(module).values()
                   if isinstance(x, jit.Kernel)]:
        kernel._compiled = None
    results = qcomp.comm.run_local(2, functools.partial(rank_main, opt=opt))
    late[name] = sorted({kernel for kernels, _ in results for kernel in kernels})
print(json.dumps(late))
"""


def kernels_compiled_late(*how):
    """Return, by optimizer, the kernels that steps had to compile or to read from the cache; and what stderr said."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *how],
        env={**os.environ, "QCOMP_KERNELS": "numba"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout), found.stderr


@pytest.fixture(scope="module")
def compiled_late():
    """The kernels that steps had to compile; afterwards all are in the cache."""
    return kernels_compiled_late()[0]


@pytest.mark.exhaustive
def test_no_step_compiles_anything(compiled_late):
    late = compiled_late
    assert late
    assert not any(late.values()), late


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["lazily", pytest.param("for the first compressor", marks=pytest.mark.exhaustive)]
)
def test_a_step_that_compiles_is_detected(how):
    late, _ = kernels_compiled_late(how)
    assert "encode_sign" in late["sign"]


@pytest.mark.exhaustive
def test_a_full_cache_needs_no_message(compiled_late):
    _, said = kernels_compiled_late()
    assert "compiling" not in said


@pytest.mark.exhaustive
def test_compiling_is_announced_once(tmp_path):
    script = (
        "import numpy as np, qcomp\n"
        "comm = qcomp.comm.LocalCommunicator.alone()\n"
        "qcomp.Adam(learning_rate=0.1).init(np.zeros(3, dtype=np.float32), comm)\n"
    )
    environment = {**os.environ, "QCOMP_KERNELS": "numba", "NUMBA_CACHE_DIR": str(tmp_path)}
    for expected in (1, 0):
        found = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        assert found.stderr.count("compiling kernels") == expected


@dataclass(frozen=True, eq=False)
class Choosy(qcomp.Identity):
    """A compressor of another package, which accepts vectors of one size only."""

    name: ClassVar[str] = "choosy"
    sizes: list[int] = field(default_factory=lambda: [40])

    def encode(self, x, key):
        assert x.shape[0] in self.sizes
        return super().encode(x, key)


def test_compressors_of_other_packages_are_not_called():
    comm = qcomp.comm.LocalCommunicator.alone()
    with qcomp.backends.use("numba"):
        mean = qcomp.CompressedMean(Choosy())
        x = np.ones(40, dtype=np.float32)
        result, _ = mean(x, mean.init(x, comm), comm)
    assert (result == 1).all()
