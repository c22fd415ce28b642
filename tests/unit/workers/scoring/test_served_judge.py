"""Judges behind HTTP: equal to local ones, and every failure is counted or refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM

from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig
from lightrft.datasets.judgement.chat_messages import chat_messages
from lightrft.datasets.row_tables import MalformedRow
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rewards.base import NullScorer
from lightrft.rewards.rules.verdicts import VerdictForm
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall, HTTPProblem
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError, ResourceError
from lightrft.utils.http_client import server_client
from lightrft.workers.scoring.decisive_token import JudgementTokens
from lightrft.workers.scoring.judge import Judge, LocalJudge, open_judges
from lightrft.workers.scoring.judge_scorer import JudgeScorer
from lightrft.workers.scoring.served_judge import ServedJudge, normalized
from tests.serving_helpers import answering, free_port, judge_server, skip_waits

CPU = torch.device("cpu")
CHARS = "AB01?x"
SHORT = {"verdict": "regex", "pattern": "([AB])[^AB]*$", "max_new_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judge")
    tokenizer = tiny_tokenizer(chars=CHARS)
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    model.save_pretrained(path)
    (path / "question.jinja").write_text(
        "{% for letter, response in responses %}{{ letter }}{{ response }}{% endfor %}?"
    )
    return path


def judge_of(folder: Path, **tree: Any) -> Judge:
    given = {**SHORT, "template": str(folder / "question.jinja"), **tree}
    given |= {} if "url" in tree else {"path": str(folder)}
    (found,) = open_judges(build(RewardConfig, {"judges": [given]}), ModelConfig(), CPU)
    return found


def rollouts(count: int = 3) -> list[Rollout]:
    prompt = Prompt("0", [5], "0", request=[{"role": "user", "content": "0?"}])
    texts = ("01", "1x", "110")[:count]
    return [
        Rollout(prompt, [4], [True], [0.0], [0], "stop", seed=k, text=text)
        for k, text in enumerate(texts)
    ]


def scored(judge: Judge, given: Sequence[Rollout]) -> JudgeScorer:
    scorer = JudgeScorer(NullScorer(0.0), [judge])
    for rollout in given:
        scorer.submit(rollout)
    assert len(list(scorer.results(wait=True))) == len(given)
    return scorer


@pytest.mark.parametrize("read", ["text", "probability", "after_reasons"])
def test_a_served_judge_gives_the_scores_of_the_local_one(folder, url, read):
    tree = {"read": read, "temperature": 0.0, "form": "pair"}
    local, served = rollouts(), rollouts()
    scored(judge_of(folder, **tree), local)
    counts = scored(judge_of(folder, url=url, **tree), served).take_counts()
    assert [one.failed for one in served] == [one.failed for one in local]
    assert [one.terms for one in served] == [pytest.approx(one.terms, rel=1e-5) for one in local]
    assert counts["judgements"] == 6 and not counts["unanswered"]
    if read == "probability":
        assert all(0 < one.terms["judge"] < 1 for one in served)


def test_scores_after_reasons_equal_a_plain_forward_pass_of_transformers(folder):
    tree = {"read": "after_reasons", "samples": 4, "max_tokens_per_micro_batch": 40}
    judge = judge_of(folder, **tree)
    assert isinstance(judge, LocalJudge)
    judge.actor.double()
    form = VerdictForm("pair", "regex", "AB", pattern=SHORT["pattern"])
    questions, seeds = ["A0B1?"] * 12, list(range(12))
    found = judge.reasoned(questions, seeds, [form] * 12)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = tiny_tokenizer(chars=CHARS)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "AB"]
    parsed = 0
    for rollout, row in zip(judge.sampled(questions, seeds), found, strict=True):
        said = [k for k, id in enumerate(rollout.token_ids) if id in letters]
        if not said:
            assert row is None
            continue
        tokens = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids[: said[-1]]]])
        expected = plain(tokens).logits[0, -1, letters].softmax(-1).tolist()
        assert row == pytest.approx(expected, rel=1e-9)
        parsed += 1
    assert parsed >= 4
    # reasons change the probabilities
    assert len({round(row[0], 9) for row in found if row}) > 1


def test_an_offloaded_judge_is_on_its_device_only_while_it_judges(folder):
    judge = judge_of(folder, offload=True)
    assert isinstance(judge, LocalJudge)
    places: list[str] = []
    judge.actor.to = lambda place: places.append(str(place))  # ty: ignore[invalid-assignment]
    judge.device = torch.device("meta")
    scored(judge, rollouts())
    assert places == ["meta", "cpu"]


def test_the_token_that_decides_is_found_in_every_place_of_a_verdict():
    tokenizer = tiny_tokenizer()

    def place(text: str, form: VerdictForm) -> tuple[int, str] | None:
        tokens = JudgementTokens(tokenizer, tokenizer(text)["input_ids"])
        k = tokens.decisive(form)
        return None if k is None else (k, tokens.texts[k])

    for verdict, text in (
        ("answer", "A is worse: <answer>B</answer>."),
        ("boxed", "B is A, or \\boxed{B}"),
        ("brackets", "[[A]] no, [[B]] A"),
        ("json", 'A {"verdict": "B"}'),
    ):
        found = place(text, VerdictForm("pair", verdict, "AB"))
        assert found is not None and found[1] == "B"
    assert place("<answer>A or B</answer>", VerdictForm("pair", "answer", "AB")) is None
    rating = VerdictForm("rating", "number", low=1, high=5)
    assert place("of 2 it has 4", rating) == (len("of 2 it has "), "4")
    # a number of several tokens has no token that decides it
    assert place("it has 3.5", rating) is None


def test_likely_tokens_without_a_verdict_are_no_verdict_and_missing_ones_have_probability_0():
    def token(**logprobs: float) -> dict[str, Any]:
        rows = [{"token": text, "logprob": value} for text, value in logprobs.items()]
        return {**rows[0], "top_logprobs": rows}

    assert normalized(token(x=-1.0, y=-2.0), ["A", "B"]) is None
    assert normalized(token(A=-1.0, y=-2.0), ["A", "B"]) == [1.0, 0.0]
    found = normalized(token(B=-1.0, A=-1.0 - math.log(3)), ["A", "B"])
    assert found == pytest.approx([0.25, 0.75])


class Chat:
    """A server that answers each request by the next of ``answers``, then by a verdict."""

    def __init__(self, *answers: Any, **entry: Any) -> None:
        self.answers = list(answers)
        self.entry = {"id": "m", **entry}
        self.bodies: list[Any] = []

    async def models(self, call: HTTPCall) -> Any:
        return {"data": [self.entry]}

    async def complete(self, call: HTTPCall) -> Any:
        self.bodies.append(call.body)
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, int):
            raise HTTPProblem(answer, "not now", {"Retry-After": "0"})
        choice = {"message": {"role": "assistant", "content": "A"}}
        return {"model": "m", "choices": [choice], **answer}

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(("/v1/models",), self.models, "GET"),
            Endpoint(("/v1/chat/completions",), self.complete),
        ]


def test_requests_are_repeated_and_after_the_deadline_counted_as_unanswered(folder, monkeypatch):
    skip_waits(monkeypatch)
    chat = Chat(500, 429, 503)
    with answering(*chat.endpoints()) as (url, _):
        given = rollouts(2)
        counts = scored(judge_of(folder, url=url), given).take_counts()
        assert [one.terms["judge"] for one in given] == [0.5, 0.5]
        assert counts["unanswered"] == 0 and len(chat.bodies) == 5
        chat.answers = [503] * 1000
        given = rollouts(2)
        counts = scored(judge_of(folder, url=url), given).take_counts()
        assert counts == {"judgements": 2, "unparsed": 0, "partial": 0, "unanswered": 2}
        assert all("deadline = 600 s" in one.failed for one in given)
        assert [one.reward for one in given] == [None, None]


def test_another_model_key_or_no_server_is_refused_and_a_replaced_one_stops(folder, monkeypatch):
    chat = Chat({"model": "other"}, {"model": "m-2026-01-01"}, digest="sha256:" + "1" * 20)
    with answering(*chat.endpoints()) as (url, _):
        for tree, said in (
            ({"served_model": "n"}, "serves m"),
            ({"digest": "sha256:" + "2" * 12}, "digest"),
            ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env = 'NO_SUCH_KEY'"),
        ):
            with pytest.raises(ConfigError, match=said):
                judge_of(folder, url=url, **tree)
        with pytest.raises(ConfigError, match="replaced its model"):
            scored(judge_of(folder, url=url), rollouts(2))
        # the name is right, and the digest is missing
        with pytest.raises(ConfigError, match="replaced its model"):
            scored(judge_of(folder, url=url), rollouts(2))
    with pytest.raises(ResourceError, match=r"reward\.judges\.0\.url"):
        judge_of(folder, url=f"http://127.0.0.1:{free_port()}", deadline=0.2)


def test_the_key_of_the_environment_is_sent_and_seeds_are_those_of_the_responses(
    folder, tmp_path, monkeypatch
):
    (tmp_path / "tokens").write_text("secret\n")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    chat = Chat()
    with answering(*chat.endpoints(), token_file=str(tmp_path / "tokens")) as (url, _):
        judge = judge_of(folder, url=f"{url}/v1", api_key_env="JUDGE_KEY", samples=2)
        scored(judge, rollouts(2))
        scored(judge, rollouts(2))
        seeds = [
            sorted(body["seed"] for body in part) for part in (chat.bodies[:4], chat.bodies[4:])
        ]
        assert seeds[0] == seeds[1] and len(set(seeds[0])) == 4
        assert "secret" not in repr(chat.bodies)
        skip_waits(monkeypatch)
        with pytest.raises(ResourceError, match="401"):
            judge_of(folder, url=url)


def test_media_are_sent_as_base64_and_what_cannot_be_sent_fails_its_responses(folder, tmp_path):
    Image.new("RGB", (2, 2), "red").save(tmp_path / "red.png")
    sound = {"array": np.array([0.0, 0.5], dtype=np.float32), "sampling_rate": 16000}
    content = [
        {"type": "image", "image": str(tmp_path / "red.png")},
        {"type": "text", "text": "?"},
        {"type": "audio", "audio": sound},
        {"type": "image", "image": "https://a.b/c.png"},
    ]
    ((message),) = chat_messages([{"role": "user", "content": content}])
    image, text, audio, link = message["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text == {"type": "text", "text": "?"}
    assert audio["input_audio"]["format"] == "wav"
    assert audio["input_audio"]["data"].startswith("UklGR")
    assert link["image_url"]["url"] == "https://a.b/c.png"
    with pytest.raises(MalformedRow, match="cannot be sent"):
        chat_messages(
            [{"role": "user", "content": [{"type": "video", "video": np.zeros((2, 2, 2, 3))}]}]
        )
    shouted = [{"type": "image", "image": f"DATA:{image['image_url']['url'][5:]}"}]
    (sent,) = chat_messages([{"role": "user", "content": shouted}])[0]["content"]
    assert sent["image_url"]["url"] == shouted[0]["image"]
    cut = [{"type": "video", "video": "c.mp4", "video_start": 1.0}]
    with pytest.raises(MalformedRow, match="a judge gets whole files"):
        chat_messages([{"role": "user", "content": cut}])
    chat = Chat()
    with answering(*chat.endpoints()) as (url, _):
        judge = judge_of(folder, url=url)
        assert isinstance(judge, ServedJudge)
        missing = [{"role": "user", "content": [{"type": "image", "image": "/no/such.png"}]}]
        (found,) = judge.write([missing], [1])
        assert isinstance(found, server_client.Unanswered) and "such.png" in str(found)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "set one of them"),
        ({"path": "x", "url": "http://y"}, "set one of them"),
        ({"path": "http://y"}, "set url to it"),
        ({"path": "x", "api_key_env": "KEY"}, "api_key_env"),
        ({"url": "http://y", "offload": True}, "offload"),
        ({"url": "http://y", "top_logprobs": 5}, "top_logprobs"),
        ({"path": "x", "read": "after_reasons", "vote": "majority"}, "vote"),
        ({"path": "x", "read": "after_reasons", "form": "rubric"}, "one token"),
    ],
)
def test_settings_of_a_served_judge_that_do_not_fit_are_refused(tree, said):
    with pytest.raises(ConfigError, match=said):
        build(RewardConfig, {"judges": [tree]})


def test_a_reward_model_with_heads_is_no_judge(folder):
    with answering(*Chat(heads=["good"]).endpoints()) as (url, _):
        with pytest.raises(ConfigError, match=r"reward\.models"):
            judge_of(folder, url=url)
        assert httpx.get(f"{url}/v1/models").status_code == 200


def test_a_served_judge_sees_the_image_that_the_local_one_sees(tmp_path):
    save_tiny_media("qwen2_vl", tmp_path / "model", hidden_size=32)
    said = []
    with judge_server(tmp_path / "model") as (url, _):
        local = {"path": str(tmp_path / "model")}
        for place in (local, {"url": url}):
            tree = {**place, "temperature": 0.0, "max_new_tokens": 6}
            config = ModelConfig(dtype="float32")
            (judge,) = open_judges(build(RewardConfig, {"judges": [tree]}), config, CPU)
            found = []
            for color in ("red", "blue"):
                Image.new("RGB", (28, 56), color).save(tmp_path / f"{color}.png")
                content = [
                    {"type": "image", "image": str(tmp_path / f"{color}.png")},
                    {"type": "text", "text": "?"},
                ]
                found += judge.write([[{"role": "user", "content": content}]], [1])
            said.append(found)
    assert said[0] == said[1]
    # the image decides
    assert said[0][0] != said[0][1]
