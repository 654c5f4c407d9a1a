"""Elementwise computations in blocks: the same bits as on whole arrays, in the given buffers."""

import numpy as np
import pytest

import qcomp
from qcomp.core.numeric import cache_blocks
from qcomp.core.numeric.arrays import is_mutable, is_on_host
from qcomp.core.numeric.cache_blocks import in_blocks

SHAPES = [(7, 33), (1, 300), (300,), (), (0, 5), (40, 3, 2)]
OPTIMIZERS = {
    "sgd": lambda: qcomp.SGD(learning_rate=0.1, weight_decay=0.01),
    "nesterov": lambda: qcomp.CompressedSGD(learning_rate=0.1, nesterov=True, exact=None, weight_decay=0.01),
    "zero_one": lambda: qcomp.ZeroOneAdam(learning_rate=0.1, exact=None),
    "lamb": lambda: qcomp.Lamb(learning_rate=0.1, weight_decay=0.01),
    "onebit_lamb": lambda: qcomp.OneBitLamb(
        learning_rate=0.1, freeze=3, exact=None, weight_decay=0.01, decoupled_weight_decay=False, watch=None
    ),
}


def move(p, m):
    m = 0.5 * m + p
    return p - m, m


def arrays(library, number):
    rng = np.random.default_rng(number)
    return [library.array(rng.standard_normal(shape, dtype=np.float32)) for shape in SHAPES]


@pytest.mark.parametrize("own", [False, True], ids=["into other buffers", "into the arrays"])
def test_results_equal_those_on_whole_arrays(monkeypatch, float64_library, own):
    monkeypatch.setattr(cache_blocks, "_BLOCK", 16)
    library = float64_library
    for p, m in zip(arrays(library, 1), arrays(library, 2), strict=True):
        if p.ndim == 2:  # as in the channels_last format
            p = library.seal(library.xp.permute_dims(library.xp.asarray(p, copy=True), (1, 0)))  # noqa: PLW2901
            m = library.xp.permute_dims(m, (1, 0))  # noqa: PLW2901
        expected = [library.numpy(x) for x in move(p, m)]
        outs = [p, m] if own else [library.xp.empty_like(p), library.xp.empty_like(m)]
        found = in_blocks(move, (p, m), outs)
        for a, b in zip(expected, found, strict=True):
            assert a.tobytes() == library.numpy(b).tobytes()
        in_parts = p.ndim > 0 and p.shape[0] > 1 and expected[0].size > 16 and is_on_host(p)
        in_parts = in_parts and all(map(is_mutable, outs))
        assert [x is out for x, out in zip(found, outs, strict=True)] == [in_parts] * 2


def test_a_library_without_in_place_writes_computes_whole_arrays(libraries):
    x = libraries["jax"].array(np.ones((3, 5), np.float32))
    found = in_blocks(move, (x, x), [None, None])
    assert [float(y[0, 0]) for y in found] == [-0.5, 1.5]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_do_not_depend_on_the_block_size(monkeypatch, libraries, lockstep, name, donate):
    results = []
    for elements in (1 << 15, 16):
        monkeypatch.setattr(cache_blocks, "_BLOCK", elements)
        results.append(trained(libraries["torch"], lockstep, OPTIMIZERS[name](), donate=donate))
    assert results[0] == results[1]


def trained(library, lockstep, opt, *, donate):
    """Return the bytes of parameters and states after some steps on two ranks."""
    params = [arrays(library, 3) for _ in range(2)]
    states = lockstep([opt.init_stages(p, rank=rank, size=2, host="one") for rank, p in enumerate(params)])
    for step in range(8):
        grads = [arrays(library, [rank, step]) for rank in range(2)]
        stages = [
            opt.stages(p, g, state, donate=donate) for p, g, state in zip(params, grads, states, strict=True)
        ]
        params, states = map(list, zip(*lockstep(stages), strict=True))
    kept = [x for s in states for x in (*s.momentum, *s.variance, *s.exchange.worker, *s.exchange.server)]
    kept += [x for state in states for of_kind in state.arrays.values() for x in of_kind]
    return [library.numpy(x).tobytes() for x in (*params[0], *params[1], *kept)]
