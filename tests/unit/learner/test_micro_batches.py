"""Every row exactly once, budgets kept, groups whole where they fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.algorithms.contracts.cases import dense
from lightrft.learner.micro_batches import (
    SLACK,
    balance_across_ranks,
    local_micro_batches,
    micro_batches,
    mini_batches,
)
from lightrft.types import Batch, Segments


@dataclass
class Rank:
    """One of several processes that never need to talk."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        raise AssertionError

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError


LAYOUTS = ("prefix_shared", "packed", "padded")
GSM8K = Path(__file__).resolve().parents[3] / "data" / "gsm8k" / "train.jsonl"
SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=14)


def batch_of(rows: list[tuple[int, int]], prompt_length: int = 3) -> Batch:
    """One response for each ``(group, length)``; prompt p has ``prompt_length + p`` tokens."""
    prompt_of = dense([group for group, _ in rows])
    prompts = [[0] * (prompt_length + p) for p in range(max(prompt_of) + 1)]
    return Batch(
        Segments.of(prompts), Segments.of([[0] * n for _, n in rows]), torch.tensor(prompt_of)
    )


def cost(batch: Batch, index: torch.Tensor, layout: str) -> int:
    """The tokens that one forward over the rows ``index`` sees."""
    part = batch.select(index)
    both = part.prompts.lengths[part.prompt_of] + part.lengths
    if layout == "prefix_shared":
        return int(part.prompts.lengths.sum() + part.lengths.sum())
    return int(both.max()) * len(part) if layout == "padded" else int(both.sum())


def limit_of_group(budget: int, layout: str) -> int:
    """A cut would compute the shared prompt again, so a group may be a little larger."""
    return budget + budget // 32 if layout == "prefix_shared" else budget


@settings(deadline=None)
@given(SHAPES, st.integers(1, 80), st.sampled_from(LAYOUTS))
def test_micro_batches_hold_every_row_once_within_the_budget(
    rows: list[tuple[int, int]], budget: int, layout: str
) -> None:
    batch = batch_of(rows)
    parts = micro_batches(batch, budget, layout)
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(batch)))
    for part in parts:
        is_one_group = len(batch.prompt_of[part].unique()) == 1
        limit = limit_of_group(budget, layout) if is_one_group else budget
        assert len(part) == 1 or cost(batch, part, layout) <= limit


@settings(deadline=None)
@given(SHAPES, st.integers(1, 80), st.sampled_from(LAYOUTS))
def test_groups_that_fit_stay_whole(rows: list[tuple[int, int]], budget: int, layout: str) -> None:
    batch = batch_of(rows)
    parts = [set(part.tolist()) for part in micro_batches(batch, budget, layout)]
    for p in range(len(batch.prompts)):
        members = (batch.prompt_of == p).nonzero()[:, 0]
        if cost(batch, members, layout) <= limit_of_group(budget, layout):
            assert any(set(members.tolist()) <= part for part in parts)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 80), st.sampled_from(LAYOUTS))
def test_no_two_micro_batches_would_fit_in_one(
    rows: list[tuple[int, int]], budget: int, layout: str
) -> None:
    batch = batch_of(rows)
    parts = micro_batches(batch, budget, layout)
    whole = [
        part
        for part in parts
        if all(len(part) >= int((batch.prompt_of == p).sum()) for p in batch.prompt_of[part])
    ]
    for a in range(len(whole)):
        for b in range(a):
            assert cost(batch, torch.cat([whole[a], whole[b]]), layout) > budget


def test_a_prompt_is_paid_once_a_group_where_it_is_shared() -> None:
    batch = batch_of([(0, 2)] * 4, prompt_length=10)
    assert [len(p) for p in micro_batches(batch, 18, "prefix_shared")] == [4]
    assert [len(p) for p in micro_batches(batch, 24, "packed")] == [2, 2]


def test_a_long_prompt_is_not_computed_again_for_a_few_tokens_more() -> None:
    batch = batch_of([(0, 40)] * 4, prompt_length=1600)
    assert cost(batch, torch.arange(4), "prefix_shared") == 1760
    assert [len(p) for p in micro_batches(batch, 1707, "prefix_shared")] == [4]
    assert [len(p) for p in micro_batches(batch, 1706, "prefix_shared")] == [2, 2]
    assert [len(p) for p in micro_batches(batch, 6400, "packed")] == [3, 1]


def test_padding_is_paid_for() -> None:
    # 1 + 10 tokens in the longest row: two rows are 22 padded, though only 13 without padding
    batch = batch_of([(0, 10), (0, 1)], prompt_length=1)
    assert [p.tolist() for p in micro_batches(batch, 21, "padded")] == [[0], [1]]
    assert [p.tolist() for p in micro_batches(batch, 22, "padded")] == [[0, 1]]
    assert [p.tolist() for p in micro_batches(batch, 13, "packed")] == [[0, 1]]


def test_a_row_over_the_budget_goes_alone() -> None:
    batch = batch_of([(0, 50), (1, 1), (2, 1)], prompt_length=1)
    for layout in LAYOUTS:
        parts = [part.tolist() for part in micro_batches(batch, 10, layout)]
        assert [0] in parts
        assert sorted(map(len, parts)) == [1, 2]


def test_an_empty_batch_has_no_micro_batches() -> None:
    assert (
        micro_batches(
            batch_of([(0, 1)]).select(torch.zeros(0, dtype=torch.long)), 10, "prefix_shared"
        )
        == []
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 8), st.integers(0, 99))
def test_mini_batches_hold_every_row_once_and_are_nearly_equal(
    rows: list[tuple[int, int]], count: int, seed: int
) -> None:
    batch = batch_of(rows)
    parts = mini_batches(batch, count, seeded(seed))
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(batch)))
    assert len(parts) == min(count, len(batch))
    by_group = len(batch.prompts) >= count
    sizes = [len(batch.prompt_of[part].unique()) if by_group else len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    if by_group:
        assert sum(sizes) == len(batch.prompts)
    again = mini_batches(batch, count, seeded(seed))
    assert [p.tolist() for p in again] == [p.tolist() for p in parts]


def test_mini_batches_are_drawn_anew_by_each_generator() -> None:
    batch = batch_of([(g, 1) for g in range(6) for _ in range(2)])
    drawn = {str([p.tolist() for p in mini_batches(batch, 3, seeded(s))]) for s in range(8)}
    assert len(drawn) > 1


@settings(deadline=None)
@given(SHAPES, st.integers(1, 80), st.sampled_from(LAYOUTS), st.integers(1, 5))
def test_over_all_ranks_every_row_occurs_once_in_as_many_micro_batches_on_each(
    rows: list[tuple[int, int]], budget: int, layout: str, size: int
) -> None:
    batch = batch_of(rows)
    parts = [
        [part.index for part in local_micro_batches(batch, budget, layout, Rank(rank, size))]
        for rank in range(size)
    ]
    assert len({len(part) for part in parts}) == 1
    assert sorted(i for part in parts for index in part for i in index.tolist()) == list(
        range(len(batch))
    )
    for index in (index for part in parts for index in part if len(index) > 1):
        is_one_group = len(batch.prompt_of[index].unique()) == 1
        limit = limit_of_group(budget, layout) if is_one_group else budget
        assert cost(batch, index, layout) <= limit


@settings(deadline=None)
@given(SHAPES, st.integers(1, 80), st.integers(1, 5))
def test_ranks_agree_on_the_key_of_a_micro_batch_and_it_names_the_prompts_of_all_of_them(
    rows: list[tuple[int, int]], budget: int, size: int
) -> None:
    whole = batch_of(rows).numbered()
    # Numbers stay with their prompts where rows are left out.
    batch = whole.select(torch.arange(0, len(rows), 2))
    of_ranks = [
        local_micro_batches(batch, budget, "packed", Rank(rank, size)) for rank in range(size)
    ]
    for parts in zip(*of_ranks, strict=True):
        assert len({part.media_key for part in parts}) == 1
        named = parts[0].media_key
        for part, numbers in zip(parts, named, strict=True):
            made = part.of(batch)
            assert made.prompts.numbers is not None
            assert made.prompts.numbers.tolist() == list(numbers)
            assert made.to("cpu").prompts.media_key == named
            lengths = whole.prompts.lengths[made.prompts.numbers]
            assert lengths.equal(made.prompts.lengths)


def test_micro_batches_of_a_batch_without_numbers_have_no_key() -> None:
    batch = batch_of([(0, 2), (1, 2)])
    parts = local_micro_batches(batch, 100, "packed", Rank(0, 2))
    assert [part.media_key for part in parts] == [None]


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5))
def test_a_rank_has_more_than_its_due_by_no_more_than_one_answer(
    rows: list[tuple[int, int]], size: int
) -> None:
    batch = batch_of(rows)
    loads = [
        cost(batch, index, "packed") if len(index) else 0
        for index in balance_across_ranks(batch, "packed", size)
    ]
    due, one = (
        sum(loads) / size,
        max(cost(batch, torch.tensor([i]), "packed") for i in range(len(batch))),
    )
    assert max(loads) <= max(SLACK * due, due + one)


def test_groups_stay_whole_where_every_rank_gets_its_due() -> None:
    batch = batch_of([(group, 4) for group in range(6) for _ in range(3)])
    for index in balance_across_ranks(batch, "prefix_shared", 3):
        assert torch.bincount(batch.prompt_of[index], minlength=6).tolist().count(3) == 2


def worked_solutions() -> list[tuple[int, int]]:
    """Tokens of the first 512 questions of GSM8K and of their solutions, four characters to a token."""
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()[:512]]
    return [(len(row["question"]) // 4, len(row["answer"]) // 4) for row in rows]


def long_answers() -> list[tuple[int, int]]:
    """Log-normal lengths as reasoning has them, cut at 4,096 tokens."""
    lengths = torch.exp(math.log(500) + 0.9 * torch.randn(512, generator=seeded(0)))
    return [(100, int(n)) for n in lengths.clamp(1, 4096)]


def work(batch: Batch, rows: list[int], layout: str) -> int:
    """The tokens that a rank with ``rows`` computes, group by group."""
    prompts, answers = batch.prompts.lengths.tolist(), batch.lengths.tolist()
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(int(batch.prompt_of[row]), []).append(answers[row])
    if layout == "prefix_shared":
        return sum(prompts[p] + sum(lengths) for p, lengths in groups.items())
    if layout == "padded":
        return sum(len(lengths) * (prompts[p] + max(lengths)) for p, lengths in groups.items())
    return sum(len(lengths) * prompts[p] + sum(lengths) for p, lengths in groups.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [worked_solutions, long_answers])
@pytest.mark.parametrize("samples", [1, 8])
def test_of_512_samples_the_slowest_rank_has_at_most_a_twentieth_more_than_the_mean(
    lengths: Callable[[], list[tuple[int, int]]], samples: int, layout: str
) -> None:
    found = lengths()
    prompts = Segments.of([[0] * n for n, _ in found[::samples]])
    batch = Batch(prompts, Segments.of([[0] * n for _, n in found]), torch.arange(512) // samples)
    for ranks in (2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 40, 48, 56, 64):
        parts = [part.tolist() for part in balance_across_ranks(batch, layout, ranks)]
        assert sorted(row for part in parts for row in part) == list(range(512))
        loads = [work(batch, part, layout) for part in parts]
        assert max(loads) <= 1.05 * sum(loads) / ranks, f"{ranks} ranks"
