"""``lightrft merge`` of every kind of adapter that peft writes: the written model computes what the adapted one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, TaskType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from lightrft.config.model import ModelConfig
from lightrft.models.loading.from_pretrained import load_model, model_settings
from lightrft.models.loading.save_model import save_model
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import tiny_media_model, tiny_media_tokenizer
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.utils.errors import ModelError
from tests.e2e.command import assert_refused, command
from tests.model_helpers import save_random_adapters

IDS = torch.arange(4, 12)[None]
QV = ["q_proj", "v_proj"]


@pytest.fixture
def lightrft(capsys) -> Callable[..., Any]:
    return lambda *words: command(capsys, *words)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def trained(base: PreTrainedModel, settings: Any, folder: Path) -> Tensor:
    """Save adapters with random weights, and return the logits of the adapted model."""
    adapted = save_random_adapters(base, settings, folder)
    with torch.no_grad():
        return adapted.eval()(input_ids=IDS).logits


def logits(folder: Path, kind: Any = AutoModelForCausalLM) -> Tensor:
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model(input_ids=IDS).logits


TIED = {"tie_word_embeddings": True}
KINDS = {
    "biases": ("qwen2", {}, LoraConfig(r=2, target_modules=QV, bias="all")),
    "rslora": ("qwen2", {}, LoraConfig(r=2, target_modules=QV, use_rslora=True)),
    "head of tied weights": ("qwen2", TIED, LoraConfig(r=2, target_modules=["lm_head"])),
    "embeddings of tied weights": (
        "qwen2",
        TIED,
        LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    ),
    "both sides of tied weights": (
        "qwen2",
        TIED,
        LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"]),
    ),
    "untied head": (
        "qwen2",
        {"tie_word_embeddings": False},
        LoraConfig(r=2, target_modules=["lm_head", "q_proj"]),
    ),
    "a whole head": (
        "qwen2",
        TIED,
        LoraConfig(r=2, target_modules=QV, modules_to_save=["lm_head"]),
    ),
    "single tokens": (
        "qwen2",
        TIED,
        LoraConfig(r=2, target_modules=QV, trainable_token_indices=[5]),
    ),
    "experts": ("mixtral", {}, LoraConfig(r=2, target_modules="all-linear")),
    "experts of a shared kind": ("deepseek_v3", {}, LoraConfig(r=2, target_modules="all-linear")),
    "another kind than LoRA": ("qwen2", {}, LoHaConfig(r=2, target_modules=QV)),
    "Conv1D": ("gpt2", {}, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_computes_what_the_adapted_one_does(lightrft, tmp_path, kind):
    family, fields, settings = KINDS[kind]
    base = saved(family_model(family, **fields), tmp_path / "base")
    before = logits(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    expected = trained(model, settings, tmp_path / "adapters")
    outcome = lightrft("merge", tmp_path / "adapters", f"output={tmp_path / 'out'}")
    assert outcome.status == 0, outcome.err
    found = logits(tmp_path / "out")
    assert (before - expected).abs().max() > 0.01
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapters", "base", "out"]
    if "side" in kind or "tied" in kind:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["tie_word_embeddings"] is False


def test_an_adapter_on_tied_embeddings_starts_where_it_was_merged(lightrft, tmp_path):
    """FSDP refuses a folder whose config ties weights that differ in its files."""
    base = saved(family_model("qwen2", **TIED), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    trained(model, LoraConfig(r=2, target_modules=["lm_head"]), tmp_path / "adapters")
    assert lightrft("merge", tmp_path / "adapters", f"output={tmp_path / 'out'}").status == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(base / "model.safetensors")
    assert weights["model.embed_tokens.weight"].equal(original["model.embed_tokens.weight"])
    assert not weights["lm_head.weight"].equal(weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("start", ["a language model", "a classifier"])
def test_adapters_of_a_classifier_are_merged_with_their_head(lightrft, tmp_path, start):
    base = saved(tiny_model("qwen2"), tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    if start == "a classifier":
        base = saved(model, tmp_path / "base")
        model = AutoModelForSequenceClassification.from_pretrained(base)
    settings = LoraConfig(r=2, target_modules=QV, task_type=TaskType.SEQ_CLS)
    expected = trained(model, settings, tmp_path / "adapters")
    outcome = lightrft("merge", tmp_path / "adapters", f"output={tmp_path / 'out'}")
    assert outcome.status == 0, outcome.err
    assert outcome.out.endswith(f"  lightrft serve-rm {tmp_path / 'out'}\n")
    found = logits(tmp_path / "out", AutoModelForSequenceClassification)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    if start == "a language model":
        with pytest.raises(
            ModelError, match=r"no reward model .* it has adapters: .*lightrft merge"
        ):
            RewardModel.load(ModelConfig(path=str(tmp_path / "adapters")))
    # a policy has no place for the head of one, and the other has no head for a policy
    said = {
        "a language model": r"score\.weight.*classifier.*lightrft merge",
        "a classifier": r"missing or misshapen, e\.g\. lm_head\.weight",
    }
    with pytest.raises(ModelError, match=said[start]):
        load_model(ModelConfig(path=str(tmp_path / "adapters")))


def _add_stray(tensors, fields):
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.ones(2, 64)


def _add_nan(tensors, fields):
    tensors[min(tensors)][0, 0] = torch.nan


def _name_other_type(tensors, fields):
    fields["peft_type"] = "OTHER"


BROKEN = {
    "a tensor that fits no module": (
        _add_stray,
        ("1 tensors fit no module", "layers.7.self_attn.q_proj"),
    ),
    "a value that is no number": (_add_nan, ("self_attn.q_proj.weight has", "NaN")),
    "a type that peft lacks": (_name_other_type, ("cannot be read", "OTHER", "peft_type")),
    "no weights": (lambda tensors, fields: tensors.clear(), ("it has no weights of adapters",)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_adapters_are_refused_by_name(lightrft, tmp_path, case):
    base = saved(tiny_model("qwen2"), tmp_path / "base")
    adapters = tmp_path / "adapters"
    model = AutoModelForCausalLM.from_pretrained(base)
    trained(model, LoraConfig(r=2, target_modules=QV), adapters)
    file, config = adapters / "adapter_model.safetensors", adapters / "adapter_config.json"
    tensors, fields = load_file(file), json.loads(config.read_text())
    change, said = BROKEN[case]
    change(tensors, fields)
    file.unlink()
    if tensors:
        save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(fields))
    assert_refused(lightrft("merge", adapters, f"output={tmp_path / 'out'}"), *said)
    assert not (tmp_path / "out").exists()


def test_an_error_of_peft_is_shown_whole(lightrft, tmp_path):
    base = saved(tiny_model("qwen2"), tmp_path / "base")
    adapters = tmp_path / "adapters"
    model = AutoModelForCausalLM.from_pretrained(base)
    trained(model, LoraConfig(r=2, target_modules=QV), adapters)
    other = saved(tiny_model("qwen2", hidden_size=32), tmp_path / "other")
    refused = lightrft("merge", adapters, f"base_model={other}", f"output={tmp_path / 'out'}")
    assert_refused(refused, "size mismatch for", "q_proj.lora_A", "[2, 64]", "[2, 32]")


def test_adapters_that_name_no_base_are_merged_into_base_model(lightrft, tmp_path):
    base = saved(tiny_model("qwen2"), tmp_path / "base")
    adapters = tmp_path / "adapters"
    model = AutoModelForCausalLM.from_pretrained(base)
    trained(model, LoraConfig(r=2, target_modules=QV), adapters)
    config = json.loads((adapters / "adapter_config.json").read_text())
    del config["base_model_name_or_path"]
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    words = ["merge", adapters, f"output={tmp_path / 'out'}"]
    assert_refused(lightrft(*words), "does not name a base model", "base_model in lightrft merge")
    done = lightrft(*words, f"base_model={base}")
    assert done.status == 0, done.err
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_adapters_that_a_class_switches_by_prompt_are_refused_and_can_be_merged(lightrft, tmp_path):
    """Those of Granite Speech act on prompts with sounds alone, and their folder has the model too."""
    tokenizer, both = tiny_media_tokenizer("granite_speech"), tmp_path / "both"
    copy = tmp_path / "copy"
    model: Any = tiny_media_model("granite_speech", tokenizer)
    for layer in model.model.encoder.layers:
        # Statistics are weights too, although no parameters.
        layer.conv.batch_norm.running_mean += torch.arange(64)
    save_model(model, tokenizer, copy)
    model.add_adapter(LoraConfig(r=2, target_modules=QV, init_lora_weights=False))
    model.save_pretrained(str(both))
    tokenizer.save_pretrained(both)
    message = r"sounds alone \(has_lora_adapter.*lightrft merge FOLDER base_model=COPY"
    with pytest.raises(ModelError, match=message):
        load_model(ModelConfig(path=str(both)))
    done = lightrft("merge", both, f"base_model={copy}", f"output={tmp_path / 'out'}")
    assert done.status == 0, done.err
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
        plain = load_model(ModelConfig(path=str(copy))).float()(input_ids=IDS).logits
        found = load_model(ModelConfig(path=str(tmp_path / "out"))).float()(input_ids=IDS).logits
    assert (plain - expected).abs().max() > 0.01
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    before, after = (load_file(folder / "model.safetensors") for folder in (copy, tmp_path / "out"))
    assert set(before) == set(after)
    assert all(torch.equal(t, after[k]) for k, t in before.items() if ".encoder." in k)


def test_adapters_that_a_class_switches_by_prompt_are_refused_on_the_hub(tmp_path, monkeypatch):
    """A folder stands for a repository: its name is no path of adapters here."""
    model: Any = tiny_media_model("granite_speech")
    model.add_adapter(LoraConfig(r=2, target_modules=QV))
    model.save_pretrained(str(tmp_path))
    monkeypatch.setattr("lightrft.models.loading.from_pretrained.base_of", lambda config: config)
    with pytest.raises(ModelError, match=r"sounds alone \(has_lora_adapter"):
        model_settings(ModelConfig(path=str(tmp_path)))


def test_adapters_in_the_names_of_an_older_transformers_are_merged(lightrft, tmp_path):
    """transformers 4 had a module for each expert."""
    base = saved(family_model("mixtral"), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapters = tmp_path / "adapters"
    trained(model, LoraConfig(r=2, target_modules=["q_proj"]), adapters)
    config = json.loads((adapters / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj", "w1", "w2", "w3"]
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(adapters / "adapter_model.safetensors")
    experts, width = model.config.num_local_experts, model.config.intermediate_size
    hidden = model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    for layer in range(model.config.num_hidden_layers):
        for expert in range(experts):
            for name, (out, within) in {
                "w1": (width, hidden),
                "w2": (hidden, width),
                "w3": (width, hidden),
            }.items():
                key = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(2, within, generator=generator)
                tensors[f"{key}.lora_B.weight"] = torch.randn(out, 2, generator=generator)
    save_file(tensors, adapters / "adapter_model.safetensors", metadata={"format": "pt"})
    assert lightrft("merge", adapters, f"output={tmp_path / 'out'}").status == 0
    start = load_file(base / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    for key, weight in start.items():
        path = key.removesuffix(".weight")
        factors = [tensors.get(f"base_model.model.{path}.lora_{x}.weight") for x in "AB"]
        if factors[0] is not None:
            weight = weight + scale * factors[1] @ factors[0]
        torch.testing.assert_close(found[key], weight, atol=1e-4, rtol=1e-5)


def test_peft_reads_the_adapters_of_a_run_on_experts(tmp_path):
    base = saved(family_model("mixtral"), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    expected = trained(model, LoraConfig(r=2, target_modules="all-linear"), tmp_path / "adapters")
    ours = load_model(ModelConfig(path=str(tmp_path / "adapters")))
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters"
    )
    with torch.no_grad():
        for each in (ours, theirs):
            torch.testing.assert_close(each(input_ids=IDS).logits, expected)
