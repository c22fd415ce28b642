"""Scores of the steps of responses as terms of the reward, and as rewards of tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrft.algorithms.reward_shaping import token_rewards
from lightrft.config.data import SpecialTokens
from lightrft.config.model import ModelConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig, RewardModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import Separator
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rewards.base import NullScorer
from lightrft.rollout.collate import collate
from lightrft.rollout.serialization import pack_rollout, unpack_rollout
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.workers.scoring.model_scorer import ModelScorer, scoring_models
from tests.model_helpers import byte_pairs

CPU = torch.device("cpu")
TEXTS = ["ab\ncd\n\nefg", "x", "k\nl\n", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model that reads ``#`` after each step."""
    path = tmp_path_factory.mktemp("prm")
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    separator = Separator("#", tuple(tokenizer.encode("#", add_special_tokens=False)))
    settings = ProcessModelConfig(head="linear")
    ProcessRewardModel(model, ModelConfig(), settings, separator=separator, seed=3).save(
        tokenizer, path
    )
    return path


def rollouts_of(folder: Path, texts: list[str] = TEXTS) -> list[Rollout]:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    prompts = [Prompt("0", tokenizer.encode("1+1=")), Prompt("1", tokenizer.encode("2*3="))]
    found = []
    for k, text in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        # A response ends with a token that is no text.
        ids = [*ids, tokenizer.eos_token_id]
        n = len(ids)
        columns = ([True] * n, [0.0] * n, [0] * n)
        found.append(Rollout(prompts[k % 2], ids, *columns, "stop", seed=k, sample=k, text=text))
    return found


def scored(folder: Path, rollouts: list[Rollout], **term: object) -> ModelScorer:
    config = ModelConfig(path=str(folder), dtype="float32")
    terms = [ScoringModelConfig.model_validate({"path": str(folder), **term})]
    models = scoring_models(terms, config, load_tokenizer(config), CPU)
    scorer = ModelScorer(NullScorer(0.0), models, CPU)
    for one in rollouts:
        scorer.submit(one)
    assert len(list(scorer.results(wait=True))) == len(rollouts)
    return scorer


def score_at_the_end(folder: Path, ids: list[int]) -> float:
    """The score of a step that ends with the last of the tokens ``ids``, by a plain forward pass."""
    model = ProcessRewardModel.open(folder, dtype=torch.float32)
    assert model.step_head is not None
    states = model.base(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    return float(model.step_head(states[0, -1:]).sigmoid().detach())


def one_by_one(folder: Path, rollout: Rollout) -> list[float]:
    """The score of each step of a response from a forward pass over all tokens up to its separator."""
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    text, found = "", []
    for step in [line for line in rollout.text.split("\n") if line.strip()]:
        text += step + "#"
        ids = [*rollout.prompt.token_ids, *tokenizer.encode(text, add_special_tokens=False)]
        found.append(score_at_the_end(folder, ids))
    return found


AGGREGATES = {
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
    "product": math.prod,
}


@pytest.mark.parametrize("how", AGGREGATES)
def test_the_term_is_the_aggregate_of_plain_forward_passes_over_the_steps(
    folder: Path, how: str
) -> None:
    rollouts = rollouts_of(folder, TEXTS[:3])
    scored(folder, rollouts, aggregate=how, weight=2.0)
    for one in rollouts:
        expected = AGGREGATES[how](one_by_one(folder, one))
        assert one.terms == {"steps": pytest.approx(expected, abs=1e-6)}
        assert one.reward == pytest.approx(2 * expected, abs=2e-6)
        assert one.step_rewards == []


def test_with_tokens_each_step_has_its_score_at_its_last_token(folder: Path) -> None:
    rollouts = rollouts_of(folder, TEXTS[:3])
    scored(folder, rollouts, aggregate="tokens", weight=3.0)
    batch = collate([[rollouts[0], rollouts[2]], [rollouts[1]]])
    found = token_rewards(batch, "k1", 0.0).split(batch.lengths.tolist())
    # Characters are tokens: the last of each step is the line break after it, or its last letter.
    places = [[2, 6, 9], [1, 3], [0]]
    for row, where, one in zip(found, places, (rollouts[0], rollouts[2], rollouts[1])):
        expected = torch.zeros(len(one), dtype=torch.float64)
        for place, score in zip(where, one_by_one(folder, one), strict=True):
            expected[place] = 3 * score
        assert torch.allclose(row, expected, atol=1e-6)
        assert one.reward == 0.0 and one.weights == {}


def test_tokens_of_several_characters_and_characters_of_several_tokens_are_placed(
    tmp_path: Path,
) -> None:
    tokenizer = byte_pairs(["the sum is\n", "ab é\n"] * 3, 300)
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    separator = Separator("\n", tuple(tokenizer.encode("\n")))
    ProcessRewardModel(model, None, ProcessModelConfig(), separator=separator).save(
        tokenizer, tmp_path
    )
    (one,) = rollouts_of(tmp_path, ["the sum is\né ü\n日本"])
    scored(tmp_path, [one], aggregate="tokens")
    ends = [len("the sum is\n"), len("the sum is\né ü\n"), len(one.text)]
    for (place, _), end in zip(one.step_rewards, ends, strict=True):
        assert len(tokenizer.decode(one.token_ids[: place + 1], skip_special_tokens=True)) >= end
        before = tokenizer.decode(one.token_ids[:place], skip_special_tokens=True)
        assert len(before.rstrip("\ufffd")) < end


@pytest.mark.parametrize("spelled", ["text", "responses", "control"])
def test_a_sampled_special_token_is_what_it_was_in_the_training_of_the_model(
    folder: Path, tmp_path: Path, spelled: SpecialTokens
) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    model = ProcessRewardModel.open(folder)
    assert model.separator is not None
    model.separator = replace(model.separator, special_tokens=spelled)
    model.save(tokenizer, tmp_path)
    (one,) = rollouts_of(folder, ["ab<|im_end|>c"])
    scored(tmp_path, [one], aggregate="min")
    ids = tokenizer.encode(one.text, split_special_tokens=spelled == "text")
    assert (tokenizer.eos_token_id in ids) == (spelled != "text")
    ids = [*one.prompt.token_ids, *ids, *model.separator.ids]
    found = one.terms["steps"]
    assert found == pytest.approx(score_at_the_end(folder, ids), abs=1e-6)


@pytest.mark.parametrize("how", ["min", "tokens"])
def test_a_model_of_another_vocabulary_reads_prompt_and_steps_in_its_own_tokens(
    folder: Path, how: str
) -> None:
    policy = byte_pairs(["the sum is\n", "ab cd\n"] * 3, 300)
    prompt = Prompt("0", [1, 2], request=[{"role": "user", "content": "1+1="}])
    text = "ab cd\nthe sum is 2"
    ids = policy.encode(text)
    columns = ([True] * len(ids), [0.0] * len(ids), [0] * len(ids))
    one = Rollout(prompt, ids, *columns, "stop", seed=0, text=text)
    term = ScoringModelConfig.model_validate({"path": str(folder), "aggregate": how})
    config = ModelConfig(path=str(folder), dtype="float32")
    ModelScorer(NullScorer(0.0), scoring_models([term], config, policy, CPU), CPU).score([one])
    tokenizer = load_tokenizer(config)
    asked = tokenizer.apply_chat_template(
        list(prompt.request), add_generation_prompt=True, return_dict=False
    )
    whole = Rollout(Prompt("", asked), ids, *columns, "stop", seed=0, text=text)
    scores = one_by_one(folder, whole)
    if how == "min":
        assert one.reward == pytest.approx(min(scores), abs=1e-6)
        return
    ends = [len("ab cd\n"), len(text)]
    for (place, score), expected, end in zip(one.step_rewards, scores, ends, strict=True):
        assert score == pytest.approx(expected, abs=1e-6)
        assert len(policy.decode(ids[: place + 1])) >= end > len(policy.decode(ids[:place]))


def test_a_response_without_a_step_or_with_a_score_of_nan_fails_and_is_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = rollouts_of(folder)
    scorer = scored(folder, rollouts, aggregate="tokens")
    assert [bool(one.failed) for one in rollouts] == [False, False, False, True]
    assert scorer.counts == {"scored": 4, "nonfinite": 1, "unanswered": 0}
    true = ProcessRewardModel.score_steps

    def spoiled(self, batch):
        found = true(self, batch)
        found.scores[0] = math.nan
        return found

    monkeypatch.setattr(ProcessRewardModel, "score_steps", spoiled)
    rollouts = rollouts_of(folder, TEXTS[:3])
    scored(folder, rollouts, aggregate="min")
    assert sum(one.reward is None and "its score is nan" in one.failed for one in rollouts) == 1


def test_models_of_steps_and_of_responses_are_told_apart(folder: Path, tmp_path: Path) -> None:
    rollouts = rollouts_of(folder, TEXTS[:1])
    with pytest.raises(ConfigError, match=r"models.0.path.*scores steps.*models.0.aggregate=min"):
        scored(folder, rollouts)
    with pytest.raises(ConfigError, match=r"models.0.head = 'good'.*no named heads"):
        scored(folder, rollouts, aggregate="min", head="good")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    heads = RewardModelConfig(heads=[{"name": "good"}])  # type: ignore[arg-type]
    RewardModel(model, ModelConfig(), heads).save(tokenizer, tmp_path)
    with pytest.raises(ConfigError, match=r"models.0.aggregate = 'min'.*whole responses"):
        scored(tmp_path, rollouts, aggregate="min")


def test_rewards_of_steps_survive_a_checkpoint_of_their_rollout(folder: Path) -> None:
    rollouts = rollouts_of(folder, TEXTS[:1])
    scored(folder, rollouts, aggregate="tokens")
    packed = pack_rollout(rollouts[0])
    assert unpack_rollout(packed, rollouts[0].prompt) == rollouts[0]
    assert rollouts[0].step_rewards
