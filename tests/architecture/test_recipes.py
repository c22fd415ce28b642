"""Every recipe opens with the command that runs it, parses as that verb's config, and holds only what differs from the defaults."""

from __future__ import annotations

import copy
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrft.cli.demo import DEMOS, preset
from lightrft.config import verbs
from lightrft.config.base import Settings, dotted, load_settings
from lightrft.config.demo import DemoConfig
from lightrft.utils.errors import ConfigError
from tests.architecture.tree import ROOT
from tests.architecture.verbs import CONFIG_OF

RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
COMMAND = re.compile(r"# (lightrft \S+ .+)")


def command_of(recipe: Path) -> tuple[str, list[str], list[str]]:
    """Verb, files and overrides of the command on a recipe's first line: ``# lightrft rl recipes/this.yaml model=...``."""
    first = recipe.read_text(encoding="utf-8").partition("\n")[0]
    found = COMMAND.fullmatch(first)
    assert found, f"{recipe.name} must open with a comment that is its command, not {first!r}"
    verb, *words = shlex.split(found[1])[1:]
    verb = f"grm {words.pop(0)}" if verb == "grm" else verb
    return verb, [w for w in words if "=" not in w], [w for w in words if "=" in w]


def without(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy of ``tree`` that lacks the leaf ``a.b``."""
    tree = copy.deepcopy(tree)
    *above, last = key.split(".")
    branch = tree
    for part in above:
        branch = branch[part]
    del branch[last]
    return tree


def redundant(cls: type[Settings], tree: dict[str, Any], folder: Path) -> list[str]:
    """Keys of ``tree`` whose removal changes nothing."""

    def load(some: dict[str, Any]) -> Settings | None:
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(some), encoding="utf-8")
        try:
            return load_settings(cls, [file]).settings
        except ConfigError:
            return None

    whole = load(tree)
    return [key for key, _ in dotted(tree) if load(without(tree, key)) == whole]


def by_name(recipe: Path) -> str:
    return recipe.stem


def test_the_folder_holds_recipes_only() -> None:
    strangers = [
        p.name
        for p in (ROOT / "recipes").rglob("*")
        if p.is_file() and p.suffix not in {".yaml", ".md"}
    ]
    assert strangers == []
    assert RECIPES, "there is no recipe"


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_the_command_on_a_recipes_first_line_is_a_run_of_it(recipe: Path) -> None:
    verb, files, overrides = command_of(recipe)
    assert str(recipe.relative_to(ROOT)) in files
    assert isinstance(
        load_settings(CONFIG_OF[verb], [ROOT / f for f in files], overrides).settings,
        CONFIG_OF[verb],
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_a_recipe_holds_only_what_differs_from_the_defaults(recipe: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    assert redundant(CONFIG_OF[command_of(recipe)[0]], tree, tmp_path) == []


def test_a_key_that_repeats_a_default_is_seen(tmp_path: Path) -> None:
    tree = {"model": "some/model", "optimizer": {"lr": verbs.OptimizerConfig().lr, "eps": 1e-5}}
    assert redundant(verbs.RLConfig, tree, tmp_path) == ["optimizer.lr"]


@pytest.mark.parametrize("name", DEMOS)
def test_what_the_demos_run_parses(name: str) -> None:
    with resources.as_file(preset(name)) as file:
        demo = load_settings(DemoConfig, [file]).settings
    policies = [part.rl for part in demo.learned_rewards.values()]
    for last in policies or [demo.rl if demo.dpo is None else demo.dpo]:
        assert last.reward.terms
