"""Refusals of requests, and the fields of a request."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class HTTPProblem(Exception):
    """A request is refused.

    Args:
        status: HTTP status of the answer.
        message: The cause, and the way out.
        headers: Headers of the answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def bad(message: str) -> HTTPProblem:
    """Return the refusal of a malformed request."""
    return HTTPProblem(400, message)


def openai_error(problem: HTTPProblem) -> dict[str, object]:
    """Return the body of a refusal as in the API of OpenAI."""
    return {"error": {"message": str(problem), "type": "refused", "code": problem.status}}


_OF_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status to the type of an error."""


def anthropic_error(problem: HTTPProblem) -> dict[str, object]:
    """Return the body of a refusal as in the API of Anthropic."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = _OF_ANTHROPIC.get(problem.status, other)
    return {"type": "error", "error": {"type": kind, "message": str(problem)}}


def reason(error: ErrorDetails) -> str:
    """Return the message of an ``error`` of pydantic, as it is said about a field of a request."""
    message = error["msg"].removeprefix("Value error, ")
    return message.replace("Input should", "it should").replace("valid tuple", "valid list")


@dataclass(frozen=True, slots=True)
class HTTPCall:
    """A request that was read.

    Attributes:
        body: The JSON object of the request; its query, if ``data`` is its body. Empty for GET.
        deadline: Time of ``time.monotonic`` after which nobody waits for the answer.
        query: Digest of the body.
        id: Request id that the client made; empty if it made none.
        data: The body of a request that sends bytes and no JSON.
    """

    body: Mapping[str, Any]
    deadline: float
    query: str = ""
    id: str = field(default="")
    data: bytes = b""

    def listed(self, *names: str) -> list[Any]:
        """Return the field of ``names`` that is given as a list. One value is a list of one.

        Raises ``HTTPProblem`` if no field or several are given, or an empty one.
        """
        given = [name for name in names if name in self.body]
        if not given:
            have = ", ".join(self.body) or "nothing"
            raise bad(f"the request has no {' or '.join(map(repr, names))}; it has: {have}")
        if len(given) > 1:
            raise bad(f"the request has {' and '.join(map(repr, given))}; send one of them")
        value = self.body[given[0]]
        found = value if isinstance(value, list) else [value]
        if not found:
            raise bad(f"{given[0]!r} is empty; give at least one item")
        return found

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """Return the field ``name``, a whole number.

        Args:
            name: Name of the field. Its type is that of the fields of the address.
            default: Number for a missing field.
            low: Smallest number.
            high: Largest number.

        Raises:
            HTTPProblem: It is not in these bounds.
        """
        value = self.body.get(name)
        if value is None:
            return default
        if not low <= value <= high:
            raise bad(f"{name} = {reprlib.repr(value)} is no whole number from {low} to {high}")
        return int(value)
