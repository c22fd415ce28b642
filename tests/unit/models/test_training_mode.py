"""Random parts of a forward act where ``model.dropout`` says so, and gradient checkpointing acts in any case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.models.actor import Actor, TokenScores
from lightrft.models.critic import Critic
from lightrft.models.lora import add_adapters
from lightrft.models.router_loss import report_unread
from lightrft.models.tiny.text_families import family_model
from lightrft.models.training_mode import evaluation_mode, values_of_evaluation
from lightrft.utils.errors import ModelError
from tests.model_helpers import ragged_batch

BATCH = ragged_batch([9, 4], [6, 1, 5], [0, 0, 1])

RANDOM: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "opt": {"dropout": 0.3, "layerdrop": 0.5},
    "llama": {"attention_dropout": 0.3},
    "gpt_neox": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "bloom": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "mixtral": {"router_jitter_noise": 0.5},
    "phimoe": {"input_jitter_noise": 0.5, "router_jitter_noise": 0.5},
    "biogpt": {"hidden_dropout_prob": 0.3, "activation_dropout": 0.3, "layerdrop": 0.5},
    "xglm": {"dropout": 0.3, "activation_dropout": 0.3, "layerdrop": 0.5},
}
"""Families with a random forward, and the fields of their config that make it random."""


def actor_of(family: str, **settings: Any) -> Actor:
    return Actor(family_model(family, seed=3, **RANDOM[family]), ModelConfig(**settings))


def adapted(rate: float, dora: bool = False, dropout: bool = False) -> Actor:
    lora = LoRAConfig(rank=4, dropout=rate, dora=dora)
    torch.manual_seed(2)
    model = add_adapters(family_model("llama", seed=3, attention_dropout=0.3), lora)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return Actor(model, ModelConfig(lora=lora, dropout=dropout))


def logprobs(actor: Actor) -> torch.Tensor:
    return actor.score(BATCH).logprobs


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", RANDOM)
def test_training_without_dropout_computes_the_numbers_of_evaluation(family, checkpointing):
    actor = actor_of(family)
    if checkpointing:
        actor.gradient_checkpointing_enable()
    expected = logprobs(actor)
    actor.train()
    assert actor.training and not actor.is_random
    found = logprobs(actor)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert torch.equal(logprobs(actor), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", RANDOM)
def test_training_with_dropout_is_random_and_evaluation_is_not(family, checkpointing):
    actor = actor_of(family, dropout=True)
    if checkpointing:
        actor.gradient_checkpointing_enable()
    # Dropout of attention weights takes padded rows, which round differently.
    expected = logprobs(actor.train().eval())
    actor.train()
    assert actor.is_random
    assert not torch.equal(logprobs(actor), expected)
    with evaluation_mode(actor):
        assert torch.equal(logprobs(actor), expected)
    actor.eval()
    assert torch.equal(logprobs(actor), expected)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "opt"])
def test_gradient_checkpointing_recomputes_each_layer_and_keeps_the_gradient(family, dropout):
    def gradients(checkpointing: bool) -> tuple[list[torch.Tensor], int]:
        actor = actor_of(family, dropout=dropout)
        if checkpointing:
            actor.gradient_checkpointing_enable()
        runs = 0

        def count(*_: object) -> None:
            nonlocal runs
            runs += 1

        for module in actor.modules():
            if isinstance(module, GradientCheckpointingLayer):
                inner = next(iter(module.children()))
                inner.register_forward_hook(count)
        actor.train()
        torch.manual_seed(0)
        logprobs(actor).sum().backward()
        return [p.grad for p in actor.parameters() if p.grad is not None], runs

    plain, once = gradients(False)
    recomputed, twice = gradients(True)
    assert twice == 2 * once
    torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize("dora", [False, True])
def test_the_dropout_of_adapters_acts_alone_where_only_it_is_set(dora):
    actor = adapted(0.4, dora)
    expected = logprobs(actor)
    actor.train()
    assert actor.is_random and not torch.equal(logprobs(actor), expected)
    base = actor.base.model.layers[0]
    assert not base.training and not base.self_attn.training
    assert torch.equal(logprobs(adapted(0.0, dora).train()), logprobs(adapted(0.0, dora)))


def test_a_new_model_with_adapters_is_in_evaluation_mode():
    actor = adapted(0.4)
    assert not any(module.training for module in actor.modules())


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "opt"])
def test_compared_scores_have_the_value_of_evaluation_and_the_gradient_of_the_random_forward(
    family,
):
    actor, batch = actor_of(family, dropout=True), BATCH
    weights = torch.linspace(-1, 1, batch.tokens)
    expected = logprobs(actor.train().eval())
    actor.train()

    def gradients() -> list[torch.Tensor]:
        found = [p.grad.clone() for p in actor.parameters() if p.grad is not None]
        actor.zero_grad()
        return found

    torch.manual_seed(1)
    (weights * actor.score(batch).logprobs).sum().backward()
    noisy = gradients()
    torch.manual_seed(1)
    scores = values_of_evaluation(actor, lambda: actor.score(batch, entropy=True))
    assert torch.equal(scores.logprobs, expected)
    (weights * scores.logprobs).sum().backward()
    torch.testing.assert_close(gradients(), noisy)
    assert scores.divergence is None and scores.entropy is not None
    assert actor.training


def test_the_heads_of_other_models_see_the_mode_that_is_set():
    critic = Critic(family_model("gpt2", seed=3, **RANDOM["gpt2"]))
    critic.train()
    assert critic.value_head.training and not critic.base.training
    critic.eval()
    assert not critic.value_head.training


def test_scores_that_are_not_finite_stay_as_they_are():
    class Infinite(nn.Module):
        is_random = True

    given = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    model = Infinite()
    found = values_of_evaluation(model, lambda: TokenScores(given * 1)).logprobs
    assert found.tolist() == [-torch.inf, 0.5]


def test_dropout_of_attention_weights_takes_padded_rows_and_says_so(caplog):
    assert actor_of("llama").train().layout == "prefix_shared"
    assert actor_of("llama", dropout=True).train().layout == "padded"
    assert "attention_dropout = 0.3" in caplog.text and "model.dropout=false" in caplog.text


def test_a_plan_refuses_dropout_of_attention_weights_that_no_config_field_names():
    actor = actor_of("llama", dropout=True)
    actor.train()
    actor.layout = "packed"
    with pytest.raises(ModelError, match=r"drops 0\.3 .* model\.layout=padded"):
        logprobs(actor)


def test_layers_that_are_left_out_at_random_are_refused_where_processes_share_them(monkeypatch):
    actor_of("opt", dropout=True).run_towers = True
    monkeypatch.setattr("lightrft.models.actor.has_other_processes", lambda: True)
    actor_of("opt").run_towers = True
    actor_of("gpt2", dropout=True).run_towers = True
    said = r"model\.dropout = true: .*decoder .*layerdrop = 0\.5.*set model\.dropout=false"
    with pytest.raises(ModelError, match=said):
        actor_of("opt", dropout=True).run_towers = True


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_config_that_asks_for_the_loss_of_routers_is_reported_once(family, caplog):
    model = family_model(family, seed=0)
    Actor(model, ModelConfig()).train()
    assert "router_aux_loss_coef" not in caplog.text
    model.config.output_router_logits = True
    actor = Actor(model, ModelConfig())
    actor.eval()
    assert "router_aux_loss_coef" not in caplog.text
    for _ in range(2):
        actor.train()
    assert caplog.text.count("router_aux_loss_coef = ") == 1


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"output_router_logits": True, "aux_loss_coef": 0.01}, "and aux_loss_coef = 0.01"),
        (
            {"output_router_logits": True, "ffn_config": {"moe_loss_weight": 0.02}},
            "and moe_loss_weight = 0.02",
        ),
        (
            {"text_config": {"output_router_logits": True, "router_aux_loss_coef": 0.03}},
            "and router_aux_loss_coef = 0.03",
        ),
        ({"z_loss_coefficient": 0.04}, "z_loss_coefficient = 0.04"),
        ({"router_aux_loss_coef": 0.05}, ""),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, ""),
    ],
)
def test_every_name_of_a_loss_in_a_config_is_reported_at_every_depth(fields, told, caplog):
    report_unread(PreTrainedConfig(**fields))
    assert len(caplog.messages) == bool(told)
    assert told in caplog.text
