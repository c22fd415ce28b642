"""Shaped rewards and rewards of tokens, by hand."""

from __future__ import annotations

import pytest
import torch

from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.reward_shaping import SHAPINGS, TERMS, shape, token_rewards
from lightrft.algorithms.validate.check_parts import check_parts
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import ComponentConfig, build
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.trainer.rl_step import clipped_share
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError
from tests.advantage_helpers import with_advantages
from tests.numbers.strategies import batch_of, plain_case


def test_rewards_are_clipped_and_scaled() -> None:
    batch = batch_of(plain_case([[True]] * 3, [0, 0, 0], [-20.0, 0.5, 20.0]))
    assert SHAPINGS["reward_clip"](batch, batch.rewards, max_new_tokens=8).tolist() == [
        -10.0,
        0.5,
        10.0,
    ]
    assert SHAPINGS["reward_clip"](
        batch, batch.rewards, max_new_tokens=8, low=0.0, high=1.0
    ).tolist() == [0.0, 0.5, 1.0]
    assert SHAPINGS["reward_scale"](
        batch, batch.rewards, max_new_tokens=8, scale=2.0, shift=1.0
    ).tolist() == [-39.0, 2.0, 41.0]


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (12, -1.0)],
)
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    batch = batch_of(plain_case([[True] * length], [0], [1.0]))
    assert SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=4).tolist() == [
        1.0 + penalty
    ]
    assert SHAPINGS["overlong"](
        batch, batch.rewards, max_new_tokens=10, buffer=4, penalty=2.0
    ).tolist() == [1.0 + 2 * penalty]


@pytest.mark.parametrize(("share", "tokens"), [(0.4, 4), (0.2, 2), (0.01, 1), (0.999, 10)])
def test_a_buffer_below_one_is_a_share_of_the_limit(share: float, tokens: int) -> None:
    batch = batch_of(plain_case([[True] * n for n in range(12)], [0] * 12, [1.0] * 12))
    found = SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=share)
    assert (
        found.tolist()
        == SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=tokens).tolist()
    )


@pytest.mark.parametrize("buffer", [0, -1, 0.0])
def test_an_overlong_penalty_without_a_buffer_is_refused(buffer: float) -> None:
    batch = batch_of(plain_case([[True]], [0], [1.0]))
    with pytest.raises(ConfigError, match=r"options\.buffer is"):
        SHAPINGS["overlong"](batch, batch.rewards, max_new_tokens=10, buffer=buffer)


def test_the_kl_penalty_is_on_every_sampled_token_and_the_outcome_on_the_last() -> None:
    case = plain_case([[True, False, True, False], [False]], [0, 0], [2.0, 5.0])
    case.old, case.ref = [[0.5, 9.0, 0.25, 9.0], [9.0]], [[0.0] * 4, [0.0]]
    assert token_rewards(batch_of(case), "k1", 0.1).tolist() == pytest.approx(
        [-0.05, 0, 1.975, 0, 0], abs=1e-15
    )
    assert token_rewards(batch_of(case), "k2", 0.1).tolist() == pytest.approx(
        [-0.0125, 0, 1.996875, 0, 0], abs=1e-15
    )


def test_nothing_is_read_that_is_not_needed() -> None:
    batch = batch_of(plain_case([[True, True]], [0], [3.0])).replace(
        old_logprobs=None, ref_logprobs=None
    )
    assert token_rewards(batch, "k1", 0.0).tolist() == [0.0, 3.0]
    with pytest.raises(ValueError, match="needs old_logprobs and ref_logprobs"):
        token_rewards(batch, "k1", 0.1)


def test_a_batch_without_rewards_is_refused() -> None:
    batch = batch_of(plain_case([[True]], [0])).replace(rewards=None)
    with pytest.raises(ValueError, match=r"batch\.rewards"):
        shape(batch, [ComponentConfig(name="reward_clip")], 8)
    with pytest.raises(ValueError, match=r"batch\.rewards"):
        token_rewards(batch, "k1", 0.0)


def test_shaping_by_nothing_changes_nothing() -> None:
    batch = batch_of(plain_case([[True]] * 2, [0, 0], [1.0, -2.0]))
    assert torch.equal(shape(batch, [], 8), batch.rewards)  # type: ignore[arg-type]


def test_a_length_reward_goes_from_one_end_to_the_other_along_a_cosine() -> None:
    # halfway cos is 0, the mean of both ends; answers of 0, 4 and 8 tokens of 8, right ones first
    lengths = [0, 4, 8, 0, 4, 8]
    batch = batch_of(
        plain_case([[True] * n for n in lengths], [0] * 6, [1.0, 1.0, 1.0, 0.0, 0.5, 0.0])
    )
    found = SHAPINGS["cosine"](batch, batch.rewards * 7, max_new_tokens=8)
    assert found.tolist() == pytest.approx([2.0, 1.5, -10.0, -10.0, -5.0, -10.0])
    options = {
        "right_start": 0.3,
        "right_end": 0.1,
        "wrong_start": -0.2,
        "wrong_end": 0.0,
        "exceed": -0.7,
    }
    found = SHAPINGS["cosine"](batch, batch.rewards, max_new_tokens=8, threshold=0.5, **options)
    assert found.tolist() == pytest.approx([0.3, 0.2, -0.7, -0.2, 0.2, -0.7], rel=1e-15)


def test_short_answers_of_a_group_are_favoured_and_wrong_ones_never() -> None:
    # lengths 2, 4, 6: lam 1/2, 0, -1/2; a second group of equal lengths; a tool's token has no length
    masks = [[True] * 2, [True] * 4, [True] * 6, [True, False], [True], [True] * 6]
    batch = batch_of(plain_case(masks, [0, 0, 0, 1, 1, 0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    found = SHAPINGS["kimi_length"](batch, batch.rewards, max_new_tokens=8)
    assert found.tolist() == [1.5, 1.0, 0.5, 1.0, 0.0, -0.5]
    wrong = batch.replace(rewards=batch.rewards * 0)  # type: ignore[operator]
    assert SHAPINGS["kimi_length"](wrong, wrong.rewards, max_new_tokens=8, weight=2.0).tolist() == [
        0,
        0,
        -1,
        0,
        0,
        -1,
    ]


def test_whether_an_answer_is_right_is_judged_by_its_outcome_as_it_was_scored() -> None:
    batch = batch_of(plain_case([[True], [True, True]], [0, 0], [1.0, 1.0]))
    parts = [
        ComponentConfig(name="reward_scale", options={"scale": 0.1}),
        ComponentConfig(name="kimi_length"),
    ]
    assert shape(batch, parts, 8).tolist() == pytest.approx([0.6, -0.4])


def terms_batch(rows: list[list[float]], weights: list[list[float]], prompt_of: list[int]) -> Batch:
    made = batch_of(plain_case([[True]] * len(rows), prompt_of))
    return made.replace(
        terms=torch.tensor(rows).double(), term_weights=torch.tensor(weights).double()
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # first term 0, 2 | 1, 3: deviation sqrt 2 in each group; second 10, 30 | absent, 20: sqrt 200 in the first, none alone
        (
            "group",
            [-(0.5**0.5) * 1 - 0.5**0.5 * 3, 0.5**0.5 * 1 + 0.5**0.5 * 3, -(0.5**0.5), 0.5**0.5],
        ),
        # of all: mean 3/2, variance 5/3; mean 20, variance 100
        (
            "batch",
            [
                -1.5 / (5 / 3) ** 0.5 - 3,
                0.5 / (5 / 3) ** 0.5 + 3,
                -0.5 / (5 / 3) ** 0.5,
                1.5 / (5 / 3) ** 0.5,
            ],
        ),
    ],
)
def test_terms_are_normalised_before_they_are_weighted_and_an_absent_one_is_not_there(
    mode: str, expected: list[float]
) -> None:
    nan = float("nan")
    batch = terms_batch(
        [[0, 10], [2, 30], [1, nan], [3, 20]], [[1, 3], [1, 3], [1, 0], [1, 3]], [0, 0, 1, 1]
    )
    found = TERMS[mode](batch, 0.0, {})
    assert found.tolist() == pytest.approx(expected, rel=1e-14)
    order = torch.tensor([3, 0, 2, 1])
    assert torch.equal(TERMS[mode](batch.select(order), 0.0, {}), found[order])


def test_equal_terms_add_exactly_nothing() -> None:
    batch = terms_batch([[0.1, 1], [0.1, 2], [0.1, 2]], [[5, 0]] * 3, [0, 0, 0])
    found = [TERMS[mode](batch, 0.0, {}).tolist() for mode in ("group", "batch")]
    assert found == [[0.0] * 3] * 2
    with pytest.raises(ValueError, match=r"needs batch\.terms"):
        TERMS["group"](batch.replace(terms=None), 0.0, {})


def test_each_reward_of_gdpo_is_normalised_in_its_group_and_their_sum_over_the_batch() -> None:
    algorithm = AlgorithmConfig.model_validate(
        {"preset": "gdpo", "advantage": {"eps": 0.0}, "normalize": {"eps": 0.0}}
    )
    batch = terms_batch([[0, 10], [2, 30], [1, 5], [3, 5]], [[1, 3]] * 4, [0, 0, 1, 1])
    config = RLConfig(algorithm=algorithm)
    found = with_advantages(
        batch, config, Controllers.of(algorithm), Requirements.of(config.algorithm)
    ).advantages
    # sums -4 s, 4 s, -s, s with s = sqrt(1/2): mean 0, variance s^2 (16 + 16 + 1 + 1) / 3
    std = (34 / 3) ** 0.5
    assert found.tolist() == pytest.approx([-4 / std, 4 / std, -1 / std, 1 / std], rel=1e-6)  # type: ignore[union-attr]


def test_rewards_of_truncated_responses_are_scaled_or_replaced() -> None:
    batch = batch_of(plain_case([[True]] * 3, [0, 0, 0], [1.0, -2.0, 4.0]))
    batch = batch.replace(truncated=torch.tensor([True, True, False]))

    def shaped(**options: float) -> list[float]:
        parts = [ComponentConfig(name="truncated", options=options)]
        return shape(batch, parts, 8).tolist()

    assert shaped() == [0.0, 0.0, 4.0]
    assert shaped(factor=0.5) == [0.5, -1.0, 4.0]
    assert shaped(value=-0.5) == [-0.5, -0.5, 4.0]
    for wrong in ({"factor": 1.5}, {"factor": -0.5}, {"factor": 0.5, "value": 1.0}):
        with pytest.raises(ConfigError, match=r"shaping truncated: options\.factor"):
            shaped(**wrong)


def test_advantages_are_clipped_after_they_are_whitened() -> None:
    rewards = [0.0, 1.0, 1.0, 1.0]
    batch = batch_of(plain_case([[True] * 2] * 4, [0] * 4, rewards))

    def advantages(**settings: object) -> torch.Tensor:
        algorithm = {"preset": "grpo", "advantage": {"name": "grpo", **settings}}
        config = build(RLConfig, {"algorithm": algorithm})
        own = config.algorithm
        check_parts(own)
        found = with_advantages(batch, config, Controllers.of(own), Requirements.of(own))
        if "clip" in settings:
            share = clipped_share(found, config)
            assert share.compute() == 0.25  # the response without a reward
        assert found.advantages is not None
        return found.advantages

    whole = advantages(normalize="batch")
    clipped = advantages(normalize="batch", clip=1.0)
    assert float(whole.abs().max()) > 1.2
    assert torch.equal(clipped, whole.clamp(-1.0, 1.0))
