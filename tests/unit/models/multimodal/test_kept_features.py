"""Features of frozen towers: computed once per step, by models whose towers are proved to be equal, without a change of any number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.learner.preference_batch import PreferenceStats
from lightrft.learner.preference_step import (
    PreferenceSettings,
    preference_losses,
    preference_step,
)
from lightrft.models.actor import Actor
from lightrft.models.multimodal.equal_towers import has_constant_towers, has_same_towers
from lightrft.models.multimodal.towers import KeptFeatures
from lightrft.models.tiny.text import tiny_model
from lightrft.roles import AdapterFreeReference, FrozenModel, Reference, Roles, TrainableModel
from lightrft.rollout.accounting import CollectedRollouts, FilterResult
from lightrft.strategy.single import SingleStrategy
from lightrft.trainer.rl_step import learn
from lightrft.types import Batch, Ragged, Rollout, Segments
from tests.media_helpers import Rig, mixed_prompts, rig
from tests.unit.trainer.test_rl_step import Told, Unused, config_of, context_of

FROZEN = {"freeze": ("tower", "projector")}
LORA = {"lora": {"rank": 4}}
MICRO_BATCH = 100


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("qwen2_vl", tmp_path_factory.mktemp("made"))


def load(r: Rig, **options: Any) -> Actor:
    tree = {"path": str(r.path), "dtype": "float32", **options}
    return Actor.load(ModelConfig.model_validate(tree))


def reference_of(r: Rig) -> FrozenModel:
    return FrozenModel(load(r).requires_grad_(False).eval())


def roles_of(actor: Actor, reference: Reference | None, teacher: Reference | None = None) -> Roles:
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    policy = TrainableModel(actor, strategy.prepare(actor, OptimizerConfig(lr=1e-2), 10))
    return Roles(strategy, policy, Unused(), Unused(), None, reference=reference, teacher=teacher)  # type: ignore[arg-type]


def pairs_of(r: Rig) -> Batch:
    """Two responses to each prompt, some of which have pictures and clips."""
    prompts = mixed_prompts(r)
    g = torch.Generator().manual_seed(0)
    count = 2 * len(prompts)
    answers = [torch.randint(4, 90, (2 + i % 4,), generator=g).tolist() for i in range(count)]
    return Batch(
        Segments.of_prompts(prompts),
        Segments.of(answers),
        torch.arange(len(prompts)).repeat_interleave(2),
        example=torch.arange(len(prompts)).repeat_interleave(2),
        rank=torch.tensor([0, 1] * len(prompts)),
    )


def settings_of(**tree: Any) -> PreferenceSettings:
    config = build(PreferenceConfig, tree or {"preset": "dpo"})
    return PreferenceSettings(config, preference_requirements(config), MICRO_BATCH, 0)


def count_media(*actors: Actor) -> list[int]:
    """Return a list that gets the number of pictures and clips of each call of a tower."""
    counts: list[int] = []

    def count(module: Any, args: Any, words: dict[str, Any]) -> None:
        counts.append(len(words["grid_thw"]))

    for actor in actors:
        actor.base.model.visual.register_forward_pre_hook(count, with_kwargs=True)
    return counts


def media_in(batch: Batch) -> int:
    names = ("image_grid_thw", "video_grid_thw")
    return sum(len(batch.prompts.media[name].values) for name in names)


def collected_of(r: Rig) -> CollectedRollouts:
    """Groups of two scored responses."""
    collected = CollectedRollouts()
    for p, prompt in enumerate(mixed_prompts(r)):
        group = []
        for i in range(2):
            ids = [5 + p, 9 + i]
            drawn = ([True, True], [-1.0, -1.0], [0, 0])
            group.append(Rollout(prompt, ids, *drawn, "stop", i, i, reward=float(i)))
        collected.add_group(group, FilterResult(group))
    return collected


@pytest.mark.parametrize("how", ["frozen", "adapters", "adapters of both"])
def test_a_step_of_dpo_reads_each_picture_once_where_no_tower_is_trained(
    made: Rig, how: str
) -> None:
    actor = load(made, **(FROZEN if how == "frozen" else LORA))
    reference = AdapterFreeReference(actor) if how == "adapters" else reference_of(made)
    models = [actor] + ([reference.model] if isinstance(reference, FrozenModel) else [])
    roles, batch = roles_of(actor, reference), pairs_of(made)
    settings = settings_of()
    # The check of the layout, on the first batch, also calls towers.
    preference_step(roles, batch, settings, PreferenceStats(), 0)
    counts = count_media(*models)
    preference_step(roles, batch, settings, PreferenceStats(), 1)
    assert len(counts) > 2
    assert sum(counts) == media_in(batch)


def test_a_whole_batch_loss_of_three_passes_reads_each_picture_once(made: Rig) -> None:
    actor, reference = load(made, **FROZEN), reference_of(made)
    roles, batch = roles_of(actor, reference), pairs_of(made)
    settings = settings_of(preset="aot")
    assert settings.requirements.whole_batch
    preference_step(roles, batch, settings, PreferenceStats(), 0)
    counts = count_media(actor, reference.model)
    preference_step(roles, batch, settings, PreferenceStats(), 1)
    assert sum(counts) == media_in(batch)


def test_an_evaluation_reads_each_picture_once(made: Rig) -> None:
    actor, reference = load(made, **FROZEN), reference_of(made)
    roles, batch = roles_of(actor, reference), pairs_of(made)
    preference_losses(roles, batch, settings_of(), PreferenceStats())
    counts = count_media(actor, reference.model)
    preference_losses(roles, batch, settings_of(), PreferenceStats())
    assert sum(counts) == media_in(batch)


@pytest.mark.parametrize("tree", [{"preset": "dpo"}, {"preset": "aot"}, {"preset": "tdpo"}])
def test_kept_features_change_no_bit_of_a_step(
    made: Rig, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(Roles, "_share_features", lambda roles: KeptFeatures())
        roles = roles_of(load(made, **FROZEN), reference_of(made))
        steps = []
        for step in range(2):
            metrics = preference_step(
                roles, pairs_of(made), settings_of(**tree), PreferenceStats(), step
            )
            steps.append(metrics.compute())
        assert (roles.actor.kept_features is not None) == shares
        weights = {name: p.detach().clone() for name, p in roles.actor.named_parameters()}
        found.append((steps, weights))
    (kept_steps, kept_weights), (steps, weights) = found
    assert kept_steps == steps
    assert all(kept_weights[name].equal(weight) for name, weight in weights.items())


def test_all_passes_of_an_rl_step_read_each_picture_once(made: Rig) -> None:
    config = config_of(
        algorithm={"kl": {"where": "loss", "coef": 0.1}},
        engine={"check_logprobs": False},  # these are made up
        train={"ppo_epochs": 2, "max_tokens_per_micro_batch": MICRO_BATCH},
    )
    actor, reference = load(made, **FROZEN), reference_of(made)
    roles = roles_of(actor, reference)
    roles.engine = Told()  # type: ignore[assignment]
    # The check of the layout, on the first batch, also calls towers.
    learn(context_of(roles, config), collected_of(made))
    counts = count_media(actor, reference.model)
    learn(context_of(roles, config, step=1), collected_of(made))
    assert sum(counts) == media_in(pairs_of(made))


def test_features_are_released_when_a_step_ends_or_fails(made: Rig) -> None:
    roles, batch = roles_of(load(made, **FROZEN), reference_of(made)), pairs_of(made)
    preference_step(roles, batch, settings_of(), PreferenceStats(), 0)
    kept = roles.kept_features
    assert kept is not None
    assert roles.actor.kept_features is kept
    assert not kept._outputs
    with pytest.raises(KeyError), roles.keeping_features(batch) as numbered:
        numbered.prompts.media_key = (0,)
        with torch.no_grad():
            roles.actor.score(numbered)
        assert kept._outputs
        raise KeyError
    assert not kept._outputs


def test_a_pass_with_gradient_keeps_nothing_and_a_batch_without_a_key_neither(made: Rig) -> None:
    roles, batch = roles_of(load(made, **FROZEN), None), pairs_of(made)
    with roles.keeping_features(batch) as numbered:
        kept = roles.kept_features
        assert kept is not None
        with torch.no_grad():
            roles.actor.score(numbered)
        numbered.prompts.media_key = (0,)
        roles.actor.score(numbered)
        assert not kept._outputs


def test_responses_with_media_are_not_read_from_kept_features(made: Rig) -> None:
    roles, batch = roles_of(load(made, **FROZEN), None), pairs_of(made)
    like = batch.prompts.media["image_grid_thw"]
    batch.responses.media["image_grid_thw"] = Ragged(
        like.values[:1], torch.tensor([1] + [0] * (len(batch) - 1))
    )
    with roles.keeping_features(batch) as same:
        assert same.prompts.numbers is None


def move_tower(actor: Actor) -> None:
    actor.base.model.visual.blocks[-1].mlp.fc1.bias.data[0] += 1e-6


def move_buffer(actor: Actor) -> None:
    actor.base.model.visual.rotary_pos_emb.inv_freq[0] += 1e-6


def other_activation(actor: Actor) -> None:
    actor.base.config.vision_config.hidden_act = "gelu"


def other_dtype(actor: Actor) -> None:
    actor.base.model.visual.to(torch.bfloat16)


@pytest.mark.parametrize("change", [move_tower, move_buffer, other_activation, other_dtype])
def test_towers_that_differ_are_not_shared(made: Rig, change: Callable[[Actor], None]) -> None:
    actor, reference = load(made, **FROZEN), reference_of(made)
    shards = SingleStrategy(StrategyConfig(device="cpu")).shards
    assert has_same_towers(actor, reference.model, shards)
    change(reference.model)
    assert not has_same_towers(actor, reference.model, shards)
    roles = roles_of(actor, reference)
    with roles.keeping_features(pairs_of(made)):
        assert actor.kept_features is not None
        assert reference.model.kept_features is None


def test_a_difference_of_language_models_alone_does_not_keep_towers_apart(made: Rig) -> None:
    actor, reference = load(made, **FROZEN), reference_of(made)
    reference.model.base.get_input_embeddings().weight.data += 1
    shards = SingleStrategy(StrategyConfig(device="cpu")).shards
    assert has_same_towers(actor, reference.model, shards)
    assert has_same_towers(load(made, **LORA), reference.model, shards)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"freeze": ("tower",)},
        {"freeze": ("projector",)},
        {"lora": {"rank": 4, "parts": ["language", "tower"]}},
        {"lora": {"rank": 4, "parts": ["language", "projector"]}},
    ],
)
def test_a_tower_whose_features_are_trained_is_not_constant(
    made: Rig, options: dict[str, Any]
) -> None:
    actor = load(made, **options)
    assert not has_constant_towers(actor)
    # Not even once its weights are frozen for a while.
    if "lora" in options:
        assert not has_constant_towers(actor.requires_grad_(False))


def test_a_tower_with_dropout_or_norms_over_the_batch_is_not_constant_if_training_has_them(
    tmp_path: Path,
) -> None:
    r = rig("qwen2_audio", tmp_path)
    for dropout in (False, True):
        actor = load(r, **FROZEN, dropout=dropout)
        tower = actor.base.model.audio_tower
        assert has_constant_towers(actor)
        tower.dropout = 0.1
        assert has_constant_towers(actor) is not dropout
        tower.dropout = 0
        tower.norm = torch.nn.BatchNorm1d(4, affine=False)
        assert has_constant_towers(actor) is not dropout


def test_a_model_of_text_has_no_towers_to_share() -> None:
    assert not has_constant_towers(Actor(tiny_model("qwen2")))
