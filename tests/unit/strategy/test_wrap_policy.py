"""The units of a model: their size."""

from __future__ import annotations

from torch import nn

from lightrft.models.tiny.text import tiny_model
from lightrft.strategy.sharding import largest_block, outermost_blocks


def weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_largest_block_counts_what_is_trained_of_it_and_of_a_model_without_trained_blocks_all_that_is() -> (
    None
):
    model = tiny_model("qwen2", num_hidden_layers=3, vocab_size=60)
    first, second, third = outermost_blocks(model)
    assert largest_block(model) == weights(first) == weights(third)
    for block in (first, third):
        block.requires_grad_(False)
    second.mlp.requires_grad_(False)
    assert largest_block(model) == weights(second) - weights(second.mlp)
    second.requires_grad_(False)
    assert largest_block(model) == weights(model) - sum(map(weights, (first, second, third)))
    assert largest_block(model.requires_grad_(False)) == 0
