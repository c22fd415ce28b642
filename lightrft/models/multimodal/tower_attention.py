"""Attention of towers over packed pictures, clips and windows.

The towers of several families attend within segments of one packed row. Without flash attention,
transformers calls the attention function once per segment. A picture of a tower with windows has
dozens of segments in each layer. The function of this module gets the bounds of all segments, and
computes the segments of equal length in one call.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from lightrft.models.attention import varlen_cuda

NAME = "lightrft_flash_segments"
"""Name of the function in transformers. A name with ``flash`` gets the bounds of segments."""
REPLACED = ("sdpa", "flash_attention_2")
"""Implementations that compute the same as this module's."""


def attend_within_segments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    max_length_q: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Return the attention output ``[1, T, H, d]`` of a layer of a tower.

    Args:
        module: The attention layer.
        query: ``[1, H, T, d]``.
        key: ``[1, H, T, d]``.
        value: ``[1, H, T, d]``.
        attention_mask: Not read; a tower has no padding.
        cu_seq_lens_q: ``[segments + 1]`` start of each segment, and the end of the last one.
        scaling: Factor of the scores. ``None`` for ``d ** -0.5``.
        dropout: Probability of dropping a weight of attention.
        max_length_q: Length of the longest segment. ``None`` counts it.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if dropout == 0 and varlen_cuda.usable(query, value, softcap=None):
        run = varlen_cuda.kernel()
        assert run is not None
        bounds = cu_seq_lens_q.to(torch.int32)
        longest = max_length_q or int(bounds.diff().max())
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = run(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, -1))
        return out.unsqueeze(0), None
    starts = cu_seq_lens_q.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    out = _by_length(query, key, value, lengths, scale, dropout)
    return out.unsqueeze(0), None


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float, dropout: float
) -> Tensor:
    """Return the output ``[T, H, d]``, with one call per distinct length of ``lengths``."""
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    kinds = [length for length in dict.fromkeys(lengths) if length]
    if len(kinds) == 1:
        return _equal_segments(rows, kinds[0], scale, dropout)
    token_lengths = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    found, places = [], []
    for kind in kinds:
        place = (token_lengths == kind).nonzero()[:, 0].to(query.device)
        own = [x.index_select(0, place) for x in rows]
        found.append(_equal_segments(own, kind, scale, dropout))
        places.append(place)
    return torch.cat(found).index_select(0, torch.cat(places).argsort())


def _equal_segments(rows: Sequence[Tensor], length: int, scale: float, dropout: float) -> Tensor:
    """Return the output ``[T, H, d]`` of ``rows``, each ``[T, H, d]``, in segments of ``length``.

    Segments do not attend to each other.
    """
    query, key, value = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in rows)
    out = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)


def join_segments(model: nn.Module) -> None:
    """Let the towers of ``model`` that attend within segments compute equal segments together.

    Args:
        model: The transformers model. Its towers compute as before if they have another
            implementation than that of torch.
    """
    AttentionInterface.register(NAME, attend_within_segments)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "_attn_implementation"):
            continue
        if config._attn_implementation not in REPLACED:
            continue
        if "cu_seqlens" in inspect.signature(module.forward).parameters:
            # Not the public setter: it would set the implementations of parts of a config too.
            config._attn_implementation_internal = NAME


@contextmanager
def kept_implementations(model: nn.Module) -> Generator[None]:
    """Restore the attention implementations of all parts of ``model`` after the context.

    transformers changes them when it writes a model.
    """
    kept: dict[int, tuple[Any, str | None]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            kept[id(config)] = config, config._attn_implementation
    try:
        yield
    finally:
        for config, implementation in kept.values():
            config._attn_implementation_internal = implementation
