"""Rows beyond which a model's log-probs depend on more than the tokens before, and the verbs that refuse them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightrft.config.strategy import SamplingConfig
from lightrft.models.decoding.kinds import length_bound
from lightrft.models.tiny.text_families import family_config, family_model
from lightrft.trainer.checks.context_limits import check_bound
from lightrft.utils.errors import ConfigError

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 24,
}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {"max_position_embeddings": 24, "rope_parameters": DYNAMIC}, 24),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 24}, 24),
    ("doge", {"keep_window_size": 24}, 24),
    # One head: many keys score exactly 0.
    (
        "deepseek_v32",
        {"index_topk": 24, "index_n_heads": 1},
        24,
    ),
]


@pytest.mark.parametrize(("family", "fields", "tokens"), CASES)
def test_a_token_s_log_prob_depends_on_those_before_it_within_the_bound_and_not_beyond(
    family: str, fields: dict[str, Any], tokens: int
) -> None:
    model = family_model(family, **fields)
    bound = length_bound(model.config)
    assert bound is not None and bound.tokens == tokens
    ids = torch.randint(4, 30, (1, 48), generator=torch.Generator().manual_seed(0))

    def row(length: int) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids[:, :length], use_cache=False).logits[0]

    rows = {length: row(length) for length in (tokens - 4, tokens, 36, 48)}
    torch.testing.assert_close(rows[tokens][: tokens - 4], rows[tokens - 4], atol=1e-5, rtol=0)
    within, beyond = rows[tokens] - rows[36][:tokens], rows[36] - rows[48][:36]
    assert max(within.abs().max(), beyond.abs().max()) > 1e-3


@pytest.mark.parametrize(("family", "fields", "tokens"), CASES)
def test_rows_that_could_outgrow_the_bound_are_refused_with_the_reason(
    family: str, fields: dict[str, Any], tokens: int
) -> None:
    config = family_config(family, **fields)
    check_bound(config, tokens - 8, SamplingConfig(max_new_tokens=8), "sampling", "data")
    with pytest.raises(
        ConfigError,
        match=r"sampling\.max_new_tokens = 9: .* lower sampling\.max_new_tokens to 8 or less",
    ):
        check_bound(config, tokens - 8, SamplingConfig(max_new_tokens=9), "sampling", "data")
    with pytest.raises(ConfigError, match=r"lower data\.max_prompt_tokens"):
        check_bound(config, tokens, SamplingConfig(max_new_tokens=9), "sampling", "data")


def test_rotary_scaling_that_is_the_same_at_every_length_has_no_bound() -> None:
    assert length_bound(family_config("apertus")) is None  # llama3
    assert length_bound(family_config("qwen2")) is None
