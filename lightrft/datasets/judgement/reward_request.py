"""Requests to servers of rewards, in the protocols of OpenRLHF and of LightRFT."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.datasets.judgement.chat_messages import media_files
from lightrft.datasets.judgement.question import Raw
from lightrft.datasets.row_tables import MalformedRow
from lightrft.types import Prompt
from lightrft.utils.atomic_files import json_line

TEXTS = {"openrlhf": "query", "lightrft": "queries"}
"""Protocol to the field of a request that holds the texts of prompts with their responses."""


@dataclass(frozen=True, slots=True)
class PromptForm:
    """A prompt as it is sent.

    Attributes:
        text: The rendered prompt. An image is written as the chat template writes it.
        images: Image files as base64. ``None`` for a prompt without images.
        unsent: Kinds of media of the prompt that the protocol cannot send.
        problem: The reason why the prompt cannot be sent; empty if it can.
    """

    text: str
    images: list[str] | None = None
    unsent: tuple[str, ...] = ()
    problem: str = ""


def media_form(prompt: Prompt, request: Raw, protocol: str) -> PromptForm:
    """Return the form of a prompt with media. Its tokens have a placeholder for each patch.

    Args:
        prompt: The prompt.
        request: Its messages.
        protocol: The setting ``reward.models.protocol``.
    """
    if protocol != "lightrft":
        return PromptForm(prompt.text, unsent=tuple(sorted(prompt.media)))
    try:
        files = media_files(request)
    except MalformedRow as error:
        return PromptForm(prompt.text, problem=f"prompt {prompt.id}: {error}")
    images = [base64.b64encode(data).decode() for kind, data in files if kind == "image"]
    others = sorted({kind for kind, _ in files if kind != "image"})
    return PromptForm(prompt.text, images or None, tuple(others))


def request_fields(
    protocol: str, texts: Sequence[str], forms: Sequence[PromptForm], prompts: Sequence[Prompt]
) -> dict[str, object]:
    """Return the request for the rewards of responses.

    Args:
        protocol: The setting ``reward.models.protocol``.
        texts: Prompt and response of each response.
        forms: Form of the prompt of each response.
        prompts: Prompt of each response.
    """
    found: dict[str, object] = {TEXTS[protocol]: [*texts], "prompts": [one.text for one in forms]}
    labels = [_sendable(one.label) for one in prompts]
    # OpenRLHF always sends labels.
    if protocol == "openrlhf" or _has_any(labels):
        found["labels"] = labels
    rest = {
        "references": [_sendable(one.reference) for one in prompts],
        "images": [one.images for one in forms],
    }
    return found | {name: values for name, values in rest.items() if _has_any(values)}


def _has_any(values: Sequence[object]) -> bool:
    return any(value is not None for value in values)


def _sendable(value: object) -> object:
    """Return a value of a row as plain data. A value that JSON does not know becomes its text."""
    try:
        return json.loads(json_line(value))
    except TypeError:
        return str(value)
