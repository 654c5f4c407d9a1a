"""What the recorded trajectories do not cover of DeepSpeed's optimizers: stages, refusals, checkpoints, libraries."""

import ast
import io
import math
from pathlib import Path

import numpy as np
import pytest

import qcomp
from qcomp import MismatchError, NonFiniteError
from qcomp.comm import LocalCommunicator, run_local
from qcomp.compat import deepspeed
from qcomp.compat.deepspeed import Errors, onebit_adam, onebit_lamb, sign_mean, zero_one_adam
from qcomp.compat.deepspeed.sign_mean import padded_size
from qcomp.core.mean.stages import AllGather, AllToAll

SHAPES = [(40,), (7, 5), (3,)]
PURE = {"abc", "collections.abc", "dataclasses", "math", "typing"}
OPTIMIZERS = {
    "onebit_adam": onebit_adam(0.05, freeze_step=4, weight_decay=0.1),
    "zero_one_adam": zero_one_adam(
        0.05, var_freeze_step=5, var_update_scaler=2, local_step_scaler=2, local_step_clipper=4
    ),
    "onebit_lamb": onebit_lamb(0.05, freeze_step=4, weight_decay=0.1),
}
LAST = {"onebit_adam": "compressed", "zero_one_adam": "local", "onebit_lamb": "compressed"}


class Ranks:
    """All ranks of a job; whether they agree is not checked, since 0/1 Adam's ranks differ between synchronisations."""

    def __init__(self, opt, lockstep, params, size):
        names = tuple(map(str, range(len(params))))
        self.opt, self.lockstep = opt, lockstep
        self.params = [list(params) for _ in range(size)]
        self.states = [opt.initial_state(params, names, rank, size) for rank in range(size)]

    def stages(self, grads):
        return [self.opt.stages(*each) for each in zip(self.params, grads, self.states, strict=True)]

    def step(self, grads):
        results = self.lockstep(self.stages(grads))
        self.params, self.states = [p for p, _ in results], [s for _, s in results]

    def snapshot(self):
        return [snapshot(p, s) for p, s in zip(self.params, self.states, strict=True)]


def snapshot(params, state):
    kinds = (params, state.momentum, state.variance, *state.arrays.values())
    held = [np.asarray(x).tobytes() for arrays in kinds for x in arrays]
    return held, list(state.arrays), dict(state.numbers), (state.step, state.stage, state.skipped)


def draw(rank, step, shapes=SHAPES, dtype=np.float32):
    rng = np.random.default_rng([5, rank, step])
    return [(rng.standard_normal(shape) + 0.3).astype(dtype) for shape in shapes]


@pytest.fixture
def ranks(lockstep):
    """Start a job and take some steps: ``ranks(opt, size, steps)``."""

    def start(opt, size, steps=0, shapes=SHAPES):
        run = Ranks(opt, lockstep, draw(99, 0, shapes), size)
        for step in range(steps):
            run.step([draw(rank, step, shapes) for rank in range(size)])
        return run

    return start


class TestSignMean:
    @pytest.mark.quick_cases(14)
    @pytest.mark.parametrize("count", [1, 47, 48, 49, 144])
    @pytest.mark.parametrize("size", [1, 2, 3, 5])
    def test_compression_errors_are_kept(self, lockstep, float64_library, count, size):
        """mean + E' = mean_i (x_i, 0) + E in every element of the padded vector, E = mean_i e_i + e_s."""
        library = float64_library
        rng = np.random.default_rng(count)
        length = padded_size(count, size) if size > 1 else 0
        assert length % (size * math.lcm(size, 8)) == 0
        errors = [Errors.zeros(library.array(np.zeros(1)), count, size) for _ in range(size)]
        before = np.zeros(length)
        for _ in range(4):
            x = rng.standard_normal((size, count))
            results = lockstep([sign_mean(library.array(x[r]), errors[r], size) for r in range(size)])
            library.seal(results)
            means, errors = [library.numpy(m) for m, _ in results], [e for _, e in results]
            assert all(m.tobytes() == means[0].tobytes() for m in means)
            if size == 1:
                assert means[0].tobytes() == x[0].tobytes()
                continue
            after = np.mean([library.numpy(e.worker) for e in errors], axis=0)
            after += np.concatenate([library.numpy(e.server) for e in errors])
            expected = x.mean(axis=0) + before[:count]
            np.testing.assert_allclose(means[0] + after[:count], expected, rtol=0, atol=1e-13)
            before = after

    @pytest.mark.parametrize("forgotten", [None, "worker", "server"])
    def test_the_identity_needs_both_errors(self, lockstep, forgotten):
        """The means add up to the sum of the mean inputs, up to the last errors; unless either kind is dropped."""
        rng = np.random.default_rng(3)
        errors = [Errors.zeros(np.zeros(1), 48, 2) for _ in range(2)]
        gap = np.zeros(48)
        for _ in range(20):
            x = rng.standard_normal((2, 48))
            results = lockstep([sign_mean(x[r], errors[r], 2) for r in range(2)])
            errors = [e for _, e in results]
            gap += x.mean(axis=0) - results[0][0]
            if forgotten:
                errors = [e._replace(**{forgotten: np.zeros_like(getattr(e, forgotten))}) for e in errors]
        left = np.mean([e.worker for e in errors], axis=0) + np.concatenate([e.server for e in errors])
        assert (np.abs(gap - left).max() < 1e-12) == (forgotten is None)

    def test_one_scale_of_all_elements_and_one_of_a_shard(self, lockstep):
        """Worked out by hand: two ranks, three elements padded to sixteen."""
        x = [np.asarray(v, dtype=np.float64) for v in ([4.0, 0.0, -4.0], [0.0, 0.0, 0.0])]
        results = lockstep([sign_mean(v, Errors.zeros(v, 3, 2), 2) for v in x])
        (mean, first), (_, second) = results
        scale = math.sqrt(32 / 16)
        np.testing.assert_allclose(first.worker[:4], [4 - scale, -scale, -4 + scale, -scale])
        assert not second.worker.any()
        # The server of the first shard has eight elements, each plus or minus half of the first rank's scale.
        np.testing.assert_allclose(mean, [scale / 2, scale / 2, -scale / 2])
        assert np.abs(first.server).max() < 1e-15

    @pytest.mark.exhaustive
    def test_the_same_bytes_in_every_library(self, lockstep, libraries):
        """In float32: a rank in each library, and a run of each library alone."""
        x = [draw(rank, 0, [(7, 5)])[0] for rank in range(3)]

        def run(names):
            arrays = [libraries[name].array(v) for name, v in zip(names, x, strict=True)]
            results = lockstep([sign_mean(a, Errors.zeros(a, 35, 3), 3) for a in arrays])
            return [tuple(np.asarray(part).tobytes() for part in (mean, *errors)) for mean, errors in results]

        expected = run(["numpy"] * 3)
        for name in libraries:
            pytest.importorskip(libraries[name].xp.__name__)
            assert run([name] * 3) == expected, name

    @pytest.mark.parametrize("size", [2, 3])
    def test_bytes_sent(self, size):
        """One bit per element of the padded vector and one scale per message, to each other rank, twice."""
        x = draw(0, 0, [(100,)])[0]
        length = padded_size(100, size)
        stages = sign_mean(x, Errors.zeros(x, 100, size), size)
        request = next(stages)
        assert isinstance(request, AllToAll)
        assert [len(part) for part in request.send] == [4 + length // size // 8] * size
        request = stages.send([request.send[0]] * size)
        assert isinstance(request, AllGather)
        assert len(request.send) == 4 + length // size // 8

    def test_an_empty_tensor_is_not_sent(self):
        x = np.zeros((0, 3), dtype=np.float32)
        with pytest.raises(StopIteration) as stop:
            next(sign_mean(x, Errors.zeros(x, 0, 2), 2))
        assert stop.value.value[0].shape == (0, 3)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**48])
    def test_all_ranks_refuse_what_one_cannot_send(self, lockstep, value):
        x = [draw(rank, 0, [(20,)])[0] for rank in range(3)]
        x[1][7] = value
        errors = lockstep([sign_mean(v, Errors.zeros(v, 20, 3), 3) for v in x], catch=NonFiniteError)
        assert all("rank 1 is not finite" in str(error) for error in errors)

    def test_values_just_below_the_limit_are_sent(self, lockstep):
        x = [np.full(20, np.nextafter(np.float32(2.0**48), np.float32(0))) for _ in range(2)]
        for mean, _ in lockstep([sign_mean(v, Errors.zeros(v, 20, 2), 2) for v in x]):
            assert np.isfinite(mean).all()


class TestStages:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_the_first_call_is_counted_but_changes_nothing(self, ranks, name):
        run = ranks(OPTIMIZERS[name], 2)
        before = run.snapshot()
        stages = run.stages([[g * np.nan for g in draw(rank, 0)] for rank in range(2)])
        for s, (held, kinds, numbers, _) in zip(stages, before, strict=True):
            with pytest.raises(StopIteration) as stop:
                next(s)
            assert snapshot(*stop.value.value) == (held, kinds, numbers, (1, "warmup", 0))

    @pytest.mark.parametrize("make", [onebit_adam, onebit_lamb])
    @pytest.mark.parametrize(("freeze_step", "first"), [(0, 3), (1, 3), (2, 3), (3, 4), (5, 6)])
    def test_the_first_compressed_call(self, ranks, make, freeze_step, first):
        run = ranks(make(0.01, freeze_step=freeze_step), 2)
        calls = []
        for step in range(8):
            calls.append(run.states[0].stage)
            run.step([draw(rank, step) for rank in range(2)])
        assert 1 + calls.index("compressed") == first

    @pytest.mark.parametrize(("var_freeze_step", "first"), [(0, 3), (1, 3), (2, 4), (5, 7)])
    def test_the_first_local_call(self, ranks, var_freeze_step, first):
        run = ranks(zero_one_adam(0.01, var_freeze_step=var_freeze_step), 2)
        calls = []
        for step in range(8):
            calls.append(run.states[0].stage)
            run.step([draw(rank, step) for rank in range(2)])
        assert 1 + calls.index("local") == first

    def test_zero_one_adam_exchanges_at_the_expected_calls(self, ranks):
        """Exact, compressed or nothing, by the bytes of the first message of each call."""
        opt = zero_one_adam(
            0.01, var_freeze_step=9, var_update_scaler=2, local_step_scaler=3, local_step_clipper=2
        )
        run = ranks(opt, 2)
        kinds = []
        for step in range(20):
            grads = [draw(rank, step) for rank in range(2)]
            request = next(run.stages(grads)[0], None)
            size = 0 if request is None else sum(len(part) for part in request.send)
            kinds.append("." if size == 0 else "e" if size > 4 * 78 else "c")
            run.step(grads)
        # Updates at 2 and 3, then at 4 and 6, then at 8; local from 11 on: each third call, then each second one.
        assert "".join(kinds) == ".eeececec" + "c" + "ccc" + "c.c.c.c"

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_all_ranks_hold_the_same_after_a_synchronisation(self, ranks, name):
        """Bit for bit; 0/1 Adam's parameters up to rounding, because every rank subtracts what it added itself."""
        run = ranks(OPTIMIZERS[name], 3, 16)  # call 16 is a multiple of every interval
        assert len({b"".join(m.tobytes() for m in state.momentum) for state in run.states}) == 1
        spread = max(np.abs(a - b).max() for a, b in zip(run.params[0], run.params[2], strict=True))
        assert spread == 0 if name != "zero_one_adam" else 0 < spread < 1e-5

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_one_array_may_replace_a_list(self, name):
        opt, comm = OPTIMIZERS[name], LocalCommunicator.alone()
        x = draw(99, 0)[0]
        state = opt.init(x, comm)
        for step in range(8):
            x, state = opt.step(x, draw(0, step)[0], state, comm)
        assert x.shape == (40,)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_half_precision_parameters_keep_their_dtype(self, lockstep, name):
        run = Ranks(OPTIMIZERS[name], lockstep, draw(99, 0, dtype=np.float16), 2)
        for step in range(9):
            run.step([draw(rank, step, dtype=np.float16) for rank in range(2)])
        assert {p.dtype for p in run.params[0]} == {np.dtype(np.float16)}
        assert {m.dtype for m in run.states[0].momentum} == {np.dtype(np.float32)}

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_an_empty_tensor_among_others(self, ranks, name):
        run = ranks(OPTIMIZERS[name], 2, 9, shapes=[(20,), (0,), (3, 3)])
        assert [p.shape for p in run.params[0]] == [(20,), (0,), (3, 3)]

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_elements_without_gradients_drift_unless_masked(self, ranks, name):
        """The mask is needed because one bit cannot represent zero."""
        mask = np.ones(20, dtype=np.float32)
        mask[:5] = 0

        def moved(exp_avg_mask):
            base = OPTIMIZERS[name]
            opt = type(base)(
                **{
                    **{field: getattr(base, field) for field in base.__dataclass_fields__},
                    "weight_decay": 0.0,
                    "exp_avg_mask": exp_avg_mask,
                }
            )
            run = ranks(opt, 2, shapes=[(20,)])
            start = run.params[0][0][:5].copy()
            for step in range(12):
                run.step([[draw(rank, step, [(20,)])[0] * mask] for rank in range(2)])
            return float(np.abs(run.params[0][0][:5] - start).max())

        assert moved({"0": mask}) < 1e-6
        assert moved(None) > 1


class TestNonFinite:
    @pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
    @pytest.mark.parametrize("steps", [2, 6])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_raises_on_every_rank_and_touches_nothing(self, ranks, name, steps, value):
        run = ranks(OPTIMIZERS[name], 3, steps)
        before = run.snapshot()
        grads = [draw(rank, steps) for rank in range(3)]
        grads[1][1][2, 2] = value
        errors = run.lockstep(run.stages(grads), catch=NonFiniteError)
        assert all("rank 1 is not finite" in str(error) for error in errors)
        assert run.snapshot() == before

    @pytest.mark.parametrize("make", [onebit_adam, onebit_lamb])
    def test_skips_on_every_rank(self, ranks, make):
        run = ranks(make(0.05, freeze_step=4, nonfinite="skip"), 2, 6)
        before = run.snapshot()
        run.step([[g * (np.nan if rank else 1) for g in draw(rank, 6)] for rank in range(2)])
        for (held, *_, now), (old, *_, then) in zip(run.snapshot(), before, strict=True):
            assert held == old
            assert now == (then[0], then[1], 1)

    def test_a_bad_value_in_a_local_step_is_found_at_the_next_synchronisation(self, ranks):
        run = ranks(OPTIMIZERS["zero_one_adam"], 2, 12)
        assert run.states[0].numbers["local_step_interval"] == 4
        for step in (12, 13, 14):
            run.step([[g * (np.nan if rank else 1) for g in draw(rank, step)] for rank in range(2)])
        errors = run.lockstep(run.stages([draw(rank, 15) for rank in range(2)]), catch=NonFiniteError)
        assert all("rank 1 is not finite" in str(error) for error in errors)


class TestCheckpoint:
    @staticmethod
    def through_numpy(saved):
        file = io.BytesIO()
        np.savez(file, **saved)
        file.seek(0)
        return dict(np.load(file, allow_pickle=False))

    @pytest.mark.quick_cases(3)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("stop", [0, 1, 3, 6, 13])
    @pytest.mark.parametrize("as_list", [False, True])
    def test_goes_on_bit_for_bit(self, name, stop, as_list):
        opt = OPTIMIZERS[name]
        kept = {}

        def rank_main(comm):
            params = draw(99, 0)
            state = opt.init(params, comm)
            for step in range(stop):
                params, state = opt.step(params, draw(comm.rank, step), state, comm)
            kept[comm.rank] = self.through_numpy(opt.state_dict(state))
            saved = [kept[comm.rank]] if as_list else kept[comm.rank]
            loaded = opt.load_state_dict(saved, params, comm)
            assert snapshot(params, loaded) == snapshot(params, state)
            ends = []
            for each in (state, loaded):
                p, s = params, each
                for step in range(stop, stop + 5):
                    p, s = opt.step(p, draw(comm.rank, step), s, comm)
                ends.append(snapshot(p, s))
            assert ends[0] == ends[1]
            return s.stage

        last = LAST[name] if stop + 5 > 6 else None
        assert set(run_local(2, rank_main)) <= {last or "warmup", LAST[name]}

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_errors_that_deepspeed_drops_on_loading_change_the_run(self, name):
        opt = OPTIMIZERS[name]

        def rank_main(comm):
            params = draw(99, 0)
            state = opt.init(params, comm)
            for step in range(13):
                params, state = opt.step(params, draw(comm.rank, step), state, comm)
            saved = opt.state_dict(state)
            dropped = {k: np.zeros_like(v) if "_error." in k else v for k, v in saved.items()}
            del dropped["digests"]
            forgetful = opt.load_state_dict(dropped, params, comm)
            ends = []
            for each in (state, forgetful):
                p, s = params, each
                for step in range(13, 16):
                    p, s = opt.step(p, draw(comm.rank, step), s, comm)
                ends.append(p[0].tobytes())
            return ends[0] != ends[1]

        assert run_local(2, rank_main) == [True, True]

    @pytest.mark.parametrize("as_list", [False, True])
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_another_number_of_ranks_is_refused(self, ranks, name, as_list):
        opt = OPTIMIZERS[name]
        run = ranks(opt, 2, 8)
        saved = [opt.state_dict(state) for state in run.states]

        def rank_main(comm):
            with pytest.raises((ValueError, MismatchError)) as caught:
                opt.load_state_dict(saved if as_list else saved[comm.rank % 2], draw(99, 0), comm)
            return str(caught.value)

        texts = run_local(3, rank_main)
        if as_list:
            assert all("saved comes from another number of ranks; expected 3" in text for text in texts)
        else:
            assert all("of 2; this is rank" in text for text in texts)


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "arguments", "text"),
        [
            (onebit_adam, {"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
            (onebit_adam, {"betas": (0.9,)}, "expected two numbers"),
            (onebit_adam, {"eps": 0.0}, "eps is 0.0; expected a number > 0"),
            (onebit_adam, {"freeze_step": 2.5}, "freeze_step is 2.5; expected an integer, at least 0"),
            (onebit_adam, {"freeze_step": -1}, "freeze_step is -1"),
            (onebit_adam, {"weight_decay": -0.1}, "weight_decay is -0.1"),
            (zero_one_adam, {"var_freeze_step": True}, "var_freeze_step is True"),
            (
                zero_one_adam,
                {"var_update_scaler": 0},
                "var_update_scaler is 0; expected an integer, at least 1",
            ),
            (zero_one_adam, {"local_step_scaler": 0}, "local_step_scaler is 0"),
            (zero_one_adam, {"local_step_clipper": 0}, "local_step_clipper is 0"),
            (onebit_lamb, {"coeff_beta": 1.0}, "coeff_beta is 1.0"),
            (onebit_lamb, {"factor_threshold": 1.0}, "factor_threshold is 1.0"),
            (onebit_lamb, {"min_coeff": 3.0, "max_coeff": 2.0}, "min_coeff is 3.0 and max_coeff is 2.0"),
            (onebit_lamb, {"factor_min": -1.0}, "factor_min is -1.0"),
            (deepspeed.ZeroOneAdam, {"nonfinite": "skip"}, "a rank that steps alone cannot agree"),
            (deepspeed.OnebitAdam, {"clip_norm": 1.0}, "clip_norm is 1.0; expected None"),
        ],
    )
    def test_arguments(self, make, arguments, text):
        with pytest.raises(ValueError, match=text):
            make(learning_rate=0.1, **arguments)

    @pytest.mark.parametrize("make", [onebit_adam, zero_one_adam, onebit_lamb])
    def test_options_that_deepspeed_never_uses_are_not_accepted(self, make):
        for key in ("bias_correction", "max_grad_norm", "eps_inside_sqrt", "amsgrad", "cuda_aware"):
            with pytest.raises(TypeError, match=key):
                make(0.1, **{key: False})

    def test_betas_from_json_may_be_a_list(self):
        assert onebit_adam(0.1, betas=[0.8, 0.99]).betas == (0.8, 0.99)

    @pytest.mark.parametrize(
        ("mask", "text"),
        [
            ({"1": np.ones(3)}, "a name in exp_avg_mask is '1'; expected one of 0"),
            ({"0": np.ones(4)}, r"shape of exp_avg_mask\['0'\] is \(4,\); expected \(3,\)"),
        ],
    )
    def test_masks(self, mask, text):
        with pytest.raises(ValueError, match=text):
            onebit_adam(0.1, exp_avg_mask=mask).init(np.ones(3), LocalCommunicator.alone())

    def test_shapes_of_gradients(self, ranks):
        run = ranks(onebit_adam(0.1), 1)
        with pytest.raises(ValueError, match="grads has 1 arrays; params has 3"):
            next(run.opt.stages(run.params[0], [np.ones(2)], run.states[0]))

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_prepare_and_apply_are_refused(self, ranks, name):
        run = ranks(OPTIMIZERS[name], 1)
        with pytest.raises(TypeError, match="has no prepare; drive stages"):
            run.opt.prepare(draw(0, 0), run.states[0])
        with pytest.raises(TypeError, match="has no apply; drive stages"):
            run.opt.apply(run.params[0], None, run.states[0])

    def test_a_momentum_of_zero_has_no_scale(self, ranks):
        run = ranks(onebit_lamb(0.1, freeze_step=3), 2, 2)
        zero = [[draw(rank, 9)[0], draw(rank, 9)[1], np.zeros(3, dtype=np.float32)] for rank in range(2)]
        run = ranks(onebit_lamb(0.1, freeze_step=2), 2)
        run.step(zero)
        errors = run.lockstep(run.stages(zero), catch=ValueError)
        assert all("the momentum of '2' is zero at the freeze, in call 2" in str(e) for e in errors)

    def test_a_zero_sum_of_rates_is_refused(self, ranks):
        opt = zero_one_adam(lambda completed: 0.1 if completed < 4 else 0.0, var_freeze_step=2)
        run = ranks(opt, 2, 4)
        assert run.states[0].stage == "local"
        errors = run.lockstep(run.stages([draw(rank, 4) for rank in range(2)]), catch=ValueError)
        assert all("learning_rate was 0 in all steps that call 5 synchronises" in str(e) for e in errors)

    def test_ranks_with_other_options_do_not_start(self):
        def rank_main(comm):
            with pytest.raises(MismatchError, match="freeze_step"):
                onebit_adam(0.1, freeze_step=10 + comm.rank).init(np.ones(3), comm)

        run_local(2, rank_main)


def test_groups_have_their_own_decay_and_rate():
    opt = onebit_adam(
        0.1, weight_decay=0.5, groups=(qcomp.Group("b*", weight_decay=0.0, learning_rate_factor=0.0),)
    )
    comm = LocalCommunicator.alone()
    params = [np.ones(3), np.ones(3)]
    state = opt.init(params, comm, names=["a", "b"])
    for _ in range(2):
        params, state = opt.step(params, [np.zeros(3), np.ones(3)], state, comm)
    assert params[0].tolist() == [0.95] * 3
    assert params[1].tolist() == [1.0] * 3


PACKAGE = Path(deepspeed.__file__).parents[2]
MODULES = sorted((PACKAGE / "compat").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_it_is_as_pure_as_the_core(path):
    """It imports only the core, itself and the standard library; no array library and no communicator."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name in PURE for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module in PURE or node.module.startswith(("qcomp.core.", "qcomp.compat"))
