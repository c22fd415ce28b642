"""Modules that are trained whole beside adapters: ``model.lora.modules_to_save`` does what peft's own setting does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.engines.sending.merged_adapters import merged
from lightrft.models.actor import Actor
from lightrft.models.loading.meta_device import meta_model
from lightrft.models.loading.save_model import save_model
from lightrft.models.lora import merged_state, saved_modules, untied_modules
from lightrft.models.tiny.text_families import family_model
from lightrft.strategy.base import TrainState
from lightrft.strategy.single import SingleStrategy
from lightrft.strategy.tensor_parallel import shard_layers
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.utils.module_tensors import exchange, saved_name
from tests.model_helpers import hard_batch

IDS = torch.arange(4, 12)[None]
CASES: dict[str, tuple[str, bool, tuple[str, ...], Any]] = {
    "a head": ("qwen2", False, ("lm_head",), "all-linear"),
    "a tied head": ("qwen2", True, ("lm_head",), "all-linear"),
    "embeddings": ("qwen2", False, ("embed_tokens",), ("q_proj",)),
    "tied embeddings": ("qwen2", True, ("embed_tokens",), "all-linear"),
    "both ends": ("qwen2", True, ("embed_tokens", "lm_head"), "all-linear"),
    "norms": ("qwen2", True, ("norm",), "all-linear"),
    "projections": ("qwen2", False, ("down_proj",), "all-linear"),
    "attention": ("qwen2", False, ("self_attn",), "all-linear"),
    "one layer": ("qwen2", False, ("layers.1.mlp",), ".*_proj"),
    "a router": ("mixtral", False, ("gate",), ("q_proj",)),
}
FAMILY_CASES = pytest.mark.parametrize("case", CASES)


def prepared(actor: Actor) -> TrainState:
    return SingleStrategy(StrategyConfig(device="cpu")).prepare(actor, OptimizerConfig(), 1)


def saved(folder: Path, case: str, **lora: Any) -> ModelConfig:
    """Write the base of a case, and return settings with its adapters."""
    family, tied, names, targets = CASES[case]
    model = family_model(family, seed=2, tie_word_embeddings=tied)
    model.save_pretrained(folder / "base")
    settings = LoRAConfig(rank=2, alpha=4, targets=targets, modules_to_save=names, **lora)
    return ModelConfig(path=str(folder / "base"), lora=settings)


def loss_of(actor: Actor) -> Tensor:
    logprobs = actor.score(hard_batch()).logprobs
    return -(logprobs * torch.sin(torch.arange(len(logprobs)) + 1.0)).mean()


def step(actor: Actor) -> None:
    """Train each trained weight by one step, and adapters away from 0."""
    loss_of(actor).backward()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter -= 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.grad = None


@torch.no_grad()
def scores(actor: Actor) -> Tensor:
    return actor.score(hard_batch()).logprobs


@FAMILY_CASES
def test_a_whole_module_gets_the_gradient_of_full_training_and_the_names_of_peft(
    tmp_path: Path, case: str
) -> None:
    config = saved(tmp_path, case)
    family, tied, names, targets = CASES[case]
    actor = Actor.load(config)
    loss_of(actor).backward()
    # No tensor of full training may serve two modules.
    whole = family_model(family, seed=2, tie_word_embeddings=tied)
    whole.config.tie_word_embeddings = False
    whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach().clone())
    full = Actor(whole)
    loss_of(full).backward()
    expected = dict(full.model.named_parameters())
    trained = {}
    for name, parameter in actor.model.named_parameters():
        if (plain := saved_name(name)) is not None:
            trained[name] = parameter
            gradient = expected[plain].grad
            assert parameter.grad is not None and gradient is not None
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-5)
    assert len(trained) >= len(names)
    own = LoraConfig(
        r=2, lora_alpha=4, target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(names), task_type="CAUSAL_LM",
    )  # fmt: skip
    other = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), own)
    kept = {name for name, parameter in other.named_parameters() if parameter.requires_grad}
    assert kept == {name for name, p in actor.model.named_parameters() if p.requires_grad}
    assert all(
        tuple(other.get_parameter(name).shape) == tuple(trained[name].shape) for name in trained
    )


@FAMILY_CASES
def test_what_is_written_computes_what_is_trained(tmp_path: Path, case: str) -> None:
    actor = Actor.load(saved(tmp_path, case))
    start = scores(actor)
    step(actor)
    wanted = scores(actor)
    assert float((wanted - start).abs().max()) > 0.01
    actor.use_attention("padded")
    with torch.no_grad():
        logits = actor.base(input_ids=IDS, use_cache=False).logits
    save_model(actor, None, tmp_path / "merged")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(info.values()), info
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=IDS, use_cache=False).logits, logits, atol=1e-4, rtol=1e-4
        )
    assert loaded.config.tie_word_embeddings == (CASES[case][1] and not untied_modules(actor.model))
    save_model(actor, None, tmp_path / "kept", merge=False)
    kept = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "kept")).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            kept(input_ids=IDS, use_cache=False).logits, logits, atol=1e-5, rtol=1e-5
        )
    again = Actor.load(ModelConfig(path=str(tmp_path / "kept")))
    torch.testing.assert_close(scores(again), wanted, atol=1e-5, rtol=1e-5)
    with actor.reference():
        torch.testing.assert_close(scores(actor), start, atol=0, rtol=0)


@FAMILY_CASES
@pytest.mark.parametrize("dora", [False, True])
def test_deferred_weights_give_the_same_start(tmp_path: Path, case: str, dora: bool) -> None:
    config = saved(tmp_path, case, dora=dora)
    expected = Actor.load(config)
    actor = Actor.load(config, device="meta")
    exchange(
        actor.model,
        lambda p: torch.zeros_like(p, device="cpu") if p.is_meta else None,
        buffers=True,
    )
    actor.read_weights()
    torch.testing.assert_close(scores(actor), scores(expected), atol=1e-5, rtol=1e-5)
    found = dict(actor.model.named_parameters())
    for name, parameter in expected.model.named_parameters():
        if saved_name(name) is not None:
            assert torch.equal(found[name], parameter) and found[name].requires_grad


@pytest.mark.parametrize("case", ["a head", "embeddings", "both ends", "projections", "one layer"])
def test_an_engine_is_sent_the_trained_modules_by_the_names_of_the_base(
    tmp_path: Path, case: str
) -> None:
    config = saved(tmp_path, case)
    actor = Actor.load(config)
    step(actor)
    assert config.lora is not None
    sent = dict(merged(actor.model.named_parameters(), config.lora))
    expected = merged_state(actor.model)
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    changed = {name for name, _ in saved_modules(actor.model)}
    assert changed and all(
        any(name.startswith(one.removeprefix("base_model.model.")) for name in sent)
        for one in changed
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name of nothing": ({"modules_to_save": ("lm_haed",)}, r"'lm_haed' .*did you mean 'lm_head'"),
    "a target too": (
        {"modules_to_save": ("q_proj",), "targets": ("q_proj", "v_proj")},
        r"targets = \('q_proj', 'v_proj'\) both name model\.layers\.0\.self_attn\.q_proj",
    ),
    "targets inside": (
        {"modules_to_save": ("self_attn",), "targets": ("q_proj", "up_proj")},
        r"both name model\.layers\.0\.self_attn\.q_proj",
    ),
    "no weights": ({"modules_to_save": ("rotary_emb",)}, "has no weights"),
    "one inside of the other": (
        {"modules_to_save": ("mlp", "down_proj")},
        r"model\.layers\.0\.mlp\.down_proj is inside of model\.layers\.0\.mlp",
    ),
    "a list": ({"modules_to_save": ("layers",)}, "is a list of modules"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_cannot_be_trained_whole_is_refused_by_name(
    tmp_path: Path, kind: str
) -> None:
    given, why = REFUSED[kind]
    family_model("qwen2").save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), lora=LoRAConfig(**given))
    for device in ("cpu", "meta"):
        with pytest.raises(ModelError, match=rf"model\.lora\.modules_to_save = .*{why}"):
            Actor.load(config, device=device)


ATTENTION = "model.layers.0.self_attn"
WHOLE_ATTENTION = {"modules_to_save": ("self_attn",), "targets": ("down_proj",)}
OVERLAPS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "a head": (("lm_head",), {"modules_to_save": ("lm_head",)}, "lm_head"),
    "no first model.": (("embed_tokens",), {"modules_to_save": ("embed_tokens",)}, "embed_tokens"),
    "a layer inside": ((f"{ATTENTION}.q_proj",), WHOLE_ATTENTION, "q_proj"),
    "a module around": (("layers.1.mlp",), {"modules_to_save": ("1.mlp.up_proj",)}, "up_proj"),
    "a part": (("language",), {"modules_to_save": ("norm",)}, "q_proj"),
    "one of two": (("model.norm", "lm_head"), {"modules_to_save": ("lm_head",)}, "lm_head"),
    "adapters": ((f"{ATTENTION}.q_proj.weight",), {}, "q_proj"),
    "adapters of a part": (("language",), {"dora": True}, "q_proj"),
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_a_frozen_module_that_adapters_would_train_is_refused_by_both_settings(
    tmp_path: Path, kind: str
) -> None:
    frozen, lora, module = OVERLAPS[kind]
    family_model("qwen2", tie_word_embeddings=False).save_pretrained(tmp_path)
    settings = LoRAConfig(rank=2, **{"targets": ("q_proj",), **lora})
    actor = Actor.load(ModelConfig(path=str(tmp_path), lora=settings, freeze=frozen))
    other = "targets" if module == "q_proj" and lora != WHOLE_ATTENTION else "modules_to_save"
    said = rf"model\.freeze = '.*' and model\.lora\.{other} = .* both name .*{module}: .*leave"
    with pytest.raises(ModelError, match=said):
        prepared(actor)


def test_a_frozen_module_beside_those_that_adapters_train_is_accepted(tmp_path: Path) -> None:
    config = saved(tmp_path, "a head")
    frozen = ("model.embed_tokens", "model.norm", f"{ATTENTION}.q_proj.bias")
    assert prepared(Actor.load(config.model_copy(update={"freeze": frozen})))


def test_a_frozen_module_that_adapters_of_a_folder_train_is_refused(tmp_path: Path) -> None:
    config = saved(tmp_path, "a head")
    save_model(Actor.load(config), None, tmp_path / "kept", merge=False)
    loaded = Actor.load(ModelConfig(path=str(tmp_path / "kept"), freeze=("lm_head",)))
    with pytest.raises(ModelError, match=r"'lm_head' and the adapters of model\.path = .*kept'"):
        prepared(loaded)


def test_a_model_on_the_meta_device_trains_them(tmp_path: Path) -> None:
    model = meta_model(saved(tmp_path, "both ends"))
    trained = {saved_name(name) for name, p in model.named_parameters() if p.requires_grad}
    assert trained - {None} == {"model.embed_tokens.weight", "lm_head.weight"}


def test_layers_that_tensor_parallelism_shards_are_not_trained_whole(tmp_path: Path) -> None:
    family_model("qwen2").save_pretrained(tmp_path)
    lora = LoRAConfig(modules_to_save=("down_proj",))
    actor = Actor.load(ModelConfig(path=str(tmp_path), lora=lora))
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(
        ConfigError, match=r"modules_to_save trains model\.layers\.0\.mlp\.down_proj whole"
    ):
        shard_layers(actor, mesh)
