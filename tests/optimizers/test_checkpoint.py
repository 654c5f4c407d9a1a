"""Saved and loaded, a job continues as if it had never stopped; states that do not fit are refused."""

import io
from typing import ClassVar

import numpy as np
import pytest

import qcomp
from qcomp import MismatchError
from qcomp.comm import LocalCommunicator, run_local
from tests.optimizers.every import BETAS, EVERY, SHAPES, advance

NAMES = ["embedding", "layer.0/weight", "bias"]
ADAM, SGD = EVERY["Adam"].opt, EVERY["SGD"].make(exact=None)
ONE_BIT = EVERY["1-bit"].make(freeze=3, exact=qcomp.ExactBelow(20))


def through_numpy(saved: dict) -> dict:
    file = io.BytesIO()
    np.savez(file, **saved)
    file.seek(0)
    return np.load(file, allow_pickle=False)


def through_torch(saved: dict) -> dict:
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(saved: dict) -> dict:
    module = pytest.importorskip("safetensors.numpy")
    return module.load(module.save(qcomp.checkpoint.to_arrays(saved, like=np.zeros(0))))


def through_safetensors_of_torch(saved: dict) -> dict:
    module, torch = pytest.importorskip("safetensors.torch"), pytest.importorskip("torch")
    return module.load(module.save(qcomp.checkpoint.to_arrays(saved, like=torch.zeros(0))))


def through_nothing(saved: dict) -> dict:
    return dict(saved)


def to_torch(arrays: list) -> list:
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(np.array(a)) for a in arrays]


def snapshot(params: list, state) -> tuple:
    arrays = (*params, *state.momentum, *state.variance, *state.exchange.worker, *state.exchange.server)
    arrays += tuple(a for kind in sorted(state.arrays) for a in state.arrays[kind])
    scalars = (
        state.step,
        state.stage,
        state.rank,
        state.size,
        state.names,
        state.exact,
        state.history,
        state.skipped,
        repr(sorted(state.numbers.items())),  # some of these are NaN
    )
    return tuple(np.asarray(a).tobytes() for a in arrays), scalars


KINDS = {
    "numpy.savez": (through_numpy, list),
    "torch.save": (through_torch, to_torch),
    "safetensors.numpy": (through_safetensors, list),
    "safetensors.torch": (through_safetensors_of_torch, to_torch),
    "a dict": (through_nothing, list),
}


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:the variance of OneBitAdam no longer fits")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind,
            name,
            marks=[]
            if kind == "safetensors.torch" or name == "1-bit, automatic"
            else [pytest.mark.exhaustive],
        )
        for kind in KINDS
        for name in EVERY
    ],
)
def test_goes_on_bit_for_bit(grads, name, kind):
    """In every format; `test_resume_anywhere` stops in every stage."""
    opt, stop = EVERY[name].opt, 6
    through, convert = KINDS[kind]

    def rank_main(comm):
        def train(params, state, first, last):
            for step in range(first, last):
                params, state = advance(
                    opt, params, state, comm, step, grads=lambda *key: convert(grads(SHAPES, *key))
                )
            return params, state

        params = convert(grads(SHAPES, 99, 0))
        params, state = train(params, opt.init(params, comm, NAMES), 0, stop)
        saved = through(opt.state_dict(state))
        straight = train(params, state, stop, stop + 4)
        loaded = opt.load_state_dict(saved, params, comm, NAMES)
        assert snapshot(params, loaded) == snapshot(params, state)
        assert type(loaded.stage) is str
        assert {type(value) for value in (loaded.step, loaded.rank, loaded.size, loaded.skipped)} == {int}
        resumed = train(params, loaded, stop, stop + 4)
        assert snapshot(*resumed) == snapshot(*straight)

    run_local(3, rank_main, timeout=20)


class TestToArrays:
    """A dict of arrays only, for formats that store nothing else."""

    SAVED: ClassVar = {
        "schema": 1,
        "step": 2**53 + 1,
        "stage": "größe",
        "rank": 0,
        "size": 1,
        "skipped": 0,
        "history": [0.1, float("nan"), -float("inf"), 5e-324],
        "number.x": 1 / 3,
        "empty": [],
    }

    def test_scalars_are_exact_in_every_library(self, library):
        """Also in a library without float64 and int64."""
        arrays = qcomp.checkpoint.to_arrays(self.SAVED, like=library.array([0.0], np.float32))
        for key, value in self.SAVED.items():
            assert (len(arrays[key].shape), "uint8" in str(arrays[key].dtype)) == (1, True)
            assert repr(qcomp.checkpoint.plain(arrays[key])) == repr(value)

    def test_arrays_are_contiguous_copies(self, library):
        """Also for parts of one buffer and transposed arrays, which safetensors refuses or stores in another order."""
        values = np.arange(24, dtype=np.float32).reshape(4, 6)
        whole = library.array(values)
        saved = {"top": whole[:2, :], "bottom": whole[2:, :], "turned": whole.mT, "nothing": whole[:0, :]}
        arrays = qcomp.checkpoint.to_arrays(saved, like=whole)
        for key, part in saved.items():
            assert arrays[key].shape == part.shape
            assert library.numpy(arrays[key]).tobytes() == library.numpy(part).tobytes()
        if library.name == "torch":
            module = pytest.importorskip("safetensors.torch")
            with pytest.raises((RuntimeError, ValueError)):
                module.save(saved)
            assert set(module.load(module.save(arrays))) == set(saved)
        if library.name == "numpy":
            assert not any(np.shares_memory(array, whole) for array in arrays.values())
            assert all(array.flags.c_contiguous for array in arrays.values())

    def test_goes_through_every_format(self, grads):
        """Arrays also replace scalars in formats that could store these."""
        opt, comm = ONE_BIT, LocalCommunicator.alone()
        (saved,) = saved_of(opt, grads, size=1)
        arrays = qcomp.checkpoint.to_arrays(saved, like=np.zeros(0))
        params = grads(SHAPES, 99, 0)
        for through in (through_numpy, through_nothing, through_safetensors):
            loaded = opt.load_state_dict(through(arrays), params, comm, NAMES)
            assert snapshot(params, loaded) == snapshot(
                params, opt.load_state_dict(saved, params, comm, NAMES)
            )


def test_residuals_are_part_of_it(grads):
    """Without them the run continues differently, so the test above would detect their loss."""
    opt = SGD

    def rank_main(comm):
        params = grads(SHAPES, 99, 0)
        state = opt.init(params, comm)
        for step in range(4):
            params, state = opt.step(params, grads(SHAPES, comm.rank, step), state, comm)
        saved = opt.state_dict(state)
        for key in saved:
            if "residual" in key:
                saved[key] = np.zeros_like(saved[key])
        del saved["digests"]
        forgetful = opt.load_state_dict(saved, params, comm)
        finals = [
            opt.step(params, grads(SHAPES, comm.rank, 4), s, comm)[0][0].tobytes() for s in (state, forgetful)
        ]
        return finals[0] != finals[1]

    assert run_local(2, rank_main) == [True, True]


def test_the_number_of_skipped_steps_is_saved(grads):
    opt, comm = qcomp.Adam(learning_rate=0.1, nonfinite="skip"), LocalCommunicator.alone()
    params = grads(SHAPES, 99, 0)
    _, state = opt.step(params, [g * np.nan for g in params], opt.init(params, comm), comm)
    loaded = opt.load_state_dict(through_numpy(opt.state_dict(state)), params, comm)
    assert (loaded.step, loaded.skipped) == (0, 1)


def saved_of(opt, grads, *, steps: int = 5, size: int = 2, names=NAMES) -> list[dict]:
    """Return the dict of every rank after some steps."""

    def rank_main(comm):
        params = grads(SHAPES, 99, 0)
        state = opt.init(params, comm, names)
        for step in range(steps):
            params, state = opt.step(params, grads(SHAPES, comm.rank, step), state, comm)
        return opt.state_dict(state)

    return run_local(size, rank_main)


def load(opt, saved: list, grads, *, shapes=SHAPES, names=NAMES, dtype=np.float32, strict=True) -> list:
    """Load on every rank; return the error of each, or None."""

    def rank_main(comm):
        try:
            opt.load_state_dict(saved[comm.rank], grads(shapes, 99, 0, dtype), comm, names, strict=strict)
        except (ValueError, MismatchError) as error:
            return error
        return None

    return run_local(len(saved), rank_main, timeout=20)


class TestContents:
    def test_is_flat_named_and_plain(self, grads):
        for rank, saved in enumerate(saved_of(ONE_BIT, grads)):
            assert saved["schema"] == 1
            assert (saved["step"], saved["stage"], saved["rank"], saved["size"]) == (5, "compressed", rank, 2)
            assert saved["skipped"] == 0
            assert saved["history"] == []
            arrays = {key: value.shape for key, value in saved.items() if hasattr(value, "shape")}
            # The first tensor is a vector among others and the third is small: only the second is compressed, and its
            # three buckets are served by ranks 0 (two of them) and 1.
            server = {0: ("@0", (32,)), 1: ("@32", (3,))}[rank]
            assert arrays == {
                **{f"momentum.{name}": shape for name, shape in zip(NAMES, SHAPES, strict=True)},
                **{f"variance.{name}": shape for name, shape in zip(NAMES, SHAPES, strict=True)},
                "worker_residual.layer.0/weight": (35,),
                f"server_residual.layer.0/weight{server[0]}": server[1],
                **{f"watched_variance.{name}": (35 if "weight" in name else 0,) for name in NAMES},
            }

    def test_in_the_warmup_there_are_no_residuals(self, grads):
        for saved in saved_of(ONE_BIT, grads, steps=2):
            assert saved["stage"] == "warmup"
            assert not [key for key in saved if "residual" in key]

    def test_the_history_of_a_freeze_rule_is_saved(self, grads):
        opt = qcomp.OneBitAdam(learning_rate=0.1, betas=(0.9, 0.9), exact=None)
        saved = saved_of(opt, grads, steps=4)
        assert len(saved[0]["history"]) == 5
        assert saved[0]["history"] == saved[1]["history"]
        assert all(isinstance(value, float) for value in saved[0]["history"])


class TestErrors:
    def test_of_another_rank(self, grads):
        errors = load(ONE_BIT, saved_of(ONE_BIT, grads)[::-1], grads)
        assert [str(e).partition(":")[0] for e in errors] == [
            "the state belongs to rank 1 of 2; this is rank 0 of 2",
            "the state belongs to rank 0 of 2; this is rank 1 of 2",
        ]

    def test_of_another_number_of_ranks(self, grads):
        errors = load(ONE_BIT, saved_of(ONE_BIT, grads)[:1], grads)
        assert "belongs to rank 0 of 2; this is rank 0 of 1" in str(errors[0])

    @pytest.mark.parametrize("steps", [2, 5])
    def test_of_another_model(self, grads, steps):
        saved = saved_of(ONE_BIT, grads, steps=steps)
        for error in load(ONE_BIT, saved, grads, shapes=[*SHAPES, (2,)], names=[*NAMES, "head"]):
            assert isinstance(error, ValueError)
            assert "it lacks 'momentum.head', 'variance.head'. It was saved" in str(error)
        for error in load(ONE_BIT, saved, grads, names=["embedding", "layer.1/weight", "bias"]):
            assert "with another model" in str(error)
            assert "momentum.layer.1/weight" in str(error)
            assert "momentum.layer.0/weight" in str(error)
        for error in load(ONE_BIT, saved, grads, shapes=[(41,), (7, 5), (3,)]):
            assert "momentum.embedding of shape (40,); expected (41,)" in str(error)
        for error in load(ONE_BIT, saved, grads, dtype=np.float64):
            assert "momentum.embedding of dtype float32; expected float64" in str(error)

    def test_of_another_optimizer(self, grads):
        for opt in (ADAM, SGD):
            for error in load(opt, saved_of(ONE_BIT, grads), grads):
                assert isinstance(error, ValueError)
                assert f"was saved by OneBitAdam; this is {type(opt).__name__}" in str(error)
        for error in load(ADAM, saved_of(ONE_BIT, grads), grads, strict=False):
            assert "stage is 'compressed'; Adam has only 'warmup'" in str(error)

    def test_of_another_bucket_size(self, grads):
        """The servers' chunks are then cut elsewhere: 24 and 11 elements instead of 32 and 3."""
        other = qcomp.OneBitAdam(
            learning_rate=0.1,
            **BETAS,
            freeze=3,
            exact=qcomp.ExactBelow(20),
            compressor=qcomp.ScaledSign(8),
        )
        for error in load(other, saved_of(ONE_BIT, grads), grads):
            assert "compressor=sign:bucket_size=16,scale=l1; this OneBitAdam has sign:bucket_size=8" in str(
                error
            )
        first, second = load(other, saved_of(ONE_BIT, grads), grads, strict=False)
        assert "server_residual.layer.0/weight@0 of shape (32,); expected (24,)" in str(first)
        assert "lacks 'server_residual.layer.0/weight@24'" in str(second)

    @pytest.mark.parametrize("change", [{"schema": 2}, {"schema": None}, {"schema": 2, "stage": None}])
    def test_of_another_schema(self, grads, change):
        saved = saved_of(ONE_BIT, grads)
        for each in saved:
            for key, value in change.items():
                each.pop(key) if value is None else each.update({key: value})
        for error in load(ONE_BIT, saved, grads):
            assert isinstance(error, ValueError)
            assert "schema" in str(error)

    def test_of_different_steps(self, grads):
        saved = [saved_of(ONE_BIT, grads, steps=steps)[rank] for rank, steps in enumerate((5, 4))]
        errors = load(ONE_BIT, saved, grads)
        assert [type(error) for error in errors] == [MismatchError] * 2
        five, four = (f"of step {step}, compressed, two_phase" for step in (5, 4))
        difference = f"checkpoint is '{five}' on rank 0, but '{four}' on rank 1"
        assert all(difference in str(error) for error in errors)

    def test_of_different_stages(self, grads):
        saved = [saved_of(ONE_BIT, grads, steps=steps)[rank] for rank, steps in enumerate((5, 2))]
        for error in load(ONE_BIT, saved, grads):
            assert isinstance(error, MismatchError)
            assert "but 'of step 2, warmup, two_phase' on rank 1" in str(error)

    def test_of_one_rank_only_is_an_error_on_all(self, grads):
        saved = saved_of(ONE_BIT, grads)
        broken, *others = load(ONE_BIT, [{**saved[0], "rank": 7}, *saved[1:]], grads)
        assert "the state belongs to rank 7" in str(broken)
        assert others
        for error in others:
            assert isinstance(error, MismatchError)
            assert "rank 0 cannot load its state: ValueError: the state belongs to rank 7" in str(error)

    def test_of_different_settings(self, grads):
        """Loading runs the handshake, like a first start."""
        saved = saved_of(ONE_BIT, grads)

        def rank_main(comm):
            opt = qcomp.OneBitAdam(
                learning_rate=0.1 + comm.rank,
                **BETAS,
                freeze=3,
                exact=qcomp.ExactBelow(20),
                compressor=qcomp.ScaledSign(16),
            )
            with pytest.raises(MismatchError, match="learning_rate"):
                opt.load_state_dict(saved[comm.rank], grads(SHAPES, 99, 0), comm, NAMES)

        run_local(2, rank_main, timeout=20)


class TestLibraries:
    def test_into_another_library(self, grads):
        """A state saved with NumPy resumes in torch."""
        torch = pytest.importorskip("torch")
        opt, comm = SGD, LocalCommunicator.alone()
        params = grads(SHAPES, 99, 0)
        state = opt.init(params, comm)
        params, state = opt.step(params, grads(SHAPES, 0, 0), state, comm)
        loaded = opt.load_state_dict(opt.state_dict(state), to_torch(params), comm)
        assert all(isinstance(m, torch.Tensor) for m in loaded.momentum)
        expected, _ = opt.step(params, grads(SHAPES, 0, 1), state, comm)
        got, _ = opt.step(to_torch(params), to_torch(grads(SHAPES, 0, 1)), loaded, comm)
        for one, other in zip(got, expected, strict=True):
            assert np.abs(one.numpy() - other).max() < 1e-5

    def test_loaded_arrays_are_not_written_to(self, grads):
        opt, comm = ONE_BIT, LocalCommunicator.alone()
        (saved,) = saved_of(opt, grads, size=1)
        before = {key: np.array(value).tobytes() for key, value in saved.items()}
        params = grads(SHAPES, 99, 0)
        state = opt.load_state_dict(saved, params, comm, NAMES)
        for step in range(3):
            params, state = opt.step(params, grads(SHAPES, 0, step), state, comm)
        assert {key: np.array(value).tobytes() for key, value in saved.items()} == before
