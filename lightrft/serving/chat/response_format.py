"""The form that a request asks its response to have."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from lightrft.config.generation.decoding import ConstraintConfig
from lightrft.serving.field_table import BOOLEAN, NULL, OBJECT, TEXT, RequestFields, list_of
from lightrft.serving.problems import bad, reason

FORMAT = RequestFields(read={"type": (TEXT,), "json_schema": (OBJECT, NULL)})
"""Fields of ``response_format`` of OpenAI."""
OUTPUTS = RequestFields(
    read={
        "json": (OBJECT, TEXT, NULL),
        "regex": (TEXT, NULL),
        "choice": (list_of(TEXT), NULL),
        "json_object": (BOOLEAN, NULL),
    },
    neutral={
        "grammar": None,
        "structural_tag": None,
        "whitespace_pattern": None,
        "disable_fallback": False,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
    },
)
"""Fields of ``structured_outputs`` of vLLM."""
GUIDED = {f"guided_{name}": types for name, types in OUTPUTS.read.items()}
"""Fields of earlier versions of vLLM, one for each field of ``structured_outputs``."""
_SETTINGS = {"json": "json_schema", "regex": "regex", "choice": "choices"}
"""Field of ``structured_outputs``, or of ``guided_*``, to the setting ``sampling.constraint``."""
OF_MESSAGES = "output_config.format"
"""Field of a chat completion that was made of messages, in place of ``response_format``."""
ANY_OBJECT = {"type": "object"}


class AskedForm(NamedTuple):
    """The form that a request asks for.

    Attributes:
        field: The field of the request that gives the form.
        constraint: The form.
    """

    field: str
    constraint: ConstraintConfig


def read_constraint(body: Mapping[str, Any]) -> AskedForm | None:
    """Return the constraint of a request, as in the API of OpenAI or of vLLM. ``None`` without one.

    Raises:
        HTTPProblem: A field is malformed, or two fields ask for a form.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for field in ("response_format", OF_MESSAGES):
        if (given := body.get(field)) is not None:
            found += _response_format(given, field)
    if (given := body.get("structured_outputs")) is not None:
        found += _outputs(given, "structured_outputs.")
    guided = {name.removeprefix("guided_"): body[name] for name in GUIDED if name in body}
    found += _outputs(guided, "guided_")
    if len(found) > 1:
        raise bad(
            "two fields give the form of the response; send one of response_format, "
            "structured_outputs and guided_*"
        )
    if not found:
        return None
    field, tree = found[0]
    try:
        return AskedForm(field, ConstraintConfig.model_validate(tree))
    except ValidationError as error:
        (value,) = tree.values()
        raise bad(f"{field} = {reprlib.repr(value)}: {reason(error.errors()[0])}") from error


def _response_format(given: Mapping[str, Any], field: str) -> list[tuple[str, dict[str, Any]]]:
    kind = given.get("type")
    if kind in ("text", "json_object") and given.get("json_schema") is not None:
        raise bad(f"{field}.json_schema needs type = json_schema, and it is {kind}")
    if kind == "text":
        return []
    if kind == "json_object":
        return [(field, {"json_schema": ANY_OBJECT})]
    if kind == "json_schema":
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            own = "" if field == OF_MESSAGES else " json_schema = {name, schema}, with"
            raise bad(f"{field} needs{own} a schema")
        return [(field, {"json_schema": dict(schema)})]
    raise bad(f"{field}.type = {reprlib.repr(kind)}; use text, json_object or json_schema")


def _outputs(given: Mapping[str, Any], prefix: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the form that each field of ``given`` asks for, by its name after ``prefix``."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, value in given.items():
        # the other fields ask for nothing, or are refused
        if value is None or value is False or name not in OUTPUTS.read:
            continue
        form = {_SETTINGS[name]: value} if name in _SETTINGS else {"json_schema": ANY_OBJECT}
        found.append((f"{prefix}{name}", form))
    return found
