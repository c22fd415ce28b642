"""A served reward model as a term of the reward: repetitions, deadlines and checks at start."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.rewards.base import NullScorer
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall, HTTPProblem
from lightrft.types import Batch, Prompt, Ragged, Rollout, Segments
from lightrft.utils.errors import ConfigError, DataError, ResourceError
from lightrft.utils.http_client.server_client import CircuitBreaker
from lightrft.workers.scoring.model_scorer import ModelScorer, scoring_models
from lightrft.workers.scoring.reward_wire import batch_from_json, batch_to_json, vocabulary_digest
from tests.serving_helpers import answering, free_port, judge_at, save_judge, skip_waits

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


def term_of(folder: Path, **tree: Any) -> Any:
    config = ModelConfig(path=str(folder), dtype="float32")
    term = build(ScoringModelConfig, tree)
    return scoring_models([term], config, load_tokenizer(config), CPU)[0]


def batch(rows: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(4, 40, (3 + k,), generator=generator).tolist() for k in range(rows)]
    return Batch(
        Segments.of([[5, 6, 7], [8, 9]]), Segments.of(responses), torch.arange(rows).remainder(2)
    )


@pytest.mark.parametrize("budget", [16384, 14, 1])
def test_served_scores_equal_local_ones_bit_for_bit(folder, url, budget):
    local = term_of(folder, path=str(folder), max_tokens_per_micro_batch=budget)
    served = term_of(folder, url=url, max_tokens_per_micro_batch=budget)
    assert served.scores([], batch()) == local.scores([], batch())
    assert (served.name, served.client.counts["unanswered"]) == ("good", 0)


def test_another_digest_vocabulary_head_or_no_server_is_refused_at_start(folder, url):
    digest = term_of(folder, url=url).digest
    assert term_of(folder, url=url, digest=digest[:19]).digest == digest
    for wrong in (digest[:18], "sha256:" + "0" * 64):
        with pytest.raises(ConfigError, match=rf"serves the model.*{digest}.*\.digest"):
            term_of(folder, url=url, digest=wrong)
    with pytest.raises(ConfigError, match=r"reward\.models\.0\.head = 'truth'.*good, short"):
        term_of(folder, url=url, head="truth")
    term = ScoringModelConfig(url=url, reencode=False)
    with pytest.raises(ConfigError, match=r"another vocabulary.*models.0.reencode = false"):
        scoring_models([term], ModelConfig(), tiny_tokenizer(chars="ab"), CPU)
    with pytest.raises(ResourceError, match=r"deadline = 0\.2 s.*lightrft serve-rm"):
        term_of(folder, url=f"http://127.0.0.1:{free_port()}", deadline=0.2)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "set one of them"),
        ({"path": "a", "url": "http://b"}, "set one of them"),
        ({"path": "http://b"}, "set url to it"),
        ({"url": "judge:8000"}, "must begin with http"),
        ({"path": "a", "deadline": 3}, "leave them out"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tree, said):
    with pytest.raises(ConfigError, match=said):
        build(ScoringModelConfig, tree)


class Judge:
    """A server that answers each trial of a request by the next of ``statuses``, then by scores."""

    def __init__(self, vocabulary: str, *statuses: int | str) -> None:
        self.vocabulary = vocabulary
        self.statuses = list(statuses)
        self.scores: list[Any] | None = None
        self.digest = "sha256:1"
        self.ids: list[str] = []

    async def models(self, call: HTTPCall) -> Any:
        about = {"id": "m", "digest": "sha256:1", "vocabulary": self.vocabulary, "heads": ["good"]}
        return {"data": [{**about, "reward": "good", "layout": "packed"}]}

    async def rewards(self, call: HTTPCall) -> Any:
        self.ids.append(call.id)
        if self.statuses:
            status = self.statuses.pop(0)
            if status == "replaced":
                self.digest = "sha256:2"
            else:
                raise HTTPProblem(int(status), "not now", {"Retry-After": "0"})
        count = len(call.body["prompt_of"])
        scores = {"good": self.scores or [0.5] * count}
        return {"scores": scores, "digest": self.digest}

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(("/v1/models",), self.models, "GET"),
            Endpoint(("/v1/rewards",), self.rewards),
        ]


def judged(folder: Path, *statuses: int | str) -> Judge:
    return Judge(vocabulary_digest(load_tokenizer(ModelConfig(path=str(folder)))), *statuses)


def test_a_request_that_fails_is_repeated_with_the_same_id(folder):
    judge = judged(folder, 500, 429, 503, 401)
    with answering(*judge.endpoints()) as (url, _):
        served = term_of(folder, url=url)
        assert served.scores([], batch(2)) == [0.5, 0.5]
        assert len(judge.ids) == 5 and len(set(judge.ids)) == 1 and judge.ids[0]
        served.scores([], batch(2))
        assert len(set(judge.ids)) == 2 and served.client.counts == {"requests": 2, "retries": 4}


def test_after_the_deadline_the_samples_fail_and_are_counted_and_never_get_0(folder, monkeypatch):
    skip_waits(monkeypatch)
    judge = judged(folder, *[503] * 1000)
    with answering(*judge.endpoints()) as (url, _):
        scorer = ModelScorer(NullScorer(0.0), [term_of(folder, url=url)], CPU)
        prompt = Prompt("0", [5, 6])
        for _ in range(3):
            scorer.submit(Rollout(prompt, [4], [True], [0.0], [0], "stop", seed=0))
        found = list(scorer.results(wait=True))
        assert 1 < len(judge.ids) <= 600 / 10
        assert [one.reward for one in found] == [None] * 3
        assert all("deadline = 600 s: status 503" in one.failed for one in found)
        assert scorer.counts == {"scored": 3, "nonfinite": 0, "unanswered": 3}


def test_a_refusal_fails_its_samples_at_once_and_a_replaced_model_stops_the_run(folder):
    judge = judged(folder, 400, "replaced")
    with answering(*judge.endpoints()) as (url, _):
        served = term_of(folder, url=url)
        assert "refused the request: status 400" in str(served.scores([], batch(2))[0])
        assert len(judge.ids) == 1
        with pytest.raises(ConfigError, match="replaced its model"):
            served.scores([], batch(2))


def test_scores_that_are_no_numbers_or_too_few_fail_their_samples(folder):
    judge = judged(folder)
    with answering(*judge.endpoints()) as (url, _):
        served = term_of(folder, url=url)
        judge.scores = [None, 2.0]
        first, second = served.scores([], batch(2))
        assert math.isnan(first) and second == 2.0
        judge.scores = [1.0]
        assert "no score of 'good'" in str(served.scores([], batch(2))[1])


def test_a_dead_server_is_tried_by_one_request_at_a_time_and_given_up_after_the_deadline(
    folder, monkeypatch
):
    judge = judged(folder)
    with answering(*judge.endpoints()) as (url, _):
        served = term_of(folder, url=url, max_in_flight=4)
    served.term = served.term.model_copy(update={"max_tokens_per_micro_batch": 1})
    skip_waits(monkeypatch)
    [client] = served.client.clients
    breaker, enter, request = client.breaker, client.breaker.enter, client._client.request
    here, trials, trying = threading.local(), [], []

    def entered(deadline: float) -> bool:
        with breaker._changed:
            found = enter(deadline)
            here.is_held = breaker.holds  # it is the one that tries the server
        return found

    def tried(*args: Any, **options: Any) -> Any:
        trying.append(here.is_held)
        trials.append(sum(trying))
        try:
            return request(*args, **options)
        finally:
            trying.remove(here.is_held)

    monkeypatch.setattr(breaker, "enter", entered)
    monkeypatch.setattr(client._client, "request", tried)
    assert all(isinstance(score, str) for score in served.scores([], batch(8)))
    # Four requests wait for it at once, and then the other four.
    assert 3 < len(trials) <= 8 + 2 * 600 / 10 and max(trials) == 1
    trials.clear()
    # They have waited for it before: each is tried once at most.
    assert all(isinstance(score, str) for score in served.scores([], batch(8)))
    assert len(trials) <= 8
    assert served.client.counts["unanswered"] == 16


def test_a_breaker_holds_requests_back_until_a_trial_succeeds():
    breaker = CircuitBreaker(after=2, pause=300.0)
    now = time.monotonic
    far = now() + 900
    breaker.failed("silent")
    assert breaker.enter(far) and breaker.enter(far)
    breaker.failed("silent")
    assert not breaker.enter(now())  # open
    breaker.pause, start = 0.3, now()
    breaker.failed("silent")
    assert breaker.enter(far) and now() - start >= 0.3  # the trial
    assert not breaker.enter(now() + 0.15)  # a second one has to wait for it
    breaker.failed("silent")
    assert breaker.silent_for > 0 and breaker.problem == "silent"
    assert breaker.enter(far)
    breaker.succeeded()
    assert breaker.silent_for == 0 and breaker.enter(now()) and breaker.enter(far)


def test_only_the_request_that_tries_the_server_lets_the_next_one_try_it():
    breaker, far = CircuitBreaker(after=1, pause=0.0), time.monotonic() + 900
    breaker.failed("silent")
    assert breaker.enter(far) and not breaker.is_ready
    before = threading.Thread(target=breaker.failed, args=("silent",))  # it began earlier
    before.start()
    before.join()
    assert not breaker.is_ready and not breaker.enter(time.monotonic())
    breaker.ended()  # no answer, and no failure: the next one tries it
    assert breaker.is_ready and breaker.holds
    assert breaker.enter(far) and not breaker.is_ready


def test_a_token_is_read_for_each_request_and_requests_at_once_are_limited(folder, tmp_path):
    file = tmp_path / "token"
    file.write_text("one\n")
    with judge_at(folder, together=2) as (url, seen):
        served = term_of(
            folder, url=url, token_file=str(file), max_in_flight=2, max_tokens_per_micro_batch=1
        )
        file.write_text("two\n")
        served.scores([], batch(6))
        assert seen.tokens == {"Bearer one", "Bearer two"} and seen.most == 2
        file.write_text("")
        with pytest.raises(ConfigError, match=r"token_file.*is empty"):
            served.scores([], batch(1))


def test_a_batch_with_media_survives_the_wire_and_a_damaged_one_is_refused():
    values = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    media = {"pixel_values": Ragged(values, torch.tensor([3, 1]))}
    sent = Batch(
        Segments.of([[1, 2], [3]], media), Segments.of([[4], [5, 6]]), torch.tensor([1, 0])
    )
    tree = batch_to_json(sent)
    got = batch_from_json(tree, 10)
    assert torch.equal(got.prompts.media["pixel_values"].values, values)
    assert got.prompts.sizes == [2, 1] and got.responses.tokens.tolist() == [4, 5, 6]
    assert got.prompt_of.tolist() == [1, 0]
    part = tree["prompts"]
    for damaged in (part["media"][:-8], "%%%", part["media"][:40]):
        with pytest.raises(DataError, match="truncated"):
            batch_from_json({**tree, "prompts": {**part, "media": damaged}}, 10)
    with pytest.raises(DataError, match="lengths of 'pixel_values'"):
        batch_from_json({**tree, "prompts": {**part, "input_ids": [[1], [2], [3]]}}, 10)
    with pytest.raises(DataError, match="from 0 to 3"):
        batch_from_json(tree, 4)


@pytest.mark.parametrize("sent", ["0.5", True, [0.5], {}, 10**400, 1e200])
def test_a_score_of_another_type_or_size_fails_its_sample_alone(folder, sent):
    judge = judged(folder)
    with answering(*judge.endpoints()) as (url, _):
        served = term_of(folder, url=url)
        judge.scores = [sent, 2.0]
        first, second = served.scores([], batch(2))
        assert isinstance(first, str) and "the server sent" in first and second == 2.0
