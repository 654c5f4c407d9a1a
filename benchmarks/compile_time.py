"""Processor seconds to trace, lower and compile a training step on a mesh, compared with one that calls `pmean`.

    python benchmarks/compile_time.py            # all cases; writes docs/benchmarks/compiling/
    python benchmarks/compile_time.py --table    # only writes the table, from the JSON

A step computes the gradients of a network of square tanh layers, averages them over the devices, and makes a step of
Adam. Each case runs in a process of its own on virtual devices of the CPU. Seconds are those of all threads.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import page
from timing import machine, rounded

PAGE = Path("docs/benchmarks/compiling")
SHAPE = (128, 160)
BATCH = 8
TENSORS = (1, 10, 100, 1000)
DEVICES = (4, 8)
METHODS = {
    "pmean": "`pmean`, Adam",
    "sign": "`ScaledSign()`, Adam",
    "qsgd": "`QSGD(7)`, Adam",
    "bfloat16": '`Cast("bfloat16")`, Adam',
    "onebit_adam": "`onebit_adam`",
}
PHASES = ("trace", "lower", "compile")
LIMIT = 900.0
"""Seconds after which a case is given up."""

Array = Any


def transformation(method: str) -> Any:
    """Return what averages and updates, as a transformation of optax."""
    import jax  # noqa: PLC0415 - only the process of a case has its devices
    import optax  # noqa: PLC0415

    import qcomp.jax.optax  # noqa: PLC0415

    if method == "onebit_adam":
        return qcomp.jax.optax.onebit_adam(1e-3, 100, "data")
    if method == "pmean":
        mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "data"))
    else:
        compressor = {
            "sign": qcomp.ScaledSign(),
            "qsgd": qcomp.Scaled(qcomp.QSGD(levels=7)),
            "bfloat16": qcomp.Cast("bfloat16"),
        }[method]
        mean = qcomp.jax.optax.compressed(compressor, "data")
    return optax.chain(mean, optax.adam(1e-3))


def step_of(method: str, tensors: int, devices: int) -> tuple[Any, tuple[Any, ...]]:
    """Return a compiled step on a mesh, and the shapes of its arguments."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    import optax  # noqa: PLC0415
    from jax.sharding import Mesh  # noqa: PLC0415
    from jax.sharding import PartitionSpec as P  # noqa: PLC0415

    import qcomp.jax  # noqa: PLC0415

    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    tx = transformation(method)

    def loss(params: dict[str, Array], x: Array) -> Array:
        for number, w in enumerate(params.values()):
            x = jnp.tanh(x @ (w.T if number % 2 else w))
        return jnp.mean(x**2)

    def step(params: dict[str, Array], state: Any, x: Array) -> tuple[dict[str, Array], Any]:
        varying = jax.lax.pcast(params, "data", to="varying")
        updates, state = tx.update(jax.grad(loss)(varying, x), state, params)
        return optax.apply_updates(params, updates), state

    params = {f"{number:04}": jax.ShapeDtypeStruct(SHAPE, "float32") for number in range(tensors)}
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, params)
    specs = qcomp.jax.partition_specs(state, "data")
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    x = jax.ShapeDtypeStruct((devices * BATCH, SHAPE[0]), "float32")
    return jax.jit(run, donate_argnums=(0, 1)), (params, state, x)


def timed(method: str, tensors: int, devices: int) -> dict[str, Any]:
    """Return the processor seconds of each phase of a case, and the size of its program."""
    step, args = step_of("pmean", 1, devices)
    step.trace(*args).lower().compile()  # starts the compiler
    step, args = step_of(method, tensors, devices)
    seconds: dict[str, float] = {}
    done: Any = step
    program = ""
    for phase in PHASES:
        began = time.process_time()
        done = done.trace(*args) if phase == "trace" else getattr(done, phase)()
        seconds[phase] = rounded(time.process_time() - began)
        if phase == "lower":
            program = done.as_text()
    return {"seconds": seconds, "bytes": len(program), "lines": program.count("\n")}


def run(method: str, tensors: int, devices: int, limit: float) -> dict[str, Any]:
    """Return the result of a case, measured in a process of its own."""
    case = {"method": method, "tensors": tensors, "devices": devices}
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).resolve()), "--case", method, str(tensors), str(devices)]
    try:
        job = subprocess.run(
            command, env=environment, check=True, timeout=limit, stdout=subprocess.PIPE, text=True
        )
    except subprocess.TimeoutExpired:
        return case | {"limit": limit}
    measured: dict[str, Any] = json.loads(job.stdout.splitlines()[-1])
    return case | measured


def total(result: dict[str, Any]) -> float:
    """Return the processor seconds of all phases."""
    return float(sum(result["seconds"].values()))


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page."""
    exact = {(r["tensors"], r["devices"]): r for r in results if r["method"] == "pmean"}
    rows = []
    for r in sorted(results, key=lambda r: (r["devices"], r["tensors"], list(METHODS).index(r["method"]))):
        case = [str(r["devices"]), f"{r['tensors']:,}", METHODS[r["method"]]]
        if "limit" in r:
            rows.append([*case, "", "", "", f"not done in {r['limit']:.0f} s", "", ""])
            continue
        base = exact.get((r["tensors"], r["devices"]), {})
        ratio = f"{total(r) / total(base):.2f}" if "seconds" in base else ""
        phases = [page.number(r["seconds"][phase]) for phase in PHASES]
        rows.append([*case, *phases, page.number(total(r)), ratio, f"{r['bytes'] / 1e3:,.0f}"])
    return page.table(
        ["devices", "tensors", "mean", *PHASES, "together", "over `pmean`", "program, kB"], rows
    )


def main() -> None:
    """Measure all cases, and write the JSON and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAGE, help="(default: %(default)s)")
    parser.add_argument("--name", default="after", help="which code this is (default: %(default)s)")
    parser.add_argument("--tensors", type=int, nargs="+", default=TENSORS, help="(default: 1 10 100 1000)")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, help="(default: 4 8)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="(default: all)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a case (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="only write the table, from the JSON")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        method, tensors, devices = options.case
        print(json.dumps(timed(method, int(tensors), int(devices))))
        return
    path = options.out / f"{options.name}.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        results = []
        for devices in options.devices:
            for tensors in options.tensors:
                for method in options.methods:
                    results.append(run(method, tensors, devices, options.limit))
                    print(json.dumps(results[-1]), flush=True)
        path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    page.rewrite(options.out, blocks(options.out))


def blocks(folder: Path) -> dict[str, str]:
    """Return the tables of the page, from each JSON file beside it."""
    return {
        path.stem: table(json.loads(path.read_text())["results"]) for path in sorted(folder.glob("*.json"))
    }


if __name__ == "__main__":
    main()
