"""Embeddings of patches by a matrix product."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.onednn.layers import PatchEmbedding, replace_patch_embeddings
from lightrft.models.tiny import save_tiny_media

PATCH = (2, 4, 4)


def found(module: nn.Module, patches: Tensor) -> tuple[Tensor, ...]:
    """Features, and the gradients of patches and parameters."""
    patches = patches.clone().requires_grad_()
    features = module(patches)
    weights = torch.arange(features.numel(), dtype=features.dtype).view_as(features).sin()
    (features * weights).sum().backward()
    grads = [p.grad for p in module.parameters()]
    return features.detach(), patches.grad, *grads


@pytest.mark.parametrize("bias", [True, False])
def test_features_and_gradients_are_those_of_the_convolution(bias: bool) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 8, PATCH, stride=PATCH, bias=bias).double()
    product = copy.deepcopy(convolution)
    replace_patch_embeddings(product)
    assert type(product) is PatchEmbedding
    patches = torch.randn(5, 3, *PATCH, dtype=torch.float64)
    for ours, theirs in zip(found(product, patches), found(convolution, patches), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_input_of_several_patches_is_convolved() -> None:
    convolution = nn.Conv3d(3, 8, PATCH, stride=PATCH)
    expected = convolution(torch.ones(2, 3, 4, 8, 8))
    replace_patch_embeddings(convolution)
    assert torch.equal(convolution(torch.ones(2, 3, 4, 8, 8)), expected)


@pytest.mark.parametrize(
    "options", [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"groups": 3, "stride": PATCH}]
)
def test_other_convolutions_stay(options: dict[str, object]) -> None:
    convolution = nn.Conv3d(3, 9, PATCH, **({"stride": PATCH} | options))  # type: ignore[arg-type]
    replace_patch_embeddings(convolution)
    assert type(convolution) is nn.Conv3d


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loaded_actor_embeds_patches_by_a_product_and_keeps_the_names_of_its_weights(
    device: str, tmp_path: Path
) -> None:
    names = list(save_tiny_media("qwen2_5_vl", tmp_path).state_dict())
    model = Actor.load(ModelConfig(path=str(tmp_path)), device=device).base
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Conv3d)]
    assert kinds == [PatchEmbedding]
    assert list(model.state_dict()) == names


def test_a_model_that_is_given_stays_as_it_is(tmp_path: Path) -> None:
    model = save_tiny_media("qwen2_5_vl", tmp_path)
    Actor(model)
    assert any(type(module) is nn.Conv3d for module in model.modules())
