"""Compare the adapter that vLLM computes with to the one that it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.engines.vllm_parts.held_weights import places, renames, unfused
from lightrft.utils.module_tensors import Factor, factor_of

SLOT = 0
"""Place of the adapter in vLLM's tensors, which have one place each."""

Held = Mapping[tuple[str, Factor], Tensor]


def lost_adapter(
    model: nn.Module, adapter: Mapping[str, Tensor], scaling: float, dtype: torch.dtype
) -> tuple[list[str], list[str]]:
    """Return the tensors of ``adapter`` that ``model`` does not hold, and those without a place.

    Args:
        model: A model of vLLM that serves one adapter.
        adapter: Tensors by their names in the policy.
        scaling: Factor of the adapter, which vLLM multiplies into ``lora_B``.
        dtype: Type of vLLM's tensors.
    """
    found, adapted, renamed = _places(model), places(model), renames(model)
    lost, unknown = [], []
    for name, tensor in adapter.items():
        layer, factor = factor_of(name) or (name, "base")
        weight = renamed(f"{layer}.weight")
        held = found.get((weight, factor))
        if held is None:
            unknown.append(name)
            continue
        # as vLLM computes it, in its type
        sent = tensor.detach().to(held.device, dtype)
        if factor == "b" and scaling != 1:
            sent = sent * scaling
        # a process that shards the layer holds its columns of one factor, or its rows of the other
        place = adapted[weight][0]
        sent = place.shard_columns(sent) if factor == "a" else place.shard_rows(sent)
        # the rank and the columns may be padded
        if not torch.equal(held[: sent.shape[0], : sent.shape[1]], sent):
            lost.append(name)
    return lost, unknown


def _places(model: nn.Module) -> Held:
    """Return the tensors of vLLM's adapter by the name of the adapted weight and the factor."""
    found: dict[tuple[str, Factor], Tensor] = {}
    for path, module in model.named_modules():
        layer: Any = module
        stacked = getattr(layer, "lora_a_stacked", None)
        # embeddings and output layers keep theirs in other layouts
        if not isinstance(stacked, tuple):
            continue
        parts = unfused(model, path)
        if len(parts) != len(stacked):
            continue
        for part, down, up in zip(parts, stacked, layer.lora_b_stacked):
            found[f"{part}.weight", "a"] = down[SLOT, 0]
            found[f"{part}.weight", "b"] = up[SLOT, 0]
    return found
