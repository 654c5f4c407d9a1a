"""A rank of a job that saves a checkpoint every few steps, may be killed, and resumes from the last whole checkpoint.

Arguments: folder, steps, the step at which it is killed (-1: never), how ("between" steps, or "saving": halfway through
the file of one rank, when the others have written theirs).
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import numpy as np

import qcomp

EVERY = 4
KEPT = 2
SHAPES = [(300,), (20, 9), (5,)]


def main(folder: Path, steps: int, kill_at: int, how: str) -> None:
    comm = qcomp.comm.world()
    opt = qcomp.OneBitAdam(
        learning_rate=0.1,
        betas=(0.9, 0.9),
        freeze=6,
        exact=qcomp.ExactBelow(10),
        compressor=qcomp.ScaledSign(32),
    )
    params = [np.ones(shape, np.float32) for shape in SHAPES]
    start = newest_on_all(folder, comm)
    if start is None:
        start, state = 0, opt.init(params, comm)
    else:
        with np.load(path_of(folder, start, comm)) as archive:
            params = [archive[f"parameter.{i}"] for i in range(len(SHAPES))]
            saved = {key.removeprefix("state."): archive[key] for key in archive if key.startswith("state.")}
        state = opt.load_state_dict(saved, params, comm)
    for step in range(start, steps):
        if step == kill_at and how == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        rng = np.random.default_rng([comm.rank, step])
        params, state = opt.step(
            params, [rng.standard_normal(s).astype(np.float32) for s in SHAPES], state, comm
        )
        if (step + 1) % EVERY == 0:
            entries = {f"parameter.{i}": p for i, p in enumerate(params)}
            entries |= {f"state.{key}": value for key, value in opt.state_dict(state).items()}
            killed = step + 1 == kill_at and how == "saving" and comm.rank == comm.size - 1
            save(path_of(folder, step + 1, comm), entries, killed=killed)
    digest = hashlib.sha256(b"".join(p.tobytes() for p in params)).hexdigest()
    sys.stdout.write(f"rank {comm.rank} from {start}: {digest}\n")


def path_of(folder: Path, step: int, comm: qcomp.comm.Communicator) -> Path:
    return folder / f"{step:06d}-{comm.rank}.npz"


def save(path: Path, entries: dict, *, killed: bool) -> None:
    """Replace a file atomically, so that no half-written file has its name."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **entries)
        if killed:
            file.truncate(100)
            os.kill(os.getpid(), signal.SIGKILL)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def newest_on_all(folder: Path, comm: qcomp.comm.Communicator) -> int | None:
    """Return the last step for which every rank has its file."""
    own = sorted(int(path.name[:6]) for path in folder.glob(f"*-{comm.rank}.npz"))[-KEPT:]
    message = np.array([*own, *[-1] * (KEPT - len(own))], np.int64).view(np.uint8)
    arrived = comm.all_gather(message, [message.size] * comm.size)
    common = set.intersection(*(set(np.asarray(part).view(np.int64).tolist()) for part in arrived)) - {-1}
    return max(common, default=None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
