"""Check the contract of each kind of algorithm function, whatever its formula.

The kinds are advantages, losses, corrections, token masks, aggregations, KL estimators, shapings
and filters. Each ``check_*`` takes one function. It raises ``ContractViolation`` with the batch
that reveals the violation. ``ADVANTAGE_CHECKS`` and the other lists name the checks of each kind.
``lightrft check`` runs them on a user's function too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.contracts.cases import (
    batches,
    extremes,
    group_parts,
    groups,
    renumbered,
    rollout,
    row_parts,
    shown,
    spoiled,
    there,
    whole_part,
    with_dtype,
)
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import AdvantageConfig, LossConfig
from lightrft.types import Batch, Rollout, rows_of
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Function = Callable[..., Any]
# of float64 results that may differ by the order of sums, and of float32 results
TOLERANCE, ROUNDING = 1e-12, 1e-4
LIMIT = 8


class ContractViolation(AssertionError):
    """A function violates the contract of its kind. The message names the batch and the result."""


def expect(held: bool | Tensor, what: str) -> None:
    """Raise ``ContractViolation`` with the message ``what`` if a condition is false."""
    if not held:
        raise ContractViolation(what)


def expect_close(found: Tensor, expected: Tensor, where: str) -> None:
    """Raise ``ContractViolation`` unless ``found`` equals ``expected`` up to float64 rounding.

    Args:
        found: The result.
        expected: The result that the contract demands.
        where: Start of the error message.
    """
    expect(
        found.shape == expected.shape,
        f"{where}: shape {tuple(found.shape)}, not {tuple(expected.shape)}",
    )
    close = torch.isclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    expect(close.all(), f"{where}: {_short(found)}, not {_short(expected)}")


def expect_same_in_float32(run: Callable[[Batch], Tensor]) -> None:
    """Raise ``ContractViolation`` unless float32 and float64 inputs give the same up to float32
    rounding."""
    for name, batch in batches():
        exact = run(batch).double()
        found = run(with_dtype(batch, torch.float32)).double()
        close = torch.isclose(found, exact, rtol=ROUNDING, atol=ROUNDING)
        expect(close.all(), f"{name}: {_short(found)} in float32, {_short(exact)} in float64")


def expect_finite(found: Tensor, where: str) -> None:
    """Raise ``ContractViolation`` if a number is NaN or infinite."""
    expect(torch.isfinite(found).all(), f"{where}: {_short(found)}")


def expect_shape(found: Tensor, length: int, where: str) -> None:
    """Raise ``ContractViolation`` unless ``found`` has one number per token or response.

    Args:
        found: The result.
        length: Number of tokens or responses.
        where: Start of the error message.
    """
    kind = type(found).__name__
    expect(isinstance(found, Tensor), f"{where}: a {kind}, not a tensor of {length} numbers")
    expect(found.shape == (length,), f"{where}: shape {tuple(found.shape)}, not ({length},)")


def expect_zero(found: Tensor, where: str) -> None:
    """Raise ``ContractViolation`` unless every number is exactly 0."""
    expect(not found.any(), f"{where}: {_short(found)}, not 0")


def expect_unchanged(batch: Batch, before: Batch, where: str) -> None:
    """Raise ``ContractViolation`` if a column differs from the batch as it was before.

    Args:
        batch: The batch after the call.
        before: A copy made before the call.
        where: Start of the error message.
    """
    for axis in ("token", "sample"):
        for key, column in before.columns(axis).items():
            expect(torch.equal(getattr(batch, key), column), f"{where}: {key} was written to")


def _short(x: Tensor) -> list[object]:
    """Return the numbers of ``x``, rounded for an error message."""
    return [round(v, 6) if isinstance(v, float) else v for v in x.detach().tolist()]


# Functions of a batch that return one number per token or per response


def check_order(
    run: Callable[[Batch], Tensor], axis: str, split: Callable[[Batch], Sequence[Tensor]]
) -> None:
    """Check that splitting, response order and prompt labels do not change any number.

    Args:
        run: The function under test.
        axis: ``token`` or ``sample``, the axis of its result.
        split: Returns the parts (row indices) that must give the same on their own.
    """
    for name, batch in batches():
        whole = run(batch)
        expect_close(run(renumbered(batch)), whole, f"{name}, prompts renumbered")
        order = torch.arange(len(batch) - 1, -1, -1)
        places = order if axis == "sample" else rows_of(batch.lengths, order)
        expect_close(run(batch.select(order)), whole[places], f"{name}, in reverse")
        for part in split(batch):
            places = part if axis == "sample" else rows_of(batch.lengths, part)
            alone = f"{name}, rows {part.tolist()} alone"
            expect_close(run(batch.select(part)), whole[places], alone)


# Advantages


def advantages_of(function: Function, batch: Batch) -> tuple[Tensor, Tensor]:
    """Call an advantage with outcomes at last sampled tokens and a penalty on every sampled one."""
    rows = TokenRows.of(batch)
    rewards = there(batch.rewards)
    token = torch.where(batch.mask, there(batch.ref_logprobs) / 10, 0.0).to(rewards.dtype)
    last = []
    for i in range(len(batch)):
        sampled = (rows.row_of == i) & rows.mask
        if sampled.any():
            last.append(int(sampled.nonzero()[-1]))
    token[torch.tensor(last, dtype=torch.long)] += rewards[rows.count() > 0]
    # below 1, so that discounts and traces take part
    return function(batch, token, AdvantageConfig(gamma=0.9, gae_lambda=0.8))


def check_advantage_is_finite(function: Function) -> None:
    """Advantages are finite for empty and fully masked responses, groups of one, equal rewards and
    distant policies.
    """
    for name, batch in [*batches(), *extremes()]:
        for column in advantages_of(function, batch):
            expect_finite(column, name)


def check_advantage_is_zero_where_nothing_was_sampled(function: Function) -> None:
    """There is one number per token, exactly 0 at tokens that the policy did not sample."""
    for name, batch in batches():
        for column in advantages_of(function, batch):
            expect_shape(column, batch.tokens, name)
            expect_zero(column[~batch.mask], f"{name}, at the tokens that were not sampled")


def check_advantage_ignores_what_was_not_sampled(function: Function) -> None:
    """Values at tokens that were not sampled do not change the result."""
    for name, batch in batches():
        found = advantages_of(function, spoiled(batch))
        expected = advantages_of(function, batch)
        for a, b in zip(found, expected, strict=True):
            expect_close(a, b, name)


def check_advantage_is_by_group_not_by_place(function: Function) -> None:
    """The result depends on the group alone, not on the order of responses or the labels of
    prompts. An advantage that ``needs`` the batch may use statistics over all of it.
    """
    split = whole_part if "batch" in needs_of(function) else group_parts
    for which in (0, 1):
        # as a default, since a lambda would read the loop's variable when it is called
        check_order(
            lambda batch, which=which: advantages_of(function, batch)[which], "token", split
        )


def needs_of(function: Function) -> frozenset[str]:
    """Return the ``needs`` of a registered function, or the attribute ``needs`` of another one."""
    # bound options wrap the function, which the registry does not know
    function = inspect.unwrap(function)
    tables: tuple[Registry[Any], ...] = (ADVANTAGES, IS_CORRECTIONS, PREFERENCE_LOSSES)
    needs: set[str] = set(getattr(function, "needs", ()))
    for table in tables:
        for name in table:
            if table[name] is function:
                needs |= table.about(name).needs
    return frozenset(needs)


def check_advantage_keeps_the_dtype(function: Function) -> None:
    """The result has the dtype of the input, float32 or float64."""
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            for column in advantages_of(function, with_dtype(batch, dtype)):
                expect(column.dtype == dtype, f"{name}: {column.dtype} of numbers in {dtype}")


def check_advantage_is_the_same_in_float32(function: Function) -> None:
    """Float32 and float64 give the same result, up to rounding."""
    for which in (0, 1):
        expect_same_in_float32(lambda batch, which=which: advantages_of(function, batch)[which])


def check_advantage_leaves_its_input_alone(function: Function) -> None:
    """The function writes to no column of the batch."""
    for name, batch in batches():
        before = copy.deepcopy(batch)
        advantages_of(function, batch)
        expect_unchanged(batch, before, name)


# Policy losses


def losses_of(
    function: Function, batch: Batch, logprobs: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a loss slightly off policy: the behavior log-probs stand in for the new ones.

    Args:
        function: The loss.
        batch: The batch.
        logprobs: ``[N]``, the new log-probs. ``None`` uses ``batch.behavior_logprobs``.
    """
    new = batch.behavior_logprobs if logprobs is None else logprobs
    return function(
        new, batch.old_logprobs, batch.advantages, TokenRows.of(batch), LossConfig(dual_clip=3.0)
    )


def loss_gradient(function: Function, batch: Batch) -> Tensor:
    """Return the gradient of the summed losses at sampled tokens, ``[N]``.

    It is taken with respect to the log-probs.
    """
    # a clone, since requires_grad_() would mark the column of the batch
    leaf = there(batch.behavior_logprobs).clone().requires_grad_()
    losses, _ = losses_of(function, batch, leaf)
    expect(losses.requires_grad, "the losses carry no gradient of the log-probs")
    (found,) = torch.autograd.grad(losses[batch.mask].sum(), leaf, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found


def check_loss_is_finite(function: Function) -> None:
    """Losses, statistics and gradient are finite and ``[N]``, also 20 nats off policy."""
    for dtype in (torch.float32, torch.float64):
        for name, batch in [*batches(), *extremes()]:
            small = with_dtype(batch, dtype)
            losses, stats = losses_of(function, small)
            for column in (losses, *stats.values()):
                expect_shape(column, batch.tokens, name)
            for column in (losses, loss_gradient(function, small), *stats.values()):
                expect_finite(column, name)


def check_loss_without_advantage_has_no_gradient(function: Function) -> None:
    """The gradient is exactly 0 if every advantage is 0."""
    for name, batch in [*batches(), *extremes()]:
        flat = batch.replace(advantages=torch.zeros_like(there(batch.advantages)))
        expect_zero(loss_gradient(function, flat), f"{name}, gradient where every advantage is 0")


def check_loss_on_policy_pushes_along_the_advantage(function: Function) -> None:
    """On policy, descent raises tokens with a positive advantage and lowers tokens with a negative
    one.
    """
    for name, batch in batches():
        found = loss_gradient(function, batch.replace(behavior_logprobs=batch.old_logprobs))
        advantages = there(batch.advantages)
        along = f"{name}: gradient {_short(found)} of the loss, advantages {_short(advantages)}"
        # descent subtracts the gradient, so it must point against the advantage
        expect(((found * advantages)[batch.mask] <= 0).all(), along)
        expect(found.any() == advantages.any(), along)


def check_loss_ignores_what_was_not_sampled(function: Function) -> None:
    """Tokens that were not sampled have no gradient and do not change the loss of other tokens."""
    for name, batch in batches():
        expect_close(
            losses_of(function, spoiled(batch))[0][batch.mask],
            losses_of(function, batch)[0][batch.mask],
            name,
        )
        expect_close(
            loss_gradient(function, spoiled(batch))[batch.mask],
            loss_gradient(function, batch)[batch.mask],
            name,
        )
        expect_zero(
            loss_gradient(function, batch)[~batch.mask],
            f"{name}, gradient of tokens that were not sampled",
        )


def check_loss_is_by_response(function: Function) -> None:
    """A response has the same loss and gradient alone, and in any other position."""
    check_order(
        lambda batch: torch.where(batch.mask, losses_of(function, batch)[0], 0.0),
        "token",
        row_parts,
    )
    check_order(lambda batch: loss_gradient(function, batch), "token", row_parts)


def check_loss_keeps_the_dtype(function: Function) -> None:
    """The loss has the dtype of the input, float32 or float64; statistics carry no gradient."""
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            losses, stats = losses_of(function, with_dtype(batch, dtype))
            expect(losses.dtype == dtype, f"{name}: {losses.dtype} of numbers in {dtype}")
            for key, column in stats.items():
                expect(
                    not column.requires_grad, f"{name}: {key} among the statistics carries gradient"
                )


def check_loss_is_the_same_in_float32(function: Function) -> None:
    """Float32 and float64 give the same loss and gradient, up to rounding."""
    expect_same_in_float32(
        lambda batch: torch.where(batch.mask, losses_of(function, batch)[0], 0.0)
    )
    expect_same_in_float32(lambda batch: loss_gradient(function, batch))


# Aggregations


def check_aggregation_is_finite_and_not_negative(function: Function) -> None:
    """There is one finite weight per token, and none is negative."""
    for name, batch in batches():
        weights = function(TokenRows.of(batch), LIMIT)
        expect_finite(weights, name)
        expect_shape(weights, batch.tokens, name)
        expect((weights >= 0).all(), f"{name}: {_short(weights)}")


def check_aggregation_is_zero_exactly_where_nothing_was_sampled(function: Function) -> None:
    """Every sampled token has a positive weight, and every other token has weight 0."""
    for name, batch in batches():
        weights = function(TokenRows.of(batch), LIMIT)
        expect(((weights > 0) == batch.mask).all(), f"{name}: weights {_short(weights)}")


def check_aggregation_is_by_response(function: Function) -> None:
    """The weights do not depend on the order of responses or the labels of prompts."""
    check_order(lambda batch: function(TokenRows.of(batch), LIMIT), "token", lambda batch: [])


def check_aggregation_is_a_mean(function: Function) -> None:
    """A batch concatenated with a copy of itself has the same loss."""
    for name, batch in batches():
        # twice the tokens, so each has half its weight
        twice = Batch.cat([batch, batch])
        expected = function(TokenRows.of(batch), LIMIT) / 2
        expect_close(function(TokenRows.of(twice), LIMIT), torch.cat([expected, expected]), name)


# KL estimators


def check_kl_is_finite(function: Function) -> None:
    """Estimate and gradient are finite for log-ratios up to 20, and keep the dtype of the input."""
    for dtype in (torch.float32, torch.float64):
        d = torch.tensor(
            [-20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 20.0], dtype=dtype, requires_grad=True
        )
        found = function(d, torch.zeros_like(d))
        expect_finite(found.detach(), "log-ratios up to 20")
        expect_finite(torch.autograd.grad(found.sum(), d)[0], "gradient at log-ratios up to 20")
        expect(found.dtype == dtype, f"{found.dtype} of numbers in {dtype}")
        expect_shape(function(d[:0], d[:0]), 0, "no token")


def check_kl_is_zero_between_equals(function: Function) -> None:
    """The estimate is exactly 0 where the two log-probs are equal."""
    logprobs = torch.tensor([-20.0, -0.3, 0.0])
    expect_zero(function(logprobs, logprobs), f"log-probs {_short(logprobs)} of both")


def check_kl_is_by_token(function: Function) -> None:
    """The estimate of a token does not depend on other tokens."""
    for name, batch in batches():
        old, ref = there(batch.old_logprobs), there(batch.ref_logprobs)
        whole = function(old, ref)
        alone = [function(a[None], b[None]) for a, b in zip(old, ref, strict=True)]
        # ``whole[:0]``, since a batch without tokens has nothing else to concatenate
        expect_close(torch.cat([whole[:0], *alone]), whole, name)


# Corrections


def correction_of(function: Function, batch: Batch, logprobs: Tensor | None = None) -> Tensor:
    """Call a correction with a value for every required option.

    Args:
        function: The correction.
        batch: The batch.
        logprobs: ``[N]``, the log-probs of the current policy. ``None`` uses ``batch.logprobs``.

    Returns:
        The weights at sampled tokens and 0 elsewhere, ``[N]``.
    """
    now = there(batch.logprobs) if logprobs is None else logprobs
    columns = (
        now,
        there(batch.old_logprobs),
        there(batch.behavior_logprobs),
        there(batch.advantages),
    )
    weights = function(*columns, TokenRows.of(batch), **example_options(function))
    expect_shape(weights, batch.tokens, shown(batch))
    return torch.where(batch.mask, weights, 0.0)


def check_correction_is_finite_and_not_negative(function: Function) -> None:
    """Weights are finite and at least 0, for empty and fully masked responses and 20 nats off
    policy.
    """
    for dtype in (torch.float32, torch.float64):
        for name, batch in [*batches(), *extremes()]:
            weights = correction_of(function, with_dtype(batch, dtype))
            expect_finite(weights, name)
            expect((weights >= 0).all(), f"{name}: {_short(weights)}")
            expect(weights.dtype == dtype, f"{name}: {weights.dtype} of numbers in {dtype}")


def check_correction_is_one_between_equals(function: Function) -> None:
    """The weights are 1 where sampler, old policy and current policy are equal."""
    for name, batch in batches():
        same = batch.replace(behavior_logprobs=batch.old_logprobs, logprobs=batch.old_logprobs)
        weights = correction_of(function, same)[batch.mask]
        expect((weights == 1).all(), f"{name}: {_short(weights)}, not 1")


def check_correction_ignores_what_was_not_sampled(function: Function) -> None:
    """Values at tokens that were not sampled do not change the result."""
    for name, batch in batches():
        expect_close(correction_of(function, spoiled(batch)), correction_of(function, batch), name)


def check_correction_is_by_response(function: Function) -> None:
    """A response has the same weights alone, and in any other position. A correction that ``needs``
    the batch may compare all of it.
    """
    split = whole_part if "batch" in needs_of(function) else row_parts
    check_order(lambda batch: correction_of(function, batch), "token", split)


# Gates


def gate_of(function: Function, batch: Batch, settings: LossConfig | None = None) -> Tensor:
    """Call a token mask and return ``weight`` and ``kl_pull_coef`` as two rows, ``[2, N]``.

    Args:
        function: The token mask.
        batch: The batch.
        settings: ``None`` uses the defaults.
    """
    # seeded in each call, so that two calls make the same random choices
    generator = torch.Generator().manual_seed(3)
    found = function(batch, settings or LossConfig(), generator, **example_options(function))
    pull = torch.zeros(batch.tokens) if found.kl_pull_coef is None else found.kl_pull_coef
    for part in (found.weight, pull):
        expect_shape(part, batch.tokens, shown(batch))
    return torch.stack([found.weight.double(), pull.double()])


def check_token_mask_keeps_a_share_between_nothing_and_all(function: Function) -> None:
    """``weight`` is in [0, 1] and ``kl_pull_coef`` is finite and not negative; both are exactly 0
    where nothing was sampled.
    """
    for name, batch in [*batches(), *extremes()]:
        keep, pull = gate_of(function, batch)
        expect_finite(pull, name)
        expect(((keep >= 0) & (keep <= 1)).all(), f"{name}: {_short(keep)}")
        expect((pull >= 0).all(), f"{name}: pull {_short(pull)}")
        expect_zero(keep[~batch.mask], f"{name}, kept at the tokens that were not sampled")
        expect_zero(pull[~batch.mask], f"{name}, pull of the tokens that were not sampled")


def check_token_mask_ignores_what_was_not_sampled(function: Function) -> None:
    """Values at tokens that were not sampled do not change the result."""
    for name, batch in batches():
        expect_close(gate_of(function, spoiled(batch)), gate_of(function, batch), name)


def check_token_mask_is_by_content_not_by_place(function: Function) -> None:
    """The choice, also a random one, does not depend on the order of responses or the labels of
    prompts.
    """
    for index in (0, 1):
        check_order(lambda batch, index=index: gate_of(function, batch)[index], "token", whole_part)


def check_token_mask_leaves_its_input_alone(function: Function) -> None:
    """The function writes to no column of the batch."""
    for name, batch in batches():
        before = copy.deepcopy(batch)
        gate_of(function, batch)
        expect_unchanged(batch, before, name)


# Shapings and filters


def example_options(function: Function) -> dict[str, float]:
    """Return a value for every required keyword option: 2 for an integer, else 0.5."""
    needed = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name != "max_new_tokens"
    ]
    return {p.name: 2 if p.annotation in (int, "int") else 0.5 for p in needed}


def shaped(function: Function, batch: Batch) -> Tensor:
    """Call a shaping with a value for every required option, ``[B]``."""
    return function(batch, batch.rewards, max_new_tokens=LIMIT, **example_options(function))


def check_shaping_is_finite(function: Function) -> None:
    """There is one finite number per response, for empty and fully masked responses, groups of
    one and equal rewards.
    """
    for name, batch in [*batches(), *extremes()]:
        expect_finite(shaped(function, batch), name)
        expect_shape(shaped(function, batch), len(batch), name)


def check_shaping_is_by_group_not_by_place(function: Function) -> None:
    """The result depends on the group alone, not on the order of responses or the labels of
    prompts.
    """
    check_order(lambda batch: shaped(function, batch), "sample", group_parts)


def check_shaping_keeps_the_dtype(function: Function) -> None:
    """The result has the dtype of the input, float32 or float64."""
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            found = shaped(function, with_dtype(batch, dtype))
            expect(found.dtype == dtype, f"{name}: {found.dtype} of numbers in {dtype}")


def check_shaping_is_the_same_in_float32(function: Function) -> None:
    """Float32 and float64 give the same result, up to rounding."""
    expect_same_in_float32(lambda batch: shaped(function, batch))


def check_shaping_leaves_its_input_alone(function: Function) -> None:
    """The function writes to no column of the batch."""
    for name, batch in batches():
        before = copy.deepcopy(batch)
        shaped(function, batch)
        expect_unchanged(batch, before, name)


def check_filter_gives_a_reason_or_nothing(function: Function) -> None:
    """The result is a reason on one line, or an empty string or None."""
    for group in groups():
        reason = function(group, **example_options(function))
        expect(isinstance(reason, str | None), f"{_rewards(group)}: {reason!r} is not text")
        expect("\n" not in (reason or ""), f"{_rewards(group)}: {reason!r} is not one line")


def check_filter_is_by_content_not_by_place(function: Function) -> None:
    """The result does not depend on the order of responses or the prompt, and the group is not
    modified.
    """
    for group in groups():
        options = example_options(function)
        before = copy.deepcopy(group)
        reason = function(group, **options)
        expect(group == before, f"{_rewards(group)}: the group was written to")
        back = function(group[::-1], **options)
        expect(back == reason, f"{_rewards(group)}: {reason!r}, and {back!r} in reverse")
        other = function([rollout(r.reward or 0.0, len(r), "b") for r in group], **options)
        expect(other == reason, f"{_rewards(group)}: {reason!r}, and {other!r} for another prompt")


def _rewards(group: Sequence[Rollout]) -> str:
    return f"group of responses with rewards {[r.reward for r in group]}"


ADVANTAGE_CHECKS = [
    check_advantage_is_finite,
    check_advantage_is_zero_where_nothing_was_sampled,
    check_advantage_ignores_what_was_not_sampled,
    check_advantage_is_by_group_not_by_place,
    check_advantage_keeps_the_dtype,
    check_advantage_is_the_same_in_float32,
    check_advantage_leaves_its_input_alone,
]
POLICY_LOSS_CHECKS = [
    check_loss_is_finite,
    check_loss_without_advantage_has_no_gradient,
    check_loss_on_policy_pushes_along_the_advantage,
    check_loss_ignores_what_was_not_sampled,
    check_loss_is_by_response,
    check_loss_keeps_the_dtype,
    check_loss_is_the_same_in_float32,
]
AGGREGATION_CHECKS = [
    check_aggregation_is_finite_and_not_negative,
    check_aggregation_is_zero_exactly_where_nothing_was_sampled,
    check_aggregation_is_by_response,
    check_aggregation_is_a_mean,
]
KL_CHECKS = [check_kl_is_finite, check_kl_is_zero_between_equals, check_kl_is_by_token]
CORRECTION_CHECKS = [
    check_correction_is_finite_and_not_negative,
    check_correction_is_one_between_equals,
    check_correction_ignores_what_was_not_sampled,
    check_correction_is_by_response,
]
TOKEN_MASK_CHECKS = [
    check_token_mask_keeps_a_share_between_nothing_and_all,
    check_token_mask_ignores_what_was_not_sampled,
    check_token_mask_is_by_content_not_by_place,
    check_token_mask_leaves_its_input_alone,
]
SHAPING_CHECKS = [
    check_shaping_is_finite,
    check_shaping_is_by_group_not_by_place,
    check_shaping_keeps_the_dtype,
    check_shaping_is_the_same_in_float32,
    check_shaping_leaves_its_input_alone,
]
FILTER_CHECKS = [check_filter_gives_a_reason_or_nothing, check_filter_is_by_content_not_by_place]
