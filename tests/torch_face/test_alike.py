"""Parameters that all ranks must have alike: they become so at the start, and are compared later."""

import copy
import re
import warnings
from collections import defaultdict

import pytest
import torch

import qcomp
import qcomp.torch
from qcomp.comm import run_local
from qcomp.core.errors import MismatchError
from tests.torch_face.every import FACES

every_face = pytest.mark.parametrize("name", FACES)


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(12, 10), torch.nn.BatchNorm1d(10), torch.nn.Tanh(), torch.nn.Linear(10, 4)
        )


NETWORKS = [network(seed) for seed in range(3)]


def bits_of(tensors):
    return [x.detach().numpy().tobytes() for x in tensors]


def train(model, optimizer, comm, steps, begin=0):
    for step in range(begin, begin + steps):
        draws = torch.Generator().manual_seed(1000 * step + comm.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 12, generator=draws)).square().sum().backward()
        optimizer.step()


def face(name, model, comm, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model as small as this
        return getattr(qcomp.torch, name)(model.named_parameters(), lr=1e-3, comm=comm, **settings)


def refused(call):
    with pytest.raises(MismatchError) as error:
        call()
    return str(error.value)


@every_face
def test_the_first_rank_gives_its_parameters_to_all(name):
    def rank_main(comm, *, alike):
        model = copy.deepcopy(NETWORKS[0 if alike else comm.rank])
        optimizer = face(name, model, comm)
        begun = bits_of(model.parameters())
        train(model, optimizer, comm, 3)
        return begun, bits_of(model.parameters())

    expected = run_local(3, lambda comm: rank_main(comm, alike=True))
    assert run_local(3, lambda comm: rank_main(comm, alike=False)) == expected
    assert expected[0][0] == bits_of(NETWORKS[0].parameters())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_the_first_rank_gives_its_frozen_parameters_too(kind):
    """As in a script that seeds each rank with its number and passes all parameters of a model with a frozen layer."""

    def rank_main(comm):
        model = copy.deepcopy(NETWORKS[comm.rank])
        model[3] = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        frozen = torch.full((3, 4, 2, 2), comm.rank + 1).to(kind, memory_format=torch.channels_last)
        model[3].weight = torch.nn.Parameter(frozen, requires_grad=False)
        model.scale = torch.nn.Parameter(torch.tensor(comm.rank + 1.0), requires_grad=False)
        face("OneBitAdam", model, comm)
        return bits_of(p.float() for p in model.parameters())

    found = run_local(2, rank_main)
    assert found[0] == found[1]


def test_only_what_differs_is_sent():
    def rank_main(comm, *, changed):
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(2, 2))
        model.load_state_dict(copy.deepcopy(WIDE.state_dict()))
        with torch.no_grad():
            model[1].weight += comm.rank * changed
        before = comm.bytes_sent
        face("OneBitAdam", model, comm)
        return comm.bytes_sent - before

    alike, other = (run_local(2, lambda comm, c=c: rank_main(comm, changed=c)) for c in (0, 1))
    assert 0 < other[0] - alike[0] < 200 < 4 * 100 * 100


WIDE = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(2, 2))


@every_face
def test_without_init_sync_other_parameters_are_an_error_that_names_one(name):
    def rank_main(comm):
        model = copy.deepcopy(NETWORKS[comm.rank])
        text = refused(lambda: face(name, model, comm, init_sync=False))
        assert bits_of(model.parameters()) == bits_of(NETWORKS[comm.rank].parameters())
        return text

    texts = run_local(2, rank_main)
    assert (
        "the parameter '0.weight' of shape (10, 12) has one value on rank 0, and others on rank 1" in texts[0]
    )
    assert texts[0] == texts[1]


@pytest.mark.parametrize("difference", ["shapes", "dtypes", "names", "number"])
def test_other_models_are_an_error_and_stay_as_they_are(difference):
    def rank_main(comm):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        if comm.rank:
            model = {
                "shapes": torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 4)),
                "dtypes": copy.deepcopy(model).double(),
                "names": torch.nn.ModuleDict({"a": model[0], "b": model[1]}),
                "number": torch.nn.Sequential(torch.nn.Linear(3, 3)),
            }[difference]
        before = bits_of(model.parameters())
        text = refused(lambda: face("OneBitAdam", model, comm))
        assert bits_of(model.parameters()) == before
        return text

    texts = run_local(2, rank_main)
    assert texts[0] == texts[1]
    assert {"number": "shapes"}.get(difference, difference) in texts[0]


@every_face
@pytest.mark.parametrize("step", [0, 10])
def test_parameters_that_something_else_changes_on_one_rank_are_an_error_on_all(name, step):
    def rank_main(comm):
        model = copy.deepcopy(NETWORKS[0])
        optimizer = face(name, model, comm)
        train(model, optimizer, comm, step)
        if comm.rank == 1:
            with torch.no_grad():
                model[3].bias += 1
        before = bits_of(model.parameters())
        text = refused(lambda: train(model, optimizer, comm, 1, begin=step))
        assert (bits_of(model.parameters()), optimizer.core_state.step) == (before, step)
        return text

    texts = run_local(2, rank_main)
    assert texts[0] == texts[1]
    assert f"has changed parameters on some ranks before step {step + 1}" in texts[0]
    assert "the parameter '3.bias' of shape (4,)" in texts[0]


def test_rows_that_an_embedding_renormalises_on_each_rank_are_found():
    def rank_main(comm):
        model = torch.nn.Embedding(10, 4, max_norm=0.1)
        optimizer = face("OneBitAdam", model, comm)
        for step in range(11):
            loss = model(torch.tensor([comm.rank + 2 * (step % 3)])).sum()
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                return refused(optimizer.step)
        return None

    assert all("leave max_norm out" in text for text in run_local(2, rank_main))


def test_ranks_that_load_alike_after_making_go_on():
    def rank_main(comm):
        model = copy.deepcopy(NETWORKS[comm.rank])
        optimizer = face("OneBitAdam", model, comm)
        model.load_state_dict(NETWORKS[2].state_dict())
        train(model, optimizer, comm, 2)
        return bits_of(model.parameters())

    first, second = run_local(2, rank_main)
    assert first == second


def test_local_steps_of_zero_one_adam_are_not_compared():
    def rank_main(comm):
        model = copy.deepcopy(NETWORKS[0])
        optimizer = face("ZeroOneAdam", model, comm, freeze=3, sync_steps=qcomp.LocalSteps(4, 8), exact=None)
        train(model, optimizer, comm, 10)
        apart = bits_of(model.parameters())
        train(model, optimizer, comm, 2, begin=10)
        return apart

    first, second = run_local(2, rank_main)
    assert first != second


class TestOuterLoop:
    @staticmethod
    def begin(comm, **settings):
        model = copy.deepcopy(NETWORKS[comm.rank])
        with torch.no_grad():
            model[1].running_mean += comm.rank
            model[1].num_batches_tracked += comm.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        qcomp.torch.OuterLoop(model, optimizer, qcomp.outer.diloco(2), comm=comm, **settings)
        return model

    def test_the_first_rank_gives_parameters_and_buffers_to_all(self):
        found = run_local(2, lambda comm: bits_of(self.begin(comm).state_dict().values()))
        assert found[0] == found[1] == bits_of(NETWORKS[0].state_dict().values())

    @pytest.mark.parametrize("buffers", [True, False])
    def test_the_first_rank_gives_frozen_parameters_to_all(self, buffers):
        def rank_main(comm):
            model = copy.deepcopy(NETWORKS[comm.rank])
            model[0].requires_grad_(False)
            optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
            loop = qcomp.outer.diloco(2)
            qcomp.torch.OuterLoop(model, optimizer, loop, comm=comm, buffers=buffers)
            return bits_of(model.parameters())

        assert run_local(2, rank_main) == [bits_of(NETWORKS[0].parameters())] * 2

    def test_buffers_that_are_not_shared_stay(self):
        model = run_local(2, lambda comm: self.begin(comm, buffers=False))[1]
        assert bits_of(model.parameters()) == bits_of(NETWORKS[0].parameters())
        assert int(model[1].num_batches_tracked) == 1

    def test_without_init_sync_other_parameters_are_an_error(self):
        texts = run_local(2, lambda comm: refused(lambda: self.begin(comm, init_sync=False)))
        assert all("the parameter '0.weight' of shape (10, 12)" in text for text in texts)


class TestOtherCalls:
    @pytest.mark.parametrize("call", ["load_state_dict", "gather_states"])
    def test_a_call_that_another_rank_does_not_make_is_named(self, call):
        def rank_main(comm):
            model = copy.deepcopy(NETWORKS[0])
            optimizer = face("OneBitAdam", model, comm)
            train(model, optimizer, comm, 2)
            saved = optimizer.state_dict()
            if comm.rank:
                return refused(lambda: train(model, optimizer, comm, 1))
            calls = {"load_state_dict": lambda: optimizer.load_state_dict(saved)}
            return refused(calls.get(call, optimizer.gather_states))

        for text in run_local(2, rank_main):
            assert re.search(rf"rank 0: {call}[^:]* of OneBitAdam", text)
            assert "rank 1: step 3 (warmup) of OneBitAdam" in text

    def test_moments_that_a_script_throws_away_are_an_error(self):
        model = copy.deepcopy(NETWORKS[0])
        optimizer = face("OneBitAdam", model, None)
        optimizer.state = defaultdict(dict)
        with pytest.raises(RuntimeError, match=r"state no longer has the moments of '0\.weight'"):
            optimizer.step()

    def test_a_moment_that_a_script_replaces_is_an_error(self):
        model = copy.deepcopy(NETWORKS[0])
        optimizer = face("QAdam", model, None)
        optimizer.state[model[0].bias]["momentum"] = torch.ones(10)
        with pytest.raises(RuntimeError, match=r"state no longer has the moments of '0\.bias'"):
            optimizer.step()

    def test_what_is_no_communicator_is_an_error_that_says_what_to_pass(self):
        with pytest.raises(
            TypeError, match=r"comm is 3; expected a communicator .*TorchCommunicator\(process_group\)"
        ):
            face("OneBitAdam", copy.deepcopy(NETWORKS[0]), 3)


OF_GROUP = """
import datetime, sys
import torch, torch.distributed as dist
import qcomp, qcomp.torch
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1234))
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3], timeout=datetime.timedelta(seconds=77))]
torch.manual_seed(rank)
model = torch.nn.Linear(4, 4)
optimizer = qcomp.torch.OneBitAdam(model.parameters(), exact=None, comm=pairs[rank // 2])
assert (optimizer.comm.rank, optimizer.comm.size) == (rank % 2, 2)
assert optimizer.comm.timeout == (1234, 77)[rank // 2] or rank < 2, optimizer.comm.timeout
assert qcomp.comm.TorchCommunicator().timeout == 1234
assert qcomp.comm.TorchCommunicator(timeout=5).timeout == 5
model(torch.ones(1, 4) * rank).sum().backward()
optimizer.step()
wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
wrapped.register_comm_hook(*qcomp.integrations.ddp.hook(qcomp.ScaledSign(), wrapped, exact=None, comm=dist.group.WORLD))
wrapped(torch.ones(1, 4) * rank).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_process_groups_are_taken_with_their_timeouts(torch_ranks):
    torch_ranks(4, OF_GROUP)
