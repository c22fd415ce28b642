"""The form that a request asks its response to have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lightrft.config.decoding import ConstraintConfig
from lightrft.serving.problems import bad

OUTPUTS = {"json": "json_schema", "regex": "regex", "choice": "choices"}
"""Field of ``structured_outputs``, or of ``guided_*``, to the setting ``sampling.constraint``."""
ANY_OBJECT = {"type": "object"}


def read_constraint(body: Mapping[str, Any]) -> ConstraintConfig | None:
    """Return the constraint of a request, as in the API of OpenAI or of vLLM. ``None`` without one.

    Raises:
        HTTPProblem: A field is malformed or not supported, or two fields ask for a form.
    """
    found: list[dict[str, Any]] = []
    if (given := body.get("response_format")) is not None:
        found += _response_format(given)
    if (given := body.get("structured_outputs")) is not None:
        found += _outputs(given)
    prefix = "guided_"
    guided = {
        name.removeprefix(prefix): value
        for name, value in body.items()
        if name.startswith(prefix) and value is not None
    }
    found += _outputs(guided)
    if len(found) > 1:
        raise bad(
            "two fields give the form of the response; send one of response_format, "
            "structured_outputs and guided_*"
        )
    if not found:
        return None
    try:
        return ConstraintConfig.model_validate(found[0])
    except ValidationError as error:
        problems = "; ".join(str(problem["msg"]) for problem in error.errors())
        raise bad(f"form of the response: {problems}") from error


def _response_format(given: Any) -> list[dict[str, Any]]:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [{"json_schema": ANY_OBJECT}]
    if kind == "json_schema":
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise bad("response_format needs json_schema = {name, schema}, with a schema")
        return [{"json_schema": dict(schema)}]
    raise bad(f"response_format.type = {kind!r}; use text, json_object or json_schema")


def _outputs(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, Mapping):
        raise bad("structured_outputs must be one of {json}, {regex}, {choice} and {json_object}")
    found: list[dict[str, Any]] = []
    for name, value in given.items():
        if value is None or value is False:
            continue
        if name == "json_object":
            found.append({"json_schema": ANY_OBJECT})
        elif name in OUTPUTS:
            found.append({OUTPUTS[name]: value})
        else:
            raise bad(f"a response of the form {name!r} is not supported; use json, regex, choice")
    return found
