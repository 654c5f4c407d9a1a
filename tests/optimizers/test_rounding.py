"""Stochastic rounding of bfloat16 parameters: enumerated, unbiased to the bit, and the same on all ranks."""

from dataclasses import replace

import numpy as np
import pytest

import qcomp
from qcomp.core.numeric.random import Key, replace_draws
from qcomp.core.optimizers import rounding
from qcomp.core.optimizers.rounding import rounded, widened
from tests.optimizers.every import EVERY, SHAPES, advance, growing

bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

KEY = Key(seed=3, step=5, tensor=9, rank=2)
NUMBERS = {
    "1": 0x3F800000,
    "just above 1": 0x3F800001,
    "a third": 0x3EAAAAAB,
    "halfway": 0xBF808000,
    "just below a power of two": 0x40FFFFFF,
    "0": 0,
    "subnormal": 0x80011234,
    "large": 0x7F7EFFFE,
}
"""The bits of some float32 numbers."""


def single(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def halves(x):
    return np.asarray(x).view(np.uint16).astype(int)


def after(x, draws):
    """Return the bits of float32 values after rounding, given the draws of each run of 128 elements."""
    with replace_draws(lambda key, block: np.reshape(draws, (block.rows, block.length))):
        (result,) = rounded([x], [np.zeros(x.shape, bfloat16)], KEY)
    return halves(result)


@pytest.mark.parametrize("bits", NUMBERS.values(), ids=NUMBERS)
def test_every_element_rounds_away_for_as_many_draws_as_its_lower_half_says(bits):
    """So the mean over all draws is the number itself: its neighbours are 2^16 units of its last bit apart."""
    runs, upper, lower = (1 << 16) // 8, bits >> 16, bits & 0xFFFF
    x = np.full(runs * 128, single(bits), np.float32)
    away = after(x, np.arange(1 << 16)) - upper
    assert set(away) <= {0, 1}
    # Each of the 16 elements that share a draw, for itself.
    assert away.reshape(runs, 16, 8).sum(axis=(0, 2)).tolist() == [lower] * 16


@pytest.mark.parametrize("draw", [0, 1, 0x8000, 0xFFFF])
def test_all_lower_halves(draw):
    """A value rounds away if and only if its lower half and its draw reach 2^16; so values of bfloat16 stay."""
    lower = np.arange(1 << 16)
    away = after(single(0x3F80 << 16 | lower), np.full((1 << 16) // 16, draw)) - 0x3F80
    own = draw + (lower // 8 % 16 << 12) & 0xFFFF
    assert (away == (lower + own >= 1 << 16)).all()
    assert not away[0]


def test_of_what_is_not_finite():
    """NaN stays NaN with any bits and draw, infinity stays; what bfloat16 has no number for becomes infinity."""
    bits = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF]
    for draw in (0, 0xFFFF):
        found = after(single(bits), np.full(8, draw)).astype(np.uint16).view(bfloat16).astype(np.float32)
        assert np.isnan(found[:4]).all()
        assert found[4:6].tolist() == [np.inf, -np.inf]
        assert found[6] == (np.inf if draw else np.float32(2.0**128 - 2.0**120))


def test_the_same_bytes_from_every_library():
    """Also compiled, with a traced step; for scalars, empty tensors, and values that processors flush to 0."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal(s).astype(np.float32) for s in ((3, 100), (), (0,))]
    tensors[0][0, :5] = np.nan, np.inf, 1e-39, -1e-42, 0
    like = [np.zeros(t.shape, bfloat16) for t in tensors]
    expected = [halves(x).tolist() for x in rounded(list(tensors), like, KEY)]
    of_torch = rounded(
        list(map(torch.tensor, tensors)), [torch.zeros(t.shape, dtype=torch.bfloat16) for t in tensors], KEY
    )
    assert [(x.view(torch.int16).numpy().view(np.uint16)).tolist() for x in of_torch] == expected
    of_jax = jax.jit(
        lambda values, step: rounded(
            list(values), list(map(jax.numpy.asarray, like)), KEY._replace(step=step)
        )
    )([jax.numpy.asarray(t) for t in tensors], jax.numpy.int32(KEY.step))
    assert [halves(x).tolist() for x in of_jax] == expected


def test_draws_differ_between_elements_tensors_and_steps_alone():
    tensors = [single(np.full(1000, 0x3F804000)) for _ in range(2)]
    like = [np.zeros(1000, bfloat16) for _ in tensors]

    def of(key):
        return [halves(x).tobytes() for x in rounded(list(tensors), like, key)]

    first, second = of(KEY)
    assert first != second
    assert {first, second}.isdisjoint(of(KEY._replace(step=6)) + of(KEY._replace(tensor=8)))
    assert of(KEY._replace(rank=0)) == [first, second]


def moved(opt, steps, value=1.0):
    """Return the mean of a thousand bfloat16 weights after some steps with gradients of 1."""
    comm, params = qcomp.comm.LocalCommunicator.alone(), np.full(1000, value, bfloat16)
    state, grads = opt.init(params, comm), np.ones(1000, bfloat16)
    for _ in range(steps):
        params, state = opt.step(params, grads, state, comm)
    return float(params.astype(np.float64).mean())


def test_weights_move_that_rest_if_rounded_to_nearest():
    """Each step rounds with a variance of at most a quarter of the last bit's square, and errors add up."""
    opt, steps, last_bit = qcomp.SGD(learning_rate=6e-4), 50, 2.0**-8
    assert moved(opt, steps) == 1
    sigma = last_bit * np.sqrt(steps * 0.25 / 1000)
    assert abs(moved(replace(opt, rounding="stochastic"), steps) - (1 - steps * 6e-4)) < 5 * sigma


def run(name, size, steps, **changes):
    """Return the parameters and states of all ranks after each step from bfloat16 parameters."""
    opt = EVERY[name].make(rounding="stochastic", **changes)

    def rank_main(comm):
        params = [np.full(shape, 1.5, bfloat16) for shape in SHAPES]
        state, found = opt.init(params, comm), []
        for step in range(steps):
            params, state = advance(opt, params, state, comm, step)
            found.append((params, state))
        return found

    return list(zip(*qcomp.comm.run_local(size, rank_main, timeout=60), strict=True))


ONE_OF_EACH = {type(entry.opt).__name__: name for name, entry in reversed(EVERY.items())}


def content(params):
    return [halves(p).tolist() for p in params]


@pytest.mark.quick_cases(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_every_optimizer_rounds_what_it_computes_in_float32(monkeypatch, name):
    """Every new value is one of the two neighbours of the one in float32; both occur, and all ranks hold the same."""
    made = []

    def watched(new, like, key, **options):
        wide, result = list(new), rounded(new, like, key, **options)
        made.append((key, wide, result))
        return result

    monkeypatch.setattr("qcomp.core.optimizers.rounding.rounded", watched)
    for of_ranks in run(name, 2, 14):
        (params, state), (others, _) = of_ranks
        assert all(p.dtype == bfloat16 for p in params)
        if not EVERY[name].opt.apart(state.stage):
            assert content(params) == content(others)
    assert len(made) == 28
    away, cut = [], []
    for _, wide, result in made:
        for x, y in zip(wide, result, strict=True):
            assert x.dtype == np.float32
            upper, lower = x.view(np.uint32) >> 16, x.view(np.uint32) & 0xFFFF
            away.append((halves(y) - upper)[lower != 0])
            cut.append(lower[lower != 0] / 65536)
    share = np.concatenate(away)
    assert set(share) == {0, 1}
    assert abs(share.mean() - np.concatenate(cut).mean()) < 0.1


@pytest.mark.filterwarnings("ignore")
def test_draws_of_their_own_would_drive_ranks_apart(monkeypatch):
    """The broken version that the test above would find."""
    monkeypatch.setattr(rounding, "SHARED_RANK", 0)
    real = Key._replace
    monkeypatch.setattr(Key, "_replace", lambda key, **parts: real(key, **{**parts, "rank": key.rank}))
    ((params, _), (others, _)) = run("Adam", 2, 1)[0]
    assert content(params) != content(others)


@pytest.mark.filterwarnings("ignore")
def test_a_saved_state_goes_on_with_the_same_draws_also_on_other_ranks():
    """The state is that of rounding to nearest, so either loads the other's."""
    opt = qcomp.Adam(learning_rate=0.01, rounding="stochastic")

    def from_start(comm, steps, params, state):
        for step in range(*steps):
            params, state = opt.step(params, growing(0, step), state, comm)
        return params, state

    def whole(comm):
        params = [np.full(shape, 1.5, bfloat16) for shape in SHAPES]
        params, state = from_start(comm, (0, 3), params, opt.init(params, comm))
        return params, opt.state_dict(state), content(from_start(comm, (3, 6), params, state)[0])

    params, saved, expected = qcomp.comm.run_local(2, whole, timeout=60)[0]

    def resumed(comm):
        return content(from_start(comm, (3, 6), params, opt.load_state_dict(saved, params, comm))[0])

    for size in (2, 3):
        assert qcomp.comm.run_local(size, resumed, timeout=60) == [expected] * size
    alone = qcomp.comm.LocalCommunicator.alone()
    with pytest.warns(UserWarning, match=r"rounding='stochastic' \(now 'nearest'\)"):
        nearest = replace(opt, rounding="nearest").load_state_dict([saved], params, alone)
    assert replace(opt, rounding="nearest").state_dict(nearest).keys() == saved.keys()


def test_the_memory_of_donated_parameters_is_used():
    opt, comm = qcomp.SGD(learning_rate=0.01, rounding="stochastic"), qcomp.comm.LocalCommunicator.alone()
    given = [np.full(300, 1.5, bfloat16), np.ones(300, np.float32)]
    grads = [np.ones_like(p) for p in given]
    kept, _ = opt.step(given, grads, opt.init(given, comm), comm)
    assert halves(given[0]).max() == halves(given[0]).min()
    donated, _ = opt.step(given, grads, opt.init(given, comm), comm, donate=True)
    assert donated[0] is given[0]
    assert [x.tobytes() for x in kept] == [x.tobytes() for x in donated]


def test_only_bfloat16_is_widened():
    params = [np.ones(3, t) for t in (bfloat16, np.float16, np.float32, np.float64)]
    assert [x.dtype.name for x in widened(params)] == ["float32", "float16", "float32", "float64"]


@pytest.mark.parametrize("value", ["up", None, True])
def test_other_settings_are_refused(value):
    with pytest.raises((ValueError, TypeError), match=r"rounding is .*; expected 'nearest' or 'stochastic'"):
        qcomp.Adam(learning_rate=0.1, rounding=value)
    if value is None:
        with pytest.raises(ValueError, match="outer has rounding='stochastic'; expected 'nearest'"):
            qcomp.OuterLoop(outer=qcomp.SGD(learning_rate=1.0, rounding="stochastic"), every=2)
