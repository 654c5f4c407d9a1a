"""Replicas under torchft are killed or stopped: the others continue, and a replica that returns gets all state."""

import json
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
os.environ.setdefault("RUST_LOG", "error")  # torchft reads it at import
pytest.importorskip("torchft", reason="it is for Linux only")

import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

import qcomp
import qcomp.torch
import qcomp.torch.ft
from qcomp.testing.means import owed
from tests.conftest import started_fork_server

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated"),  # raised in torchft
    pytest.mark.filterwarnings("ignore:a state of . ranks resumes with"),
]

HEAD = """
import hashlib, json, logging, os, pickle, signal, threading, time, warnings
from datetime import timedelta
import torch, torch.distributed as dist
warnings.filterwarnings("ignore", "The 'warn' method is deprecated")
warnings.filterwarnings("ignore", "a state of . ranks resumes with")
logging.disable()
import torchft, qcomp, qcomp.torch.ft

me = int(os.environ["RANK"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
job = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
job.set_timeout(timedelta(seconds=60))
if me == 3:
    job.wait([COMES_AFTER])  # it replaces rank 1
own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = qcomp.torch.ft.ProcessGroup(timeout=20, silence=1)
manager = torchft.Manager(
    pg=group, load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False, rank=0, world_size=1,
    timeout=timedelta(seconds=20), quorum_timeout=timedelta(seconds=30), store_addr="127.0.0.1", store_port=own.port,
    lighthouse_addr=LIGHTHOUSE, replica_id=f"replica{me}", hostname="127.0.0.1", max_retries=10,
)
loaded = []
manager.register_state_dict_fn("extra", loaded.append, lambda: f"of {me}")
torch.manual_seed(me)  # so all but one replica begin with the parameters of another

def strike():
    job.set("pid", str(os.getpid()))
    job.set("struck", b"")
    os.kill(os.getpid(), getattr(signal, SIGNAL))

begin, left, met_at = qcomp.comm.TorchCommunicator._begin, [0], {}

def counted(self, *args, **kwargs):
    pending = begin(self, *args, **kwargs)
    left[0] -= 1
    if not left[0]:
        strike()
    return pending

def is_struck():
    # Strike this replica once three have taken a few steps together: now, or in one of the next exchanges.
    step = optimizer.state.step
    together = step - met_at.setdefault(group.quorum, step)
    if me == 1 and group.comm.size == 3 and step >= 7 and together >= 3 and not job.check(["struck"]):
        if IN_EXCHANGE is None:
            strike()
        else:
            left[0] = left[0] or IN_EXCHANGE
            type(group.comm)._begin = counted

"""
STEPS = """
model = torch.nn.Linear(40, 30)
inner = qcomp.torch.OneBitAdam(
    model.parameters(), lr=1e-2, betas=(0.9, 0.9), freeze=4, exact=None, compressor=qcomp.ScaledSign(32),
    comm=qcomp.comm.LocalCommunicator.alone(),
)
optimizer = qcomp.torch.ft.Elastic(inner, manager, group, **SETTINGS)

def note(event, **more):
    state, params = optimizer.state, [p.detach().numpy() for p in model.parameters()]
    digest = hashlib.sha256(b"".join(p.tobytes() for p in params)).hexdigest()
    line = {"event": event, "replica": me, "quorum": group.quorum, "step": state.step, "hash": digest, **more}
    print(json.dumps(line), flush=True)
    exchange = state.exchange._replace(
        worker=tuple(x.numpy().copy() for x in state.exchange.worker),
        server=tuple(x.numpy().copy() for x in state.exchange.server),
    )
    with open(f"{FOLDER}/{event} {me} {group.quorum} {state.step}", "wb") as file:
        pickle.dump((state.rank, exchange), file)

def gradients():
    draws = torch.Generator().manual_seed(1000 * me + optimizer.state.step)
    x = torch.randn(8, 40, generator=draws)
    (model(x) - x[:, :30].flip(1)).square().mean().backward()

met, stop = -1, None
while stop is None or optimizer.state.step < stop:
    optimizer.zero_grad()
    if group.quorum != met:
        met = group.quorum
        note("met", size=group.comm.size, report=optimizer.report)
        if job.check(["struck"]):
            if group.comm.size == 2:
                job.set("two are left", b"")
            if optimizer.report["joined_ranks"]:
                stop = optimizer.state.step + 6
    gradients()
    is_struck()
    if SIGNAL == "SIGSTOP" and me == 0 and group.comm.size == 2 and job.check(["struck"]):
        os.kill(int(job.get("pid")), signal.SIGCONT)
    done = optimizer.step()
    note("step" if done else "failed")
print(json.dumps({"event": "end", "loaded": loaded, "commits": manager.current_step()}), flush=True)
"""
ROUNDS = """
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
loop = qcomp.OuterLoop(every=3, warmup=2, compressor=qcomp.ScaledSign(32), exact=None)
optimizer = qcomp.torch.ft.ElasticOuterLoop(model, inner, loop, manager, group)

def note(event, **more):
    shared = optimizer.shared_parameters().values()
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in shared)).hexdigest()
    inner_steps = {int(state["step"]) for state in inner.state.values()} | {int(model[1].num_batches_tracked)}
    step = optimizer.state.step
    assert inner_steps <= {step}, (inner_steps, step)
    line = {"event": event, "replica": me, "quorum": group.quorum, "step": step, "hash": digest, **more}
    print(json.dumps(line), flush=True)

met, stop = -1, None

def look():
    global met, stop
    if group.quorum == met:
        return
    met = group.quorum
    note("met", size=group.comm.size, report=optimizer.report)
    if job.check(["struck"]) and group.comm.size == 2:
        job.set("two are left", b"")
    if optimizer.report.get("joined_ranks") and job.check(["two are left"]):  # not one that has started late
        stop = optimizer.state.step + 6

while stop is None or optimizer.state.step < stop:
    optimizer.zero_grad()
    look()
    draws = torch.Generator().manual_seed(1000 * me + optimizer.state.step)
    x = torch.randn(8, 40, generator=draws)
    (model(x) - x[:, :30].flip(1)).square().mean().backward()
    is_struck()
    note("step" if optimizer.step() else "failed")
    look()
print(json.dumps({"event": "end", "step": optimizer.state.step}), flush=True)
"""


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    with started_fork_server(tmp_path_factory.mktemp("ranks"), "torchft", "qcomp.torch.ft") as server:
        yield server


@pytest.fixture
def lighthouse():
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=30_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1_000,
    )
    yield server
    server.shutdown()


def address(lighthouse):
    return "http://127.0.0.1:" + lighthouse.address().rsplit(":", 1)[1]


@pytest.fixture
def diaries(torch_ranks, lighthouse, tmp_path):
    """Train three replicas, one of which is killed or stopped; return the diary of each."""

    def run(n, *, signal="SIGKILL", comes_after="two are left", in_exchange=None, script=STEPS, **settings):
        head = (
            f"LIGHTHOUSE, FOLDER, SETTINGS = {address(lighthouse)!r}, {str(tmp_path)!r}, {settings!r}\n"
            f"SIGNAL, IN_EXCHANGE, COMES_AFTER = {signal!r}, {in_exchange!r}, {comes_after!r}\n"
        )
        ranks = torch_ranks(n, head + HEAD + script, timeout=60, check=False)
        expected = [-9 if signal == "SIGKILL" and rank == 1 else 0 for rank in range(n)]
        assert [rank.status for rank in ranks] == expected, [rank.err[-2000:] for rank in ranks]
        return [[json.loads(line) for line in rank.out.splitlines()] for rank in ranks]

    return run


def lines(diaries, *events):
    return [line for diary in diaries for line in diary if line["event"] in events]


def require_equal(diaries):
    """Check that in each step of each quorum all replicas have the same parameters, in several steps and quorums."""
    hashes = defaultdict(list)
    for line in lines(diaries, "met", "step"):
        hashes[line["event"], line["quorum"], line["step"]].append(line["hash"])
    assert all(len(set(found)) == 1 for found in hashes.values())
    assert len({found[0] for found in hashes.values()}) > 12
    assert sum(len(found) == 3 for found in hashes.values()) > 8


def require_same_sum(folder, diaries, before, after, lost):
    """Check that replicas now owe what those of the quorum before owed in that step, except for the lost ones."""
    met = [line for line in lines(diaries, "met") if line["quorum"] == after]
    step = met[0]["step"]
    old, new = {}, {}
    for replica in range(len(diaries)):
        for event in ("met", "step"):
            path = folder / f"{event} {replica} {before} {step}"
            if path.exists():
                old[replica] = pickle.loads(path.read_bytes())
        path = folder / f"met {replica} {after} {step}"
        if path.exists():
            new[replica] = pickle.loads(path.read_bytes())
    assert len(old) == 3
    assert len(new) == met[0]["size"]
    mean = qcomp.CompressedMean(qcomp.ScaledSign(32))
    shapes = [np.zeros((30, 40)), np.zeros(30)]

    def total(states, factor):
        kept = [
            exchange._replace(
                worker=tuple(factor(replica) * x.astype(np.float64) for x in exchange.worker),
                server=tuple(factor(replica) * x.astype(np.float64) for x in exchange.server),
            )
            for replica, (_, exchange) in sorted(states.items(), key=lambda item: item[1][0])
        ]
        return np.concatenate([np.ravel(x) for x in owed(mean, kept, shapes)])

    whole = total(old, lambda replica: 1.0)
    expected = total(old, lambda replica: float(replica not in lost))
    found = total(new, lambda replica: 1.0)
    most = np.abs(whole).max()
    assert most > 1e-4
    assert np.abs(found - expected).max() <= 1e-5 * most
    if lost:
        assert np.abs(whole - expected).max() > 1e-2 * most


def quorums(diaries):
    """Return the quorums in which replicas met, in order, each with its size and report."""
    found = {}
    for line in lines(diaries, "met"):
        assert found.setdefault(line["quorum"], line)["report"] == line["report"]
    return [found[quorum] for quorum in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "in_exchange"),
    [
        pytest.param({}, None, id="drop"),
        pytest.param({"lost": "restore", "every": 2}, None, id="restore", marks=pytest.mark.slow),
        *(
            pytest.param({}, exchange, id=f"in exchange {exchange}", marks=pytest.mark.slow)
            for exchange in (1, 4)
        ),
    ],
)
def test_one_replica_is_killed_and_another_joins(diaries, tmp_path, settings, in_exchange):
    found = diaries(4, in_exchange=in_exchange, **settings)
    require_equal(found)
    *_, whole, rest, again = quorums(found)
    assert [q["size"] for q in (whole, rest, again)] == [3, 2, 3]
    restores = bool(settings)
    report = rest["report"]
    assert (report["dropped_ranks"], report["restored_ranks"]) == (not restores, restores)
    assert report["repeated_steps"] <= (3 if restores else 1)
    assert (again["report"]["joined_ranks"], again["report"]["dropped_ranks"]) == (1, 0)
    if in_exchange is None:
        assert lines(found, "failed")
        require_same_sum(tmp_path, found, whole["quorum"], rest["quorum"], [] if restores else [1])
    ends = [diary[-1] for number, diary in enumerate(found) if number != 1]
    assert {end["commits"] for end in ends} == {again["step"] + 6}
    assert ends[2]["loaded"][-1] in ("of 0", "of 2")  # other objects registered with the manager heal too


@pytest.mark.slow
@pytest.mark.parametrize("in_exchange", [None, 2, 5])
def test_a_replica_in_an_outer_loop_is_killed_and_another_joins(diaries, in_exchange):
    """Inner states and buffers are those of the step on all replicas, and the shared parameters are the same."""
    found = diaries(4, in_exchange=in_exchange, script=ROUNDS)
    hashes = defaultdict(set)
    for line in lines(found, "step"):
        hashes[line["quorum"], line["step"]].add(line["hash"])
    assert all(len(shared) == 1 for shared in hashes.values())
    assert len(set.union(*hashes.values())) > 4
    *_, whole, rest, again = quorums(found)
    assert [q["size"] for q in (whole, rest, again)] == [3, 2, 3]
    assert (rest["report"]["dropped_ranks"], rest["report"]["joined_ranks"]) == (1, 0)
    assert (again["report"]["joined_ranks"], again["report"]["dropped_ranks"]) == (1, 0)
    assert {diary[-1]["step"] for number, diary in enumerate(found) if number != 1} == {again["step"] + 6}


@pytest.mark.slow
def test_a_new_replica_joins_before_the_quorum_notices_the_death(diaries, tmp_path):
    """The lost replica and the new one are members of two consecutive quorums."""
    found = diaries(4, comes_after="struck", lost="drop")
    require_equal(found)
    before, *_, last = quorums(found)[-2:]
    assert (before["size"], last["size"]) == (3, 3)
    assert (last["report"]["joined_ranks"], last["report"]["dropped_ranks"]) == (1, 1)
    require_same_sum(tmp_path, found, before["quorum"], last["quorum"], [1])


@pytest.mark.slow
def test_a_stopped_replica_rejoins_as_a_new_one(diaries, tmp_path):
    """Meanwhile the others have continued without what it owed, so it must not bring that back."""
    found = diaries(3, signal="SIGSTOP")
    require_equal(found)
    met = quorums(found)
    assert met[-1]["size"] == 3
    assert met[-1]["report"]["joined_ranks"] == 1
    (rest, whole) = next((b, a) for a, b in pairwise(met) if (a["size"], b["size"]) == (3, 2))
    assert rest["report"]["dropped_ranks"] == 1
    require_same_sum(tmp_path, found, whole["quorum"], rest["quorum"], [1])


class Alone:
    """One replica in this process."""

    def __init__(self, lighthouse_address, *, min_replicas=1, use_async_quorum=False, lr=0.1):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.group = qcomp.torch.ft.ProcessGroup(timeout=10)
        self.manager = torchft.Manager(
            pg=self.group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=min_replicas,
            use_async_quorum=use_async_quorum,
            timeout=timedelta(seconds=10),
            quorum_timeout=timedelta(seconds=10),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=lighthouse_address,
            replica_id="alone",
            hostname="127.0.0.1",
        )
        self.model, self.inner = model_and_optimizer(lr)


def model_and_optimizer(lr=0.1, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 10)
    comm = qcomp.comm.LocalCommunicator.alone()
    return model, qcomp.torch.OneBitAdam(
        model.parameters(), lr=lr, freeze=3, exact=None, **{"comm": comm, **more}
    )


@pytest.fixture
def alone():
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, quorum_tick_ms=10)
    made = []

    def make(**settings):
        made.append(Alone(address(server), **settings))
        return made[-1]

    yield make
    for one in made:
        one.manager.shutdown(wait=False)
        one.group.shutdown()
    server.shutdown()


@pytest.mark.filterwarnings("ignore:the variance of OneBitAdam no longer fits")
class TestAlone:
    def test_a_lone_replica_makes_the_steps_of_the_optimizer(self, alone):
        one = alone()
        optimizer = qcomp.torch.ft.Elastic(one.inner, one.manager, one.group)
        model, inner = model_and_optimizer()
        for step in range(6):
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            inner.zero_grad()
            for each in (one.model, model):
                each(x).square().sum().backward()
            rate = 0.1 / (1 + step)
            for group in (*optimizer.optimizer.param_groups, *inner.param_groups):
                group["lr"] = rate
            assert optimizer.step() is True
            inner.step()
            assert all(
                torch.equal(p, q) for p, q in zip(one.model.parameters(), model.parameters(), strict=True)
            )
            assert optimizer.state.step == one.manager.current_step() == step + 1
        assert optimizer.state.stage == "compressed"
        saved, expected = one.inner.state_dict(), inner.state_dict()
        assert all(
            torch.equal(saved["state"][0]["shared"][0][kind], x)
            for kind, x in expected["state"][0]["shared"][0].items()
        )

    def test_a_step_that_is_not_committed_changes_nothing(self, alone):
        one = alone(min_replicas=2)
        optimizer = qcomp.torch.ft.Elastic(one.inner, one.manager, one.group)
        before = [p.detach().clone() for p in one.model.parameters()]
        for _ in range(2):
            optimizer.zero_grad()
            one.model(torch.ones(1, 20)).sum().backward()
            assert optimizer.step() is False
            assert optimizer.state.step == 0
            assert all(torch.equal(p, q) for p, q in zip(one.model.parameters(), before, strict=True))

    def test_a_reported_error_fails_the_step(self, alone):
        one = alone()
        optimizer = qcomp.torch.ft.Elastic(one.inner, one.manager, one.group)
        optimizer.zero_grad()
        one.model(torch.ones(1, 20)).sum().backward()
        one.manager.report_error(ValueError("of the script"))
        assert optimizer.step() is False
        assert one.group.comm is None  # the others no longer wait for it
        optimizer.zero_grad()
        one.model(torch.ones(1, 20)).sum().backward()
        assert optimizer.step() is True

    def test_a_failed_exchange_requests_a_new_quorum_of_the_same_members(self, alone):
        one = alone()
        optimizer = qcomp.torch.ft.Elastic(one.inner, one.manager, one.group)
        optimizer.zero_grad()
        one.model(torch.ones(1, 20)).sum().backward()
        one.group.comm.close()
        assert optimizer.step() is False
        assert (optimizer.state.step, one.manager.current_step()) == (0, 0)
        first = one.group.quorum
        optimizer.zero_grad()
        assert one.group.quorum > first
        one.model(torch.ones(1, 20)).sum().backward()
        assert optimizer.step() is True

    def test_steps_out_of_turn_are_refused(self, alone):
        one = alone()
        optimizer = qcomp.torch.ft.Elastic(one.inner, one.manager, one.group)
        with pytest.raises(RuntimeError, match="call zero_grad before step"):
            optimizer.step()
        optimizer.zero_grad()
        one.model(torch.ones(1, 20)).sum().backward()
        with pytest.raises(RuntimeError, match=r"call step on the qcomp\.torch\.ft\.Elastic, not on"):
            one.inner.step()
        assert optimizer.step() is True
        with pytest.raises(RuntimeError, match="call zero_grad before step"):
            optimizer.step()

    def test_a_refused_step_does_not_affect_the_next_one(self, alone):
        one = alone()
        optimizer = qcomp.torch.ft.Elastic(one.inner, one.manager, one.group)
        optimizer.zero_grad()
        one.model(torch.full((1, 20), torch.nan)).sum().backward()
        with pytest.raises(qcomp.NonFiniteError):
            optimizer.step()
        optimizer.zero_grad()
        one.model(torch.ones(1, 20)).sum().backward()
        assert optimizer.step() is True

    def test_async_quorums_are_refused(self, alone):
        one = alone(use_async_quorum=True)
        with pytest.raises(ValueError, match="manager has use_async_quorum=True; expected False"):
            qcomp.torch.ft.Elastic(one.inner, one.manager, one.group)


class TestArguments:
    MANAGER = SimpleNamespace(_use_async_quorum=False, register_state_dict_fn=lambda *_: None)

    def elastic(self, optimizer=None, group=None, **settings):
        optimizer = model_and_optimizer()[1] if optimizer is None else optimizer
        group = qcomp.torch.ft.ProcessGroup() if group is None else group
        return qcomp.torch.ft.Elastic(optimizer, self.MANAGER, group, **settings)

    def test_are_checked(self):
        assert self.elastic().state.step == 0
        with pytest.raises(TypeError, match="optimizer is SGD"):
            self.elastic(torch.optim.SGD([torch.ones(1)]))
        with pytest.raises(TypeError, match="group is 'gloo'; expected the"):
            self.elastic(group="gloo")
        with pytest.raises(ValueError, match="lost is 'keep'"):
            self.elastic(lost="keep")
        with pytest.raises(ValueError, match="every is 0"):
            self.elastic(every=0)
        model, used = model_and_optimizer()
        model(torch.ones(1, 20)).sum().backward()
        used.step()
        with pytest.raises(ValueError, match="optimizer has made 1 steps over"):
            self.elastic(used)

    @pytest.mark.parametrize("name", ["timeout", "silence"])
    def test_of_the_group_are_checked(self, name):
        with pytest.raises(ValueError, match=f"{name} is 0; expected a positive number"):
            qcomp.torch.ft.ProcessGroup(**{name: 0})

    def test_a_replica_of_several_processes_is_refused(self):
        with pytest.raises(ValueError, match="the manager has world_size=2; expected 1"):
            qcomp.torch.ft.ProcessGroup().configure("127.0.0.1:1/x", "a", 0, 1, 0, 0, 2, [0])


@pytest.mark.slow
def test_only_this_module_needs_torchft():
    code = """
import sys
sys.modules["torchft"] = None
import qcomp.torch
try:
    qcomp.torch.ft
except ImportError as error:
    print(error)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    assert done.stdout.strip() == "qcomp.torch.ft needs torchft: pip install 'qcomp[ft]'"
