"""One process that checks the cost model on many ranks, whose computation is replaced by sleeping.

planning_rig.py starts it on every rank. It measures the link and the compressors as ``qcomp plan --measure`` does,
then times steps of every method, and predicts each from the measured link and compressors.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from timing import machine, spread

import qcomp
from network.launch import RATES
from network.shaped import VARIABLE, limit
from qcomp.planning import Job, Method, OuterMethod, PowerSGDMethod, measure, step_time

COMPUTE = 0.2
"""Seconds that a rank sleeps in a step: more ranks than cores cannot compute at the same time."""
SHAPES = ((512, 512),) * 8
EVERY = 4
SIGN, FOUR = qcomp.ScaledSign(), qcomp.QSGD(levels=7)
WARM = 2
METHODS = {
    "all-reduce": Method("ring"),
    "QSGD, 4 bits": Method("two_phase", FOUR),
    "sign, 1 bit": Method("two_phase", SIGN),
    "PowerSGD, rank 4": PowerSGDMethod(averaging=qcomp.PowerSGD(rank=4)),
    f"sign, every {EVERY} steps": OuterMethod(loop=qcomp.OuterLoop(every=EVERY, compressor=SIGN, exact=None)),
}


def averager(method: Method, comm: qcomp.comm.Communicator) -> Callable[[], object]:
    """Return a call that does the work of a method in a step, without the computation of gradients."""
    own = torch.Generator().manual_seed(comm.rank)
    values = [torch.randn(shape, generator=own) for shape in SHAPES]
    if isinstance(method, OuterMethod):
        loop, params = method.loop, [torch.zeros(shape) for shape in SHAPES]
        state = loop.init(params, comm)

        def inner() -> None:
            nonlocal params, state
            moved = [p - 0.01 * g for p, g in zip(params, values, strict=True)]
            params, state = loop.step(moved, state, comm)

        return inner
    if method.compressor is None:
        whole = torch.cat([v.flatten() for v in values])
        return lambda: dist.all_reduce(whole.div_(comm.size))
    mean = (
        qcomp.PowerSGDMean(rank=method.averaging.rank)
        if isinstance(method, PowerSGDMethod)
        else qcomp.CompressedMean(method.compressor, method.topology, not method.compressor.traits.unbiased)
    )
    kept, step = mean.init(values, comm), 0

    def average() -> None:
        nonlocal kept, step
        _, kept = mean(values, kept, comm, key=qcomp.Key(step=step, rank=comm.rank))
        step += 1

    return average


def timed(average: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of the slowest rank, each the mean of ``EVERY`` steps."""
    found = []
    for _ in range(WARM + rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(EVERY):
            time.sleep(COMPUTE)
            average()
        taken = torch.tensor([(time.perf_counter() - start) / EVERY])
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        found.append(taken.item())
    return found[WARM:]


def main() -> None:
    """Measure, predict and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", choices=list(RATES), required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = qcomp.comm.world()
    if comm.rank == 0:
        limit(os.environ[VARIABLE], comm.size, options.link)
    dist.barrier()
    params = sum(rows * columns for rows, columns in SHAPES)
    measured = measure(comm, [SIGN, FOUR], like=torch.randn(params), rounds=options.rounds)
    assert measured.cluster is not None  # there are several ranks
    job = Job(params, COMPUTE, tensors=len(SHAPES), shapes=SHAPES)
    steps = {
        name: {
            "seconds": spread(timed(averager(method, comm), options.rounds)),
            "predicted": step_time(job, measured.cluster, measured.machine, method).seconds,
        }
        for name, method in METHODS.items()
    }
    if comm.rank == 0:
        found = {"ranks": comm.size, "link": options.link, "rounds": options.rounds, "compute": COMPUTE}
        found |= {
            "measured": measured.document,
            "params": params,
            "machine": machine() | {"torch": torch.__version__},
            "steps": steps,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
