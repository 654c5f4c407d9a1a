"""No format of the package contains code: nothing here unpickles, and states pass through formats that cannot."""

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
"""Of torch.distributed and mpi4py: they unpickle what other ranks send."""
LOADERS = {"numpy", "np", "torch"}
CHECKS_PICKLING = {PACKAGE / "testing" / "form_laws.py"}
TENSORS_ONLY = {(PACKAGE / "comm" / "torch_dist.py", name) for name in ("allgather", "irecv", "isend")}
"""Of torch.distributed, where these names send tensors."""


def unpickles(tree):
    """Yield what in a module may unpickle: names of modules and of functions."""
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
def test_what_does_is_seen(code):
    assert list(unpickles(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["np.load(f, allow_pickle=False)", "torch.load(f, weights_only=True)", "json.load(f)"]
)
def test_what_does_not_is_allowed(code):
    assert not list(unpickles(ast.parse(code)))
