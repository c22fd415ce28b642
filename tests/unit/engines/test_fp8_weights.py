"""FP8 weights are read back through the layer that holds them. The layers here compute as vLLM documents it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightrft.engines.vllm_parts.fp8_weights import FP8, LARGEST, FP8Weights, quantize
from lightrft.utils.errors import ConfigError, ModelError

LAYER = "layers.0"


class Dynamic:
    """Inputs are rounded to FP8 with a scale per row, and the product to bfloat16."""

    input_dtype = torch.bfloat16

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        scales = (x.abs().amax(1).float() / LARGEST).clamp(min=1e-9)[:, None]
        inputs = (x.float() / scales).to(FP8).float()
        return (inputs @ layer.weight.float() * scales * layer.weight_scale.T).to(x.dtype)


class Quantized(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        values, scales = quantize(weight)
        # the transpose, as vLLM keeps it
        self.weight = nn.Parameter(values.view(FP8).t(), requires_grad=False)
        self.weight_scale = scales[:, None]
        self.bias = None if bias is None else nn.Parameter(bias)
        self.quant_method = Dynamic()


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {"qkv": ["q", "k"]}

    def __init__(self, sent: dict[str, Tensor]) -> None:
        super().__init__()
        layer = nn.Module()
        fused = [
            torch.cat([sent[f"{LAYER}.{part}.{leaf}"] for part in "qk"])
            for leaf in ("weight", "bias")
        ]
        layer.qkv = Quantized(*fused)
        layer.o = Quantized(sent[f"{LAYER}.o.weight"])
        self.layers = nn.ModuleList([layer])
        # the rows of a vocabulary are padded
        self.head = nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
        self.head.weight.data[:10] = sent["head.weight"]


class LLM:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def apply_model(self, ask: Any) -> list[Any]:
        return [ask(self.model)]


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "q.weight": (6, 8),
        "k.weight": (4, 8),
        "q.bias": (6,),
        "k.bias": (4,),
        "o.weight": (8, 6),
    }
    found = {f"{LAYER}.{name}": torch.randn(shape) for name, shape in shapes.items()}
    found[f"{LAYER}.o.weight"][0] *= 1e-6
    found[f"{LAYER}.o.weight"][1] = -0.0
    found["head.weight"] = torch.randn(10, 8)
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def checked(model: nn.Module, sent: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors that were found as they were sent."""
    fp8 = FP8Weights(LLM(model), torch.bfloat16)
    passed = dict(fp8.recorded(sent.items()))
    fp8.check()
    return set(passed)


def test_the_weights_that_were_sent_are_found_in_fused_and_padded_tensors() -> None:
    sent = weights()
    assert checked(Model(sent), sent) == set(sent)


@pytest.mark.parametrize("name", weights())
def test_one_other_value_in_any_tensor_is_named(name: str) -> None:
    sent = weights()
    model = Model(sent)
    changed = sent[name].clone()
    place = (-1,) * changed.ndim
    # the next FP8 value is up to 12 % away
    changed[place] = changed[place] * 1.13 + 1e-3
    with pytest.raises(ModelError, match=rf"does not hold .* of {name} "):
        checked(model, sent | {name: changed})


def test_a_tensor_that_was_not_sent_or_is_unknown_is_named() -> None:
    sent = weights()
    model = Model(sent)
    with pytest.raises(ModelError, match=r"not sent all weights of layers\.0\.qkv"):
        checked(model, {n: t for n, t in sent.items() if n != f"{LAYER}.k.weight"})
    with pytest.raises(ModelError, match=r"has no tensor for experts\.0.*engine\.quantization"):
        checked(model, sent | {"experts.0": torch.zeros(2)})


def test_a_model_without_a_quantized_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.quantization.*quantized no layer"):
        FP8Weights(LLM(nn.Linear(2, 2)), torch.bfloat16)


def test_rounding_is_within_half_a_step_of_fp8() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    values, scales = quantize(weight)
    found = values.view(FP8).float() * scales[:, None]
    steps = weight.abs() * 2**-4 + scales[:, None] * 2**-10
    assert ((found - weight).abs() <= steps).all()
