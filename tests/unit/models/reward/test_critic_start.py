"""A critic that starts from a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig
from lightrft.models.critic import Critic
from lightrft.models.loading.save_model import save_model
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.utils.errors import ModelError
from tests.model_helpers import ragged_batch
from tests.unit.models.reward.scoring import settings_of


def saved_reward(folder: Path, **form: Any) -> tuple[RewardModel, ModelConfig]:
    tokenizer = tiny_tokenizer()
    save_model(
        tiny_model("qwen2", num_key_value_heads=2, tie_word_embeddings=False),
        tokenizer,
        folder / "model",
    )
    start = ModelConfig(path=str(folder / "model"), dtype="float32")
    reward = RewardModel.load(start, settings_of(**form)).eval()
    return reward, ModelConfig(path=str(folder / "reward"), dtype="float32")


def test_the_first_values_after_the_last_tokens_are_the_scores(tmp_path: Path) -> None:
    reward, config = saved_reward(tmp_path, heads=["good"])
    reward.set_normalization({"good": 0.0}, {"good": 0.25})
    reward.save(tiny_tokenizer(), config.path)
    batch = ragged_batch([5, 7, 3], [4, 6, 2, 5], [0, 0, 1, 2])
    with torch.no_grad():
        scores = reward.score(batch)["good"].scores
        _, after = Critic.load(config).eval().values(batch, final=True)
    assert scores.std() > 1e-3
    torch.testing.assert_close(after, scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"heads": [{"name": "good", "kind": "mlp"}]}, "of kind mlp"),
        ({"heads": ["good"], "pooling": "mean"}, "pooling is mean"),
        ({"heads": ["good"], "layer": 1}, "inner layer 1"),
        ({"heads": ["good", "safe"], "gate": True}, "mixture of heads"),
    ],
)
def test_other_reward_heads_are_refused(tmp_path: Path, form: dict[str, Any], why: str) -> None:
    reward, config = saved_reward(tmp_path, **form)
    reward.save(tiny_tokenizer(), config.path)
    with pytest.raises(ModelError, match=why):
        Critic.load(config)


def test_the_head_of_a_classifier_of_transformers_starts_a_critic(
    tmp_path: Path,
) -> None:
    config = tiny_model("qwen2").config
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    critic = Critic.load(ModelConfig(path=str(tmp_path), dtype="float32"))
    assert torch.equal(critic.value_head.weight, classifier.score.weight)


def test_a_process_reward_model_is_refused(tmp_path: Path) -> None:
    reward = ProcessRewardModel(tiny_model("qwen2"), None, ProcessModelConfig())
    reward.save(tiny_tokenizer(), tmp_path)
    with pytest.raises(ModelError, match="process reward model, whose head scores steps"):
        Critic.load(ModelConfig(path=str(tmp_path)))
