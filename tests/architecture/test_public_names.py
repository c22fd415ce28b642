"""Names that others build on stay where they are."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields

import pytest

import lightrft
import lightrft.config
from docs.api import documented, parameters
from docs.public_names import BATCH, MODELS, sections
from lightrft.api.run import Page
from lightrft.api.shown_data import ShownData
from lightrft.observability.events import EVENTS, RunEvent
from lightrft.types import Batch, Prompt, Rollout
from lightrft.verbs import VERBS
from tests.architecture.tree import ROOT
from tests.architecture.verbs import CONFIG_OF


@pytest.mark.parametrize("name", MODELS)
def test_a_documented_name_of_the_models_is_there(name: str) -> None:
    assert callable(getattr(importlib.import_module("lightrft.models"), name))


def test_the_two_names_of_the_text_actor_are_one_class() -> None:
    models = importlib.import_module("lightrft.models")
    assert models.ActorText is models.ActorLanguage


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_verb_has_a_function_or_a_module_with_run(verb: str) -> None:
    row = VERBS[verb]
    if row.function:
        module, _, name = row.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
    if row.kind in ("module", "rounds"):
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


def test_the_reference_of_python_has_each_public_name_with_a_signature_or_a_type() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^##+ ([^\n]+)\n(.*?)(?=^##+ |\Z)", page, re.M | re.S))
    titles = {"lightrft": "lightrft.", "lightrft.models": "", "ShownData": "ShownData."}
    titles |= {"lightrft.Run": "Run.", "lightrft.Policy": "Policy.", "Events": "RunEvent."}
    names = on_page()
    fields = {"number", "phase"}
    for title, prefix in titles.items():
        for name in set(names[title]) - fields - {"Run", "Policy", "__version__"}:
            assert re.search(r"```python|Property of type", entries[f"`{prefix}{name}`"]), name
    for name in (*names["lightrft.types.Rollout"], *names["lightrft.types.Prompt"]):
        assert f"* `{name}`: " in page or f".{name}`\n" in page, name
    for name in Batch.__dataclass_fields__:
        assert name.startswith("_") or f"`{name}`" in entries["`lightrft.types.Batch`"], name


def test_each_argument_of_a_public_method_is_described_in_its_docstring() -> None:
    classes = (lightrft.Run, lightrft.Policy, ShownData, RunEvent)
    methods = [
        value
        for cls in classes
        for name, value in vars(cls).items()
        if not name.startswith("_") and inspect.isfunction(value)
    ]
    models = importlib.import_module("lightrft.models")
    values = [*methods, lightrft.here, *(getattr(models, name) for name in MODELS)]
    lacking = {}
    for value in values:
        text = "\n".join(documented(value))
        if missing := [one for one in parameters(value) if f"`{one}" not in text]:
            lacking[value.__qualname__] = missing
    assert len(values) > 30
    assert lacking == {}
