"""The form in which a client sends token ids and media to a served reward model, as JSON.

A served model then scores the very tokens that the client has, so scores equal local ones.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.types import Batch, Media, Ragged, Segments
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
            found[name]["media"] = _encoded(segments.media)
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
    media = _decoded(part["media"], len(rows), name) if part.get("media") else {}
    return Segments.of(checked, media)


def _are_whole(values: object, bound: int) -> bool:
    """Return True if ``values`` is a list of whole numbers from 0, below ``bound``."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < bound for v in values)


def _encoded(media: Media) -> str:
    tensors: dict[str, Tensor] = {}
    for name, rows in media.items():
        tensors[f"{name}.values"] = rows.values.cpu().contiguous()
        tensors[f"{name}.lengths"] = rows.lengths.cpu().contiguous()
    return base64.b64encode(save(tensors)).decode("ascii")


def _decoded(text: object, count: int, name: str) -> Media:
    try:
        tensors = load(base64.b64decode(str(text), validate=True))
        names = [key.removesuffix(".values") for key in tensors if key.endswith(".values")]
        media = {n: Ragged(tensors[f"{n}.values"], tensors[f"{n}.lengths"]) for n in names}
    except (binascii.Error, SafetensorError, KeyError, ValueError) as error:
        raise DataError(
            f"{name}.media is no base64 of safetensors ({error}): was the upload truncated?"
        ) from error
    for key, rows in media.items():
        lengths = rows.lengths
        fits = lengths.dtype == torch.long and lengths.shape == (count,) and rows.values.dim() > 0
        if not fits or int(lengths.min()) < 0 or int(lengths.sum()) != len(rows.values):
            raise DataError(f"{name}.media: the lengths of {key!r} do not fit its rows")
    return media
