"""Rewards of tokens and shaped rewards against the slow loops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.algorithms.reward_shaping import SHAPINGS, shape, token_rewards
from lightrft.config.base import ComponentConfig
from lightrft.utils.errors import ConfigError
from tests.numbers import oracles
from tests.numbers.compare import assert_equal, every_case, tensor
from tests.numbers.oracles import Case
from tests.numbers.strategies import batch_of, plain_case


@every_case()
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("coef", [0.0, 0.05, 1.0])
def test_token_rewards(kind: str, coef: float, case: Case, seed: int) -> None:
    assert_equal(
        token_rewards(batch_of(case), kind, coef),
        oracles.token_rewards(case, case.rewards, coef, kind),
    )


@every_case()
def test_token_rewards_of_clipped_outcomes(case: Case, seed: int) -> None:
    batch = batch_of(case)
    batch.rewards = shape(
        batch, [ComponentConfig(name="reward_clip", options={"low": -0.5, "high": 0.75})], 6
    )
    assert_equal(
        token_rewards(batch, "k1", 0.05),
        oracles.token_rewards(case, case.rewards, 0.05, "k1", (-0.5, 0.75)),
    )


@every_case()
@pytest.mark.parametrize(
    ("limit", "buffer", "penalty"), [(6, 2, 1.0), (4, 3, 0.5), (6, 6, 2.0), (3, 1, 1.0)]
)
def test_the_overlong_penalty(
    limit: int, buffer: int, penalty: float, case: Case, seed: int
) -> None:
    batch = batch_of(case)
    found = SHAPINGS["overlong"](
        batch, batch.rewards, max_new_tokens=limit, buffer=buffer, penalty=penalty
    )
    expected = [
        r + oracles.overlong_penalty(n, limit, buffer, penalty)
        for r, n in zip(case.rewards, case.lengths, strict=True)
    ]
    assert_equal(found, expected)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 20), st.integers(0, 20))
def test_the_overlong_penalty_at_any_length(length: int, buffer: int, more: int) -> None:
    batch = batch_of(plain_case([[True] * length], [0], [0.25]))
    found = SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=buffer + more, buffer=buffer)
    assert_equal(found, [0.25 + oracles.overlong_penalty(length, buffer + more, buffer)])


def test_the_outcome_lands_on_the_last_sampled_token() -> None:
    # tool tokens behind the last sampled one get nothing; d = old - ref = 1/2 on each token
    case = plain_case([[True, False, True, False], [False], [True]], [0, 0, 1], [2.0, 5.0, -1.0])
    case.old = [[0.0] * n for n in case.lengths]
    case.ref = [[-0.5] * n for n in case.lengths]
    assert token_rewards(batch_of(case), "k1", 0.1).tolist() == pytest.approx(
        [-0.05, 0, 1.95, 0, 0, -1.05], abs=1e-15
    )


def test_parts_apply_in_the_order_given() -> None:
    batch = batch_of(plain_case([[True]] * 2, [0, 0], [4.0, -4.0]))
    clip, scale = (
        ComponentConfig(name="reward_clip", options={"low": -1, "high": 1}),
        ComponentConfig(name="reward_scale", options={"scale": 3, "shift": 1}),
    )
    assert shape(batch, [clip, scale], 8).tolist() == [4.0, -2.0]
    assert shape(batch, [scale, clip], 8).tolist() == [1.0, -1.0]
    assert_equal(batch.rewards, tensor([4.0, -4.0]).tolist())  # type: ignore[arg-type]


def test_an_overlong_penalty_without_a_buffer_is_refused() -> None:
    batch = batch_of(plain_case([[True] * 4], [0], [1.0]))
    with pytest.raises(ConfigError, match=r"options\.buffer is 0"):
        SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=4, buffer=0)
