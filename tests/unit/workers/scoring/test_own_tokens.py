"""Reward models that read responses in tokens and a template of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightrft.config.base import build
from lightrft.config.data import DataConfig, PreferenceDataConfig
from lightrft.config.model import ModelConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rewards.base import NullScorer
from lightrft.types import Batch, Prompt, Rollout, Segments
from lightrft.utils.errors import ConfigError
from lightrft.workers.scoring.collecting import batch_of
from lightrft.workers.scoring.model_scorer import ModelScorer, ScoringModel, scoring_models
from tests.model_helpers import byte_pairs

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>:\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>:\n{% endif %}"
)
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
]
START = "<|system|>:\nBe brief.<|im_end|><|user|>:\nWhat is 2 + 2?<|im_end|><|assistant|>:\n"
END = "<|im_end|>"
ANSWERS = ["four", "It is 4.", "<|im_end|> 5"]


@pytest.fixture(scope="module")
def policy() -> object:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of another family, vocabulary and template than the policy's."""
    path = tmp_path_factory.mktemp("llama")
    tokenizer = byte_pairs(["What is two and two? It is four."] * 3, 300)
    tokenizer.chat_template = TEMPLATE
    model = tiny_model("llama", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    RewardModel(model, ModelConfig(), RewardModelConfig(), seed=3).save(tokenizer, path)
    return path


def rollout(prompt: Prompt, text: str, reason: str = "stop") -> Rollout:
    # The tokens of the policy, which a model with tokens of its own never reads.
    ids = [4, 5]
    return Rollout(prompt, ids, [True] * 2, [0.0] * 2, [0] * 2, reason, seed=0, text=text)


def load(folder: Path, policy: object, **term: object) -> ScoringModel:
    terms = [ScoringModelConfig.model_validate({"path": str(folder), **term})]
    config = ModelConfig(path=str(folder), dtype="float32")
    (found,) = scoring_models(terms, config, policy, CPU)  # type: ignore[arg-type]
    assert isinstance(found, ScoringModel)
    return found


def plain_score(folder: Path, text: str) -> float:
    """Score of a rendered conversation, by transformers and the head alone."""
    model = RewardModel.open(folder)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        states = model.base.model(ids, use_cache=False).last_hidden_state
        return float(model.heads["preference"](states[0, -1:]).scores)


def test_scores_are_those_of_the_conversation_in_the_model_s_own_template(
    folder: Path, policy: object
) -> None:
    model = load(folder, policy)
    prompt = Prompt("0", [5, 6], "rendered", request=ASKED)
    rollouts = [rollout(prompt, text) for text in ANSWERS]
    found = model.scores(rollouts, batch_of(rollouts))
    for text, score in zip(ANSWERS[:2], found, strict=False):
        assert score == pytest.approx(plain_score(folder, START + text + END), abs=1e-6)
    # A special token that a response spells is plain text.
    assert found[2] != pytest.approx(plain_score(folder, START + ANSWERS[2] + END), abs=1e-6)
    assert len(set(found)) == 3


def test_a_special_token_that_the_policy_sampled_is_a_token_for_a_model_of_its_vocabulary(
    folder: Path,
) -> None:
    policy = load_tokenizer(ModelConfig(path=str(folder)))
    policy.chat_template = policy.chat_template.replace(":", "=")
    one = rollout(Prompt("0", [5, 6], request=ASKED), ANSWERS[2])
    (score,) = load(folder, policy).scores([one], batch_of([one]))
    assert score == pytest.approx(plain_score(folder, START + ANSWERS[2] + END), abs=1e-6)


def test_a_response_that_was_cut_has_no_end_token(folder: Path, policy: object) -> None:
    cut = rollout(Prompt("0", [5, 6], request=ASKED), "It is", reason="length")
    (score,) = load(folder, policy).scores([cut], batch_of([cut]))
    assert score == pytest.approx(plain_score(folder, START + "It is"), abs=1e-6)


def test_a_group_shares_its_prompt_and_scores_do_not_depend_on_the_rest(
    folder: Path, policy: object
) -> None:
    model = load(folder, policy)
    prompts = [Prompt("0", [5], request=ASKED), Prompt("1", [6], "plain words")]
    rollouts = [rollout(prompts[k % 2], f"answer {k}") for k in range(5)]
    assert model.own is not None
    batch, rows, problems = model.own.batch(rollouts)
    assert batch is not None and len(batch.prompts) == 2 and problems == {}
    assert rows == [0, 1, 2, 3, 4]
    together = model.scores(rollouts, batch_of(rollouts))
    alone = [model.scores([one], batch_of([one]))[0] for one in rollouts]
    assert together == pytest.approx(alone, abs=1e-6)


def test_a_response_that_the_model_cannot_read_fails_alone_and_is_counted(
    folder: Path, policy: object
) -> None:
    model = load(folder, policy)
    assert model.own is not None
    model = replace(model, own=replace(model.own, context=60))
    prompt = Prompt("7", [5, 6], request=ASKED)
    rollouts = [rollout(prompt, "four"), rollout(prompt, "4 " * 60), rollout(prompt, "")]
    scorer = ModelScorer(NullScorer(0.0), [model], CPU)
    scorer.score(rollouts)
    assert rollouts[0].reward is not None
    assert "which reads 60" in rollouts[1].failed and rollouts[1].reward is None
    assert "prompt 7" in rollouts[2].failed
    assert scorer.counts == {"scored": 3, "nonfinite": 0, "unanswered": 2}
    (only,) = model.scores(rollouts[1:2], batch_of(rollouts[1:2]))
    assert isinstance(only, str)


def test_the_setting_decides_and_the_same_tokens_and_template_are_not_rendered_again(
    folder: Path, policy: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"vocabulary differ.*leave out reward.models.0.reencode"):
        load(folder, policy, reencode=False)
    own = load_tokenizer(ModelConfig(path=str(folder)))
    assert load(folder, own).own is None
    assert load(folder, own, reencode=True).own is not None
    own.chat_template = TEMPLATE + " "
    assert load(folder, own).own is not None
    assert load(folder, own, reencode=False).own is None


def test_a_template_that_changes_the_prompt_once_a_response_follows_is_refused(
    folder: Path, policy: object, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    RewardModel.open(folder).save(tokenizer, tmp_path)
    with pytest.raises(ConfigError, match=r"reward.models.0.path.*chat template"):
        load(tmp_path, policy)


def test_pictures_are_read_by_the_model_s_own_processor_as_in_its_training(tmp_path: Path) -> None:
    Image.new("RGB", (24, 20), (250, 10, 90)).save(tmp_path / "a.png")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which colour?"}]
    asked = [{"role": "user", "content": parts}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": asked, "chosen": "red", "rejected": "It is blue."}))
    save_tiny_media("qwen2_5_vl", tmp_path / "policy", seed=1)
    save_tiny_media("smolvlm", tmp_path / "base", seed=2)
    base = ModelConfig(path=str(tmp_path / "base"))
    tokenizer = load_tokenizer(base)
    processor = load_processor(base, tokenizer)
    trained = RewardModel.load(base, RewardModelConfig(), seed=3)
    trained.save(tokenizer, tmp_path / "rm", processor)

    sources = {"sources": [{"path": str(rows)}]}
    policy = ModelConfig(path=str(tmp_path / "policy"))
    spoken = load_tokenizer(policy)
    reads = load_processor(policy, spoken)
    prompts = PromptDataset(build(DataConfig, sources), spoken, seed=0, processor=reads)
    examples = PreferenceDataset(
        build(PreferenceDataConfig, sources),
        tokenizer,
        kind="pair",
        max_tokens=512,
        seed=0,
        processor=processor,
    )
    (example,) = examples
    own = Prompt("", example.prompt_ids, media=example.prompt_media)
    ids = [response.token_ids for response in example.responses]
    batch = Batch(Segments.of_prompts([own]), Segments.of(ids), torch.tensor([0, 0]))
    expected = trained.score(batch)["preference"].scores.tolist()

    rollouts = [rollout(prompts[0], text) for text in ("red", "It is blue.")]
    found = load(tmp_path / "rm", spoken).scores(rollouts, batch_of(rollouts))
    assert found == pytest.approx(expected, abs=1e-6)
    assert abs(expected[0] - expected[1]) > 1e-4
