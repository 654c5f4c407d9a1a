"""Muon: equal to torch's without loss, one owner for every matrix, and checkpoints that follow the owners."""

import re
import warnings
from math import prod, sqrt
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.diagnostics import counted
from qcomp.core.numeric.orthogonal import orthogonalize
from qcomp.core.numeric.whitening import unwhitened

SHAPES = [(24, 10), (10, 24), (16, 3, 2), (7,), (12, 12), (20, 6)]
NAMES = ["tall", "wide", "kernel", "bias", "square", "last"]
MATRICES = ["tall", "wide", "kernel", "square"]
EXACT = {"compressor": qcomp.Identity(), "update_compressor": qcomp.Identity()}
COARSE = {"compressor": qcomp.QSGD(7, 16), "update_compressor": qcomp.ScaledSign(16, "rms")}


def muon(**changes) -> qcomp.Muon:
    return qcomp.Muon(**{"learning_rate": 0.05, "others": ("last",), **COARSE, **changes})


def run(
    opt, grads, lockstep, size, *, steps=5, states=None, params=None, first=0, same=False, dtype=np.float32
):
    """Return the parameters and states of all ranks; with ``same``, all ranks have the gradients of rank 0."""
    if states is None:
        params = [grads(SHAPES, 99, 0, dtype) for _ in range(size)]
        states = lockstep(
            [opt.init_stages(p, rank=rank, size=size, names=NAMES) for rank, p in enumerate(params)]
        )
    for step in range(first, first + steps):
        stages = [
            opt.stages(p, grads(SHAPES, 0 if same else rank, step, dtype), s)
            for rank, (p, s) in enumerate(zip(params, states, strict=True))
        ]
        results = lockstep(stages)
        params, states = [p for p, _ in results], [s for _, s in results]
        assert len({b"".join(x.tobytes() for x in p) for p in params}) == 1
    return params, states


def owned(opt, states, kind):
    """Return by name the entries of a kind that exist once, from the dicts of all ranks."""
    found = {}
    for state in states:
        for key, value in opt.state_dict(state).items():
            if key.startswith(f"{kind}."):
                assert key not in found
                found[key] = value
    assert {key.partition(".")[2] for key in found} == {f"{name}@0" for name in MATRICES}
    return found


def torch_with_muon() -> Any:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    return torch


class TestReference:
    @pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
    @pytest.mark.parametrize(("nesterov", "momentum", "decay"), [(True, 0.95, 0.1), (False, 0.8, 0.0)])
    def test_without_compression_it_equals_muon_and_adamw_of_torch(
        self, grads, lockstep, monkeypatch, *, adjust_lr_fn, nesterov, momentum, decay
    ):
        """Torch iterates in bfloat16; here it iterates in the dtype of the gradients."""
        torch = torch_with_muon()
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        leaves = [torch.from_numpy(np.array(p)).requires_grad_() for p in grads(SHAPES, 99, 0, np.float64)]
        matrices = [x.detach().reshape(len(x), -1).requires_grad_() for x in leaves[:3] + leaves[4:5]]
        others = [leaves[3], leaves[5]]
        settings = {"lr": 0.05, "weight_decay": decay}
        theirs = torch.optim.Muon(
            matrices, **settings, momentum=momentum, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn
        )
        beside = torch.optim.AdamW(
            others, lr=0.05 * (0.1 if adjust_lr_fn == "original" else 1), weight_decay=decay
        )
        opt = muon(
            **EXACT, momentum=momentum, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn, weight_decay=decay
        )
        (params,), _ = run(opt, grads, lockstep, 1, steps=12, dtype=np.float64)
        for step in range(12):
            given = [torch.from_numpy(np.array(g)) for g in grads(SHAPES, 0, step, np.float64)]
            for leaf, g in zip(matrices, given[:3] + given[4:5], strict=True):
                leaf.grad = g.reshape(leaf.shape)
            for leaf, g in zip(others, (given[3], given[5]), strict=True):
                leaf.grad = g
            theirs.step()
            beside.step()
        found = [params[i] for i in (0, 1, 2, 4, 3, 5)]
        for leaf, p in zip(matrices + others, found, strict=True):
            # 12 steps, each with an error of a few units that the iterations multiply by up to 500.
            np.testing.assert_allclose(p.reshape(leaf.shape), leaf.detach().numpy(), rtol=0, atol=1e-11)

    def test_it_equals_muon_of_torch_up_to_bfloat16(self, grads, lockstep):
        torch = torch_with_muon()
        p, g = (np.asarray(grads([(48, 32)], rank, 0)[0]) for rank in (99, 0))
        leaf = torch.from_numpy(p.copy()).requires_grad_()
        leaf.grad = torch.from_numpy(g.copy())
        torch.optim.Muon([leaf], lr=1.0, weight_decay=0.0).step()
        opt = qcomp.Muon(learning_rate=1.0, **EXACT)
        moved, _ = opt.step(p, g, opt.init(p, LocalCommunicator.alone()), LocalCommunicator.alone())
        update = p - moved
        assert np.abs(update - (p - leaf.detach().numpy())).max() < 0.1 * np.abs(update).max()

    def test_in_bfloat16_it_moves_almost_as_in_float32(self, grads):
        torch = pytest.importorskip("torch")
        comm, p = LocalCommunicator.alone(), torch.zeros(48, 32)
        for draw in range(20):
            g, moved = torch.from_numpy(np.array(grads([(48, 32)], 0, draw)[0])), {}
            for dtype in ("float32", "bfloat16"):
                opt = qcomp.Muon(learning_rate=1.0, **EXACT, newton_schulz_dtype=dtype)
                moved[dtype], _ = opt.step(p, g, opt.init(p, comm), comm)
            # In every third draw, a single element differs by more than a twentieth of the largest.
            assert 0 < (moved["float32"] - moved["bfloat16"]).norm() < 0.05 * moved["float32"].norm()

    @pytest.mark.parametrize("clip_norm", [None, 0.1, 1e6])
    def test_gradients_of_the_caller_are_not_changed(self, grads, lockstep, clip_norm):
        given = [[np.array(g) for g in grads(SHAPES, rank, 0)] for rank in range(2)]
        opt = muon(clip_norm=clip_norm)
        params = [grads(SHAPES, 99, 0) for _ in given]
        states = lockstep(
            [opt.init_stages(p, rank=rank, size=2, names=NAMES) for rank, p in enumerate(params)]
        )
        lockstep([opt.stages(p, g, s) for p, g, s in zip(params, given, states, strict=True)])
        for rank, of_rank in enumerate(given):
            for g, before in zip(of_rank, grads(SHAPES, rank, 0), strict=True):
                np.testing.assert_array_equal(g, before)

    def test_clipping_scales_the_gradients_of_all_tensors(self, grads):
        """Their scale matters from the second step on, since momenta mix gradients."""
        comm, plain, clipped = LocalCommunicator.alone(), muon(**EXACT), muon(**EXACT, clip_norm=2.0)
        one = other = grads(SHAPES, 99, 0, np.float64)
        state, twin = (opt.init(one, comm, NAMES) for opt in (clipped, plain))
        for step in range(4):
            gradients = [(1 + step) * g for g in grads(SHAPES, 0, step, np.float64)]
            norm = sqrt(sum((g**2).sum() for g in gradients))
            assert norm > 2.0
            one, state = clipped.step(one, gradients, state, comm)
            other, twin = plain.step(other, [g * (2.0 / norm) for g in gradients], twin, comm)
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)

    def test_bfloat16_is_refused_where_the_library_has_none(self):
        with pytest.raises(
            ValueError, match="newton_schulz_dtype is 'bfloat16', which the arrays' library lacks"
        ):
            muon(newton_schulz_dtype="bfloat16").init(
                [np.ones(shape, np.float32) for shape in SHAPES], LocalCommunicator.alone(), NAMES
            )

    @pytest.mark.parametrize(("size", "block_rows"), [(2, None), (3, 7), (5, None)])
    @pytest.mark.filterwarnings("ignore:all . ranks have the same gradients")
    def test_without_compression_ranks_step_like_one_with_the_mean_gradient(
        self, grads, lockstep, size, block_rows
    ):
        opt = muon(**EXACT, clip_norm=3.0, block_rows=block_rows)
        params, states = run(opt, grads, lockstep, size, same=True, dtype=np.float64)
        (alone,), _ = run(opt, grads, lockstep, 1, dtype=np.float64)
        for one, other in zip(params[0], alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
        assert not any(state.exchange.worker for state in states)
        different, _ = run(opt, grads, lockstep, size, dtype=np.float64)
        assert np.abs(different[0][0] - alone[0]).max() > 1e-3

    @pytest.mark.filterwarnings("ignore:output_axis is -1")
    def test_other_settings_make_other_steps(self, grads, lockstep):
        finals = set()
        for changes in (
            {},
            {"momentum": 0.5},
            {"nesterov": False},
            {"adjust_lr_fn": "match_rms_adamw"},
            {"block_rows": 5},
            {"output_axis": -1},
            {"newton_schulz_steps": 3},
            {"weight_decay": 0.1},
            {"groups": (qcomp.Group("tall", learning_rate_factor=0.5),)},
            {"learning_rate": lambda step: 0.05 / (step + 1)},
        ):
            (params,), _ = run(muon(**EXACT | changes), grads, lockstep, 1, steps=2)
            finals.add(params[0].tobytes())
        assert len(finals) == 10


class TestOutputAxis:
    """A tensor whose outputs are last moves like its transpose with outputs first."""

    @pytest.mark.parametrize(
        "changes", [{"nesterov": False}, {"block_rows": 5}, {"adjust_lr_fn": "match_rms_adamw"}]
    )
    @pytest.mark.parametrize("xp", ["numpy", "torch", "jax"])
    def test_it_is_the_step_of_the_transpose(self, grads, libraries, xp, changes):
        settings = {**EXACT, **changes}
        lib, comm = libraries[xp], LocalCommunicator.alone()
        found = {}
        for axis in (0, -1):
            opt = qcomp.Muon(learning_rate=0.05, weight_decay=0.1, output_axis=axis, **settings)
            steps = [grads([(12, 7), (6, 2, 3, 5), (4,)], 0, step) for step in range(4)]
            params, *of_steps = ([lib.array(turned(x, axis), x.dtype) for x in step] for step in steps)
            state = opt.init(params, comm)
            for own in of_steps:
                params, state = opt.step(params, own, state, comm)
            found[axis] = [turned(np.asarray(p), axis, back=True) for p in params]
        for first, last in zip(found[0], found[-1], strict=True):
            assert first.tobytes() == last.tobytes()

    @pytest.mark.filterwarnings("ignore:output_axis is -1")
    def test_compressed_ranks_stay_alike(self, grads, lockstep):
        params, _ = run(muon(output_axis=-1, block_rows=5), grads, lockstep, 3)
        assert all(
            a.tobytes() == b.tobytes() for own in params[1:] for a, b in zip(own, params[0], strict=True)
        )
        other, _ = run(muon(block_rows=5), grads, lockstep, 3)
        assert any(a.tobytes() != b.tobytes() for a, b in zip(params[0], other[0], strict=True))

    @pytest.mark.parametrize(
        ("axis", "shape", "words"),
        [
            (0, (3, 3, 4, 8), r"'conv' of shape \(3, 3, 4, 8\): .* as in Flax, pass output_axis=-1"),
            (-1, (8, 4, 3, 3), r"'conv' of shape \(8, 4, 3, 3\): .* as in torch, pass output_axis=0"),
        ],
    )
    def test_outputs_on_the_other_end_warn(self, axis, shape, words):
        for given, expected in ((shape, True), (shape[::-1], False), ((2, 5), False)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                opt = qcomp.Muon(learning_rate=0.1, output_axis=axis)
                opt.init([np.ones(given)], LocalCommunicator.alone(), ["conv"])
            assert [bool(re.search(words, str(one.message))) for one in caught] == [True] * expected


def turned(x, axis, *, back=False):
    """Move the first axis to the end if outputs are to be last, or move it back."""
    ends = (-1, 0) if back else (0, -1)
    return x if axis == 0 else np.ascontiguousarray(np.moveaxis(x, *ends))


class TestBlocks:
    @pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
    @pytest.mark.parametrize("block_rows", [2, 4, 7, 12])
    def test_a_block_moves_as_a_matrix_of_its_own(self, grads, lockstep, block_rows, adjust_lr_fn):
        settings = {**EXACT, "adjust_lr_fn": adjust_lr_fn, "weight_decay": 0.1, "others": ("bias",)}
        (whole,), _ = run(muon(**settings, block_rows=block_rows), grads, lockstep, 1)

        def cut(tensors):
            """Return the blocks of all matrices, and the bias."""
            found = {}
            for name, x in zip(NAMES, tensors, strict=True):
                starts = range(0, len(x), block_rows) if name != "bias" else [0]
                found |= {
                    f"{name}{i}": x[i : i + block_rows].reshape(-1, x[0].size)
                    for i in starts
                    if name != "bias"
                }
                found |= {name: x} if name == "bias" else {}
            return found

        params = cut(grads(SHAPES, 99, 0))
        opt, comm = muon(**settings), LocalCommunicator.alone()
        state = opt.init(list(params.values()), comm, list(params))
        held = list(params.values())
        for step in range(5):
            held, state = opt.step(held, list(cut(grads(SHAPES, 0, step)).values()), state, comm)
        for one, other in zip(held, cut(whole).values(), strict=True):
            assert one.tobytes() == other.tobytes()

    def test_the_last_block_of_one_matrix_may_have_the_shape_of_another(self, grads):
        """Blocks of one shape are computed together and then returned to their own rows."""
        params = grads([(3, 5), (7, 5), (10, 5), (4, 5)], 0, 0)
        opt, comm = qcomp.Muon(learning_rate=0.05, **EXACT, block_rows=4), LocalCommunicator.alone()
        together, _ = opt.step(params, params, opt.init(params, comm), comm)
        for p, found in zip(params, together, strict=True):
            alone, _ = opt.step([p], [p], opt.init([p], comm), comm)
            assert found.tobytes() == alone[0].tobytes()

    def test_blocks_of_all_rows_are_whole_matrices(self, grads, lockstep):
        finals = {
            b"".join(p.tobytes() for p in run(muon(block_rows=rows), grads, lockstep, 2)[0][0])
            for rows in (None, 24, 10**9)
        }
        assert len(finals) == 1

    def test_results_do_not_depend_on_the_number_of_blocks_computed_together(
        self, grads, lockstep, monkeypatch
    ):
        finals, sizes = set(), []

        def counted(x, **options):
            sizes.append(x.size)
            return orthogonalize(x, **options)

        monkeypatch.setattr("qcomp.core.optimizers.muon.orthogonalize", counted)
        for elements in (1, 100, 10**6):
            for name in ("_AT_ONCE", "_JOINED"):
                monkeypatch.setattr(f"qcomp.core.optimizers.muon.{name}", elements)
            sizes.clear()
            (params,), _ = run(muon(block_rows=4), grads, lockstep, 1, steps=3)
            finals.add(b"".join(p.tobytes() for p in params))
            of_matrices = [prod(SHAPES[NAMES.index(name)]) for name in MATRICES]
            assert sum(sizes) == 3 * sum(of_matrices)  # each block once per step
            assert max(sizes) <= max(elements, 4 * 24)  # a block has at most 24 columns
        assert len(finals) == 1

    def test_owners_share_what_the_blocks_cost(self):
        """One long matrix in blocks costs as much as matrices of the blocks' size, and a fraction of the whole."""
        whole, blocks = (muon(block_rows=rows).compression.mean for rows in (None, 16))
        long, short = [(256, 64)], [(16, 64)] * 16
        assert blocks.work(long, 1) == blocks.work(short, 1) == whole.work(short, 1)
        assert 3 * blocks.work(long, 1)[0] < whole.work(long, 1)[0]


def test_a_lone_rank_leaves_subnormal_gradients_as_they_are():
    """Its mean has zeros in their place, and must not overwrite the gradients' memory."""
    exact = qcomp.Identity()
    opt = muon(compressor=exact, update_compressor=exact, others=())
    comm = qcomp.comm.LocalCommunicator.alone()
    params, gradient = [np.ones((24, 16), np.float32)], np.full((24, 16), 1e-40, np.float32)
    before = gradient.copy()
    opt.step(params, [gradient], opt.init(params, comm), comm)
    assert gradient.tobytes() == before.tobytes()


WHITENED = {"whiten_steps": qcomp.DoublingIntervals(1)}  # in steps 1, 2, 4, 8, ...


class TestWhitening:
    @staticmethod
    def skewed(rank, step, shape, smallest=1e-2):
        """Return a gradient whose singular values fall to the smallest, in directions that stay the same."""
        fixed, rng = np.random.default_rng(5), np.random.default_rng([rank, step])
        u, _, v = np.linalg.svd(fixed.standard_normal(shape), full_matrices=False)
        values = np.geomspace(1, smallest, min(shape)) * rng.uniform(0.9, 1.1, min(shape))
        return ((u * values) @ v).astype(np.float32)

    def test_all_ranks_hold_the_whiteners_of_the_owners(self, grads, lockstep):
        _, states = run(muon(**WHITENED), grads, lockstep, 3, steps=4)
        first = states[0].arrays["whitener"]
        assert [w.shape for w in first] == [(10, 10), (10, 10), (6, 6), (0, 0), (12, 12), (0, 0)]
        for state in states:
            assert [w.tobytes() for w in state.arrays["whitener"]] == [w.tobytes() for w in first]
        for w in (first[0], first[1], first[2], first[4]):
            assert np.linalg.norm(w / np.linalg.norm(w) - np.eye(len(w)) / len(w) ** 0.5) > 0.05

    @pytest.mark.parametrize("output_axis", [0, -1])
    def test_nothing_is_lost_when_whiteners_change(self, grads, lockstep, output_axis):
        """Without momentum, an owner's momentum is the mean; the means add up to exact ones minus what is owed."""
        opt = muon(momentum=0.0, nesterov=False, output_axis=output_axis, others=(), **WHITENED)
        shapes = [(6, 9), (9, 6), (3, 2, 8) if output_axis else (8, 3, 2)]
        size = 3
        params = [grads(shapes, 99, 0) for _ in range(size)]
        states = lockstep([opt.init_stages(p, rank=r, size=size) for r, p in enumerate(params)])
        exact, found = [np.zeros(prod(s)) for s in shapes], [np.zeros(prod(s)) for s in shapes]
        for step in range(9):
            given = [grads(shapes, rank, step) for rank in range(size)]
            results = lockstep([opt.stages(p, g, s) for p, g, s in zip(params, given, states, strict=True)])
            params, states = [p for p, _ in results], [s for _, s in results]
            for i in range(len(shapes)):
                exact[i] += sum(g[i].ravel().astype(np.float64) for g in given) / size
            for state in states:
                owned_here = opt.mean.layout(
                    state.exchange.shapes, rank=state.rank, size=size
                ).residuals.server
                for segment, mean in zip(owned_here, state.exchange.server, strict=False):
                    found[segment.tensor] += mean
        for i, shape in enumerate(shapes):
            sides = (shape[0], prod(shape[1:])) if output_axis == 0 else (prod(shape[:-1]), shape[-1])
            owed = sum(s.exchange.worker[i] for s in states) / size
            owed = unwhitened(
                owed.astype(np.float64), states[0].arrays["whitener"][i].astype(np.float64), sides
            )
            assert np.linalg.norm(owed) > 0.01 * np.linalg.norm(exact[i])
            np.testing.assert_allclose(found[i], exact[i] - owed, rtol=0, atol=1e-5 * np.abs(exact[i]).max())

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
    def test_updates_come_closer_to_the_exact_ones(self, lockstep, shape):
        """If singular values differ by a factor of a hundred, the distance is less than half."""

        def updates(**changes):
            settings = {"compressor": qcomp.LloydMax(2, 64), "update_compressor": qcomp.Identity(), **changes}
            opt = qcomp.Muon(learning_rate=1.0, adjust_lr_fn="match_rms_adamw", **settings)
            params = [[np.zeros(shape, np.float32)]] * 2
            states = lockstep([opt.init_stages(p, rank=r, size=2) for r, p in enumerate(params)])
            moved = []
            for step in range(40):
                results = lockstep(
                    [
                        opt.stages(p, [self.skewed(r, step, shape)], s)
                        for r, (p, s) in enumerate(zip(params, states, strict=True))
                    ]
                )
                moved.append(results[0][0][0] - params[0][0])
                params, states = [p for p, _ in results], [s for _, s in results]
            return np.stack(moved[20:])

        exact = updates(compressor=qcomp.Identity())
        plain, whitened = (
            np.linalg.norm(updates(**s) - exact) for s in ({}, {"whiten_steps": qcomp.DoublingIntervals(8)})
        )
        assert whitened < plain / 2

    def test_without_loss_nothing_is_whitened(self, grads, lockstep):
        plain, _ = run(muon(**EXACT), grads, lockstep, 2)
        same, states = run(muon(**EXACT, **WHITENED), grads, lockstep, 2)
        assert [p.tobytes() for p in same[0]] == [p.tobytes() for p in plain[0]]
        assert "whitener" not in states[0].arrays

    def test_only_some_steps_send_whiteners(self, grads, lockstep):
        asked = []

        def schedule(step):
            asked.append(step)
            return step == 3

        _, states = run(muon(whiten_steps=schedule), grads, lockstep, 2, steps=2)
        before = [w.tobytes() for w in states[0].arrays["whitener"]]
        assert before[0] == np.eye(10, dtype=np.float32).tobytes()
        _, states = run(muon(whiten_steps=schedule), grads, lockstep, 2, steps=4)
        assert states[0].arrays["whitener"][0].tobytes() != before[0]
        assert set(asked) == {1, 2, 3, 4}

    @pytest.mark.parametrize("size", [2, 3])
    def test_bytes_that_whiteners_add_to_the_messages(self, grads, lockstep, size):
        """Half of each, in 16 bits, to every other rank; at most 8 bytes of padding for each and for each message."""

        def sent(**changes):
            opt, params = muon(**changes), grads(SHAPES, 99, 0)
            states = lockstep([opt.init_stages(params, rank=r, size=size, names=NAMES) for r in range(size)])
            steps = [counted(opt.stages(params, grads(SHAPES, r, 0), s), r) for r, s in enumerate(states)]
            return sum(total for _, total in lockstep(steps))

        rows = [10, 10, 6, 12]
        least = (size - 1) * sum(n * (n + 1) for n in rows)
        assert least <= sent(**WHITENED) - sent() <= least + (size - 1) * 8 * (len(rows) + size)
        assert sent(whiten_steps=lambda step: False) == sent()

    @pytest.mark.slow
    @pytest.mark.parametrize("library", ["torch", "strict"])
    def test_ranks_of_different_libraries_stay_alike_bit_for_bit(self, grads, libraries, library):
        own, other = libraries[library], libraries["numpy"]
        opt = muon(others=(), **WHITENED)

        def rank_main(comm):
            lib = own if comm.rank == 1 else other
            params = [lib.array(p) for p in grads(SHAPES, 99, 0)]
            state = opt.init(params, comm, NAMES)
            for step in range(5):
                given = [lib.array(g) for g in grads(SHAPES, comm.rank, step)]
                params, state = opt.step(params, given, state, comm)
            return [lib.numpy(x).tobytes() for x in (*params, *state.arrays["whitener"])]

        first, *rest = run_local(3, rank_main, timeout=300)
        assert all(held == first for held in rest)

    @pytest.mark.parametrize("size", [2, 3])
    def test_a_state_without_whiteners_starts_with_the_first_ones(self, grads, lockstep, size):
        """What is owed stays unchanged; the reverse would need to undo the whitening, and is refused."""
        params, states = run(muon(), grads, lockstep, 2, steps=3)
        dicts, opt = [muon().state_dict(s) for s in states], muon(**WHITENED)
        saved = [dicts] * size if size != 2 else dicts
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "a state of . ranks resumes|the state was saved by Muon with whiten_steps=None"
            )
            loaded = lockstep(
                [opt.load_stages(saved[r], params[0], rank=r, size=size, names=NAMES) for r in range(size)]
            )
        for i in range(len(MATRICES)):
            means = [sum(s.exchange.worker[i] for s in world) / len(world) for world in (states, loaded)]
            np.testing.assert_allclose(*means, rtol=0, atol=1e-6)
        assert loaded[0].arrays["whitener"][0].tobytes() == np.eye(10, dtype=np.float32).tobytes()
        _, later = run(opt, grads, lockstep, size, states=loaded, params=[params[0]] * size, first=3, steps=2)
        back = [
            muon().load_stages(opt.state_dict(s), params[0], rank=r, size=size, names=NAMES, strict=False)
            for r, s in enumerate(later)
        ]
        assert all("whitener.tall" in str(error) for error in lockstep(back, catch=ValueError))

    @pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1)])
    def test_another_number_of_ranks_resumes_with_the_whiteners(self, grads, lockstep, old, new):
        opt = muon(**WHITENED)
        params, states = run(opt, grads, lockstep, old, steps=4)
        dicts = [opt.state_dict(s) for s in states]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a state of . ranks resumes")
            loaded = lockstep(
                [opt.load_stages(dicts, params[0], rank=r, size=new, names=NAMES) for r in range(new)]
            )
        for state in loaded:
            pairs = zip(state.arrays["whitener"], states[0].arrays["whitener"], strict=True)
            assert all(one.tobytes() == other.tobytes() for one, other in pairs)
        for i in range(len(MATRICES)):
            means = [sum(s.exchange.worker[i] for s in world) / len(world) for world in (states, loaded)]
            np.testing.assert_allclose(*means, rtol=0, atol=1e-5)
        run(opt, grads, lockstep, new, states=loaded, params=[params[0]] * new, first=4, steps=5)


PARTS_NAMES = ["experts", "fused", "both", "whole"]
PARTS = {"stacks": ("experts", "b*"), "splits": {"both": 2, "fused": (6, 3, 3), "*": 1}}


def parts_shapes(axis):
    return [turned_shape(s, axis) for s in [(6, 8), (12, 5), (6, 4), (9, 7)]]


def turned_shape(shape, axis):
    """Return a shape with its outputs on an axis; the first and the third tensor are stacks of 4."""
    own = shape if axis == 0 else shape[::-1]
    return (4, *own) if shape in ((6, 8), (6, 4)) else own


def parts_of(tensors, axis):
    """Return each matrix in tensors of `parts_shapes`, by a name that says where it was."""
    found = {}
    for name, x in zip(PARTS_NAMES, tensors, strict=True):
        slices = list(x) if name in ("experts", "both") else [x]
        bounds = {"both": [3], "fused": [6, 9]}.get(name, [])
        for i, one in enumerate(slices):
            for j, part in enumerate(np.split(one, bounds, axis)):
                found[f"{name}.{i}.{j}"] = np.ascontiguousarray(part)
    return found


class TestParts:
    """A slice of a stack and a part of a fused matrix move as matrices of their own."""

    @pytest.mark.parametrize(
        ("axis", "changes"),
        [
            (0, {}),
            (0, {"block_rows": 2, "adjust_lr_fn": "match_rms_adamw"}),
            (-1, {"nesterov": False}),
            (-1, {"adjust_lr_fn": "match_rms_adamw", "block_rows": 4}),
        ],
    )
    def test_each_moves_like_a_tensor_of_its_own(self, grads, axis, changes):
        settings = {"learning_rate": 0.05, "output_axis": axis, "weight_decay": 0.1, **EXACT, **changes}
        comm, shapes = LocalCommunicator.alone(), parts_shapes(axis)
        opt, apart = qcomp.Muon(**settings, **PARTS), qcomp.Muon(**settings, splits={"*": 1})
        held = grads(shapes, 99, 0)
        cut = parts_of(held, axis)
        names, separate = list(cut), list(cut.values())
        state = opt.init(held, comm, PARTS_NAMES)
        other = apart.init(separate, comm, names)
        assert not any(state.exact + other.exact)
        for step in range(3):
            given = grads(shapes, 0, step)
            held, state = opt.step(held, given, state, comm)
            separate, other = apart.step(separate, list(parts_of(given, axis).values()), other, comm)
        for one, expected in zip(parts_of(held, axis).values(), separate, strict=True):
            assert one.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
    def test_each_moves_as_muon_of_torch_moves_it(self, grads, monkeypatch, adjust_lr_fn):
        torch = torch_with_muon()
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        opt = qcomp.Muon(learning_rate=0.05, **EXACT, **PARTS, adjust_lr_fn=adjust_lr_fn)
        comm, shapes = LocalCommunicator.alone(), parts_shapes(0)
        held = grads(shapes, 99, 0, np.float64)
        leaves = [torch.from_numpy(np.array(p)).requires_grad_() for p in parts_of(held, 0).values()]
        theirs = torch.optim.Muon(leaves, lr=0.05, weight_decay=0.0, adjust_lr_fn=adjust_lr_fn)
        state = opt.init(held, comm, PARTS_NAMES)
        for step in range(4):
            given = grads(shapes, 0, step, np.float64)
            for leaf, g in zip(leaves, parts_of(given, 0).values(), strict=True):
                leaf.grad = torch.from_numpy(np.array(g))
            theirs.step()
            held, state = opt.step(held, given, state, comm)
        for one, leaf in zip(parts_of(held, 0).values(), leaves, strict=True):
            np.testing.assert_allclose(one, leaf.detach().numpy(), rtol=0, atol=1e-11)

    @pytest.mark.parametrize(("axis", "changes"), [(0, {}), (-1, WHITENED), (0, WHITENED)])
    def test_compressed_and_resumed_with_other_ranks(self, grads, lockstep, axis, changes):
        """A state has the entries of whole tensors, and goes on with another number of ranks."""
        opt = qcomp.Muon(learning_rate=0.05, output_axis=axis, **COARSE, **PARTS, **changes)
        plain = qcomp.Muon(learning_rate=0.05, output_axis=axis, **COARSE)
        shapes = parts_shapes(axis)

        def steps(params, states, first):
            for step in range(first, first + 3):
                pairs = enumerate(zip(params, states, strict=True))
                results = lockstep([opt.stages(p, grads(shapes, r, step), s) for r, (p, s) in pairs])
                params, states = [p for p, _ in results], [s for _, s in results]
                assert len({b"".join(x.tobytes() for x in p) for p in params}) == 1
            return params, states

        held = grads(shapes, 99, 0)
        params, states = steps(
            [held] * 2,
            lockstep([opt.init_stages(held, rank=r, size=2, names=PARTS_NAMES) for r in range(2)]),
            0,
        )
        dicts = [opt.state_dict(s) for s in states]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = plain.init(held, LocalCommunicator.alone(), PARTS_NAMES)
            of_plain = plain.state_dict(whole)
            assert {k: np.shape(v) for k, v in of_plain.items() if k.startswith("owner")} == {
                k: np.shape(v) for one in dicts for k, v in one.items() if k.startswith("owner")
            }
            loaded = lockstep(
                [opt.load_stages(dicts, params[0], rank=r, size=3, names=PARTS_NAMES) for r in range(3)]
            )
        if changes:  # a stack and a fused matrix have one whitener, of their inputs
            sides = [x.shape for x in loaded[0].arrays["whitener"]]
            assert sides == (
                [(8, 8), (5, 5), (4, 4), (7, 7)] if axis == 0 else [(6, 6), (5, 5), (6, 6), (7, 7)]
            )
        steps([params[0]] * 3, loaded, 3)

    def test_owners_share_what_the_parts_cost(self):
        opt = qcomp.Muon(learning_rate=0.1, stacks=("a",), splits={"b": 4})
        state = opt.init([np.ones((4, 32, 32)), np.ones((128, 32))], LocalCommunicator.alone(), ["a", "b"])
        mean = opt.mean_of(state)
        assert mean is opt.mean_of(state._replace(step=7))  # and so keeps its layouts
        assert mean.work([(4, 32, 32), (128, 32)], 2) == qcomp.Muon(learning_rate=0.1).mean.work(
            [(32, 32)] * 8, 2
        )

    def test_vectors_are_moved_by_adamw_whatever_their_number_of_axes(self):
        def moved(shape, axis=0, **settings):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Muon orthogonalises nothing|AdamW moves")
                opt = qcomp.Muon(learning_rate=0.1, output_axis=axis, **settings)
                return opt.init(
                    [np.ones((8, 8)), np.ones(shape)], LocalCommunicator.alone(), ["m", "x"]
                ).exact[1]

        for shape in [(40, 1), (1, 40), (1, 5, 40), (40, 1, 1), (32, 1, 3, 3), (32, 1, 5)]:
            assert moved(shape)
            assert moved(shape[::-1], -1)
        for shape in [(40, 2), (32, 2, 3, 3), (2, 4)]:
            assert not moved(shape)
            assert not moved(shape[::-1], -1)
        with pytest.raises(ValueError, match="stacks has the pattern 'x', which matches no tensor that Muon"):
            moved((8, 32), stacks=("x",))  # biases of 8 experts

    @pytest.mark.parametrize(
        ("settings", "error", "text"),
        [
            ({"stacks": "experts"}, TypeError, "stacks is 'experts'; expected a sequence of patterns"),
            ({"stacks": ("expert",)}, ValueError, "stacks has the pattern 'expert', which matches no tensor"),
            ({"splits": {"q*": 3}}, ValueError, r"splits has the pattern 'q\*', which matches no tensor"),
            (
                {"splits": {"fused": 5}},
                ValueError,
                r"splits has 5 for 'fused' of shape \(12, 5\), with 12 outputs",
            ),
            ({"splits": {"fused": [6, 3]}}, ValueError, r"splits has \(6, 3\) for 'fused'"),
            (
                {"stacks": ("both",), "splits": {"both": 4}},
                ValueError,
                r"splits has 4 for each slice of 'both' of shape \(4, 6, 4\), with 6 outputs on axis 0; expected a",
            ),
            ({"splits": {"fused": 0}}, ValueError, "splits has 0 for 'fused'; expected integers, at least 1"),
            ({"splits": {"fused": ()}}, ValueError, r"splits has \(\) for 'fused'; expected integers"),
            ({"splits": {"fused": True}}, ValueError, "splits has True for 'fused'"),
            ({"splits": {3: 3}}, TypeError, r"splits has \(3, 3\); expected a mapping of patterns"),
            ({"splits": "fused"}, TypeError, "splits is 'fused'; expected a mapping of patterns"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:.*Muon orthogonalises")
    def test_settings_that_do_not_fit_are_errors(self, settings, error, text):
        with pytest.raises(error, match=text):
            qcomp.Muon(learning_rate=0.1, **settings).init(
                [np.ones(s) for s in parts_shapes(0)], LocalCommunicator.alone(), PARTS_NAMES
            )


class TestDoubts:
    """Tensors that may hold several matrices, by their shapes or names, cause one warning, unless a setting says."""

    def told(self, name, shape, **settings):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt = qcomp.Muon(learning_rate=0.1, **settings)
            opt.init([np.ones(shape, np.float32)], LocalCommunicator.alone(), [name])
        return [str(one.message) for one in caught]

    @pytest.mark.parametrize("axis", [0, -1])
    def test_shapes_of_stacks(self, axis):
        for shape in [(64, 64, 64), (128, 64, 32), (64, 4, 48, 32)]:
            (text,) = self.told("w1", shape if axis == 0 else shape[::-1], output_axis=axis)
            assert "the shape suggests a stack of matrices" in text
            assert "splits={'w1': 1}" in text
            assert not self.told(
                "w1", shape if axis == 0 else shape[::-1], output_axis=axis, splits={"w*": 1}
            )
        assert not self.told("w1", (64, 64, 64), output_axis=axis, stacks=("w*",))
        assert not self.told("w1", (8, 64, 128), output_axis=axis, stacks=("w*",))
        for kernel in [(64, 64, 3), (64, 32, 7, 7), (64, 3, 16, 16), (64, 8, 3, 3, 3)]:
            assert not self.told("w1", kernel if axis == 0 else kernel[::-1], output_axis=axis)

    @pytest.mark.parametrize(
        "name",
        [
            "encoder.layers.0.self_attn.in_proj_weight",
            "blocks.0.attn.qkv.weight",
            "h.0.attn.c_attn.weight",
            "layers.0.attention.Wqkv.weight",
            "self_attention.query_key_value.weight",
            "mlp.gate_up_proj.weight",
            "attn.to_kv.weight",
            "attn.kv_proj.weight",
            "mlp.w12.weight",
            "rnn.weight_ih_l0",
        ],
    )
    def test_names_of_fused_matrices(self, name):
        (text,) = self.told(name, (24, 8))
        assert (
            f"Muon orthogonalises {name!r} of shape (24, 8) as one matrix; the name suggests several" in text
        )
        assert not self.told(name, (24, 8), splits={"*": 3})
        assert not self.told(name, (24, 8), splits={"*": 1})

    def test_queries_keys_and_values_along_the_other_axis(self):
        """Conv1D of transformers stores (inputs, outputs): parts of the first axis would mix all three."""
        for axis, shape in [(0, (36, 108)), (-1, (108, 36))]:
            for parts in (3, 12):  # 12: those of four heads
                (text,) = self.told("c_attn", shape, output_axis=axis, splits={"c_attn": parts})
                assert f"output_axis is {axis}, so splits cuts the shorter axis of 'c_attn'" in text
                assert f"pass output_axis={-1 - axis}" in text
                assert not self.told("c_attn", shape, output_axis=-1 - axis, splits={"c_attn": parts})
        assert not self.told("kv", (16, 32), splits={"kv": 2})

    def convolutions(self, *inputs, **settings):
        """Return the warnings about kernels with these numbers of input channels, and what AdamW moves."""
        opt = qcomp.Muon(learning_rate=0.1, **settings)
        shapes = [(32, number, 3, 3) for number in inputs] + [(64, 32)]
        names = [*map(str, range(len(inputs))), "linear"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params = [np.ones(s, np.float32) for s in shapes]
            state = opt.init(params, LocalCommunicator.alone(), names)
        return [str(one.message) for one in caught], state.exact

    def test_a_first_convolution_of_one_channel_is_not_left_to_adamw_in_silence(self):
        for inputs in [(1,), (1, 32), (1, 1, 32)]:
            (text,), exact = self.convolutions(*inputs)
            assert "AdamW moves '0' of shape (32, 1, 3, 3), which may be a depthwise convolution" in text
            assert exact[0]
        for inputs in [(3, 1, 32), (1, 1, 1)]:
            assert not self.convolutions(*inputs)[0]
        assert self.convolutions(1, 1, 32, splits={"0": 1}) == ([], (False, True, False, False))
        assert self.convolutions(1, 32, others=("0",)) == ([], (True, False, False))

    @pytest.mark.parametrize("splits", [{"?": 1}, {"[0-9]": 1}, {"?": 2}])
    def test_a_pattern_for_several_names_leaves_depthwise_kernels_to_adamw(self, splits):
        """``{"*qkv*": 3}`` also matches ``attn.qkv_dwconv.weight``."""
        splits = {**splits, "linear": 1, "*": 1}
        assert self.convolutions(3, 1, 32, splits=splits) == ([], (False, True, False, False))
        (text,), exact = self.convolutions(1, 32, splits=splits)
        assert "AdamW moves '0' of shape (32, 1, 3, 3)" in text
        assert exact == (True, False, False)
        named = {"1": 1, **splits}
        assert self.convolutions(3, 1, 32, splits=named) == ([], (False, False, False, False))

    def test_names_that_only_look_alike(self):
        for name in ["attn.q_proj.weight", "main_proj.weight", "rwkv.key.weight", "w1", "conv12.weight"]:
            assert not self.told(name, (24, 8))


class TestOwners:
    def test_only_the_owner_has_a_momentum(self, grads, lockstep):
        opt = muon()
        _, states = run(opt, grads, lockstep, 3)
        sizes = {f"{name}@0": prod(shape) for name, shape in zip(NAMES, SHAPES, strict=True)}
        for kind in ("owner_momentum", "owner_residual"):
            for key, value in owned(opt, states, kind).items():
                assert value.shape == (sizes[key.partition(".")[2]],)
                assert value.any()
        for state in states:
            assert [m.size for m in state.momentum] == [0, 0, 0, 7, 0, 120]
            assert len(state.exchange.worker) == len(MATRICES)

    def test_bytes_sent(self, grads, lockstep):
        """Each of N ranks sends (N - 1) / N of the payloads of both ways, and twice 32 bits of every exact element."""
        for size in (2, 3):
            sent = []

            def counted(stages, sent=sent, size=size):
                arrived, total = None, 0
                while True:
                    try:
                        request = stages.send(arrived)
                    except StopIteration as stop:
                        sent.append(total)
                        return stop.value
                    to_all = not isinstance(request.send, tuple)
                    total += len(request.send) * size if to_all else sum(map(len, request.send))
                    arrived = yield request

            opt, params = muon(), grads(SHAPES, 99, 0)
            states = lockstep([opt.init_stages(params, rank=r, size=size, names=NAMES) for r in range(size)])
            lockstep([counted(opt.stages(params, grads(SHAPES, r, 0), s)) for r, s in enumerate(states)])
            sizes = [prod(shape) for shape, name in zip(SHAPES, NAMES, strict=True) if name in MATRICES]
            payloads = sum(c.payload_spec(n).nbytes for c in COARSE.values() for n in sizes)
            exact = 4 * sum(prod(s) for s, name in zip(SHAPES, NAMES, strict=True) if name not in MATRICES)
            least = payloads + 2 * exact
            # At most 8 bytes of padding for each payload, and 16 for each message.
            assert least <= sum(sent) / size <= least + 8 * (2 * len(sizes) + 2) + 64 * size

    @pytest.mark.parametrize("library", ["torch", "strict", pytest.param("jax", marks=pytest.mark.slow)])
    def test_ranks_of_different_libraries_stay_alike_bit_for_bit(self, grads, libraries, library):
        """Ranks may round matrix products differently: all take the update from its owner."""
        own, other = libraries[library], libraries["numpy"]
        numbers = (0, 3) if library == "jax" else range(len(SHAPES))  # JAX compiles for every shape
        opt, names = muon(others=()), [NAMES[i] for i in numbers]

        def rank_main(comm):
            lib = own if comm.rank == 1 else other
            params = [lib.array(p) for i, p in enumerate(grads(SHAPES, 99, 0)) if i in numbers]
            state = opt.init(params, comm, names)
            for step in range(3):
                given = [lib.array(g) for i, g in enumerate(grads(SHAPES, comm.rank, step)) if i in numbers]
                params, state = opt.step(params, given, state, comm)
            return [lib.numpy(p).tobytes() for p in params]

        first, *rest = run_local(3, rank_main, timeout=300)
        assert all(held == first for held in rest)


class TestCheckpoints:
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2), (3, 1), (1, 4), (2, 2)])
    @pytest.mark.parametrize("how", ["all on all", "dealt", "all on the last"])
    def test_the_state_of_an_owner_goes_to_the_new_owner(self, grads, lockstep, old, new, how):
        opt = muon()
        params, states = run(opt, grads, lockstep, old)
        dicts = [opt.state_dict(s) for s in states]
        passed = {
            "all on all": [dicts] * new,
            "dealt": [dicts[rank::new] for rank in range(new)],
            "all on the last": [[]] * (new - 1) + [dicts[::-1]],
        }[how]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a state of . ranks resumes")
            loaded = lockstep(
                [opt.load_stages(passed[r], params[0], rank=r, size=new, names=NAMES) for r in range(new)]
            )
        for kind in ("owner_momentum", "owner_residual"):
            before, after = owned(opt, states, kind), owned(opt, loaded, kind)
            assert {k: x.tobytes() for k, x in before.items()} == {k: x.tobytes() for k, x in after.items()}
        for i in range(len(MATRICES)):
            means = [sum(s.exchange.worker[i] for s in world) / len(world) for world in (states, loaded)]
            np.testing.assert_allclose(*means, rtol=0, atol=1e-6)
            assert means[0].any()
        run(opt, grads, lockstep, new, states=loaded, params=[params[0]] * new, steps=2)

    @pytest.mark.filterwarnings("ignore:all . ranks have the same gradients")
    def test_without_compression_another_number_of_ranks_changes_nothing(self, grads, lockstep):
        opt = muon(**EXACT)
        params, states = run(opt, grads, lockstep, 2, same=True)
        dicts = [opt.state_dict(s) for s in states]
        with pytest.warns(UserWarning, match="a state of 2 ranks resumes with 3"):
            loaded = lockstep(
                [opt.load_stages(dicts, params[0], rank=r, size=3, names=NAMES) for r in range(3)]
            )
        later, _ = run(opt, grads, lockstep, 3, states=loaded, params=[params[0]] * 3, first=5, same=True)
        whole, _ = run(opt, grads, lockstep, 2, steps=10, same=True)
        for one, other in zip(later[0], whole[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("broken", ["missing", "twice", "short"])
    def test_all_ranks_refuse_owned_entries_that_are_missing_or_duplicated(self, grads, lockstep, broken):
        opt = muon()
        params, states = run(opt, grads, lockstep, 2)
        dicts = [opt.state_dict(s) for s in states]
        key = next(key for key in dicts[0] if key.startswith("owner_momentum."))
        if broken == "missing":
            del dicts[0][key]
        elif broken == "short":
            dicts[0][key] = dicts[0][key][:-1]
        else:
            dicts[1][key] = dicts[0][key]
        found = lockstep(
            [opt.load_stages(dicts, params[0], rank=r, size=3, names=NAMES) for r in range(3)],
            catch=ValueError,
        )
        assert len({str(error) for error in found}) == 1
        assert key.partition("@")[0] in str(found[0])

    def test_another_compressor_of_updates_is_refused(self, grads, lockstep):
        opt = muon()
        (params,), (state,) = run(opt, grads, lockstep, 1)
        other = muon(update_compressor=qcomp.ScaledSign(32, "rms"))
        with pytest.raises(ValueError, match="update_compressor="):
            other.load_state_dict(opt.state_dict(state), params, LocalCommunicator.alone(), NAMES)


class TestWhatAdamWMoves:
    def chosen(self, others):
        opt = muon(others=others)
        state = opt.init([np.ones(shape) for shape in SHAPES], LocalCommunicator.alone(), NAMES)
        return [name for name, is_exact in zip(NAMES, state.exact, strict=True) if is_exact]

    def test_adamw_parameters_are_chosen_by_patterns_or_a_policy(self):
        assert self.chosen(()) == ["bias"]
        assert self.chosen(["w*", "last"]) == ["wide", "bias", "last"]
        assert self.chosen(qcomp.ExactBelow(200)) == ["kernel", "bias", "square", "last"]
        assert self.chosen(lambda tensors: [t.name == "tall" for t in tensors]) == ["tall", "bias"]

    @pytest.mark.parametrize(
        "name",
        ["transformer.wte.weight", "model.embed_tokens.weight", "params/Embed_0/embedding", "lm_head.weight"],
    )
    def test_names_of_embeddings_and_heads_cause_a_warning(self, name):
        def begin(others):
            opt = qcomp.Muon(learning_rate=0.1, others=others)
            return opt.init([np.ones((4, 4))] * 2, LocalCommunicator.alone(), ["between", name])

        with pytest.warns(UserWarning, match=f"Muon orthogonalises '{name}', whose names suggest embeddings"):
            assert begin(()).exact == (False, False)
        with pytest.warns(UserWarning, match=f"Muon orthogonalises '{name}', whose names suggest embeddings"):
            begin(["betw*"])
        # No warning if it is named, or if a function has chosen.
        assert begin([name]).exact == (False, True)
        assert begin(lambda tensors: [False] * len(tensors)).exact == (False, False)

    @pytest.mark.parametrize(
        "name", ["heads.0.key", "attention.overhead", "ahead.weight", "membrane", "wtext"]
    )
    def test_names_that_only_contain_such_a_word_do_not(self, name):
        qcomp.Muon(learning_rate=0.1).init([np.ones((4, 4))], LocalCommunicator.alone(), [name])

    def test_a_model_without_matrices_causes_a_warning(self):
        with pytest.warns(UserWarning, match="Muon orthogonalises nothing: AdamW moves all 1 tensors"):
            qcomp.Muon(learning_rate=0.1).init([np.ones(3)], LocalCommunicator.alone())

    def test_the_rate_of_adamw(self):
        state = muon().init([np.ones(shape) for shape in SHAPES], LocalCommunicator.alone(), NAMES)
        for changes, factor in (
            ({}, 0.1),
            ({"adjust_lr_fn": "match_rms_adamw"}, 1.0),
            ({"adam_learning_rate_factor": 0.25}, 0.25),
        ):
            opt = muon(**changes, groups=(qcomp.Group(["bias", "tall"], learning_rate_factor=2.0),))
            rates = dict(zip(NAMES, opt.rates(state), strict=True))
            assert rates == pytest.approx(
                {
                    "tall": 0.1,
                    "wide": 0.05,
                    "kernel": 0.05,
                    "bias": 0.1 * factor,
                    "square": 0.05,
                    "last": 0.05 * factor,
                }
            )

    @pytest.mark.parametrize(
        ("changes", "error", "text"),
        [
            ({"others": "last"}, TypeError, "others is 'last'; expected a sequence of patterns"),
            ({"others": None}, TypeError, "others is None"),
            ({"momentum": 1.0}, ValueError, "momentum is 1.0"),
            ({"adjust_lr_fn": None}, ValueError, "adjust_lr_fn is None"),
            ({"block_rows": 0}, ValueError, "block_rows is 0; expected an integer, at least 1"),
            ({"block_rows": 64.0}, TypeError, "block_rows is 64.0; expected an integer, at least 1"),
            ({"output_axis": 1}, ValueError, "output_axis is 1; expected 0"),
            ({"newton_schulz_steps": 0}, ValueError, "newton_schulz_steps is 0; expected an integer"),
            ({"newton_schulz_steps": None}, TypeError, "newton_schulz_steps is None; expected an integer"),
            ({"newton_schulz_dtype": "float16"}, ValueError, "newton_schulz_dtype is 'float16'"),
            ({"adam_learning_rate_factor": -1.0}, ValueError, "adam_learning_rate_factor is -1.0"),
            ({"betas": (0.9, 1.0)}, ValueError, "betas is"),
            ({"eps": -1.0}, ValueError, "eps is"),
            ({"update_compressor": "sign"}, TypeError, "update_compressor is 'sign'"),
            ({"compressor": [qcomp.Identity()]}, TypeError, r"compressor is \[Identity\(\)\]"),
            ({"update_compressor": qcomp.QSGD(1, 512)}, ValueError, "feedback=True around qsgd:levels=1"),
        ],
    )
    def test_settings_out_of_range(self, changes, error, text):
        with pytest.raises(error, match=text):
            muon(**changes)

    def test_invalid_policies_are_refused(self):
        for others, error, text in (
            (("had",), ValueError, "others has the pattern 'had', which matches no name"),
            (
                lambda tensors: [True],
                TypeError,
                r"others chose \(True,\); expected True or False for each of 6",
            ),
        ):
            with pytest.raises(error, match=text):
                self.chosen(others)

    def test_ranks_with_different_policies_are_an_error(self):
        def rank_main(comm):
            opt = muon(others=lambda tensors: [comm.rank == 1 and t.name == "tall" for t in tensors])
            with pytest.raises(qcomp.MismatchError, match="compressed"):
                opt.init([np.ones(shape) for shape in SHAPES], comm, NAMES)

        run_local(2, rank_main, timeout=20)


def test_diagnostics_report_the_bytes(grads):
    """But nothing that compares an update with a mean, since an update is none."""

    def rank_main(comm):
        diagnostics = qcomp.Diagnostics(muon())
        params = grads(SHAPES, 99, 0)
        state = muon().init(params, comm, NAMES)
        return diagnostics.step(params, grads(SHAPES, comm.rank, 0), state, comm)[2]

    for report in run_local(2, rank_main, timeout=20):
        assert report["bytes_sent"] > 0
        assert "cosine" not in report
        assert "server_residual" not in report
