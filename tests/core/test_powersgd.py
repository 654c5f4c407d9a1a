"""PowerSGD: the sums of its residuals, its approximation, and equality of all ranks."""

import warnings
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

import qcomp
from qcomp import PowerSGDMean
from qcomp.comm import run_local
from qcomp.core import primitives
from qcomp.core.mean import powersgd
from qcomp.core.mean.codec import Codec
from qcomp.core.mean.stages import AllToAll
from qcomp.core.numeric import low_rank

SHAPES = [(12, 20), (7,), (16, 5, 5), (3, 2), ()]
"""Two matrices, and three tensors that stay exact."""
CAST = qcomp.Cast("bfloat16")
CODED = qcomp.QSGD(127, 64, coding="range")


def begin(mean, x, size: int) -> list:
    return [mean.zeros(x, rank=rank, size=size) for rank in range(size)]


def draw(seed: int, size: int, shapes=SHAPES, dtype=np.float32) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[np.asarray(rng.standard_normal(s), dtype) for s in shapes] for _ in range(size)]


def average(lockstep, mean, vectors, states, **options) -> tuple[list, list]:
    """Take one step on all ranks, which then hold the same means and factors, bit for bit."""
    results = lockstep([mean.stages(x, s, **options) for x, s in zip(vectors, states, strict=True)])
    held = [b"".join(np.asarray(x).tobytes() for x in [*means, *state.server]) for means, state in results]
    assert len(set(held)) == 1
    return [np.asarray(x) for x in results[0][0]], [state for _, state in results]


def badly_scaled() -> list[np.ndarray]:
    """Return rows to make orthonormal: ordinary, nearly dependent, and of magnitudes that are far apart."""
    rng = np.random.default_rng(22)
    rows = rng.standard_normal((4, 333)).astype(np.float32)
    near = (rows[:1] + 1e-4 * rows).astype(np.float32)
    wide = (rows * 2.0 ** rng.integers(-120, 20, rows.shape)).astype(np.float32)
    return [rows, near, wide, np.concatenate([wide[:2], 1e-30 * rows[:2]])]


def mean_of(vectors, tensor: int) -> np.ndarray:
    return np.mean([np.asarray(x[tensor], np.float64) for x in vectors], axis=0)


def owed(states, number: int, shape) -> np.ndarray:
    return np.mean([np.asarray(s.worker[number], np.float64) for s in states], axis=0).reshape(shape)


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, v = np.linalg.svd(matrix)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def lost_in_total(lockstep, mean, size: int = 3, steps: int = 6, dtype=np.float32) -> float:
    """Return the largest element of sum mean_i x_i - sum means - mean_i e_i."""
    states = begin(mean, draw(0, 1, dtype=dtype)[0], size)
    exact = [np.zeros(s) for s in SHAPES]
    given = [np.zeros(s) for s in SHAPES]
    for step in range(steps):
        vectors = draw(step, size, dtype=dtype)
        key = qcomp.Key(seed=3, step=step)
        means, states = average(lockstep, mean, vectors, states, key=key)
        exact = [t + mean_of(vectors, i) for i, t in enumerate(exact)]
        given = [t + x for t, x in zip(given, means, strict=True)]
    lost = [exact[i] - given[i] for i in range(len(SHAPES))]
    lost[0] -= owed(states, 0, SHAPES[0])
    lost[2] -= owed(states, 1, SHAPES[2])
    return max(float(np.abs(x).max()) for x in lost)


class TestSum:
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("compressor", [qcomp.Identity(), CAST, qcomp.QSGD(127, 64), CODED], ids=str)
    def test_means_and_residuals_add_up_to_the_exact_means(self, lockstep, compressor, size):
        """Each step rounds M_i, e_i' and the exact means once: values are below 16, so at most 2^-20 each."""
        mean = PowerSGDMean(compressor, rank=2)
        assert lost_in_total(lockstep, mean, size) <= 6 * 4 * 2.0**-20
        assert lost_in_total(lockstep, mean, size, dtype=np.float64) <= 6 * 4 * 2.0**-49

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_a_step_loses_nothing_at_all(self, lockstep, size):
        """Bit for bit: every element of e_i' is the float32 nearest to M_i - P Q'^T, and zero below 2^-126."""
        mean, vectors = PowerSGDMean(rank=3), draw(5, size)
        states = begin(mean, vectors[0], size)
        for _ in range(2):
            old = states
            means, states = average(lockstep, mean, vectors, states)
            for x, before, after in zip(vectors, old, states, strict=True):
                for number, tensor in enumerate((0, 2)):
                    compensated = (x[tensor].reshape(-1) + before.worker[number]).tolist()
                    product = means[tensor].reshape(-1).tolist()
                    exact = [
                        np.float32(float(Fraction(m) - Fraction(d)))
                        for m, d in zip(compensated, product, strict=True)
                    ]
                    assert np.asarray(exact).tobytes() == after.worker[number].tobytes()

    def test_exact_tensors_are_averaged_exactly(self, lockstep):
        vectors = draw(1, 3)
        means, _ = average(lockstep, PowerSGDMean(), vectors, begin(PowerSGDMean(), vectors[0], 3))
        plain = qcomp.CompressedMean(qcomp.Identity(), feedback=False)
        exact = lockstep(
            [plain.stages(x, s) for x, s in zip(vectors, begin(plain, vectors[0], 3), strict=True)]
        )
        for tensor in (1, 3, 4):
            assert means[tensor].tobytes() == np.asarray(exact[0][0][tensor]).tobytes()


class TestApproximation:
    @pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 2, 3), (1, 4)])
    def test_full_rank_is_the_exact_mean(self, lockstep, shape):
        """P P^T is the identity then, up to roundings: of P, of two products of at most 9 terms, of the last one."""
        mean, vectors = PowerSGDMean(rank=50, min_compression=0), draw(2, 3, [shape])
        means, states = average(lockstep, mean, vectors, begin(mean, vectors[0], 3))
        assert len(states[0].worker) == 1
        np.testing.assert_allclose(means[0], mean_of(vectors, 0), atol=1e-5)
        assert max(np.abs(s.worker[0]).max() for s in begin(mean, vectors[0], 3)) == 0

    def test_a_mean_of_low_rank_is_found_at_once(self, lockstep):
        rng = np.random.default_rng(3)
        low = (rng.standard_normal((30, 2)) @ rng.standard_normal((2, 40))).astype(np.float32)
        noise = rng.standard_normal((30, 40)).astype(np.float32)  # the two ranks have it with opposite signs
        mean, vectors = PowerSGDMean(rank=2), [[low + noise], [low - noise]]
        means, _ = average(lockstep, mean, vectors, begin(mean, vectors[0], 2))
        np.testing.assert_allclose(means[0], low, atol=2e-4)

    @pytest.mark.parametrize("rank", [1, 2, 4])
    def test_constant_matrices_tend_to_the_best_approximation(self, lockstep, rank):
        """Without residuals, every step is a subspace iteration: the error shrinks by (s_{r+1} / s_r)^2."""
        rng = np.random.default_rng(4)
        u, _ = np.linalg.qr(rng.standard_normal((24, 24)))
        v, _ = np.linalg.qr(rng.standard_normal((30, 30)))
        matrix = ((u * 0.5 ** np.arange(24)) @ v[:24]).astype(np.float32)
        mean = PowerSGDMean(rank=rank)
        states, errors = begin(mean, [matrix], 2), []
        for _ in range(14):
            states = [s._replace(worker=tuple(0 * e for e in s.worker)) for s in states]
            means, states = average(lockstep, mean, [[matrix], [matrix]], states)
            errors.append(np.linalg.norm(means[0] - best(matrix, rank)))
        assert errors[0] > 1e-2
        assert errors[-1] < 3e-6
        for before, after in pairwise(errors[2:]):
            assert after < 0.3 * before + 1e-6
            assert after > 0.2 * before or before < 1e-4

    def test_is_linear(self, lockstep):
        """The ranks' matrices may be distributed in any way: only their mean matters, up to roundings."""
        x = draw(6, 2, [(12, 20)])
        both = mean_of(x, 0).astype(np.float32)
        mean = PowerSGDMean(rank=2)
        apart, _ = average(lockstep, mean, x, begin(mean, x[0], 2))
        alike, _ = average(lockstep, mean, [[both], [both]], begin(mean, x[0], 2))
        alone, _ = average(lockstep, mean, [[2 * both]], begin(mean, x[0], 1))
        np.testing.assert_allclose(apart[0], alike[0], atol=1e-5)
        assert (alone[0] == 2 * alike[0]).all()  # powers of two are exact


def torch_hook(vectors: list, rank: int, steps: int) -> list[np.ndarray]:
    """Return the results of torch's hook in each step, by its own functions, on one bucket and one rank.

    P = orthonormal(M Q), Q' = M^T P, with Q orthonormal first; see `torch.distributed...powerSGD_hook._orthogonalize`.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    start = torch.tensor(np.asarray(low_rank.first_factor(rank, 20, np.zeros(1, np.float32)))).T.contiguous()
    error, q, found = torch.zeros(12, 20), start, []
    for step in range(steps):
        matrix = torch.tensor(mean_of(vectors[step], 0), dtype=torch.float32) + error
        powerSGD_hook._orthogonalize(q.unsqueeze(0))
        p = matrix @ q
        powerSGD_hook._orthogonalize(p.unsqueeze(0))
        q = matrix.T @ p
        found.append((p @ q.T).numpy())
        error = matrix - p @ q.T
    return found


class TestPeer:
    @pytest.mark.parametrize("rank", [1, 2, 4])
    def test_is_what_the_hook_of_torch_computes(self, lockstep, rank):
        """Only the span of Q matters, so the bases may differ; in float32, over 6 steps that build on each other."""
        pytest.importorskip("torch")
        mean = PowerSGDMean(rank=rank, min_compression=0)
        vectors = [draw(step, 2, [(12, 20)]) for step in range(6)]
        states = begin(mean, vectors[0][0], 2)
        for step, expected in enumerate(torch_hook(vectors, rank, 6)):
            means, states = average(lockstep, mean, vectors[step], states)
            np.testing.assert_allclose(means[0], expected, atol=2e-4)


class TestSameBits:
    def test_product_and_rest_are_the_same_in_every_library(self, library):
        rng = np.random.default_rng(7)
        left, right = (rng.standard_normal((3, n)).astype(np.float32) for n in (37, 29))
        matrix = rng.standard_normal(37 * 29).astype(np.float32)
        given = [library.array(x) for x in (left, right, matrix)]
        if library.name == "readonly":
            given[2] = matrix.copy()
        product, rest = primitives.take_low_rank(*given)
        bits = np.uint32(0xFFFFFFFE)
        exact = np.zeros((37, 29), np.float32)
        for a, b in zip(left, right, strict=True):
            terms = (np.outer(a, b).astype(np.float32).view(np.uint32) & bits).view(np.float32)
            exact = terms if a is left[0] else exact + terms
        assert library.numpy(product).tobytes() == exact.tobytes()
        assert library.numpy(rest).tobytes() == (matrix - exact.reshape(-1)).tobytes()

    @pytest.mark.parametrize("names", [("numpy", "torch", "strict"), ("numpy", "torch"), ("torch", "strict")])
    def test_ranks_with_different_libraries_hold_the_same(self, libraries, names):
        """Each rank computes its own products, and finishes some of the factors, or all, with its own library."""
        mean, vectors = PowerSGDMean(CAST, rank=2), draw(8, 3)
        mixed = [libraries[name] for name in names]

        def rank_main(comm):
            library = mixed[comm.rank]
            x = [library.array(a) for a in vectors[comm.rank]]
            state, held = mean.init(x, comm), []
            for _ in range(4):
                means, state = mean(x, state, comm)
                held.append(b"".join(library.numpy(x).tobytes() for x in [*means, *state.server]))
            return held

        first, *others = run_local(len(names), rank_main)
        assert all(other == first for other in others)

    def test_orthonormal_rows_are_the_same_in_every_library(self, library):
        for rows in badly_scaled():
            expected = low_rank.orthonormal(rows)
            assert library.numpy(low_rank.orthonormal(library.array(rows))).tobytes() == expected.tobytes()

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("broken", [False, True])
    def test_orthonormal_rows_are_the_same_under_jit(self, libraries, broken, monkeypatch):
        """With whole products the compiler contracts them with the sums: their last bit must be missing."""
        import jax

        if broken:
            monkeypatch.setattr(low_rank, "truncate_last_bit", lambda x: x)
        same = [
            np.asarray(jax.jit(low_rank.orthonormal)(rows)).tobytes() == low_rank.orthonormal(rows).tobytes()
            for rows in badly_scaled()
        ]
        assert all(same) != broken

    @pytest.mark.parametrize(("size", "kinds"), [(2, "gg"), (3, "agag")])
    def test_two_ranks_need_no_owners(self, size, kinds):
        """All-gathers between two ranks; more ranks send to owners, and these to all."""
        mean, x = PowerSGDMean(rank=2), draw(8, size, [(12, 20), (16, 25)])
        asked = ""

        def rank_main(comm):
            nonlocal asked
            stages, arrived = mean.stages(x[comm.rank], mean.zeros(x[0], rank=comm.rank, size=size)), None
            while True:
                try:
                    request = stages.send(arrived)
                except StopIteration:
                    return
                if comm.rank == 0:
                    asked += "a" if isinstance(request, AllToAll) else "g"
                exchange = comm.all_to_all if isinstance(request, AllToAll) else comm.all_gather
                arrived = exchange(request.send, request.receive)

        run_local(size, rank_main)
        assert asked == kinds

    @pytest.mark.exhaustive
    def test_jax_gives_the_same_bits_also_under_jit(self, libraries):
        """A compiler may fuse a product with a sum: it must not do so here."""
        import jax

        rng = np.random.default_rng(9)
        left, right = (rng.standard_normal((4, n)).astype(np.float32) for n in (64, 48))
        matrix = rng.standard_normal(64 * 48).astype(np.float32)
        expected = primitives.take_low_rank(left, right, matrix.copy())
        found = jax.jit(primitives.take_low_rank)(left, right, matrix)
        for a, b in zip(expected, found, strict=True):
            assert a.tobytes() == np.asarray(b).tobytes()

    @pytest.mark.parametrize("least", [2.0**-60, 2.0**-100, 2.0**-126, 1e-45])
    def test_no_product_is_subnormal(self, lockstep, least):
        """Some devices flush subnormals and others do not: neither the mean nor the residual contains any."""
        mean = PowerSGDMean(rank=2)
        vectors = [[(x[0] * np.float32(least)).astype(np.float32)] for x in draw(10, 2, [(12, 20)])]
        means, states = average(lockstep, mean, vectors, begin(mean, vectors[0], 2))
        for x in (means[0], states[0].worker[0], states[0].server[0]):
            assert not ((np.abs(x) > 0) & (np.abs(x) < 2.0**-126)).any()

    @pytest.mark.parametrize(("small", "is_kept"), [(2.0**-29, True), (2.0**-31, False)])
    def test_small_elements_of_left_factors_stay_in_the_residual(self, lockstep, small, is_kept):
        """Else sums of products could be subnormal."""
        mean = PowerSGDMean(rank=1, min_compression=0)
        x = [np.asarray([[1, 1], [small, small]], np.float32)]
        (found,), states = average(lockstep, mean, [x, x], begin(mean, x, 2))
        assert found[1].tolist() == pytest.approx([is_kept * small] * 2)
        assert states[0].worker[0][2:].tolist() == pytest.approx(
            [(not is_kept) * small] * 2, abs=1e-6 * small
        )


class TestOrthonormal:
    def test_rows_are_orthonormal_and_span_the_same(self, library):
        rows = np.random.default_rng(11).standard_normal((4, 33)).astype(np.float32)
        for power in (0, 90, -90):
            basis = library.numpy(low_rank.orthonormal(library.array(rows * np.float32(2.0**power))))
            np.testing.assert_allclose(basis @ basis.T, np.eye(4), atol=1e-6)
            np.testing.assert_allclose((rows @ basis.T) @ basis, rows, atol=1e-5)

    @pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-7, 1e-12])
    def test_nearly_dependent_rows_become_orthogonal_too(self, apart):
        rng = np.random.default_rng(12)
        first, other = rng.standard_normal((2, 200))
        basis = low_rank.orthonormal(np.stack([first, first + apart * other, other]).astype(np.float32))
        gram = basis @ basis.T
        assert np.abs(gram - np.diag(np.diag(gram))).max() < 2e-6
        assert all(abs(x - 1) < 1e-5 or x == 0 for x in np.diag(gram))

    def test_zero_and_dependent_rows_give_no_nan(self):
        rows = np.zeros((4, 6), np.float32)
        assert (low_rank.orthonormal(rows) == 0).all()
        rows[1] = rows[2] = 2.0
        basis = low_rank.orthonormal(rows)
        assert np.isfinite(basis).all()
        np.testing.assert_allclose(np.linalg.norm(basis, axis=1)[[0, 1]], [0, 1], atol=1e-6)

    def test_first_factor_is_the_same_in_every_library_and_has_full_rank(self, library):
        found = library.numpy(low_rank.first_factor(3, 21, library.array(np.zeros(1, np.float32))))
        assert found.tobytes() == low_rank.first_factor(3, 21, np.zeros(1, np.float32)).tobytes()
        assert np.abs(found).max() < 1
        assert np.linalg.matrix_rank(found) == 3


class TestDegenerate:
    def test_zeros_stay_zeros_and_later_values_are_approximated(self, lockstep):
        """A factor of zeros would otherwise stay zero for ever."""
        mean, x = PowerSGDMean(rank=2), draw(13, 2, [(12, 20)])
        zeros = [[np.zeros((12, 20), np.float32)]] * 2
        states = begin(mean, zeros[0], 2)
        for _ in range(3):
            means, states = average(lockstep, mean, zeros, states)
            assert (means[0] == 0).all()
        fresh, _ = average(lockstep, mean, x, begin(mean, x[0], 2))
        means, _ = average(lockstep, mean, x, states)
        assert means[0].tobytes() == fresh[0].tobytes()

    def test_a_matrix_of_lower_rank_and_then_one_of_higher(self, lockstep):
        rng = np.random.default_rng(14)
        factors = rng.standard_normal((12, 3)), rng.standard_normal((3, 20))
        mean, states = PowerSGDMean(rank=3, min_compression=1), None
        for rank in (1, 1, 1, 3, 3, 3):
            matrix = (factors[0][:, :rank] @ factors[1][:rank]).astype(np.float32)
            states = states or begin(mean, [matrix], 2)
            means, states = average(lockstep, mean, [[matrix], [matrix]], states)
        np.testing.assert_allclose(
            means[0] + owed(states, 0, (12, 20)), matrix + owed(states, 0, (12, 20)), atol=1e-2
        )

    def test_odd_shapes(self, lockstep):
        shapes = [(0, 5), (1, 1), (2, 0, 3), (1, 30), (30, 1), (3, 4)]
        mean, vectors = PowerSGDMean(rank=4, min_compression=0), draw(15, 2, shapes)
        means, states = average(lockstep, mean, vectors, begin(mean, vectors[0], 2))
        assert [m.shape for m in means] == shapes
        assert len(states[0].worker) == 4
        for tensor in (1, 3, 4, 5):
            np.testing.assert_allclose(means[tensor], mean_of(vectors, tensor), atol=1e-5)

    @pytest.mark.parametrize(
        ("shape", "matrix"),
        [
            ((64, 32, 3, 3), (64, 288)),  # a convolution in torch
            ((3, 3, 32, 64), (288, 64)),  # the same convolution in Flax
            ((8, 64, 64), (512, 64)),  # a stack of matrices
            ((6, 1, 6), (6, 6)),
        ],
    )
    def test_a_tensor_is_the_matrix_with_the_fewest_rows_and_columns(self, lockstep, shape, matrix):
        mean, x = PowerSGDMean(rank=2, min_compression=0), draw(21, 2, [shape])
        means, states = average(lockstep, mean, x, begin(mean, x[0], 2))
        seen = [[own[0].reshape(matrix)] for own in x]
        expected, others = average(lockstep, mean, seen, begin(mean, seen[0], 2))
        assert means[0].tobytes() == expected[0].tobytes()
        assert states[0].server[0].shape == others[0].server[0].shape == (2 * matrix[1],)

    def test_strided_read_only_and_half_precision(self, lockstep):
        x = draw(16, 2, [(20, 12)])
        mean = PowerSGDMean(rank=2)
        plain, _ = average(lockstep, mean, [[a[0].T.copy()] for a in x], begin(mean, [x[0][0].T], 2))
        for a in x:
            a[0].flags.writeable = False
        strided, _ = average(lockstep, mean, [[a[0].T] for a in x], begin(mean, [x[0][0].T], 2))
        assert plain[0].tobytes() == strided[0].tobytes()
        half = [[a[0].astype(np.float16)] for a in x]
        means, states = average(lockstep, mean, half, begin(mean, half[0], 2))
        assert (means[0].dtype, states[0].worker[0].dtype) == (np.float16, np.float32)

    @pytest.mark.parametrize("dtype", [np.float32, np.float16])
    def test_donation_changes_no_result(self, lockstep, dtype):
        mean, x = PowerSGDMean(rank=2), draw(17, 2, dtype=dtype)
        expected, kept = average(lockstep, mean, x, begin(mean, x[0], 2))
        for options in ({"donate": True}, {"overwrite": True}):
            own = [[a.copy() for a in of_rank] for of_rank in x]
            means, states = average(lockstep, mean, own, begin(mean, x[0], 2), **options)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(means, expected, strict=True))
            assert states[1].worker[0].tobytes() == kept[1].worker[0].tobytes()

    def test_under_autocast_nothing_is_lost(self, lockstep):
        """It rounds matrix products to bfloat16, and the residuals keep what that loses."""
        torch = pytest.importorskip("torch")

        mean, x = PowerSGDMean(rank=2), draw(25, 2, [(12, 20)])
        given = [[torch.from_numpy(a) for a in of_rank] for of_rank in x]
        with torch.autocast("cpu", torch.bfloat16):
            (found,), states = average(lockstep, mean, given, begin(mean, given[0], 2))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found + owed(states, 0, (12, 20)), mean_of(x, 0), atol=1e-6)


class TestOthers:
    """What a tensor's mean must not depend on: the other tensors in the same messages."""

    @pytest.mark.parametrize(
        "compressor", [qcomp.Identity(), CAST, qcomp.QSGD(127, 64), CODED, qcomp.MinMaxUInt8(64)], ids=str
    )
    def test_a_tensor_alone_has_the_same_mean(self, lockstep, compressor):
        vectors, key = draw(26, 2, [(12, 20), (9, 31)]), qcomp.Key(seed=3)
        both = PowerSGDMean(compressor, numbers=(3, 11))
        means, _ = average(lockstep, both, vectors, begin(both, vectors[0], 2), key=key)
        for number in range(2):
            one = PowerSGDMean(compressor, numbers=(both.numbers[number],))
            own = [[x[number]] for x in vectors]
            (alone,), _ = average(lockstep, one, own, begin(one, own[0], 2), key=key)
            assert alone.tobytes() == means[number].tobytes()

    def test_each_has_its_own_precision(self, lockstep):
        mean = PowerSGDMean()
        single, double = draw(27, 2, [(12, 20)]), draw(28, 2, [(12, 20)], np.float64)
        vectors = [[a, b] for (a,), (b,) in zip(single, double, strict=True)]
        means, states = average(lockstep, mean, vectors, begin(mean, vectors[0], 2))
        assert [m.dtype for m in means] == [np.float32, np.float64]
        lost = mean_of(vectors, 1) - means[1] - owed(states, 1, (12, 20))
        assert np.abs(lost).max() < 1e-14


class TestLayout:
    def test_a_matrix_stays_exact_unless_its_factors_are_shorter_by_more_than_asked(self):
        mean = PowerSGDMean(rank=2, min_compression=2)
        assert mean.keeps_exact((8, 8))  # 2 * 16 * 2 elements
        assert not mean.keeps_exact((8, 9))

    def test_factors_of_single_tensors_have_owners_on_all_ranks(self):
        for side in (0, 1):
            sizes = [
                PowerSGDMean(numbers=(number,)).message_sizes([(12, 20)], 4)[side] for number in range(24)
            ]
            assert {max(range(4), key=of_ranks.__getitem__) for of_ranks in sizes} == {0, 1, 2, 3}

    def test_a_matrix_has_no_more_columns_of_factors_than_rows_or_columns(self):
        mean = PowerSGDMean(rank=5, min_compression=0)
        state = mean.zeros([np.zeros((3, 20), np.float32), np.zeros((20, 2), np.float32)], rank=0, size=1)
        assert [q.shape for q in state.server] == [(3 * 20,), (2 * 2,)]


class TestState:
    @pytest.mark.parametrize("factor", [0.0, 0.5])
    def test_rescaled_residuals_leave_the_factors(self, lockstep, factor):
        """A factor of zero would stay zero for ever."""
        mean = PowerSGDMean(rank=2)
        _, (state,) = average(lockstep, mean, draw(24, 1), begin(mean, draw(24, 1)[0], 1))
        rescaled = mean.rescaled(state, factor)
        for old, new in zip(state.worker, rescaled.worker, strict=True):
            assert (np.asarray(new) == factor * np.asarray(old)).all()
        for old, new in zip(state.server, rescaled.server, strict=True):
            assert np.asarray(new).tobytes() == np.asarray(old).tobytes()

    def test_no_two_encodings_of_a_step_share_draws(self, lockstep, monkeypatch):
        """A rank compresses its left factors, the finished ones that it owns, and the same of the right ones."""
        keys = []

        def encode(codec, frames, packs, residuals, key, *, donate, plain=Codec.encode):
            keys.append(key)
            return plain(codec, frames, packs, residuals, key, donate=donate)

        monkeypatch.setattr(Codec, "encode", encode)
        mean = PowerSGDMean(qcomp.QSGD(127))
        x = [np.ones((12, 20), np.float32)]
        average(lockstep, mean, [x] * 3, begin(mean, x, 3), key=qcomp.Key(seed=3, step=7))
        assert len(keys) == len(set(keys)) == 3 * 4
        assert {(key.seed, key.step) for key in keys} == {(3, 7)}


class TestRefusals:
    @pytest.mark.quick_cases(3)
    @pytest.mark.parametrize("name", ["numpy", "torch", "strict"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**100])
    @pytest.mark.parametrize("tensor", [0, 1, 2])
    def test_every_rank_raises_and_nothing_changes(self, libraries, lockstep, name, value, tensor):
        library = libraries[name]
        mean, x = PowerSGDMean(rank=2), draw(18, 3)
        states = [mean.zeros([library.array(a) for a in x[0]], rank=rank, size=3) for rank in range(3)]
        before = [[library.numpy(a).tobytes() for a in (*s.worker, *s.server)] for s in states]
        x[1][tensor].reshape(-1)[3] = value
        stages = [
            mean.stages([library.array(a) for a in of_rank], s) for of_rank, s in zip(x, states, strict=True)
        ]
        requests = [next(s) for s in stages]
        told = 0
        while told == 0:
            arrived = [
                [r.send[me] if isinstance(r.send, tuple) else r.send for r in requests] for me in range(3)
            ]
            requests = []
            for s, buffers in zip(stages, arrived, strict=True):
                try:
                    requests.append(s.send(buffers))
                except qcomp.NonFiniteError as error:
                    told += "rank 1" in str(error)
        assert told == 3
        assert [[library.numpy(a).tobytes() for a in (*s.worker, *s.server)] for s in states] == before

    def test_settings_are_compared(self):
        x = np.zeros((12, 20), np.float32)

        def rank_main(comm):
            with pytest.raises(qcomp.MismatchError, match="rank"):
                PowerSGDMean(rank=1 + comm.rank).init(x, comm)
            with pytest.raises(qcomp.MismatchError, match="min_compression"):
                PowerSGDMean(min_compression=1 + comm.rank).init(x, comm)
            return True

        assert run_local(2, rank_main) == [True, True]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"rank": 0}, "rank is 0"),
            ({"rank": 1.5}, "rank is 1.5"),
            ({"rank": True}, "rank is True"),
            ({"min_compression": -1}, "min_compression is -1"),
            ({"min_compression": np.nan}, "min_compression is nan"),
            ({"compressor": qcomp.ScaledSign()}, "relative squared error of 1"),
            ({"compressor": qcomp.ScaledSign(scale="rms")}, "no bound on its error"),
            ({"compressor": qcomp.QSGD(7)}, "compressor is qsgd"),
            ({"compressor": qcomp.MinMaxUInt8(), "rank": 16}, "rank 16 needs at most"),
        ],
    )
    def test_wrong_settings(self, options, said):
        with pytest.raises(ValueError, match=said):
            PowerSGDMean(**options)
        if "compressor" not in options:
            with pytest.raises(ValueError, match=said):
                qcomp.PowerSGD(**options)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                lambda x: [x[0].reshape(20, 12), *x[1:]],
                r"x\[0\] has shape \(20, 12\); state was made for \(12, 20\)",
            ),
            (
                lambda x: [x[0].astype(np.float64), *x[1:]],
                r"x\[0\] has dtype float64; state was made for arrays that are computed in",
            ),
            (lambda x: x[:-1], "state is for"),
            (lambda x: x[::-1], "state is for"),
        ],
    )
    def test_tensors_that_do_not_fit_the_state_are_refused(self, lockstep, change, said):
        """The rows of a matrix of another shape differ: the sum would be right, but the approximation poor."""
        mean, x = PowerSGDMean(rank=2), draw(21, 1)[0]
        with pytest.raises(ValueError, match=said):
            lockstep([mean.stages(change(x), mean.zeros(x, rank=0, size=1))])

    def test_a_state_of_another_mean_is_refused(self, lockstep):
        x = draw(19, 1, [(12, 20)])[0]
        for other in (PowerSGDMean(rank=1), qcomp.CompressedMean(qcomp.ScaledSign())):
            state = other.zeros(x, rank=0, size=1)
            with pytest.raises(ValueError, match="make it with this mean's init"):
                lockstep([PowerSGDMean(rank=2).stages(x, state)])


BROKEN = {
    "no feedback": lambda m: m.setattr(
        primitives, "compensate", lambda x, e, *, what, out=None: (np.asarray(x) + 0, None)
    ),
    "P as it was computed": lambda m: m.setattr(primitives, "orthonormal", list),
    "P averaged after it is orthonormal": lambda m: m.setattr(powersgd, "_product", _orthonormal_product),
    "P made orthonormal after its use": lambda m: (
        m.setattr(primitives, "orthonormal", list),
        m.setattr(primitives, "take_low_rank", _orthonormal_at_the_end),
    ),
    "a cold start": lambda m: m.setattr(primitives, "next_factors", lambda new, old: old),
}


def _orthonormal_at_the_end(left, right, matrix, *, out=None, plain=primitives.take_low_rank):
    return plain(low_rank.orthonormal(left), right, matrix, out=out)


def _orthonormal_product(rows, matrix, plain=powersgd._product):
    found = plain(rows, matrix)
    left = rows.shape[0] == 12
    return low_rank.orthonormal(found.T).T if left else found


@pytest.mark.parametrize("broken", [None, *BROKEN])
def test_broken_parts_are_noticed(lockstep, broken, monkeypatch):
    """Constant matrices: over the steps, the mean of the means must come close to the exact mean and its span."""
    if broken:
        BROKEN[broken](monkeypatch)
    rng = np.random.default_rng(20)
    u, v = np.linalg.qr(rng.standard_normal((12, 12)))[0], np.linalg.qr(rng.standard_normal((20, 20)))[0]
    common = (u * 0.5 ** np.arange(12)) @ v[:12]
    apart = 3 * rng.standard_normal((12, 20))
    vectors = [[(common + sign * apart).astype(np.float32)] for sign in (1, -1)]
    mean, steps = PowerSGDMean(rank=2), 60
    states, total = begin(mean, vectors[0], 2), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            for _ in range(steps):
                means, states = average(lockstep, mean, vectors, states)
                total = total + means[0]
            off = np.abs(total / steps - common).max()
            fresh, _ = average(
                lockstep, mean, vectors, [s._replace(worker=tuple(0 * e for e in s.worker)) for s in states]
            )
            near = np.linalg.norm(fresh[0] - common) / np.linalg.norm(common - best(common, 2))
        except qcomp.NonFiniteError:
            off = near = np.inf
    assert (off < 0.05 and near < 1.3) == (broken is None), (off, near)
