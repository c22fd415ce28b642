"""Products of float32 matrices by oneDNN, with their gradients, and where they are used."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.logprobs import token_logprobs
from lightrft.models.onednn import layers, products
from lightrft.models.onednn.layers import OneDNNLinear, is_plain_linear, use_onednn
from lightrft.models.onednn.products import (
    add_gradient_of_weight,
    is_faster_than_mkl,
    linear,
    onednn_available,
    write_gradient_of_input,
)
from lightrft.models.tiny.text import tiny_model
from tests.model_helpers import Float64, assert_rounded, float32_bound, gap, gradients, hard_batch

pytestmark = pytest.mark.skipif(
    not onednn_available(), reason="torch has no oneDNN on this processor"
)


@contextmanager
def onednn(*, used: bool = True, least: int = 0) -> Generator[None]:
    """Use oneDNN for products of ``least`` multiplications, or not at all, whichever processor this is."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (products, layers):
            patch.setattr(module, "is_faster_than_mkl", lambda: used)
        patch.setattr(products, "LEAST", least)
        yield


def calls(compute: Callable[[], object]) -> int:
    """Products that oneDNN computes in ``compute``."""
    with profile() as seen:
        compute()
    return sum(e.count for e in seen.key_averages() if e.key == "mkldnn::_linear_pointwise")


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    bias=st.booleans(),
    frozen=st.sampled_from(["nothing", "input", "weight"]),
)
def test_products_of_any_shape_and_their_gradients_are_those_of_float64(
    shape: list[int], width: int, height: int, bias: bool, frozen: str
) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(*shape, width), torch.randn(height, width)
    own = [rows, weight, *([torch.randn(height)] if bias else [])]
    d = torch.randn(*shape, height)
    for tensor, name in zip(own, ("input", "weight", "bias"), strict=False):
        tensor.requires_grad_(name != frozen)
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in own]
    terms = [x.detach().double().abs().requires_grad_(x.requires_grad) for x in own]
    with onednn():
        found = linear(*own)
        found.backward(d)
    wanted, largest = F.linear(*exact), F.linear(*terms)
    wanted.backward(d.double())
    largest.backward(d.double().abs())
    assert_rounded(found, wanted, largest, width + 1)
    count = len(d.flatten(0, -2))
    for ours, theirs, most, added in zip(own, exact, terms, (height, count, count), strict=False):
        if not ours.requires_grad:
            assert ours.grad is None
            continue
        assert ours.grad is not None and theirs.grad is not None and most.grad is not None
        assert_rounded(ours.grad, theirs.grad, most.grad, added)


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 60),
    width=st.integers(1, 90),
    height=st.integers(1, 300),
    block=st.integers(1, 2000),
)
def test_gradients_of_a_head_are_summed_in_blocks(
    count: int, width: int, height: int, block: int
) -> None:
    torch.manual_seed(0)
    d, rows, weight = (
        torch.randn(count, height),
        torch.randn(count, width),
        torch.randn(height, width),
    )
    before = torch.randn(height, width)
    total, out = before.clone(), torch.empty(count, width)
    with onednn(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "BLOCK", block)
        add_gradient_of_weight(total, d, rows)
        write_gradient_of_input(out, d, weight)
    of_weight = d.double().T @ rows.double()
    sizes = d.double().abs().T @ rows.double().abs() + before.abs()
    assert_rounded(total, before.double() + of_weight, sizes, count + 1)
    of_rows = d.double() @ weight.double()
    assert_rounded(out, of_rows, d.double().abs() @ weight.double().abs(), height)


def test_log_probs_of_a_head_and_their_gradients_are_those_of_float64() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(50, 64), nn.Linear(64, 300)
    targets = torch.randint(300, (50,))

    def found(hidden: Tensor, head: nn.Linear) -> list[Tensor]:
        hidden = hidden.clone().requires_grad_()
        # chunks of a few rows
        logprobs, entropy = token_logprobs(hidden, head, targets, entropy=True, chunk_mb=0.02)
        assert entropy is not None
        (logprobs.sin().sum() + entropy.cos().sum()).backward()
        assert hidden.grad is not None and head.bias.grad is not None
        return [logprobs, entropy, hidden.grad, head.weight.grad, head.bias.grad]

    exact = found(hidden.double(), copy.deepcopy(head).double())
    ours = copy.deepcopy(head)
    with onednn():
        use_onednn(nn.ModuleList([ours]))
        assert calls(lambda: found(hidden, copy.deepcopy(ours))) > 10
        measured = found(hidden, ours)
    for a, b in zip(measured, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora": LoRAConfig()}])
def test_a_loaded_model_has_the_log_probs_and_gradients_of_float64(
    options: dict[str, object], layout: str, tmp_path: Path
) -> None:
    tiny_model("qwen2", seed=1).save_pretrained(tmp_path)
    config = ModelConfig.model_validate(
        {"path": str(tmp_path), "layout": layout, "dtype": "float32", **options}
    )
    with onednn():
        ours = Actor.load(config)
        found: tuple[Tensor, dict[str, Tensor]] = gradients(ours, hard_batch())
        used = calls(lambda: gradients(ours, hard_batch()))
    with onednn(used=False):
        plain = Actor.load(config)
        plain.load_state_dict(ours.state_dict())
        with Float64():
            exact = gradients(plain.double(), hard_batch())
        assert calls(lambda: gradients(Actor.load(config), hard_batch())) == 0
    # seven layers in each of two blocks, and at least their gradients in the input
    assert used >= 2 * 7 * 2 - 1
    assert (found[0] - exact[0]).abs().max() < float32_bound(ours)
    assert gap(found[1], exact[1]) < float32_bound(ours)


def test_only_plain_layers_of_a_loaded_model_change_and_weights_keep_their_names(
    tmp_path: Path,
) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="float32")
    with onednn():
        loaded = load_model(config)
        doubled = nn.ModuleList([Doubled(4, 4)])
        use_onednn(doubled)
    kinds = {type(module) for module in loaded.modules() if isinstance(module, nn.Linear)}
    assert kinds == {OneDNNLinear} and type(doubled[0]) is Doubled
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(is_plain_linear(m) for m in loaded.modules() if isinstance(m, nn.Linear))
    assert not is_plain_linear(doubled[0]) and not is_plain_linear(nn.Bilinear(1, 1, 1))
    with onednn(used=False):
        plain = load_model(config)
    assert {type(m) for m in plain.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_copies_of_a_layer_use_their_own_weights() -> None:
    layer = nn.Linear(8, 8)
    with onednn():
        use_onednn(nn.ModuleList([layer]))
        rows = torch.randn(3, 8)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            with torch.no_grad():
                layer.weight.zero_()
                layer.bias.zero_()
            assert isinstance(other, OneDNNLinear) and other(rows).abs().sum() > 0
        assert layer(rows).abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_devices_classes_and_small_products_are_computed_by_torch(
    dtype: torch.dtype,
) -> None:
    class Own(Tensor):
        pass

    rows, weight = torch.randn(4, 8), torch.randn(3, 8)
    with onednn():
        assert calls(lambda: linear(rows, weight)) == 1
        wide = rows.to(dtype), weight.to(dtype)
        assert torch.equal(linear(*wide), F.linear(*wide))
        assert linear(rows.to("meta"), weight.to("meta")).shape == (4, 3)
        assert isinstance(linear(rows.as_subclass(Own), weight), Own)
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(rows, weight).dtype == torch.bfloat16
    with onednn(least=4 * 8 * 3):
        assert calls(lambda: linear(rows, weight)) == 1
    with onednn(least=4 * 8 * 3 + 1):
        assert calls(lambda: linear(rows, weight)) == 0


def test_a_product_that_is_computed_again_for_its_gradients_gives_the_same() -> None:
    torch.manual_seed(0)
    rows, layer = torch.randn(5, 16, requires_grad=True), nn.Linear(16, 16)
    with onednn():
        use_onednn(nn.ModuleList([layer]))
        layer(rows).sin().sum().backward()
        first = [x.grad.clone() for x in (rows, layer.weight, layer.bias) if x.grad is not None]
        rows.grad = None
        layer.zero_grad()
        checkpoint(lambda x: layer(x).sin(), rows, use_reentrant=False).sum().backward()
    again = [x.grad for x in (rows, layer.weight, layer.bias)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if b is not None)


def test_a_second_derivative_is_refused() -> None:
    rows, weight = torch.randn(5, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    with onednn():
        [first] = torch.autograd.grad(linear(rows, weight).sin().sum(), rows, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\n", 26),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\n", 25),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 26\n", 0),
        ("BogoMIPS\t: 243.75\nCPU implementer\t: 0x41\n", 0),
    ],
)
def test_the_family_of_a_processor_is_read(text: str, family: int) -> None:
    assert products._amd_family(text) == family


def test_processors_without_vectors_of_512_bits_use_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_amd_family", lambda _: 26)
    for capability, faster in (("AVX2", False), ("AVX512", True), ("DEFAULT", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        is_faster_than_mkl.cache_clear()
        assert is_faster_than_mkl() is faster
    is_faster_than_mkl.cache_clear()
