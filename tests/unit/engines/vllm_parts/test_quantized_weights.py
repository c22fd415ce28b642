"""8-bit weights are read back through the layer that holds them. The layers here compute as vLLM documents it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightrft.engines.vllm_parts.row_formats import FP8, INT8, ROW_FORMATS, RowFormat
from lightrft.engines.vllm_parts.weights import QuantizedWeights, keep_scales
from lightrft.utils.errors import ConfigError, ModelError

LAYER = "layers.0"
ABOUT = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(model_type="qwen2"))

formats = pytest.mark.parametrize("form", ROW_FORMATS.values(), ids=ROW_FORMATS)


class Dynamic:
    """Inputs are rounded with a scale per row, and the product to bfloat16."""

    def __init__(self, form: RowFormat) -> None:
        self.form = form

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        values, scales = self.form.quantize(x)
        weight = layer.weight.float()
        return (values.float() @ weight * scales[:, None] * layer.weight_scale.T).to(x.dtype)


class CutOff(Dynamic):
    """Cuts the last bits of a product off, as kernels for processors without bfloat16 do."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        product = super().apply(layer, x.float(), bias)
        return (product.view(torch.int32) >> 16 << 16).view(torch.float32).to(x.dtype)


class Overflowing(Dynamic):
    """Adds pairs of products in 16 bits, as processors without VNNI do: inputs are shifted by 128."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        values, scales = self.form.quantize(x)
        weight = layer.weight.float()
        products = (values.float() + 128)[:, :, None] * weight[None]
        pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-32768, 32767).sum(1)
        exact = pairs - 128 * weight.sum(0)
        return (exact * scales[:, None] * layer.weight_scale.T).to(x.dtype)


class Quantized(nn.Module):
    def __init__(self, form: RowFormat, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        values, scales = form.quantize(weight)
        # the transpose, as vLLM keeps it
        self.weight = nn.Parameter(values.t(), requires_grad=False)
        self.weight_scale = nn.Parameter(scales[:, None], requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.quant_method = Dynamic(form)


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {"qkv": ["q", "k"]}

    def __init__(self, form: RowFormat, sent: dict[str, Tensor]) -> None:
        super().__init__()
        layer = nn.Module()
        fused = [
            torch.cat([sent[f"{LAYER}.{part}.{leaf}"] for part in "qk"])
            for leaf in ("weight", "bias")
        ]
        layer.qkv = Quantized(form, *fused)
        layer.qkv.output_partition_sizes = [len(sent[f"{LAYER}.{part}.bias"]) for part in "qk"]
        layer.o = Quantized(form, sent[f"{LAYER}.o.weight"])
        self.layers = nn.ModuleList([layer])
        # the rows of a vocabulary are padded
        self.head = nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
        self.head.weight.data[:10] = sent["head.weight"]
        self.head.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=10)


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


def assert_rounded(form: RowFormat, values: Tensor, scales: Tensor, weight: Tensor) -> None:
    """Values times ``scales [rows, 1]`` are off ``weight`` by half a step of the format at most."""
    relative, absolute = (0, 0.5) if form is INT8 else (2**-4, 2**-10)
    steps = weight.abs() * relative + scales * absolute
    assert ((values.float() * scales - weight).abs() <= steps * (1 + 1e-6)).all()


def checked(form: RowFormat, model: nn.Module, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what vLLM reads of ``sent``, if ``model`` holds it."""
    quantized = QuantizedWeights(model, ABOUT, form)
    passed = dict(quantized.recorded(sent.items()))
    assert quantized.check() == set()
    return passed


@formats
def test_values_that_were_sent_with_their_scales_are_found_in_fused_and_padded_tensors(
    form: RowFormat,
) -> None:
    sent = weights()
    passed = checked(form, Model(form, sent), sent)
    for name, tensor in sent.items():
        if tensor.ndim == 1 or "head" in name:
            assert passed.pop(name) is tensor
            continue
        values, scales = passed.pop(name), passed.pop(f"{name}_scale")
        assert (values.dtype, scales.dtype) == (form.dtype, torch.float32)
        assert_rounded(form, values, scales, tensor.float())
    assert not passed


@formats
@pytest.mark.parametrize("name", weights())
def test_one_other_value_in_any_tensor_is_named(name: str, form: RowFormat) -> None:
    sent = weights()
    model = Model(form, sent)
    changed = sent[name].clone()
    place = (-1,) * changed.ndim
    # the next FP8 value is up to 12 % away
    changed[place] = changed[place] * 1.13 + 1e-3
    with pytest.raises(ModelError, match=rf"does not hold .* {re.escape(name)}[ .]"):
        checked(form, model, sent | {name: changed})


@formats
@pytest.mark.parametrize("kernel", [Dynamic, CutOff])
def test_every_value_of_a_format_is_read_back_by_each_rounding(
    form: RowFormat, kernel: type[Dynamic]
) -> None:
    torch.manual_seed(0)
    values = torch.arange(256, dtype=torch.uint8).view(form.dtype).float().nan_to_num()
    largest = torch.logspace(-3, 1, 90)
    sent = weights() | {f"{LAYER}.o.weight": (largest[:, None] * values / form.largest).bfloat16()}
    model = Model(form, sent)
    for layer in (model.layers[0].qkv, model.layers[0].o):
        layer.quant_method = kernel(form)
    assert checked(form, model, sent)
    changed = sent[f"{LAYER}.o.weight"].clone()
    changed[3, 5] += changed.abs().amax(1)[3] * 0.04
    with pytest.raises(ModelError, match=rf"does not hold .* {LAYER}\.o\.weight"):
        checked(form, model, sent | {f"{LAYER}.o.weight": changed})


@formats
def test_scales_without_their_values_are_named(form: RowFormat) -> None:
    sent = weights()
    name = f"{LAYER}.o.weight"
    # the values are the same
    with pytest.raises(ModelError, match=rf"does not hold the scales of the .* of {name} "):
        checked(form, Model(form, sent), sent | {name: sent[name] * 2})


@formats
def test_a_layer_without_its_values_is_named(form: RowFormat) -> None:
    sent = weights()
    model = Model(form, sent)
    del model.layers[0].qkv.weight
    with pytest.raises(ModelError, match=rf"does not hold the .* values of {LAYER}\.q\.weight"):
        checked(form, model, sent)


def test_a_kernel_that_overflows_is_told_from_a_lost_update() -> None:
    sent = weights()
    model = Model(INT8, sent)
    model.layers[0].qkv.quant_method = Overflowing(INT8)
    with pytest.raises(ModelError, match=r"INT8 kernel of vLLM overflows.*engine\.quantization"):
        checked(INT8, model, sent)


def test_a_tensor_that_was_not_sent_or_is_unknown_is_named() -> None:
    sent = weights()
    model = Model(FP8, sent)
    with pytest.raises(ModelError, match=r"not sent all weights of layers\.0\.qkv"):
        checked(FP8, model, {n: t for n, t in sent.items() if n != f"{LAYER}.k.weight"})
    with pytest.raises(ModelError, match=r"has no tensor for experts\.0.*engine\.quantization"):
        checked(FP8, model, sent | {"experts.0": torch.zeros(2)})


def test_a_model_without_a_quantized_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.quantization.*quantized no layer"):
        QuantizedWeights(nn.Linear(2, 2), ABOUT, INT8)


def test_rounding_is_within_half_a_step_of_the_format() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    for form in ROW_FORMATS.values():
        values, scales = form.quantize(weight)
        assert_rounded(form, values, scales[:, None], weight)


class Scheme:
    """Gives a layer new scales, and keeps their address as oneDNN does."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight_scale = nn.Parameter(torch.rand(4, 1), requires_grad=False)
        self.address = layer.weight_scale.data_ptr()


def test_scales_stay_where_the_kernel_reads_them() -> None:
    layer: Any = nn.Module()
    layer.scheme = scheme = Scheme()
    layer.weight_scale = nn.Parameter(torch.zeros(4, 1), requires_grad=False)
    for _ in range(2):
        keep_scales(layer)
        layer.scheme.process_weights_after_loading(layer)
        # an update puts the older tensor back
        layer.weight_scale = nn.Parameter(layer.weight_scale.clone(), requires_grad=False)
        kept = scheme.process_weights_after_loading.scales
        assert kept.data_ptr() == scheme.address
        assert torch.equal(kept, layer.weight_scale)
