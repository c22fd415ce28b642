"""Weights with adapters added in, against peft's own merge."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.engines.fingerprint import checksums
from lightrft.engines.sending.merged_adapters import merged, noted, whole_weights
from lightrft.models.actor import Actor
from lightrft.models.lora import add_adapters, merged_state
from lightrft.utils.errors import ModelError
from lightrft.utils.module_tensors import factor_of
from tests.model_helpers import small_model


def adapted(lora: LoRAConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = add_adapters(small_model("qwen2", dtype), lora)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_weights_equal_those_of_peft(dora: bool, dtype: torch.dtype) -> None:
    lora = LoRAConfig(rank=3, alpha=5.0, dora=dora)
    model = adapted(lora, dtype)
    found = dict(merged(model.named_parameters(), lora))
    expected = merged_state(model)
    assert found.keys() == {name for name in expected if name in found}
    assert any(".q_proj.weight" in name for name in found)
    for name, tensor in found.items():
        # peft rounds the product and the sum, and here the sum alone is rounded
        atol = 8 * torch.finfo(dtype).eps * float(expected[name].abs().max())
        torch.testing.assert_close(tensor, expected[name], atol=atol, rtol=0, msg=name)


def test_the_order_of_the_tensors_does_not_matter() -> None:
    lora = LoRAConfig(rank=2, alpha=4.0)
    weights = list(adapted(lora).named_parameters())
    found, expected = dict(merged(weights[::-1], lora)), dict(merged(weights, lora))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_layer_without_all_of_its_tensors_is_refused() -> None:
    lora = LoRAConfig(rank=2, alpha=4.0)
    weights = [
        (n, t) for n, t in adapted(lora).named_parameters() if "1.mlp.up_proj.lora_B" not in n
    ]
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.*only base, a"):
        list(merged(weights, lora))


def test_an_adapter_of_an_embedding_is_refused() -> None:
    lora = LoRAConfig(rank=2, alpha=4.0, targets=("embed_tokens",))
    with pytest.raises(ModelError, match=r"engine\.kind=native"):
        list(merged(adapted(lora).named_parameters(), lora))


def test_factors_are_named_by_their_layer() -> None:
    layer = "model.layers.0.self_attn.q_proj"
    prefix = f"base_model.model.{layer}"
    assert factor_of(f"{prefix}.base_layer.weight") == (layer, "base")
    assert factor_of(f"{prefix}.lora_A.default.weight") == (layer, "a")
    assert factor_of(f"{prefix}.lora_magnitude_vector.default.weight") == (layer, "magnitude")
    assert factor_of(f"{prefix}.base_layer.bias") is None
    assert factor_of("base_model.model.model.norm.weight") is None


@pytest.mark.quant
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_weights_in_4_bits_become_those_that_the_model_computes_with(
    dora: bool, tmp_path: Path
) -> None:
    small_model("llama").save_pretrained(tmp_path)
    lora = LoRAConfig(rank=3, alpha=5.0, dora=dora, targets=("q_proj", "down_proj"))
    settings = ModelConfig(path=str(tmp_path), dtype="float32", load_in_4bit=True, lora=lora)
    policy = Actor.load(settings)
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    weights = list(policy.model.named_parameters())
    assert any(weight.dtype == torch.uint8 for _, weight in weights)
    read: dict[str, str] = {}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    start = {name: weight.clone() for name, weight in plain.named_parameters()}
    parameters = dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in whole_weights(noted(weights, read), lora):
            parameters[name].copy_(weight)
        ids = torch.arange(4, 12)[None]
        policy.use_attention("padded")
        expected = policy.base(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(plain(ids).logits, expected, atol=1e-4, rtol=1e-4)
    # what was sent is what the policy holds
    assert read == checksums(weights)
    changed = {name for name in start if not torch.equal(start[name], parameters[name])}
    assert any("v_proj" in name for name in changed) and any("q_proj" in name for name in changed)
