"""The form that a request asks its response to have."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from lightrft.config.decoding import ConstraintConfig
from lightrft.serving.problems import bad, reason

OUTPUTS = {"json": "json_schema", "regex": "regex", "choice": "choices"}
"""Field of ``structured_outputs``, or of ``guided_*``, to the setting ``sampling.constraint``."""
GUIDED = ("guided_json_object", *(f"guided_{name}" for name in OUTPUTS))
"""Fields of earlier versions of vLLM, one for each field of ``structured_outputs``."""
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
        HTTPProblem: A field is malformed or not supported, or two fields ask for a form.
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


def _response_format(given: Any, field: str) -> list[tuple[str, dict[str, Any]]]:
    kind = given.get("type") if isinstance(given, Mapping) else None
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


def _outputs(given: Any, prefix: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the form that each field of ``given`` asks for, by its name after ``prefix``."""
    if not isinstance(given, Mapping):
        raise bad("structured_outputs must be one of {json}, {regex}, {choice} and {json_object}")
    found: list[tuple[str, dict[str, Any]]] = []
    for name, value in given.items():
        field = f"{prefix}{name}"
        if value is None or value is False:
            continue
        if name == "json_object":
            found.append((field, {"json_schema": ANY_OBJECT}))
        elif name in OUTPUTS:
            found.append((field, {OUTPUTS[name]: value}))
        else:
            raise bad(f"{field} is not supported; use json, regex or choice")
    return found
