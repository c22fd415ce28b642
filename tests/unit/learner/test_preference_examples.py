"""Examples with further responses, collated and trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.data import PreferenceDataConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.learner.preference_batch import preference_to_batch
from lightrft.learner.preference_step import PreferenceStats, preference_step
from lightrft.types import CORRUPTED, Batch
from tests.media_helpers import rig
from tests.unit.datasets.media_files import picture
from tests.unit.datasets.tokenizers import chat_tokenizer
from tests.unit.learner.test_preference_step import LARGE, roles_of, settings_of


def batch_of(folder: Path, rows: list[dict[str, Any]], tokenizer: Any, **options: Any) -> Batch:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = PreferenceDataConfig.model_validate({"sources": str(file)})
    data = PreferenceDataset(config, tokenizer, kind="pair", max_tokens=999, seed=0, **options)
    return preference_to_batch([data[i] for i in range(len(data))])


def test_the_loss_of_gold_responses_is_the_mean_over_their_tokens(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1?", "chosen": "a", "rejected": "b", "reference": "one two"},
        {"prompt": "2?", "chosen": "c d", "rejected": "e", "reference": "3"},
    ]
    batch = batch_of(tmp_path, rows, chat_tokenizer(), gold=True)
    roles = roles_of()
    logprobs = roles.actor.score(batch).logprobs.detach()
    gold = batch.mask & (batch.rank[batch.row_of] == -1)  # type: ignore[index]
    settings = settings_of(LARGE, losses=["sft_gold"])
    metrics = preference_step(roles, batch, settings, PreferenceStats(), 0).compute()
    assert metrics["loss"] == pytest.approx(-float(logprobs[gold].mean()), rel=1e-6)


def test_every_example_with_corrupted_media_has_a_group_of_its_copy(tmp_path: Path) -> None:
    eye = rig("qwen2_5_vl", tmp_path / "eye")
    picture(tmp_path / "a.png", 40, 60, seed=1)
    picture(tmp_path / "b.png", 30, 30, seed=2)
    rows = [
        {"prompt": "<image>what?", "chosen": "a cat", "rejected": "b", "image": "a.png"},
        {"prompt": "<image>who?", "chosen": "she", "rejected": "a dog", "image": "b.png"},
    ]
    batch = batch_of(
        tmp_path, rows, eye.tokenizer, processor=eye.processor, gold=False, corrupted=True
    )
    assert batch.rank is not None and batch.example is not None
    assert batch.rank.tolist() == [0, 1, CORRUPTED] * 2
    assert batch.example.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.prompt_of.tolist() == [0, 0, 1, 2, 2, 3]
    with torch.no_grad():
        logprobs = eye.actor.score(batch).logprobs.split(batch.lengths.tolist())
    for better, copy in ((0, 2), (3, 5)):
        assert logprobs[better].shape == logprobs[copy].shape
        # The same words, after another picture.
        assert (logprobs[better] - logprobs[copy]).abs().max() > 1e-6
