"""The asynchronous outer loop around torch optimizers: it works by hooks only; ranks take turns in one thread."""

import pickle

import pytest

import qcomp
from tests.outer.mailboxes import Box

torch = pytest.importorskip("torch")
import qcomp.torch  # noqa: E402
from tests.torch_face.test_outer import backward, bits, network  # noqa: E402

LOOP = qcomp.outer.Asynchronous(
    loop=qcomp.OuterLoop(
        every=3,
        outer=qcomp.SGD(learning_rate=0.5, momentum=0.5),
        compressor=qcomp.ScaledSign(16),
        exact=qcomp.ExactBelow(10),
    ),
    quorum=2,
    grace=2.0,
    pause=0.0,
)


class Trained:
    """A training script on one rank; the outer loop adds a line to one without ranks."""

    def __init__(self, box, rank, loop=LOOP):
        self.model, self.rank, self.steps = network(), rank, 0
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(rank)  # the first rank's are shared
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.outer = qcomp.torch.AsynchronousOuterLoop(self.model, self.optimizer, loop, box)

    def step(self, weight=None):
        self.outer.weight = weight
        self.optimizer.zero_grad()
        backward(self.model, self.rank, self.steps)
        self.optimizer.step()
        self.steps += 1


def by_hand(box, rank):
    """Do the same with the loop of the core, without hooks."""
    model = network()
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.05)
    new, state = LOOP.begin([p.detach() + rank for p in params], box, names, rank=rank)
    write(params, new)
    steps = 0
    while True:
        optimizer.zero_grad()
        backward(model, rank, steps)
        optimizer.step()
        steps += 1
        weight = yield
        new, state = LOOP.step([p.detach() for p in params], state, box, weight=weight)
        if state.sent is not None and not state.sent.is_there:
            new, state = LOOP.exchange(new, state, box)
        write(params, new)
        yield model


def write(params, new):
    with torch.no_grad():
        for p, value in zip(params, new, strict=True):
            p.copy_(value)


@pytest.mark.parametrize("weigh", [False, True])
def test_it_agrees_with_the_loop_of_the_core(monkeypatch, weigh):
    box, other = Box(), Box()
    numbers = iter(range(2))
    monkeypatch.setattr("qcomp.core.outer.asynchronous.secrets.randbelow", lambda _: next(numbers))
    ranks = [Trained(box, rank) for rank in range(2)]
    hands = [by_hand(other, rank) for rank in range(2)]
    for step in range(20):
        for rank, hand in zip(ranks, hands, strict=True):
            weight = float(step + rank.rank) if weigh else None
            rank.step(weight)
            next(hand)
            model = hand.send(weight)
            assert bits(rank.model.parameters()) == bits(model.parameters())
        box.clock += 1
        other.clock += 1
    first, second = (rank.outer for rank in ranks)
    assert first.core_state.version == second.core_state.version > 3
    pairs = zip(first.shared_parameters().values(), second.shared_parameters().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert list(first.shared_parameters()) == [name for name, _ in ranks[0].model.named_parameters()]


def test_what_is_due_is_sent_in_the_same_step():
    box = Box()
    rank = Trained(box, 0)
    for _ in range(3):
        assert not box.names("sent")
        rank.step()
    assert len(box.names("sent")) == 1


def test_a_joining_rank_moves_what_the_optimizer_has_of_its_parameters():
    """Copies in the optimizer's state move with the parameters, here those of a float32 master."""

    class WithMaster(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("master", p.detach().float().clone())
                    master -= group["lr"] * p.grad.float()
                    p.data.copy_(master)

    box = Box()
    ranks = []
    for _ in range(2):
        model = torch.nn.Linear(20, 20).bfloat16()
        optimizer = WithMaster(model.parameters(), lr=0.1)
        ranks.append((model, optimizer, qcomp.torch.AsynchronousOuterLoop(model, optimizer, LOOP, box)))
    for step in range(30):
        for rank, (model, optimizer, _) in enumerate(ranks):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * rank + step)
            model(torch.randn(8, 20, generator=generator).bfloat16()).float().square().mean().backward()
            optimizer.step()
        box.clock += 1
    for model, optimizer, outer in ranks:
        assert outer.core_state.version > 4
        for p in model.parameters():
            master = optimizer.state[p]["master"]
            assert (master - p.float()).abs().max() <= 2**-7 * p.float().abs().max()
    near = zip(ranks[0][0].parameters(), ranks[1][0].parameters(), strict=True)
    assert all((a - b).abs().max() < 0.2 for a, b in near)


def test_an_error_of_the_mailbox_leaves_the_training_as_it_was():
    """The inner step is kept; what was not exchanged is exchanged later."""
    box = Box()
    ranks = [Trained(box, rank) for rank in range(2)]

    def fails(name, data):
        raise qcomp.CommunicatorError("no space left")

    works, errors = box.create, 0
    for step in range(30):
        box.create = fails if 3 < step < 12 else works
        for rank in ranks:
            try:
                rank.step()
            except qcomp.CommunicatorError:
                errors += 1
        box.clock += 1
    assert errors
    versions = [rank.outer.core_state.version for rank in ranks]
    assert min(versions) >= 3
    assert max(versions) - min(versions) <= 1


def test_what_does_not_fit_is_refused():
    box = Box()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"expected a qcomp\.outer\.Asynchronous"):
        qcomp.torch.AsynchronousOuterLoop(model, optimizer, LOOP.loop, box)
    outer = qcomp.torch.AsynchronousOuterLoop(model, optimizer, LOOP, box)
    with pytest.raises(ValueError, match="optimizer 0 has an OuterLoop already"):
        qcomp.torch.AsynchronousOuterLoop(model, optimizer, LOOP, box)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(outer)
    outer.remove()
    outer.remove()
    backward(model, 0, 0)
    optimizer.step()
    assert outer.core_state.step == 0

    def averages(comm):
        inner = qcomp.torch.CompressedSGD(model.parameters(), lr=0.1, exact=None, comm=comm)
        with pytest.raises(ValueError, match="optimizer 0 averages over 2 ranks"):
            qcomp.torch.AsynchronousOuterLoop(model, inner, LOOP, box)

    qcomp.comm.run_local(2, averages)
