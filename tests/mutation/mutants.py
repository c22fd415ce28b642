"""Small wrong changes to a module: each mutant differs from the source in one place.

Written for this tree since the functions that matter are registered by a decorator, and tools leave decorated functions alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SWAPS = {
    "maximum": "minimum",
    "max": "min",
    "amax": "amin",
    "sum": "mean",
    "exp": "expm1",
    "expm1": "exp",
    "mean": "sum",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "zeros": "ones",
    "ones": "zeros",
    "all": "any",
    "any": "all",
    "cumsum": "cumprod",
    "logical_and": "logical_or",
    "minimum": "maximum",
    "min": "max",
    "amin": "amax",
}
"""Names of functions and methods, and the neighbour that each is mistaken for."""
DROPPED = {
    "detach",
    "abs",
    "square",
    "sqrt",
    "exp",
    "sign",
    "clamp",
    "flip",
    "log",
    "sigmoid",
    "tanh",
    "expm1",
    "clip",
}
"""Methods ``x.name(...)`` that a mutant leaves out."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """``code`` is the whole module; ``line`` and ``text`` say what is different. ``outside``: tests that do not enter the function may see
    it."""

    line: int
    text: str
    code: str
    outside: bool


Change = tuple[str, ast.AST | None]
"""What is said of a change, and the node that takes the place of the old one; ``None`` deletes a statement."""


def mutants(source: str) -> list[Mutant]:
    """Every mutant of ``source`` that still compiles to something else, in the order of lines."""
    tree = ast.parse(source)
    original = ast.unparse(tree)
    found: dict[str, Mutant] = {}
    for path, node in places(tree):
        for text, new in changes(node):
            mutated = copy.deepcopy(tree)
            _put(mutated, path, copy.deepcopy(new))
            code = ast.unparse(ast.fix_missing_locations(mutated))
            if code != original:
                inside = len(path) > 1 and path[1][0] == "body"
                found.setdefault(code, Mutant(getattr(node, "lineno", 0), text, code, not inside))
    return sorted(found.values(), key=lambda m: m.line)


Path = tuple[tuple[str, int | None], ...]


def places(tree: ast.AST, path: Path = ()) -> Iterator[tuple[Path, ast.AST]]:
    """Every node that may change, and the way to it. Annotations, messages, docstrings and what is said of a part are left alone."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(
            tree, ast.Raise | ast.Import | ast.ImportFrom
        ):
            continue
        children = enumerate(value) if isinstance(value, list) else [(None, value)]
        for i, child in children:
            if not isinstance(child, ast.AST) or _is_text(child):
                continue
            here = (*path, (name, i))
            yield here, child
            yield from places(child, here)
    yield from _registered(tree, path)


def _registered(tree: ast.AST, path: Path) -> Iterator[tuple[Path, ast.AST]]:
    """``needs`` and ``reads`` of a part: they decide what is computed and which settings are refused."""
    for i, decorator in enumerate(getattr(tree, "decorator_list", [])):
        if isinstance(decorator, ast.Call):
            for k, keyword in enumerate(decorator.keywords):
                if keyword.arg in ("needs", "reads"):
                    yield (
                        (*path, ("decorator_list", i), ("keywords", k), ("value", None)),
                        keyword.value,
                    )


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def changes(node: ast.AST) -> Iterator[Change]:
    """The wrong changes of one node."""
    for kind, change in CHANGES:
        if isinstance(node, kind):
            yield from change(node)


def _compare(node: ast.Compare) -> Iterator[Change]:
    for i, op in enumerate(node.ops):
        for other in COMPARISONS.get(type(op), ()):
            new = copy.deepcopy(node)
            new.ops[i] = other()
            yield _said(node, new)


def _binary(node: ast.BinOp) -> Iterator[Change]:
    if type(node.op) in OPERATORS:
        new = copy.deepcopy(node)
        new.op = OPERATORS[type(node.op)]()
        yield _said(node, new)


def _unary(node: ast.UnaryOp) -> Iterator[Change]:
    yield _said(node, node.operand)


def _bool(node: ast.BoolOp) -> Iterator[Change]:
    new = copy.deepcopy(node)
    new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield _said(node, new)


def _constant(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield _said(node, ast.Constant(not node.value))
    elif isinstance(node.value, int | float):
        for other in {node.value + 1, 0 if node.value else -1}:
            yield _said(node, ast.Constant(other))
    elif isinstance(node.value, str) and node.value in SWAPS:
        yield _said(node, ast.Constant(SWAPS[node.value]))


def _condition(node: ast.If | ast.IfExp) -> Iterator[Change]:
    for value in (True, False):
        new = copy.deepcopy(node)
        new.test = ast.Constant(value)
        yield f"the condition {ast.unparse(node.test)} is always {value}", new


def _call(node: ast.Call) -> Iterator[Change]:
    function = node.func
    name = (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )
    if name in SWAPS:
        new = copy.deepcopy(node)
        new.func = (
            ast.Attribute(function.value, SWAPS[name], ast.Load())
            if isinstance(function, ast.Attribute)
            else ast.Name(SWAPS[name])
        )
        yield _said(node, new)
    if name in DROPPED and isinstance(function, ast.Attribute) and not _is_module(function.value):
        yield _said(node, function.value)
    if (
        name in DROPPED
        and isinstance(function, ast.Attribute)
        and _is_module(function.value)
        and node.args
    ):
        yield _said(node, node.args[0])
    if name == "where" and len(node.args) == 3:
        yield _said(node, ast.Call(function, [node.args[0], node.args[2], node.args[1]], []))
        yield _said(node, node.args[1])
        yield _said(node, node.args[2])
    for i, keyword in enumerate(node.keywords):
        if keyword.arg and keyword.arg not in ("dtype", "device"):
            new = copy.deepcopy(node)
            del new.keywords[i]
            yield f"{ast.unparse(node)} without {keyword.arg}", new


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "math", "F")


def _statement(node: ast.stmt) -> Iterator[Change]:
    alias = (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Subscript | ast.Dict)
        and ast.unparse(node.targets[0])[0].isupper()
    )
    if not _is_text(node) and not alias:
        yield f"without: {ast.unparse(node).splitlines()[0]}", None


def _list(node: ast.List) -> Iterator[Change]:
    for i, item in enumerate(node.elts):
        if isinstance(item, ast.Constant):
            yield (
                f"{ast.unparse(node)} without {item.value!r}",
                ast.List(node.elts[:i] + node.elts[i + 1 :], ast.Load()),
            )


CHANGES: list[tuple[type | tuple[type, ...], Callable[..., Iterator[Change]]]] = [
    (ast.Compare, _compare),
    (ast.BinOp, _binary),
    (ast.UnaryOp, _unary),
    (ast.BoolOp, _bool),
    (ast.Constant, _constant),
    ((ast.If, ast.IfExp), _condition),
    (ast.Call, _call),
    ((ast.Assign, ast.AugAssign, ast.Expr, ast.If, ast.For, ast.Raise), _statement),
    (ast.List, _list),
]


def _said(old: ast.AST, new: ast.AST) -> Change:
    return f"{ast.unparse(old)}  ->  {ast.unparse(new)}", new


def _put(tree: ast.AST, path: Path, new: ast.AST | None) -> None:
    """Put ``new`` where ``path`` leads; a statement that is deleted leaves ``pass``."""
    for name, i in path[:-1]:
        value = getattr(tree, name)
        tree = value if i is None else value[i]
    name, i = path[-1]
    new = ast.Pass() if new is None else new
    if i is None:
        setattr(tree, name, new)
    else:
        getattr(tree, name)[i] = new
