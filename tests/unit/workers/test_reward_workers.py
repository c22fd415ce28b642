"""Scoring in processes of their own: every rollout comes out once, whatever becomes of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from lightrft.config.base import build
from lightrft.config.reward import RewardConfig
from lightrft.rewards.scorer import Scorer
from lightrft.types import Attachment, Prompt, Ragged, Rollout
from lightrft.utils.errors import RewardError, WorkerError
from lightrft.workers.reward_workers import TRIES, RewardWorkerGroup, reward_scorer_worker
from lightrft.workers.worker_group import FaultPolicy
from tests.worker_helpers import ProcessWorker, time_out_after

LIMITS = FaultPolicy(restarts=4, call_timeout=600.0)
REWARD = """
import time

def length(rollout, seconds=0.0):
    time.sleep(seconds)
    if rollout.text == "bad":
        raise ValueError("no such answer")
    return {"reward": len(rollout.text), "seed": rollout.seed, "label": rollout.prompt.label}
"""


def config_of(folder: Path, seconds: float = 0.0) -> RewardConfig:
    (folder / "mine.py").write_text(REWARD)
    term = {
        "function": f"{folder / 'mine.py'}:length",
        "options": {"seconds": seconds},
        "weight": 0.5,
    }
    return build(RewardConfig, {"per_source": {"known": [term]}, "workers": 1, "timeout": 300.0})


def rollouts_of(count: int, first: int = 0) -> list[Rollout]:
    media = {"picture": Ragged(torch.zeros(3, 4), torch.tensor([3]))}
    prompts = [
        Prompt(
            f"p{i}",
            [1],
            label=i,
            data_source="known",
            media=media,
            attachments=(Attachment("a", b"x"),),
        )
        for i in range(3)
    ]
    texts = ["x" * (i % 7) if i % 5 else "bad" for i in range(first, first + count)]
    return [
        Rollout(prompts[i % 3], [1], [True], [0.0], [0], "stop", first + i, text=text)
        for i, text in enumerate(texts)
    ]


def told(rollouts: list[Rollout]) -> list[tuple[object, ...]]:
    return sorted((r.seed, r.reward, r.terms, r.weights, r.failed, id(r.prompt)) for r in rollouts)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[ProcessWorker]]:
    made = [
        ProcessWorker(f"scorer {i}", partial(reward_scorer_worker, config_of(tmp_path, 0.01)))
        for i in range(2)
    ]
    yield made
    for worker in made:
        worker.close()


def test_two_workers_score_as_one_process_does_and_failures_are_told(
    workers: list[ProcessWorker], tmp_path: Path
) -> None:
    prompts = rollouts_of(0)
    given, expected = rollouts_of(40), rollouts_of(40)
    for a, b in zip(given, expected, strict=True):
        b.prompt = a.prompt
    scorer = RewardWorkerGroup(workers, LIMITS)
    for rollout in given:
        scorer.submit(rollout)
    got = [next(scorer.results(wait=True))]  # a result that is left for later is not lost
    got += scorer.results(wait=True)
    assert len({id(r) for r in got} & {id(r) for r in given}) == 40 == len(got) and not prompts
    with Scorer(config_of(tmp_path)) as local:
        for rollout in expected:
            local.submit(rollout)
        assert told(got) == told(list(local.results(wait=True)))
    assert sum(bool(r.failed) for r in got) == 8 and all(r.prompt.media for r in got)
    assert scorer.pending == 0 and scorer.take_counts() == {"restarts": 0}


def test_several_ask_one_worker_and_each_gets_his_own(workers: list[ProcessWorker]) -> None:
    one, two = (RewardWorkerGroup(workers[:1], LIMITS) for _ in range(2))
    mine, theirs = rollouts_of(10), rollouts_of(10, first=100)
    for a, b in zip(mine, theirs, strict=True):
        one.submit(a)
        two.submit(b)
    assert {id(r) for r in two.results(wait=True)} == set(map(id, theirs))
    assert {id(r) for r in one.results(wait=True)} == set(map(id, mine))


def test_a_source_without_terms_is_refused(workers: list[ProcessWorker]) -> None:
    scorer = RewardWorkerGroup(workers, LIMITS)
    scorer.check_sources(["known"])
    with pytest.raises(RewardError, match="no reward for data source 'other'"):
        scorer.check_sources(["known", "other"])


def test_what_a_killed_worker_had_not_scored_is_scored_elsewhere_and_nothing_comes_twice(
    workers: list[ProcessWorker],
) -> None:
    scorer, given = RewardWorkerGroup(workers, LIMITS), rollouts_of(60)
    for rollout in given:
        scorer.submit(rollout)
    got: list[Rollout] = []
    for rollout in scorer.results(wait=True):
        got.append(rollout)
        if len(got) == 10:
            workers[0].signal(signal.SIGKILL)
    assert sorted(map(id, got)) == sorted(map(id, given))
    assert (
        all(r.reward == 0.5 * len(r.text) for r in got if not r.failed)
        and sum(bool(r.failed) for r in got) == 12
    )
    scorer.group.settle()
    assert workers[0].starts == 2 and scorer.take_counts() == {"restarts": 1}


def test_a_worker_that_falls_silent_is_ended_and_its_work_done_elsewhere(
    workers: list[ProcessWorker],
) -> None:
    scorer = RewardWorkerGroup(workers, LIMITS)
    scorer.check_sources(["known"])
    for worker in workers:
        worker.call("check_sources", ["known"]).result(300)
    time_out_after(5.0, scorer.group, workers[1])
    workers[1].signal(signal.SIGSTOP)
    given, began = rollouts_of(20), time.monotonic()
    for rollout in given:
        scorer.submit(rollout)
    assert sorted(map(id, scorer.results(wait=True))) == sorted(map(id, given))
    assert time.monotonic() - began < 300 and scorer.take_counts()["restarts"] >= 1


def test_a_rollout_that_takes_its_workers_with_it_comes_back_as_failed(
    workers: list[ProcessWorker],
) -> None:
    scorer = RewardWorkerGroup(workers[:1], LIMITS)
    scorer.check_sources(["known"])
    (rollout,) = rollouts_of(1, first=1)
    scorer.submit(rollout)
    for starts in range(2, 2 + TRIES):
        workers[0].signal(signal.SIGKILL)
        while workers[0].starts < starts:
            assert list(scorer.results()) in ([], [rollout])
            time.sleep(0.01)
        scorer.group.settle()
        list(scorer.results())  # it is given to the new one
    assert (
        rollout.failed.startswith(f"{TRIES} scoring workers were lost with it")
        and scorer.pending == 0
    )


def test_workers_that_cannot_live_end_the_run(workers: list[ProcessWorker]) -> None:
    scorer = RewardWorkerGroup(workers[:1], FaultPolicy(restarts=0))
    scorer.submit(*rollouts_of(1))
    workers[0].signal(signal.SIGKILL)
    with pytest.raises(WorkerError, match="scorer 0 was lost again"):
        list(scorer.results(wait=True))
