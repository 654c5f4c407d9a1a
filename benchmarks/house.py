"""How large the library is, and how long the way of a gradient through it is.

    python benchmarks/house.py            # writes docs/benchmarks/house/
    python benchmarks/house.py --table    # only writes the table, from the JSON

Counts do not depend on the machine. Imports are timed in fresh processes.
"""

import argparse
import ast
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import page
from timing import machine, rounded

import qcomp

PAGE = Path("docs/benchmarks/house")
PACKAGE = Path(qcomp.__file__).parent
PROCESSES = 9
WAYS = {
    "torch": "`qcomp.torch.OneBitAdam`",
    "ddp": "the same with `model=`",
    "numpy": "`qcomp.OneBitAdam` on one rank",
}
SHORT_IMPORT = (
    "import time, numpy\nstart = time.perf_counter()\nimport qcomp\nprint(time.perf_counter() - start)"
)


def sizes() -> dict[str, int | float]:
    """Return the numbers of files and lines, and the shares of parameters that may be, or name, anything."""
    code, docstrings = set(), 0
    files = list(PACKAGE.rglob("*.py"))
    for path in files:
        tree = ast.parse(path.read_text())
        texts = set()
        for node in ast.walk(tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    docstrings += (node.end_lineno or 0) - node.lineno + 1
                    texts |= {(path, line) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        written = enumerate(path.read_text().splitlines(), 1)
        code |= {(path, i) for i, line in written if line.strip() and line.strip()[0] != "#"} - texts
    return {
        "files": len(files),
        "lines": sum(len(path.read_text().splitlines()) for path in files),
        "code": len(code),
        "docstrings": docstrings,
        **untyped(),
    }


def untyped() -> dict[str, float]:
    """Return the shares of annotated parameters that may be anything, and that may hold anything.

    An annotation that is Any, or a union with it, says that a parameter may be anything; ``Sequence[Any]`` says that it
    may hold anything. Another name for Any counts as Any, also where it is imported.
    """
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    other_names: set[tuple[str, str]] = set()
    count = anything = holds = 0
    for last in (False, False, True):  # a name may pass through two modules
        for path, tree in trees.items():
            names = {"Any"}
            for node in tree.body:
                match node:
                    case ast.ImportFrom(module=str(module)):
                        names |= {x.name for x in node.names if (module, x.name) in other_names}
                    case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)) if value in names:
                        names.add(name)
            module = ".".join(("qcomp", *path.relative_to(PACKAGE).with_suffix("").parts))
            other_names |= {(module, name) for name in names - {"Any"}}
            for inner in ast.walk(tree) if last else ():
                if isinstance(inner, ast.arg) and inner.annotation is not None:
                    count += 1
                    anything += any(
                        isinstance(x, ast.Name) and x.id in names for x in united(inner.annotation)
                    )
                    holds += any(
                        isinstance(x, ast.Name) and x.id in names for x in ast.walk(inner.annotation)
                    )
    return {"any": anything / count, "any_within": holds / count}


def united(annotation: ast.expr) -> list[ast.expr]:
    """Return the members of a union."""
    if isinstance(annotation, ast.BinOp):
        return united(annotation.left) + united(annotation.right)
    return [annotation]


def way_of(step: Callable[[], object], notes: list[str]) -> list[int]:
    """Return how many modules a step enters, its calls, and its changes of module."""
    notes.clear()
    step()
    found = list(notes)
    changes = sum(one != other for one, other in pairwise(found))
    return [len(set(found)), len(found), changes]


def noted() -> list[str]:
    """Return a list, to which every call of a function of qcomp adds its module from now on, on every thread."""
    notes: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        _, inside, module = frame.f_code.co_filename.partition(f"{PACKAGE}{os.sep}")
        if event == "call" and inside:
            notes.append(module)

    threading.setprofile(note)
    sys.setprofile(note)
    return notes


def steps_of(kind: str) -> Iterator[Callable[[], object]]:
    """Yield the steps of an optimizer, the last of which are compressed."""
    settings: dict[str, Any] = {"freeze": 2, "exact": None, "watch": None}
    if kind == "numpy":
        opt = qcomp.OneBitAdam(learning_rate=0.01, **settings)
        params = [np.ones(1000, np.float32)]
        comm = qcomp.comm.LocalCommunicator.alone()
        state = opt.init(params, comm)

        def numpy_step() -> None:
            nonlocal params, state
            params, state = opt.step(params, params, state, comm)

        while True:
            yield numpy_step
    import torch  # noqa: PLC0415 - half a second

    from qcomp.torch import OneBitAdam  # noqa: PLC0415

    model: Any = torch.nn.Linear(1000, 1, bias=False)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = OneBitAdam(model.parameters(), lr=0.01, model=model, **settings)
    else:
        optimizer = OneBitAdam(model.parameters(), lr=0.01, **settings)

    def torch_step() -> None:
        if kind == "ddp":
            model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()

    while True:
        optimizer.zero_grad()
        if kind == "torch":
            model(torch.ones(1, 1000)).sum().backward()
        yield torch_step


def one_rank(kind: str, kernels: str, rank: int, folder: str) -> list[int]:
    """Return the way of the sixth step on this rank of two."""
    warnings.simplefilter("ignore")
    os.environ["QCOMP_KERNELS"] = kernels
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    notes = noted()
    steps = steps_of(kind)
    for _ in range(5):
        next(steps)()
    found = way_of(next(steps), notes)
    sys.setprofile(None)
    threading.setprofile(None)
    dist.barrier()
    dist.destroy_process_group()
    return found


def way(kind: str, kernels: str) -> list[int]:
    """Return the way of a step on rank 0 of two processes over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(2) as pool:
            jobs = [pool.apply_async(one_rank, (kind, kernels, rank, folder)) for rank in range(2)]
            first, _ = (job.get(timeout=300) for job in jobs)
            return first


def import_seconds() -> float:
    """Return how long `import qcomp` takes after NumPy, the median of fresh processes."""
    runs = [
        subprocess.run([sys.executable, "-c", SHORT_IMPORT], capture_output=True, check=True, text=True)
        for _ in range(PROCESSES)
    ]
    return median(float(run.stdout) for run in runs)


def measured() -> dict[str, Any]:
    """Return all figures."""
    ways = {f"{kind}, {kernels}": way(kind, kernels) for kind in WAYS for kernels in ("numba", "pure")}
    return {"machine": machine(), "sizes": sizes(), "ways": ways, "import": rounded(import_seconds())}


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only write the table, from the JSON")
    path = PAGE / "house.json"
    if not parser.parse_args().table:
        path.write_text(json.dumps(measured(), indent=1) + "\n")
    found = json.loads(path.read_text())
    rows = [
        [f"{WAYS[kind]}, {kernels}", *(f"{count:,}" for count in found["ways"][f"{kind}, {kernels}"])]
        for kind in WAYS
        for kernels in ("numba", "pure")
    ]
    size = found["sizes"]
    sentence = (
        f"{size['lines']:,} lines in {size['files']} files, {size['code']:,} of code and {size['docstrings']:,} of "
        f"docstrings. {size['any']:.1%} of all parameters may be anything, and {size['any_within']:.1%} are or hold "
        f"anything. After `import numpy`, `import qcomp` takes {found['import']:.2f} s."
    )
    head = ["a compressed step of", "modules", "calls", "changes of module"]
    page.rewrite(PAGE, {"sizes": sentence, "ways": page.table(head, rows)})


if __name__ == "__main__":
    main()
