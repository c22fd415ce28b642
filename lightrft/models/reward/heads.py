"""Heads of reward models: from a pooled state to outputs, and from outputs to a score.

``HEADS`` has a row for each kind. Heads compute in float32 at least, since bfloat16 has eight
significant bits. Parameters belong to modules without submodules, which sharding wraps one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config.reward_model.sections import HeadKind, RewardHeadConfig
from lightrft.models.logprobs import wide
from lightrft.utils.seeding import derive_seed, seeded_weights, torch_generator

LOG_SCALE = math.log(1 / 0.07)
"""Initial log of the learned scale, as in CLIP (arXiv 2103.00020)."""


class HeadOutputs(NamedTuple):
    """Outputs of one head.

    It is a tuple, because sharding wrappers search tuples for tensors.

    Attributes:
        outputs: ``[B, C]``. Their meaning depends on the kind of the head, see ``HEADS``.
        scores: ``[B]``.
    """

    outputs: Tensor
    scores: Tensor


def state_width(model: PreTrainedModel) -> int:
    """Return the width of the last hidden states. OPT may project them from ``hidden_size``."""
    # An output head of another class does not have to say its width.
    known = getattr(model.get_output_embeddings(), "in_features", None)
    if isinstance(known, int):
        return known
    width: int = model.config.get_text_config(decoder=True).hidden_size
    return width


class WideLinear(nn.Linear):
    """A linear layer that computes in float32 at least."""

    def forward(self, input: Tensor) -> Tensor:
        kind = wide(self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(kind)
        return nn.functional.linear(input.to(kind), self.weight.to(kind), bias)


class LearnedVector(nn.Module):
    """A learned vector ``[n]``, which a call returns in float32 at least."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self) -> Tensor:
        # a copy: sharding frees the full weight after the call
        return self.weight.to(wide(self.weight.dtype), copy=True)


@torch.no_grad()
def draw_value_weights(weight: Tensor, seed: int) -> None:
    """Fill ``weight [n, H]`` from N(0, 1/(H+1)^2), as value heads start in arXiv 2403.17031."""
    # on the CPU, so that every device and every rank gets the same head
    drawn = torch.randn(weight.shape, generator=torch_generator(seed))
    weight.copy_(drawn / (weight.shape[1] + 1))


class OrdinalLayer(nn.Module):
    """One direction with a threshold for each rating but the last (CORAL, arXiv 1901.07884).

    Output ``k`` is the logit of the probability that the rating exceeds ``k``.
    """

    def __init__(self, width: int, ratings: int) -> None:
        super().__init__()
        self.direction = WideLinear(width, 1, bias=False)
        self.thresholds = LearnedVector(torch.zeros(ratings - 1))

    def forward(self, pooled: Tensor) -> Tensor:
        return self.direction(pooled) + self.thresholds()


def _linear(width: int, outputs: int) -> nn.Module:
    return WideLinear(width, outputs, bias=False)


def _mlp(width: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        WideLinear(width, width),
        nn.RMSNorm(width),
        nn.SiLU(),
        WideLinear(width, outputs, bias=False),
        nn.Sigmoid(),
    )


def _first(outputs: Tensor) -> Tensor:
    return outputs[:, 0]


def _expected_class(outputs: Tensor) -> Tensor:
    ratings = torch.arange(outputs.shape[1], device=outputs.device, dtype=outputs.dtype)
    return outputs.softmax(-1) @ ratings


def _expected_rank(outputs: Tensor) -> Tensor:
    # the expectation of a whole number is the sum of the probabilities that it exceeds 0, 1, ...
    return outputs.sigmoid().sum(-1)


def _mean(outputs: Tensor) -> Tensor:
    return outputs.mean(-1)


@dataclass(frozen=True, slots=True)
class RewardHeadForm:
    """A kind of head.

    Attributes:
        layers: Builds the layers from the width of states and the number of outputs or ratings.
        score: Maps outputs ``[B, C]`` to scores ``[B]``.
        count: Number of outputs or ratings. ``None`` is the size in the settings.
        is_value: The linear layer starts as a value head does. Otherwise as in PyTorch.
    """

    layers: Callable[[int, int], nn.Module]
    score: Callable[[Tensor], Tensor]
    count: int | None = None
    is_value: bool = True


HEADS: dict[HeadKind, RewardHeadForm] = {
    "linear": RewardHeadForm(_linear, _first, count=1),
    "mlp": RewardHeadForm(_mlp, _first, count=1, is_value=False),
    # a logit for each rating from 0
    "classes": RewardHeadForm(_linear, _expected_class),
    # for each rating but the last, the logit of the probability of a higher one
    "ordinal": RewardHeadForm(OrdinalLayer, _expected_rank),
    # mean and log of the variance
    "gaussian": RewardHeadForm(_linear, _first, count=2),
    # a score for each member
    "ensemble": RewardHeadForm(_linear, _mean),
}


class RewardHead(nn.Module):
    """One head: layers by kind, and a learned scale of the score in training.

    It is built on the CPU.

    Args:
        settings: Kind, size and scale.
        width: Width H of the pooled states.
        seed: Seed of the initial weights.
    """

    def __init__(self, settings: RewardHeadConfig, width: int, seed: int) -> None:
        super().__init__()
        self.settings = settings
        form = HEADS[settings.kind]
        count = settings.size if form.count is None else form.count
        with seeded_weights(derive_seed(seed, settings.name)):
            self.layers = form.layers(width, count)
        if form.is_value:
            for layer in self.layers.modules():
                if isinstance(layer, WideLinear):
                    draw_value_weights(layer.weight, derive_seed(seed, settings.name))
        self.logit_scale = None
        if settings.logit_scale:
            # one dimension: FSDP2 shards no scalars
            self.logit_scale = LearnedVector(torch.full((1,), LOG_SCALE))

    def forward(self, pooled: Tensor) -> HeadOutputs:
        """Return outputs and scores of states ``pooled [B, H]``."""
        outputs = self.layers(pooled)
        scores = HEADS[self.settings.kind].score(outputs)
        if self.logit_scale is not None and self.training:
            scores = scores * self.logit_scale().exp()
        return HeadOutputs(outputs, scores)
