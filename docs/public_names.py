"""The page of the names that programs may build on: ``public.md``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module

import lightrft
from lightrft import config
from lightrft.api.run import Page
from lightrft.api.shown_data import ShownData
from lightrft.observability.events import EVENTS, RunEvent
from lightrft.types import Batch, Prompt, Rollout

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
"""Names of ``lightrft.models`` that stay."""
BATCH = ("`lengths`", "`tokens`", "`mask`", "`row_of`", "`groups`", "`replace`", "`select`")
"""Names of ``Batch`` that stay, besides its columns."""
VERSION = "`__version__`", "The version of the installed package."


def public_page() -> str:
    """Return the page."""
    lines = [
        "# Public names",
        "",
        "Programs may build on the names of this page. A name leaves it only with a new major "
        "version, and a changelog entry says what replaces it. Every other name of the package may "
        "change at any time. Settings are names of [configuration](configuration.md), and parts of "
        "algorithms those of [parts](parts.md).",
        "",
    ]
    for title, about, rows in sections():
        lines += [f"## {title}", "", about, "", "| name | what it is |", "|---|---|"]
        lines += [f"| {name} | {said.replace('|', chr(92) + '|')} |" for name, said in rows]
        lines.append("")
    return "\n".join(lines)


Rows = Sequence[tuple[str, str]]
"""Names with one sentence each."""


def sections() -> Iterator[tuple[str, str, Rows]]:
    """Yield the title of each section, what it says first, and its names."""
    of_package = [name for name in sorted(lightrft.__all__) if name != "__version__"]
    yield (
        "`lightrft`",
        "[From Python](python.md) shows them.",
        [VERSION, *((f"`{name}`", _said(getattr(lightrft, name))) for name in of_package)],
    )
    yield (
        "`lightrft.config`",
        "Classes of sections: `optimizer=OptimizerConfig(lr=1e-6)`. They have the names and errors "
        "of tables. [Configuration](configuration.md) has their settings.",
        [(f"`{name}`", _said(getattr(config, name))) for name in config.__all__],
    )
    yield "`lightrft.Run`", "The result of a verb that trains.", members(lightrft.Run)
    yield "`lightrft.Policy`", "The parts of a loop of a program.", members(lightrft.Policy)
    yield (
        "`Page`",
        "`run.report()`, `run.plot()` and `save()` of shown data return one.",
        [
            *_described(Page, "Args", ("path",)),
        ],
    )
    yield "`ShownData`", "`lightrft.data()` returns one.", members(ShownData)
    yield (
        "Callbacks",
        "Keywords of functions that train. [Callbacks](python.md#callbacks) has when each is "
        "called.",
        [(f"`{name}`", _said(event)) for name, event in EVENTS.items()],
    )
    of_all = _described(RunEvent, "Attributes", ("number", "phase"))
    yield (
        "Events",
        "Every callback gets an event. These are of all of them.",
        [
            *of_all,
            *members(RunEvent),
        ],
    )
    yield (
        "Fields of one event",
        "The keyword of its callback stands in front.",
        [
            (f"`{keyword}`: {name}", said)
            for keyword, event in EVENTS.items()
            for name, said in _described(event, "Attributes", event.__annotations__)
        ],
    )
    rollout = "Rewards, filters and `on_rollouts` get responses, and `Policy.sample` returns them."
    yield "`lightrft.types.Rollout`", rollout, _fields(Rollout)
    yield "`lightrft.types.Prompt`", "`rollout.prompt` is one.", _fields(Prompt)
    batch = "Advantages and losses get it. [Architecture](architecture.md#nouns) has its columns."
    yield "`lightrft.types.Batch`", batch, [row for row in members(Batch) if row[0] in BATCH]
    yield (
        "`lightrft.models`",
        "[Classes and functions of LightRFT](lightrft-names.md) has the names of LightRFT's own "
        "programs, which stay too.",
        [(f"`{name}`", _said(getattr(import_module("lightrft.models"), name))) for name in MODELS],
    )


def members(cls: type) -> Rows:
    """Return the public methods and properties of a class, in the order of its code."""
    return [
        (f"`{name}`", _said(value))
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    ]


def _fields(cls: type) -> Rows:
    """Return the fields of a data class, and its properties."""
    return [*_described(cls, "Attributes", cls.__dataclass_fields__), *members(cls)]


def _described(cls: type, block: str, names: Sequence[str] | dict[str, object]) -> Rows:
    """Return names with what a block of the docstring of a class says about each.

    Args:
        cls: The class.
        block: Title of the block.
        names: The names. Those that start with an underscore, and class variables, are left out.
    """
    text = (inspect.getdoc(cls) or "").partition(f"{block}:\n")[2]
    said = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.M))
    return [(f"`{name}`", _sentence(said[name])) for name in names if name in said]


def _said(value: object) -> str:
    return _sentence(inspect.getdoc(value) or "")


def _sentence(text: str) -> str:
    """Return the first sentence of a docstring, with code in Markdown."""
    paragraph = " ".join(text.partition("\n\n")[0].split()).replace("``", "`")
    first = re.split(r"(?<=[.?!]) (?=[A-Z`])|: lightrft ", paragraph)[0]
    return first if first.endswith((".", "...")) else f"{first}."
