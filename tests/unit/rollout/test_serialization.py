"""Batches and answers come back from files and plain data as they went in."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from lightrft.rollout.accounting import CollectedRollouts
from lightrft.rollout.serialization import load_batch, pack_collected, save_batch, unpack_collected
from lightrft.types import Batch, Prompt, Ragged, Rollout, Segments
from lightrft.utils.errors import CheckpointError
from lightrft.utils.state_io import save_state


def small_batch() -> Batch:
    media = {"pixels": Ragged(torch.arange(12.0).view(6, 2), torch.tensor([2, 0, 4]))}
    return Batch(
        Segments.of([[1, 2], [3], [4, 5, 6]], media),
        Segments.of([[7], [], [8, 9]]),
        torch.tensor([2, 0, 2]),
        sampled=torch.tensor([True, False, True]),
        advantages=torch.tensor([-0.5, 0.1, 1e-30]),
        versions=torch.tensor([0, 3, 2]),
        rewards=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
    )


def test_a_batch_comes_back_equal_with_types_media_and_empty_rows(tmp_path) -> None:
    batch = small_batch()
    save_batch(tmp_path / "deep" / "one", batch)
    found = load_batch(tmp_path / "deep" / "one")
    for part in ("prompts", "responses"):
        for field in ("tokens", "lengths"):
            assert getattr(getattr(found, part), field).equal(getattr(getattr(batch, part), field))
    assert found.prompts.media["pixels"].values.equal(batch.prompts.media["pixels"].values)
    assert found.prompts.media["pixels"].lengths.equal(batch.prompts.media["pixels"].lengths)
    for axis in ("token", "sample"):
        assert found.columns(axis).keys() == batch.columns(axis).keys()
        for name, column in batch.columns(axis).items():
            assert (
                found.columns(axis)[name].equal(column)
                and found.columns(axis)[name].dtype == column.dtype
            )
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["one.pt"]


def test_something_that_is_no_batch_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"one\.pt"):
        load_batch(tmp_path / "one")
    save_batch(tmp_path / "one", small_batch())
    (tmp_path / "one.pt").write_bytes(b"cut")
    with pytest.raises(CheckpointError):
        load_batch(tmp_path / "one")
    save_state(tmp_path / "two", {"format": "other"})
    with pytest.raises(CheckpointError, match="not a batch"):
        load_batch(tmp_path / "two")


def test_what_was_collected_comes_back_from_json_with_groups_that_share_their_prompt() -> None:
    prompts = [Prompt("a", [1], columns={"kept": object()}), Prompt("b", [2])]
    rollouts = [
        Rollout(
            p,
            [3 + i],
            [True],
            [-0.1 - i],
            [i],
            "stop",
            10 * i,
            sample=i,
            text="x",
            reward=1 / 3,
            terms={"t": 0.1},
        )
        for p in prompts
        for i in range(2)
    ]
    failed = replace(rollouts[3], failed="no score", reward=None)
    everything = [*rollouts[:3], failed]
    collected = CollectedRollouts(
        [everything[:2], everything[2:3]],
        everything,
        Counter(sampled=4, trained=3),
        Counter(),
        rounds=2,
    )
    plain = json.loads(json.dumps(pack_collected(collected)))
    found = unpack_collected(
        plain, lambda ids: [next(p for p in prompts if p.id == i) for i in ids]
    )
    assert found == collected
    assert found.groups[0][0] is found.rollouts[0] and found.rollouts[0].prompt is prompts[0]
    assert isinstance(found.tokens, Counter) and found.tokens["absent"] == 0
