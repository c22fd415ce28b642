"""Arguments of preference losses: selection, means over tokens and padded groups."""

from __future__ import annotations

import torch

from lightrft.algorithms.preference.inputs import Ranked, Responses
from tests.unit.algorithms.preference.examples import numbers, ranked, responses


def test_a_selection_has_every_column_in_its_order() -> None:
    columns = [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0], [1.0, 2.0, 3.0], [0.1, 0.2, 0.3]]
    whole = Responses(*(numbers(*column) for column in columns), wpo=numbers(0.7, 0.8, 0.9))
    part = whole.select(torch.tensor([2, 0]))
    found = [part.logprobs, part.ref_logprobs, part.tokens, part.sequence_kl, part.wpo]
    expected = [[-3, -1], [-6, -4], [3, 1], [0.3, 0.1], [0.9, 0.7]]
    assert [None if column is None else column.tolist() for column in found] == expected


def test_a_selection_without_optional_columns_has_none() -> None:
    part = responses([-1.0, -2.0], [-3.0, -4.0]).select(torch.tensor([1]))
    assert part.sequence_kl is None
    assert part.wpo is None


def test_a_mean_divides_by_the_tokens_and_a_response_without_any_keeps_its_0() -> None:
    found = responses([-6.0, 0.0], [0.0, 0.0], [3.0, 0.0])
    assert found.mean(found.logprobs).tolist() == [-2, 0]


def test_groups_are_padded_to_the_largest_in_the_order_of_their_responses() -> None:
    data = ranked([0.0] * 5, [0] * 5, group_of=[1, 0, 2, 1, 1])
    index, real = data.padded()
    assert len(data) == 3
    assert real.tolist() == [[True, False, False], [True] * 3, [True, False, False]]
    assert index.tolist() == [[1, 0, 0], [0, 3, 4], [2, 0, 0]]


def test_no_group_has_no_places() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    data = Ranked(responses([], [], []), nothing, nothing)
    index, real = data.padded()
    assert len(data) == 0
    assert index.shape == real.shape == (0, 0)
