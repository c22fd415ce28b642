"""Products by oneDNN are those of torch, of the weights that a layer has at the time."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.profiler import profile

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.onednn import packed_layers
from lightrft.models.onednn.packed_layers import PackedLayers
from lightrft.models.onednn.products import onednn_available
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request, Rollout
from tests.model_helpers import assert_rounded

pytestmark = pytest.mark.skipif(
    not onednn_available(), reason="torch has no oneDNN on this processor"
)


def layers(*sizes: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(nn.Linear(a, b, bias=bias, dtype=dtype) for a, b in pairs))


def outputs(products: PackedLayers, model: nn.Module, rows: Tensor) -> Tensor:
    with torch.inference_mode(), products.running():
        return model(rows)


def assert_products(products: PackedLayers, model: nn.Sequential, rows: Tensor) -> None:
    found = outputs(products, model, rows)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        wanted = exact(rows.double())
        for parameter in exact.parameters():
            parameter.abs_()
        terms = exact(rows.double().abs())
    assert found.dtype == rows.dtype
    # a term for each column, and the bias
    count = sum(layer.in_features + 1 for layer in model)
    assert_rounded(found, wanted, terms, count)


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    packed=st.booleans(),
)
def test_products_of_any_shape_are_those_of_torch(
    shape: list[int], width: int, height: int, bias: bool, dtype: torch.dtype, packed: bool
) -> None:
    model = layers(width, height, dtype=dtype, bias=bias)
    rows = torch.randn(*shape, width, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_layers, "SMALLEST", 0)
        patch.setattr(packed_layers, "PACKED_BYTES", 2**28 if packed else 0)
        assert_products(PackedLayers(model), model, rows)


class Attention(nn.Module):
    """Queries, keys and values, of which the last two may come from another input."""

    def __init__(self, bias: tuple[bool, bool, bool] = (True, True, True)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(128, 256, bias=bias[0])
        self.k_proj = nn.Linear(128, 128, bias=bias[1])
        self.v_proj = nn.Linear(128, 128, bias=bias[2])

    def forward(self, states: Tensor, others: Tensor | None = None) -> Tensor:
        others = states if others is None else others
        return torch.cat([self.q_proj(states), self.k_proj(others), self.v_proj(others)], dim=-1)


def calls_of_onednn(products: PackedLayers, model: nn.Module, *inputs: Tensor) -> int:
    with torch.inference_mode(), products.running(), profile() as seen:
        found = model(*inputs)
    with torch.no_grad():
        torch.testing.assert_close(found, model(*inputs), atol=1e-5, rtol=1e-5)
    return sum(e.count for e in seen.key_averages() if e.key == "mkldnn::_linear_pointwise")


def test_siblings_are_multiplied_at_once() -> None:
    model = Attention()
    assert calls_of_onednn(PackedLayers(model), model, torch.randn(2, 3, 128)) == 1
    some_biases = Attention((True, False, True))
    assert calls_of_onednn(PackedLayers(some_biases), some_biases, torch.randn(2, 3, 128)) == 3


def test_siblings_with_different_inputs_are_multiplied_one_by_one() -> None:
    model = Attention()
    products = PackedLayers(model)
    inputs = torch.randn(2, 128), torch.randn(5, 128)[:2]
    assert calls_of_onednn(products, model, *inputs) == 3
    with torch.inference_mode(), products.running():
        for _ in range(2):
            found = model(*inputs)
    torch.testing.assert_close(found, model(*inputs).detach(), atol=1e-5, rtol=1e-5)


def test_siblings_below_adapters_are_multiplied_at_once() -> None:
    model = Attention()
    adapted = get_peft_model(
        model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    assert calls_of_onednn(PackedLayers(adapted), adapted, torch.randn(4, 128)) == 1


def written(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def replaced(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(2 * layer.weight.detach())


def pointed_elsewhere(layer: nn.Linear) -> None:
    layer.weight.data = 2 * layer.weight.data


@pytest.mark.parametrize("change", [written, replaced, pointed_elsewhere])
def test_a_changed_weight_is_used_at_the_next_product(change: Callable[[nn.Linear], None]) -> None:
    model = layers(128, 128, 128, bias=False)
    products, rows = PackedLayers(model), torch.randn(3, 128)
    before = outputs(products, model, rows)
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    change(layer)
    torch.testing.assert_close(outputs(products, model, rows), 2 * before)


def sampled(engine: NativeEngine) -> Rollout:
    settings = SamplingConfig(max_new_tokens=8)
    [found] = engine.generate([Request(Prompt("p", [5, 6, 7]), 3)], settings)
    return found


def test_weights_that_are_written_without_a_trace_are_used_by_the_next_call_of_generate() -> None:
    model = tiny_model("qwen2", hidden_size=128, eos_token_id=None)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    used = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    before = sampled(used)
    for parameter in model.parameters():
        parameter.data.mul_(1.3)
    after = sampled(used)
    assert after.logprobs != before.logprobs
    assert after == sampled(NativeEngine(KVDecoder(model), tokenizer, EngineConfig()))


def test_packed_copies_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(128, 128, 256, 128, bias=False)
    monkeypatch.setattr(packed_layers, "PACKED_BYTES", 4 * (128 * 128 + 256 * 128))
    products, rows = PackedLayers(model), torch.randn(5, 128)
    assert_products(products, model, rows)
    outputs(products, model, rows)
    assert products.held_bytes == 4 * (128 * 128 + 256 * 128)
    products.forget()
    assert products.held_bytes == 0


def test_layers_are_as_before_after_an_error_and_can_be_trained() -> None:
    model = layers(128, 128)
    products = PackedLayers(model)
    with pytest.raises(RuntimeError), torch.inference_mode(), products.running():
        model(torch.randn(2, 3))
    assert "forward" not in vars(model[0])
    model(torch.randn(2, 128)).sum().backward()
    assert model[0].weight.grad is not None


def test_layers_of_other_classes_devices_and_types_compute_as_before() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    torch.manual_seed(0)
    model = nn.Sequential(Doubled(128, 128), nn.Linear(128, 128, dtype=torch.float64))
    model[0].double()
    rows = torch.randn(2, 128, dtype=torch.float64)
    products = PackedLayers(model)
    assert torch.equal(outputs(products, model, rows), model(rows))
    assert products.held_bytes == 0
    elsewhere = nn.Sequential(nn.Linear(128, 128, device="meta"))
    found = outputs(PackedLayers(elsewhere), elsewhere, torch.empty(2, 128, device="meta"))
    assert found.shape == (2, 128)


@pytest.mark.parametrize(("cached", "calls"), [(2**25, 1), (0, 3)])
def test_one_row_reads_packed_weights_only_from_caches(
    monkeypatch: pytest.MonkeyPatch, cached: int, calls: int
) -> None:
    model = Attention()
    monkeypatch.setattr(packed_layers, "CACHED_BYTES", cached)
    products = PackedLayers(model)
    outputs(products, model, torch.randn(4, 128))
    assert products.held_bytes
    assert calls_of_onednn(products, model, torch.randn(1, 128)) == calls


def test_a_layer_that_gets_a_forward_of_its_own_keeps_it() -> None:
    model = layers(128, 128, 128, bias=False)
    products, rows = PackedLayers(model), torch.randn(3, 128)
    outputs(products, model, rows)
    model[1].forward = torch.zeros_like
    assert not outputs(products, model, rows).any()
    assert model[1].forward is torch.zeros_like


def test_half_precision_is_left_to_torch_where_onednn_has_none(monkeypatch) -> None:
    model, rows = layers(128, 160, dtype=torch.bfloat16), torch.randn(3, 128).bfloat16()
    monkeypatch.setattr(packed_layers, "onednn_has_bfloat16", lambda: False)
    products = PackedLayers(model)
    assert calls_of_onednn(products, model, rows) == 0 and products.held_bytes == 0
    assert outputs(products, model, rows).equal(model(rows))
