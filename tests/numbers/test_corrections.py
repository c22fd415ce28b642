"""Weights for the mismatch of sampler and trainer against the slow loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightrft.algorithms.importance_sampling import (
    IS_CORRECTIONS,
    interpolated_proximal,
    version_share,
)
from lightrft.algorithms.token_ops import TokenRows
from tests.numbers import oracles, oracles_corrections
from tests.numbers.compare import assert_equal, every_case, scores_for
from tests.numbers.oracles import Case
from tests.numbers.oracles_corrections import LEVELS
from tests.numbers.scalars import Rows as Ragged
from tests.numbers.strategies import batch_of, tensor_of

Slow = Callable[[Case, list[float]], Ragged]
OF_SAMPLER: dict[str, tuple[str, dict[str, object], Slow]] = {
    "importance": (
        "importance",
        {},
        lambda c, a: oracles_corrections.truncated(c, "token", float("inf")),
    ),
    "icepop": (
        "icepop",
        {"low": 0.5, "high": 5.0},
        lambda c, a: oracles_corrections.icepop(c, 0.5, 5.0),
    ),
    "opsm": (
        "opsm",
        {"delta": 0.1},
        lambda c, a: oracles_corrections.off_policy_sequence_mask(c, a, 0.1),
    ),
    "opsm, any distance": (
        "opsm",
        {"delta": 0.0},
        lambda c, a: oracles_corrections.off_policy_sequence_mask(c, a, 0.0),
    ),
}


def add(name: str, level: str, options: dict[str, object], slow: Slow) -> None:
    OF_SAMPLER[f"{name} of {level}, {options}"] = (name, {"level": level, **options}, slow)


for at in LEVELS:
    add("tis", at, {"high": 2.0}, lambda c, a, at=at: oracles_corrections.truncated(c, at, 2.0))
    add(
        "tis",
        at,
        {"low": 0.3, "high": 1.1},
        lambda c, a, at=at: oracles_corrections.truncated(c, at, 1.1, 0.3),
    )
    add(
        "mis",
        at,
        {"low": 0.3, "high": 3.0},
        lambda c, a, at=at: oracles_corrections.masked(c, at, 0.3, 3.0),
    )
    add(
        "sequence_reject",
        at,
        {"low": 0.7, "high": 1.4},
        lambda c, a, at=at: oracles_corrections.rejected(c, at, 0.7, 1.4),
    )
for at in ("sequence", "geometric"):
    add(
        "sequence_mask",
        at,
        {"low": 0.7, "high": 1.4},
        lambda c, a, at=at: oracles_corrections.masked_by_sequence(c, at, 0.7, 1.4),
    )
    add(
        "sequence_mask",
        at,
        {"low": 0.5, "high": 2.0, "cap": 1.3},
        lambda c, a, at=at: oracles_corrections.masked_by_sequence(c, at, 0.5, 2.0, 1.3),
    )


@every_case(examples=40)
@pytest.mark.parametrize("method", list(OF_SAMPLER))
def test_weights(method: str, case: Case, seed: int) -> None:
    name, options, slow = OF_SAMPLER[method]
    scores, batch = scores_for(case, seed), batch_of(case)
    columns = (
        tensor_of(rows)
        for rows in (case.logprobs, case.old, case.behavior, oracles.on_sampled(case, scores))
    )
    found = IS_CORRECTIONS[name](*columns, TokenRows.of(batch), **options)
    assert_equal(found, slow(case, scores), batch.mask)


@every_case()
@pytest.mark.parametrize("method", list(OF_SAMPLER))
def test_a_sampler_that_is_the_policy_needs_no_weight(method: str, case: Case, seed: int) -> None:
    name, options, _ = OF_SAMPLER[method]
    same, batch = tensor_of(case.logprobs), batch_of(case)
    advantages = tensor_of(oracles.on_sampled(case, scores_for(case, seed)))
    found = IS_CORRECTIONS[name](same, same, same, advantages, TokenRows.of(batch), **options)
    assert found[batch.mask].eq(1).all()


@every_case(max_gap=5.0)
@pytest.mark.parametrize("method", list(OF_SAMPLER))
def test_what_stands_at_tokens_that_were_not_sampled_weighs_nothing(
    method: str, case: Case, seed: int
) -> None:
    name, options, _ = OF_SAMPLER[method]
    batch, scores = batch_of(case), scores_for(case, seed)
    columns = [
        tensor_of(rows)
        for rows in (case.logprobs, case.old, case.behavior, oracles.on_sampled(case, scores))
    ]
    spoilt = [column.masked_fill(~batch.mask, 17.0 * (k + 1)) for k, column in enumerate(columns)]
    clean, other = (
        IS_CORRECTIONS[name](*each, TokenRows.of(batch), **options)[batch.mask]
        for each in (columns, spoilt)
    )
    assert_equal(other, clean.tolist())


@every_case()
@pytest.mark.parametrize(("proximal", "current"), [(4, 5), (3, 5), (5, 5)])
def test_the_interpolated_proximal_policy(
    proximal: int, current: int, case: Case, seed: int
) -> None:
    versions = [(seed >> i) % 7 for i in range(len(case))]
    batch = batch_of(case)
    of_tokens = torch.tensor(versions)[batch.row_of]
    found = interpolated_proximal(
        tensor_of(case.logprobs), tensor_of(case.behavior), of_tokens, proximal, current
    )
    assert_equal(
        found,
        oracles_corrections.interpolated_proximal(case, versions, proximal, current),
        batch.mask,
    )
    shares = [oracles_corrections.version_share(v, proximal, current) for v in versions]
    assert_equal(version_share(torch.tensor(versions), proximal, current), shares)
