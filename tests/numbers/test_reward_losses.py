"""Every loss of reward models with every option equals its oracle, in value and gradient."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.objective import reward_loss, reward_terms
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.datasets.preference.preference_rows import margins_of
from tests.numbers import oracles_preference, oracles_reward
from tests.numbers.compare import assert_equal, tensor
from tests.numbers.exact import Number, evaluate, gradient
from tests.numbers.strategies import SEEDS

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "bradley_terry": [
        {"margin": True},
        {"label_smoothing": 0.2},
        {"weight": "margin"},
        {"margin": True, "weight": "margin", "label_smoothing": 0.1},
    ],
    "hps": [{"label_smoothing": 0.2}],
    "rao_kupper": [{"theta": 1.01}, {"theta": 5.0}],
    "cost_sign": [{"unsafe_from": 1.0}, {"unsafe_from": 0.5}],
    "davidson": [{"nu": 0.01}, {"nu": 3.0}],
}
"""Options of each loss, next to its defaults."""

HEADS = {"cross_entropy": 4, "ordinal": 3, "gaussian_nll": 2, "thurstone": 2}
"""Number of outputs of the head of each loss that reads outputs; other losses read the score."""

HIGHEST = {"cross_entropy": 3, "ordinal": 3, "cost_sign": 1}
"""Largest rating of each loss that bounds it."""

CASES = [(name, options) for name in REWARD_LOSSES for options in [{}, *OPTIONS.get(name, [])]]


def label(case: tuple[str, dict[str, Any]]) -> str:
    name, options = case
    return " ".join([name, *(f"{k}={v}" for k, v in options.items())])


@dataclass(frozen=True)
class Rows:
    """Responses as plain numbers. ``inputs`` is a score, or a list of outputs, of each."""

    inputs: list[Any]
    group_of: list[int]
    rank: list[int]
    rating: list[float]
    value: list[float]

    @property
    def groups(self) -> list[list[int]]:
        return [[i for i, g in enumerate(self.group_of) if g == k] for k in self.numbers]

    @property
    def numbers(self) -> range:
        return range(max(self.group_of) + 1)

    def pairs(self) -> Iterator[tuple[int, int]]:
        for members in self.groups:
            for i in members:
                for j in members:
                    if 0 <= self.rank[i] < self.rank[j]:
                        yield i, j

    def ties(self) -> Iterator[tuple[int, int]]:
        for members in self.groups:
            for i in members:
                for j in members:
                    if i < j and 0 <= self.rank[i] == self.rank[j]:
                        yield i, j

    def margin(self, i: int, j: int) -> float:
        """How much better i is than the best response of the rank of j."""
        same = self.groups[self.group_of[i]]
        return self.value[i] - max(self.value[k] for k in same if self.rank[k] == self.rank[j])


def pair_oracle(name: str, rows: Rows, options: dict[str, Any]) -> Callable[..., list[Number]]:
    loss = getattr(oracles_reward, name)

    def of(inputs: list[Any]) -> list[Number]:
        found = []
        for i, j in rows.pairs():
            given = dict(options)
            if name == "bradley_terry":
                given = {
                    "m": rows.margin(i, j) if options.get("margin") else 0,
                    "weight": rows.margin(i, j) if options.get("weight") == "margin" else 1,
                    "label_smoothing": options.get("label_smoothing", 0),
                }
            found.append(loss(inputs[i], inputs[j], **given))
        return found

    return of


def tie_oracle(name: str, rows: Rows, options: dict[str, Any]) -> Callable[..., list[Number]]:
    loss = getattr(oracles_reward, f"{name}_tie")
    own = {} if name == "hps" else options

    def of(inputs: list[Any]) -> list[Number]:
        pairs = pair_oracle(name, rows, options)(inputs)
        return [*pairs, *(loss(inputs[i], inputs[j], **own) for i, j in rows.ties())]

    return of


def rating_oracle(name: str, rows: Rows, options: dict[str, Any]) -> Callable[..., list[Number]]:
    loss = getattr(oracles_reward, name)
    rated = [i for i, y in enumerate(rows.rating) if not math.isnan(y)]
    return lambda inputs: [loss(inputs[i], rows.rating[i], **options) for i in rated]


def group_oracle(name: str, rows: Rows, options: dict[str, Any]) -> Callable[..., list[Number]]:
    loss = getattr(oracles_preference, name)

    def of(inputs: list[Any]) -> list[Number]:
        found = []
        for members in rows.groups:
            ranked = [i for i in members if rows.rank[i] >= 0]
            scores, ranks = [inputs[i] for i in ranked], [rows.rank[i] for i in ranked]
            found.append(loss(scores, ranks) if ranked else 0 * inputs[0])
        return found

    return of


ORACLES = {"pair": pair_oracle, "tie": tie_oracle, "rating": rating_oracle, "group": group_oracle}


@st.composite
def groups_of(draw: Any, name: str) -> Rows:
    """Groups in any order of their responses, with ties, equal scores and missing labels."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    scale = draw(st.sampled_from([0.0, 0.1, 2.0, 8.0]))
    rng = random.Random(draw(SEEDS))
    group_of = [g for g, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(group_of)
    count = len(group_of)
    value = [rng.choice([0.0, 0.5, 0.7, 2.0]) for _ in range(count)]
    rank = dense_by_group(group_of, value)
    highest = HIGHEST.get(name, 3)
    rating = [rng.choice([math.nan, 0.0, highest, rng.uniform(0, highest)]) for _ in range(count)]
    columns = HEADS.get(name, 0)
    flat = [rng.uniform(-scale, scale) for _ in range(count * max(1, columns))]
    inputs: list[Any] = flat
    if columns:
        inputs = [flat[columns * i : columns * (i + 1)] for i in range(count)]
    if draw(st.booleans()):
        rank[rng.randrange(count)] = -1
        # a rank may have lost its best response: the margins say how much better the rest is
        kept = [i for i in range(count) if rank[i] >= 0]
        fresh = dense_by_group([group_of[i] for i in kept], [value[i] for i in kept])
        for i, place in zip(kept, fresh, strict=True):
            rank[i] = place
    return Rows(inputs, group_of, rank, rating, value)


def dense_by_group(group_of: list[int], value: list[float]) -> list[int]:
    rank = []
    for group, own in zip(group_of, value, strict=True):
        better = {v for g, v in zip(group_of, value, strict=True) if g == group and v > own}
        rank.append(len(better))
    return rank


def margins_by_group(rows: Rows) -> list[float]:
    """The column ``margin``, as the reader of a row makes it."""
    margin = [0.0] * len(rows.value)
    for members in rows.groups:
        kept = [i for i in members if rows.rank[i] >= 0]
        found = margins_of([rows.value[i] for i in kept], [rows.rank[i] for i in kept])
        for i, gap in zip(kept, found, strict=True):
            margin[i] = gap
    return margin


def scored(rows: Rows) -> tuple[ScoredResponses, Tensor]:
    """The argument of the losses, and its leaf."""
    leaf = tensor(rows.inputs).requires_grad_()
    has_outputs = leaf.dim() == 2
    data = ScoredResponses(
        leaf if has_outputs else leaf[:, None],
        leaf[:, 0] if has_outputs else leaf,
        torch.tensor(rows.group_of),
        torch.tensor(rows.rank),
        tensor(rows.rating),
        tensor(margins_by_group(rows)),
    )
    return data, leaf


def slope(total: Tensor, leaf: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(total, leaf)
    return found.flatten().tolist()


@pytest.mark.parametrize("case", CASES, ids=label)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_a_loss_of_a_reward_model_is_its_oracle_in_value_and_gradient(
    case: tuple[str, dict[str, Any]], data: Any
) -> None:
    name, options = case
    rows = data.draw(groups_of(name))
    responses, leaf = scored(rows)
    losses = REWARD_LOSSES[name](responses, **options)
    oracle = ORACLES[REWARD_LOSSES.about(name).kind](name, rows, options)
    assert_equal(losses, evaluate(oracle, [rows.inputs]))
    if not len(losses):
        return
    # unequal weights: the gradient of a plain sum would miss a swap
    weights = [1.0 + 0.5 * k for k in range(len(losses))]
    found = slope((losses * tensor(weights)).sum(), leaf)

    def total(inputs: list[Any]) -> Number:
        return sum(c * loss for c, loss in zip(weights, oracle(inputs), strict=True))

    expected = gradient(total, [rows.inputs])[0]
    flat = tensor(expected).flatten().tolist()
    assert found == pytest.approx(flat, rel=1e-9, abs=1e-9)


def test_every_option_of_a_loss_of_reward_models_is_compared() -> None:
    for name in REWARD_LOSSES:
        known = set(COMPONENT_KINDS["reward_model"].options(REWARD_LOSSES[name]))
        compared = {key for options in OPTIONS.get(name, []) for key in options}
        assert compared == known, name


@settings(deadline=None, max_examples=25)
@given(rows=groups_of("bradley_terry"), per=st.sampled_from(["group", "pair"]))
def test_the_gradient_of_k_responses_is_that_of_their_pairs_one_by_one(
    rows: Rows, per: str
) -> None:
    tree = {"losses": [{"name": "bradley_terry", "options": {"per": per}}]}
    chosen = RewardModelConfig.model_validate(tree)
    pairs = list(rows.pairs())
    if not pairs:
        return
    responses, leaf = scored(rows)
    loss = reward_loss(reward_terms({"preference": responses}, chosen))
    found = slope(loss, leaf)
    groups = {rows.group_of[i] for i, _ in pairs}
    of_group = {g: [pair for pair in pairs if rows.group_of[pair[0]] == g] for g in groups}
    alone = tensor(rows.inputs).requires_grad_()
    values = []
    for own in of_group.values():
        for pair in own:
            scores = alone[torch.tensor(pair)]
            two = ScoredResponses(
                scores[:, None], scores, torch.zeros(2).long(), torch.tensor([0, 1])
            )
            share = 1 / (len(own) * len(of_group)) if per == "group" else 1 / len(pairs)
            terms = reward_terms({"preference": two}, RewardModelConfig())
            values.append(share * reward_loss(terms))
    total = torch.stack(values).sum()
    assert loss.item() == pytest.approx(total.item(), rel=1e-12)
    assert found == pytest.approx(slope(total, alone), rel=1e-9, abs=1e-12)
