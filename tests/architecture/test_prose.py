"""Check the wording of docstrings, comments, messages and documentation."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.tree import ROOT, Module, modules

WIDTH = 100
"""Longest line of a docstring or of prose in a page."""

ODD_WORDS = re.compile(
    r"\b(anew|beside|draws?|drawn|told|whoever|goes on|taken up|lies|at one time|borne|whose own|put together)\b",
    re.IGNORECASE,
)
"""Words that the glossary replaces, e.g. ``draw`` by ``generate`` or ``sample``."""

POINTING = re.compile(r"(What|Whether|Who|Those|How|Whatever)\b")
"""First words of a docstring that points at a thing instead of naming it."""

MANY_ARGUMENTS = 2
"""A public function with more arguments lists them."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the first line number and the text of each docstring, attribute docstrings included."""
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def messages(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the strings of several words that are no docstrings, with their line numbers."""
    is_docstring = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in is_docstring
            and " " in node.value
        ):
            yield node.lineno, node.value


def comments(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the comments, with their line numbers."""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def pages() -> list[Path]:
    """Return the pages of the documentation."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def prose(page: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are not in a code block, with their numbers."""
    in_code = False
    for number, row in enumerate(page.splitlines(), 1):
        if row.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, row


def odd_words(module: Module) -> list[str]:
    texts = [*docstrings(module), *messages(module), *comments(module)]
    return [
        f"{module.where}:{line} {found.group(0)!r}"
        for line, text in texts
        if (found := ODD_WORDS.search(text))
    ]


def long_docstring_lines(module: Module) -> list[str]:
    rows = module.text.splitlines()
    found = []
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found += [f"{module.where}:{line}" for line in lines if len(rows[line - 1]) > WIDTH]
    return found


def is_too_long(row: str) -> bool:
    """Return True for a long line of prose that has a space to break it at. Tables have no limit."""
    without_code = re.sub(r"`[^`]*`", lambda code: code.group(0).replace(" ", "_"), row)
    words = without_code.split()
    return (
        len(row) > WIDTH and not row.lstrip().startswith(("|", "`")) and len(words) > MANY_ARGUMENTS
    )


def pointing_docstrings(module: Module) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, kinds)]
    documented = [(node, ast.get_docstring(node) or "") for node in nodes]
    return [
        f"{module.where}:{getattr(node, 'lineno', 1)}"
        for node, text in documented
        if POINTING.match(text)
    ]


def public_functions(module: Module) -> Iterator[Definition]:
    """Yield the public functions, and the public methods of public classes."""
    for node in module.tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (
                part
                for part in node.body
                if isinstance(part, Definition) and not part.name.startswith("_")
            )


def is_registered(function: Definition) -> bool:
    """Return True for a function with a registry's decorator: its kind documents the arguments."""
    return any(isinstance(item, ast.Call) for item in function.decorator_list)


def unlisted_arguments(module: Module) -> list[str]:
    found = []
    for function in public_functions(module):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        own = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        text = ast.get_docstring(function) or ""
        if (
            text
            and len(own) > MANY_ARGUMENTS
            and "Args:" not in text
            and not is_registered(function)
        ):
            found.append(f"{module.where}:{function.lineno} {function.name}")
    return found


def repeated_classes(tree: tuple[Module, ...]) -> list[str]:
    places = defaultdict(list)
    for module in tree:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module.where}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def fake(text: str) -> Module:
    return Module(("utils", "x"), "x.py", text)


def test_docstrings_comments_and_messages_use_the_words_of_the_field() -> None:
    assert [line for module in modules() for line in odd_words(module)] == []
    assert odd_words(fake('"""Draws a batch."""'))
    assert odd_words(fake("x = 1  # start anew"))
    assert odd_words(fake('log("the run goes on")'))


def test_pages_use_the_words_of_the_field() -> None:
    """Names in code spans are exempt."""
    found = []
    for page in pages():
        for number, row in prose(page.read_text(encoding="utf-8")):
            if word := ODD_WORDS.search(re.sub(r"`[^`]*`", "", row)):
                found.append(f"{page.relative_to(ROOT)}:{number} {word.group(0)!r}")
    assert found == []
    assert [
        number for number, row in prose("a\n```\ndraws\n```\nit draws") if ODD_WORDS.search(row)
    ] == [5]


def test_lines_of_docstrings_and_pages_are_at_most_100_characters_long() -> None:
    assert [line for module in modules() for line in long_docstring_lines(module)] == []
    found = []
    for page in pages():
        rows = prose(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(ROOT)}:{number}" for number, row in rows if is_too_long(row)]
    assert found == []
    assert long_docstring_lines(fake(f'"""{"word " * 30}"""'))
    assert is_too_long("word " * 30)
    assert not is_too_long("| " + "cell " * 30 + "|")


def test_docstrings_name_things_instead_of_pointing_at_them() -> None:
    assert [line for module in modules() for line in pointing_docstrings(module)] == []
    assert pointing_docstrings(fake('def f():\n    """Whether it is."""'))


def test_a_class_name_belongs_to_one_class() -> None:
    assert repeated_classes(modules()) == []
    assert repeated_classes((fake("class A: ..."), fake("class A: ...")))


def test_public_functions_with_more_than_two_arguments_list_them() -> None:
    assert [line for module in modules() for line in unlisted_arguments(module)] == []
    assert unlisted_arguments(fake('def f(a, b, c):\n    """Return a."""'))
    assert not unlisted_arguments(
        fake('@POLICY_LOSSES.register("x")\ndef f(a, b, c):\n    """Return a."""')
    )
