"""Compare the same training in torch, with NumPy and on a mesh of JAX: each rank's messages and final parameters.

    python benchmarks/faces.py                # two and four ranks; writes docs/benchmarks/faces.json
    python benchmarks/faces.py --table        # only writes the table, from the JSON

`qcomp.torch.OneBitAdam` runs under torchrun with gloo, `qcomp.OneBitAdam` under mpirun, and
`qcomp.jax.optax.onebit_adam` on as many virtual devices of the CPU. They begin with the same parameters. Gradients are
evaluated by NumPy, from the parameters, the rank and the step. Every message of every step is compared byte by byte.
"""

# ruff: noqa: PLC0415 - each face imports only the library that it needs

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import page

import qcomp
from qcomp.core.optimizers.compression import EXACT

STEPS, FREEZE, RATE = 50, 20, 0.01
SHAPES = {"bias": (7,), "one": (1,), "wide": (29, 5)}
"""Two tensors that stay exact, and one of ten buckets, the last of which is short."""
SETTINGS: dict[str, Any] = {
    "eps": 0.01,
    "compressor": qcomp.ScaledSign(bucket_size=16, scale="rms"),
    "exact": qcomp.ExactBelow(40),
}
BETAS = 0.9, 0.95
FACES = ("core", "torch", "mesh")
TITLES = {
    "core": "`qcomp.OneBitAdam`, mpirun",
    "torch": "`qcomp.torch.OneBitAdam`, torchrun",
    "mesh": "`qcomp.jax.optax.onebit_adam`, mesh",
}
ROOM = 1 << 10
"""Bytes that are recorded of each message on the mesh; no message is longer."""

Array = Any
Tensors = dict[str, Array]
Messages = list[list[list[bytes]]]
"""For each step and exchange, the message to each rank, or the one message to all."""


def first_params() -> Tensors:
    """Return the parameters before the first step."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradient(params: Tensors, rank: int, step: int) -> Tensors:
    """Return the gradient of one rank's quadratic, plus noise."""
    fixed, noise = np.random.default_rng((1, rank)), np.random.default_rng((2, rank, step))
    gradients = {}
    for name, shape in SHAPES.items():
        curvature = np.abs(fixed.normal(size=shape).astype(np.float32)) + np.float32(0.5)
        minimum = fixed.normal(size=shape).astype(np.float32)
        gradients[name] = curvature * (np.asarray(params[name]) - minimum)
        gradients[name] += noise.normal(size=shape).astype(np.float32)
    return gradients


class Recorder:
    """A communicator that records the messages that it sends."""

    compares_owners = True  # so that nothing is joined to messages

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.sent: list[list[bytes]] = []
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host

    def all_to_all(self, send: Any, receive: Any) -> Any:
        """Record a message to each rank."""
        self.sent.append([np.asarray(message).tobytes() for message in send])
        return self.comm.all_to_all(send, receive)

    def all_gather(self, send: Any, receive: Any) -> Any:
        """Record a message to all ranks."""
        self.sent.append([np.asarray(send).tobytes()])
        return self.comm.all_gather(send, receive)


def exchanged(sent: list[list[bytes]], step: int) -> list[list[bytes]]:
    """Return the messages of a step's two exchanges; the first step compares before, and the last exact one after."""
    return sent[-3:-1] if step == FREEZE - 1 else sent[-2:]


def train_core(out: Path) -> None:
    """Train as one rank of mpirun."""
    comm = Recorder(qcomp.comm.world())
    opt = qcomp.OneBitAdam(learning_rate=RATE, freeze=FREEZE, betas=BETAS, watch=None, **SETTINGS)
    params = first_params()
    names, messages = tuple(params), []
    state = opt.init(list(params.values()), comm, names)
    for step in range(STEPS):
        comm.sent = []
        gradients = gradient(params, comm.rank, step)
        leaves, state = opt.step(list(params.values()), list(gradients.values()), state, comm)
        params = dict(zip(names, leaves, strict=True))
        messages.append(exchanged(comm.sent, step))
    save(out, "core", comm.rank, params, messages)


def train_torch(out: Path) -> None:
    """Train as one rank of torchrun."""
    import torch

    import qcomp.torch

    comm: Any = Recorder(qcomp.comm.world())
    params = {name: torch.nn.Parameter(torch.asarray(x)) for name, x in first_params().items()}
    opt = qcomp.torch.OneBitAdam(
        params.items(), lr=RATE, freeze=FREEZE, betas=BETAS, watch=None, comm=comm, **SETTINGS
    )
    messages = []
    for step in range(STEPS):
        gradients = gradient({name: p.detach().numpy() for name, p in params.items()}, comm.rank, step)
        for name, p in params.items():
            p.grad = torch.asarray(gradients[name])
        comm.sent = []
        opt.step()
        messages.append(exchanged(comm.sent, step))
    save(out, "torch", comm.rank, {name: p.detach().numpy() for name, p in params.items()}, messages)


def train_mesh(out: Path, ranks: int) -> None:
    """Train on all devices of a mesh; each evaluates its gradient with its own copy of the parameters."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import Mesh, PartitionSpec

    import qcomp.jax.optax

    mesh, cut = Mesh(np.array(jax.devices()[:ranks]), ("data",)), PartitionSpec("data")
    tx = qcomp.jax.optax.onebit_adam(RATE, FREEZE, "data", b1=BETAS[0], b2=BETAS[1], **SETTINGS)
    with jax.set_mesh(mesh):
        state = tx.init(first_params())
    specs = qcomp.jax.partition_specs(state, "data")

    def step(params: Tensors, gradients: Tensors, state: Any) -> Any:
        params, gradients = (jax.tree.map(lambda x: x[0], tree) for tree in (params, gradients))
        (updates, state), sent, lengths = recorded(tx.update, gradients, state, params)
        params = optax.apply_updates(params, updates)
        return *jax.tree.map(lambda x: x[None], (params, sent, lengths)), state

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(cut, cut, specs), out_specs=(cut, cut, cut, specs), check_vma=False
        )
    )
    params = {name: jnp.stack([x] * ranks) for name, x in first_params().items()}
    messages: list[Messages] = [[] for _ in range(ranks)]
    for number in range(STEPS):
        rows = [gradient({name: x[r] for name, x in params.items()}, r, number) for r in range(ranks)]
        stacked = {name: np.stack([row[name] for row in rows]) for name in SHAPES}
        params, sent, lengths, state = run(params, stacked, state)
        for rank in range(ranks):
            (to_each, to_all), (scattered, gathered) = np.asarray(sent[rank]), lengths[rank]
            messages[rank].append(
                [[message[:scattered].tobytes() for message in to_each], [to_all[0][:gathered].tobytes()]]
            )
    for rank in range(ranks):
        save(out, "mesh", rank, {name: x[rank] for name, x in params.items()}, messages[rank])


def recorded(update: Any, *args: Any) -> Any:
    """Return the result of an update, the messages of its two exchanges, and their lengths.

    Warm-up and compressed steps are branches of one `jax.lax.switch`, so each branch must return its messages.
    """
    import jax
    import jax.numpy as jnp

    from qcomp.jax import spmd

    lax: Any = jax.lax
    switch, answer = lax.switch, spmd._answer
    sent: list[Array] = []
    handed: list[Any] = []

    def keep(request: Any, axis_name: str) -> Any:
        send = request.send if isinstance(request.send, tuple) else (request.send,)
        rows = [jnp.pad(message, (0, ROOM - len(message))) for message in send]
        rows += [jnp.zeros(ROOM, jnp.uint8)] * (len(request.receive) - len(rows))
        sent.append((jnp.stack(rows), len(send[0])))
        return answer(request, axis_name)

    def branch(function: Any) -> Any:
        def call() -> Any:
            sent.clear()
            result = function()
            messages, lengths = zip(*sent, strict=True)
            return result, jnp.stack(messages), jnp.asarray(lengths)

        return call

    def switch_of_step(chosen: Any, branches: Any) -> Any:
        result, *handed[:] = switch(chosen, [branch(function) for function in branches])
        return result

    lax.switch, spmd._answer = switch_of_step, keep
    try:
        result = update(*args)
    finally:
        lax.switch, spmd._answer = switch, answer
    return result, *handed


def save(out: Path, face: str, rank: int, params: Tensors, messages: Messages) -> None:
    """Write the messages and the final parameters of one rank."""
    arrays: dict[str, Any] = {f"param {name}": np.asarray(x) for name, x in params.items()}
    for step, exchanges in enumerate(messages):
        for exchange, peers in enumerate(exchanges):
            for peer, message in enumerate(peers):
                arrays[f"sent {step} {exchange} {peer}"] = np.frombuffer(message, np.uint8)
    np.savez(out / f"{face}-{rank}.npz", **arrays)


def start(face: str, ranks: int, out: Path) -> None:
    """Run one face on all its ranks, each writing its file."""
    script = [str(Path(__file__).resolve()), "--out", str(out), "--ranks", str(ranks), "--rank-of", face]
    launchers = {
        "core": [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks), sys.executable],
        "torch": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        ],
        "mesh": [sys.executable],
    }
    environment = {"OMP_NUM_THREADS": "1", "QCOMP_KERNELS": "pure"}
    if face == "mesh":
        environment |= {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}",
            "JAX_PLATFORMS": "cpu",
        }
    subprocess.run([*launchers[face], *script], env=os.environ | environment, check=True, timeout=500)


def measure(ranks: int) -> dict[str, Any]:
    """Return how the faces compare with the core, for one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for face in FACES:
            start(face, ranks, out)
        runs = {face: [dict(np.load(out / f"{face}-{rank}.npz")) for rank in range(ranks)] for face in FACES}
    messages = sum(len(sent_in(of_rank)) for of_rank in runs["core"])
    return {
        "ranks": ranks,
        "messages": messages,
        "faces": {face: compare(face, found, runs["core"]) for face, found in runs.items()},
    }


def compare(face: str, found: list[Tensors], core: list[Tensors]) -> dict[str, Any]:
    """Compare the messages and the final parameters of a face's ranks with those of the core."""
    ranks, payload, padding, other = len(core), 0, 0, 0
    for rank, (of_rank, expected) in enumerate(zip(found, core, strict=True)):
        if of_rank.keys() != expected.keys():
            raise SystemExit(
                f"rank {rank}: only {face} or core has {sorted(of_rank.keys() ^ expected.keys())}"
            )
        for key in sent_in(of_rank):
            step, exchange, peer = map(int, key.split()[1:])
            message, server = of_rank[key], peer if exchange == 0 else rank
            alone = unpadded(message, step, server, ranks) if face == "mesh" else message
            other += alone.tobytes() != expected[key].tobytes()
            copies = int(peer != rank) if exchange == 0 else ranks - 1
            payload += copies * len(expected[key])
            padding += copies * (len(message) - len(expected[key]))
    wanted = ends(core[0])
    apart = [np.abs(x - y) / np.abs(y) for x, y in zip(ends(found[0]), wanted, strict=True)]
    bits = [[x.tobytes() for x in ends(of_rank)] for of_rank in found]
    return {
        "bytes": payload / ranks,
        "padding": padding / ranks,
        "other_messages": int(other),
        "same_parameters": bits[0] == [y.tobytes() for y in wanted],
        "largest_relative_difference": max(float(x.max()) for x in apart),
        "ranks_agree": all(of_rank == bits[0] for of_rank in bits),
    }


def sent_in(of_rank: Tensors) -> list[str]:
    """Return the names of the messages of a rank."""
    return [key for key in of_rank if key.startswith("sent")]


def ends(of_rank: Tensors) -> list[Array]:
    """Return the parameters of a rank after the last step."""
    return [of_rank[f"param {name}"] for name in SHAPES]


def unpadded(message: Array, step: int, server: int, ranks: int) -> Array:
    """Return a message of the mesh without the zeros that pad its two parts, exact and compressed tensors.

    Padding other than zeros stays in the result.
    """
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    exact = sum(size for size in sizes if size < SETTINGS["exact"].size)
    compressed = [(size,) for size in sizes if size >= SETTINGS["exact"].size]
    # Exact tensors travel as one vector.
    parts = [(EXACT, [(exact,)]), (qcomp.CompressedMean(SETTINGS["compressor"]), compressed)]
    found = []
    for mean, shapes in parts if step >= FREEZE else [(EXACT, [(sum(sizes),)])]:
        lengths = [frame.nbytes for frame in mean.layout(shapes, rank=0, size=ranks).frames]
        part, message = message[: max(lengths)], message[max(lengths) :]
        zeros = part[lengths[server] :]
        found += [part[: lengths[server]], zeros[zeros != 0]]
    return np.concatenate([*found, message])


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    head = [
        "",
        "ranks",
        "bytes a rank sends",
        "padding",
        "messages that differ",
        "parameters differ by",
        "ranks agree",
    ]
    rows = [
        [
            TITLES[face],
            str(result["ranks"]),
            f"{found['bytes']:,.0f}",
            f"{found['padding']:,.0f}",
            f"{found['other_messages']} of {result['messages']}",
            "nothing" if found["same_parameters"] else f"{found['largest_relative_difference']:.0e}",
            "bit for bit" if found["ranks_agree"] else "no",
        ]
        for result in results
        for face, found in result["faces"].items()
    ]
    return page.table(head, rows)


def main() -> None:
    """Train with all faces, compare, and write the JSON and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--table", action="store_true", help="only write the table, from the JSON")
    parser.add_argument("--rank-of", choices=FACES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of == "mesh":
        train_mesh(options.out, options.ranks[0])
    elif options.rank_of:
        {"core": train_core, "torch": train_torch}[options.rank_of](options.out)
    else:
        path = options.out / "faces.json"
        if not options.table:
            path.write_text(json.dumps([measure(ranks) for ranks in options.ranks], indent=1) + "\n")
        page.rewrite(options.out, {"faces": table(json.loads(path.read_text()))})


if __name__ == "__main__":
    main()
