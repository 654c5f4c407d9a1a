"""Checks of kernels without compressors: momenta, sums over ranks, Adam's steps, and matrices of low rank."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from qcomp.core import primitives
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import AdamNumbers, FreshNumbers, KernelSet, StepNumbers, use_kernels
from qcomp.core.numeric.arrays import is_mutable
from qcomp.testing.inputs import vector
from qcomp.testing.kernel_memory import LONG, Untouched, around_powers_of_two, laid_out
from qcomp.testing.libraries import Namespace, has_dtype, to_library, to_numpy

BLENDS = ((0.0, 1.0), (0.5, 0.3), (0.95, 1.0), (0.99, 1e-3), (0.999, 0.7), (1.0, 1.0))
_COUNTS = (*range(1, 129), 1000, 1023, 4096)
"""Numbers of ranks."""
_STEPS = tuple(
    StepNumbers(rate=rate, correction=correction, eps=eps, weight_decay=decay)
    for rate, correction, eps, decay in (
        (1e-3, 0.19, 1e-8, 0.0),
        (1e-3, 0.19, 1e-8, 0.1),
        (0.1, 1.0, 1e-6, 0.01),
        (3e-4, 0.1, 1e-3, 0.0),
        (1.0, 0.999, 1.0, 1.0),
        (0.0, 0.5, 1e-15, 0.0),
        (6e-5, 0.6513216, 1e-8, 0.3),
    )
)


def check_updates(kernels: KernelSet, xp: Namespace) -> None:
    """Check the primitives that take one tensor and no compressor."""
    for size in (*around_powers_of_two(1 << 13), *LONG, (1 << 20) + 3):
        _compare_updates(kernels, xp, size, seed=size)
    for number, numbers in enumerate(_STEPS):
        _compare_updates(kernels, xp, 1000, seed=number, numbers=numbers, blend=BLENDS[number % len(BLENDS)])
    for count in _COUNTS:
        for size in (9, 1000):
            _compare_ends(kernels, xp, size, count)
    for size, layout in product((1, 9, 1000, 70_001), ("dense", "strided", "offset")):
        for decay in (0.0, 1e-50, 0.1):
            _compare_descents(kernels, xp, size, layout, decay)
        _compare_multiples(kernels, xp, size, layout)
        _compare_nesterov(kernels, xp, size, layout)
        _check_ranges(kernels, xp, size, layout)
    for name in ("float16", "bfloat16"):
        if has_dtype(xp, name):
            _compare_halves(kernels, xp, name)


_SHAPES_OF_TENSORS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((40, 25),),
    ((), (0,), (7,), (1023,), (5, 5, 41), (5000,), (3, 1)),
    ((250, 280), (9,), (70_001,)),
)
"""Shapes of tensors updated together: a single one; small and empty ones; enough elements for several threads."""


def check_steps(kernels: KernelSet, xp: Namespace) -> None:
    """Check Adam's steps for several tensors, each with its own numbers, in new arrays and in donated ones."""
    for round_, tensors in enumerate(_SHAPES_OF_TENSORS):
        small = sum(map(math.prod, tensors)) < 10_000
        layouts = ("dense", "strided", "offset") if small else ("dense",)
        for layout, donate, coupled in product(layouts, (False, True), (0.0, 0.1)):
            numbers = [
                AdamNumbers(
                    (0.9, 0.999) if i % 2 else (0.0, 0.5), 0.1 + 0.2 * i, coupled, _STEPS[i % len(_STEPS)]
                )
                for i in range(round_, round_ + len(tensors))
            ]
            what = f"of tensors of shapes {tensors}, {layout}, donated: {donate}, with {numbers}"
            for name, steps in _OF_SEVERAL.items():
                expected, got = (
                    steps(chosen, _Tensors(xp, tensors, layout), numbers, donate=donate)
                    for chosen in (None, kernels)
                )
                assert got == expected, f"{name} {what}"
    _compare_sums_of_squares(kernels, xp)
    _compare_growths(kernels, xp)


class _Tensors:
    """Parameters, momenta, gradients and two variances of several tensors, and the memory around each of them."""

    def __init__(self, xp: Namespace, shapes: Sequence[tuple[int, ...]], layout: str) -> None:
        self.arrays: dict[str, list[Any]] = {}
        self.memory: dict[str, list[Any]] = {}
        families = {"params": "gaussian", "momenta": "wide", "variances": "sparse", "gradients": "gaussian"}
        families["fresh"] = "gaussian"
        for name, family in families.items():
            drawn = [vector(family, math.prod(shape), number) for number, shape in enumerate(shapes)]
            pairs = [laid_out(xp, np.abs(x) if name in ("variances", "fresh") else x, layout) for x in drawn]
            self.arrays[name] = [x.reshape(shape) for (x, _), shape in zip(pairs, shapes, strict=True)]
            self.memory[name] = [memory for _, memory in pairs]

    def keep(self, *names: str) -> Untouched:
        """Return the record of arrays that must not change."""
        untouched = Untouched()
        for name in names:
            for memory in self.memory[name]:
                untouched.keep(name, memory)
        return untouched


def _exact_steps(
    kernels: KernelSet | None, tensors: _Tensors, numbers: Sequence[AdamNumbers], *, donate: bool
) -> list[bytes]:
    """Return parameters, momenta and variances of several tensors after a step."""
    params, momenta, variances, gradients, _ = tensors.arrays.values()
    untouched = tensors.keep("gradients") if donate else tensors.keep(*tensors.arrays)
    with use_kernels(kernels):
        moved = primitives.adam_steps(params, momenta, variances, gradients, numbers, donate=donate)
    untouched.check()
    return [to_numpy(x).tobytes() for of_tensor in moved for x in of_tensor]


def _frozen_steps(
    kernels: KernelSet | None, tensors: _Tensors, numbers: Sequence[AdamNumbers], *, donate: bool
) -> list[bytes]:
    """Return parameters and momenta of several tensors after a step with a frozen variance."""
    params, momenta, variances, *_ = tensors.arrays.values()
    untouched = tensors.keep("variances") if donate else tensors.keep("params", "variances")
    with use_kernels(kernels):
        moved = primitives.frozen_steps(params, momenta, variances, [n.step for n in numbers], donate=donate)
    untouched.check()
    return [to_numpy(x).tobytes() for of_tensor in moved for x in of_tensor]


def _directions(
    kernels: KernelSet | None, tensors: _Tensors, numbers: Sequence[AdamNumbers], *, donate: bool
) -> list[bytes]:
    """Return directions, momenta and variances of several tensors after a step."""
    params, momenta, variances, gradients, _ = tensors.arrays.values()
    untouched = tensors.keep("params", "gradients") if donate else tensors.keep(*tensors.arrays)
    with use_kernels(kernels):
        found = primitives.adam_directions(params, momenta, variances, gradients, numbers, donate=donate)
    untouched.check()
    return [to_numpy(x).tobytes() for of_tensor in found for x in of_tensor]


def _steps_of_sums(
    kernels: KernelSet | None, tensors: _Tensors, numbers: Sequence[AdamNumbers], *, donate: bool
) -> list[bytes]:
    """Return parameters and momenta of several tensors after a step with sums of momenta, some of them divided by 1."""
    params, sums, variances, *_ = tensors.arrays.values()
    untouched = tensors.keep("variances") if donate else tensors.keep("params", "variances")
    with use_kernels(kernels):
        moved = primitives.steps_of_sums(
            params, sums, variances, [n.step for n in numbers], _divisors(numbers), donate=donate
        )
    untouched.check()
    return [to_numpy(x).tobytes() for of_tensor in moved for x in of_tensor]


def _fresh_variances(
    kernels: KernelSet | None, tensors: _Tensors, numbers: Sequence[AdamNumbers], *, donate: bool
) -> list[bytes]:
    """Return momenta, fresh variances and growths of several tensors, whose gradients serve as means of momenta."""
    _, momenta, variances, means, fresh = tensors.arrays.values()
    kept = "params", "momenta", "variances"
    untouched = tensors.keep(*kept) if donate else tensors.keep(*kept, "fresh")
    of_each = zip(numbers, _divisors(numbers), strict=True)
    settings = [FreshNumbers(n.betas, n.step.eps, divisor) for n, divisor in of_each]
    with use_kernels(kernels):
        found = primitives.fresh_variances(means, momenta, variances, fresh, settings, donate=donate)
    untouched.check()
    return [
        x for m, f, growth in found for x in (*(to_numpy(y).tobytes() for y in (m, f)), repr(growth).encode())
    ]


def _divisors(numbers: Sequence[AdamNumbers]) -> list[float]:
    return [n.variance_correction if i % 2 else 1.0 for i, n in enumerate(numbers)]


_OF_SEVERAL = {
    "steps of Adam": _exact_steps,
    "steps of Adam with a frozen variance": _frozen_steps,
    "directions of Adam": _directions,
    "steps of sums": _steps_of_sums,
    "fresh variances": _fresh_variances,
}


def _compare_sums_of_squares(kernels: KernelSet, xp: Namespace) -> None:
    """Compare sums of squares of any order of magnitude, one vector at a time and several at once."""
    sizes = (
        (0, 1, 2, 3, 1000, 4097, 32_769, 70_001, 300_007)
        if is_mutable(to_library(xp, np.zeros(1, np.float32)))
        else (3, 1000)
    )
    for family, scale, bad in (
        ("gaussian", 1.0, ()),
        ("wide", 1.0, ()),
        ("gaussian", 1e-30, ()),
        ("gaussian", 1e-42, ()),
        ("gaussian", 1e37, ()),
        ("gaussian", 0.0, ()),
        ("gaussian", 1.0, (np.nan,)),
        ("gaussian", 1.0, (np.inf, np.nan)),
    ):
        drawn = [vector(family, size, size) * np.float32(scale) for size in sizes]
        for x in drawn:
            for place, value in enumerate(bad[: x.size]):
                x[x.size // 2 - place] = value
        arrays = [to_library(xp, x) for x in drawn]
        found = []
        for chosen in (None, kernels):
            with use_kernels(chosen):
                found.append([*primitives.sums_of_squares(arrays), *primitives.sums_of_squares(arrays[-1:])])
        assert found[0] == found[1], (
            f"sums of squares of {sizes} elements, {family} times {scale}, with {bad}"
        )


def _compare_growths(kernels: KernelSet, xp: Namespace) -> None:
    """Compare growths: with the largest element at several places, with NaN, and with infinite variances."""
    frozen, mean = np.abs(vector("gaussian", 5000, 1)), vector("gaussian", 5000, 2)
    fresh = frozen * np.linspace(0.9, 1.1, 5000, dtype=np.float32)
    cases: list[tuple[int, float, float, float]] = [
        (place, 9.0, 1.0, 1e-8) for place in (0, 1023, 1024, 4999)
    ]
    cases += [(3000, np.inf, 1.0, 1e-8), (4000, 0.0, 0.0, 0.0), (4000, 2.0**-120, 2.0**-149, 1e-30)]
    cases += [(4999, 1 + 2.0**-19, 1.0, 0.0), (2000, 0.5, 1.0, 1e-3)]
    for place, of_frozen, of_fresh, eps in cases:
        results = []
        for chosen in (None, kernels):
            old, v, f = np.zeros_like(mean), frozen.copy(), fresh.copy()
            v[place], f[place] = of_frozen, of_fresh
            x, old, v, f = (to_library(xp, y) for y in (mean, old, v, f))
            with use_kernels(chosen), np.errstate(all="ignore"):
                ((_, _, growth),) = primitives.fresh_variances(
                    [x], [old], [v], [f], [FreshNumbers((0.9, 0.999), eps, 1.0)]
                )
            results.append(repr(growth))
        assert results[0] == results[1], f"growth with {of_frozen} and {of_fresh} at {place}, eps {eps}"


def _compare_updates(
    kernels: KernelSet,
    xp: Namespace,
    size: int,
    seed: int,
    *,
    numbers: StepNumbers = _STEPS[0],
    blend: tuple[float, float] = (0.9, 0.7),
) -> None:
    """Compare the primitives without a compressor."""
    wide, g = vector("wide", size, seed), vector("gaussian", size, seed + 1)
    v = np.abs(vector("sparse", size, seed + 2)) + np.where(np.arange(size) % 5 == 1, 2.0**-126, 0).astype(
        np.float32
    )
    layouts = ("dense", "strided", "offset") if size < 40 or size == 1000 else ("dense",)
    for layout in layouts:
        for decay in sorted({0.1, numbers.weight_decay}):
            results = []
            for chosen in (None, kernels):
                untouched = Untouched()
                with use_kernels(chosen):
                    mean = primitives.finish_mean(laid_out(xp, wide, layout)[0], 3)
                    old, old_memory = laid_out(xp, to_numpy(mean), layout)
                    gradient, gradient_memory = laid_out(xp, g, layout)
                    untouched.keep("the old momentum", old_memory)
                    untouched.keep("the gradient", gradient_memory)
                    m = primitives.momentum(old, gradient, *blend)
                    untouched.check()
                    (p, p_memory), (variance, v_memory) = (laid_out(xp, values, layout) for values in (g, v))
                    untouched.keep("the parameters", p_memory)
                    untouched.keep("the variance", v_memory)
                    mixed = to_numpy(m).tobytes()
                    moved, masked = primitives.frozen_step(
                        p, m, variance, numbers._replace(weight_decay=decay)
                    )
                    untouched.check()
                results.append([mixed, *(to_numpy(part).tobytes() for part in (mean, masked, moved))])
            for name, a, b in zip(
                ("momentum", "mean", "masked momentum", "parameters"), *results, strict=True
            ):
                assert a == b, f"{name} of {size} elements, {layout}, with {numbers}, beta1 and scale {blend}"


def _compare_ends(kernels: KernelSet, xp: Namespace, size: int, count: int) -> None:
    """Compare the division of a sum by ``count`` ranks."""
    for family in ("wide", "subnormal", "ties"):
        results = []
        for chosen in (None, kernels):
            with use_kernels(chosen):
                results.append(
                    to_numpy(primitives.finish_mean(to_library(xp, vector(family, size, count)), count))
                )
        assert results[0].tobytes() == results[1].tobytes(), f"mean over {count} ranks of {size} elements"


def _compare_multiples(kernels: KernelSet, xp: Namespace, size: int, layout: str) -> None:
    """Compare multiples of values, among them some whose products are subnormal."""
    values = vector("wide", size, 1)
    for factor in (0.95, 2.0**-120, 3.0):
        results = []
        for chosen in (None, kernels):
            untouched = Untouched()
            x, memory = laid_out(xp, values, layout)
            untouched.keep("the values", memory)
            with use_kernels(chosen):
                scaled = primitives.scale(x, factor)
            untouched.check()
            results.append(to_numpy(scaled).tobytes())
        assert results[0] == results[1], f"{factor} times {size} elements, {layout}"


def _compare_nesterov(kernels: KernelSet, xp: Namespace, size: int, layout: str) -> None:
    """Compare the momentum, and Nesterov's momentum, computed from the momentum and the gradient."""
    values, gradient = vector("wide", size, 1), vector("gaussian", size, 2)
    for beta1 in (0.0, 0.95):
        results = []
        for chosen in (None, kernels):
            untouched = Untouched()
            (m, m_memory), (g, g_memory) = (laid_out(xp, x, layout) for x in (values, gradient))
            untouched.keep("the old momentum", m_memory)
            untouched.keep("the gradient", g_memory)
            with use_kernels(chosen):
                both = primitives.nesterov(m, g, beta1)
            untouched.check()
            results.append([to_numpy(x).tobytes() for x in both])
        assert results[0] == results[1], f"Nesterov's momentum of {size} elements, {layout}, with {beta1}"


def _check_ranges(kernels: KernelSet, xp: Namespace, size: int, layout: str) -> None:
    """Check that `in_range` never accepts a value that `compensate` changes or refuses."""
    for value in (0.0, -0.0, -(2.0**-126), 2.0**-127, -(2.0**-149), 2.0**99, -(2.0**100), math.inf, math.nan):
        changes = (value != 0 and abs(value) < 2.0**-126) or math.copysign(1, value) < 0 == value
        fits = not changes and abs(value) < 2.0**100
        for place in {0, size // 2, size - 1}:
            values = vector("gaussian", size, 1)
            values[place] = value
            untouched = Untouched()
            x, memory = laid_out(xp, values, layout)
            untouched.keep("the values", memory)
            with use_kernels(kernels):
                found = primitives.in_range(x)
            untouched.check()
            assert fits or not found, f"in_range accepts {value}, as element {place} of {size}, {layout}"


def _compare_descents(kernels: KernelSet, xp: Namespace, size: int, layout: str, decay: float) -> None:
    """Compare steps along a direction: in new arrays, in a given buffer, and in the parameters' buffer."""
    values, direction = vector("wide", size, 1), vector("gaussian", size, 2)
    for place in ("new", "given", "own"):
        results = []
        for chosen in (None, kernels):
            untouched = Untouched()
            (p, p_memory), (d, d_memory) = (laid_out(xp, x, layout) for x in (values, direction))
            untouched.keep("the direction", d_memory)
            if place != "own":
                untouched.keep("the parameters", p_memory)
            outs = {"new": None, "given": laid_out(xp, np.zeros_like(values), layout)[0], "own": p}
            out = outs[place] if is_mutable(p) else None
            with use_kernels(chosen):
                moved = primitives.descend(p, d, 0.3, decay, out=out)
            untouched.check()
            results.append(to_numpy(moved).tobytes())
        what = f"of {size} elements, {layout}, with a decay of {decay}, into memory that is {place}"
        assert results[0] == results[1], f"step along a direction {what}"


def _compare_halves(kernels: KernelSet, xp: Namespace, dtype: str) -> None:
    """Compare updates from gradients, and updates of parameters, in half precision."""
    results = []
    for chosen in (None, kernels):
        m, v = (to_library(xp, np.abs(vector("gaussian", 1000, seed))) for seed in (1, 2))
        half = laid_out(xp, vector("gaussian", 1000, 3), "dense", dtype)[0]
        with use_kernels(chosen):
            found = [primitives.momentum(m, half, 0.9, 0.7), *primitives.nesterov(m, half, 0.9)]
            found += [primitives.descend(half, m, 0.3, 0.1), *primitives.frozen_step(half, m, v, _STEPS[1])]
        results.append([to_numpy(x).tobytes() for x in found])
    names = ("momentum", "momentum for Nesterov's", "Nesterov's momentum", "step along a direction")
    for name, a, b in zip((*names, "parameters", "masked momentum"), *results, strict=True):
        assert a == b, f"{name} with an array of {dtype}"


_MATRICES = ((1, 1, 1), (1, 3, 5), (2, 7, 64), (3, 33, 129), (4, 5, 5000), (2, 5000, 3), (5, 300, 301))
"""Ranks, rows and columns: small numbers, and ones large enough for several threads and to exceed a cache."""


def check_low_rank(kernels: KernelSet, xp: Namespace) -> None:
    """Check the primitives of PowerSGD: for whole matrices, in new arrays and in given buffers, and for factors."""
    writes = is_mutable(to_library(xp, np.zeros(1, np.float32)))
    matrices = _MATRICES if writes else _MATRICES[:3]  # immutable libraries compile for every shape: slow
    for (rank, rows, columns), layout in product(matrices, ("dense", "offset", "strided")):
        if layout != "dense" and rows * columns > 5000:
            continue
        what = f"of rank {rank}, {rows} x {columns}, {layout}"
        sizes = rank * rows, rank * columns, rows * columns
        left, right, matrix = (vector("gaussian", size, number) for number, size in enumerate(sizes))
        wide = vector("wide", rows * columns, 3)
        for given in (False, True)[: 1 + writes]:
            expected, got = (
                _low_rank(chosen, xp, [left, right, matrix, wide], rank, layout, given=given)
                for chosen in (None, kernels)
            )
            assert got[:2] == expected[:2], f"product or rest {what}, in a given buffer: {given}"
            assert got[2:] == expected[2:], f"compensated values {what}, in a given buffer: {given}"
        factors = left.reshape(rank, rows), vector("wide", rank * rows, 5).reshape(rank, rows)
        for name, factor in zip(("gaussian", "wide"), factors, strict=True):
            expected_rows, got_rows = (_factors(chosen, xp, factor, layout) for chosen in (None, kernels))
            assert got_rows[0] == expected_rows[0], f"orthonormal rows {what}, {name}"
            assert got_rows[1] == expected_rows[1], f"the next factor {what}, {name}"
    for bad in (np.nan, -np.inf, 2.0**100):
        x = vector("gaussian", 5000, 4)
        x[4321] = bad
        try:
            with use_kernels(kernels):
                _, refused = primitives.compensate(
                    to_library(xp, x), to_library(xp, np.zeros_like(x)), what="this check"
                )
        except NonFiniteError:
            continue
        assert refused is not None, f"{bad} is not refused"
        assert int(refused[0]), f"{bad} is not refused"


def _factors(
    kernels: KernelSet | None, xp: Namespace, rows: np.ndarray[Any, Any], layout: str
) -> tuple[bytes, bytes]:
    """Return orthonormal rows, and the next factors: for the given rows, for dependent rows, and for rows of zeros."""
    untouched = Untouched()
    bases, successors = [], []
    for number, change in enumerate((rows, np.ones_like(rows) * rows[:1], rows * 0)):
        x, memory = laid_out(xp, change.reshape(-1), layout)
        old, others = laid_out(xp, vector("gaussian", rows.size, number), layout)
        untouched.keep("the rows", memory)
        untouched.keep("the old rows", others)
        x, old = x.reshape(rows.shape), old.reshape(rows.shape)
        with use_kernels(kernels):
            bases += primitives.orthonormal([x])
            successors += primitives.next_factors([x], [old])
    untouched.check()
    basis, successor = (b"".join(to_numpy(x).tobytes() for x in found) for found in (bases, successors))
    return basis, successor


def _low_rank(
    kernels: KernelSet | None,
    xp: Namespace,
    vectors: Sequence[np.ndarray[Any, Any]],
    rank: int,
    layout: str,
    *,
    given: bool,
) -> list[bytes]:
    """Return the product of two factors, a matrix minus this product, and the matrix plus a residual."""
    untouched = Untouched()
    (left, left_memory), (right, right_memory), (matrix, _), (residual, residual_memory) = (
        laid_out(xp, x, layout) for x in vectors
    )
    left, right = left.reshape(rank, -1), right.reshape(rank, -1)
    other, memory = laid_out(xp, vectors[2], layout)
    for name, kept in (
        ("left factor", left_memory),
        ("right factor", right_memory),
        ("residual", residual_memory),
    ):
        untouched.keep(f"the {name}", kept)
    if not given:
        untouched.keep("the values", memory)
    with use_kernels(kernels):
        room = to_library(xp, np.empty_like(vectors[2])) if given else None
        product_, rest = primitives.take_low_rank(left, right, matrix, out=room)
        summed, _ = primitives.compensate(other, residual, what="this check", out=other if given else None)
    untouched.check()
    return [to_numpy(x).tobytes() for x in (product_, rest, summed)]
