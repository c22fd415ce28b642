"""What a run says of functions of the user that break the rules of their kind."""

from __future__ import annotations

import pytest

from lightrft.algorithms.contracts.run_checks import check_own_parts
from lightrft.config.base import ComponentConfig
from lightrft.utils.errors import ConfigError

OWN = """
import torch
SIZE = 4

def scalar(logprobs, old, advantages, rows, settings):
    return -(torch.exp(logprobs - old) * advantages).mean(), {}

def alone(batch, token_rewards, settings):
    return token_rewards

def number(batch, rewards, *, max_new_tokens):
    return float(rewards.mean())

def yes(group):
    return group[0].reward > 0

def mean(data, settings):
    return (data.rejected.logprobs - data.chosen.logprobs).mean()

mean.kind = "pair"

def upside_down(logprobs, old, advantages, rows, settings):
    return torch.exp(logprobs - old) * advantages, {}

def of_fours(batch, token_rewards, settings):
    rewards = batch.rewards.view(-1, SIZE)
    found = (rewards - rewards.mean(1, keepdim=True)).flatten().repeat_interleave(batch.lengths)
    return found, found

def reason(group):
    return "large" if max(one.reward for one in group) > 5 else None
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        ("loss", "scalar", r"the losses: shape \(\), not \(16,\)"),
        ("advantage", "alone", "the result is a Tensor, not a pair of advantages and returns"),
        ("shaping", "number", "the rewards: a float, not a tensor of 8 numbers"),
        ("filter", "yes", "the result is a bool, not a reason"),
        ("preference", "mean", "shape"),
    ],
)
def test_a_run_refuses_an_own_function_whose_result_has_another_form(own, kind, name, problem):
    part = ComponentConfig(name=f"{own}:{name}")
    with pytest.raises(ConfigError, match=rf"^the\.key: '{own}:{name}': .*{problem}"):
        check_own_parts([(kind, "the.key", part)])


def test_a_run_warns_of_the_rules_that_an_own_function_breaks(own, caplog):
    check_own_parts([("loss", "the.key", ComponentConfig(name=f"{own}:upside_down"))])
    assert "breaks 1 of 8 rules" in caplog.text and "lightrft check" in caplog.text
    assert "descent raises tokens with a positive advantage" in caplog.text
    caplog.clear()
    # It has the groups of its run in mind, and would serve them.
    check_own_parts([("advantage", "the.key", ComponentConfig(name=f"{own}:of_fours"))])
    assert "raised RuntimeError" in caplog.text
    caplog.clear()
    kept = [("filter", "the.key", ComponentConfig(name=f"{own}:reason"))]
    check_own_parts([*kept, ("loss", "algorithm.loss", ComponentConfig(name="ppo_clip"))])
    assert not caplog.text
