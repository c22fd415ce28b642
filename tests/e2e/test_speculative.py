"""Speculative decoding in whole runs: the same responses, and metrics of the drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, tokenizer in (("policy", tiny_tokenizer()), ("other", tiny_tokenizer("\u00fc"))):
        model = tiny_model("qwen2", hidden_size=32, vocab_size=len(tokenizer), seed=1)
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    # more rows than tokens, as published models of one tokenizer have in different numbers
    padded = tiny_model("qwen2", hidden_size=32, vocab_size=len(tiny_tokenizer()) + 60, seed=2)
    padded.save_pretrained(path / "padded")
    tiny_tokenizer().save_pretrained(path / "padded")
    rows = [{"prompt": "ababababab", "label": "a"}, {"prompt": "1212121212", "label": "1"}]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "reward.py").write_text(
        "def reward(rollout):\n    return len(set(rollout.token_ids))\n"
    )
    return path


def run(
    folder: Path, into: Path, speculative: dict[str, Any] | None, policy: str = "policy"
) -> tuple[list[Any], Any]:
    tree = {
        "run": {"dir": str(into), "name": "run"},
        "model": {"path": str(folder / policy), "dtype": "float32"},
        "data": {"sources": [str(folder / "rows.jsonl")]},
        "rollout": {"prompts_per_step": 2, "group_size": 4},
        "sampling": {"max_new_tokens": 16, "temperature": 0.5},
        "reward": {"terms": [str(folder / "reward.py") + ":reward"]},
        "optimizer": {"lr": 0.01},
        "train": {"steps": 2},
        "engine": {"speculative": speculative},
        "log": {"tensorboard": False},
    }
    run_rl(build(RLConfig, tree))
    files = sorted((into / "run" / "rollouts").glob("*.jsonl"))
    rollouts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return rollouts, read_rows(into / "run" / "metrics.jsonl")


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_a_run_with_drafts_samples_the_same_responses(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    settings: dict[str, Any] = {"kind": kind, "tokens": 3}
    if kind == "draft":
        settings["path"] = str(folder / "policy")
    plain, _ = run(folder, tmp_path / "plain", None)
    found, rows = run(folder, tmp_path / "drafts", settings)
    assert [r["token_ids"] for r in found] == [r["token_ids"] for r in plain]
    metrics = [row for row in rows if "rollout/drafted_tokens" in row]
    assert metrics
    assert metrics[0]["rollout/drafted_tokens"] > 0
    if kind == "draft":
        # the draft model is the policy before its first update
        assert metrics[0]["rollout/draft_acceptance"] == 1
        assert metrics[1]["rollout/draft_acceptance"] < 1


@pytest.mark.parametrize(("policy", "draft"), [("policy", "padded"), ("padded", "policy")])
def test_a_draft_model_may_have_another_number_of_rows_beyond_the_tokens(
    folder: Path, tmp_path: Path, policy: str, draft: str
) -> None:
    settings = {"kind": "draft", "tokens": 3, "path": str(folder / draft)}
    plain, _ = run(folder, tmp_path / "plain", None, policy)
    drafted, _ = run(folder, tmp_path / "drafted", settings, policy)
    ids = [[r["token_ids"] for r in rollouts] for rollouts in (plain, drafted)]
    assert ids[0] == ids[1]
    if policy == "padded":
        # the rows beyond the tokens are sampled here, since the model is random
        assert max(max(one) for one in ids[0]) >= len(tiny_tokenizer())


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    settings = {"kind": "draft", "path": str(folder / "other")}
    with pytest.raises(ConfigError, match="another vocabulary than the policy"):
        run(folder, tmp_path, settings)


def test_a_draft_model_that_is_not_there_is_refused_by_its_own_setting(
    folder: Path, tmp_path: Path
) -> None:
    settings = {"kind": "draft", "path": str(folder / "nowhere")}
    with pytest.raises(ModelError, match=r"^engine\.speculative\.path = .*no such folder"):
        run(folder, tmp_path, settings)
