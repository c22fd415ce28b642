"""Saved reward models: score for score as before, with adapters, inner layers and normalisation."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.models.loading.save_model import save_model
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import HEADS_FILE, SETTINGS_FILE
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.utils.errors import ModelError
from lightrft.utils.module_tensors import exchange
from tests.model_helpers import Float64, small_model
from tests.unit.models.reward.scoring import TWO, enlarge, far, reward_of, settings_of, some_batch

FORMS = {
    "plain": {},
    "attention and gate": {"heads": TWO, "gate": True, "pooling": "attention"},
    "token": {"pooling": "token", "heads": [{"kind": "ordinal", "size": 4}]},
    "inner layer": {"layer": 2, "pooling": "mean"},
}


def scores(reward: RewardModel) -> list[torch.Tensor]:
    with torch.no_grad():
        return [each.scores for each in reward.eval().score(some_batch()).values()]


def assert_equal_scores(one: RewardModel, other: RewardModel) -> None:
    for found, expected in zip(scores(one), scores(other), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_reward_model_scores_the_same_when_it_is_opened(form, tmp_path):
    reward = reward_of(dtype=torch.float32, layers=3, **FORMS[form])
    name = reward.reward_name
    reward.set_normalization({name: 0.3}, {name: 2.0})
    reward.save(tiny_tokenizer(), tmp_path)
    opened = RewardModel.open(tmp_path)
    assert not opened.training and opened.settings == reward.settings
    assert_equal_scores(opened, reward)
    again = RewardModel.load(ModelConfig(path=str(tmp_path)), reward.settings, seed=9)
    assert_equal_scores(again, reward)
    opened.save(tiny_tokenizer(), tmp_path / "again")
    assert_equal_scores(RewardModel.open(tmp_path / "again"), reward)


@pytest.mark.parametrize("form", ["attention and gate", "inner layer"])
def test_weights_that_are_read_later_are_the_same(form, tmp_path):
    reward = reward_of(dtype=torch.float32, layers=3, **FORMS[form])
    reward.save(tiny_tokenizer(), tmp_path)
    later = RewardModel.load(ModelConfig(path=str(tmp_path)), device="meta")
    exchange(later, lambda p: torch.empty_like(p, device="cpu") if p.is_meta else None)
    later.read_weights()
    assert_equal_scores(later, reward)


def test_an_inner_layer_of_a_model_that_is_read_later_is_the_same(tmp_path):
    save_model(small_model("qwen3_moe", num_hidden_layers=3), tiny_tokenizer(), tmp_path)
    config, settings = ModelConfig(path=str(tmp_path)), settings_of(layer=1)
    later = RewardModel.load(config, settings, device="meta")
    exchange(later, lambda p: torch.empty_like(p, device="cpu") if p.is_meta else None)
    later.read_weights()
    assert_equal_scores(later, RewardModel.load(config, settings))


def test_the_folder_of_an_inner_layer_holds_the_layers_that_are_computed(tmp_path):
    reward_of("gemma2", torch.float32, layers=3, layer=2).save(tiny_tokenizer(), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["num_hidden_layers"] == len(fields["layer_types"]) == 2
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_adapters_train_heads_too_and_are_merged_into_the_saved_model(tmp_path):
    save_model(small_model("qwen2"), tiny_tokenizer(), tmp_path / "base")
    lora = LoRAConfig(rank=4, dropout=0.0)
    config = ModelConfig(path=str(tmp_path / "base"), lora=lora)
    wide = {"dtype": torch.float64}
    reward = RewardModel.load(config, settings_of(pooling="attention", heads=TWO), **wide)
    trained = {name for name, p in reward.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert all("lora" in name for name in trained if name.startswith("model."))
    assert {name for name in reward.own_tensors() if not name.startswith("score_")} <= trained
    enlarge(reward)
    with torch.no_grad():
        for name, p in reward.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    before = scores(RewardModel.load(config, reward.settings, **wide))
    assert far(scores(reward)[0], before[0]) > 1e-3
    reward.save(tiny_tokenizer(), tmp_path / "merged")
    with Float64():
        merged = scores(RewardModel.open(tmp_path / "merged"))
        for found, expected in zip(merged, scores(reward), strict=True):
            assert far(found, expected) < 1e-9
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    reward.save(tiny_tokenizer(), tmp_path / "adapters", merge=False)
    assert (tmp_path / "adapters" / "adapter_config.json").exists()
    assert_equal_scores(RewardModel.open(tmp_path / "adapters", **wide), reward)


def test_adapters_alone_of_a_cut_model_are_not_written(tmp_path):
    save_model(small_model("qwen2", num_hidden_layers=3), tiny_tokenizer(), tmp_path)
    config = ModelConfig(path=str(tmp_path), lora=LoRAConfig(rank=2))
    reward = RewardModel.load(config, settings_of(layer=1))
    with pytest.raises(ModelError, match="merge them"):
        reward.save(None, tmp_path / "adapters", merge=False)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pooling": "mean"}, r"pooling = 'mean'.* with 'last'"),
        ({"layer": 1}, "layer = 1.* with -1"),
        ({"heads": ["other"]}, r"heads = \[\{'name': 'other'\}\].*start from a language model"),
        ({"heads": TWO, "gate": True}, r"heads = .* with \[\{'name': 'preference'\}\]; set"),
    ],
)
def test_settings_of_another_form_than_the_folders_are_refused(fields, said, tmp_path):
    reward_of(dtype=torch.float32).save(tiny_tokenizer(), tmp_path)
    with pytest.raises(ModelError, match=said):
        RewardModel.load(ModelConfig(path=str(tmp_path)), settings_of(**fields))


def test_losses_may_differ_from_those_of_the_folder(tmp_path):
    reward = reward_of(dtype=torch.float32)
    reward.save(tiny_tokenizer(), tmp_path)
    settings = settings_of(losses=["hps"], normalize="center")
    again = RewardModel.load(ModelConfig(path=str(tmp_path)), settings)
    assert again.settings.losses[0].name == "hps"
    assert_equal_scores(again, reward)


@pytest.mark.parametrize("file", [SETTINGS_FILE, HEADS_FILE])
def test_damaged_files_are_refused(file, tmp_path):
    reward_of(dtype=torch.float32).save(tiny_tokenizer(), tmp_path)
    (tmp_path / file).write_text("{")
    with pytest.raises(ModelError, match=r"cannot be read.*copy both again"):
        RewardModel.open(tmp_path)


def test_a_model_without_a_head_needs_settings(tmp_path):
    save_model(small_model("qwen2"), tiny_tokenizer(), tmp_path)
    with pytest.raises(ModelError, match="holds no reward model"):
        RewardModel.open(tmp_path)
