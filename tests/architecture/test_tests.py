"""Tests that can fail: each asserts something, and none is left out for good."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from functools import cache

from tests.architecture.tree import ROOT

# Calls that assert by themselves.
ASSERTING = {"raises", "warns", "assert_close", "assert_allclose", "assert_array_equal", "fail"}
ASSERTING_PREFIXES = ("assert_", "check_", "expect_")


def asserts(function: ast.FunctionDef, helpers: Container[str] = ()) -> bool:
    """Whether ``function`` asserts something itself or through one of ``helpers``."""
    for node in ast.walk(function):
        name = (
            node.attr
            if isinstance(node, ast.Attribute)
            else node.id
            if isinstance(node, ast.Name)
            else ""
        )
        if (
            isinstance(node, ast.Assert)
            or name in ASSERTING
            or name in helpers
            or name.startswith(ASSERTING_PREFIXES)
        ):
            return True
    return False


@cache
def asserting_helpers() -> frozenset[str]:
    """Functions of the tests' own, beside the tests, that assert."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return frozenset(f.name for f in functions if not f.name.startswith("test_") and asserts(f))


def functions_of_tests() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_every_test_asserts_something() -> None:
    silent = [
        where
        for where, function in functions_of_tests()
        if not asserts(function, asserting_helpers())
    ]
    assert silent == []


def test_a_test_without_an_assertion_is_seen() -> None:
    (silent,) = ast.parse("def test_x():\n    helper(1)\n").body
    assert isinstance(silent, ast.FunctionDef)
    assert not asserts(silent)
    assert asserts(silent, {"helper"})


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
