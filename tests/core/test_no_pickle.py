"""No format of the package contains code: nothing unpickles, and states pass through formats that cannot hold code."""

import ast
from pathlib import Path

import pytest

import qcomp

PACKAGE = Path(qcomp.__file__).parent
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {
    "all_gather_object",
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "broadcast_object_list",
    "gather_object",
    "irecv",
    "isend",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
"""Functions of torch.distributed and mpi4py that unpickle what other ranks send."""
LOADERS = {"numpy", "np", "torch"}
CHECKS_PICKLING = {PACKAGE / "testing" / name for name in ("form_laws.py", "environments.py")}
"""They pickle and unpickle what the author of a class passes, in a process of their own."""
TENSORS_ONLY = {(PACKAGE / "comm" / "torch_dist.py", name) for name in ("allgather", "irecv", "isend")}
"""Functions of torch.distributed that send tensors although their names are among those above."""


def unpickles(tree):
    """Yield the modules and functions used in a module that may unpickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ({name.name.split(".")[0] for name in node.names} & MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from ({(node.module or "").split(".")[0]} & MODULES)
        elif isinstance(node, ast.Attribute) and node.attr in CALLS:
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            safe = options.get("allow_pickle") == "False" or options.get("weights_only") == "True"
            if ast.unparse(node.func.value) in LOADERS and not safe:
                yield ast.unparse(node.func)


def test_nothing_unpickles():
    found = {
        (path, what)
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in unpickles(ast.parse(path.read_text()))
        if path not in CHECKS_PICKLING
    }
    assert found <= TENSORS_ONLY


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import numpy, dill",
        "dist.broadcast_object_list(x)",
        "comm.bcast(x)",
        "np.load(file)",
        "np.load(file, allow_pickle=True)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
    ],
)
def test_code_that_unpickles_is_found(code):
    assert list(unpickles(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["np.load(f, allow_pickle=False)", "torch.load(f, weights_only=True)", "json.load(f)"]
)
def test_code_that_does_not_unpickle_is_allowed(code):
    assert not list(unpickles(ast.parse(code)))
