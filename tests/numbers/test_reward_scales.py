"""Rewards of length, running moments and terms on one scale, against the slow loops."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.reward_shaping import SHAPINGS, token_rewards, with_rewards
from lightrft.algorithms.running_stats import RunningStats
from lightrft.config.algorithm import AdvantageConfig, AlgorithmConfig
from lightrft.learner.controllers import Controllers
from lightrft.types import Batch
from tests.numbers import oracles, oracles_advantages, oracles_rewards
from tests.numbers.compare import assert_equal, every_case, tensor
from tests.numbers.oracles import Case
from tests.numbers.scalars import mean
from tests.numbers.strategies import SEEDS, batch_of

LIMIT = 6


@every_case()
def test_the_cosine_reward_takes_the_place_of_the_outcome(case: Case, seed: int) -> None:
    batch = batch_of(case)
    options = {
        "right_start": 2.1,
        "right_end": 1.3,
        "wrong_start": -9.7,
        "wrong_end": -0.1,
        "exceed": -10.3,
        "threshold": 0.7,
    }
    found = SHAPINGS["cosine"](batch, batch.rewards, max_new_tokens=LIMIT, **options)
    expected = [
        oracles_rewards.cosine_length(n, LIMIT, r >= 0.7, (2.1, 1.3), (-9.7, -0.1), -10.3)
        for n, r in zip(case.lengths, case.rewards, strict=True)
    ]
    assert_equal(found, expected)


@every_case()
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_length_reward_of_kimi(weight: float, case: Case, seed: int) -> None:
    batch = batch_of(case)
    found = SHAPINGS["kimi_length"](
        batch, batch.rewards, max_new_tokens=LIMIT, weight=weight, threshold=0.7
    )
    bonus = oracles_rewards.kimi_length(case, [r >= 0.7 for r in case.rewards])
    assert_equal(found, [r + weight * b for r, b in zip(case.rewards, bonus, strict=True)])


def draws(seed: int, sizes: list[int], kind: str) -> list[list[float]]:
    """Batches of rewards; ``kind``: real numbers, few values, or all equal."""
    rng = random.Random(seed)
    draw = {
        "real": lambda: rng.uniform(-2, 5),
        "binary": lambda: float(rng.randint(0, 1)),
        "equal": lambda: 0.1,
    }[kind]
    return [[draw() for _ in range(n)] for n in sizes]


@settings(deadline=None)
@given(
    SEEDS,
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from(["real", "binary", "equal"]),
)
def test_running_moments_are_those_of_everything_seen(
    seed: int, sizes: list[int], kind: str
) -> None:
    batches, seen = draws(seed, sizes, kind), RunningStats()
    for k, batch in enumerate(batches):
        seen = seen.including(tensor(batch))
        centre, std = oracles_rewards.moments(batches[: k + 1], unbiased=False)
        assert (seen.mean if seen.count else 0.0) == pytest.approx(centre, rel=1e-12, abs=1e-12)
        assert seen.deviation() == pytest.approx(std, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(
    SEEDS,
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from(["real", "binary", "equal"]),
)
@pytest.mark.parametrize("mode", ["standard", "scale"])
def test_rewards_on_the_scale_of_everything_seen(
    mode: str, seed: int, sizes: list[int], kind: str
) -> None:
    batches, seen, eps = draws(seed, sizes, kind), RunningStats(), 0.01
    algorithm = AlgorithmConfig.model_validate(
        {"preset": None, "normalize": {"rewards": mode, "eps": eps}}
    )
    slow = {
        "standard": oracles_rewards.running_normalized,
        "scale": oracles_rewards.running_scaled,
    }[mode]
    for k, rewards in enumerate(batches):
        found = with_rewards(answers(rewards), algorithm, LIMIT, seen)
        assert_equal(found.rewards, slow(batches[: k + 1], False, eps))  # type: ignore[arg-type]
        assert_equal(found.outcomes, rewards)  # type: ignore[arg-type]
        seen = seen.including(tensor(rewards))


def answers(rewards: list[float]) -> Batch:
    """Answers of one token to one prompt."""
    n = len(rewards)
    zeros = [[0.0]] * n
    case = Case(
        [1] * n,
        [0] * n,
        [[True]] * n,
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        rewards,
        [False] * n,
        [0.0] * n,
    )
    return batch_of(case)


def terms_of(case: Case, seed: int, count: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [
        [rng.choice([0.0, 1.0, rng.uniform(-3, 3)]) for _ in range(len(case))] for _ in range(count)
    ]


@every_case()
@pytest.mark.parametrize("level", ["group", "batch"])
def test_terms_are_standardised_before_they_are_added(level: str, case: Case, seed: int) -> None:
    terms, weights, eps = terms_of(case, seed, 3), [1.0, 0.25, -2.0], 0.01
    columns = torch.tensor(terms, dtype=torch.float64).T.contiguous()
    batch = batch_of(case).replace(
        terms=columns, term_weights=tensor(weights).expand(len(case), 3).contiguous()
    )
    algorithm = AlgorithmConfig.model_validate(
        {"preset": None, "normalize": {"terms": level, "eps": eps}}
    )
    found = with_rewards(batch, algorithm, LIMIT, RunningStats()).rewards
    whole = Case(**{**vars(case), "prompt_of": [0] * len(case)})
    each = [oracles.grpo(case if level == "group" else whole, term, eps) for term in terms]
    assert_equal(
        found, [sum(w * a[i] for w, a in zip(weights, each, strict=True)) for i in range(len(case))]
    )


@settings(deadline=None)
@given(SEEDS, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_terms_on_the_scale_of_everything_seen_whatever_batches_they_are_in(
    seed: int, sizes: list[int]
) -> None:
    """The first term is in every batch, the second in each other one, and next to another column."""
    chosen = AlgorithmConfig.model_validate(
        {"preset": None, "normalize": {"terms": "running", "eps": 0.01}}
    )
    controls = Controllers.of(chosen)
    weights = {"a": 1.0, "b": -2.0}
    seen: dict[str, list[list[float]]] = {"a": [], "b": []}
    first, second = draws(seed, sizes, "real"), draws(seed + 1, sizes, "binary")
    for k, values in enumerate(zip(first, second, strict=True)):
        names = ("a", "b") if k % 2 else ("a",)
        columns = dict(zip(names, values))
        batch = answers([0.0] * sizes[k]).replace(
            terms=torch.tensor([columns[name] for name in names], dtype=torch.float64).T,
            term_weights=tensor([weights[name] for name in names]).expand(sizes[k], len(names)),
        )
        batch = dataclasses.replace(batch, term_names=names)
        expected = [0.0] * sizes[k]
        for name in names:
            seen[name].append(columns[name])
            scaled = oracles_rewards.running_normalized(seen[name], False, 0.01)
            for i, value in enumerate(scaled):
                expected[i] += weights[name] * value
        found = with_rewards(batch, chosen, LIMIT, controls.rewards, controls.terms)
        assert_equal(found.rewards, expected)  # type: ignore[arg-type]
        controls.update_from_batch(found)
        again = Controllers.of(chosen)
        again.load_state_dict(controls.state_dict())
        assert again.terms == controls.terms


@every_case()
def test_a_term_that_an_answer_does_not_have_counts_nothing(case: Case, seed: int) -> None:
    """The two terms of two data sources: each answer has one of them, and is compared with those that have it."""
    (term,) = terms_of(case, seed, 1)
    has = [p % 2 for p in case.prompt_of]
    rows = [
        [r if h == k else float("nan") for k in range(2)] for r, h in zip(term, has, strict=True)
    ]
    weights = [[float(h == k) for k in range(2)] for h in has]
    batch = batch_of(case).replace(terms=tensor(rows), term_weights=tensor(weights))
    algorithm = AlgorithmConfig.model_validate(
        {"preset": None, "normalize": {"terms": "group", "eps": 0.01}}
    )
    assert_equal(
        with_rewards(batch, algorithm, LIMIT, RunningStats()).rewards,
        oracles.grpo(case, term, 0.01),
    )


@every_case()
def test_gdpo_is_terms_of_groups_then_the_batch(case: Case, seed: int) -> None:
    terms, weights, eps = terms_of(case, seed, 2), [1.0, 0.5], 0.01
    batch = batch_of(case).replace(
        terms=torch.tensor(terms, dtype=torch.float64).T.contiguous(),
        term_weights=tensor(weights).expand(len(case), 2).contiguous(),
    )
    algorithm = AlgorithmConfig.model_validate(
        {"preset": "gdpo", "normalize": {"eps": eps}, "advantage": {"eps": eps}}
    )
    batch = with_rewards(batch, algorithm, LIMIT, RunningStats())
    found, _ = ADVANTAGES["batch_standard"](
        batch, token_rewards(batch, "k3", 0.0), AdvantageConfig(name="batch_standard", eps=eps)
    )
    expected = oracles_advantages.gdpo(case, terms, weights, True, eps)
    # Sums that are equal but for rounding have no signal in either.
    if max(map(abs, expected), default=0.0) > 1e-6:
        assert_equal(found, oracles.on_sampled(case, expected))


@settings(deadline=None)
@given(SEEDS, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.floats(0, 1))
def test_a_value_on_a_normalised_scale_comes_back(seed: int, sizes: list[int], eps: float) -> None:
    batches = draws(seed, sizes, "real")
    seen = RunningStats()
    for batch in batches:
        seen = seen.including(tensor(batch))
    centre, std = oracles_rewards.moments(batches, unbiased=False)
    x = tensor([mean(batch) for batch in batches])
    if std > 0:
        target = [oracles_rewards.normalized_value_target(v, centre, std, eps) for v in x.tolist()]
        assert_equal(seen.standardised(x, eps), target)
        assert_equal(
            seen.natural(x, eps),
            [oracles_rewards.denormalized_value(v, centre, std, eps) for v in x.tolist()],
        )
    assert_equal(seen.natural(seen.standardised(x, eps), eps), x.tolist())
