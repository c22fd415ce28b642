"""Media in every layout: the same log-probs and gradients, towers included, as the family's own forward on plain rows."""

from dataclasses import replace

import pytest
import torch

from lightrft.models.attention.layout_check import check_layout
from lightrft.models.tiny import ALL_MEDIA_FAMILIES
from lightrft.utils.errors import ModelError
from tests.media_helpers import layouts_of, mixed_batch, mixed_prompts, rig
from tests.model_helpers import Float64, float32_bound, gap, gradients, weights


def own_gradients(actor, batch):
    """By the model's own forward, pictures and all, each row with its own copy of them."""
    actor.zero_grad()
    logprobs = actor.own_logprobs(batch)
    (logprobs * weights(len(logprobs), logprobs.dtype)).sum().backward()
    return logprobs.detach(), {
        name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_media_layouts_agree_with_the_models_own_forward_in_float64_towers_included(
    family, tmp_path
):
    r = rig(family, tmp_path, torch.float64)
    batch = mixed_batch(mixed_prompts(r))
    with Float64():
        expected, expected_grads = own_gradients(r.actor, batch)
        tower = r.actor.family.reader.parts["tower"]
        assert any(n.removeprefix("model.").startswith(tower) for n in expected_grads)
        for layout in layouts_of(r.actor):
            r.actor.layout = layout
            found, grads = gradients(r.actor, batch)
            assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
            assert gap(grads, expected_grads) < 1e-9


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_media_layouts_agree_in_float32(family, tmp_path):
    r = rig(family, tmp_path)
    batch = mixed_batch(mixed_prompts(r))
    expected, expected_grads = own_gradients(r.actor, batch)
    for layout in layouts_of(r.actor):
        r.actor.layout = layout
        found, grads = gradients(r.actor, batch)
        assert (found - expected).abs().max() < float32_bound(r.actor) * expected.abs().max()
        assert gap(grads, expected_grads) < float32_bound(r.actor)


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_media_change_what_the_model_says(family, tmp_path):
    r = rig(family, tmp_path)
    prompts = mixed_prompts(r)
    batch = mixed_batch(prompts)
    with torch.no_grad():
        before = r.actor.score(batch).logprobs
        changes = torch.Generator().manual_seed(0)
        media = batch.prompts.media
        for tower in r.actor.family.reader.towers:
            # The contents come first, under one of the names that a family has for them.
            for name in [name for name in tower.inputs if name in media][:1]:
                # A norm may remove what is the same everywhere.
                values = media[name].values
                values += 3 * torch.randn(values.shape, generator=changes)
        after = r.actor.score(batch).logprobs
    changed = (before - after).abs() > 1e-5
    plain = (batch.prompt_of == 0)[batch.row_of]
    assert changed[~plain].float().mean() > 0.9
    assert not changed[plain].any()


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_the_check_of_the_layout_reads_media_and_leaves_out_answers_with_sampled_placeholders(
    family, tmp_path, monkeypatch
):
    r = rig(family, tmp_path)
    batch = mixed_batch(mixed_prompts(r))
    token = next(iter(r.processor.tokens.values()))
    if token < r.actor.text_config.vocab_size:  # else the head cannot sample it
        batch.responses.tokens[[0, 8]] = token  # of an answer to text, and of one to media
    checked = []
    monkeypatch.setattr(
        r.actor,
        "own_logprobs",
        lambda few, at=None: checked.append(few) or type(r.actor).own_logprobs(r.actor, few, at),
    )
    assert check_layout(r.actor, batch) == ""
    assert r.actor.layout == r.actor.family.layout
    few = checked[0]
    assert len(few) == 4
    assert sum(int(rows.lengths[few.prompt_of[0]]) for rows in few.prompts.media.values())
    assert token not in few.responses.tokens


def test_the_check_of_the_layout_refuses_a_family_whose_pictures_are_read_in_one_direction_only(
    tmp_path,
):
    actor = rig("gemma3", tmp_path).actor
    batch = mixed_batch(mixed_prompts(rig("gemma3", tmp_path)))
    actor.family = replace(actor.family, reader=replace(actor.family.reader, both_ways=False))
    with pytest.raises(ModelError, match="'gemma3' cannot be scored: layout prefix_shared differs"):
        check_layout(actor, batch)
