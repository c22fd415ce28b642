"""A setting that a message names exists: what the user is told to set can be set."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator

import pytest

from lightrft.config import model
from lightrft.config import verbs as configs
from lightrft.config.base import Settings
from lightrft.config.data import ProcessDataConfig
from lightrft.config.demo import DemoConfig
from lightrft.config.generation import serving
from lightrft.config.other_names.lookup import OLD_NAMES
from lightrft.config.other_names.table import ROWS, rows_of
from tests.architecture.tree import modules

VERBS = (
    *(
        configs.RLConfig,
        configs.SFTConfig,
        configs.DPOConfig,
        configs.KTOConfig,
        configs.RMConfig,
        configs.PRMVerbConfig,
        configs.EvaluateConfig,
        configs.EvalRMConfig,
        configs.LabelStepsConfig,
        configs.GenerateConfig,
        configs.ChatConfig,
        configs.DistillVerbConfig,
        configs.IterateConfig,
    ),
    *(serving.ServeConfig, serving.ServeRMConfig),
    *(DemoConfig, configs.DoctorConfig, model.MergeConfig, model.ConvertConfig),
)
DOTTED = re.compile(r"(?<![\w./{}-])[a-z_]+(?:\.[a-z_0-9]+)+(?![\w(/:])")
FILES = ("json", "jsonl", "yaml", "txt", "py", "parquet", "safetensors", "csv", "html", "md")


def paths(cls: type[Settings], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every setting below ``cls`` by its dotted name, and whether any key may stand below it."""
    for name, field in cls.model_fields.items():
        below = list(branches(field.annotation))
        yield f"{prefix}{name}", typing.get_origin(field.annotation) is dict
        for branch in below:
            yield from paths(branch, f"{prefix}{name}.")


def branches(kind: typing.Any) -> Iterator[type[Settings]]:
    if isinstance(kind, type) and issubclass(kind, Settings):
        yield kind
    for inner in typing.get_args(kind):
        yield from branches(inner)


PATHS = dict(path for verb in VERBS for path in paths(verb))
# Python alone reads data of process reward models so far.
PATHS |= dict(paths(ProcessDataConfig, "data."))
ENDS = {
    ".".join(path.split(".")[k:]): free
    for path, free in PATHS.items()
    for k in range(path.count(".") + 1)
}
"""Every setting by its last words too: a message may leave out the branches that it is about."""
BRANCHES = {part for path in PATHS for part in path.split(".")[:-1]}


def messages(text: str) -> Iterator[tuple[int, str]]:
    """The strings of a module that are sentences, with their lines; values in them are ``{}``. No docstrings."""
    tree = ast.parse(text)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            told |= {id(part) for part in node.values}
            said = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
        ):
            said = node.value
        else:
            continue
        if " " in said:
            yield node.lineno, said


def unknown_settings(text: str) -> list[tuple[int, str]]:
    """The settings that messages of a module name and that do not exist."""
    found = []
    for line, said in messages(text):
        for name in DOTTED.findall(said):
            first, _, last = name.partition(".")[0], "", name.rpartition(".")[2]
            above = [name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)]
            if (
                first in BRANCHES
                and last not in FILES
                and name not in ENDS
                and not any(ENDS.get(a) for a in above)
            ):
                found.append((line, name))
    return found


CATALOGUES = "config/other_names/"
"""Folder of modules whose strings are names of other frameworks."""


def test_every_setting_that_a_message_names_exists() -> None:
    wrong = [
        f"{m.where}:{line} names {name}"
        for m in modules()
        for line, name in unknown_settings(m.text)
        if CATALOGUES not in m.where
    ]
    assert wrong == []


def test_every_setting_that_a_row_of_other_names_names_exists() -> None:
    """A row also names options of other frameworks, which have rows themselves."""
    named = {(row.note, name) for row in ROWS for _, name in unknown_settings(f"x = {row.note!r}")}
    assert [pair for pair in sorted(named) if not rows_of(pair[1])] == []
    assert sum(bool(DOTTED.search(row.note)) for row in ROWS) > 50


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('x = "set run.rollouts_every 0"', ["run.rollouts_every"]),
        ('raise E(f"run.wandb = {x!r} needs wandb, or set log.wandb to null")', ["run.wandb"]),
        (
            'x = "lower engine.max_cache_tokens, algorithm.loss.clip or kl.coef"',
            ["algorithm.loss.clip"],
        ),
        ('"""A docstring may name run.nothing at all."""', []),
        ('x = "see model.safetensors in strategy.deepspeed.zero_optimization and run.seed"', []),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, found: list[str]) -> None:
    assert [name for _, name in unknown_settings(text)] == found


def test_every_name_of_an_earlier_version_stands_for_a_setting_and_is_one_no_more() -> None:
    assert sorted(set(OLD_NAMES.values()) - set(PATHS)) == []
    assert sorted(set(OLD_NAMES) & set(PATHS)) == []
