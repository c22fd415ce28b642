"""Every recipe is a config of the verb that its file name starts with, and holds only what differs from the defaults."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrft import config
from lightrft.utils.errors import ConfigError
from lightrft.utils.settings import Settings, dotted, load_settings
from tests.architecture.tree import ROOT

RECIPES = sorted((ROOT / "recipes").glob("**/*.yaml"))
VERBS: dict[str, type[Settings]] = {
    "rl": config.RLConfig,
    "sft": config.SFTConfig,
    "eval": config.EvaluateConfig,
    "generate": config.GenerateConfig,
    "chat": config.ChatConfig,
}


def verb_of(recipe: Path) -> str:
    """``rl`` of ``rl_gsm8k.yaml``."""
    return recipe.stem.partition("_")[0]


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


def test_the_folder_holds_recipes_of_known_verbs_only() -> None:
    assert (ROOT / "recipes").is_dir()
    strangers = [
        p.name for p in (ROOT / "recipes").rglob("*") if p.is_file() and (p.suffix != ".yaml" or verb_of(p) not in VERBS)
    ]
    assert strangers == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_parses_as_its_verbs_config(recipe: Path) -> None:
    assert isinstance(load_settings(VERBS[verb_of(recipe)], [recipe]).settings, VERBS[verb_of(recipe)])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_holds_only_what_differs_from_the_defaults(recipe: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    assert redundant(VERBS[verb_of(recipe)], tree, tmp_path) == []


def test_a_key_that_repeats_a_default_is_seen(tmp_path: Path) -> None:
    tree = {"model": "some/model", "optimizer": {"lr": config.OptimizerConfig().lr, "eps": 1e-5}}
    assert redundant(config.RLConfig, tree, tmp_path) == ["optimizer.lr"]
