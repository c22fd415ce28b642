"""Names that others build on stay where they are."""

from __future__ import annotations

import importlib
import inspect

import pytest

import lightrft
from lightrft.cli.main import IN_TABLE, VERBS
from tests.architecture.verbs import CONFIG_OF

MODELS = (
    "ActorAL",
    "ActorLanguage",
    "ActorText",
    "ActorVL",
    "CriticLanguage",
    "CriticVL",
    "GenerativeRewardModelVL",
    "ScalarRewardModel",
    "ScalarRewardModelAL",
    "ScalarRewardModelVL",
    "apply_lora_configuration",
    "get_supported_parameters",
    "log_probs_from_logits",
    "reset_position_ids",
    "supports_parameter",
)


@pytest.mark.parametrize("name", MODELS)
def test_a_documented_name_of_the_models_is_there(name: str) -> None:
    assert callable(getattr(importlib.import_module("lightrft.models"), name))


def test_the_two_names_of_the_text_actor_are_one_class() -> None:
    models = importlib.import_module("lightrft.models")
    assert models.ActorText is models.ActorLanguage


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_verb_is_a_row_of_the_table_or_a_module_with_run(verb: str) -> None:
    table = importlib.import_module("lightrft.cli.verbs")
    tables = {**table.TRAINING, **table.ONE_PROCESS, **table.SERVING}
    assert (verb in IN_TABLE) == (verb in tables)
    if verb not in IN_TABLE:
        run = importlib.import_module(f"lightrft.cli.{verb}").run
        assert list(inspect.signature(run).parameters) == ["arguments"]
    assert verb in CONFIG_OF


def test_the_version_is_that_of_the_installed_package() -> None:
    assert lightrft.__version__[0].isdigit()
