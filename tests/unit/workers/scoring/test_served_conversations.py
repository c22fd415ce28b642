"""A served reward model of another tokenizer, template or family than the policy's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rewards.base import NullScorer
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall
from lightrft.serving.reward_service import RewardService
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.workers.scoring.collecting import batch_of
from lightrft.workers.scoring.model_scorer import ModelScorer, scoring_models
from lightrft.workers.scoring.reward_wire import template_digest, vocabulary_digest
from tests.model_helpers import byte_pairs
from tests.serving_helpers import answering, judge_server
from tests.unit.datasets.media_files import picture

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>:\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>:\n{% endif %}"
)
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
]


@pytest.fixture(scope="module")
def policy() -> Any:
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


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with judge_server(folder, batching={"wait_ms": 0}) as (url, _):
        yield url


def term_of(tokenizer: Any, **tree: Any) -> Any:
    term = build(ScoringModelConfig, tree)
    return scoring_models([term], ModelConfig(dtype="float32"), tokenizer, CPU)[0]


def rollout(prompt: Prompt, text: str, reason: str = "stop", size: int = 2) -> Rollout:
    """A response in tokens of the policy, which the served model never reads."""
    own = [4 + k % 9 for k in range(size)]
    sampled, zeros = [True] * size, [0.0] * size
    return Rollout(prompt, own, sampled, zeros, [0] * size, reason, seed=0, text=text)


def rollouts() -> list[Rollout]:
    prompts = [Prompt("0", [5, 6], "rendered", request=ASKED), Prompt("1", [7], "plain words")]
    texts = ("four", "It is 4.", "<|im_end|> 5", "4, I say", "a longer answer", "x")
    reasons = ("stop", "length", "stop", "stop", "length", "stop")
    rows = enumerate(zip(texts, reasons))
    return [rollout(prompts[k % 2], text, reason, 2 + k) for k, (text, reason) in rows]


@pytest.mark.parametrize("budget", [16384, 12, 1])
def test_served_scores_equal_those_of_the_same_model_in_the_process(folder, url, policy, budget):
    ours = rollouts()
    local = term_of(policy, path=str(folder), max_tokens_per_micro_batch=budget)
    served = term_of(policy, url=url, max_tokens_per_micro_batch=budget)
    assert served.reencodes
    expected, found = (model.scores(ours, batch_of(ours)) for model in (local, served))
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(set(found)) == 6
    assert served.client.counts["unanswered"] == 0


def test_a_response_that_cannot_be_read_fails_alone_as_in_the_process(folder, policy):
    prompt = Prompt("7", [5, 6], request=ASKED)
    ours = [rollout(prompt, "four"), rollout(prompt, "4 " * 60), rollout(prompt, "")]
    with judge_server(folder) as (url, server):
        service = server.service
        assert isinstance(service, RewardService)
        service.context = 60
        model = term_of(policy, url=url)
        scorer = ModelScorer(NullScorer(0.0), [model], CPU)
        scorer.score(ours)
    assert ours[0].reward is not None
    assert "prompt 7: 176 tokens" in ours[1].failed and "context of 60" in ours[1].failed
    assert "prompt 7" in ours[2].failed and ours[2].reward is None
    assert scorer.counts == {"scored": 3, "nonfinite": 0, "unanswered": 2}


def test_scores_that_are_not_finite_are_told_from_those_that_have_a_reason(folder, policy):
    with judge_server(folder) as (url, server):
        service = server.service
        assert isinstance(service, RewardService)
        with torch.no_grad():
            service.model.heads["preference"].layers.weight.fill_(math.nan)  # ty: ignore[unresolved-attribute]
        ours = rollouts()[:2]
        found = term_of(policy, url=url).scores(ours, batch_of(ours))
    assert all(isinstance(score, float) and math.isnan(score) for score in found)


def test_the_tokens_of_the_policy_are_sent_where_they_are_the_model_s(folder, url, policy):
    own = load_tokenizer(ModelConfig(path=str(folder)))
    assert not term_of(own, url=url).reencodes
    assert term_of(own, url=url, reencode=True).reencodes
    own.chat_template = TEMPLATE + " "
    assert term_of(own, url=url).reencodes
    assert not term_of(own, url=url, reencode=False).reencodes
    with pytest.raises(
        ConfigError, match=r"another vocabulary.*leave out reward.models.0.reencode"
    ):
        term_of(policy, url=url, reencode=False)


def test_a_template_that_cannot_render_responses_is_refused_at_start(folder, policy, tmp_path):
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    RewardModel.open(folder).save(tokenizer, tmp_path)
    with judge_server(tmp_path) as (url, _):
        with pytest.raises(ConfigError, match=r"reward.models.0.url.*chat template"):
            term_of(policy, url=url)
        # its tokens can be read
        assert not term_of(tokenizer, url=url).reencodes


def test_a_server_that_reads_token_ids_alone_is_refused_for_another_vocabulary(policy):
    async def models(call: HTTPCall) -> Any:
        about = {"id": "m", "digest": "sha256:1", "vocabulary": "sha256:2", "heads": ["good"]}
        return {"data": [{**about, "reward": "good", "layout": "packed"}]}

    said = pytest.raises(ConfigError, match=r"reads token ids alone.*upgrade the server")
    with answering(Endpoint(("/v1/models",), models, "GET")) as (url, _), said:
        term_of(policy, url=url)


def test_the_server_says_which_tokenizer_and_template_it_has(folder, url):
    entry = httpx.get(f"{url}/v1/models").json()["data"][0]
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert entry["vocabulary"] == vocabulary_digest(tokenizer)
    assert entry["template"] == template_digest(tokenizer) != ""
    assert entry["template_problem"] == ""
    tokenizer.chat_template = None
    assert template_digest(tokenizer) == ""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"conversations": [["a"]], "answers": []}, "lists of messages"),
        ({"conversations": [[{"role": "user"}]]}, "a role and a content"),
        ({"conversations": []}, "'conversations' is empty"),
        ({"conversations": [ASKED], "answers": []}, "one or more objects"),
        ({"conversations": [ASKED], "answers": [{"text": "a", "cut": 0}]}, "cut: true or false"),
        (
            {"conversations": [ASKED], "answers": [{"text": "a", "cut": True}], "prompt_of": [1]},
            "one of the 1 conversations",
        ),
        (
            {"conversations": [ASKED], "answers": [{"text": "a", "cut": True}], "prompt_of": []},
            "for each of the 1 answers",
        ),
    ],
)
def test_malformed_conversations_are_refused_with_the_field(url, body, said):
    answer = httpx.post(f"{url}/v1/rewards", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_pictures_are_sent_and_read_by_the_served_model_s_own_processor(tmp_path):
    save_tiny_media("qwen2_5_vl", tmp_path / "policy", seed=1)
    save_tiny_media("smolvlm", tmp_path / "base", seed=2)
    base = ModelConfig(path=str(tmp_path / "base"))
    tokenizer = load_tokenizer(base)
    model = RewardModel.load(base, RewardModelConfig(), seed=3)
    model.save(tokenizer, tmp_path / "rm", load_processor(base, tokenizer))
    policy = load_tokenizer(ModelConfig(path=str(tmp_path / "policy")))
    file = tmp_path / "a.png"
    picture(file, 24, 20)

    def asked(image: object) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "Which colour?"}]
        return [{"role": "user", "content": parts}]

    prompts = [
        Prompt("file", [5], request=asked(str(file))),
        Prompt("pixels", [5], request=asked(Image.new("RGB", (30, 20), (250, 10, 90)))),
    ]
    ours = [rollout(prompt, text) for prompt in prompts for text in ("red", "It is blue.")]
    gone = rollout(Prompt("gone", [5], request=asked(str(tmp_path / "none.png"))), "red")
    local = term_of(policy, path=str(tmp_path / "rm"))
    expected = local.scores(ours, batch_of(ours))
    with judge_server(tmp_path / "rm") as (url, _):
        served = term_of(policy, url=url)
        *found, problem = served.scores([*ours, gone], batch_of([*ours, gone]))
    assert found == pytest.approx(expected, abs=1e-6)
    assert len({round(score, 5) for score in found}) == 4
    assert "prompt gone" in problem and "none.png" in problem
