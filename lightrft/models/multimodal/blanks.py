"""Blank media, on which a rank makes the calls of another rank whose weights it shards."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightrft.distributed.collectives import EqualCalls
from lightrft.types import Ragged, Segments
from lightrft.utils.errors import ModelError


def is_sharded(parameter: Tensor) -> bool:
    """Return ``True`` for a parameter of which this process has a part, by FSDP or DeepSpeed."""
    # DeepSpeed leaves a parameter without elements between calls.
    emptied = hasattr(parameter, "ds_id") and parameter.numel() == 0
    return isinstance(parameter, DTensor) or emptied


def check_calls(model: PreTrainedModel, equal: EqualCalls) -> None:
    """Raise ``ModelError`` if the weights are sharded over ranks that ``equal`` does not know."""
    if equal.ranks is None and any(map(is_sharded, model.parameters())):
        raise ModelError(
            f"model type {model.config.model_type!r}: its weights are sharded, but by none of "
            "lightrft's strategies, which make equal calls of all processes for their media; "
            "set strategy.kind=fsdp2 or deepspeed"
        )


def blank_like(name: str, tensor: Tensor) -> Tensor:
    """Return ones of the shape of ``tensor``, which take no memory, or a copy on the CPU.

    Integers, such as grids, and masks are copied, since they decide about the computation.

    Args:
        name: Name of the input.
        tensor: Its values.
    """
    if tensor.is_floating_point() and "mask" not in name:
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
    return tensor.cpu()


def blank_run(segments: Segments) -> Segments:
    """Return ``segments`` with blank media."""
    media = {
        name: Ragged(blank_like(name, rows.values), rows.lengths.cpu())
        for name, rows in segments.media.items()
    }
    return Segments(segments.tokens.cpu(), segments.lengths.cpu(), media)
