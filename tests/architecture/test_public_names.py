"""Names that others build on stay where they are."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields

import pytest

import lightrft
import lightrft.config
from docs.public_names import BATCH, MODELS, sections
from lightrft.api.run import Page
from lightrft.api.shown_data import ShownData
from lightrft.cli.main import IN_TABLE, VERBS
from lightrft.observability.events import EVENTS, RunEvent
from lightrft.types import Prompt, Rollout
from tests.architecture.tree import ROOT
from tests.architecture.verbs import CONFIG_OF


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


def on_page() -> dict[str, list[str]]:
    """The first column of each table of the page, by its heading."""
    _, *parts = (ROOT / "docs" / "public.md").read_text(encoding="utf-8").split("\n## ")
    named = {part.partition("\n")[0].strip("`"): part for part in parts}
    return {title: re.findall(r"^\| `(.+)` \| \S", part, re.M) for title, part in named.items()}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_the_page_of_public_names_has_the_names_that_are_there_and_no_others() -> None:
    found = {title: set(names) for title, names in on_page().items()}
    events = {name: [f.name for f in fields(event)] for name, event in EVENTS.items()}
    common = ("number", "phase", "requests")
    assert found == {
        "lightrft": set(lightrft.__all__),
        "lightrft.config": set(lightrft.config.__all__),
        "lightrft.Run": public(lightrft.Run),
        "lightrft.Policy": public(lightrft.Policy),
        "Page": {"path"},
        "ShownData": public(ShownData),
        "Callbacks": set(EVENTS),
        "Events": public(RunEvent) - {"requests"},
        "Fields of one event": {
            f"{event}`: `{name}" for event in events for name in events[event] if name not in common
        },
        "lightrft.types.Rollout": {*Rollout.__dataclass_fields__, "plain_text"},
        "lightrft.types.Prompt": {*Prompt.__dataclass_fields__, "begun", "as_json"},
        "lightrft.types.Batch": {name.strip("`") for name in BATCH},
        "lightrft.models": set(MODELS),
    }
    assert hasattr(Page(ROOT, 1), "path")


def test_each_public_name_is_said_to_be_something_by_its_docstring() -> None:
    said = [text for _, _, rows in sections() for _, text in rows]
    assert len(said) > 100
    assert [text for text in said if not re.match(r"[A-Z`].{8,}", text)] == []
