"""Steps that send tensors in rounds have the bits of one message per phase, over every communicator."""

import pytest

import qcomp
from qcomp.core.mean import rounds

TRAINING = """
import hashlib
import warnings
import numpy as np
import qcomp
from qcomp.core.mean import rounds

warnings.filterwarnings("ignore", "the variance is frozen after")
sign, exact = qcomp.ScaledSign(bucket_size=8), qcomp.ExactBelow(30)
common = {"learning_rate": 0.01, "exact": exact}
elias, topk = qcomp.QSGD(levels=7, bucket_size=16, coding="elias"), qcomp.TopK(k=2, bucket_size=8)
optimizers = [
    qcomp.Adam(learning_rate=0.01),
    qcomp.OneBitAdam(freeze=1, **common),
    qcomp.QAdam(freeze=1, clip_norm=1.0, variance_steps=None, **common),
    qcomp.OneBitLamb(freeze=1, averaging=qcomp.Averaging("all_gather"), **common),
    qcomp.ZeroOneAdam(freeze=2, sync_steps=qcomp.LocalSteps(2, 2), **common),
    qcomp.CompressedSGD(compressor=elias, averaging=qcomp.Averaging(feedback=False), **common),
    qcomp.CompressedSGD(compressor=topk, **common),
    qcomp.EF21SGD(compressor=topk, eta=0.5, **common),
]
shapes = [(11, 3), (8, 8), (0, 4), (13, 10), (5, 5), (1, 3), (257, 1), (8, 5), (8, 9)]

def gradient(rank, step):
    rng = np.random.default_rng((rank, step))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

def held(opt, state):
    saved = opt.state_dict(state)
    return b"".join(np.asarray(saved[key]).tobytes() for key in sorted(saved))

def train(comm):
    found = []
    for opt in optimizers:
        digest, params = hashlib.sha256(), [np.ones(shape, dtype=np.float32) for shape in shapes]
        state = opt.init(params, comm)
        for step in range(4):
            params, state = opt.step(params, gradient(comm.rank, step), state, comm)
            digest.update(b"".join(p.tobytes() for p in params))
        digest.update(held(opt, state))
        found.append(digest.hexdigest()[:8])
    return f"{comm.rank} {' '.join(found)}"
"""

MPI = """
comm = qcomp.comm.world(timeout=30)
"""
GLOO = """
import os
import torch.distributed as dist

server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
comm = qcomp.comm.TorchCommunicator(timeout=30)
"""

IN_ROUNDS = """
rounds.ROUND_BYTES = 256
started = []
if comm.size > 1:
    start = type(comm).start
    type(comm).start = lambda self, request: started.append(request) or start(self, request)
line = train(comm)
assert comm.size == 1 or len(started) > 50  # else nothing was in rounds
print(line, flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=[] if n == 3 else [pytest.mark.exhaustive]) for n in (1, 2, 3, 4)]
)
def test_rounds_over_threads_mpi_and_gloo_give_the_bits_of_one_message(n, mpirun, torch_ranks, monkeypatch):
    scope = {}
    exec(TRAINING, scope)
    fused = qcomp.comm.run_local(n, scope["train"])
    monkeypatch.setattr(rounds, "ROUND_BYTES", 256)
    assert qcomp.comm.run_local(n, scope["train"]) == fused
    over_mpi = mpirun(n, ["-c", TRAINING + MPI + IN_ROUNDS])
    assert sorted(over_mpi.stdout.splitlines()) == fused
    over_gloo = torch_ranks(n, TRAINING + GLOO + IN_ROUNDS)
    assert [rank.out.splitlines() for rank in over_gloo] == [[line] for line in fused]


REFUSED = """
rounds.ROUND_BYTES = 256
opt, params = optimizers[1], [np.ones(shape, dtype=np.float32) for shape in shapes]
state = opt.init(params, comm)
params, state = opt.step(params, gradient(comm.rank, 0), state, comm)
params, state = opt.step(params, gradient(comm.rank, 1), state, comm)
before = held(opt, state)
for tensor in range(len(shapes)):
    grads = gradient(comm.rank, 2)
    if comm.rank == 1 and grads[tensor].size:
        grads[tensor].flat[0] = np.inf
    try:
        opt.step(params, grads, state, comm)
    except qcomp.NonFiniteError as error:
        blamed = f"the gradient of '{tensor}' on rank 1 is not finite"
        assert shapes[tensor][0] and blamed in str(error), error
        assert held(opt, state) == before
params, state = opt.step(params, gradient(comm.rank, 2), state, comm)
print(hashlib.sha256(b"".join(p.tobytes() for p in params)).hexdigest(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.slow), "gloo"])
def test_a_refusal_in_any_round_reaches_all_ranks_and_the_next_step_works(transport, mpirun, torch_ranks):
    code = TRAINING + {"mpi": MPI, "gloo": GLOO}[transport] + REFUSED
    if transport == "mpi":
        lines = mpirun(3, ["-c", code]).stdout.splitlines()
    else:
        lines = [rank.out.strip() for rank in torch_ranks(3, code)]
    assert len(lines) == 3
    assert len(set(lines)) == 1


LEFT = """
rounds.ROUND_BYTES = 256
opt, params = optimizers[1], [np.ones(shape, dtype=np.float32) for shape in shapes]
state = opt.init(params, comm)
if comm.rank == 1:
    # Fails after its first round was sent, as for want of memory.
    start, comm.start = comm.start, None
    def fail(request):
        if comm.bytes_sent > sent:
            raise MemoryError("no more")
        return start(request)
    comm.start, sent = fail, comm.bytes_sent
opt.step(params, gradient(comm.rank, 0), state, comm)
"""


@pytest.mark.slow
def test_a_rank_that_fails_between_two_groups_ends_the_job(mpirun):
    job = mpirun(3, ["-c", TRAINING + MPI + LEFT], timeout=20, check=False)
    assert job.returncode == 1
    assert "MemoryError: no more" in job.stderr


@pytest.mark.slow
def test_over_gloo_the_others_learn_of_a_rank_that_fails_between_two_groups(torch_ranks):
    ranks = torch_ranks(3, TRAINING + GLOO + LEFT, check=False)
    assert all(rank.status == 1 for rank in ranks)
    assert "MemoryError: no more" in ranks[1].err
    for rank in (ranks[0], ranks[2]):
        assert "CommunicatorError" in rank.err
