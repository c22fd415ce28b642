"""Reward models with the names and the arithmetic of LightRFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models import ScalarRewardModel
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ModelError
from tests.e2e.command import command

HEADS = ("preference", "alignment")
ROWS = [[5, 6, 7, 8, 9], [10, 11, 12]]


class Pool(nn.Module):
    """Attention pooling as LightRFT computes it, for one row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.query = nn.Parameter(torch.randn(width))

    def forward(self, states: Tensor) -> Tensor:
        keys, values = (f(states).unflatten(-1, (4, -1)).transpose(0, 1) for f in (self.k, self.v))
        query = self.query.unflatten(0, (4, 1, -1)[::2])[:, None]
        weights = (query @ keys.transpose(-2, -1) * keys.shape[-1] ** -0.5).softmax(-1)
        return (weights @ values).flatten()


class Published(nn.Module):
    """A model with LightRFT's attributes."""

    def __init__(self, pooling: str, scaled: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.causal = tiny_model("qwen2", seed=1, hidden_size=32)
        self.model = self.causal.model  # as AutoModel loads it
        width = self.model.config.hidden_size
        for name in HEADS:
            layers = nn.Linear(width, width), nn.RMSNorm(width), nn.SiLU()
            head = nn.Sequential(*layers, nn.Linear(width, 1, bias=False), nn.Sigmoid())
            nn.init.normal_(head[1].weight)
            setattr(self, f"{name}_head", head)
            if pooling == "attention":
                setattr(self, f"{name}_attnpool", Pool(width))
            if scaled:
                setattr(self, f"{name}_logit_scale", nn.Parameter(torch.full((1,), 2.5)))

    def write(self, folder: Path) -> Path:
        """Write config, tokenizer and state dict, whose names are those of the attributes."""
        state = {k: v.clone() for k, v in self.state_dict().items() if not k.startswith("causal.")}
        self.causal.config.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder

    @torch.no_grad()
    def scores(self, name: str, layer: int) -> list[float]:
        found = []
        for row in ROWS:
            states = self.model(torch.tensor([row]), output_hidden_states=True).hidden_states
            own = states[layer][0]
            pool: Any = getattr(self, f"{name}_attnpool", lambda states: states[-1])
            head: Any = getattr(self, f"{name}_head")
            found.append(float(head(pool(own))))
        return found


def batch() -> Batch:
    parts = [row[:2] for row in ROWS], [row[2:] for row in ROWS]
    return Batch(Segments.of(parts[0]), Segments.of(parts[1]), torch.arange(2))


@pytest.mark.parametrize(("pooling", "scaled"), [("attention", True), ("last", False)])
def test_a_published_model_scores_as_its_own_code_does(tmp_path, pooling, scaled):
    published = Published(pooling, scaled)
    layer = published.model.config.num_hidden_layers - 1
    reward = RewardModel.open(published.write(tmp_path / "published"), dtype=torch.float32)
    assert reward.settings.pooling == pooling
    assert reward.settings.layer == layer
    assert reward.reward_name == "preference"
    assert [head.logit_scale for head in reward.settings.heads] == [scaled] * 2
    with torch.no_grad():
        found = reward.score(batch())
    for name in HEADS:
        expected = published.scores(name, layer)
        assert found[name].scores.tolist() == pytest.approx(expected, abs=1e-5)
        assert abs(expected[0] - expected[1]) > 1e-4
    if scaled:
        assert reward.heads["preference"].logit_scale.weight.item() == 2.5
    # and is written in the form of this package
    reward.save(tiny_tokenizer(), tmp_path / "again")
    again = RewardModel.open(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(again.score(batch())["alignment"].scores, found["alignment"].scores)


def test_the_settings_name_another_probed_layer(tmp_path):
    published = Published("attention", True)
    path = published.write(tmp_path)
    layers = published.model.config.num_hidden_layers
    heads = [{"name": name, "kind": "mlp", "logit_scale": True} for name in HEADS]
    tree = {"heads": heads, "pooling": "attention"}
    config = ModelConfig(path=str(path), dtype="float32")
    for layer, index in ((-1, layers), (1, 1)):
        settings = RewardModelConfig.model_validate({**tree, "layer": layer})
        with torch.no_grad():
            found = RewardModel.load(config, settings).score(batch())
        expected = published.scores("preference", index)
        assert found["preference"].scores.tolist() == pytest.approx(expected, abs=1e-5)
    tree["heads"].reverse()
    turned = RewardModel.load(config, RewardModelConfig.model_validate({**tree, "layer": 1}))
    assert turned.reward_name == "alignment"
    with pytest.raises(ModelError, match=r"reward_model.heads.*alignment"):
        RewardModel.load(config, RewardModelConfig())


def test_eval_rm_evaluates_a_published_model(tmp_path, capsys):
    path = Published("attention", True).write(tmp_path / "published")
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i}", "rejected": "x"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = (f"data.sources={tmp_path / 'rows.jsonl'}", f"run.dir={tmp_path}", "head=alignment")
    found = command(capsys, "eval-rm", str(path), *words, "run.progress=false")
    assert found.status == 0, found
    assert 0 <= json.loads(found.out)["eval/pair_accuracy"] <= 1


def test_the_public_class_loads_a_published_model_with_the_same_arguments(tmp_path):
    published = Published("attention", True)
    path = published.write(tmp_path)
    layer = published.model.config.num_hidden_layers - 1
    names = list(HEADS)
    model = ScalarRewardModel(str(path), False, bf16=False, probing_layer=layer, head_types=names)
    with torch.no_grad():
        found = model.eval()(torch.tensor([ROWS[0]]))
    for name in names:
        expected = published.scores(name, layer)[:1]
        assert found[name].tolist() == pytest.approx(expected, abs=1e-5)
