"""Rewards are tried on real rows with made-up responses, before anything is trained."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import pytest

from lightrft.config.reward import RewardConfig
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.rewards.registry import load_reward
from lightrft.rewards.startup_check import check_rewards, made_up, spread, tried
from lightrft.types import Prompt
from lightrft.utils.errors import RewardError

REWARDS = """
import faulthandler
import sys
import time


def raises(rollout):
    return divide(rollout)


def divide(rollout):
    return 1 / 0


def note():
    with open(__file__ + ".calls", "a") as file:
        file.write("call\\n")


def overdue():
    # As if the deadline, which is far, were over.
    frame = sys._getframe()
    while "told" not in frame.f_locals:
        frame = frame.f_back
    faulthandler.dump_traceback_later(0.05, exit=True, file=frame.f_locals["told"])


def hangs(rollout):
    note()
    overdue(), [time.sleep(0.01) for _ in iter(int, 1)]


def hangs_in_c(rollout):
    note()
    overdue(), time.sleep(1000)


def a_word(rollout):
    return "good"


def not_of_nothing(rollout):
    if not rollout.text:
        raise ValueError("nothing to score")
    return 1.0


def too_few(rollouts):
    return [1.0] * 3


async def awaited(rollout):
    return 1.0


def batched(rollouts):
    return [float(len(r.text)) for r in rollouts]


def named(rollout):
    return {"score": 1.0, "acc": float("boxed" in rollout.text)}


def exits(rollout):
    import os

    os._exit(3)


def leaves_a_child(rollout):
    import subprocess

    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return float(child.pid)


def slow(rollout):
    note()
    # As if the call took two thirds of the deadline.
    now = time.monotonic
    time.monotonic = lambda: now() + 200
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


TOKENIZER = tiny_tokenizer()
PROMPTS = [Prompt(str(i), [1], f"{i}+1=", label=str(i + 1)) for i in range(25)]


def calls_of(file: Path) -> Path:
    """Return where the rewards of ``file`` note that they were called."""
    return file.with_name(f"{file.name}.calls")


def line_of(text: str) -> int:
    return REWARDS.splitlines().index(text) + 1


@pytest.mark.parametrize(
    ("name", "said", "line"),
    [
        ("raises", "raised ZeroDivisionError: division by zero", "    return 1 / 0"),
        (
            "hangs",
            "took longer than reward.timeout = 300 s",
            "    overdue(), [time.sleep(0.01) for _ in iter(int, 1)]",
        ),
        (
            "hangs_in_c",
            "took longer than reward.timeout = 300 s",
            "    overdue(), time.sleep(1000)",
        ),
        ("a_word", "returned str, not a number", "def a_word(rollout):"),
        ("too_few", "returned 3 values for 10 rollouts", "def too_few(rollouts):"),
    ],
)
def test_a_reward_that_cannot_score_is_refused_with_its_own_file_and_line(
    file, name, said, line
) -> None:
    called = calls_of(file)
    called.unlink(missing_ok=True)
    with pytest.raises(RewardError) as raised:
        check_rewards(RewardConfig(terms=[f"{file}:{name}"], timeout=300), PROMPTS, TOKENIZER)
    assert said in str(raised.value)
    assert f'File "{file}", line {line_of(line)}' in str(raised.value)
    assert "lightrft/trainer" not in str(raised.value)
    if name.startswith("hangs"):
        assert called.read_text() == "call\n", (
            "a hanging reward costs one deadline, not one for each row"
        )


def test_a_reward_that_ends_its_process_is_refused(file) -> None:
    with pytest.raises(RewardError, match=r"ended its process \(status 3\)"):
        check_rewards(RewardConfig(terms=[f"{file}:exits"]), PROMPTS, TOKENIZER)


def test_a_reward_that_fails_on_some_responses_is_warned_of(file, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        check_rewards(RewardConfig(terms=[f"{file}:not_of_nothing"]), PROMPTS, TOKENIZER)
    (record,) = caplog.records
    assert "failed on 3 of 10 made-up responses" in record.message
    assert "raised ValueError: nothing to score" in record.message and str(file) in record.message


@pytest.mark.parametrize("name", ["awaited", "batched"])
def test_a_reward_of_any_form_that_scores_passes_in_silence(file, caplog, name) -> None:
    check_rewards(RewardConfig(terms=[f"{file}:{name}"]), PROMPTS, TOKENIZER)
    assert not caplog.records


def test_a_success_that_no_call_gives_is_refused_before_anything_is_generated(file) -> None:
    reward = RewardConfig(terms=[f"{file}:named"], success="named/accuracy")
    with pytest.raises(RewardError, match=r"reward\.success = 'named/accuracy'.*named, named/acc"):
        check_rewards(reward, PROMPTS, TOKENIZER)


@pytest.mark.parametrize("success", ["named", "named/acc"])
def test_a_success_that_calls_give_passes_in_silence(file, caplog, success) -> None:
    check_rewards(RewardConfig(terms=[f"{file}:named"], success=success), PROMPTS, TOKENIZER)
    assert not caplog.records


def test_a_slow_reward_is_tried_for_one_deadline_at_most(file) -> None:
    called = calls_of(file)
    called.unlink(missing_ok=True)
    check_rewards(RewardConfig(terms=[f"{file}:slow"], timeout=300), PROMPTS, TOKENIZER)
    # The second of ten calls ends after the deadline.
    assert called.read_text().splitlines() == ["call"] * 2


def test_what_a_reward_has_started_ends_with_its_trial(file) -> None:
    config = RewardConfig(terms=[f"{file}:leaves_a_child"])
    ((_, outcomes),) = tried(config, made_up(PROMPTS[:1], TOKENIZER))
    assert not psutil.pid_exists(int(outcomes[0].values[0]))


def test_each_term_is_tried_on_rows_of_its_own_source(file) -> None:
    prompts = [
        Prompt("a", [1], "1+1=", label="2", data_source="sums"),
        Prompt("b", [1], "?", data_source="chat"),
    ]
    config = RewardConfig(
        terms=[f"{file}:awaited"], per_source={"sums": ["math"], "chat": [f"{file}:raises"]}
    )
    with pytest.raises(RewardError, match="1 of 1 made-up"):
        check_rewards(config, prompts, TOKENIZER)


def test_a_label_that_a_built_in_reward_cannot_read_is_told() -> None:
    with pytest.raises(RewardError, match="neither a label nor a reference"):
        check_rewards(RewardConfig(terms=["math"]), [Prompt("a", [1], "1+1=")], TOKENIZER)


def test_rows_are_taken_evenly_and_responses_are_own_answers_nothing_and_wrong_ones() -> None:
    assert spread(25) == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22]
    assert spread(3) == [0, 1, 2] and spread(0) == []
    assert [r.text for r in made_up(PROMPTS[:4], TOKENIZER)] == [
        "1",
        "",
        "I think that the answer is \\boxed{-17}.",
        "4",
    ]


def test_a_trial_loads_asyncio_for_rewards_that_wait_only(tmp_path: Path) -> None:
    file = tmp_path / "loaded.py"
    file.write_text("import sys\ndef plain(rollout):\n    return float('asyncio' in sys.modules)\n")
    ((_, outcomes),) = tried(
        RewardConfig.model_validate({"terms": [f"{file}:plain"]}), made_up(PROMPTS[:1], TOKENIZER)
    )
    assert {value for outcome in outcomes for value in outcome.values} == {0.0}


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("def score(completions, **columns): return [1.0]", "TRL"),
        ("def score(prompts, completions, label): return [1.0]", "TRL"),
        ("def score(data_source, solution_str, ground_truth, extra_info=None): return 1", "verl"),
        ("def score(queries, prompts, labels): return [1.0]", "OpenRLHF"),
        ("def score(reward_inputs): return 1.0", "EasyR1"),
    ],
)
def test_a_reward_of_another_framework_is_answered_with_the_form_here(tmp_path, text, framework):
    (tmp_path / "score.py").write_text(text, encoding="utf-8")
    with pytest.raises(RewardError, match=rf"of rewards of {framework}; .*def reward\(r\)"):
        load_reward(f"{tmp_path}/score.py:score", {})


def test_a_reward_may_have_an_option_of_such_a_name(tmp_path):
    text = "def score(rollout, ground_truth, queries=3): return 1.0"
    (tmp_path / "named.py").write_text(text, encoding="utf-8")
    assert load_reward(f"{tmp_path}/named.py:score", {"ground_truth": 1}).options
