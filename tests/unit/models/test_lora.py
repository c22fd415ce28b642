"""Low-rank adapters on every kind of layer: the written model computes what the trained one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.models.families import FAMILIES
from lightrft.models.loading.save_model import save_model
from lightrft.models.loading.sharded_read import build_model
from lightrft.models.lora import add_adapters, merged_model, saved_modules
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_model
from lightrft.utils.errors import ModelError

KINDS: dict[str, dict[str, Any] | None] = {
    "lora": {},
    "dora": {"dora": True},
    "rslora": {"rslora": True},
    "dropout": {"dropout": 0.1},
    "full": None,
    "a whole head": {"modules_to_save": ("head",)},
    "whole embeddings": {"modules_to_save": ("embeddings",)},
}
"""Settings of adapters. None trains all weights. A name of a part stands for the family's own."""
TEXT = [name for name in TEXT_FAMILIES if not FAMILIES[name].refused]
IDS = torch.arange(4, 12)[None]
SOME = {
    "mixtral": "stacked experts",
    "deepseek_v3": "stacked and shared experts",
    "flex_olmo": "experts alone",
    "llama4_text": "a router that returns two tensors",
    "deepseek_v4": "layers of groups",
    "falcon": "a linear layer with a forward of its own",
    "mamba": "a kernel that reads the weight of out_proj",
    "gpt2": "Conv1D",
    "zamba": "layers that share their weights",
}


def lora_of(base: Any, kind: str) -> LoRAConfig | None:
    """Return the settings of ``kind`` for a model, with the names of its head and its embeddings."""
    given = KINDS[kind]
    if given is None:
        return None
    parts = {base.get_output_embeddings(): "head", base.get_input_embeddings(): "embeddings"}
    names = {parts[m]: name for name, m in base.named_modules() if m in parts}
    saved = tuple(names[part] for part in given.get("modules_to_save", ()))
    return LoRAConfig(rank=2, alpha=4, **{**given, "modules_to_save": saved})


def check_written_model(family: str, kind: str, folder: Path) -> None:
    """Train for one step, write the model, and compare its logits with the trained model's."""
    base = family_model(family)
    base.save_pretrained(folder / "base")
    lora = lora_of(base, kind)
    settings = ModelConfig(path=str(folder / "base"), lora=lora)
    model: Any = build_model(settings, "cpu", None)[0].eval()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    with torch.no_grad():
        start = trained = base(input_ids=IDS, use_cache=False).logits
        # One step is enough for most families, but not for MiniCPM3.
        for _ in range(4):
            if float((start - trained).abs().max()) > 0.05 * float(trained.abs().max()):
                break
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 2 * parameter.grad if lora else 0.01 * parameter.grad.sign()
            trained = model(input_ids=IDS, use_cache=False).logits
    save_model(model, None, folder / "model")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        output_loading_info=True,
        attn_implementation=FAMILIES[family].padded_attention,
    )
    assert not any(info.values()), info
    with torch.no_grad():
        found = loaded(input_ids=IDS, use_cache=False).logits
    size = float(trained.abs().max())
    assert float((start - trained).abs().max()) > 0.05 * size
    assert float((found - trained).abs().max()) < 1e-4 * size


@pytest.mark.parametrize("kind", ["lora", "dora", "full", "a whole head"])
@pytest.mark.parametrize("family", SOME)
def test_the_written_model_computes_what_the_trained_one_does(tmp_path, family, kind):
    check_written_model(family, kind, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TEXT)
def test_every_family_trained_in_every_way_is_written(tmp_path, family, kind):
    check_written_model(family, kind, tmp_path)


def test_experts_cannot_have_adapters_and_be_trained_whole():
    model = family_model("mixtral")
    with pytest.raises(ModelError, match=r"modules_to_save = \['experts'\]: .*name other layers"):
        add_adapters(model, LoRAConfig(rank=2, modules_to_save=("experts",)))
    others = LoRAConfig(rank=2, modules_to_save=("experts",), targets=("q_proj", "v_proj"))
    assert list(saved_modules(add_adapters(family_model("mixtral"), others)))


@pytest.mark.parametrize(
    ("family", "over", "reason"),
    [
        ("mixtral", {"dora": True}, "neither model.lora.dora nor"),
        ("deepseek_v3", {"dropout": 0.1}, "neither model.lora.dora nor"),
        ("gpt_oss", {}, "no adapters for those of this family"),
        ("qwen2_moe", {}, "no adapters for those of this family"),
        ("mixtral", {}, ""),
        ("qwen3_moe", {}, ""),
        ("gpt_oss", {"modules_to_save": ("experts",)}, ""),
        ("gpt_oss", {"targets": ("q_proj",)}, ""),
        ("qwen2", {}, ""),
    ],
)
def test_experts_without_adapters_are_said(family, over, reason, caplog):
    adapted = add_adapters(family_model(family), LoRAConfig(rank=2, **over))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    said = "the experts get no adapters" in caplog.text
    assert said == bool(reason) and reason in caplog.text
    assert said == ("modules_to_save=[experts]" in caplog.text)
    if family != "qwen2" and "targets" not in over:
        assert said != any(".experts." in name for name in trained)


@pytest.mark.parametrize(
    ("family", "targets", "unknown"),
    [
        ("qwen2", ["q_proj", "k_porj"], "'k_porj' is the end of no module's name; did you mean"),
        ("mixtral", ["q_proj", "experts.down"], "'experts.down' is the end of no"),
        ("qwen2", ["self_attn.q_proj", "layers.1.mlp.up_proj"], ""),
        ("mixtral", ["q_proj", "w1"], "w1 without also targeting w3"),
        ("mixtral", ["w1", "w2", "w3"], ""),
        ("qwen3_moe", ["gate_proj", "up_proj"], ""),
    ],
)
def test_each_name_of_the_targets_is_a_layer_or_the_weights_of_experts(family, targets, unknown):
    config = LoRAConfig(rank=2, targets=targets)
    if unknown:
        with pytest.raises(ModelError, match=rf"model\.lora\.targets = .*{unknown}"):
            add_adapters(family_model(family), config)
    else:
        adapted = add_adapters(family_model(family), config)
        assert any(p.requires_grad for p in adapted.parameters())


def test_layers_that_keep_the_state_of_a_training_forward_are_merged(tmp_path):
    family_model("recurrent_gemma").save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), lora=LoRAConfig(rank=2))
    model: Any = build_model(settings, "cpu", None)[0]
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    merged = merged_model(model)
    assert merged(input_ids=IDS, use_cache=False).logits.allclose(expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["adapters", "full"])
@pytest.mark.parametrize("family", ["zamba", "zamba2", "llama"])
def test_layers_that_share_weights_are_reported_where_adapters_make_them_differ(
    tmp_path, caplog, family, kind
):
    model: Any = family_model(family)
    if kind == "adapters":
        model = add_adapters(model, LoRAConfig(rank=2))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    save_model(model, None, tmp_path)
    told = [line for line in caplog.messages if "shares weights between layers" in line]
    assert len(told) == (kind == "adapters" and family != "llama")
    assert all("layers.1." in line or "layers.2." in line for line in told)
