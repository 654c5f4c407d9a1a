"""Where a function of qcomp can be broken in one place, and how."""

import ast
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMISES = (
    "payload.py",
    "state.py",
    "feedback.py",
    "handshake.py",
    "coding",
    "mean",
    "optimizers",
    "checkpoint",
    "elastic",
    "outer",
)
"""The parts of qcomp.core that carry promises: what is sent, what is owed, and what is kept."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}

Change = Callable[[Any], ast.AST]


@dataclass(frozen=True)
class Mutant:
    """A module of qcomp with one change, at the ``number``-th point of its tree."""

    module: str
    number: int
    function: str
    """Qualified name of the outermost function that is changed."""
    line: int
    before: str
    after: str

    def tree(self, root: Path) -> ast.Module:
        """Return the changed module."""
        tree = ast.parse((root / self.module).read_text())
        _, node, change = list(_points(tree))[self.number]
        changed: Any = _Replacement(node, change).visit(tree)
        return ast.fix_missing_locations(changed)


class _Replacement(ast.NodeTransformer):
    def __init__(self, node: ast.AST, change: Change) -> None:
        self._node, self._change = node, change

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self._change(node), node) if node is self._node else self.generic_visit(node)


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw mutants from all points of the parts that carry promises; the same ones from the same sources."""
    core = root / "qcomp" / "core"
    paths = [
        path
        for name in PROMISES
        for path in (core.glob(name) if "." in name else core.glob(f"{name}/**/*.py"))
    ]
    every = []
    for path in sorted(paths):
        for number, (function, node, change) in enumerate(_points(ast.parse(path.read_text()))):
            before, after = (ast.unparse(each).split("\n")[0] for each in (node, change(copy.deepcopy(node))))
            module = path.relative_to(root).as_posix()
            every.append(Mutant(module, number, function, node.lineno, before, after))
    return sorted(random.Random(seed).sample(every, count), key=lambda m: (m.module, m.number))


def _points(tree: ast.Module) -> Iterator[tuple[str, Any, Change]]:
    """Yield each point inside a function: the outermost function's name, the node, and what turns it into another."""
    for name, function in _functions(tree, ""):
        for statement in function.body:
            for node, change in _in(statement):
                yield name, node, change


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def _in(node: ast.AST) -> Iterator[tuple[Any, Change]]:
    """Yield the points of a node and of what is inside it, but texts and annotations."""
    if isinstance(node, ast.JoinedStr):
        return
    for change in _changes(node):
        yield node, change
    if isinstance(node, ast.Raise):
        return  # what it says is compared elsewhere
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _in(child)


def _changes(node: ast.AST) -> list[Change]:  # noqa: PLR0911 - a table
    """Return the ways to change a node."""
    match node:
        case ast.Raise() | ast.Expr(value=ast.Call()):
            return [lambda _: ast.Pass()]
        case ast.Compare():
            return [_swap_comparison(index) for index in range(len(node.ops))]
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in SWAPS:
            return [_swap]
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return [lambda n: n.operand]
        case ast.If() | ast.IfExp() | ast.While():
            return [_negate]
        case ast.Constant(value=bool()):
            return [lambda n: ast.Constant(not n.value)]
        case ast.Constant(value=int() | float()):
            return [lambda n: ast.Constant(n.value + 1)]
        case ast.Call():
            named = [
                index for index, keyword in enumerate(node.keywords) if keyword.arg not in (None, "strict")
            ]
            return [_drop_keyword(index) for index in named]  # zip(strict=) guards what cannot happen
    return []


def _swap(node: Any) -> ast.AST:
    node.op = SWAPS[type(node.op)]()
    return node


def _swap_comparison(index: int) -> Change:
    def change(node: Any) -> ast.AST:
        node.ops[index] = SWAPS[type(node.ops[index])]()
        return node

    return change


def _negate(node: Any) -> ast.AST:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _drop_keyword(index: int) -> Change:
    def change(node: Any) -> ast.AST:
        del node.keywords[index]
        return node

    return change
