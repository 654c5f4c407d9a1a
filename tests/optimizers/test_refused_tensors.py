"""Parameters and gradients that cannot be averaged are refused by name before anything is sent."""

from dataclasses import replace

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.comm.local import LocalCommunicator
from tests.optimizers.every import EVERY, SHAPES

PARAMS = [np.ones((2, 3), np.float32), np.ones(4, np.float32)]
NAMES = ["layer.weight", "layer.bias"]
OPT = qcomp.OneBitAdam(learning_rate=0.1, betas=(0.9, 0.9), freeze=1, exact=None)


def step(grads, params=PARAMS, opt=OPT, names=NAMES):
    comm = LocalCommunicator.alone()
    return opt.step(params, grads, opt.init(params, comm, names), comm)


def test_a_gradient_that_is_missing():
    expected = r"grads\[1\] is None: the parameter 'layer.bias' has no gradient in this step; pass zeros"
    with pytest.raises(ValueError, match=expected):
        step([PARAMS[0], None])
    with pytest.raises(ValueError, match="grads has 1 arrays; params has 2"):
        step(PARAMS[:1])


def test_an_error_about_precision_names_the_gradient_and_not_a_residual():
    expected = r"grads\[0\], the gradient of 'layer.weight', has dtype float64, and the parameter has float32; expected"
    with pytest.raises(TypeError, match=expected):
        step([p.astype(np.float64) for p in PARAMS])
    doubles = [p.astype(np.float64) for p in PARAMS]
    with pytest.raises(TypeError, match=r"of 'layer.bias', has dtype float32, and the parameter has float64"):
        step([doubles[0], PARAMS[1]], doubles)
    with pytest.raises(TypeError, match=r"grads\[1\] has dtype int64; expected float64, float32"):
        step([PARAMS[0], np.ones(4, np.int64)])
    assert step([p.astype(np.float16) for p in PARAMS])[1].step == 1


def test_arrays_of_two_libraries():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"params\[0\] is a numpy.ndarray, params\[1\] a torch.Tensor"):
        OPT.init([PARAMS[0], torch.ones(4)], LocalCommunicator.alone())
    with pytest.raises(
        TypeError, match=r"grads\[0\], the gradient of 'layer.weight', is a torch.Tensor; expected a numpy"
    ):
        step([torch.ones(2, 3), torch.ones(4)])


def test_objects_that_are_not_arrays():
    comm = LocalCommunicator.alone()
    with pytest.raises(TypeError, match=r"params\[1\] is a float; expected an array"):
        OPT.init([PARAMS[0], 1.0], comm)
    named = dict(zip(NAMES, PARAMS, strict=True))
    for given, expected in ((named, r"list\(params.values\(\)\)"), (named.values(), r"list\(params\)")):
        with pytest.raises(TypeError, match=rf"params is a dict\w*; expected {expected}$"):
            OPT.init(given, comm)
    with pytest.raises(TypeError, match=r"grads is a dict; expected list\(grads.values\(\)\)$"):
        step(named)
    with pytest.raises(TypeError, match=r"x is a dict; expected list\(x.values\(\)\)$"):
        qcomp.comm.broadcast(named, comm)
    with pytest.raises(TypeError, match=r"params\[0\] has dtype complex64"):
        OPT.init([np.ones(3, np.complex64)], comm)


def test_a_generator_of_parameters():
    state = OPT.init(iter(PARAMS), LocalCommunicator.alone(), iter(NAMES))
    assert state.names == tuple(NAMES)
    assert [m.shape for m in state.momentum] == [(2, 3), (4,)]


def test_sparse_and_sharded_tensors():
    torch = pytest.importorskip("torch")
    with pytest.raises(
        TypeError, match=r"grads\[0\] is sparse; expected a dense array, such as grads\[0\].to_dense"
    ):
        step([torch.eye(3).to_sparse()], [torch.ones(3, 3)], names=["w"])

    class Sharded:
        device_mesh, placements = None, ()

    with pytest.raises(
        TypeError, match=r"params\[0\] is a .*Sharded, of which each rank holds a shard; expected whole"
    ):
        OPT.init([Sharded()], LocalCommunicator.alone())


@pytest.mark.parametrize("argument", ["params", "grads"])
def test_tensors_on_several_devices(argument):
    xp = pytest.importorskip("array_api_strict")

    def tensors(where):
        return [xp.ones(3), xp.ones((2, 2), device=xp.Device(where))]

    one, other = tensors("CPU_DEVICE"), tensors("device1")
    with pytest.raises(
        TypeError, match=rf"{argument}\[1\] of shape \(2, 2\) is on .*device1.*; expected it on .*CPU_DEVICE"
    ):
        step(other if argument == "grads" else one, other if argument == "params" else one, names=["b", "w"])


@pytest.mark.parametrize(
    "opt", [OPT, qcomp.Adam(learning_rate=0.1), qcomp.CompressedSGD(learning_rate=0.1, exact=None)]
)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_value_that_is_not_finite_names_gradients_and_ranks(opt, clip_norm):
    opt = replace(opt, clip_norm=clip_norm)

    def rank_main(comm):
        params, state, told = PARAMS, opt.init(PARAMS, comm, NAMES), []
        for at in range(3):
            grads = [np.full(p.shape, 0.5 + comm.rank, np.float32) for p in PARAMS]
            if at != 1 and comm.rank == 1:
                grads[1][2] = np.nan
            if at == 2 and comm.rank == 2:
                grads[0][0, 0], grads[1][0] = np.inf, np.nan
            before = [a.copy() for a in (*state.momentum, *state.exchange.worker)]
            try:
                params, state = opt.step(params, grads, state, comm)
            except qcomp.NonFiniteError as error:
                told.append(str(error))
            else:
                assert at == 1
            if at != 1:
                after = (*state.momentum, *state.exchange.worker)
                assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
        return told

    first, *others = run_local(3, rank_main, timeout=20)
    assert all(other == first for other in others)
    assert first == [
        "the gradient of 'layer.bias' on rank 1 is not finite, or too large to compress, in step 1",
        "the gradient of 'layer.bias' on rank 1; of 'layer.weight', 'layer.bias' on rank 2 is not finite, or too large "
        "to compress, in step 2",
    ]


def test_two_optimizers_of_one_job_draw_different_numbers():
    """Unless their parameters have the same names and shapes, and they have the same seed."""
    x = np.linspace(-1, 1, 64).astype(np.float32)
    opt = qcomp.CompressedSGD(
        learning_rate=1.0,
        momentum=0.0,
        compressor=qcomp.QSGD(1, 64),
        averaging=qcomp.Averaging(feedback=False),
        exact=None,
    )

    def moved(name, shape, seed=0):
        (p,), _ = step([x.reshape(shape)], [np.zeros(shape, np.float32)], replace(opt, seed=seed), [name])
        return p.tobytes()

    assert moved("a", (64,)) == moved("a", (64,))
    different = {moved("a", (64,)), moved("b", (64,)), moved("a", (8, 8)), moved("a", (64,), seed=1)}
    assert len(different) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: x.astype(">f4"),
            r"an array has dtype '>f4', in another byte order; expected .* x.astype\('float32'\)",
        ),
        (np.matrix, "a numpy.matrix, whose operators differ from an array's; expected a numpy.ndarray"),
        (np.ma.masked_array, "a numpy.MaskedArray, whose operators differ from an array's"),
    ],
    ids=["byte order", "matrix", "masked"],
)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_arrays_that_would_be_misread(make, message):
    """The bytes of the first mean other values; `*` is another product for the second; the third has a mask."""
    x = make(np.ones((4, 4), np.float32))
    for compressor in (qcomp.Identity(), qcomp.Cast("float16"), qcomp.ScaledSign()):
        with pytest.raises(TypeError, match=message):
            compressor.compress(x)
    with pytest.raises(TypeError, match=message):
        OPT.init([x], LocalCommunicator.alone())
    with pytest.raises(TypeError, match=message):
        qcomp.comm.broadcast(x, LocalCommunicator.alone())


@pytest.mark.parametrize("make", [qcomp.Adam, qcomp.Lamb, qcomp.EF21SGD])
@pytest.mark.parametrize("finite", [True, False])
def test_parameters_come_back_as_they_were_given(make, finite):
    """All parameters of a generator such as ``model.parameters()``; those of shape () as arrays, not NumPy scalars."""
    options = {"exact": None} if make is qcomp.EF21SGD else {}
    opt, comm = make(learning_rate=0.1, nonfinite="skip", **options), LocalCommunicator.alone()
    params = [np.ones((2, 2), np.float32), np.array(1.0, np.float32)]
    grads = [np.full(p.shape, 1.0 if finite else np.nan, np.float32) for p in params]
    new, state = opt.step(iter(params), iter(grads), opt.init(iter(params), comm), comm)
    assert [type(p) for p in new] == [np.ndarray] * 2
    assert [p.shape for p in new] == [(2, 2), ()]
    assert (not np.array_equal(new[1], params[1])) is finite
    again, _ = opt.step(tuple(new), tuple(grads), state, comm)
    assert len(again) == 2
    one, _ = opt.step(params[1], grads[1], opt.init(params[1], comm), comm)
    assert one.shape == ()
    assert type(one) is np.ndarray


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda shapes: [*shapes[:1], (5, 7), *shapes[2:]],
            r"params\[1\], the parameter '1', has shape \(5, 7\)",
        ),
        (
            lambda shapes: [*shapes[:2], (1,)],
            r"params\[2\], the parameter '2', has shape \(1,\); expected \(3,\)",
        ),
        (lambda shapes: shapes[:2], "params has 2 arrays; state has 3"),
        (lambda shapes: [*shapes, (4,)], "params has 4 arrays; state has 3"),
    ],
    ids=["turned", "smaller", "fewer", "more"],
)
def test_parameters_of_other_shapes_than_the_state_was_made_for(name, change, said):
    """NumPy would broadcast moments of other shapes, and kernels would read past their ends."""
    entry, comm = EVERY[name], LocalCommunicator.alone()
    opt = entry.make(exact=None)
    state = opt.init([np.ones(shape, np.float32) for shape in SHAPES], comm)
    others = [np.ones(shape, np.float32) for shape in change(SHAPES)]
    if entry.pairs:
        with pytest.raises(ValueError, match=said):
            opt.begin_epoch(others, others, state, comm)
    else:
        with pytest.raises(ValueError, match=said):
            opt.step(others, others, state, comm)


def test_names_are_strings():
    with pytest.raises(TypeError, match=r"names\[1\] is 1; expected a str"):
        OPT.init(PARAMS, LocalCommunicator.alone(), ["a", 1])


class Masked(np.ma.MaskedArray):
    """A class derived from masked arrays."""


class Matrix(np.matrix):
    """A class derived from matrices."""


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("kind", [np.ma.MaskedArray, Masked, np.matrix, Matrix])
def test_arrays_with_other_operators(kind):
    x = np.ones((2, 3), np.float32).view(kind)
    with pytest.raises(TypeError, match="whose operators differ from an array's"):
        OPT.init([x], LocalCommunicator.alone())
    with pytest.raises(TypeError, match="whose operators differ from an array's"):
        qcomp.ScaledSign().compress(x)


@pytest.mark.parametrize(
    "face",
    [qcomp.Diagnostics(OPT), qcomp.QSVRG(learning_rate=0.1, exact=None), qcomp.OuterLoop(every=2)],
    ids=lambda face: type(face).__name__,
)
def test_generators_of_parameters_are_read_once(face):
    def given():
        return iter([p.copy() for p in PARAMS])

    comm = LocalCommunicator.alone()
    if isinstance(face, qcomp.Diagnostics):
        new, *_ = face.step(given(), given(), OPT.init(given(), comm), comm)
    elif isinstance(face, qcomp.OuterLoop):
        state = face.init(given(), comm)
        new, _ = face.load_state_dict(face.state_dict(given(), state), given(), comm)
    else:
        state = face.begin_epoch(given(), given(), face.init(given(), comm), comm)
        new, _ = face.step(given(), (given(), given()), state, comm)
    assert [p.shape for p in new] == [p.shape for p in PARAMS]
