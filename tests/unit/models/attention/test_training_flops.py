"""FLOPs of training by the formula, against the FLOPs that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.attention.training_flops import OTHERS, TrainingFlops, has_formula
from lightrft.models.families import decoder_of, family_of
from lightrft.models.tiny.text import tiny_model
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_config, family_model
from lightrft.types import Batch, Segments

ROWS, LENGTH = 3, 7


def rates_over_counted(model: Any) -> float:
    """Return the FLOPs of the formula over what torch counts in a step of plain transformers.

    Every token attends to all of its row there.
    """
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    ids = torch.randint(4, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as mode:
        model.train()(input_ids=ids, use_cache=False).logits.sum().backward()
    counts = mode.get_flop_counts()
    rotary = sum(sum(one.values()) for name, one in counts.items() if name.endswith("rotary_emb"))
    config, decoder = model.config, decoder_of(model, family_of(model.config))
    rates = TrainingFlops(model, decoder, config, {}, model.get_output_embeddings()).rates
    tokens = (rates.token + rates.response_token) * ROWS * LENGTH
    pairs = (rates.pair + rates.near_pair) * ROWS * LENGTH**2
    return (tokens + pairs) / (mode.get_total_flops() - rotary)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe"])
def test_the_flops_of_dense_models_and_of_experts_are_those_that_torch_counts(family: str) -> None:
    assert rates_over_counted(tiny_model(family)) == pytest.approx(1, rel=1e-12)


def test_a_frozen_weight_costs_no_gradient_of_its_own() -> None:
    model = tiny_model("qwen2")
    model.model.layers.requires_grad_(False)
    assert rates_over_counted(model) == pytest.approx(1, rel=1e-12)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    assert rates_over_counted(model) == pytest.approx(1, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [f for f in TEXT_FAMILIES if has_formula(f, family_of(family_config(f)).layout)],
)
def test_the_formula_holds_for_a_family_within_five_percent(family: str) -> None:
    assert rates_over_counted(family_model(family)) == pytest.approx(1, abs=0.05)


def test_a_family_without_a_formula_is_one_that_transformers_has() -> None:
    assert set(OTHERS) <= set(TEXT_FAMILIES)


BATCH = Batch(
    Segments.of([[5, 6, 7], [8] * 20]),
    Segments.of([[4, 5], [6, 7, 8], [9] * 9]),
    torch.tensor([0, 0, 1]),
)


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
def test_a_call_counts_the_tokens_and_the_keys_of_its_layout(layout: Any) -> None:
    """A key is an earlier token of the row, or the token itself, within the window of its layer."""
    actor = Actor(tiny_model("mistral"), ModelConfig(layout=layout))
    config = actor.text_config
    actor.flops = TrainingFlops(actor, actor.decoder, config, {}, actor.base.lm_head)
    # The last token of a response is only predicted.
    prompts, responses = [3, 20], [2 - 1, 3 - 1, 9 - 1]
    places = []
    if layout == "prefix_shared":
        places += [place for length in prompts for place in range(length)]
        places += [prompts[p] + k for p, n in zip((0, 0, 1), responses) for k in range(n)]
    else:
        places += [k for p, n in zip((0, 0, 1), responses) for k in range(prompts[p] + n)]
    rates = actor.flops.rates
    near = sum(min(place + 1, config.sliding_window) for place in places)
    expected = rates.token * len(places) + rates.response_token * 14 + rates.near_pair * near
    assert rates.pair == 0 and near < sum(place + 1 for place in places)
    for _ in range(2):
        actor.score(BATCH)
    assert actor.flops.take() == pytest.approx(2 * expected, rel=1e-12)
    with torch.no_grad():
        actor.score(BATCH)
    assert actor.flops.take() == 0
