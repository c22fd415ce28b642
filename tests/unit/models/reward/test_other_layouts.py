"""Reward models of other frameworks: their folders are read, and theirs are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.config.model import ModelConfig
from lightrft.models.loading.save_model import save_model
from lightrft.models.reward.other_layouts import save_as_classifier
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ModelError
from lightrft.utils.module_tensors import exchange
from tests.model_helpers import Float64, small_model
from tests.unit.models.reward.scoring import (
    TWO,
    far,
    plain_states,
    reward_of,
    rows_of,
    settings_of,
    some_batch,
)

LABELS = {0: "helpfulness", 1: "verbosity", 2: "coherence"}


def classifier(folder: Path, labels: int = 1, **fields: Any) -> Any:
    """transformers' own classifier of untied embeddings, which has no output head, written to ``folder``."""
    config = small_model("qwen2", tie_word_embeddings=False).config
    config.num_labels = labels
    for name, value in fields.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def logits_of(model: Any, batch: Batch) -> torch.Tensor:
    """``[B, labels]``, each row alone. The padding token is no token of the rows."""
    model.config.pad_token_id = 0
    return torch.cat([model(input_ids=tokens[None]).logits for tokens, _ in rows_of(batch)])


def with_head(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> None:
    """A language model in ``folder`` whose file also holds ``tensors``."""
    model = small_model("qwen2", torch.float64)
    for name, value in fields.items():
        setattr(model.config, name, value)
    save_model(model, tiny_tokenizer(), folder)
    own = load_file(folder / "model.safetensors")
    save_file({**own, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})


def head_of(folder: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Scores by the last state of a plain forward, the weight and the bias."""
    reward = RewardModel.open(folder)
    rows = [plain_states(reward, tokens)[-1] for tokens, _ in rows_of(some_batch())]
    weight, *bias = tensors.values()
    return torch.stack(rows) @ weight[0] + (bias[0] if bias else 0)


def opened(folder: Path) -> torch.Tensor:
    return RewardModel.open(folder).score(some_batch())["preference"].scores


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_a_classifier_of_transformers_scores_by_its_logits(tmp_path):
    model = classifier(tmp_path)
    with Float64(), torch.no_grad():
        expected = logits_of(model, some_batch())[:, 0]
        assert far(opened(tmp_path), expected) < 1e-9


def test_a_classifier_without_an_output_head_is_read_later_too(tmp_path):
    classifier(tmp_path)
    later = RewardModel.load(ModelConfig(path=str(tmp_path)), device="meta")
    exchange(later, lambda p: torch.empty_like(p, device="cpu") if p.is_meta else None)
    later.read_weights()
    with torch.no_grad():
        assert torch.equal(later.score(some_batch())["preference"].scores, opened(tmp_path))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["score_0", "score_1", "score_2"]),
        ({"id2label": LABELS}, list(LABELS.values())),
    ],
)
def test_several_labels_are_heads_of_their_names(fields, names, tmp_path):
    model = classifier(tmp_path, 3, **fields)
    with Float64(), torch.no_grad():
        found = RewardModel.open(tmp_path).score(some_batch())
        expected = logits_of(model, some_batch())
    assert list(found) == names
    for i, name in enumerate(names):
        assert far(found[name].scores, expected[:, i]) < 1e-9


def test_a_classifier_of_ratings_scores_by_the_expected_rating(tmp_path):
    model = classifier(tmp_path, 3, problem_type="single_label_classification")
    with Float64(), torch.no_grad():
        expected = logits_of(model, some_batch()).softmax(-1) @ torch.arange(3.0).double()
        assert far(opened(tmp_path), expected) < 1e-9


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (("v_head.summary.weight", "v_head.summary.bias"), {}),
        (("v_head.weight",), {}),
        (("value_head.weight",), {}),
        (("reward_layer.weight",), {"value_head_prefix": "reward_layer"}),
    ],
)
def test_value_heads_of_other_frameworks_are_read(names, fields, tmp_path):
    tensors = {name: drawn(*((1, 64) if "weight" in name else (1,))) for name in names}
    with_head(tmp_path, tensors, **fields)
    with Float64(), torch.no_grad():
        assert far(opened(tmp_path), head_of(tmp_path, tensors)) < 1e-9


def test_a_head_in_a_file_of_its_own_is_read(tmp_path):
    tensors = {"v_head.summary.weight": drawn(1, 64)}
    with_head(tmp_path, {})
    save_file(tensors, tmp_path / "value_head.safetensors")
    with Float64(), torch.no_grad():
        assert far(opened(tmp_path), head_of(tmp_path, tensors)) < 1e-9


def test_mean_and_std_of_a_config_normalise_the_scores(tmp_path):
    model = classifier(tmp_path, mean=0.5, std=4.0)
    with Float64(), torch.no_grad():
        expected = (logits_of(model, some_batch())[:, 0] - 0.5) / 4
        assert far(opened(tmp_path), expected) < 1e-9


def test_a_deviation_that_is_negative_is_refused(tmp_path):
    classifier(tmp_path, std=-1.0)
    with pytest.raises(ModelError, match=r"std = -1.0 in its config.json"):
        RewardModel.open(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"heads": TWO},
        {"pooling": "mean"},
        {"heads": [{"kind": "classes", "size": 2}]},
        {"heads": ["a", "b"]},
    ],
)
def test_settings_that_the_head_does_not_fit_are_refused(fields, tmp_path):
    classifier(tmp_path)
    with pytest.raises(ModelError, match="a linear head with 1 outputs"):
        RewardModel.load(ModelConfig(path=str(tmp_path)), settings_of(**fields))


def test_a_linear_head_of_settings_takes_the_weights_of_a_classifier(tmp_path):
    classifier(tmp_path)
    settings = settings_of(heads=["helpful"])
    reward = RewardModel.load(ModelConfig(path=str(tmp_path)), settings)
    with torch.no_grad():
        assert torch.equal(reward.score(some_batch())["helpful"].scores, opened(tmp_path))


@pytest.mark.parametrize("heads", [["preference"], ["helpful", "harmless"]])
def test_a_written_classifier_gives_the_scores_in_transformers(heads, tmp_path):
    reward, batch = reward_of(heads=heads), some_batch()
    save_as_classifier(reward, tiny_tokenizer(), tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with Float64(), torch.no_grad():
        logits = logits_of(model.eval(), batch)
        for i, name in enumerate(heads):
            assert far(logits[:, i], reward.score(batch)[name].scores) < 1e-9
    assert model.config.id2label == dict(enumerate(heads))


@pytest.mark.parametrize("padding", ["the end token", "none", "its own"])
def test_a_written_classifier_scores_the_end_token_whatever_pads(padding, tmp_path):
    tokenizer = tiny_tokenizer()
    if padding != "its own":
        tokenizer.pad_token = tokenizer.eos_token if padding == "the end token" else None
    reward, ids = reward_of(), [[7, 8, tokenizer.eos_token_id], [9, tokenizer.eos_token_id]]
    save_as_classifier(reward, tokenizer, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    padded = AutoTokenizer.from_pretrained(tmp_path).pad(
        {"input_ids": ids}, return_tensors="pt", padding_side="right"
    )
    batch = Batch(
        Segments.of([row[:-1] for row in ids]),
        Segments.of([row[-1:] for row in ids]),
        torch.arange(2),
    )
    with Float64(), torch.no_grad():
        expected = reward.score(batch)["preference"].scores
        assert far(model(**padded).logits[:, 0], expected) < 1e-9


def test_a_written_classifier_keeps_mean_and_std_in_its_config(tmp_path):
    reward = reward_of()
    reward.set_normalization({"preference": 1.5}, {"preference": 2.0})
    save_as_classifier(reward, tiny_tokenizer(), tmp_path)
    with torch.no_grad():
        expected = reward.score(some_batch())["preference"].scores
        assert far(opened(tmp_path), expected) < 1e-9


@pytest.mark.parametrize(
    "fields",
    [{"heads": TWO}, {"pooling": "mean"}, {"layer": 1}, {"heads": ["a", "b"], "gate": True}],
)
def test_another_form_is_not_written_as_a_classifier(fields, tmp_path):
    with pytest.raises(ModelError, match="is no classifier of transformers"):
        save_as_classifier(reward_of(**fields), tiny_tokenizer(), tmp_path)
