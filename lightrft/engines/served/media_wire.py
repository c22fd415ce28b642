"""Media of prompts in JSON: the tensors that a model reads, as base64 of safetensors."""

from __future__ import annotations

import base64
import binascii

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lightrft.types import Media, Ragged
from lightrft.utils.errors import DataError


def media_to_base64(media: Media) -> str:
    """Return the tensors of ``media``, with the lengths of their samples."""
    tensors: dict[str, Tensor] = {}
    for name, rows in media.items():
        tensors[f"{name}.values"] = rows.values.cpu().contiguous()
        tensors[f"{name}.lengths"] = rows.lengths.cpu().contiguous()
    return base64.b64encode(save(tensors)).decode("ascii")


def media_from_base64(text: object, count: int, name: str) -> Media:
    """Return the media of ``media_to_base64``.

    Args:
        text: The base64.
        count: Number of samples.
        name: Name of the field, for messages.

    Raises:
        DataError: It is no such text, or its lengths do not fit.
    """
    try:
        tensors = load(base64.b64decode(str(text), validate=True))
        names = [key.removesuffix(".values") for key in tensors if key.endswith(".values")]
        media = {n: Ragged(tensors[f"{n}.values"], tensors[f"{n}.lengths"]) for n in names}
    except (binascii.Error, SafetensorError, KeyError, ValueError) as error:
        raise DataError(
            f"{name} is no base64 of safetensors ({error}): was the upload truncated?"
        ) from error
    for key, rows in media.items():
        lengths = rows.lengths
        fits = lengths.dtype == torch.long and lengths.shape == (count,) and rows.values.dim() > 0
        if not fits or int(lengths.min()) < 0 or int(lengths.sum()) != len(rows.values):
            raise DataError(f"{name}: the lengths of {key!r} do not fit its rows")
    return media
