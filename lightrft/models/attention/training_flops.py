"""Count the floating-point operations (FLOPs) that the training of a language model needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.config.model import Layout
from lightrft.models.attention.layouts import Packed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
"""Names of the number of experts that a token is sent to, in the configs of model families."""
OTHERS = ("dbrx", "hrm_text", "jetmoe", "longcat_flash")
"""Families of transformers whose weights do not work as the formula has it."""


def has_formula(model_type: str, layout: Layout) -> bool:
    """Return whether the formula holds for a family, within 5 %.

    Args:
        model_type: The family.
        layout: The most efficient layout that is exact for it. Recurrent layers share no prefix.
    """
    return layout == "prefix_shared" and model_type not in OTHERS


@dataclass(frozen=True, slots=True)
class FlopRates:
    """FLOPs of a forward and a backward pass.

    A product with a weight takes 2 FLOPs for each weight and token. Its backward pass takes as many
    for the input, and as many again for a weight that is trained. An expert counts by the share of
    tokens that it gets. Attention takes 4 FLOPs for each query, key and dimension of a head, and
    twice that backward. Norms, softmax, towers of media and recomputation do not count.

    Attributes:
        token: FLOPs for each token.
        response_token: Further FLOPs for each token that is predicted.
        pair: FLOPs for each query and its key, in all layers without a window.
        near_pair: The same in all layers with a sliding window.
        window: Most keys of a query in a layer with a sliding window.
    """

    token: float
    response_token: float
    pair: float
    near_pair: float
    window: int

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        shapes: Mapping[str, Sequence[int]],
        trained: Collection[str],
        head_passes: int,
    ) -> FlopRates:
        """Return the rates of a model.

        Args:
            config: Config of the language model.
            shapes: Full shapes of the weights of its decoder, without embeddings, by name.
            trained: Names of the weights that are trained.
            head_passes: 3 for an output head that is trained, 2 for a frozen one, 0 without one.
        """
        given = config.to_dict()
        chosen = next((given[name] for name in TOP_K if given.get(name)), 1)
        token = 0.0
        for name, shape in shapes.items():
            passes = 3 if name in trained else 2
            if len(shape) == 3 and ".experts." in name:
                token += 2 * passes * math.prod(shape) * chosen / shape[0]
            elif len(shape) == 2:
                token += 2 * passes * math.prod(shape)
        heads = given.get("num_attention_heads") or 1
        width = heads * (given.get("head_dim") or config.hidden_size // heads)
        window = given.get("sliding_window")
        every = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
        kinds = given.get("layer_types") or every
        return cls(
            token,
            2 * head_passes * config.vocab_size * config.hidden_size,
            12 * width * kinds.count("full_attention"),
            12 * width * kinds.count("sliding_attention"),
            window or 1,
        )


class TrainingFlops:
    """Counts the FLOPs of the calls of one model that a backward pass follows.

    Args:
        model: The language model, with its head and adapters.
        decoder: Its decoder.
        config: Its config.
        shapes: Full shapes of the parameters of ``model``, by name.
        head: Its output head. ``None`` if its logits are not used.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: nn.Module,
        config: PreTrainedConfig,
        shapes: Mapping[str, Sequence[int]],
        head: nn.Module | None = None,
    ) -> None:
        inside = {id(weight) for weight in decoder.parameters()}
        for module in decoder.modules():
            if isinstance(module, nn.Embedding):
                inside -= {id(weight) for weight in module.parameters()}
        own = {name: weight for name, weight in model.named_parameters() if id(weight) in inside}
        trained = {name for name, weight in own.items() if weight.requires_grad}
        full = {name: shapes.get(name, weight.shape) for name, weight in own.items()}
        passes = 0
        if head is not None:
            passes = 3 if any(weight.requires_grad for weight in head.parameters()) else 2
        self.rates = FlopRates.of(config, full, trained, passes)
        self._counts: Tensor | None = None
        self._responses = 0

    def add(self, packed: Packed) -> None:
        """Count a call of the model."""
        is_token = packed.source.view(packed.input_ids.shape) >= 0
        if packed.plan is None:
            keys = is_token.cumsum(-1) * is_token
        else:
            keys = (packed.plan.positions + 1) * is_token
        near = keys.clamp(max=self.rates.window)
        self._responses += packed.gather.numel()
        # On the device: the count does not wait for it.
        counts = torch.stack([is_token.sum(), keys.sum(), near.sum()])
        self._counts = counts if self._counts is None else self._counts + counts

    def take(self) -> float:
        """Return the FLOPs since the last call."""
        counts, self._counts = self._counts, None
        responses, self._responses = self._responses, 0
        if counts is None:
            return 0.0
        tokens, keys, near = counts.tolist()
        rates = self.rates
        of_tokens = rates.token * tokens + rates.response_token * responses
        return of_tokens + rates.pair * keys + rates.near_pair * near
