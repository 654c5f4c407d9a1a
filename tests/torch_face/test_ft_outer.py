"""An outer loop under torchft: a replica dies in any exchange, and the others continue as if it had died before it."""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")
os.environ.setdefault("RUST_LOG", "error")  # torchft reads it at import
pytest.importorskip("torchft", reason="it is for Linux only")

import torch

import qcomp
import qcomp.torch
import qcomp.torch.ft
from tests.torch_face.ft_threads import Lighthouse, Strike
from tests.torch_face.test_positions import Masters

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:a state of . ranks resumes with"),
]

NESTEROV = qcomp.SGD(learning_rate=0.7, momentum=0.9, nesterov=True)
LOOPS = {
    "warm-up": qcomp.OuterLoop(every=3, warmup=2, outer=NESTEROV, compressor=qcomp.ScaledSign(8), exact=None),
    "streaming": qcomp.OuterLoop(
        every=4, fragments=2, delay=1, mixing=0.5, compressor=qcomp.ScaledSign(8), exact=None
    ),
    "every step": qcomp.OuterLoop(every=1, compressor=qcomp.QSGD(7, 16), exact=None),
}


def steps_of(loop: qcomp.OuterLoop) -> int:
    """Return enough steps for two rounds and what follows them."""
    return 10 if loop.every > 1 else 3


def model_of(seed: int) -> torch.nn.Module:
    """A small network with buffers, made without torch's own generator, which threads share."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=draws))
    return model


def backward(model: torch.nn.Module, seed: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    (model(x) - x[:, :5]).square().mean().backward()


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in tensors)).hexdigest()


class Diary:
    """A replica's record of its run."""

    def __init__(self) -> None:
        self.begun = 0
        """The number of exchanges before its first step."""
        self.steps: list[tuple[int, bool]] = []
        self.shared: list[tuple[int, str]] = []
        self.reports: list[dict[str, float]] = []
        self.end, self.end_step = "", 0
        self.last = 0
        """The number of exchanges up to the last exchanging step; a replica that completes it ends."""


def trains(loop: qcomp.OuterLoop) -> Callable[[int, Any, Any], Diary]:
    """Return the main function of a replica."""

    def main(replica: int, manager: Any, group: Any) -> Diary:
        model, diary, steps = model_of(replica), Diary(), steps_of(loop)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        outer = qcomp.torch.ft.ElasticOuterLoop(model, inner, loop, manager, group)
        while outer.state.step < steps:
            outer.zero_grad()
            diary.begun = diary.begun or manager.exchanges
            before = outer.state.step
            if before == steps:
                break  # it has reached the last exchange
            backward(model, 1000 * replica + before)
            exchanges = manager.exchanges
            done = outer.step()
            if manager.exchanges > exchanges:
                diary.last = exchanges
            step = outer.state.step
            assert (step == before + 1) == done
            assert step == before + 1 or step <= before
            # Inner states and buffers are those of the step, whatever was undone.
            counts = [int(state["step"]) for state in inner.state.values()]
            assert counts == [step] * 4 if step else counts in ([], [0] * 4)
            assert int(model[1].num_batches_tracked) == step  # type: ignore[index]  # untyped here
            diary.steps.append((step, done))
            diary.shared.append((step, digest(outer.shared_parameters().values())))
            if outer.report and outer.report not in diary.reports:
                diary.reports.append(outer.report)
        diary.end_step = outer.state.step
        diary.end = digest([*model.parameters(), *model.buffers(), *inner.state_dict()["state"][0].values()])
        return diary

    return main


@cache
def run(name: str, strike: Strike | None = None, *, follows: bool = False) -> dict[int, Diary]:
    found = Lighthouse(trains(LOOPS[name]), strike, follows=follows).run(3)
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return found


def require_alike(name: str, found: dict[int, Diary]) -> None:
    """Check for each step that all replicas last shared the same."""
    last = [dict(diary.shared) for diary in found.values()]
    for step in set.intersection(*[set(shared) for shared in last]):
        assert len({shared[step] for shared in last}) == 1
    assert all(diary.end_step == steps_of(LOOPS[name]) for diary in found.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "follows", "stride"),
    [
        pytest.param("warm-up", False, 5, id="warm-up, some"),
        *(
            pytest.param(
                name,
                follows,
                2,
                id=f"{name}, {'followed' if follows else 'fewer'}",
                marks=pytest.mark.exhaustive,
            )
            for name in LOOPS
            for follows in (False, True)
        ),
    ],
)
def test_a_replica_dies_in_any_exchange(name, follows, stride):
    """Whichever of the others its last bytes reach, they end with the same bits."""
    whole = run(name)
    require_alike(name, whole)
    gone_back = cases = 0
    for exchange in range(0, whole[0].last, stride):
        victim = exchange % 3
        others = [replica for replica in range(3) if replica != victim]
        ends = []
        for reached in ([], others[:1], others[1:], others):
            found = run(name, Strike(victim, exchange, frozenset(reached)), follows=follows)
            assert set(others) <= found.keys()
            require_alike(name, found)
            if reached != others:
                ends.append([found[replica].end for replica in sorted(found)])
            for diary in found.values():
                gone_back += any(b <= a and not done for (a, _), (b, done) in pairwise(diary.steps))
            reports = [diary.reports for diary in found.values() if diary.reports]
            if exchange >= whole[0].begun and reports:
                assert reports[0][-1]["dropped_ranks"] == 1
                assert reports[0][-1]["joined_ranks"] == follows
            cases += 1
        if exchange >= whole[0].begun:
            assert ends[0] == ends[1] == ends[2]
    if stride == 2:
        assert cases > 30
        assert gone_back


@pytest.mark.slow
def test_a_replica_that_keeps_a_later_inner_state_is_found(monkeypatch):
    """The test above detects a replica that does not restore its inner state."""
    monkeypatch.setattr(qcomp.torch.ft.ElasticOuterLoop, "_restore", lambda *_: None)
    strikes = [Strike(0, exchange, frozenset([1])) for exchange in range(30)]
    found = [Lighthouse(trains(LOOPS["warm-up"]), strike, follows=False).run(3) for strike in strikes]
    assert any(isinstance(result, AssertionError) for results in found for result in results.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["warm-up", "streaming"])
def test_copies_of_parameters_follow_them(name):
    """Also where replicas go back, and in a new replica, which gets the inner state of another."""

    def main(replica: int, manager: Any, group: Any) -> int:
        model, loop = model_of(replica), LOOPS[name]
        inner = Masters(model.parameters(), lr=1e-2)
        outer = qcomp.torch.ft.ElasticOuterLoop(model, inner, loop, manager, group)
        while outer.state.step < steps_of(loop):
            outer.zero_grad()
            backward(model, 1000 * replica + outer.state.step)
            outer.step()
            masters = [state["inside"]["master"] for state in inner.state.values()]
            assert all(map(torch.equal, masters, model.parameters()))
        return len(masters)

    for exchange in (9, 14, 19):
        found = Lighthouse(main, Strike(1, exchange, frozenset([0])), follows=True).run(3)
        assert set(found.values()) == {4}


@pytest.mark.parametrize("name", LOOPS)
def test_a_lone_replica_equals_the_loop_without_torchft(name):
    model = model_of(0)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    comm = qcomp.comm.LocalCommunicator.alone()
    qcomp.torch.OuterLoop(model, inner, LOOPS[name], comm=comm)
    for step in range(steps_of(LOOPS[name])):
        inner.zero_grad()
        backward(model, step)
        inner.step()
    expected = digest([*model.parameters(), *model.buffers(), *inner.state_dict()["state"][0].values()])
    found = Lighthouse(trains(LOOPS[name]), None, follows=False).run(1)[0]
    assert found.end == expected


class TestMistakes:
    def alone(self, use: Callable[[Any, Any, Any], Any], loop: Any = LOOPS["warm-up"]) -> Any:
        def main(replica: int, manager: Any, group: Any) -> Any:
            model = model_of(replica)
            inner = torch.optim.SGD(model.parameters(), lr=1e-2)
            return (
                use(qcomp.torch.ft.ElasticOuterLoop(model, inner, loop, manager, group), model, inner)
                or "done"
            )

        return Lighthouse(main, None, follows=False).run(1)[0]

    def test_a_step_without_zero_grad(self):
        error = self.alone(lambda outer, *_: outer.step())
        assert "call zero_grad before step" in str(error)

    def test_a_step_of_the_inner_optimizer(self):
        def use(outer: Any, model: Any, inner: Any) -> None:
            outer.zero_grad()
            backward(model, 0)
            inner.step()

        assert (
            "call step on the qcomp.torch.ft.ElasticOuterLoop, not on the SGD that it was made with"
            in str(self.alone(use))
        )

    def test_a_parameter_that_the_loop_does_not_know(self):
        def use(outer: Any, model: Any, inner: Any) -> bool:
            outer.zero_grad()
            backward(model, 0)
            inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
            before = digest(model.parameters())
            with pytest.raises(ValueError, match="that the model did not have when the loop was made"):
                outer.step()
            return digest(model.parameters()) == before

        assert self.alone(use) is True

    def test_a_step_without_any_gradient(self):
        def use(outer: Any, *_: Any) -> bool:
            outer.zero_grad()
            with pytest.warns(UserWarning, match="no parameter has a gradient on this rank"):
                return outer.step()

        assert self.alone(use) is True

    def test_a_model_with_other_tensors(self):
        def use(outer: Any, model: Any, _: Any) -> bool:
            outer.zero_grad()
            model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
            backward(model, 0)
            with pytest.raises(ValueError, match="has been replaced by another tensor"):
                outer.step()
            return outer.state.step == 0

        assert self.alone(use) is True

    def test_a_gradient_that_is_not_finite(self):
        def use(outer: Any, model: Any, _: Any) -> bool:
            before = digest(model.parameters())
            outer.zero_grad()
            model[0].weight.grad = torch.full((5, 6), torch.nan)
            with pytest.raises(qcomp.NonFiniteError):
                outer.step()
            assert digest(model.parameters()) == before
            outer.zero_grad()
            backward(model, 0)
            return outer.step()

        assert self.alone(use) is True

    def test_arguments(self):
        group = qcomp.torch.ft.ProcessGroup()
        model = model_of(0)
        inner = torch.optim.SGD(model.parameters(), lr=1e-2)
        make = qcomp.torch.ft.ElasticOuterLoop
        with pytest.raises(TypeError, match="loop is 3; expected a qcomp"):
            make(model, inner, 3, None, group)
        with pytest.raises(TypeError, match="optimizer is 'adam'; expected a torch"):
            make(model, "adam", LOOPS["warm-up"], None, group)
        with pytest.raises(TypeError, match="group is 'gloo'; expected the qcomp"):
            make(model, inner, LOOPS["warm-up"], None, "gloo")
