"""What other libraries may drop: it is there, only `qcomp.private_names` names it, and its lack is a clear error."""

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

import qcomp
from qcomp.backends import registry

torch = pytest.importorskip("torch")
numba = pytest.importorskip("numba")

from qcomp.private_names import torch as of_torch  # noqa: E402

PACKAGE = Path(qcomp.__file__).parent
PRIVATE = PACKAGE / "private_names"

ATTRIBUTES = [
    "torch:Tensor._version",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch.distributed:ProcessGroup._get_backend",
    "torch.distributed.distributed_c10d:_get_default_store",
    "numba.core.caching:CompileResultCacheImpl._locator_classes",
    "numba.core.caching:FunctionCache._impl_class",
    "numba.core.caching:FunctionCache._index_key",
]
OF_FSDP = [
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group",
]
"""Attributes in the versions of torch that `qcomp.torch.fsdp` supports."""
STORED = [
    "torch.distributed.algorithms:Joinable._join_config",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.all_reduce_grads",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.fsdp_params",
    "torch.nn.parallel:DistributedDataParallel._comm_hooks",
    "torch.nn.parallel:DistributedDataParallel.parameters_to_ignore",
    "torch.optim:Optimizer._optimizer_load_state_dict_post_hooks",
    "torch.optim:Optimizer._optimizer_load_state_dict_pre_hooks",
    "torch.optim:Optimizer._optimizer_state_dict_post_hooks",
    "torch.optim:Optimizer._optimizer_state_dict_pre_hooks",
    "numba.core.dispatcher:Dispatcher._cache",
    "torchft:Manager._use_async_quorum",
]
"""Attributes that objects have from their ``__init__`` on."""
USED = {
    "_divide_by_initial_world_size",
    "_getvalue",
    "_orig_mod",
    "_step_supports_amp_scaling",
    "_timeout",
    "enable",
    "found_inf",
    "grad_scale",
    "hooked",
    "is_first_joinable",
    "options",
    "sharded_param",
}
"""Names whose use is tested below, or by the tests of `Join`, of outer loops and of timeouts."""
LISTED = USED | {part for name in ATTRIBUTES + OF_FSDP + STORED for part in re.split("[.:]", name)[1:]}

PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Names of NamedTuple and os that Python documents."""
CLOSED = ("numba.core.", "numba.np.")
"""Modules without an underscore that are private too."""
OPENERS = {"attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "setattr"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def of_self(node):
    return last_of(node.value) in ("self", "cls", "super")


def last_of(node):
    """Return the last name of what is called or read."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", None))


def names_in(code):
    """Yield the private names in a module: how it names them, "defines", "reads" or "foreign"; the name; and where."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if of_self(node) and isinstance(node.ctx, ast.Store):
                yield "defines", node.attr, ""
            is_ours = of_self(node) or node.attr not in LISTED
            yield "reads" if is_ours else "foreign", node.attr, ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield "defines", node.name, ""
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "defines", node.id, ""
        elif isinstance(node, ast.Constant) and node.value in LISTED and is_private(node.value):
            yield "foreign", node.value, repr(node.value)
        elif isinstance(node, ast.Call) and last_of(node) in OPENERS:
            texts = [x.value for x in node.args if isinstance(x, ast.Constant)]
            yield from (("foreign", text, ast.unparse(node)) for text in texts if is_private(str(text)))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            inside = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            modules = [f"{inside}{alias.name}." for alias in node.names]
            yield from (("foreign", name, ast.unparse(node)) for name in modules if is_closed(name))


def is_closed(module):
    """Return whether a module or name is of another library, and private."""
    is_inside = module.startswith(CLOSED) or any(map(is_private, module.split(".")))
    return is_inside and not module.startswith("qcomp.")


def foreign_in(names):
    """Return what is private and not of qcomp itself."""
    names = list(names)
    own = {name for how, name, _ in names if how == "defines"}
    return [where for how, name, where in names if how == "foreign" or (how == "reads" and name not in own)]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_is_there(name):
    resolve_name(name)


@pytest.mark.parametrize("name", OF_FSDP)
def test_an_attribute_of_fsdp_is_there(name):
    pytest.importorskip("qcomp.torch.fsdp", exc_type=ImportError)
    resolve_name(name)


@pytest.mark.parametrize("name", STORED)
def test_an_object_stores_an_attribute(name):
    pytest.importorskip(name.partition(":")[0])
    kind, _, attribute = name.rpartition(".")
    assert attribute in resolve_name(kind).__init__.__code__.co_names


def test_a_compiled_module_names_the_one_inside():
    compiled = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert {name.split(".")[0] for name, _ in compiled.named_parameters()} == {of_torch.COMPILED}


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_a_grad_scaler_leaves_its_scale_to_a_step(gradient):
    class Step(of_torch.ScaledStep, torch.optim.SGD):
        def step(self, closure=None):
            seen.append((of_torch.grad_scale(self).item(), bool(of_torch.found_inf(self))))
            of_torch.take_off_scale(self)
            seen.append(of_torch.grad_scale(self))

    seen = []
    p = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = Step([p]), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(gradient * p.sum()).backward()
    scaler.step(optimizer)
    assert seen == [(4.0, gradient > 1), None]
    assert of_torch.grad_scale(optimizer) is of_torch.found_inf(optimizer) is None


def test_a_struct_of_numba_has_a_value():
    from numba.core import cgutils

    assert hasattr(cgutils.create_struct_proxy(numba.types.complex64), "_getvalue")


def test_all_that_is_private_is_listed():
    found = set()
    for path in PRIVATE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and last_of(node) in (*OPENERS, "_require", "require"):
                found |= {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
    assert found - LISTED == set()


def test_only_the_modules_for_it_name_what_is_private():
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent != PRIVATE]
    assert foreign_in(name for path in paths for name in names_in(path.read_text())) == []


OWN = "class Own:\n    _cache = _mine = None\n\n\n"


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._compile import _disable_dynamo",
        "from torch.nn.modules.module import _global_forward_hooks",
        "from numba.core import caching",
        "import numba.core.caching as caching",
        "torch.autograd.Variable._execution_engine",
        "dispatcher._cache = cache",
        "optimizer._optimizer_step_post_hooks.clear()",
        "self._join_config",
        "super()._patch_step_function()",
        "getattr(model, '_forward_hooks', ())",
        "operator.attrgetter('_forward_hooks')",
        "name == '_orig_mod'",
    ],
)
def test_what_is_private_would_be_found(code):
    assert foreign_in(names_in(OWN + code))


@pytest.mark.parametrize(
    "code",
    [
        "from __future__ import annotations",
        "from qcomp.version import __version__",
        "import numba.types, numba.core_of_mine",
        "state._replace(step=1).__class__",
        "optimizer._mine, self._mine, self._cache",
    ],
)
def test_what_is_public_or_our_own_is_no_finding(code):
    assert foreign_in(names_in(OWN + code)) == []


MISSING = [
    ("torch.distributed.distributed_c10d", "_get_default_store", of_torch.default_store),
    ("torch.autograd.variable.Variable", "_execution_engine", of_torch.call_at_end),
    ("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", of_torch.fsdp_state_of),
    ("builtins.object", "_fsdp_param_group", lambda: of_torch.averages_over_replicas(object())),
    ("builtins.object", "_fsdp_param_group", lambda: of_torch.has_gradients(object())),
    ("builtins.object", "_version", lambda: of_torch.writes_to(object())),  # type: ignore[arg-type]  # wrong on purpose
    ("builtins.object", "parameters_to_ignore", lambda: of_torch.ignored_by(object())),
    ("builtins.object", "_join_config", lambda: of_torch.is_joined_without(object(), object())),
    ("builtins.object", "_join_config", lambda: of_torch.counts_ranks_with_inputs(object())),
    (
        "builtins.object",
        "_optimizer_load_state_dict_pre_hooks",
        lambda: of_torch.hooks_of_loading(object()),
    ),
    ("builtins.object", "_optimizer_state_dict_pre_hooks", lambda: of_torch.hooks_of_saving(object())),
]


@pytest.mark.parametrize(("owner", "name", "use"), MISSING, ids=[name for _, name, _ in MISSING])
def test_a_missing_name_is_an_error_that_says_what_to_do(owner, name, use, monkeypatch):
    monkeypatch.delattr(f"{owner}.{name}", raising=False)
    lacks = f"but torch {re.escape(version('torch'))} lacks it; install torch>=2.6,<2.14"
    with pytest.raises(ImportError, match=rf"^qcomp needs {re.escape(owner)}\.{name} to [\w ]+, {lacks}$"):
        use()


def test_a_missing_hook_is_not_named():
    assert of_torch.hooks_of(object()) == []


@pytest.mark.slow
def test_what_nobody_uses_may_be_missing():
    code = """
import qcomp, torch, torch.distributed.distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule

del c10d._get_default_store, FSDPModule._get_fsdp_state, torch.autograd.Variable._execution_engine
import qcomp.torch, qcomp.integrations.ddp
p = torch.nn.Parameter(torch.ones(8))
optimizer = qcomp.torch.OneBitAdam([p], lr=0.5)
outer = qcomp.torch.OuterLoop([p], torch.optim.SGD([p], lr=0.5), qcomp.outer.diloco(1))
p.grad = torch.ones(8)
optimizer.step()
assert p[0] < 1
import qcomp.torch.fsdp
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(
        r"^ImportError: qcomp needs .*FSDPModule\._get_fsdp_state to find", run.stderr, re.MULTILINE
    )


def test_a_manager_of_another_torchft_is_refused():
    pytest.importorskip("torchft")
    from qcomp.private_names.torchft import asks_in_background

    assert asks_in_background(SimpleNamespace(_use_async_quorum=True))
    lacks = r"but torchft .* lacks it; install torchft>=0\.2,<0\.3"
    with pytest.raises(
        ImportError, match=rf"^qcomp needs types\.SimpleNamespace\._use_async_quorum to .*, {lacks}"
    ):
        asks_in_background(SimpleNamespace())


@pytest.mark.parametrize("name", ["FunctionCache", "CompileResultCacheImpl"])
def test_kernels_that_another_numba_cannot_store_are_not_available(name, monkeypatch):
    monkeypatch.delitem(sys.modules, "qcomp.private_names.numba", raising=False)
    monkeypatch.delattr(f"numba.core.caching.{name}")
    lacks = (
        rf"but numba {numba.__version__} lacks it; install numba>=0\.61,<0\.69: pip install 'qcomp\[numba\]'"
    )
    need = rf"^the kernels 'numba' need numba\.core\.caching\.{name} to store compiled kernels, {lacks}$"
    with pytest.raises(registry.UnavailableError, match=need):
        registry._imported("numba", "qcomp.private_names.numba")
