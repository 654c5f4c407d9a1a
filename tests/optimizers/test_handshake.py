"""Ranks with different settings all raise at init; the error says what differs and where."""

import functools
import json
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import MismatchError
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core import handshake
from qcomp.version import version_and_sources

BASE = qcomp.OneBitAdam(learning_rate=0.1, freeze=3, exact=None, compressor=qcomp.ScaledSign(16))
PARAMS = [np.zeros((4, 5), dtype=np.float32), np.zeros(7, dtype=np.float32)]
NAMES = ["weight", "bias"]
LOOP = qcomp.OuterLoop(every=4, compressor=qcomp.ScaledSign(16))


def start(of_rank: dict[int, dict[str, Any]], size: int = 3) -> list[str]:
    """Start the ranks, some of them with another optimizer, params or names; return the error of each."""

    def rank_main(comm):
        given = {"opt": BASE, "params": PARAMS, "names": NAMES, **of_rank.get(comm.rank, {})}
        with pytest.raises(MismatchError) as caught:
            given["opt"].init(given["params"], comm, given["names"])
        return str(caught.value)

    return run_local(size, rank_main, timeout=20)


DIFFERENCES = {
    "seed": ({"opt": replace(BASE, seed=1)}, "settings.seed is '0' on {}, but '1' on {}"),
    "rate": (
        {"opt": replace(BASE, learning_rate=0.2)},
        "settings.learning_rate is '0.1' on {}, but '0.2' on {}",
    ),
    "compressor": (
        {"opt": replace(BASE, compressor=qcomp.ScaledSign(32))},
        "settings.compressor is 'sign:bucket_size=16,scale=l1' on {}, but 'sign:bucket_size=32,scale=l1' on {}",
    ),
    "freeze": ({"opt": replace(BASE, freeze=4)}, "settings.freeze is"),
    "rule": ({"opt": replace(BASE, freeze=qcomp.VarianceStable())}, "settings.freeze is"),
    "betas": ({"opt": replace(BASE, betas=(0.9, 0.99))}, "settings.betas is"),
    "eps": ({"opt": replace(BASE, eps=1e-6)}, "settings.eps is"),
    "clip": ({"opt": replace(BASE, clip_norm=1.0)}, "settings.clip_norm is 'None' on {}, but '1.0' on {}"),
    "decay": ({"opt": replace(BASE, weight_decay=0.1)}, "settings.weight_decay is"),
    "topology": (
        {"opt": replace(BASE, averaging=qcomp.Averaging(topology="all_gather"))},
        "settings.topology is",
    ),
    "feedback": ({"opt": replace(BASE, averaging=qcomp.Averaging(feedback=False))}, "settings.feedback is"),
    "link": (
        {"opt": replace(BASE, averaging=qcomp.Averaging(link=qcomp.planning.Link(1e9)))},
        "settings.link is",
    ),
    "tensorwise": (
        {"opt": replace(BASE, averaging=qcomp.Averaging(tensorwise=True))},
        "settings.tensorwise is",
    ),
    "exact": ({"opt": replace(BASE, exact=qcomp.ExactBelow(1))}, "settings.exact is 'None' on {}, but"),
    "nonfinite": ({"opt": replace(BASE, nonfinite="skip")}, "settings.nonfinite is"),
    "optimizer": (
        {"opt": qcomp.QAdam(learning_rate=0.1, freeze=3, exact=None, compressor=qcomp.ScaledSign(16))},
        "optimizer is 'OneBitAdam' on {}, but 'QAdam' on {}",
    ),
    "schedule": (
        {"opt": replace(BASE, learning_rate=abs)},
        "settings.learning_rate is '0.1' on {}, but 'abs' on {}",
    ),
    "lambdas": (
        {"opt": replace(BASE, learning_rate=lambda step: 0.1 / (1 + step))},
        "rates",
    ),
    "names": ({"names": ["weight", "b"]}, "names[1] is 'bias' on {}, but 'b' on {}"),
    "shapes": ({"params": [np.zeros((4, 6), np.float32), PARAMS[1]]}, "shapes[0][1] is 5 on {}, but 6 on {}"),
    "dtypes": (
        {"params": [p.astype(np.float64) for p in PARAMS]},
        "dtypes[0] is 'float32' on {}, but 'float64' on {}",
    ),
    "count": ({"params": PARAMS[:1], "names": NAMES[:1]}, "names[1] is 'bias' on {}, but absent on {}"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_on_every_rank(name):
    change, message = DIFFERENCES[name]
    raised = start({2: change})
    assert len(set(raised)) == 1
    assert raised[0].startswith("the ranks were not started alike: ")
    assert message.format("ranks 0 and 1", "rank 2") in raised[0]


def test_any_rank_may_be_the_different_one():
    for odd in range(3):
        (first, *others) = start({odd: {"opt": replace(BASE, seed=7)}})
        assert set(others) == {first}
        assert f"rank {odd}" in first


def test_all_differences_are_named():
    raised = start(
        {0: {"opt": replace(BASE, seed=1)}, 1: {"opt": replace(BASE, eps=1e-3), "names": ["w", "b"]}}
    )
    assert all("names[0]" in text and "settings" in text for text in raised)


def test_the_version_is_part_of_the_handshake():
    sent = {}

    class Recorder:
        """A rank of a communicator that records what it sends."""

        def __init__(self, comm):
            self.comm, self.rank, self.size = comm, comm.rank, comm.size

        def all_gather(self, send, receive):
            sent[self.rank] = sent.get(self.rank, b"") + bytes(np.asarray(send))
            return self.comm.all_gather(send, receive)

        def all_to_all(self, send, receive):
            return self.comm.all_to_all(send, receive)

    run_local(2, lambda comm: BASE.init(PARAMS, Recorder(comm), NAMES))
    assert all(json.dumps(version_and_sources()).encode() in text for text in sent.values())


def test_another_state_of_the_same_release_is_named_on_every_rank(monkeypatch):
    """For instance on a machine that was updated a week ago."""
    own = threading.local()
    monkeypatch.setattr(handshake, "version_and_sources", lambda: own.version)

    def rank_main(comm):
        own.version = "0.1.0+77ab01c2d3e4" if comm.rank == 1 else "0.1.0+3f2a91c0d4e5"
        with pytest.raises(MismatchError) as caught:
            BASE.init(PARAMS, comm, NAMES)
        return str(caught.value)

    text = (
        "the ranks were not started alike: "
        "version is '0.1.0+3f2a91c0d4e5' on ranks 0 and 2, but '0.1.0+77ab01c2d3e4' on rank 1"
    )
    assert run_local(3, rank_main, timeout=20) == [text] * 3


@pytest.mark.parametrize("library", ["torch", "strict", "jax"])
def test_the_handshake_works_in_any_library(libraries, library):
    """Ranks of different libraries can make the handshake too."""
    own, other = libraries[library], libraries["numpy"]

    def rank_main(comm):
        lib = own if comm.rank else other
        return BASE.init([lib.array(p) for p in PARAMS], comm, NAMES).names

    assert run_local(2, rank_main, timeout=30) == [("weight", "bias")] * 2


def test_equal_schedules_in_two_processes_agree():
    """A function counts by its name, because its address differs from process to process."""

    def make():
        def schedule(step: int) -> float:
            return 0.1

        return schedule

    def rank_main(comm):
        return replace(BASE, learning_rate=make()).init(PARAMS, comm, NAMES).step

    assert run_local(2, rank_main) == [0, 0]


def test_functions_inside_other_settings_agree():
    """The repr of a functools.partial has the address of its function; a set has no order of its own."""

    def make(rank):
        def schedule(rate, step):
            return rate / (1 + step)

        names = {"b*", "bi*"} if rank else ("b*", "bi*")
        return {"learning_rate": functools.partial(schedule, 0.1), "exact": qcomp.ExactBelow(5, names)}

    def rank_main(comm):
        return replace(BASE, **make(comm.rank)).init(PARAMS, comm, NAMES).step

    assert run_local(2, rank_main) == [0, 0]
    made = [replace(BASE, **make(0)) for _ in range(2)]
    assert repr(made[0].learning_rate) != repr(made[1].learning_rate)


def test_policies_with_an_address_in_their_repr_agree():
    """The same holds for callable objects: two equal policies of a user's class."""

    class Policy:
        def __call__(self, tensors):
            return [False] * len(tensors)

    class Rule:
        def observe(self, step, norm, history, beta2):
            raise AssertionError("agreeing asks no rule")

    def rank_main(comm):
        return replace(BASE, exact=Policy(), freeze=Rule()).init(PARAMS, comm, NAMES).step

    assert run_local(2, rank_main) == [0, 0]


def differing(value: float, index: int = 1) -> list[np.ndarray]:
    """Return the parameters with one element of one of them changed."""
    params = [p.copy() for p in PARAMS]
    params[index].flat[-1] = value
    return params


class TestValues:
    def test_the_first_differing_value_is_named_with_the_ranks(self):
        raised = start({2: {"params": differing(1.0)}})
        assert len(set(raised)) == 1
        assert (
            "the parameter 'bias' of shape (7,) has one value on ranks 0 and 1, and others on rank 2"
            in raised[0]
        )
        assert "params = qcomp.comm.broadcast(params, comm)" in raised[0]
        raised = start({0: {"params": differing(1e-38, 0)}, 1: {"params": differing(2.0, 0)}})
        assert (
            "the parameter 'weight' of shape (4, 5) has one value on rank 0, and others on rank 1; rank 2"
            in raised[0]
        )

    @pytest.mark.parametrize(
        "name", ["Adam", "QAdam", "ZeroOneAdam", "OneBitLamb", "CompressedSGD", "EF21SGD", "QSVRG"]
    )
    def test_every_optimizer_compares_values(self, name):
        options = {"learning_rate": 0.1} | ({} if name == "Adam" else {"exact": None})
        options |= {"freeze": 200} if name in ("QAdam", "OneBitLamb") else {}
        opt = getattr(qcomp, name)(**options)
        raised = start({0: {"opt": opt}, 1: {"opt": opt, "params": differing(3.0)}, 2: {"opt": opt}})
        assert all(
            "the parameter 'bias' of shape (7,) has one value on ranks 0 and 2" in text for text in raised
        )

    def test_equal_values_of_all_libraries_and_layouts_are_equal(self, libraries):
        values = [np.arange(20, dtype=np.float32).reshape(4, 5), np.linspace(-1, 1, 7, dtype=np.float32)]
        names = list(libraries)
        given = {name: [libraries[name].array(v) for v in values] for name in names}

        def rank_main(comm):
            if comm.rank == len(names):
                return BASE.init(
                    [np.asfortranarray(values[0]), np.repeat(values[1], 2)[::2]], comm, NAMES
                ).step
            return BASE.init(given[names[comm.rank]], comm, NAMES).step

        assert run_local(len(names) + 1, rank_main, timeout=30) == [0] * (len(names) + 1)

    def test_values_are_compared_when_resuming(self):
        def rank_main(comm):
            params = [p + 1 for p in PARAMS]
            state = BASE.init(params, comm, NAMES)
            saved = BASE.state_dict(state)
            with pytest.raises(
                MismatchError, match=r"the parameter 'weight' of shape .* has one value on rank 0"
            ):
                BASE.load_state_dict(saved, [p + comm.rank for p in params], comm, NAMES)
            return BASE.load_state_dict(saved, params, comm, NAMES).step

        assert run_local(2, rank_main) == [0, 0]

    def test_ranks_that_step_alone_may_resume_with_different_values(self):
        opt = qcomp.ZeroOneAdam(learning_rate=0.1, freeze=2, sync_steps=qcomp.LocalSteps(1, 4), exact=None)

        def rank_main(comm):
            params, state = PARAMS, opt.init(PARAMS, comm, NAMES)
            while state.stage != "local":
                grads = [np.full(p.shape, 1.0 + comm.rank, np.float32) for p in PARAMS]
                params, state = opt.step(params, grads, state, comm)
            assert opt.load_state_dict(opt.state_dict(state), params, comm, NAMES).stage == "local"
            return params[0].tobytes()

        first, second = run_local(2, rank_main)
        assert first != second


class OfMPI:
    """What MPI.COMM_WORLD has of a communicator."""

    rank, size = 0, 1

    def __repr__(self):
        return "<mpi4py.MPI.Intracomm>"


@pytest.mark.parametrize("wrong", [OfMPI(), None, "gloo"])
@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: BASE.init(PARAMS, wrong),
        lambda wrong: BASE.step(PARAMS, PARAMS, BASE.init(PARAMS, LocalCommunicator.alone()), wrong),
        lambda wrong: BASE.load_state_dict({}, PARAMS, wrong),
        lambda wrong: qcomp.CompressedMean(qcomp.ScaledSign(16)).init(PARAMS, wrong),
        lambda wrong: LOOP.init(PARAMS, wrong),
        lambda wrong: LOOP.load_state_dict({}, PARAMS, wrong),
        lambda wrong: qcomp.comm.broadcast(PARAMS, wrong),
    ],
)
def test_what_is_no_communicator_is_named_with_those_that_are(call, wrong):
    with pytest.raises(TypeError, match=r"^comm is .*; expected a communicator of qcomp: .*MPICommunicator"):
        call(wrong)
