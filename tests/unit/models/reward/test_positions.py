"""Positions of pictures in reward models: those of the family, or counted as LightRFT counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models import ScalarRewardModelVL
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.types import Batch, Prompt, Ragged, Segments

GRID = torch.tensor([[1, 4, 4]])
"""A picture of 4 x 4 patches, which are 4 tokens."""


class Published(nn.Module):
    """A reward model of pictures with LightRFT's attributes and its ``forward``."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = AutoModel.from_pretrained(path, dtype=torch.float32)
        width = self.model.config.get_text_config().hidden_size
        layers = nn.Linear(width, width), nn.RMSNorm(width), nn.SiLU()
        self.preference_head = nn.Sequential(*layers, nn.Linear(width, 1, bias=False), nn.Sigmoid())
        nn.init.normal_(self.preference_head[3].weight)

    @torch.no_grad()
    def score(self, ids: Tensor, pixels: Tensor, *, counts: bool) -> float:
        mask = torch.ones_like(ids)
        positions = {"position_ids": mask.cumsum(-1) - 1} if counts else {}
        if not counts:
            positions["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        found = self.model(
            ids,
            attention_mask=mask,
            pixel_values=pixels,
            image_grid_thw=GRID,
            output_hidden_states=True,
            **positions,
        )
        layer = self.model.config.get_text_config().num_hidden_layers - 1
        return float(self.preference_head(found.hidden_states[layer][:, -1]))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Published]:
    folder = tmp_path_factory.mktemp("published")
    save_tiny_media("qwen2_5_vl", folder / "vl")
    model = Published(folder / "vl")
    path = folder / "rm"
    model.model.config.save_pretrained(path)
    load_tokenizer(ModelConfig(path=str(folder / "vl"))).save_pretrained(path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    return path, model


def inputs(model: Published) -> tuple[list[int], list[int], Tensor]:
    config: Any = model.model.config
    torch.manual_seed(2)
    pixels = torch.randn(16, 3 * 2 * config.vision_config.patch_size**2)
    before, after = [5, config.vision_start_token_id], [config.vision_end_token_id, 6, 7]
    return [*before, *[config.image_token_id] * 4, *after], [8, 9, 10], pixels


def batch(model: Published) -> Batch:
    asked, said, pixels = inputs(model)
    media = {
        "pixel_values": Ragged(pixels, torch.tensor([16])),
        "image_grid_thw": Ragged(GRID, torch.tensor([1])),
    }
    prompts = Segments.of_prompts([Prompt("0", asked, media=media)])
    return Batch(prompts, Segments.of([said, said[:2]]), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
def test_a_checkpoint_of_lightrft_scores_pictures_as_its_own_forward(published, layout):
    path, model = published
    asked, said, pixels = inputs(model)
    rows = [torch.tensor([asked + said]), torch.tensor([asked + said[:2]])]
    expected = [model.score(row, pixels, counts=True) for row in rows]
    config = ModelConfig(path=str(path), dtype="float32", layout=layout)
    reward = RewardModel.load(config)
    assert reward.settings.positions == "text"
    with torch.no_grad():
        found = reward.score(batch(model))["preference"].scores.tolist()
    assert found == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - model.score(rows[0], pixels, counts=False)) > 1e-4


def test_the_setting_takes_the_positions_of_the_family_and_a_saved_folder_keeps_them(
    published, tmp_path
):
    path, model = published
    asked, said, pixels = inputs(model)
    row = torch.tensor([asked + said])
    expected = {text: model.score(row, pixels, counts=text) for text in (True, False)}
    tree = {"heads": [{"name": "preference", "kind": "mlp"}], "layer": 1}
    config = ModelConfig(path=str(path), dtype="float32")
    for positions, counts in (("model", False), ("text", True), (None, True)):
        settings = RewardModelConfig.model_validate({**tree, "positions": positions})
        reward = RewardModel.load(config, settings)
        folder = tmp_path / str(positions)
        reward.save(load_tokenizer(config), folder)
        for one in (reward, RewardModel.open(folder, dtype=torch.float32)):
            with torch.no_grad():
                found = one.score(batch(model))["preference"].scores[0].item()
            assert found == pytest.approx(expected[counts], abs=1e-5)


def test_a_new_reward_model_has_the_positions_of_the_family(published):
    path, model = published
    vl = ModelConfig(path=str(path.parent / "vl"), dtype="float32")
    found = []
    for positions in (None, "model", "text"):
        reward = RewardModel.load(vl, RewardModelConfig(positions=positions), seed=3)
        with torch.no_grad():
            found.append(reward.score(batch(model))["preference"].scores[0].item())
    assert found[0] == found[1] != found[2]


def test_the_public_class_counts_as_lightrft_does(published):
    path, model = published
    asked, said, pixels = inputs(model)
    row = torch.tensor([asked + said])
    expected = model.score(row, pixels, counts=True)
    for place in (path, path.parent / "vl"):
        public = ScalarRewardModelVL(
            str(place), False, bf16=False, pooling_method="last", scale_for_train=False,
            probing_layer=1,
        ).eval()  # fmt: skip
        if place != path:
            public.reward.heads["preference"].layers.load_state_dict(
                model.preference_head[:4].state_dict()
            )
        with torch.no_grad():
            found = public(row, torch.ones_like(row), pixel_values=pixels, image_grid_thw=GRID)
        assert found["preference"].item() == pytest.approx(expected, abs=1e-5)
