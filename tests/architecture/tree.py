"""The source tree as these tests look at it: text and syntax trees only, nothing of the package is imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightrft"


@dataclass(frozen=True)
class Module:
    """One file of the package. ``name`` is its dotted path below the package, e.g. ``("trainer", "ppo")``."""

    name: tuple[str, ...]
    where: str
    text: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @property
    def part(self) -> str:
        """The first component below the package, which decides the layer; empty for the package's own ``__init__``."""
        return self.name[0] if self.name else ""


@dataclass(frozen=True)
class Import:
    """``import name``, somewhere; ``at_top`` when it runs as the module is imported."""

    line: int
    name: str
    at_top: bool


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        relative = path.relative_to(ROOT / PACKAGE).with_suffix("")
        is_package = relative.name == "__init__"
        name = relative.parts[:-1] if is_package else relative.parts
        found.append(
            Module(name, str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"), is_package)
        )
    return tuple(found)


def imports(module: Module) -> Iterator[Import]:
    """Every import of ``module``, also inside functions, relative ones written out; ``from a import b`` gives ``a.b``."""
    package = (PACKAGE, *module.name) if module.is_package else (PACKAGE, *module.name)[:-1]
    late = _inside_functions(module.tree) | _for_type_checkers(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, id(node) not in late)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(x for x in (base, node.module) if x)
            for alias in node.names:
                yield Import(node.lineno, f"{source}.{alias.name}", id(node) not in late)


def _inside_functions(tree: ast.Module) -> set[int]:
    functions = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    return {id(inner) for function in functions for inner in ast.walk(function)}


def _for_type_checkers(tree: ast.Module) -> set[int]:
    blocks = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")
    ]
    return {
        id(inner) for block in blocks for statement in block.body for inner in ast.walk(statement)
    }


def text_files() -> Iterator[Path]:
    """Files of the tree that people write: code, prose, recipes and scripts."""
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".html", ".css", ".js", ""}
    skipped = {"build", "dist", "runs", "node_modules", "__pycache__"}
    for folder, below, files in os.walk(ROOT):
        below[:] = sorted(
            d for d in below if d == ".ci" or (d not in skipped and not d.startswith("."))
        )
        yield from (
            Path(folder, name)
            for name in sorted(files)
            if Path(name).suffix in kinds and not name.startswith(".")
        )
