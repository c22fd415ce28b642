"""Checks that the rewards can score the rows of the data."""

from __future__ import annotations

import pytest

from lightrft.config.reward import RewardConfig
from lightrft.rollout.row_check import check_named_sources
from lightrft.utils.errors import ConfigError


def reward(*sources: str, **per_source: list[str]) -> RewardConfig:
    tree = {"models": [{"path": "rm", "sources": sources}], "per_source": per_source}
    return RewardConfig.model_validate(tree)


def test_a_reward_model_that_would_score_no_row_is_refused() -> None:
    said = r"reward\.models\.0\.sources: no row is of 'gsm'.*'gsm8k', 'math'; did you mean 'gsm8k'"
    with pytest.raises(ConfigError, match=said):
        check_named_sources(reward("gsm"), {"gsm8k", "math"})


def test_other_names_of_sources_without_rows_are_told(caplog: pytest.LogCaptureFixture) -> None:
    check_named_sources(reward("math", "gsm", gms8k=["math"]), {"gsm8k", "math"})
    first, second = caplog.messages
    assert "reward.models.0.sources: no row is of 'gsm'" in first
    assert "reward.per_source: no row is of 'gms8k'" in second and "'gsm8k'?" in second


def test_names_of_sources_with_rows_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    check_named_sources(reward("math", gsm8k=["math"]), {"gsm8k", "math"})
    check_named_sources(reward(), {"gsm8k"})
    assert not caplog.messages
