"""Attention of towers within segments of a packed row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightrft.config.model import ModelConfig
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.loading.save_model import save_model
from lightrft.models.multimodal.tower_attention import NAME, attend_within_segments
from lightrft.models.tiny import save_tiny_media

HEADS, WIDTH = 2, 4


def one_by_one(rows: list[Tensor], lengths: list[int], scale: float) -> Tensor:
    """Attention ``[1, T, H, d]`` in one call per segment, by its definition."""
    found = []
    for query, key, value in zip(*(x.split(lengths, dim=2) for x in rows)):
        weights = (query @ key.transpose(-1, -2) * scale).softmax(-1)
        found.append(weights @ value)
    return torch.cat(found, dim=2).transpose(1, 2)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [5], [3, 7, 3, 1, 7], [2, 0, 2], [1, 2, 3]])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_segment_attends_to_itself(lengths: list[int], scale: float | None) -> None:
    torch.manual_seed(0)
    shape = (1, HEADS, sum(lengths), WIDTH)
    rows = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ours, nothing = attend_within_segments(
        nn.Identity(), *rows, None, cu_seq_lens_q=bounds, scaling=scale
    )
    assert nothing is None
    expected = one_by_one(rows, lengths, WIDTH**-0.5 if scale is None else scale)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    weights = torch.arange(ours.numel(), dtype=torch.float64).view_as(ours).sin()
    gradients = [torch.autograd.grad((x * weights).sum(), rows) for x in (ours, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker"])
def test_features_of_pictures_are_those_of_one_call_per_segment(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_media(family, tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)))
    parts = [m for m in model.modules() if type(m).__name__.endswith("VisionAttention")]
    assert parts
    assert {m.config._attn_implementation for m in parts} == {NAME}
    tower = next(m for name, m in model.named_modules() if name.endswith("visual"))
    vision = tower.config
    side = vision.spatial_merge_size
    grid = torch.tensor([[1, 4 * side, 4 * side], [1, 6 * side, 3 * side]])
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(int(grid.prod(1).sum()), width, generator=torch.manual_seed(1))

    calls = []
    own = functional.scaled_dot_product_attention

    def counted(*args: object, **words: object) -> Tensor:
        calls.append(1)
        return own(*args, **words)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)

    def run() -> tuple[list[Tensor], int]:
        calls.clear()
        tower.zero_grad()
        output = tower(pixels, grid_thw=grid)
        features = getattr(output, "pooler_output", output)
        features.pow(2).mean().backward()
        found = [p.grad.clone() for p in tower.parameters() if p.grad is not None]
        return [features.detach(), *found], len(calls)

    ours, few = run()
    for part in parts:
        part.config._attn_implementation_internal = "sdpa"
    theirs, many = run()
    assert few <= many
    assert few < many or family != "qwen2_5_vl"
    assert len(ours) == len(theirs)
    for first, second in zip(ours, theirs):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6 * float(second.abs().max()))


def test_a_written_model_has_torch_s_attention_and_the_model_in_memory_keeps_its_own(
    tmp_path: Path,
) -> None:
    save_tiny_media("qwen2_5_vl", tmp_path / "a")
    model = load_model(ModelConfig(path=str(tmp_path / "a")))
    save_model(model, None, tmp_path / "b")
    assert NAME not in (tmp_path / "b" / "config.json").read_text()
    configs = [m.config for m in model.modules() if type(m).__name__.endswith("VisionAttention")]
    assert {config._attn_implementation for config in configs} == {NAME}


def test_an_implementation_that_a_user_chose_stays(tmp_path: Path) -> None:
    save_tiny_media("qwen2_5_vl", tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), attention="eager"))
    configs = [m.config for m in model.modules() if type(m).__name__.endswith("VisionAttention")]
    assert {config._attn_implementation for config in configs} == {"eager"}
