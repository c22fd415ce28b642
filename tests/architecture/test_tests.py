"""Tests that can fail: each asserts something, and none is left out for good."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.tree import ROOT

# Calls that assert by themselves.
ASSERTING = {"raises", "warns", "assert_close", "assert_allclose", "assert_array_equal", "fail"}
ASSERTING_PREFIXES = ("assert_", "check_", "expect_")


def asserts(function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if isinstance(node, ast.Assert) or name in ASSERTING or name.startswith(ASSERTING_PREFIXES):
            return True
    return False


def functions_of_tests() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_every_test_asserts_something() -> None:
    silent = [where for where, function in functions_of_tests() if not asserts(function)]
    assert silent == []


def test_no_test_is_skipped_for_good_or_expected_to_fail() -> None:
    """A skip needs a reason that a machine can lack: a GPU, an optional package, an operating system."""
    marks = [
        f"{where}: {ast.unparse(decorator)}"
        for where, function in functions_of_tests()
        for decorator in function.decorator_list
        if ast.unparse(decorator).startswith(("pytest.mark.skip(", "pytest.mark.xfail"))
        or ast.unparse(decorator) == "pytest.mark.skip"
    ]
    assert marks == []
