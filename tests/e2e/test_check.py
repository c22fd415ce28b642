"""``lightrft check``."""

from __future__ import annotations

import pytest

from lightrft.algorithms.contracts.run_checks import CHECKS
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from tests.e2e.command import assert_refused, command, process

MINE = """
import torch

def loss(logprobs, old, advantages, rows, settings, *, tau=1.0):
    if tau < 0:
        raise ArithmeticError("tau is negative")
    return -(logprobs - old).exp() * advantages / tau, {}

def mean_of_what_it_sees(logprobs, old, advantages, rows, settings):
    return -(logprobs - old).exp() * advantages / max(1, len(advantages)), {}

def no_gradient(logprobs, old, advantages, rows, settings):
    return -logprobs.detach() * advantages, {}

def needy(logprobs, old, advantages, rows, settings, *, tau):
    return loss(logprobs, old, advantages, rows, settings, tau=tau)

def shaping(batch, rewards, max_new_tokens, power=2.0):
    return rewards**power

def estimator(a, b):
    return a - b

def score(r):
    return float(len(r.text))

def scaled(sample, by=2.0):
    return by

def kept(group):
    return True
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "my_parts.py"


def test_a_function_that_keeps_its_contract_passes_every_check(capsys, mine):
    outcome = command(capsys, "check", f"{mine}:loss", "tau=2")
    assert outcome.status == 0
    assert f"{mine}:loss as loss tau=2" in outcome.out
    assert outcome.out.count("  pass  ") == len(CHECKS["loss"])
    assert f"all {len(CHECKS['loss'])} checks hold" in outcome.out


@pytest.mark.parametrize(
    ("name", "kind"), [("score", "reward"), ("scaled", "reward"), ("kept", "filter")]
)
def test_a_function_of_one_argument_is_a_reward_unless_it_is_named_a_group(
    capsys, mine, name, kind
):
    outcome = command(capsys, "check", f"{mine}:{name}")
    assert f"{mine}:{name} as {kind}\n" in outcome.out, outcome


def test_what_is_broken_is_shown_with_the_batch_and_the_exit_status_is_1(capsys, mine):
    outcome = command(capsys, "check", f"{mine}:mean_of_what_it_sees")
    assert outcome.status == 1
    (failed,) = [i for i, line in enumerate(outcome.out.splitlines()) if line.startswith("  FAIL")]
    lines = outcome.out.splitlines()
    assert "is by response" in lines[failed]
    assert "responses " in lines[failed + 1] and ", not [" in lines[failed + 1]
    assert lines[-1].startswith("1 of ")


def test_an_exception_fails_the_checks_and_not_the_command(capsys, mine):
    outcome = command(capsys, "check", f"{mine}:loss", "tau=-1")
    assert outcome.status == 1
    assert "raised ArithmeticError: tau is negative" in outcome.out


def test_a_loss_without_gradient_is_told_so(capsys, mine):
    outcome = command(capsys, "check", f"{mine}:no_gradient")
    assert outcome.status == 1
    assert "the losses carry no gradient of the log-probs" in outcome.out


def test_a_module_beside_the_command_is_found(mine, tmp_path):
    outcome = process("check", "my_parts:loss", cwd=tmp_path)
    assert outcome.status == 0, outcome


@pytest.mark.parametrize(("name", "kind"), [("loss", "loss"), ("shaping", "shaping")])
def test_the_kind_follows_from_the_arguments(capsys, mine, name, kind):
    assert f"as {kind}\n" in command(capsys, "check", f"{mine}:{name}").out


def test_the_kind_can_be_given(capsys, mine):
    assert command(capsys, "check", f"{mine}:estimator", "--kind", "kl").status == 0
    assert command(capsys, "check", f"{mine}:estimator", "--kind=kl").status == 0


@pytest.mark.parametrize(
    "name", ["grpo", "ppo_clip", "reward_clip", "zero_variance", "k3", "simpo"]
)
def test_a_built_in_part_can_be_checked_by_its_name(capsys, name):
    assert command(capsys, "check", name).status == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["my_parts.py:estimator"], ["takes (a, b)", "--kind"]),
        (["my_parts.py:loss", "tua=2"], ["tua", "it takes tau"]),
        (["my_parts.py:needy"], ["tau", "is missing"]),
        (["my_parts.py:nothing"], ["my_parts.py", "nothing"]),
        (["nowhere:loss"], ["cannot import nowhere"]),
        (["my_parts.py:loss", "my_parts.py:needy"], ["2 functions"]),
        (["my_parts.py:loss", "--kind", "losss"], ["losss", "advantage"]),
        (["my_parts.py:loss", "--kind"], ["--kind names no kind"]),
        (["ppo_clop"], ["ppo_clop", "--kind"]),
    ],
)
def test_what_cannot_be_checked_is_refused_with_the_way_out(capsys, mine, words, said):
    assert_refused(command(capsys, "check", *words), *said)


def test_every_kind_has_checks():
    assert set(CHECKS) <= set(COMPONENT_KINDS)


REWARD = """
import itertools, time

def good(rollout, *, bonus=0.0):
    return float("42" in rollout.text) + bonus

def batched(rollouts):
    return [float(len(r.text)) for r in rollouts]

def hangs(rollout):
    while len(rollout.text) > 1000:
        time.sleep(0.01)
    return 0.0

def last_word(rollout):
    return float(rollout.text.split()[-1] == "42")

def says_it(rollout):
    return "good"

counter = itertools.count()

def fickle(rollout):
    return float(next(counter))
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return "my_rewards.py"


@pytest.mark.parametrize("words", [["{}:good", "bonus=0.5"], ["{}:batched"], ["exact_match"]])
def test_a_reward_that_keeps_its_contract_passes_every_check(capsys, rewards, words):
    outcome = command(capsys, "check", *(word.format(rewards) for word in words))
    assert outcome.status == 0, outcome
    assert " as reward" in outcome.out and "all 5 checks hold" in outcome.out


@pytest.mark.parametrize(
    ("name", "check", "said"),
    [
        (
            "hangs",
            "long response",
            ["took longer than the limit of 0.5 s", "my_rewards.py", "in hangs"],
        ),
        (
            "last_word",
            "empty response",
            ["raised IndexError", "on the response ''", "my_rewards.py"],
        ),
        ("says_it", "number", ["returned str, not a number", "line 18"]),
        ("fickle", "repeatable", ["gave 11, then 14"]),
    ],
)
def test_a_reward_that_fails_shows_where_within_its_time_limit(capsys, rewards, name, check, said):
    outcome = command(capsys, "check", f"{rewards}:{name}", "--limit", "0.5")
    assert outcome.status == 1
    assert f"  FAIL  {check} " in outcome.out
    assert all(text in outcome.out for text in said), outcome.out


def test_a_time_limit_that_means_nothing_is_refused(capsys, rewards):
    assert_refused(
        command(capsys, "check", f"{rewards}:good", "--limit", "soon"), "--limit soon", "seconds"
    )
    assert_refused(command(capsys, "check", "ppo_clip", "--limit", "3"), "--limit 3 is for rewards")
