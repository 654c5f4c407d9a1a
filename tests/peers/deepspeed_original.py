"""Run the original optimizers of DeepSpeed, one process for each rank, on the CPU and without its engine.

``python deepspeed_original.py RANK WORLD STORE OUT`` runs rank RANK of WORLD: all three optimizers on the gradients
of `deepspeed_cases`, everything that they hold written to OUT. ``python deepspeed_original.py record GOLDEN`` starts
the ranks of every world and writes their results into the folder GOLDEN.

The optimizers and ``NcclBackend`` are DeepSpeed's own, unchanged. Three substitutes replace what a CPU lacks:
NumPy for cupy, which packs and unpacks bits; gloo for NCCL; and an object with two attributes for the engine, which
averages the gradients of all ranks unless the optimizer has told it not to.
"""

import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import deepspeed_cases as cases
import numpy as np

WORLD_TIMEOUT = 300


def numpy_as_cupy() -> types.ModuleType:
    """Return a module with the few functions of cupy that DeepSpeed's backend calls."""
    import torch

    cupy = types.ModuleType("cupy")
    cupy.zeros, cupy.packbits, cupy.unpackbits, cupy.split = np.zeros, np.packbits, np.unpackbits, np.split
    cupy.from_dlpack = lambda capsule: torch.utils.dlpack.from_dlpack(capsule).numpy()
    stream = types.SimpleNamespace(synchronize=lambda: None)
    device = types.SimpleNamespace(use=lambda: None)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: stream, Device=lambda index: device)
    return cupy


def start(rank: int, world: int, store: str) -> Any:
    """Join the other ranks; return DeepSpeed's module of collectives."""
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    sys.modules["cupy"] = numpy_as_cupy()
    from deepspeed import comm as dist
    from deepspeed import init_distributed

    init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    all_gather = dist.all_gather
    # NCCL accepts a scalar as a vector of one element; gloo does not.
    dist.all_gather = lambda out, x, group: all_gather(out, x.reshape(out[0].shape), group=group)
    return dist


def make(name: str, params: list[Any], engine: Any) -> Any:
    """Return an optimizer with the options of the cases, in two groups."""
    import torch
    from deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

    kinds = {"onebit_adam": OnebitAdam, "zero_one_adam": ZeroOneAdam, "onebit_lamb": OnebitLamb}
    groups = [
        {"params": params[:2]},
        {"params": params[2:], "exp_avg_mask": torch.from_numpy(cases.MASK.copy()), "weight_decay": 0.0},
    ]
    return kinds[name](groups, engine, **cases.COMMON, **cases.OPTIONS[name])


def held(opt: Any, params: list[Any]) -> dict[str, Any]:
    """Return the contents of an optimizer: momentum, variance, errors, accumulators."""
    kinds = (
        "exp_avg",
        "exp_avg_sq",
        "exp_avg_sq_fresh",
        "momentum_accumulator",
        "worker_error",
        "server_error",
    )
    found = {
        f"{kind}.{i}": opt.state[p][kind]
        for i, p in enumerate(params)
        for kind in kinds
        if kind in opt.state[p]
    }
    for kind in ("worker_errors", "server_errors"):  # in 1-bit LAMB, which has one buffer for all tensors
        found |= {f"{kind[:-1]}.{i}": e for i, e in enumerate(getattr(opt, kind, ()))}
    return found


def run(name: str, rank: int, world: int) -> dict[str, np.ndarray]:
    """Return the trajectory of one optimizer on this rank."""
    import torch

    engine = types.SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    params = [torch.nn.Parameter(torch.from_numpy(p)) for p in cases.parameters(world)]
    opt = make(name, params, engine)
    path, snapshots = [], {}
    for step in range(1, cases.STEPS + 1):
        averaged = engine.enable_backward_allreduce
        grads = cases.mean_gradients(world, step) if averaged else cases.gradients(world, rank, step)
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.from_numpy(g.copy())
        for group in opt.param_groups:
            group["lr"] = cases.rate(step - 1)
        opt.step()
        path.append(np.concatenate([p.detach().numpy().ravel() for p in params]))
        if step in cases.SNAPSHOTS:
            snapshots |= {f"{name}/{step}/{key}": x.numpy().copy() for key, x in held(opt, params).items()}
    return {f"{name}/params": np.stack(path), **snapshots}


def record(world: int) -> list[dict[str, np.ndarray]]:
    """Run all ranks of a world; return the results of each."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [str(Path(folder) / f"{rank}.npz") for rank in range(world)]
        store = str(Path(folder) / "store")
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(rank), str(world), store, out],
                stdout=subprocess.DEVNULL,
            )
            for rank, out in enumerate(outs)
        ]
        try:
            codes = [process.wait(timeout=WORLD_TIMEOUT) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return [dict(np.load(out)) for out in outs]


def write(file: Path, found: list[dict[str, np.ndarray]]) -> None:
    """Write the results of a world's ranks; arrays equal to those of rank 0 are not repeated."""
    first, *others = found
    entries = {f"0/{key}": x for key, x in first.items()}
    for rank, own in enumerate(others, start=1):
        entries |= {f"{rank}/{key}": x for key, x in own.items() if x.tobytes() != first[key].tobytes()}
    np.savez_compressed(file, **entries)


def read(file: Path, world: int) -> list[dict[str, np.ndarray]]:
    """Return what `write` wrote."""
    with np.load(file) as entries:
        keys = [key.removeprefix("0/") for key in entries.files if key.startswith("0/")]
        return [
            {key: entries[f"{rank}/{key}" if f"{rank}/{key}" in entries else f"0/{key}"] for key in keys}
            for rank in range(world)
        ]


def main(argv: list[str]) -> None:
    if argv[0] == "record":
        for world in cases.WORLDS:
            write(Path(argv[1]) / f"deepspeed_world{world}.npz", record(world))
        return
    rank, world, store, out = int(argv[0]), int(argv[1]), argv[2], argv[3]
    dist = start(rank, world, store)
    found: dict[str, np.ndarray] = {}
    for name in cases.OPTIONS:
        found |= run(name, rank, world)
    np.savez(out, **found)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
