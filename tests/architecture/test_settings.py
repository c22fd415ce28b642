"""A setting that nothing reads cannot exist, nor one without a description."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from tests.architecture.tree import Module, modules


@dataclass
class SettingsClass:
    """A class of settings: its fields, and which names each of its own methods (validators apart) reads."""

    name: str
    where: str
    fields: list[str] = field(default_factory=list)
    described: list[str] = field(default_factory=list)
    reads_of: dict[str, set[str]] = field(default_factory=dict)


def settings_classes(tree: Iterable[Module]) -> dict[ast.ClassDef, SettingsClass]:
    """Every class that derives from ``Settings``, directly or not."""
    nodes = [(m, n) for m in tree for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)]
    names, found = {"Settings"}, {}
    while True:
        fresh = [
            (m, n)
            for m, n in nodes
            if n not in found and any(ast.unparse(b).split(".")[-1] in names for b in n.bases)
        ]
        if not fresh:
            return found
        for module, node in fresh:
            names.add(node.name)
            found[node] = describe(module, node)


def describe(module: Module, node: ast.ClassDef) -> SettingsClass:
    described = SettingsClass(node.name, f"{module.where}:{node.lineno}")
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                described.fields.append(statement.target.id)
        elif isinstance(statement, ast.FunctionDef) and not is_validator(statement):
            described.reads_of[statement.name] = reads(statement)
    for item, below in itertools.pairwise(node.body):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            described.described.append(ast.unparse(item.target))
    return described


def is_validator(function: ast.FunctionDef) -> bool:
    return any("validator" in ast.unparse(d) for d in function.decorator_list)


def reads(node: ast.AST, apart_from: Container[int] = ()) -> set[str]:
    """Names of attributes that ``node`` reads, nodes whose ``id`` is in ``apart_from`` left out."""
    attributes = (
        n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    )
    return {n.attr for n in attributes if id(n) not in apart_from}


def never_read(tree: Iterable[Module]) -> list[str]:
    """Fields of settings that no code reads, but for the checks of the settings themselves.

    A read inside a property or method of the settings counts once that property or method is read itself.
    """
    tree = list(tree)
    classes = settings_classes(tree)
    inside = {id(n) for node in classes for n in ast.walk(node)}
    used = {name for module in tree for name in reads(module.tree, apart_from=inside)}
    grown = True
    while grown:
        more = {
            r
            for c in classes.values()
            for method, names in c.reads_of.items()
            if method in used
            for r in names
        }
        grown = not more <= used
        used |= more
    return [
        f"{c.where} {c.name}.{name}"
        for c in classes.values()
        for name in c.fields
        if name not in used
    ]


def without_description(tree: Iterable[Module]) -> list[str]:
    """Fields of settings without a string below them."""
    classes = settings_classes(tree).values()
    return [
        f"{c.where} {c.name}.{name}"
        for c in classes
        for name in c.fields
        if name not in c.described
    ]


def fake(text: str) -> list[Module]:
    return [Module(("utils", "x"), "x.py", text)]


SETTINGS = "class A(Settings):\n    lr: float = 1.0\n    kind: ClassVar[int] = 3\n"


def test_every_setting_is_read_by_code() -> None:
    assert never_read(modules()) == []


def test_every_setting_has_a_description() -> None:
    assert without_description(modules()) == []


def test_a_setting_without_a_description_is_seen() -> None:
    assert without_description(fake(SETTINGS)) == ["x.py:1 A.lr"]
    assert (
        without_description(
            fake(
                "class A(Settings):\n    lr: float = 1.0\n    'Rate.'\n    kind: ClassVar[int] = "
                "3\n"
            )
        )
        == []
    )


def test_the_settings_are_found() -> None:
    names = {c.name for c in settings_classes(modules()).values()}
    assert {
        "RLConfig",
        "SFTConfig",
        "ModelConfig",
        "SamplingConfig",
        "OptimizerConfig",
        "RewardTerm",
    } <= names


def test_a_setting_that_only_its_own_validator_reads_is_seen() -> None:
    check = "    @model_validator(mode='after')\n    def _check(self):\n        assert self.lr\n"
    assert never_read(fake(SETTINGS)) == ["x.py:1 A.lr"]
    assert never_read(fake(SETTINGS + check)) == ["x.py:1 A.lr"]
    assert never_read(fake(SETTINGS + "def f(a):\n    a.lr = 2\n")) == ["x.py:1 A.lr"]
    assert never_read(fake(SETTINGS + "def f(a):\n    return a.lr\n")) == []


def test_a_setting_read_through_a_property_counts_once_the_property_is_read() -> None:
    derived = SETTINGS + "    @property\n    def twice(self):\n        return 2 * self.lr\n"
    assert never_read(fake(derived)) == ["x.py:1 A.lr"]
    assert never_read(fake(derived + "def f(a):\n    return a.twice\n")) == []
