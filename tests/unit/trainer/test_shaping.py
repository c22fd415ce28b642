"""Shaped rewards and rewards of tokens, by hand."""

from __future__ import annotations

import pytest
import torch

from lightrft.config import Part
from lightrft.trainer.shaping import SHAPINGS, shape, token_rewards
from lightrft.utils.errors import ConfigError
from tests.numbers.strategies import batch_of, plain_case


def test_rewards_are_clipped_and_scaled() -> None:
    batch = batch_of(plain_case([[True]] * 3, [0, 0, 0], [-20.0, 0.5, 20.0]))
    assert SHAPINGS["reward_clip"](batch, batch.rewards, max_new_tokens=8).tolist() == [-10.0, 0.5, 10.0]
    assert SHAPINGS["reward_clip"](batch, batch.rewards, max_new_tokens=8, low=0.0, high=1.0).tolist() == [0.0, 0.5, 1.0]
    assert SHAPINGS["reward_scale"](batch, batch.rewards, max_new_tokens=8, scale=2.0, shift=1.0).tolist() == [-39.0, 2.0, 41.0]


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (12, -1.0)])
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    batch = batch_of(plain_case([[True] * length], [0], [1.0]))
    assert SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=4).tolist() == [1.0 + penalty]
    assert SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=4, penalty=2.0).tolist() == [1.0 + 2 * penalty]


@pytest.mark.parametrize(("share", "tokens"), [(0.4, 4), (0.2, 2), (0.01, 1), (0.999, 10)])
def test_a_buffer_below_one_is_a_share_of_the_limit(share: float, tokens: int) -> None:
    batch = batch_of(plain_case([[True] * n for n in range(12)], [0] * 12, [1.0] * 12))
    found = SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=share)
    assert found.tolist() == SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=tokens).tolist()


@pytest.mark.parametrize("buffer", [0, -1, 0.0])
def test_an_overlong_penalty_without_a_buffer_is_refused(buffer: float) -> None:
    batch = batch_of(plain_case([[True]], [0], [1.0]))
    with pytest.raises(ConfigError, match=r"options\.buffer is"):
        SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=buffer)


def test_the_kl_penalty_is_on_every_sampled_token_and_the_outcome_on_the_last() -> None:
    case = plain_case([[True, False, True, False], [False]], [0, 0], [2.0, 5.0])
    case.old, case.ref = [[0.5, 9.0, 0.25, 9.0], [9.0]], [[0.0] * 4, [0.0]]
    assert token_rewards(batch_of(case), "k1", 0.1).tolist() == pytest.approx([-0.05, 0, 1.975, 0, 0], abs=1e-15)
    assert token_rewards(batch_of(case), "k2", 0.1).tolist() == pytest.approx([-0.0125, 0, 1.996875, 0, 0], abs=1e-15)


def test_nothing_is_read_that_is_not_needed() -> None:
    batch = batch_of(plain_case([[True, True]], [0], [3.0])).replace(old_logprobs=None, ref_logprobs=None)
    assert token_rewards(batch, "k1", 0.0).tolist() == [0.0, 3.0]
    with pytest.raises(ValueError, match="needs old_logprobs and ref_logprobs"):
        token_rewards(batch, "k1", 0.1)


def test_a_batch_without_rewards_is_refused() -> None:
    batch = batch_of(plain_case([[True]], [0])).replace(rewards=None)
    with pytest.raises(ValueError, match=r"batch\.rewards"):
        shape(batch, [Part(name="reward_clip")], 8)
    with pytest.raises(ValueError, match=r"batch\.rewards"):
        token_rewards(batch, "k1", 0.0)


def test_shaping_by_nothing_changes_nothing() -> None:
    batch = batch_of(plain_case([[True]] * 2, [0, 0], [1.0, -2.0]))
    assert torch.equal(shape(batch, [], 8), batch.rewards)  # type: ignore[arg-type]
