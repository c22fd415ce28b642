"""Reward models of tiny real language models, and an oracle by plain loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import FAMILIES
from lightrft.models.tiny.text_families import family_model
from lightrft.types import Batch
from tests.model_helpers import ragged_batch, small_model

LAYOUTS = ("prefix_shared", "packed", "padded")
POOLINGS = ("last", "mean", "attention", "token")
TWO: list[dict[str, Any]] = [
    {"name": "helpful", "kind": "mlp", "logit_scale": True},
    {"name": "harmless"},
]


def settings_of(**fields: Any) -> RewardModelConfig:
    return build(RewardModelConfig, fields)


def reward_of(
    family: str = "qwen2",
    dtype: torch.dtype = torch.float64,
    config: ModelConfig | None = None,
    layers: int = 2,
    **fields: Any,
) -> RewardModel:
    """A reward model in evaluation mode, whose head has large weights, so that differences show."""
    if family in FAMILIES:
        model = small_model(family, dtype, num_hidden_layers=layers)
    else:
        model = family_model(family, dtype=dtype)
    reward = RewardModel(model, config, settings_of(**fields), seed=1).eval()
    enlarge(reward)
    return reward


def enlarge(reward: RewardModel) -> None:
    with torch.no_grad():
        for name, parameter in reward.named_parameters():
            if not name.startswith("model."):
                parameter.mul_(20 if parameter.abs().max() < 0.2 else 1)


def some_batch() -> Batch:
    """Groups of 3, 1, 2 and 0 responses, out of order, one of them empty."""
    return ragged_batch([21, 5, 1, 8], [0, 19, 1, 8, 3, 11], [0, 0, 2, 0, 1, 2])


def rows_of(batch: Batch) -> list[tuple[Tensor, int]]:
    """Tokens of prompt and response of each row, and the length of the prompt."""
    prompts = batch.prompts.tokens.split(batch.prompts.sizes)
    rows = []
    for row, response in enumerate(batch.responses.tokens.split(batch.responses.sizes)):
        prompt = prompts[batch.groups[row]]
        rows.append((torch.cat([prompt, response]), len(prompt)))
    return rows


def plain_pooled(reward: RewardModel, states: Tensor, head: str) -> Tensor:
    """The pooled state ``[H]`` of one row's ``states [T, H]``, by loops."""
    pooling = reward.settings.pooling
    if pooling in ("last", "token"):
        return states[-1]
    if pooling == "mean":
        return sum(states) / len(states)
    pool: Any = reward.pools[head]
    query, keys, values = pool.query.weight, states @ pool.k.weight.T, states @ pool.v.weight.T
    size = len(query) // 4
    pieces = []
    for h in range(4):
        at = slice(h * size, (h + 1) * size)
        logits = torch.stack([query[at] @ key[at] / size**0.5 for key in keys])
        shares = logits.exp() / logits.exp().sum()
        pieces.append(sum(share * value[at] for share, value in zip(shares, values)))
    return torch.cat(pieces)


def plain_states(reward: RewardModel, tokens: Tensor, layer: int = -1) -> Tensor:
    """``hidden_states[layer] [T, H]`` of one row by the model's own forward."""
    reward.use_attention("padded")
    base: Any = reward.base
    embeddings = base.get_input_embeddings()(tokens[None])
    if reward.end_token is not None:
        end: Any = reward.end_token.weight
        embeddings = torch.cat([embeddings, end.view(1, 1, -1)], 1)
    out = base(inputs_embeds=embeddings, use_cache=False, output_hidden_states=True)
    return out.hidden_states[layer][0]


def plain_outputs(reward: RewardModel, batch: Batch) -> dict[str, Tensor]:
    """Outputs ``[B, C]`` of each head: each row alone through the model's own forward."""
    found: dict[str, list[Tensor]] = {name: [] for name in reward.head_names}
    for tokens, _ in rows_of(batch):
        states = plain_states(reward, tokens)
        for name in reward.head_names:
            layers: Any = reward.heads[name]
            found[name].append(layers.layers(plain_pooled(reward, states, name)[None])[0])
    return {name: torch.stack(rows) for name, rows in found.items()}


def far(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())
