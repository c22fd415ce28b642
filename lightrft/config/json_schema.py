"""JSON Schema of a verb's settings, by which editors complete, describe and check a YAML file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema

from lightrft.config.base import Settings, descriptions

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import core_schema

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
        for field in fields.values():
            field.pop("title", None)
            # Defaults of sections are those of their settings, and would fill the screen.
            if "$ref" in field or isinstance(field.get("default"), dict):
                field.pop("default", None)
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
