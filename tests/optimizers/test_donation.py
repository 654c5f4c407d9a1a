"""Steps that may overwrite the parameters and state passed to them."""

from itertools import chain, pairwise

import numpy as np
import pytest

import qcomp
from qcomp.core.errors import NonFiniteError

STEPS = 12
SHAPES = ((40, 5), (), (0,), (1030,), (7,))


@pytest.fixture(params=["numpy", "torch"])
def as_array(request):
    return np.asarray if request.param == "numpy" else pytest.importorskip("torch").asarray


def optimizers():
    for coupled in (False, True):
        options = {"learning_rate": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": not coupled}
        yield qcomp.Adam(**options)
        yield qcomp.OneBitAdam(**options, freeze=3, exact=None)
        yield qcomp.OneBitLamb(**options, freeze=3, exact=None)
    yield qcomp.CompressedSGD(learning_rate=0.1, momentum=0.9, exact=None)
    yield qcomp.ZeroOneAdam(learning_rate=0.1, freeze=3, exact=None)


def drawn(as_array, step):
    rng = np.random.default_rng(step)
    return [as_array(np.asarray(rng.standard_normal(shape), dtype=np.float32)) for shape in SHAPES]


def arrays_of(state):
    """Return the moments, and the arrays of the optimizer and its watch."""
    return *state.momentum, *state.variance, *chain.from_iterable(state.arrays.values())


def states(opt, as_array, *, donate):
    """Return the bytes of parameters and arrays after each of some steps, and whether they were updated in place."""
    comm = qcomp.comm.LocalCommunicator.alone()
    params = drawn(as_array, 0)
    state, found, in_place = opt.init(params, comm), [], []
    for step in range(1, STEPS + 1):
        given = [(x, np.asarray(x).copy()) for x in (*params, *arrays_of(state))]
        grads = drawn(as_array, step)
        sent = [np.asarray(g).copy() for g in grads]
        new, state = opt.step(params, grads, state, comm, donate=donate)
        assert all(np.array_equal(np.asarray(g), old) for g, old in zip(grads, sent, strict=True))
        if not donate:
            assert all(np.array_equal(np.asarray(x), old) for x, old in given)
        in_place.append(np.shares_memory(np.asarray(new[0]), np.asarray(params[0])))
        params = new
        found.append([np.asarray(x).tobytes() for x in (*params, *arrays_of(state))])
    return found, in_place


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("kernels", "as_array"),
    [
        ("pure", "numpy"),
        ("numba", "torch"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("pure", "torch"), ("numba", "numpy"))),
    ],
    indirect=True,
)
@pytest.mark.parametrize("opt", list(optimizers()), ids=lambda opt: type(opt).__name__)
def test_donation_changes_no_bit(kernels, as_array, opt):
    fresh, _ = states(opt, as_array, donate=False)
    donated, _ = states(opt, as_array, donate=True)
    assert donated == fresh
    assert all(before != after for before, after in pairwise(fresh))


@pytest.mark.parametrize(
    "opt", [qcomp.Adam(learning_rate=0.1), qcomp.OneBitAdam(learning_rate=0.1, freeze=3, exact=None)]
)
def test_kernels_write_into_donated_arrays(as_array, opt):
    pytest.importorskip("numba")
    with qcomp.backends.use("numba"):
        assert states(opt, as_array, donate=True)[1] == [True] * STEPS
        assert states(opt, as_array, donate=False)[1] == [False] * STEPS


@pytest.mark.parametrize("warm_up", [0, 4])
def test_an_error_of_the_exchange_changes_nothing(kernels, as_array, warm_up):
    opt, comm = (
        qcomp.OneBitAdam(learning_rate=0.1, freeze=2, exact=None),
        qcomp.comm.LocalCommunicator.alone(),
    )
    params = drawn(as_array, 0)
    state = opt.init(params, comm)
    for step in range(warm_up):
        params, state = opt.step(params, drawn(as_array, step), state, comm, donate=True)
    before = [
        np.asarray(x).tobytes() for x in (*params, *state.momentum, *state.variance, *state.exchange.worker)
    ]
    bad = drawn(as_array, 9)
    bad[-1][3] = np.nan
    with pytest.raises(NonFiniteError):
        opt.step(params, bad, state, comm, donate=True)
    after = [
        np.asarray(x).tobytes() for x in (*params, *state.momentum, *state.variance, *state.exchange.worker)
    ]
    assert after == before


def test_a_schedule_that_raises_changes_nothing(kernels):
    """The freeze rule calls the schedule for the next step."""
    opt = qcomp.OneBitAdam(
        learning_rate=lambda step: 0.1 if step < 2 else -1.0, freeze=qcomp.VarianceStable(), exact=None
    )
    comm = qcomp.comm.LocalCommunicator.alone()
    params = drawn(np.asarray, 0)
    state = opt.init(params, comm)
    params, state = opt.step(params, drawn(np.asarray, 1), state, comm, donate=True)
    before = [x.tobytes() for x in (*params, *state.momentum, *state.variance)]
    with pytest.raises(ValueError, match="learning_rate"):
        opt.step(params, drawn(np.asarray, 2), state, comm, donate=True)
    assert [x.tobytes() for x in (*params, *state.momentum, *state.variance)] == before


def test_autograd_sees_that_a_donated_parameter_has_changed():
    torch = pytest.importorskip("torch")
    pytest.importorskip("numba")
    opt, comm = qcomp.Adam(learning_rate=0.1), qcomp.comm.LocalCommunicator.alone()
    param = torch.ones(5, requires_grad=True)
    loss = (param * param).sum()
    with qcomp.backends.use("numba"):
        state = opt.init([param], comm)
        opt.step([param], [torch.ones(5)], state, comm, donate=True)
    assert not torch.equal(param.detach(), torch.ones(5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
