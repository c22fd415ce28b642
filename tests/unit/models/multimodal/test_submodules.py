"""Parts of models that read media: frozen, adapted and moved at a rate of their own, each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.families import family_of
from lightrft.models.loading.save_model import save_model
from lightrft.models.lora import apply_lora_configuration, target_modules
from lightrft.models.multimodal.equal_towers import has_constant_towers
from lightrft.models.multimodal.merge_inputs import merge_multimodal_inputs
from lightrft.models.multimodal.submodules import part_of
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, tiny_media_model
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.strategy.base import TrainState
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError, ModelError
from tests.media_helpers import Rig, mixed_batch, mixed_prompts, rig
from tests.model_helpers import float32_bound, gap, gradients, small_model

PARTS = ("language", "tower", "projector")
RATES = {"tower": 1e-4, "projector": 1e-3}


def with_batch(family: str, folders: pytest.TempPathFactory) -> tuple[Rig, Batch]:
    r = rig(family, folders.mktemp("made"))
    return r, mixed_batch(mixed_prompts(r))


@pytest.fixture(scope="module", params=ALL_MEDIA_FAMILIES)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Rig, Batch]:
    """A model that is only read, in a folder that nothing writes into. ``load`` makes a copy."""
    return with_batch(request.param, tmp_path_factory)


ONE_OF_EACH = ("qwen3_vl", "llava", "paligemma", "glm4v_moe", "voxtral")
"""Families whose parts and towers differ in kind, for what depends on the parts of a model alone:
features at several layers, a tower of its own, a prefix in both directions, names of layers that
tower and experts share, and sounds. That every family has its parts right is tested of all."""


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def some(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Rig, Batch]:
    """As ``made``, of a few families."""
    return with_batch(request.param, tmp_path_factory)


def load(r: Rig, **options: Any) -> Actor:
    return Actor.load(
        ModelConfig.model_validate({"path": str(r.path), "dtype": "float32", **options})
    )


def trained_parts(actor: Actor) -> set[str]:
    return {actor.part_of(name) for name, p in actor.named_parameters() if p.requires_grad}


def prepared(actor: Any, **options: Any) -> tuple[SingleStrategy, TrainState]:
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    return strategy, strategy.prepare(actor, OptimizerConfig(**{"lr": 1e-2, **options}), 10)


def take(strategy: SingleStrategy, state: TrainState, batch: Batch) -> None:
    strategy.backward(state, -state.model.score(batch).logprobs.mean(), last=True)
    strategy.step(state)


def moved(actor: nn.Module, before: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far the parameter of each part that moved most went."""
    found: dict[str, float] = {}
    for name, p in actor.named_parameters():
        part = actor.part_of(name)  # type: ignore[operator]
        found[part] = max(found.get(part, 0.0), float((p.detach() - before[name]).abs().max()))
    return found


def copy_of(actor: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in actor.named_parameters()}


def test_every_parameter_belongs_to_one_part_and_every_part_has_some(made):
    r, _ = made
    names = [name for name, _ in r.actor.named_parameters()]
    assert {r.actor.part_of(name) for name in names} == set(r.actor.parts)
    assert r.actor.part_of("model.model.language_model.embed_tokens.weight") == "language"
    assert all(
        r.actor.part_of(n) == "language" for n in names if "embed_tokens." in n or "lm_head" in n
    )
    # Of which some may be for other releases of transformers.
    for prefixes in r.actor.family.reader.parts.values():
        assert any(n.removeprefix("model.").startswith(prefixes) for n in names)


@pytest.mark.parametrize(
    "frozen", [("tower",), ("projector",), ("language",), ("language", "tower")]
)
def test_a_frozen_part_gets_no_gradient_and_the_others_do(made, frozen):
    r, batch = made
    actor = load(r, freeze=frozen)
    before = copy_of(actor)
    assert trained_parts(actor) == set(PARTS) - set(frozen)
    take(*prepared(actor), batch)
    still = {part for part, far in moved(actor, before).items() if not far}
    assert still == set(frozen)


def test_features_depend_on_no_parameter_of_the_language_model(made):
    r, batch = made
    actor = load(r, freeze=("tower", "projector"))
    assert has_constant_towers(actor)
    if r.actor.family.own_forward is not None:
        return  # It has no features apart from its forward.
    assert not has_constant_towers(load(r, freeze=("tower",)))
    features = []
    for change in (0.0, 1.0):
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if actor.part_of(name) == "language":
                    parameter += change
            for mode in (False, True):
                actor.train(mode)
                seen = merge_multimodal_inputs(actor.base, actor.family, batch.prompts)
                features.append([seen.features, *seen.deep])
    first, *others = features
    assert all(a.equal(b) for other in others for a, b in zip(first, other, strict=True))


def test_freezing_a_part_that_a_text_model_lacks_is_an_error(tmp_path):
    save_model(small_model("qwen2"), tiny_tokenizer(), tmp_path)
    with pytest.raises(ModelError, match=r"model\.freeze = 'tower'.*'qwen2'.*has language"):
        Actor.load(ModelConfig(path=str(tmp_path), freeze=("tower",)))


def test_freezing_everything_is_an_error_that_says_so(tmp_path):
    save_model(small_model("qwen2"), tiny_tokenizer(), tmp_path)
    actor = Actor.load(ModelConfig(path=str(tmp_path), freeze=("language",)))
    with pytest.raises(ConfigError, match=r"nothing of the model is trained.*model\.freeze"):
        prepared(actor)


def test_each_part_moves_by_its_own_rate(some):
    """The first step of AdamW is the rate itself, wherever there is a gradient."""
    r, batch = some
    actor = load(r)
    before = copy_of(actor)
    take(*prepared(actor, lr_of=RATES, max_grad_norm=None, eps=1e-16), batch)
    far = moved(actor, before)
    assert far["tower"] == pytest.approx(1e-4, rel=1e-2)
    assert far["projector"] == pytest.approx(1e-3, rel=1e-2)
    assert far["language"] == pytest.approx(1e-2, rel=1e-2)


def test_the_schedule_scales_every_rate_alike(some):
    r, batch = some
    strategy, state = prepared(
        load(r), lr_of=RATES, schedule="linear", min_lr_ratio=0.0, warmup_steps=1
    )
    for expected in (0.5, 1.0, 8 / 9):
        rates = {round(group["lr"] / expected, 9) for group in state.optimizer.param_groups}
        assert rates == {1e-4, 1e-3, 1e-2}
        take(strategy, state, batch)


def test_the_rate_that_is_told_is_that_of_the_rest(some):
    r, batch = some
    strategy, state = prepared(load(r), lr_of={"language": 1e-5})
    strategy.backward(state, -state.model.score(batch).logprobs.mean(), last=True)
    assert strategy.step(state).lr == 1e-2


def test_a_rate_of_the_language_model_alone_leaves_its_critic_head_with_it(some):
    r, _ = some
    critic = Critic.load(ModelConfig(path=str(r.path), dtype="float32"))
    _, state = prepared(critic, lr_of={"language": 1e-5})
    rate_of = {
        id(p): group["lr"] for group in state.optimizer.param_groups for p in group["params"]
    }
    assert rate_of[id(critic.value_head.weight)] == 1e-5


@pytest.mark.parametrize(("part", "why"), [("tower", "has language"), ("towr", "has language")])
def test_a_rate_of_a_part_that_the_model_lacks_is_an_error(tmp_path, part, why):
    save_model(small_model("qwen2"), tiny_tokenizer(), tmp_path)
    with pytest.raises(ConfigError, match=rf"optimizer\.lr_of\.{part} = 1e-06.*{why}"):
        prepared(Actor.load(ModelConfig(path=str(tmp_path))), lr_of={part: 1e-6})


def test_a_rate_of_a_part_that_is_frozen_is_an_error(some):
    r, _ = some
    with pytest.raises(
        ConfigError, match=r"optimizer\.lr_of\.tower = 1e-06 changes nothing.*model\.freeze"
    ):
        prepared(load(r, freeze=["tower"]), lr_of={"tower": 1e-6})


def test_a_rate_by_part_of_a_model_without_parts_is_an_error():
    with pytest.raises(ConfigError, match="does not say which parts"):
        prepared(nn.Linear(2, 2), lr_of={"tower": 1e-6})


@pytest.mark.slow
def test_training_with_rates_by_part_goes_on_bit_for_bit_from_a_checkpoint(some, tmp_path):
    r, batch = some
    options: dict[str, Any] = {"lr_of": RATES, "schedule": "cosine", "weight_decay": 0.1}
    strategy, whole = prepared(load(r), **options)
    for _ in range(4):
        take(strategy, whole, batch)
    strategy, first = prepared(load(r), **options)
    for _ in range(2):
        take(strategy, first, batch)
    strategy.save(first, tmp_path / "state")
    strategy, second = prepared(load(r), **options)
    strategy.load(second, tmp_path / "state")
    for _ in range(2):
        take(strategy, second, batch)
    ends = (copy_of(state.model) for state in (whole, second))
    assert all(a.equal(b) for a, b in zip(*(end.values() for end in ends), strict=True))


SHARES_NAMES = "glm4v_moe"
"""A family whose experts have layers named as those of the tower: peft adapts both."""


def adaptable(r: Rig) -> tuple[str, ...]:
    """Parts with linear layers: some projectors are a bare matrix."""
    family = family_of(r.actor.base.config)
    linear = {
        part_of(family, f"{name}.")
        for name, m in r.actor.base.named_modules()
        if isinstance(m, nn.Linear)
    }
    return tuple(part for part in PARTS if part in linear)


@pytest.mark.parametrize(
    "parts", [("language",), ("tower",), ("projector",), ("language", "tower"), PARTS]
)
def test_adapters_land_on_the_parts_that_were_asked_for_and_nowhere_else(made, parts):
    r, _ = made
    if not set(parts) <= set(adaptable(r)):
        with pytest.raises(ModelError, match="names no module of projector"):
            load(r, lora={"rank": 2, "alpha": 4.0, "parts": parts})
        return
    if SHARES_NAMES in str(r.path) and "language" not in parts:
        with pytest.raises(ModelError, match="peft puts adapters on language too"):
            load(r, lora={"rank": 2, "alpha": 4.0, "parts": parts})
        return
    actor = load(r, lora={"rank": 2, "alpha": 4.0, "parts": parts})
    assert trained_parts(actor) == set(parts)
    assert all("lora_" in name for name, p in actor.named_parameters() if p.requires_grad)


def test_routers_that_only_inherit_from_a_linear_layer_get_no_adapters():
    model = tiny_media_model("llama4")
    named = target_modules(model, LoRAConfig())
    assert "language_model.model.layers.0.self_attn.q_proj" in named
    router = "language_model.model.layers.1.feed_forward.router"
    assert isinstance(model.get_submodule(router), nn.Linear)
    assert router not in named


def test_adapters_stay_out_of_towers_unless_asked_for(made):
    r, _ = made
    assert trained_parts(load(r, lora={"rank": 2, "alpha": 4.0})) == {"language"}


def shared_leaf(r: Rig) -> str:
    """The last part of a name that linear layers of the tower and of the language model have in common; else one of the latter's."""
    leaves: dict[str, set[str]] = {part: set() for part in PARTS}
    for name, module in r.actor.base.named_modules():
        if isinstance(module, nn.Linear):
            leaves[part_of(family_of(r.actor.base.config), f"{name}.")].add(name.rsplit(".", 1)[-1])
    return min((leaves["language"] & leaves["tower"]) or leaves["language"])


@pytest.mark.parametrize("as_pattern", [False, True])
def test_a_leaf_name_that_the_tower_has_too_does_not_match_there(some, as_pattern):
    r, _ = some
    leaf = "q_proj" if SHARES_NAMES in str(r.path) else shared_leaf(r)
    targets = rf".*\.{leaf}" if as_pattern else [leaf]
    actor = load(r, lora={"rank": 2, "alpha": 4.0, "targets": targets})
    assert trained_parts(actor) == {"language"}
    assert {
        name.split(".lora_")[0].rsplit(".", 1)[-1]
        for name, p in actor.named_parameters()
        if p.requires_grad
    } == {leaf}


def test_targets_that_the_asked_parts_do_not_have_are_an_error(some):
    r, _ = some
    with pytest.raises(
        ModelError,
        match=r"model\.lora\.targets.*'nothing'.*no module of language.*model\.lora\.parts",
    ):
        load(r, lora={"rank": 2, "alpha": 4.0, "targets": ["nothing"]})


def test_adapters_on_a_part_that_a_text_model_lacks_are_an_error(tmp_path):
    save_model(small_model("qwen2"), tiny_tokenizer(), tmp_path)
    with pytest.raises(ModelError, match=r"model\.lora\.parts = 'tower'.*has language"):
        load_text = ModelConfig.model_validate(
            {"path": str(tmp_path), "lora": {"parts": ["language", "tower"]}}
        )
        Actor.load(load_text)


@pytest.mark.parametrize("freeze_tower", [True, False])
def test_the_documented_function_adapts_towers_only_where_they_are_not_frozen(some, freeze_tower):
    r, _ = some
    model = Actor.load(ModelConfig(path=str(r.path))).model
    adapted = apply_lora_configuration(model, 2, 4.0, 0.0, freeze_vision_tower=freeze_tower)  # type: ignore[arg-type]
    assert trained_parts(Actor(adapted)) == (
        {"language"} if freeze_tower else {"language", "tower"}
    )


@pytest.mark.slow
def test_trained_adapters_of_every_part_are_merged_into_what_is_exported_and_come_back_as_adapters(
    made, tmp_path
):
    r, batch = made
    actor = load(r, lora={"rank": 2, "alpha": 4.0, "parts": adaptable(r)})
    with torch.no_grad():
        before = actor.score(batch).logprobs
    strategy, state = prepared(actor)
    for _ in range(3):
        take(strategy, state, batch)
    with torch.no_grad():
        after = actor.score(batch).logprobs
        with actor.reference():
            assert actor.score(batch).logprobs.equal(before)
    assert (after - before).abs().max() > 1e-2
    save_model(actor, r.tokenizer, tmp_path / "merged", processor=r.processor)
    save_model(actor, r.tokenizer, tmp_path / "adapters", merge=False)
    for name in ("merged", "adapters"):
        again = Actor.load(ModelConfig(path=str(tmp_path / name), dtype="float32"))
        with torch.no_grad():
            assert (again.score(batch).logprobs - after).abs().max() < 1e-5
    assert trained_parts(again) == set(adaptable(r))


def test_adapters_get_the_rates_of_their_parts(some):
    r, batch = some
    actor = load(r, lora={"rank": 2, "alpha": 4.0, "parts": adaptable(r)})
    before = copy_of(actor)
    rates = {part: rate for part, rate in RATES.items() if part in adaptable(r)}
    take(*prepared(actor, lr_of=rates, max_grad_norm=None, eps=1e-16), batch)
    found = {part: far for part, far in moved(actor, before).items() if far}
    assert found == pytest.approx({**rates, "language": 1e-2}, rel=1e-2)


def test_a_frozen_tower_changes_no_gradient_of_what_is_trained(made):
    r, batch = made
    _, whole = gradients(load(r), batch)
    _, some = gradients(load(r, freeze=["tower"]), batch)
    assert set(some) < set(whole)
    assert gap(some, {name: whole[name] for name in some}) < float32_bound(r.actor)
