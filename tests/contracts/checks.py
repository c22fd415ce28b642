"""What any advantage, loss, aggregation, KL estimator, shaping or filter owes the loop, whatever its formula.

Each ``check_*`` takes one function and raises ``AssertionError`` where it breaks the contract. ``ADVANTAGE_CHECKS`` and its
siblings list them by kind, so a user's own function is held to the same: ``for check in SHAPING_CHECKS: check(function)``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.config import AdvantageConfig, LossConfig
from lightrft.trainer.advantages import ADVANTAGES
from lightrft.trainer.rows import Rows
from lightrft.types import Batch, Prompt, Rollout, Segments, rows_of
from tests.numbers.strategies import batch_of, corner_cases, plain_case

Function = Callable[..., Any]
TOLERANCE = 1e-12
LIMIT = 8


# The batches


def batches() -> list[tuple[str, Batch]]:
    """Batches that break careless functions, with every column filled in."""
    holes = plain_case([[True, False, True], [True, True], [], [False], [True], [True] * 6], [2, 0, 2, 1, 2, 0])
    equal = plain_case([[True, True], [True], [True, True, True]], [0, 0, 0], [0.1, 0.1, 0.1])
    named = [("holes", holes), ("equal rewards", equal)]
    named += [(f"corner {i}", case) for i, case in enumerate(corner_cases())]
    return [(name, filled(batch_of(case))) for name, case in named] + [("empty batch", filled(empty_batch()))]


def filled(batch: Batch) -> Batch:
    """Advantages of both signs and of 0, returns, and rewards of greedy answers."""
    n = torch.arange(batch.tokens)
    signs = torch.tensor([-1.5, 0.5, 0.0, 2.0], dtype=torch.float64)
    greedy = batch.prompt_of.double() / 2
    return batch.replace(advantages=torch.where(batch.mask, signs[n % 4], 0.0), returns=n.double() / 4, baselines=greedy)


def empty_batch() -> Batch:
    none = torch.zeros(0, dtype=torch.float64)
    columns = dict.fromkeys(("behavior_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "final_values"), none)
    flags = torch.zeros(0, dtype=torch.bool)
    whole = torch.zeros(0, dtype=torch.long)
    return Batch(Segments.of([]), Segments.of([]), whole, sampled=flags, truncated=flags, version=whole, **columns)


def with_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Every number of ``batch`` in ``dtype``."""
    columns = {k: v for axis in ("token", "sample") for k, v in batch.columns(axis).items() if v.is_floating_point()}
    return batch.replace(**{k: v.to(dtype) for k, v in columns.items()})


def extremes() -> Iterator[tuple[str, Batch]]:
    """Policies 20 nats away from the old one and from the reference, either way."""
    for name, batch in batches():
        for gap in (20.0, -20.0):
            far = (batch.old_logprobs + gap, batch.old_logprobs - gap)  # type: ignore[operator]
            yield f"{name}, {gap:+g}", batch.replace(behavior_logprobs=far[0], ref_logprobs=far[1])


def group_parts(batch: Batch) -> list[Tensor]:
    """The rows of each prompt."""
    return [(batch.prompt_of == p).nonzero()[:, 0] for p in batch.prompt_of.unique()]


def whole_part(batch: Batch) -> list[Tensor]:
    return [torch.arange(len(batch))]


def row_parts(batch: Batch) -> list[Tensor]:
    return [torch.tensor([i]) for i in range(len(batch))]


def reversed_order(batch: Batch) -> Tensor:
    return torch.arange(len(batch) - 1, -1, -1)


def renumbered(batch: Batch) -> Batch:
    """The same groups under other names: the prompts in reverse."""
    count = len(batch.prompts)
    return Batch(
        batch.prompts.select(torch.arange(count - 1, -1, -1)),
        batch.responses,
        count - 1 - batch.prompt_of,
        **batch.columns("token"),
        **batch.columns("sample"),
    )


def spoiled(batch: Batch) -> Batch:
    """Other numbers at the tokens that were not sampled."""
    names = ("old_logprobs", "ref_logprobs", "behavior_logprobs", "values")
    columns = batch.columns("token")
    return batch.replace(**{k: torch.where(batch.mask, columns[k], -3.7 - i) for i, k in enumerate(names)})


def assert_close(found: Tensor, expected: Tensor, where: str) -> None:
    assert found.shape == expected.shape, f"{where}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    assert found.tolist() == pytest.approx(expected.tolist(), rel=TOLERANCE, abs=TOLERANCE), where


def assert_finite(found: Tensor, where: str) -> None:
    assert torch.isfinite(found).all(), f"{where}: {found.tolist()}"


# A function of a batch that gives one number per token or per response


def check_order(run: Callable[[Batch], Tensor], axis: str, split: Callable[[Batch], Sequence[Tensor]]) -> None:
    """Neither splitting, nor the order of the responses, nor the names of the prompts may change a number."""
    for name, batch in batches():
        whole = run(batch)
        assert_close(run(renumbered(batch)), whole, f"{name}, prompts renumbered")
        order = reversed_order(batch)
        places = order if axis == "sample" else rows_of(batch.lengths, order)
        assert_close(run(batch.select(order)), whole[places], f"{name}, in reverse")
        for part in split(batch):
            places = part if axis == "sample" else rows_of(batch.lengths, part)
            assert_close(run(batch.select(part)), whole[places], f"{name}, rows {part.tolist()} alone")


# Advantages


def advantages_of(function: Function, batch: Batch) -> tuple[Tensor, Tensor]:
    """With the outcome at the last sampled token and a little on every other one."""
    rows = Rows.of(batch)
    token = torch.where(batch.mask, batch.ref_logprobs / 10, 0.0).to(batch.rewards.dtype)  # type: ignore[operator, union-attr]
    last = [int((rows.row_of == i).logical_and(rows.mask).nonzero()[-1]) for i in range(len(batch)) if rows.count()[i]]
    token[torch.tensor(last, dtype=torch.long)] += batch.rewards[rows.count() > 0]  # type: ignore[index]
    return function(batch, token, AdvantageConfig(gamma=0.9, lam=0.8))


def check_advantage_is_finite(function: Function) -> None:
    for name, batch in [*batches(), *extremes()]:
        for column in advantages_of(function, batch):
            assert_finite(column, name)


def check_advantage_is_zero_where_nothing_was_sampled(function: Function) -> None:
    for name, batch in batches():
        for column in advantages_of(function, batch):
            assert column[~batch.mask].tolist() == [0.0] * int((~batch.mask).sum()), name
            assert column.shape == (batch.tokens,), name


def check_advantage_ignores_what_was_not_sampled(function: Function) -> None:
    for name, batch in batches():
        for a, b in zip(advantages_of(function, spoiled(batch)), advantages_of(function, batch), strict=True):
            assert_close(a, b, name)


def check_advantage_is_by_group_not_by_place(function: Function) -> None:
    """One that says that it ``needs`` the batch may take its statistics over all of it, in any order."""
    split = whole_part if "batch" in needs_of(function) else group_parts
    for which in (0, 1):
        check_order(lambda batch, which=which: advantages_of(function, batch)[which], "token", split)


def needs_of(function: Function) -> frozenset[str]:
    """As it was registered with, or its own attribute."""
    registered = [ADVANTAGES.about(name).needs for name in ADVANTAGES if ADVANTAGES[name] is function]
    return frozenset(getattr(function, "needs", ())).union(*registered)


def check_advantage_keeps_the_dtype(function: Function) -> None:
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            assert [c.dtype for c in advantages_of(function, with_dtype(batch, dtype))] == [dtype, dtype], name


def check_advantage_leaves_its_input_alone(function: Function) -> None:
    for name, batch in batches():
        before = copy.deepcopy(batch)
        advantages_of(function, batch)
        assert_unchanged(batch, before, name)


def assert_unchanged(batch: Batch, before: Batch, where: str) -> None:
    for axis in ("token", "sample"):
        for key, column in before.columns(axis).items():
            assert torch.equal(getattr(batch, key), column), f"{where}: {key} was written to"


# Policy losses


def losses_of(function: Function, batch: Batch, logprobs: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """On policy's neighbour: the behaviour log-probs stand for the new ones."""
    new = batch.behavior_logprobs if logprobs is None else logprobs
    return function(new, batch.old_logprobs, batch.advantages, Rows.of(batch), LossConfig(dual_clip=3.0))


def loss_gradient(function: Function, batch: Batch) -> Tensor:
    leaf = batch.behavior_logprobs.clone().requires_grad_()  # type: ignore[union-attr]
    losses, _ = losses_of(function, batch, leaf)
    (found,) = torch.autograd.grad(losses[batch.mask].sum(), leaf, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found


def check_loss_is_finite(function: Function) -> None:
    for dtype in (torch.float32, torch.float64):
        for name, batch in [*batches(), *extremes()]:
            small = with_dtype(batch, dtype)
            losses, stats = losses_of(function, small)
            for column in (losses, loss_gradient(function, small), *stats.values()):
                assert_finite(column, name)
                assert column.shape == (batch.tokens,), name


def check_loss_without_advantage_has_no_gradient(function: Function) -> None:
    for name, batch in [*batches(), *extremes()]:
        flat = batch.replace(advantages=torch.zeros_like(batch.advantages))  # type: ignore[arg-type]
        assert loss_gradient(function, flat).tolist() == [0.0] * batch.tokens, name


def check_loss_on_policy_pushes_along_the_advantage(function: Function) -> None:
    for name, batch in batches():
        found = loss_gradient(function, batch.replace(behavior_logprobs=batch.old_logprobs))
        assert ((found * batch.advantages)[batch.mask] <= 0).all(), name  # type: ignore[operator]
        assert found.any() == batch.advantages.any(), name  # type: ignore[union-attr]


def check_loss_ignores_what_was_not_sampled(function: Function) -> None:
    for name, batch in batches():
        assert_close(losses_of(function, spoiled(batch))[0][batch.mask], losses_of(function, batch)[0][batch.mask], name)
        assert_close(loss_gradient(function, spoiled(batch))[batch.mask], loss_gradient(function, batch)[batch.mask], name)
        assert not loss_gradient(function, batch)[~batch.mask].any(), name


def check_loss_is_by_response(function: Function) -> None:
    check_order(lambda batch: torch.where(batch.mask, losses_of(function, batch)[0], 0.0), "token", row_parts)
    check_order(lambda batch: loss_gradient(function, batch), "token", row_parts)


def check_loss_keeps_the_dtype(function: Function) -> None:
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            losses, stats = losses_of(function, with_dtype(batch, dtype))
            assert losses.dtype == dtype, name
            assert not any(s.requires_grad for s in stats.values()), name


# Aggregations


def check_aggregation_is_finite_and_not_negative(function: Function) -> None:
    for name, batch in batches():
        weights = function(Rows.of(batch), LIMIT)
        assert_finite(weights, name)
        assert weights.shape == (batch.tokens,), name
        assert (weights >= 0).all(), name


def check_aggregation_is_zero_exactly_where_nothing_was_sampled(function: Function) -> None:
    for name, batch in batches():
        assert ((function(Rows.of(batch), LIMIT) > 0) == batch.mask).all(), name


def check_aggregation_is_by_response(function: Function) -> None:
    check_order(lambda batch: function(Rows.of(batch), LIMIT), "token", lambda batch: [])


def check_aggregation_is_a_mean(function: Function) -> None:
    """A batch beside a copy of itself has the loss of the batch."""
    for name, batch in batches():
        twice = Batch.cat([batch, batch])
        expected = function(Rows.of(batch), LIMIT) / 2
        assert_close(function(Rows.of(twice), LIMIT), torch.cat([expected, expected]), name)


# KL estimators


def check_kl_is_finite(function: Function) -> None:
    for dtype in (torch.float32, torch.float64):
        d = torch.tensor([-20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 20.0], dtype=dtype, requires_grad=True)
        found = function(d, torch.zeros_like(d))
        assert_finite(found.detach(), "log-ratios up to 20")
        assert_finite(torch.autograd.grad(found.sum(), d)[0], "gradient at log-ratios up to 20")
        assert found.dtype == dtype
        assert function(d[:0], d[:0]).shape == (0,)


def check_kl_is_zero_between_equals(function: Function) -> None:
    logprobs = torch.tensor([-20.0, -0.3, 0.0])
    assert function(logprobs, logprobs).tolist() == [0.0] * 3


def check_kl_is_by_token(function: Function) -> None:
    for name, batch in batches():
        whole = function(batch.old_logprobs, batch.ref_logprobs)
        alone = [function(a[None], b[None]) for a, b in zip(batch.old_logprobs, batch.ref_logprobs, strict=True)]  # type: ignore[arg-type]
        assert_close(torch.cat([whole[:0], *alone]), whole, name)


# Shapings and filters


def example_options(function: Function) -> dict[str, Any]:
    """Something for every keyword that has no default: 2 or 0.5."""
    needed = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name != "max_new_tokens"
    ]
    return {p.name: 2 if p.annotation in (int, "int") else 0.5 for p in needed}


def shaped(function: Function, batch: Batch) -> Tensor:
    return function(batch, batch.rewards, max_new_tokens=LIMIT, **example_options(function))


def check_shaping_is_finite(function: Function) -> None:
    for name, batch in [*batches(), *extremes()]:
        assert_finite(shaped(function, batch), name)
        assert shaped(function, batch).shape == (len(batch),), name


def check_shaping_is_by_group_not_by_place(function: Function) -> None:
    check_order(lambda batch: shaped(function, batch), "sample", group_parts)


def check_shaping_keeps_the_dtype(function: Function) -> None:
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            assert shaped(function, with_dtype(batch, dtype)).dtype == dtype, name


def check_shaping_leaves_its_input_alone(function: Function) -> None:
    for name, batch in batches():
        before = copy.deepcopy(batch)
        shaped(function, batch)
        assert_unchanged(batch, before, name)


def groups() -> list[list[Rollout]]:
    """No answer, one, several; equal and unequal rewards; an answer without tokens."""
    rewards = [[], [1.0], [0.0], [0.5, 0.5, 0.5], [0.0, 1.0, 0.25], [-3.0, 7.0]]
    return [[rollout(reward, length) for length, reward in enumerate(row)] for row in rewards]


def rollout(reward: float, length: int, prompt: str = "a") -> Rollout:
    return Rollout(
        prompt=Prompt(prompt, [1, 2]),
        token_ids=[3] * length,
        sampled=[True] * length,
        logprobs=[-20.0] * length,
        versions=[0] * length,
        finish_reason="stop",
        seed=length,
        reward=reward,
    )


def check_filter_gives_a_reason_or_nothing(function: Function) -> None:
    for group in groups():
        reason = function(group, **example_options(function))
        assert isinstance(reason, str)
        assert "\n" not in reason


def check_filter_is_by_content_not_by_place(function: Function) -> None:
    for group in groups():
        options = example_options(function)
        before = copy.deepcopy(group)
        reason = function(group, **options)
        assert group == before
        assert function(group[::-1], **options) == reason
        assert function([rollout(r.reward or 0.0, len(r), "b") for r in group], **options) == reason


ADVANTAGE_CHECKS = [
    check_advantage_is_finite,
    check_advantage_is_zero_where_nothing_was_sampled,
    check_advantage_ignores_what_was_not_sampled,
    check_advantage_is_by_group_not_by_place,
    check_advantage_keeps_the_dtype,
    check_advantage_leaves_its_input_alone,
]
POLICY_LOSS_CHECKS = [
    check_loss_is_finite,
    check_loss_without_advantage_has_no_gradient,
    check_loss_on_policy_pushes_along_the_advantage,
    check_loss_ignores_what_was_not_sampled,
    check_loss_is_by_response,
    check_loss_keeps_the_dtype,
]
AGGREGATION_CHECKS = [
    check_aggregation_is_finite_and_not_negative,
    check_aggregation_is_zero_exactly_where_nothing_was_sampled,
    check_aggregation_is_by_response,
    check_aggregation_is_a_mean,
]
KL_CHECKS = [check_kl_is_finite, check_kl_is_zero_between_equals, check_kl_is_by_token]
SHAPING_CHECKS = [
    check_shaping_is_finite,
    check_shaping_is_by_group_not_by_place,
    check_shaping_keeps_the_dtype,
    check_shaping_leaves_its_input_alone,
]
FILTER_CHECKS = [check_filter_gives_a_reason_or_nothing, check_filter_is_by_content_not_by_place]
