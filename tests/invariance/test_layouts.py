"""The three layouts compute the same function: log-probs and gradients, for every family."""

from contextlib import nullcontext

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from lightrft.models.attention.layouts import pack
from lightrft.models.tiny.text import FAMILIES
from lightrft.types import Batch, Segments
from tests.model_helpers import (
    Float64,
    float32_bound,
    gap,
    gradients,
    hard_batch,
    plain_rows,
    ragged_batch,
    small_actor,
    weights,
)

SLIDING = ("mistral", "gemma2", "gemma3")
FLAT = ("packed", "prefix_shared")
ALL = (*FLAT, "padded")


def check_agreement(actor, batch, layouts, tolerance, **options):
    """Log-probs and gradients of ``layouts`` are those of ``padded``, relative to the largest."""
    actor.layout = "padded"
    expected, expected_grads = gradients(actor, batch, **options)
    for layout in layouts:
        actor.layout = layout
        found, grads = gradients(actor, batch, **options)
        assert (found - expected).abs().max() < tolerance * expected.abs().max()
        assert gap(grads, expected_grads) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_agree_in_float64_on_logprobs_entropy_and_every_gradient(family):
    batch, actor = hard_batch(), small_actor(family, torch.float64)
    with Float64():
        check_agreement(actor, batch, FLAT, 1e-9, entropy=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_agree_with_each_row_alone_in_float64(family):
    batch, actor = hard_batch(), small_actor(family, torch.float64)
    with Float64():
        expected = plain_rows(actor, batch)
        (expected * weights(len(expected), torch.float64)).sum().backward()
        expected_grads = {name: p.grad.clone() for name, p in actor.named_parameters()}
        for layout in ALL:
            actor.layout = layout
            found, grads = gradients(actor, batch)
            assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
            assert gap(grads, expected_grads) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_agree_in_float32(family):
    batch, actor = hard_batch(), small_actor(family)
    check_agreement(actor, batch, FLAT, float32_bound(actor))


@pytest.mark.parametrize("layout", FLAT)
@pytest.mark.parametrize("family", SLIDING)
def test_the_sliding_window_bites(family, layout):
    batch = hard_batch()
    narrow = small_actor(family, torch.float64, layout)
    wide = small_actor(family, torch.float64, layout, sliding_window=2000)
    with torch.no_grad():
        assert (narrow.score(batch).logprobs - wide.score(batch).logprobs).abs().max() > 1e-2


@pytest.mark.parametrize("window", [1, 2, 7, 16, 37, 38, 60, 77, 78])
def test_any_window_agrees_with_padded(window):
    batch, actor = hard_batch(), small_actor("mistral", torch.float64, sliding_window=window)
    with Float64():
        check_agreement(actor, batch, FLAT, 1e-9)


@pytest.mark.parametrize("layout", FLAT)
def test_soft_caps_of_scores_and_logits_bite_and_agree(layout):
    batch = hard_batch()
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
    capped, free = (
        small_actor("gemma2", torch.float64, layout, **caps),
        small_actor("gemma2", torch.float64, layout),
    )
    half = small_actor("gemma2", torch.float64, layout, final_logit_softcapping=2.0)
    with Float64():
        found, grads = gradients(capped, batch, temperature=0.7)
        assert (found - free.score(batch, temperature=0.7).logprobs).abs().max() > 1e-2
        assert (found - half.score(batch, temperature=0.7).logprobs).abs().max() > 1e-3
        capped.layout = "padded"
        expected, expected_grads = gradients(capped, batch, temperature=0.7)
    assert (found - expected).abs().max() < 1e-9
    assert gap(grads, expected_grads) < 1e-9


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3", "qwen3_moe"])
def test_changing_one_answer_leaves_the_others_bit_for_bit(family, layout):
    """But for rounding where there are experts: how many tokens each of them gets is another number then."""
    experts = family == "qwen3_moe"
    batch, actor = (
        hard_batch(),
        small_actor(family, torch.float64 if experts else torch.float32, layout),
    )
    other = Batch(
        batch.prompts, Segments(batch.responses.tokens.clone(), batch.lengths), batch.prompt_of
    )
    inside = batch.row_of == 3
    other.responses.tokens[inside] = (other.responses.tokens[inside] + 17) % 90 + 4
    with torch.no_grad(), Float64() if experts else nullcontext():
        before, after = actor.score(batch).logprobs, actor.score(other).logprobs
    if experts:
        assert (before[~inside] - after[~inside]).abs().max() < 1e-12
    else:
        assert torch.equal(before[~inside], after[~inside])
    assert not torch.equal(before[inside], after[inside])


@pytest.mark.parametrize("layout", ALL)
def test_a_micro_batch_of_part_of_a_group_gives_the_same_numbers(layout):
    batch, actor = hard_batch(), small_actor("qwen3", torch.float64, layout)
    with Float64():
        expected, expected_grads = gradients(actor, batch)
        found, weight = torch.empty_like(expected), weights(len(expected), torch.float64)
        actor.zero_grad()
        for rows in ([6, 0], [1], [5, 3, 2], [4]):
            inside = torch.cat([torch.nonzero(batch.row_of == row)[:, 0] for row in rows])
            logprobs = actor.score(batch.select(torch.tensor(rows))).logprobs
            found[inside] = logprobs.detach()
            (logprobs * weight[inside]).sum().backward()
    assert (found - expected).abs().max() < 1e-9
    assert gap({name: p.grad for name, p in actor.named_parameters()}, expected_grads) < 1e-9


@pytest.mark.parametrize("layout", ALL)
def test_batches_without_tokens_or_rows_still_reach_every_parameter_with_zero(layout):
    actor, whole = small_actor("qwen2", layout=layout), hard_batch()
    for batch in (whole.select(torch.tensor([0])), whole.select(torch.zeros(0, dtype=torch.long))):
        actor.zero_grad()
        scores = actor.score(batch, entropy=True)
        assert scores.logprobs.shape == scores.entropy.shape == (0,)
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        assert all(p.grad is not None and not p.grad.any() for p in actor.parameters())


@pytest.mark.parametrize("layout", ALL)
def test_a_prompt_without_tokens_is_an_error(layout):
    with pytest.raises(ValueError, match="prompt 1 of the batch has no tokens"):
        pack(ragged_batch([3, 0], [2, 2], [0, 1]), layout)


def test_a_prompt_is_run_once_and_last_tokens_are_not():
    batch = ragged_batch([10, 7], [5, 3, 0, 1, 4], [0, 0, 0, 1, 1])
    shared, packed, padded = (
        pack(batch, layout) for layout in ("prefix_shared", "packed", "padded")
    )
    assert shared.input_ids.shape == (1, 10 + 4 + 2 + 7 + 0 + 3)
    assert packed.input_ids.shape == (1, (10 + 4) + (10 + 2) + (7 + 0) + (7 + 3))
    assert padded.input_ids.shape == (4, 14)
    assert shared.position_ids[0].tolist() == [
        *range(10),
        *range(10, 14),
        *range(10, 12),
        *range(7),
        *range(7, 10),
    ]
    assert shared.gather.tolist() == [9, 10, 11, 12, 13, 9, 14, 15, 22, 22, 23, 24, 25]
    assert pack(batch, "prefix_shared", final=True).final.tolist() == [14, 17, 9, 25, 29]


class TokenAndPosition(torch.nn.Module):
    """A decoder whose state is a token and its position: what is read can be checked by eye."""

    def forward(self, input_ids, position_ids, attention_plan=None, use_cache=False):
        return BaseModelOutput(
            last_hidden_state=torch.stack([input_ids, position_ids], -1).double()
        )


@pytest.mark.parametrize("layout", ALL)
def test_each_token_is_predicted_by_the_state_just_before_it(layout, monkeypatch):
    actor = small_actor("qwen2", layout=layout)
    monkeypatch.setattr(type(actor), "decoder", property(lambda self: TokenAndPosition()))
    answers = Segments.of([[13, 14], [21], [], [15, 16, 17]])
    batch = Batch(Segments.of([[10, 11, 12], [20]]), answers, torch.tensor([0, 1, 0, 0]))
    states, final = actor.hidden(batch, final=True)
    assert states.tolist() == [[12, 2], [13, 3], [20, 0], [12, 2], [15, 3], [16, 4]]
    assert final.tolist() == [[14, 4], [21, 1], [12, 2], [17, 5]]


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "qwen3_moe"])
def test_gradient_checkpointing_changes_no_gradient(family, layout):
    batch, actor = hard_batch(), small_actor(family, layout=layout)
    actor.train()
    expected, expected_grads = gradients(actor, batch)
    actor.gradient_checkpointing_enable()
    calls = []
    hook = actor.base.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    found, grads = gradients(actor, batch)
    assert len(calls) == 2, "once forward, once again in the backward pass"
    hook.remove()
    actor.gradient_checkpointing_disable()
    assert torch.equal(found, expected)
    assert gap(grads, expected_grads) < float32_bound(actor)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", FLAT)
def test_tied_and_untied_heads_agree(layout, tied):
    batch, actor = hard_batch(), small_actor("qwen2", torch.float64, tie_word_embeddings=tied)
    assert (actor.base.lm_head.weight is actor.base.model.embed_tokens.weight) == tied
    with Float64():
        check_agreement(actor, batch, [layout], 1e-9)


@pytest.mark.parametrize("layout", ALL)
def test_bfloat16_runs_and_stays_near_float32(layout):
    batch = hard_batch()
    actor = small_actor("qwen2", torch.bfloat16, layout, initializer_range=0.02)
    exact = small_actor("qwen2", initializer_range=0.02)
    found, grads = gradients(actor, batch)
    assert found.dtype == torch.float32
    assert (found - exact.score(batch).logprobs).abs().mean() < 0.01
    assert all(g.isfinite().all() for g in grads.values())
