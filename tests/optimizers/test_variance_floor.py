"""A frozen variance has a floor: hardly active elements take no huge steps once momenta are compressed."""

import copy
import warnings
from dataclasses import fields

import numpy as np
import pytest

import qcomp
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.numeric.arrays import host_bytes
from qcomp.core.variance.arithmetic import floored
from qcomp.testing.libraries import to_numpy

SETTINGS = {"learning_rate": 0.1, "betas": (0.0, 0.9), "freeze": 1, "watch": None}
TINY = np.asarray([3.0, -1.0, 1e-4, 0.0, 2.0, 1.0, 1.0, -1.0], np.float32)


def test_the_floor_is_a_fraction_of_the_mean_for_nonzero_variances(library):
    v = np.asarray([4.0, 1e-9, 0.0, 2.0], np.float32)
    (found,) = floored([library.array(v)], [False], 0.01)
    np.testing.assert_array_equal(to_numpy(found), np.asarray([4.0, v.mean() * 0.01, 0.0, 2.0], np.float32))


@pytest.mark.filterwarnings("ignore:overflow encountered in add")
@pytest.mark.parametrize("large", [np.float32("inf"), np.float32(3e38)])
def test_an_overflow_of_the_variance_is_no_floor_for_other_elements(library, large):
    """The sum of the variance is infinite, so an infinite mean would stop every element of the tensor."""
    v = np.asarray([large, 1e-9, 0.0, large], np.float32)
    (found,) = floored([library.array(v)], [False], 0.01)
    finite = v[np.isfinite(v)].astype(np.float64)
    floor = max(np.float32(1e-9), finite.sum() * 0.01 / v.size)
    np.testing.assert_allclose(to_numpy(found), np.asarray([large, floor, 0.0, large]), rtol=1e-6)


@pytest.mark.quick_cases(6)
@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")
@pytest.mark.parametrize("kind", ["Adam", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_one_huge_gradient_stops_its_own_element_alone(kernels, kind):
    """Its square is infinite in float32, so its element rests, as it does under exact Adam."""
    settings = {"betas": (0.9, 0.9), "freeze": 5, "watch": None, "exact": None, "eps": 1e-8}
    known = {f.name for f in fields(getattr(qcomp, kind))}
    opt = getattr(qcomp, kind)(learning_rate=0.01, **{k: v for k, v in settings.items() if k in known})

    def rank_main(comm):
        params = np.linspace(-1, 1, 64, dtype=np.float32)
        state = opt.init(params, comm)
        draws = np.random.default_rng(comm.rank)
        for step in range(20):
            before, gradient = params, draws.standard_normal(64).astype(np.float32)
            if step == 1 and comm.rank == 0:
                gradient[0] = 1e20
            params, state = opt.step(params, gradient, state, comm)
        opt.load_state_dict(opt.state_dict(state), params, comm)
        return params - before

    for moved in run_local(2, rank_main):
        assert moved[0] == 0
        assert np.isfinite(moved).all()
        assert (moved[1:] != 0).all()


def test_exact_and_empty_tensors_have_none(library):
    v = [library.array(np.asarray([1.0, 1e-9], np.float32)), library.array(np.zeros(0, np.float32))]
    for found, given in zip(floored(v, [True, False], 0.01), v, strict=True):
        assert host_bytes(found) == host_bytes(given)


def after_the_freeze(kind, **changes):
    """Return how far one compressed step moves each element, in learning rates."""
    comm = LocalCommunicator.alone()
    compressor = qcomp.ScaledSign(bucket_size=8, scale="rms")
    opt = getattr(qcomp, kind)(**SETTINGS, exact=None, compressor=compressor, **changes)
    params = np.full(8, 100.0, np.float32)
    state = opt.init(params, comm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen, state = opt.step(params, TINY, state, comm)
        moved, _ = opt.step(frozen, np.abs(TINY), state, comm)
    return np.abs(moved - frozen) / 0.1


@pytest.mark.parametrize("floor", [1e-3, 0.1])
def test_no_element_moves_further_than_the_floor_allows(floor):
    """With one bit, all elements have the same size: the root of the mean square, over the root of the floor."""
    moved = after_the_freeze("OneBitAdam", variance_floor=floor)
    assert moved[2] == pytest.approx(1 / np.sqrt(floor), rel=1e-3)
    assert moved[3] == 0  # this element never had a gradient
    assert moved.max() == moved[2]


def test_without_the_floor_an_element_takes_huge_steps():
    assert after_the_freeze("OneBitAdam", variance_floor=0.0)[2] > 1e4


def in_an_exact_step_after_codes(floor):
    """Return how far 0/1 Adam moves each element in its third step, which is exact; the second was compressed."""
    comm = LocalCommunicator.alone()
    opt = qcomp.ZeroOneAdam(
        learning_rate=0.1,
        betas=(0.9, 0.9),
        exact=None,
        compressor=qcomp.ScaledSign(bucket_size=8, scale="rms"),
        variance_steps=lambda step: step != 2,
        variance_floor=floor,
    )
    params = np.full(8, 100.0, np.float32)
    state = opt.init(params, comm)
    for _ in range(2):
        params, state = opt.step(params, TINY, state, comm)
    assert state.stage == "compressed"
    moved, _ = opt.step(params, TINY, state, comm)
    return np.abs(moved - params) / 0.1


def test_the_floor_also_limits_exact_steps_of_zero_one_adam_after_compressed_ones():
    """An element's momentum stays as large as its neighbours' after a compressed step, until exact steps replace it."""
    moved = in_an_exact_step_after_codes(1e-3)
    assert moved[3] == 0
    assert 1 < moved[2] < 1 / np.sqrt(1e-3)
    assert in_an_exact_step_after_codes(0.0)[2] > 1e3


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb", "QAdam"])
def test_the_floor_holds_in_every_step_of_a_re_warm(kind):
    """The variance falls in each step, faster than the compressed momentum fades if b2 is the smaller beta."""
    comm, watch = LocalCommunicator.alone(), qcomp.VarianceWatch(rewarm_steps=20)
    opt = getattr(qcomp, kind)(**SETTINGS | {"betas": (0.9, 0.5), "watch": watch}, exact=None)
    params = np.full(8, 100.0, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = opt.init(params, comm)
        for _ in range(2):
            params, state = opt.step(params, TINY, state, comm)
    state = opt._policy._with_left(20, state)._replace(stage="rewarm")
    for _ in range(15):
        params, state = opt.step(params, TINY, state, comm)
        (v,) = state.variance
        assert v[v > 0].min() >= 0.99 * opt.variance_floor * v.mean() / 1.01
        assert v[3] == 0


def test_zero_one_adam_has_no_floor_before_compressed_steps():
    """The warm-up equals exact Adam bit for bit."""
    comm = LocalCommunicator.alone()
    results = []
    for opt in (qcomp.Adam(learning_rate=0.1), qcomp.ZeroOneAdam(learning_rate=0.1, exact=None)):
        params = np.full(8, 100.0, np.float32)
        state = opt.init(params, comm)
        for _ in range(3):
            params, state = opt.step(params, TINY, state, comm)
        results.append(params.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("floor", [-0.1, 1.5, float("nan")])
def test_a_floor_that_is_not_a_fraction_is_refused(floor):
    with pytest.raises(
        ValueError, match=r"variance_floor is .*; expected a fraction of the mean, from 0 to 1"
    ):
        qcomp.OneBitAdam(learning_rate=0.1, variance_floor=floor)


def test_units_that_are_rarely_active_do_not_disturb_a_training(lockstep):
    """Each of 32 ReLUs has 512 inputs. Their codes add up: with a floor of 0.001 the loss rose from 0.1 to 66."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    inputs, freeze = np.repeat(images / 16, 8, axis=1).astype(np.float32), 100
    start, draws = np.random.default_rng(0), [np.random.default_rng([0, rank]) for rank in range(2)]
    shapes = [(512, 32), (32, 10)]
    params = [(start.standard_normal(s) * np.sqrt(2 / s[0])).astype(np.float32) for s in shapes]
    opt = qcomp.OneBitAdam(learning_rate=3e-3, betas=(0.9, 0.95), freeze=freeze, watch=None)
    states = [opt.initial_state(params, ("hidden", "last"), rank, 2) for rank in range(2)]
    losses = []

    def gradients(of_rank):
        chosen = of_rank.integers(len(labels), size=32)
        x, y = inputs[chosen], labels[chosen]
        inside = np.maximum(x @ params[0], 0)
        scores = inside @ params[1]
        logs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        losses.append(-logs[range(32), y].mean())
        back = ((np.exp(logs) - np.eye(10)[y]) / 32).astype(np.float32)
        return [x.T @ (back @ params[1].T * (inside > 0)), inside.T @ back]

    for _ in range(160):
        stages = [opt.stages(params, gradients(d), s) for d, s in zip(draws, states, strict=True)]
        results = lockstep(stages)
        params, states = results[0][0], [state for _, state in results]
    assert max(losses[2 * freeze :]) < max(losses[2 * freeze - 40 : 2 * freeze])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb", "QAdam", "ZeroOneAdam"])
def test_a_network_with_dead_units_learns_as_with_adam(kind):
    """An ordinary convolutional network: some channels die in the warm-up, others are active only now and then."""
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("sklearn.datasets")
    torch_face = pytest.importorskip("qcomp.torch")
    images, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )
    rate = 1e-2 if kind == "OneBitLamb" else 2e-3

    def end(**settings):
        def rank_main(comm):
            model = copy.deepcopy(network)
            optimizer = getattr(torch_face, kind)(
                model.parameters(),
                lr=rate,
                exact=qcomp.ExactBelow(2000),
                comm=comm,
                **settings,
            )
            draws, losses = torch.Generator().manual_seed(comm.rank), []
            for _ in range(140):
                batch = torch.randint(0, 1500, (32,), generator=draws)
                loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return np.mean(losses[-40:])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_local(2, rank_main)[0]

    if kind == "ZeroOneAdam":
        compressed = {"betas": (0.9, 0.999)}
        always = {**compressed, "variance_steps": lambda _: True}
    else:
        compressed = {"betas": (0.9, 0.95), "freeze": 60, "watch": None}
        always = {**compressed, "freeze": 1000}
    exact = end(**always)
    assert exact < 0.25
    assert end(**compressed) < 1.5 * exact
    if kind in ("OneBitAdam", "ZeroOneAdam"):
        assert end(**compressed, variance_floor=0.0) > 10 * exact
