"""What a run has seen: exactly the same in any order, and the scale that follows from it."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.algorithms.reward_shaping import with_rewards
from lightrft.algorithms.running_stats import RUNNING, RunningStats
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.learner.controllers import Controllers
from lightrft.types import Batch
from tests.numbers.strategies import batch_of, plain_case

NUMBERS = st.lists(st.floats(-1e6, 1e6), max_size=12)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seen(*batches: list[float]) -> RunningStats:
    moments = RunningStats()
    for values in batches:
        moments = moments.including(tensor(values))
    return moments


def test_mean_and_deviation_of_what_was_seen() -> None:
    # 1, 2, 6 and 7: mean 4, variance (9 + 4 + 4 + 9) / 4
    found = seen([1.0, 6.0], [], [2.0, 7.0])
    assert (found.count, found.mean, found.lowest, found.highest) == (4, 4.0, 1.0, 7.0)
    assert found.deviation() == pytest.approx(math.sqrt(6.5), rel=1e-15)
    assert found.standardised(tensor([4.0, 6.0]), 0.0).tolist() == pytest.approx(
        [0, 2 / math.sqrt(6.5)]
    )
    assert found.scaled(tensor([-4.0]), 1.0).tolist() == pytest.approx([-4 / (math.sqrt(6.5) + 1)])


@settings(deadline=None)
@given(st.lists(NUMBERS, max_size=4))
def test_they_are_those_of_all_numbers_together(batches: list[list[float]]) -> None:
    found, every = seen(*batches), [x for batch in batches for x in batch]
    assert found.count == len(every)
    if every:
        scale = max(1.0, *map(abs, every))
        assert found.mean == pytest.approx(statistics.fmean(every), rel=1e-9, abs=1e-9 * scale)
        assert found.deviation() == pytest.approx(
            statistics.pstdev(every), rel=1e-6, abs=1e-7 * scale
        )


@settings(deadline=None)
@given(NUMBERS, st.randoms())
def test_the_order_of_a_batch_changes_not_one_bit(values: list[float], rng: random.Random) -> None:
    shuffled = rng.sample(values, len(values))
    assert seen([0.1, 7.0], shuffled) == seen([0.1, 7.0], values)


def test_a_sum_that_plain_addition_gets_wrong_is_right() -> None:
    assert seen([1e16, 1.0, -1e16, 1.0]).mean == 0.5


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.7])
def test_while_all_are_equal_there_is_no_deviation_and_no_scale(value: float) -> None:
    found = seen([value] * 3, [value] * 7)
    assert found.deviation() == 0.0
    assert found.standardised(tensor([value] * 3), 0.0).tolist() == [0.0] * 3
    assert found.scaled(tensor([value]), 1e-6).tolist() == [value]
    assert RunningStats().natural(tensor([value]), 1e-6).tolist() == [value]


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9))
def test_natural_undoes_standardised(values: list[float]) -> None:
    found = seen(values, [3.0, 5.0])
    back = found.natural(found.standardised(tensor(values), 1e-6), 1e-6)
    assert back.tolist() == pytest.approx(values, rel=1e-9, abs=1e-9)


def test_nothing_is_done_to_rewards_without_a_mode() -> None:
    assert RUNNING["none"](seen([1.0, 2.0]), tensor([5.0]), 1e-6).tolist() == [5.0]


# In a run


def batch(rewards: list[float]) -> Batch:
    return batch_of(plain_case([[True]] * len(rewards), [0] * len(rewards), rewards))


def algorithm(**normalize: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"normalize": {"eps": 0.0, **normalize}})


def steps(chosen: AlgorithmConfig, *batches: list[float]) -> list[float]:
    """Rewards of the last batch, of a run that has trained on those before it."""
    controls = Controllers.of(chosen)
    for rewards in batches[:-1]:
        controls.update_from_batch(with_rewards(batch(rewards), chosen, 8, controls.rewards))
    return with_rewards(batch(batches[-1]), chosen, 8, controls.rewards).rewards.tolist()  # type: ignore[union-attr]


def test_rewards_are_normalised_over_the_run_with_the_batch_included() -> None:
    # of 0, 4: mean 2, deviation 2; of 0, 4, 1, 7: mean 3, deviation sqrt(30 / 4)
    standard, scale = algorithm(rewards="standard"), algorithm(rewards="scale")
    assert steps(standard, [0.0, 4.0]) == [-1.0, 1.0]
    assert steps(standard, [0.0, 4.0], [1.0, 7.0]) == pytest.approx(
        [-2 / math.sqrt(7.5), 4 / math.sqrt(7.5)]
    )
    assert steps(scale, [0.0, 4.0], [1.0, 7.0]) == pytest.approx(
        [1 / math.sqrt(7.5), 7 / math.sqrt(7.5)]
    )
    assert steps(standard, [0.1] * 3, [0.1] * 7) == [0.0] * 7


def test_a_batch_that_is_looked_at_twice_counts_once() -> None:
    chosen = algorithm(rewards="standard")
    controls = Controllers.of(chosen)
    first = with_rewards(batch([0.0, 4.0]), chosen, 8, controls.rewards)
    again = with_rewards(batch([0.0, 4.0]), chosen, 8, controls.rewards)
    assert torch.equal(first.rewards, again.rewards)  # type: ignore[arg-type]
    metrics = controls.update_from_batch(first).compute()
    assert controls.rewards == seen([0.0, 4.0])
    assert (metrics["reward/seen_mean"], metrics["reward/seen_std"]) == (2.0, 2.0)


def test_shaping_follows_normalisation() -> None:
    chosen = AlgorithmConfig.model_validate(
        {
            "normalize": {"rewards": "standard", "eps": 0.0},
            "shaping": [{"name": "reward_scale", "options": {"scale": 10, "shift": 1}}],
        }
    )
    found = with_rewards(batch([0.0, 4.0]), chosen, 8, RunningStats())
    assert found.rewards.tolist() == [-9.0, 11.0]  # type: ignore[union-attr]
    assert found.outcomes.tolist() == [0.0, 4.0]  # type: ignore[union-attr]


def test_what_was_seen_is_saved_with_the_run() -> None:
    controls = Controllers.of(algorithm(rewards="standard", values=True))
    controls.rewards, controls.returns = seen([0.1, 0.7, 1 / 3]), seen([5.0])
    other = Controllers.of(algorithm())
    other.load_state_dict(json.loads(json.dumps(controls.state_dict())))
    assert (other.rewards, other.returns) == (controls.rewards, controls.returns)


# Values


def test_the_critic_learns_returns_of_deviation_one_and_its_old_values_stay_as_it_spoke_them() -> (
    None
):
    controls = Controllers.of(algorithm(values=True))
    controls.returns = seen([2.0, 6.0])  # mean 4, deviation 2
    spoken = tensor([0.5, -1.0])
    natural = controls.values(spoken)
    assert natural.tolist() == [5.0, 2.0]
    made = batch([0.0, 0.0]).replace(values=natural, returns=tensor([0.0, 8.0]))
    for_critic = controls.for_critic(made)
    after = seen([2.0, 6.0], [0.0, 8.0])
    assert for_critic.values.tolist() == spoken.tolist()  # type: ignore[union-attr]
    assert for_critic.returns.tolist() == pytest.approx(
        [-4 / after.deviation(), 4 / after.deviation()]
    )
    assert controls.returns == seen([2.0, 6.0])
    assert controls.update_from_batch(made).compute()["critic/seen_std"] == after.deviation()
    assert controls.returns == after


def test_tokens_that_were_not_sampled_are_no_returns() -> None:
    controls = Controllers.of(algorithm(values=True))
    made = batch_of(plain_case([[True, False, True]], [0])).replace(
        returns=tensor([1.0, 99.0, 3.0])
    )
    controls.update_from_batch(made)
    assert controls.returns == seen([1.0, 3.0])


def test_without_normalisation_values_and_returns_are_left_as_they_are() -> None:
    controls = Controllers.of(AlgorithmConfig())
    made = batch([0.0]).replace(returns=tensor([9.0]))
    assert controls.for_critic(made) is made
    controls.update_from_batch(made)
    assert controls.returns == controls.rewards == RunningStats()


def test_outcomes_stay_as_they_were_scored() -> None:
    chosen = AlgorithmConfig.model_validate(
        {"normalize": {"terms": "batch"}, "shaping": "reward_clip"}
    )
    made = batch([0.0, 4.0]).replace(
        terms=tensor([0.0, 4.0])[:, None], term_weights=tensor([1.0, 1.0])[:, None]
    )
    found = with_rewards(made, chosen, 8, RunningStats())
    assert found.outcomes.tolist() == [0.0, 4.0]  # type: ignore[union-attr]
    assert found.rewards.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)  # type: ignore[union-attr]
