"""The verb ``lightrft settings``."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema

from lightrft.cli.arguments import description_lines, wants_usage
from lightrft.config.base import Settings, description_of, descriptions, dotted, section_defaults
from lightrft.config.misread_values import leaves
from lightrft.config.other_names.table import ROWS
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import inline_yaml
from lightrft.verbs import all_settings

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import core_schema


USAGE = "lightrft settings <word> [<word> ...] | --schema <verb>"
MOST = 40
"""Most settings that are printed."""


@dataclass(slots=True)
class Found:
    """A setting that was found, with the verbs that have it."""

    name: str
    default: str
    about: str
    verbs: list[str] = field(default_factory=list)


def run(arguments: Sequence[str]) -> int:
    """Print the settings whose name or description has all words, and names elsewhere.

    Raises:
        ConfigError: Nothing was found, or there is no such verb.
    """
    if wants_usage(arguments):
        sys.stdout.write(
            f"{USAGE}\n\nSearch the names and descriptions of all settings, and the names of other "
            "frameworks.\n\n"
            "With --schema, print the JSON Schema of a verb's settings, for editors of YAML.\n"
        )
        return 0
    if arguments[0] == "--schema":
        sys.stdout.write(schema_text(arguments[1:]))
        return 0
    words = [word.lower().lstrip("-") for word in arguments]
    known = list(settings())
    named = [one for one in known if all(word in one.name.lower() for word in words)]
    told = [
        one
        for one in known
        if one not in named and all(word in f"{one.name} {one.about}".lower() for word in words)
    ]
    elsewhere = list(names_elsewhere(words))
    if not (named or told or elsewhere):
        leaf_names = {one.name.rpartition(".")[2] for one in known}
        near = difflib.get_close_matches(words[0], leaf_names, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"no setting has {' and '.join(arguments)}{hint}")
    found = [*sorted(named, key=depth), *sorted(told, key=depth)]
    lines = [line for one in found[:MOST] for line in shown(one)]
    if found[MOST:]:
        lines.append(f"{len(found) - MOST} more; add a word")
    sys.stdout.write("\n".join([*lines, *elsewhere[:MOST]]) + "\n")
    return 0


def settings() -> Iterator[Found]:
    """Yield every setting of every verb, once for each description and default."""
    rows: dict[tuple[str, str, str], Found] = {}
    for verb, cls in all_settings().items():
        # The defaults of a section may differ from those of its class.
        own = dict(dotted(cls().model_dump(mode="json")))
        for name in leaves(cls):
            defaults = section_defaults(cls, name)
            if name not in defaults:
                continue  # a section
            about, value = description_of(cls, name), own.get(name, defaults[name])
            default = inline_yaml(value) if is_plain(value) else ""
            one = rows.setdefault((name, about, default), Found(name, default, about))
            one.verbs.append(verb)
    yield from rows.values()


def schema_text(words: Sequence[str]) -> str:
    """Return the JSON Schema of the verb ``words``, indented.

    Raises:
        ConfigError: There is no such verb with settings.
    """
    verb, known = " ".join(words), all_settings()
    if verb not in known:
        wrong = f" and not {verb}" if verb else ""
        raise ConfigError(f"--schema takes a verb{wrong}: {', '.join(known)}")
    return json.dumps(json_schema(known[verb]), indent=1, ensure_ascii=False) + "\n"


def depth(one: Found) -> int:
    """Return the number of sections that a setting is in."""
    return one.name.count(".")


def is_plain(value: object) -> bool:
    """Return True for a default that is one line of YAML."""
    return value is None or isinstance(value, bool | int | float | str)


def shown(one: Found) -> Iterator[str]:
    """Yield the lines of a setting: name, default and verbs, then its description."""
    default = f" = {one.default}" if one.default else ""
    yield f"{one.name}{default}  ({', '.join(one.verbs)})"
    yield from description_lines(one.about, shutil.get_terminal_size().columns)


def names_elsewhere(words: Sequence[str]) -> Iterator[str]:
    """Yield a line for each name of another framework that has all words as a whole part."""
    for row in ROWS:
        for framework, name in row.each_name():
            parts = {name, *name.split(".")}
            if all(word in parts for word in words):
                here = " or ".join(row.here.split()) or "not a setting here"
                note = f": {row.note}" if row.note else ""
                yield f"{name} of {framework or 'other frameworks'} is {here}{note}"


DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOTTED = r"^[a-z_0-9]+\."
"""A key of a setting inside a section, e.g. ``sampling.top_p`` of ``eval``."""

SECTIONS = ("model", "model-fields", "function-after", "function-before")
"""What pydantic wraps validators of a whole section around."""


def json_schema(cls: type[Settings]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of what a YAML file of ``cls`` may hold.

    It has names, types, bounds and descriptions. What a setting means with another is checked by
    the verb alone.
    """
    return {"$schema": DIALECT, **cls.model_json_schema(schema_generator=_Schema)}


class _Schema(GenerateJsonSchema):
    """Adds what ``Settings`` read besides their fields: descriptions, dotted keys, bare values."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        cls = schema["cls"]
        fields = found["properties"]
        for entry in fields.values():
            entry.pop("title", None)
            # Defaults of sections are those of their settings, and would fill the screen.
            if "$ref" in entry or isinstance(entry.get("default"), dict):
                entry.pop("default", None)
        for name, about in descriptions(cls).items():
            fields[name]["description"] = about
        found["patternProperties"] = {DOTTED: True}
        # Any setting may be given on the command line instead.
        for name in ("title", "required"):
            found.pop(name, None)
        return {"anyOf": [found, fields[cls.shorthand]]} if cls.shorthand else found

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        found = super().function_before_schema(schema)
        # Around a section it merges defaults. Around a list it reads a bare name, or one item.
        if schema["schema"]["type"] in SECTIONS:
            return found
        return {"anyOf": [found, found["items"], {"type": "string"}]} if "items" in found else {}
