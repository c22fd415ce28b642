"""The weighted sum of losses of reward models: shares, splits, heads, weights and ensembles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from lightrft.algorithms.contracts.preference_cases import selected
from lightrft.algorithms.contracts.reward_cases import scored_responses
from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.objective import reward_loss, reward_terms, totals_of
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.utils.errors import DataError
from tests.unit.algorithms.reward_model.examples import loss_of, numbers, scored, settings, value

PAIR = {"name": "bradley_terry", "options": {"per": "pair"}}
GROUPS = [1, 0, 2, 0, 1, 1, 0, 3, 3, 2, 4]
EVERY = settings(
    *("bradley_terry", {"name": "hps", "weight": 0.5, "options": {"per": "pair"}}),
    *("rao_kupper", {"name": "tie_distance", "weight": 0.01}, "plackett_luce", "mse"),
    *({"name": "centre", "weight": 0.01}, "cost_sign"),
)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_each_group_counts_once_however_many_pairs_it_has() -> None:
    data = scored([0.3, 1.0, -0.5, 2.0, 1.0], rank=[0, 1, 2, 0, 1], group_of=[0, 0, 0, 1, 1])
    losses = loss_of("bradley_terry", data)
    assert len(losses) == 4
    expected = (mean(losses[:3]) + losses[3]) / 2
    assert value(data, settings()) == pytest.approx(expected, rel=1e-14)
    assert value(data, settings(PAIR)) == pytest.approx(mean(losses), rel=1e-14)


def test_ties_and_pairs_share_the_unit_of_their_group() -> None:
    data = scored([0.3, 1.0, 1.5, 2.0, 1.0], rank=[0, 0, 1, 0, 1], group_of=[0, 0, 0, 1, 1])
    losses = loss_of("davidson", data)
    # two pairs and one of the other group come before the tie
    expected = (mean([losses[0], losses[1], losses[3]]) + losses[2]) / 2
    assert value(data, settings("davidson")) == pytest.approx(expected, rel=1e-14)


def test_a_group_without_a_pair_does_not_count_in_a_loss_of_groups() -> None:
    data = scored([0.3, 1.0, 2.0, 2.5], rank=[0, 1, 0, 0], group_of=[0, 0, 1, 1])
    expected = loss_of("plackett_luce", data)[0]
    assert value(data, settings("plackett_luce")) == pytest.approx(expected, rel=1e-14)


def whole_batch() -> ScoredResponses:
    return scored_responses(GROUPS, "linear")


def with_leaf(data: ScoredResponses, leaf: torch.Tensor) -> ScoredResponses:
    return dataclasses.replace(data, outputs=leaf[:, None], scores=leaf)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3, 4]], [[4, 1], [0], [3, 2]], [[0], [1], [2], [3, 4]]]
)
def test_any_split_of_the_groups_has_the_loss_and_gradient_of_the_batch(
    split: list[list[int]], weighed: bool
) -> None:
    data = whole_batch()
    if weighed:
        own = numbers([0.5, 2.0, 0.0, 1.0, 3.0])
        data = dataclasses.replace(data, example_weights=own[data.group_of])
    leaf = data.scores.clone().requires_grad_()
    whole = reward_loss(reward_terms({"preference": with_leaf(data, leaf)}, EVERY))
    (expected,) = torch.autograd.grad(whole, leaf)
    # labels alone decide the totals
    unknown = dataclasses.replace(data, scores=torch.zeros_like(leaf))
    totals = totals_of({"preference": unknown}, EVERY)
    losses = []
    for groups in split:
        index = torch.isin(data.group_of, torch.tensor(groups)).nonzero()[:, 0]
        part = selected(with_leaf(data, leaf), index)
        dense = torch.unique(part.group_of, return_inverse=True)[1]
        part = dataclasses.replace(part, group_of=dense)
        losses.append(reward_loss(reward_terms({"preference": part}, EVERY), totals))
    total = torch.stack(losses).sum()
    (found,) = torch.autograd.grad(total, leaf)
    assert total.item() == pytest.approx(whole.item(), rel=1e-13)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_a_group_of_weight_2_counts_as_two_and_one_of_weight_0_not_at_all() -> None:
    scores, rank, rating = [0.3, 1.0, 2.0, 1.0, 9.0, -9.0], [0, 1] * 3, [1.0, 0.0] * 3
    group_of, weights = [0, 0, 1, 1, 2, 2], [2.0, 2.0, 1.0, 1.0, 0.0, 0.0]
    weighed = scored(scores, rank, group_of, rating, weights=weights)
    again = [0.3, 1.0, 0.3, 1.0, 2.0, 1.0]
    repeated = scored(again, rank, [0, 0, 1, 1, 2, 2], rating)
    for name in ("bradley_terry", "rao_kupper", "plackett_luce", "mse"):
        found = value(weighed, settings(name))
        assert found == pytest.approx(value(repeated, settings(name)), rel=1e-14)


def test_each_head_has_its_own_losses_and_labels() -> None:
    heads = ["preference", {"name": "quality", "kind": "classes", "size": 4}]
    chosen = settings(
        {"name": "bradley_terry", "head": "preference"},
        {"name": "cross_entropy", "head": "quality", "weight": 0.5},
        heads=heads,
    )
    pair = scored([1.0, 0.0], rank=[0, 1])
    rated = scored([0.0], rating=[3.0], outputs=[[0.0] * 4])
    found = value({"preference": pair, "quality": rated}, chosen)
    expected = math.log1p(math.exp(-1)) + 0.5 * math.log(4)
    assert found == pytest.approx(expected, rel=1e-14)
    terms = reward_terms({"preference": pair, "quality": rated}, chosen)
    assert [(term.name, term.head) for term in terms] == [
        ("bradley_terry", "preference"),
        ("cross_entropy", "quality"),
    ]


def test_a_loss_without_a_head_reads_every_head() -> None:
    chosen = settings("bradley_terry", heads=["a", "b"])
    first, second = scored([1.0, 0.0], rank=[0, 1]), scored([0.0, 1.0], rank=[0, 1])
    expected = mean(loss_of("bradley_terry", first)) + mean(loss_of("bradley_terry", second))
    assert value({"a": first, "b": second}, chosen) == pytest.approx(expected, rel=1e-14)


def test_each_member_of_an_ensemble_has_its_own_loss_and_gradient() -> None:
    head = {"name": "preference", "kind": "ensemble", "size": 2}
    chosen = settings({"name": "bradley_terry", "weight": 2.0}, heads=[head])
    outputs = numbers([1.0, -3.0, 0.0, 2.0]).view(2, 2).requires_grad_()
    data = ScoredResponses(
        outputs, outputs.mean(1), torch.tensor([0, 0]), rank=torch.tensor([0, 1])
    )
    loss = reward_loss(reward_terms({"preference": data}, chosen))
    own = [math.log1p(math.exp(-1.0)), math.log1p(math.exp(5.0))]
    assert loss.item() == pytest.approx(2 * mean(own), rel=1e-14)
    (slope,) = torch.autograd.grad(loss, outputs)
    first, second = -torch.sigmoid(numbers([-1.0, 5.0])).numpy()
    # 2 / 2 members: the slope of a member is that of its own loss
    assert slope[0].tolist() == pytest.approx([first, second])
    assert slope[1].tolist() == pytest.approx([-first, -second])


def test_equal_members_of_an_ensemble_have_the_loss_of_one_linear_head() -> None:
    data = whole_batch()
    three = dataclasses.replace(data, outputs=data.scores[:, None].repeat(1, 3))
    head = {"name": "preference", "kind": "ensemble", "size": 3}
    ensemble = EVERY.model_copy(update={"heads": settings(heads=[head]).heads})
    assert value(three, ensemble) == pytest.approx(value(data, EVERY), rel=1e-14)


def test_a_head_without_labels_in_a_batch_is_left_out_and_the_loss_keeps_its_graph() -> None:
    chosen = settings("bradley_terry", heads=["a", "b"])
    leaf = numbers([1.0, 0.0]).requires_grad_()
    data = ScoredResponses(leaf[:, None], leaf, torch.tensor([0, 0]), torch.tensor([0, 1]))
    bare = scored([0.0, 1.0], rank=[0, 0])
    loss = reward_loss(reward_terms({"a": data, "b": bare}, chosen))
    assert loss.item() == pytest.approx(loss_of("bradley_terry", data)[0])
    # a micro-batch whose labels are all elsewhere has the loss 0 with a gradient of 0
    alone = dataclasses.replace(data, rank=torch.tensor([0, 0]))
    rest = reward_loss(reward_terms({"a": alone, "b": alone}, chosen), (3.0, 0.0))
    (slope,) = torch.autograd.grad(rest, leaf)
    assert (rest.item(), slope.tolist()) == (0.0, [0.0, 0.0])


@pytest.mark.parametrize("name", ["bradley_terry", "plackett_luce", "mse"])
def test_a_batch_without_any_label_is_an_error_and_not_a_loss_of_nan(name: str) -> None:
    for data in (scored([0.0, 1.0]), scored([]), scored([0.0, 1.0], rank=[0, 0])):
        with pytest.raises(DataError, match=f"no label for any loss \\({name} of head preference"):
            value(data, settings(name))
    weightless = scored([0.0, 1.0], rank=[0, 1], rating=[0.0, 1.0], weights=[0.0, 0.0])
    with pytest.raises(DataError, match="raise example_weights above 0"):
        value(weightless, settings(name))


def test_the_terms_of_a_cost_model_are_those_of_safe_rlhf() -> None:
    # pairs of a more and a less harmful response, as in the authors' trainer
    harm, less, unsafe, less_unsafe = [1.0, 2.0], [0.5, -1.0], [1.0, 1.0], [1.0, 0.0]
    data = scored(
        [harm[0], less[0], harm[1], less[1]],
        rank=[0, 1, 0, 1],
        group_of=[0, 0, 1, 1],
        rating=[unsafe[0], less_unsafe[0], unsafe[1], less_unsafe[1]],
    )
    scale = 0.7
    chosen = settings(
        "bradley_terry",
        {"name": "cost_sign", "weight": 2 * scale},
        {"name": "l2", "weight": 0.01},
    )

    def softplus(x: float) -> float:
        return math.log1p(math.exp(x))

    order = mean([softplus(b - a) for a, b in zip(harm, less, strict=True)])
    sign = mean([softplus(-c) for c in harm]) + mean([softplus(-0.5), softplus(-1.0)])
    square = mean([c * c for c in [*harm, *less]])
    expected = order + scale * sign + 0.01 * square
    assert value(data, chosen) == pytest.approx(expected, rel=1e-14)


def shifted_mean(data: ScoredResponses, *, target: float) -> torch.Tensor:
    """A user's loss of ratings."""
    return (data.scores[data.rated()] - target).square()


def test_a_function_of_the_user_takes_options_and_is_averaged_by_its_kind() -> None:
    function: Any = shifted_mean
    function.kind = "rating"
    name = f"{__name__}:shifted_mean"
    try:
        part = {"name": name, "options": {"target": 1.0}}
        data = scored([0.0, 4.0, 5.0], rating=[1.0, 1.0, float("nan")])
        assert value(data, settings(part)) == pytest.approx((1 + 9) / 2)
    finally:
        del function.kind
    assert name not in REWARD_LOSSES


def test_the_defaults_are_the_loss_of_bradley_and_terry() -> None:
    data = scored([1.0, 0.0], rank=[0, 1])
    assert value(data, RewardModelConfig()) == pytest.approx(math.log1p(math.exp(-1)))


def test_a_group_of_several_pairs_counts_once_in_a_loss_of_groups() -> None:
    data = scored([0.3, 1.0, -0.5, 2.0, 1.0], rank=[0, 1, 2, 0, 1], group_of=[0, 0, 0, 1, 1])
    three, two = loss_of("plackett_luce", data)
    expected = (three + two) / 2
    assert value(data, settings("plackett_luce")) == pytest.approx(expected, rel=1e-14)


def test_totals_of_another_number_than_terms_are_an_error() -> None:
    terms = reward_terms({"preference": scored([1.0, 0.0], rank=[0, 1])}, settings())
    with pytest.raises(ValueError, match="zip"):
        reward_loss(terms, [1.0, 1.0])
