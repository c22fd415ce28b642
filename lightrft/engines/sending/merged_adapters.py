"""Whole weights of a policy with adapters or 4-bit weights, for engines of the plain model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightrft.config.model import LoRAConfig
from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import checksum
from lightrft.utils.errors import ModelError
from lightrft.utils.module_tensors import ORIGINAL, Factor, factor_of, plain_name, saved_name


def noted(weights: Iterable[tuple[str, Tensor]], read: Fingerprint) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights``, and put the checksum of each into ``read``."""
    for name, tensor in weights:
        read[name] = checksum(tensor)
        yield name, tensor


def whole_weights(
    weights: Iterable[tuple[str, Tensor]], lora: LoRAConfig | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights`` as the plain model has them: merged, and not in 4 bits.

    ``lora`` has the settings of their adapters. Raises ``ModelError`` as ``merged`` does.
    """
    plain = ((name, dequantized(tensor)) for name, tensor in weights)
    return plain if lora is None else merged(plain, lora)


def dequantized(weight: Tensor) -> Tensor:
    """Return the matrix ``[out, in]`` that the layer of a 4-bit weight multiplies by.

    Other tensors are returned as they are.
    """
    quantized: Any = weight
    if not hasattr(quantized, "quant_state"):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(quantized.data, quantized.quant_state)


def merged(weights: Iterable[tuple[str, Tensor]], lora: LoRAConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights`` with their adapters added in, by names of the model without adapters.

    A layer is yielded once all its tensors have come, so no second copy of the model is held.

    Args:
        weights: Parameters of a model with adapters, by name.
        lora: Settings of the adapters.

    Raises:
        ModelError: A layer lacks a tensor, or has an adapter of another kind than a linear layer.
    """
    needed = 4 if lora.dora else 3
    begun: dict[str, dict[Factor, Tensor]] = {}
    for name, tensor in weights:
        if ORIGINAL in name:
            continue
        if (saved := saved_name(name)) is not None:
            yield saved, tensor
            continue
        known = factor_of(name)
        if known is None:
            plain = plain_name(name)
            if plain is None:
                raise ModelError(
                    f"the adapter {name!r} is not of a linear layer and cannot be added to the "
                    "weights; leave it out of model.lora.targets, or set engine.kind=native"
                )
            yield plain, tensor
            continue
        layer, factor = known
        begun.setdefault(layer, {})[factor] = tensor
        if len(begun[layer]) == needed:
            yield f"{layer}.weight", _merged_layer(layer, begun.pop(layer), lora)
    if begun:
        layer, factors = next(iter(begun.items()))
        raise ModelError(f"{layer!r} came without all of its tensors: only {', '.join(factors)}")


def _merged_layer(layer: str, factors: Mapping[Factor, Tensor], lora: LoRAConfig) -> Tensor:
    shape = (factors["b"].shape[0], factors["a"].shape[1])
    if factors["base"].shape != shape:
        raise ModelError(
            f"the adapter of {layer!r} has shape {list(shape)} and its weight has shape "
            f"{list(factors['base'].shape)}, so they cannot be added; set engine.kind=native"
        )
    return merged_weight(factors, lora)


@torch.no_grad()
def merged_weight(factors: Mapping[Factor, Tensor], lora: LoRAConfig) -> Tensor:
    """Return the weight ``[out, in]`` of a linear layer with its adapter added in.

    It is ``W + s B A`` with ``s = alpha / rank`` (arXiv 2106.09685, equation 3), or
    ``alpha / sqrt(rank)`` with rsLoRA (arXiv 2312.03732). With DoRA, each row is scaled
    to the length ``m`` (arXiv 2402.09353, equation 5).

    Args:
        factors: ``base [out, in]``, ``a [rank, in]``, ``b [out, rank]``, and ``magnitude [out]``.
        lora: Settings of the adapters.
    """
    # frozen weights may be kept on the host
    base = factors["base"].to(factors["a"].device)
    # adapters of half-precision weights are float32, and the sum is rounded once
    whole = base.float() + lora.scale * (factors["b"].float() @ factors["a"].float())
    if lora.dora:
        lengths = torch.linalg.vector_norm(whole, dim=1)
        whole = (factors["magnitude"].float() / lengths)[:, None] * whole
    return whole.to(base.dtype)
