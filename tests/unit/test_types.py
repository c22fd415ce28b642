"""Batches and their parts: what goes in comes out, by identity and in the order asked for."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.types import Batch, Ragged, Segments, rows_of
from tests.numbers.oracles import Case
from tests.numbers.strategies import SEEDS, batch_of, cases, partitions, plain_case

Rows = list[list[int]]
ROWS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6)


def segments(rows: Rows, seed: int = 0) -> Segments:
    """Runs with two kinds of media, some runs without any."""
    rng = random.Random(seed)
    lengths = [rng.randint(0, 2) for _ in rows]
    pictures = Ragged(
        torch.randn(sum(lengths), 3, 2, generator=torch.Generator().manual_seed(seed)),
        torch.tensor(lengths),
    )
    grids = Ragged(
        torch.arange(len(rows))[:, None].expand(-1, 3).clone(),
        torch.ones(len(rows), dtype=torch.long),
    )
    return Segments.of(rows, {"pixels": pictures, "grids": grids})


def run(s: Segments, i: int) -> tuple[list[int], dict[str, list]]:
    """Run ``i`` as plain lists."""

    def piece(values: torch.Tensor, lengths: torch.Tensor) -> list:
        start = int(lengths[:i].sum())
        return values[start : start + int(lengths[i])].tolist()

    return piece(s.tokens, s.lengths), {k: piece(r.values, r.lengths) for k, r in s.media.items()}


def row(batch: Batch, i: int) -> dict[str, object]:
    """Response ``i`` with its prompt and all its columns as plain lists."""
    start = int(batch.lengths[:i].sum())
    tokens = {
        k: v[start : start + int(batch.lengths[i])].tolist()
        for k, v in batch.columns("token").items()
    }
    samples = {k: v[i].item() for k, v in batch.columns("sample").items()}
    return {
        "prompt": run(batch.prompts, int(batch.prompt_of[i])),
        "response": run(batch.responses, i),
        **tokens,
        **samples,
    }


def with_media(case: Case, seed: int) -> Batch:
    batch = batch_of(case)
    batch.prompts = segments([[p, p + 10] for p in range(len(batch.prompts))], seed)
    return batch


def groups(batch: Batch) -> set[frozenset[float]]:
    """Which responses share a prompt, named by a number that each carries."""
    return {
        frozenset(batch.final_values[batch.prompt_of == p].tolist())  # type: ignore[index]
        for p in range(len(batch.prompts))
        if (batch.prompt_of == p).any()
    }


@settings(deadline=None)
@given(ROWS, st.data())
def test_rows_of_are_the_places_of_the_runs_asked_for(rows: Rows, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    flat = torch.tensor([t for r in rows for t in r], dtype=torch.long)
    found = flat[
        rows_of(torch.tensor([len(r) for r in rows]), torch.tensor(index, dtype=torch.long))
    ]
    assert found.tolist() == [t for i in index for t in rows[i]]


def test_selecting_all_samples_as_they_are_copies_no_media() -> None:
    ragged = Ragged(torch.randn(5, 2), torch.tensor([2, 0, 3]))
    whole = Segments.of([[1], [2], [3]], {"x": ragged})
    assert whole.select(torch.arange(3)).media["x"].values.data_ptr() == ragged.values.data_ptr()
    assert torch.equal(
        whole.select(torch.tensor([2, 1, 0])).media["x"].values, ragged.values[[2, 3, 4, 0, 1]]
    )
    assert len(whole.select(torch.arange(2)).media["x"].values) == 2


@settings(deadline=None)
@given(ROWS, SEEDS, st.data())
def test_segments_select_in_the_order_of_the_index_with_their_media(
    rows: Rows, seed: int, data: st.DataObject
) -> None:
    whole = segments(rows, seed)
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    found = whole.select(torch.tensor(index, dtype=torch.long))
    assert [run(found, k) for k in range(len(found))] == [run(whole, i) for i in index]
    assert found.media["pixels"].values.shape[1:] == (3, 2)


@settings(deadline=None)
@given(ROWS, SEEDS, st.data())
def test_segments_split_and_joined_are_the_same(rows: Rows, seed: int, data: st.DataObject) -> None:
    whole = segments(rows, seed)
    cut = data.draw(st.integers(0, len(rows)))
    joined = Segments.cat(
        [whole.select(torch.arange(cut)), whole.select(torch.arange(cut, len(rows)))]
    )
    assert [run(joined, i) for i in range(len(rows))] == [run(whole, i) for i in range(len(rows))]


def test_a_part_without_some_media_contributes_rows_of_length_zero() -> None:
    plain, rich = Segments.of([[1], [2, 3]]), segments([[4], [5]], seed=3)
    joined = Segments.cat([plain, rich, plain])
    for name, media in rich.media.items():
        assert joined.media[name].lengths.tolist() == [0, 0, *media.lengths.tolist(), 0, 0]
        assert torch.equal(joined.media[name].values, media.values)


@settings(deadline=None)
@given(cases(), SEEDS, st.data())
def test_a_batch_dealt_out_and_joined_has_every_row_once(
    case: Case, seed: int, data: st.DataObject
) -> None:
    batch = with_media(case, seed)
    parts = data.draw(partitions(len(batch)))
    joined = Batch.cat(batch.split(torch.tensor(p) for p in parts))
    order = [i for part in parts for i in part]
    assert [row(joined, k) for k in range(len(joined))] == [row(batch, i) for i in order]


@settings(deadline=None)
@given(cases(), SEEDS, st.data())
def test_selecting_keeps_only_the_prompts_that_are_used_each_once(
    case: Case, seed: int, data: st.DataObject
) -> None:
    batch = with_media(case, seed)
    index = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=8))
    found = batch.select(torch.tensor(index, dtype=torch.long))
    assert [row(found, k) for k in range(len(found))] == [row(batch, i) for i in index]
    assert len(found.prompts) == len({case.prompt_of[i] for i in index})
    assert found.prompt_of.unique().tolist() == list(range(len(found.prompts)))


@settings(deadline=None)
@given(cases(), st.data())
def test_groups_survive_shuffling(case: Case, data: st.DataObject) -> None:
    case.final_values = [float(i) for i in range(len(case))]
    batch = batch_of(case)
    order = data.draw(st.permutations(range(len(batch))))
    assert groups(batch.select(torch.tensor(order))) == groups(batch)
    assert groups(batch) == {frozenset(map(float, members)) for members in case.groups().values()}


def test_equal_prompts_of_two_batches_stay_two_groups() -> None:
    batch = batch_of(plain_case([[True], [True]], [0, 0]))
    joined = Batch.cat([batch, batch])
    assert joined.prompt_of.tolist() == [0, 0, 1, 1]
    assert joined.prompts.tokens.tolist() == [0, 0]


def test_batches_with_different_columns_are_not_joined() -> None:
    batch = batch_of(plain_case([[True]], [0]))
    with pytest.raises(ValueError, match=r"different token columns .*ref_logprobs"):
        Batch.cat([batch, batch.replace(ref_logprobs=None)])
    with pytest.raises(ValueError, match=r"different sample columns .*truncated"):
        Batch.cat([batch.replace(truncated=None), batch])


def test_every_column_declares_an_axis_and_follows_a_selection() -> None:
    batch = batch_of(plain_case([[True, False], [], [True]], [0, 1, 1]))
    named = {f.name for f in dataclasses.fields(Batch)} - {
        "prompts",
        "responses",
        "prompt_of",
        "_groups",
        "term_names",
    }
    full = batch.replace(
        **{
            n: torch.ones(3)
            for n in named - set(batch.columns("token")) - set(batch.columns("sample"))
        }
    )
    assert set(full.columns("token")) | set(full.columns("sample")) == named
    found = full.select(torch.tensor([0]))
    assert {len(c) for c in found.columns("token").values()} == {2}
    assert {len(c) for c in found.columns("sample").values()} == {1}


def test_names_of_terms_follow_a_batch_and_other_names_cannot_be_joined() -> None:
    plain = batch_of(plain_case([[True], [True]], [0, 1]))
    batch = dataclasses.replace(plain, terms=torch.ones(2, 1), term_names=("a",))
    other = dataclasses.replace(batch, term_names=("b",))
    found = [batch.select(torch.tensor([1])), batch.to("cpu"), Batch.cat([batch, batch])]
    assert [one.term_names for one in found] == [("a",)] * 3
    with pytest.raises(ValueError, match="different reward terms"):
        Batch.cat([batch, other])


@settings(deadline=None, max_examples=20)
@given(cases(), SEEDS)
def test_moving_to_the_same_device_changes_nothing(case: Case, seed: int) -> None:
    batch = with_media(case, seed)
    moved = batch.to("cpu")
    assert [row(moved, i) for i in range(len(batch))] == [row(batch, i) for i in range(len(batch))]


def test_moving_takes_every_tensor_along() -> None:
    moved = with_media(plain_case([[True], [True]], [0, 1]), seed=1).to("meta")
    columns = [*moved.columns("token").values(), *moved.columns("sample").values(), moved.prompt_of]
    runs = [t for s in (moved.prompts, moved.responses) for t in (s.tokens, s.lengths)]
    media = [t for r in moved.prompts.media.values() for t in (r.values, r.lengths)]
    assert {t.device.type for t in [*columns, *runs, *media]} == {"meta"}


def test_without_a_column_of_sampled_every_token_counts() -> None:
    batch = batch_of(plain_case([[True, False], [True]], [0, 0]))
    assert batch.mask.tolist() == [True, False, True]
    assert batch.replace(sampled=None).mask.tolist() == [True, True, True]
    assert batch.row_of.tolist() == [0, 0, 1]


def test_lengths_and_groups_on_the_host_follow_the_batch() -> None:
    batch = batch_of(plain_case([[True, False], [], [True]], [0, 1, 1]))
    assert batch.responses.sizes == [2, 0, 1]
    assert batch.groups == [0, 1, 1]
    moved = batch.to("meta")  # numbers there cannot be read at all
    assert (moved.responses.sizes, moved.groups) == ([2, 0, 1], [0, 1, 1])
    assert moved.prompts.sizes == batch.prompts.lengths.tolist()
    other = moved.replace(prompt_of=torch.tensor([1, 0, 0]))
    assert other.groups == [1, 0, 0]
    assert batch.select(torch.tensor([2, 0])).responses.sizes == [1, 2]
