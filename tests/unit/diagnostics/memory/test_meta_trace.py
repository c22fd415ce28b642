"""Passes on the meta device hold what real ones hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightrft.config.base import build
from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig, RewardModelConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.diagnostics.memory.formulas import kept_by_blocks
from lightrft.diagnostics.memory.meta_trace import AllocationTracker, forward, largest_batch, update
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.loading.meta_device import meta_model
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, save_tiny_media
from lightrft.models.tiny.text import tiny_config, tiny_model
from lightrft.strategy.base import TrainState
from lightrft.strategy.single import Masters, SingleStrategy

SIZES = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
BATCH = largest_batch(2, 3, 16, 48, 400, "prefix_shared")


def saved(folder: Path, layers: int = 2, family: str = "qwen2") -> ModelConfig:
    config = tiny_config(family, num_hidden_layers=layers, **SIZES)
    config.dtype = "float32"
    config.save_pretrained(folder / f"{family}-{layers}")
    return ModelConfig(path=str(folder / f"{family}-{layers}"))


def actor(config: ModelConfig) -> Actor:
    made = Actor(meta_model(config), config)
    if config.gradient_checkpointing:
        made.gradient_checkpointing_enable()
    return made


def test_watch_counts_what_lives_and_forgets_what_is_freed() -> None:
    with AllocationTracker() as watch:
        a = torch.empty(100, device="meta")
        b = a + 1
        assert (watch.live, watch.peak) == (800, 800)
        del a
        c = b.view(10, 10)
        assert (watch.live, watch.peak) == (400, 800)
        del b, c
        assert (watch.live, watch.peak) == (0, 800)


def test_the_largest_micro_batch_has_full_groups_and_stays_within_the_budget() -> None:
    # A group is 10 + 4 x 20 = 90, and 10 + 2 x 20 = 50 still fit.
    batch = largest_batch(8, 4, 10, 20, 150, "prefix_shared")
    assert batch.prompt_of.tolist() == [0, 0, 0, 0, 1, 1]
    assert largest_batch(8, 4, 10, 20, 150, "packed").prompt_of.tolist() == [0, 0, 0, 0, 1]
    assert len(largest_batch(8, 4, 10, 20, 5, "packed")) == 1


def test_one_more_block_keeps_what_the_formula_says(tmp_path: Path) -> None:
    two, three = (update(actor(saved(tmp_path, layers)), BATCH, 1).peak for layers in (2, 3))
    # The last token of each is not run.
    tokens = sum(BATCH.lengths.tolist()) + sum(BATCH.prompts.lengths.tolist()) - len(BATCH)
    by_hand = kept_by_blocks(tokens, 1, 4, hidden=64, queries=64, keys=32, inner=256)
    denominators = tokens * 4 * 4 + 2 * tokens * 4  # of attention by head, and of two norms
    assert three - two == pytest.approx(by_hand + denominators, rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_traced_update_holds_at_most_what_a_real_one_on_the_cpu_does(
    tmp_path: Path, checkpointing: bool
) -> None:
    config = replace_config(saved(tmp_path, 3), gradient_checkpointing=checkpointing)
    found = update(actor(config), BATCH, 1)
    real = Actor(tiny_model("qwen2", num_hidden_layers=3, **SIZES), config)
    if checkpointing:
        real.gradient_checkpointing_enable()
    parameters = dict(real.named_parameters())
    state = TrainState(real, None, OptimizerConfig(), Masters(parameters, dict(parameters)))  # ty: ignore[invalid-argument-type]
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    real.train()
    with AllocationTracker() as watch:
        strategy.backward(state, real.score(BATCH).logprobs.sum(), last=True)
        assert watch.live == pytest.approx(found.gradients, rel=0.001)
    assert found.peak == pytest.approx(watch.peak, rel=0.05)


@pytest.mark.parametrize("pooling", ["last", "attention", "token"])
def test_a_traced_update_of_a_reward_model_holds_what_a_real_one_does(
    tmp_path: Path, pooling: str
) -> None:
    heads = [{"name": "score", "kind": "mlp"}, {"name": "many", "kind": "ensemble", "size": 3}]
    settings = build(RewardModelConfig, {"heads": heads, "pooling": pooling, "gate": True})
    config = saved(tmp_path, 3)
    traced = RewardModel(meta_model(config), config, settings).to("meta")
    found = update(traced, BATCH, 1)
    real = RewardModel(tiny_model("qwen2", num_hidden_layers=3, **SIZES), config, settings)
    parameters = {name: p for name, p in real.named_parameters() if p.requires_grad}
    state = TrainState(real, None, OptimizerConfig(), Masters(parameters, dict(parameters)))  # ty: ignore[invalid-argument-type]
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    real.train()
    with AllocationTracker() as watch:
        outputs = real.score(BATCH).values()
        loss = torch.stack([head.scores.sum() + head.outputs.sum() for head in outputs]).sum()
        strategy.backward(state, loss, last=True)
        assert watch.live == pytest.approx(found.gradients, rel=0.01)
    assert found.peak == pytest.approx(watch.peak, rel=0.05)


@pytest.mark.parametrize("head", ["mlp", "tokens"])
def test_a_traced_update_of_a_process_model_holds_what_a_real_one_does(
    tmp_path: Path, head: str
) -> None:
    settings = build(ProcessModelConfig, {"head": head})
    config = saved(tmp_path, 3)
    batch = largest_batch(2, 3, 16, 48, 400, "prefix_shared", steps=6)
    assert batch.step_ends is not None and int(batch.step_ends.sum()) == 6 * len(batch)
    traced = ProcessRewardModel(meta_model(config), config, settings, verdicts=(5, 6)).to("meta")
    found = update(traced, batch, 1)
    inner = tiny_model("qwen2", num_hidden_layers=3, **SIZES)
    real = ProcessRewardModel(inner, config, settings, verdicts=(5, 6))
    parameters = {name: p for name, p in real.named_parameters() if p.requires_grad}
    state = TrainState(real, None, OptimizerConfig(), Masters(parameters, dict(parameters)))  # ty: ignore[invalid-argument-type]
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    real.train()
    with AllocationTracker() as watch:
        strategy.backward(state, real.score_steps(batch).logits.sum(), last=True)
        assert watch.live == pytest.approx(found.gradients, rel=0.01)
    assert found.peak == pytest.approx(watch.peak, rel=0.05)


def replace_config(config: ModelConfig, **changes: object) -> ModelConfig:
    return config.model_copy(update=changes)


def test_gradients_are_those_of_trained_parameters_in_the_type_of_their_masters(
    tmp_path: Path,
) -> None:
    plain = saved(tmp_path)
    for config in (
        plain,
        replace_config(plain, dtype="bfloat16"),
        replace_config(plain, lora=LoRAConfig(rank=4)),
    ):
        model = actor(config)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert update(model, BATCH, 2).gradients == 4 * trained


def test_a_second_micro_batch_meets_the_gradients_of_the_first(tmp_path: Path) -> None:
    model = actor(saved(tmp_path))
    one, two, many = (update(model, BATCH, parts) for parts in (1, 2, 5))
    assert one.peak < two.peak == many.peak
    assert two.peak >= one.peak + 0.5 * one.gradients


def test_a_pass_without_gradient_takes_less_and_a_critic_is_traced_too(tmp_path: Path) -> None:
    config = saved(tmp_path)
    assert forward(actor(config), BATCH).peak < update(actor(config), BATCH, 1).activations
    critic = Critic(meta_model(config), config)
    assert 0 < forward(critic, BATCH).peak < update(critic, BATCH, 1).peak


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "phi3", "olmo2"])
def test_other_families_run_without_numbers(tmp_path: Path, family: str) -> None:
    assert update(actor(saved(tmp_path, family=family)), BATCH, 1).activations > 0


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_towers_count_and_their_models_run_without_numbers(tmp_path: Path, family: str) -> None:
    save_tiny_media(family, tmp_path)
    config = ModelConfig(path=str(tmp_path))
    traced, real = actor(config), load_model(config)
    assert sum(p.numel() for p in traced.base.parameters()) == sum(
        p.numel() for p in real.parameters()
    )
    assert {p.dtype for p in traced.base.parameters()} == {p.dtype for p in real.parameters()}
    # Experts run on the meta device in this type alone.
    half = actor(replace_config(config, dtype="bfloat16"))
    assert update(half, BATCH, 1).activations > 0
