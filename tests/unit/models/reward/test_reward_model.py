"""Scores of reward models against plain forward passes of transformers, in every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightrft.models.reward.heads import HEADS, RewardHead
from lightrft.models.reward.reward_model import MIXTURE, RewardModel
from lightrft.models.tiny.text import FAMILIES
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ConfigError, ModelError
from tests.model_helpers import Float64, gap, ragged_batch, small_model, unproved_model, weights
from tests.unit.models.reward.scoring import (
    LAYOUTS,
    POOLINGS,
    TWO,
    far,
    plain_outputs,
    plain_states,
    reward_of,
    rows_of,
    settings_of,
    some_batch,
)

KINDS = {"linear": 1, "mlp": 1, "classes": 5, "ordinal": 5, "gaussian": 1, "ensemble": 3}


def gradients(reward: RewardModel, batch: Batch) -> dict[str, torch.Tensor]:
    reward.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for found in reward.score(batch).values():
        loss = loss + (found.scores * weights(len(batch), torch.float64)).sum()
    loss.backward()
    return {name: p.grad.clone() for name, p in reward.named_parameters() if p.grad is not None}


# The last states of OPT are narrower than those of its layers.
@pytest.mark.parametrize("family", ["qwen2", "opt"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_scores_equal_a_plain_forward_and_head_in_every_layout(pooling, family):
    reward, batch = reward_of(family, pooling=pooling, heads=TWO), some_batch()
    with Float64(), torch.no_grad():
        expected = plain_outputs(reward, batch)
        for layout in LAYOUTS:
            reward.layout = layout
            for name, found in reward.score(batch).items():
                assert far(found.outputs, expected[name]) < 1e-9, (layout, name)
                assert torch.equal(found.scores, found.outputs[:, 0])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_agree_in_every_layout_and_reach_every_trained_weight(pooling):
    reward = reward_of(pooling=pooling, heads=TWO, gate=True).train()
    batch = some_batch()
    with Float64():
        found = []
        for layout in LAYOUTS:
            reward.layout = layout
            found.append(gradients(reward, batch))
    trained = {name for name, p in reward.named_parameters() if p.requires_grad}
    assert {name for name, grad in found[0].items() if grad.abs().max() > 0} == trained
    assert max(gap(grads, found[0]) for grads in found[1:]) < 1e-9


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_the_sliding_window_family_pools_every_token_too(pooling):
    reward, batch = reward_of("gemma2", pooling=pooling), some_batch()
    with Float64(), torch.no_grad():
        expected = plain_outputs(reward, batch)["preference"]
        for layout in LAYOUTS:
            reward.layout = layout
            assert far(reward.score(batch)["preference"].outputs, expected) < 1e-9


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_score_does_not_depend_on_the_rest_of_the_batch(pooling):
    reward, batch = reward_of(pooling=pooling), some_batch()
    with Float64(), torch.no_grad():
        for layout in LAYOUTS:
            reward.layout = layout
            scores = reward.score(batch)["preference"].scores
            for row in range(len(batch)):
                alone = reward.score(batch.select(torch.tensor([row])))["preference"].scores
                assert far(alone, scores[row : row + 1]) < 1e-9, (layout, row)


def test_an_empty_batch_has_no_scores_and_gives_zero_gradients():
    reward = reward_of(pooling="attention", heads=TWO, gate=True).train()
    empty = Batch(Segments.of([[5, 6]]), Segments.of([]), torch.zeros(0, dtype=torch.long))
    grads = gradients(reward, empty)
    assert {name for name in grads if not name.startswith("model.")} == {
        name for name, _ in reward.named_parameters() if not name.startswith("model.")
    }
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_maps_outputs_to_a_score(kind):
    sizes = {"size": KINDS[kind]} if KINDS[kind] > 1 else {}
    (config,) = settings_of(heads=[{"kind": kind, **sizes}]).heads
    head = RewardHead(config, 16, seed=0)
    pooled = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    outputs, scores = head(pooled)
    for row, score in zip(outputs.tolist(), scores.tolist()):
        if kind == "classes":
            total = sum(math.exp(x) for x in row)
            expected = sum(k * math.exp(x) / total for k, x in enumerate(row))
        elif kind == "ordinal":
            assert len(row) == 4
            expected = sum(1 / (1 + math.exp(-x)) for x in row)
        else:
            expected = sum(row) / len(row) if kind == "ensemble" else row[0]
        assert score == pytest.approx(expected, abs=1e-6)
    assert outputs.shape[1] == {"gaussian": 2, "ordinal": 4}.get(kind, KINDS[kind])
    assert kind in HEADS and len(HEADS) == len(KINDS)


def test_the_documented_head_is_linear_norm_silu_linear_sigmoid():
    (config,) = settings_of(heads=[{"kind": "mlp"}]).heads
    layers: Any = RewardHead(config, 16, seed=0).layers
    x = torch.randn(3, 16)
    hidden = x @ layers[0].weight.T + layers[0].bias
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + torch.finfo().eps).sqrt()
    expected = torch.sigmoid((normed * normed.sigmoid()) @ layers[3].weight.T)
    torch.testing.assert_close(layers(x), expected)
    assert layers[3].bias is None


def test_heads_depend_on_the_seed_alone_and_start_as_value_heads():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other, third = (
        RewardModel(small_model("qwen2"), None, settings_of(heads=TWO, gate=True), seed=s)
        for s in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in one.own_tensors().items():
        assert torch.equal(tensor, other.own_tensors()[name])
    weight: Any = one.heads["harmless"].layers.weight
    assert not torch.equal(weight, third.heads["harmless"].layers.weight)
    wide: Any = RewardModel(small_model("qwen2", hidden_size=2048), None, settings_of(), seed=1)
    spread = float(wide.heads["preference"].layers.weight.detach().std()) * 2049
    assert spread == pytest.approx(1, abs=0.1)


def test_heads_compute_in_float32_for_a_bfloat16_model():
    reward = reward_of(dtype=torch.bfloat16, pooling="attention", heads=TWO)
    found = reward.score(some_batch())
    assert {each.scores.dtype for each in found.values()} == {torch.float32}


def test_the_mixture_weights_heads_by_the_prompt():
    reward = reward_of(heads=TWO, gate=True).train()
    batch = some_batch()
    with Float64(), torch.no_grad():
        found = reward.score(batch)
        for row, (tokens, prompt) in enumerate(rows_of(batch)):
            state = plain_states(reward, tokens[:prompt])[-1]
            gate: Any = reward.gate
            expected = gate(state[None]).softmax(-1)[0]
            torch.testing.assert_close(found[MIXTURE].outputs[row], expected)
            plain = [float(found[name].outputs[row, 0]) for name in ("helpful", "harmless")]
            mixed = sum(w * s for w, s in zip(expected.tolist(), plain))
            assert float(found[MIXTURE].scores[row]) == pytest.approx(mixed, rel=1e-9)
    assert reward.reward_name == MIXTURE
    # responses to one prompt have equal weights
    assert torch.equal(found[MIXTURE].outputs[0], found[MIXTURE].outputs[1])


def test_the_learned_scale_applies_in_training_only():
    reward, batch = reward_of(heads=TWO), some_batch()
    with torch.no_grad():
        calm = reward.score(batch)
        sharp = reward.train().score(batch)
    torch.testing.assert_close(sharp["helpful"].scores, calm["helpful"].scores / 0.07)
    assert torch.equal(sharp["harmless"].scores, calm["harmless"].scores)
    assert torch.equal(sharp["helpful"].outputs, calm["helpful"].outputs)


def test_normalisation_shifts_and_scales_scores_in_evaluation_only():
    reward, batch = reward_of(heads=TWO, gate=True), some_batch()
    with torch.no_grad():
        plain = reward.score(batch)
        reward.set_normalization({"helpful": 0.25, MIXTURE: -1.0}, {"helpful": 0.5})
        found = reward.score(batch)
        torch.testing.assert_close(
            found["helpful"].scores, (plain["helpful"].scores - 0.25) / 0.5, check_dtype=False
        )
        torch.testing.assert_close(found[MIXTURE].scores, plain[MIXTURE].scores + 1)
        assert torch.equal(found["harmless"].scores, plain["harmless"].scores)
        trained = reward.train().score(batch)
    assert torch.equal(trained[MIXTURE].scores, plain[MIXTURE].scores)
    assert torch.equal(found["helpful"].outputs, plain["helpful"].outputs)


@pytest.mark.parametrize(
    ("means", "stds", "said"),
    [
        ({"helpful": math.nan}, {}, "'helpful' have mean or std nan"),
        ({"other": 0.0}, {}, "'other'.*scores: helpful, harmless"),
        ({}, {"harmless": 0.0}, "normalize=center"),
    ],
)
def test_a_normalisation_that_cannot_be_is_refused(means, stds, said):
    with pytest.raises(ModelError, match=said):
        reward_of(heads=TWO).set_normalization(means, stds)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_inner_layer_gives_the_hidden_states_of_transformers_exactly(family):
    batch = ragged_batch([9], [7], [0])
    ((tokens, _),) = rows_of(batch)
    whole = reward_of(family, torch.float32, layers=3)
    for layer in (1, 2, -2):
        reward = reward_of(family, torch.float32, layers=3, layer=layer)
        reward.layout = "padded"
        assert len(reward.decoder.layers) == layer % 4
        with torch.no_grad():
            expected = plain_states(whole, tokens, layer)
            states, _ = reward.compute(batch, final=True)
            assert torch.equal(states, expected)
            reward.layout = reward.family.layout
            found = reward.score(batch)["preference"].outputs[0]
            head: Any = reward.heads["preference"]
            torch.testing.assert_close(found, head.layers(expected[-1:])[0], rtol=1e-3, atol=1e-4)


def test_every_weight_that_is_trained_gets_a_gradient_with_an_inner_layer():
    reward = reward_of(layers=3, layer=2, pooling="mean").train()
    grads = gradients(reward, some_batch())
    assert grads.keys() == {name for name, p in reward.named_parameters() if p.requires_grad}
    assert "model.model.norm.weight" not in grads


def test_the_last_layer_by_its_number_is_the_last_after_the_norm():
    reward, other, batch = reward_of(layer=2), reward_of(), some_batch()
    assert not reward.is_cut and reward.settings.layer == -1
    found, expected = (r.score(batch)["preference"].scores for r in (reward, other))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", [0, 3, -3])
def test_a_layer_that_the_model_lacks_is_refused(layer):
    with pytest.raises(ModelError, match=f"layer = {layer}: the model has 2 layers"):
        reward_of(layer=layer)


def test_a_family_that_is_no_plain_stack_has_scores_and_no_inner_layers():
    reward, batch = RewardModel(unproved_model(), None, settings_of()).eval(), some_batch()
    with torch.no_grad():
        found = reward.score(batch)["preference"].outputs
        for row, (tokens, _) in enumerate(rows_of(batch)):
            head: Any = reward.heads["preference"]
            state = plain_states(reward, tokens)[-1:]
            torch.testing.assert_close(found[row], head.layers(state)[0], rtol=1e-3, atol=1e-4)
    with pytest.raises(ModelError, match=r"'trocr' is no plain stack of layers.*set it to -1"):
        RewardModel(unproved_model(), None, settings_of(layer=1))


@pytest.mark.parametrize("name", ["a.b", "keys", MIXTURE])
def test_a_head_whose_name_cannot_be_is_refused(name):
    with pytest.raises(ModelError, match=f"the name '{name}' has a dot or is taken"):
        reward_of(heads=[name])


def test_a_head_without_a_name_is_refused():
    with pytest.raises(ConfigError, match="name = '': it is empty; leave it out for 'preference'"):
        reward_of(heads=[""])


def test_attention_of_four_heads_needs_a_width_that_they_divide():
    with pytest.raises(ModelError, match="width 66; take last"):
        RewardModel(
            small_model("llama", hidden_size=66, num_attention_heads=3, num_key_value_heads=3),
            None,
            settings_of(pooling="attention"),
        )
