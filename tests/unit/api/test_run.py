"""What a run's folder answers, without training."""

from __future__ import annotations

import pytest

import lightrft
from lightrft.trainer.model_card import _training
from lightrft.utils.errors import DataError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"has no step responses; it has written none"),
        ({"step": 3}, r"has no step responses of step 3; it has written none"),
        ({"kind": "eval"}, r"has no eval responses; it has written none"),
    ],
)
def test_a_run_without_written_responses_says_that_it_has_none(tmp_path, given, said):
    (tmp_path / "config.yaml").write_text("run: {name: a}")
    with pytest.raises(DataError, match=said):
        lightrft.Run(tmp_path).rollouts(**given)


@pytest.mark.parametrize(
    ("seconds", "said"), [(20, "1 minute"), (61, "2 minutes"), (5400, "1.5 hours")]
)
def test_a_model_card_says_the_time_in_words_that_fit_the_number(seconds, said):
    assert list(_training({"steps": 2, "seconds": seconds})) == ["* steps: 2", f"* time: {said}"]
