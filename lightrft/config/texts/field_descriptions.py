"""Descriptions of settings: the strings below the fields of their classes."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator


# Pydantic can fill in descriptions by itself (use_attribute_docstrings), but does so when a class
# is made: 0.13 s at each start, of which only help and documentation would have any use.
@functools.cache
def descriptions_in(module: str) -> dict[str, dict[str, str]]:
    """Class to field to description, for all classes of ``module``. Empty without its source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError):  # an interpreter's classes, or an install of bytecode alone
        return {}
    return {
        node.name: dict(_strings_below_fields(node))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _strings_below_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for pair in itertools.pairwise(node.body):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split()).replace("``", "`")
