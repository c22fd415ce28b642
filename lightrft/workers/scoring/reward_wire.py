"""The forms in which a client sends responses to a served reward model, as JSON.

A model of the client's vocabulary and template gets token ids and media. It scores the very tokens
that the client has, so scores equal local ones. Any other model gets conversations, and encodes
them as a local one does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrft.engines.served.media_wire import media_from_base64, media_to_base64
from lightrft.types import Batch, Media, Segments
from lightrft.utils.errors import DataError

PATH = "/v1/rewards"
"""Path of the endpoint that takes this form."""


def batch_to_json(batch: Batch) -> dict[str, Any]:
    """Return prompts and responses of ``batch`` as plain data: token ids, and media as base64."""
    found: dict[str, Any] = {}
    for name, segments in (("prompts", batch.prompts), ("responses", batch.responses)):
        rows = [row.tolist() for row in segments.tokens.split(segments.sizes)]
        found[name] = {"input_ids": rows}
        if segments.media:
            found[name]["media"] = media_to_base64(segments.media)
    return {**found, "prompt_of": batch.prompt_of.tolist()}


def batch_from_json(tree: Mapping[str, Any], vocabulary: int) -> Batch:
    """Return the batch of ``batch_to_json``.

    Args:
        tree: The plain data.
        vocabulary: Number of token ids that the model knows.

    Raises:
        DataError: The data is malformed, or has a token that the model does not know.
    """
    prompts = _segments(tree, "prompts", vocabulary)
    responses = _segments(tree, "responses", vocabulary)
    of = tree.get("prompt_of")
    if not _are_whole(of, len(prompts)) or len(of) != len(responses):  # ty: ignore[invalid-argument-type]
        raise DataError(
            f"prompt_of must name one of the {len(prompts)} prompts, from 0, for each of the "
            f"{len(responses)} responses"
        )
    return Batch(prompts, responses, torch.tensor(of, dtype=torch.long))


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """A response to a conversation.

    Attributes:
        messages: Messages before the response, with media as content parts.
        text: The response.
        cut: True if the response was cut at a limit.
        conversation: Number of the conversation. Responses to one share its messages.
    """

    messages: Sequence[Mapping[str, Any]]
    text: str
    cut: bool
    conversation: int


def answers_to_json(answers: Sequence[ServedAnswer]) -> dict[str, Any]:
    """Return ``answers`` as plain data. Their messages must be, too."""
    known: dict[int, int] = {}
    conversations: list[Sequence[Mapping[str, Any]]] = []
    for one in answers:
        if known.setdefault(one.conversation, len(known)) == len(conversations):
            conversations.append(one.messages)
    return {
        "conversations": conversations,
        "answers": [{"text": one.text, "cut": one.cut} for one in answers],
        "prompt_of": [known[one.conversation] for one in answers],
    }


def answers_from_json(tree: Mapping[str, Any]) -> list[ServedAnswer]:
    """Return the answers of ``answers_to_json``. Raises ``DataError`` if the data is malformed."""
    conversations, given, of = (tree.get(n) for n in ("conversations", "answers", "prompt_of"))
    if not isinstance(conversations, list) or not all(map(_are_messages, conversations)):
        raise DataError("conversations must be lists of messages with a role and a content")
    if not isinstance(given, list) or not given or not all(map(_is_answer, given)):
        raise DataError("answers must be one or more objects with a text, and cut: true or false")
    if not _are_whole(of, len(conversations)) or len(of) != len(given):  # ty: ignore[invalid-argument-type]
        raise DataError(
            f"prompt_of must name one of the {len(conversations)} conversations, from 0, for each "
            f"of the {len(given)} answers"
        )
    pairs = zip(given, of)  # ty: ignore[invalid-argument-type]
    return [ServedAnswer(conversations[k], one["text"], one["cut"], k) for one, k in pairs]


def checked_ids(row: object, vocabulary: int, where: str) -> list[int]:
    """Return ``row`` if it is a list of token ids, else raise ``DataError``.

    Args:
        row: The data.
        vocabulary: Number of token ids that the model knows.
        where: Name of the row, for messages.
    """
    if not _are_whole(row, vocabulary) or not row:
        raise DataError(
            f"{where} must be token ids, one or more, from 0 to {vocabulary - 1} (the vocabulary "
            "of the model)"
        )
    return row  # ty: ignore[invalid-explicit-return]


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the tokens of ``tokenizer`` and their ids."""
    text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the chat template of ``tokenizer``; empty if it has none."""
    template = tokenizer.chat_template
    if not template:
        return ""
    return f"sha256:{hashlib.sha256(json.dumps(template).encode()).hexdigest()}"


def weights_layout(model: nn.Module) -> str:
    """Return a digest of names, types and shapes of all tensors of ``model``."""
    lines = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in model.state_dict().items()]
    return f"sha256:{hashlib.sha256(json.dumps(sorted(lines)).encode()).hexdigest()}"


def weights_digest(model: nn.Module) -> str:
    """Return a digest of names, types, shapes and values of all tensors of ``model``."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(memoryview(flat.view(torch.uint8).numpy()))
    return f"sha256:{found.hexdigest()}"


def _segments(tree: Mapping[str, Any], name: str, vocabulary: int) -> Segments:
    part = tree.get(name)
    rows = part.get("input_ids") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(rows, list) or not rows:
        raise DataError(f"{name} must be an object with input_ids, a list of lists")
    checked = []
    for k, row in enumerate(rows):
        checked.append(checked_ids(row, vocabulary, f"{name}.input_ids.{k}"))
    media: Media = {}
    if part.get("media"):
        media = media_from_base64(part["media"], len(rows), f"{name}.media")
    return Segments.of(checked, media)


def _are_whole(values: object, bound: int) -> bool:
    """Return True if ``values`` is a list of whole numbers from 0, below ``bound``."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < bound for v in values)


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one
        for one in value
    )


def _is_answer(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("text"), str)
        and isinstance(value.get("cut"), bool)
    )
