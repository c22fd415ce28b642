"""What any advantage, loss, correction, gate, aggregation, KL estimator, shaping or filter owes the loop, whatever its formula.

Each ``check_*`` takes one function and raises ``Broken`` where it breaks the contract, with the batch that shows it.
``ADVANTAGE_CHECKS`` and its siblings list them by kind; a user's own function is held to the same (``lightrft check``).
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
    reversed_order,
    rollout,
    row_parts,
    shown,
    spoiled,
    there,
    whole_part,
    with_dtype,
)
from lightrft.algorithms.importance_sampling import CORRECTIONS
from lightrft.algorithms.token_ops import Rows
from lightrft.config.algorithm import AdvantageConfig, LossConfig
from lightrft.types import Batch, Rollout, rows_of
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Function = Callable[..., Any]
TOLERANCE, ROUNDING = 1e-12, 1e-4
LIMIT = 8


class Broken(AssertionError):
    """A function does not keep the contract of its kind; the message says on which batch, and what came out."""


def expect(held: bool | Tensor, what: str) -> None:
    """Raises ``Broken`` with ``what`` unless ``held``."""
    if not held:
        raise Broken(what)


def expect_close(found: Tensor, expected: Tensor, where: str) -> None:
    """``found`` is ``expected`` up to rounding in float64."""
    expect(found.shape == expected.shape, f"{where}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    close = torch.isclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    expect(close.all(), f"{where}: {_short(found)}, not {_short(expected)}")


def expect_same_in_float32(run: Callable[[Batch], Tensor]) -> None:
    """What ``run`` makes of a batch in float32 is that of float64 up to rounding in float32."""
    for name, batch in batches():
        exact = run(batch).double()
        found = run(with_dtype(batch, torch.float32)).double()
        close = torch.isclose(found, exact, rtol=ROUNDING, atol=ROUNDING)
        expect(close.all(), f"{name}: {_short(found)} in float32, {_short(exact)} in float64")


def expect_finite(found: Tensor, where: str) -> None:
    """No nan and no infinity."""
    expect(torch.isfinite(found).all(), f"{where}: {_short(found)}")


def expect_shape(found: Tensor, length: int, where: str) -> None:
    """One number for each of ``length`` tokens or answers."""
    expect(found.shape == (length,), f"{where}: shape {tuple(found.shape)}, not ({length},)")


def expect_zero(found: Tensor, where: str) -> None:
    """Exactly 0 everywhere."""
    expect(not found.any(), f"{where}: {_short(found)}, not 0")


def expect_unchanged(batch: Batch, before: Batch, where: str) -> None:
    """Every column is as it was."""
    for axis in ("token", "sample"):
        for key, column in before.columns(axis).items():
            expect(torch.equal(getattr(batch, key), column), f"{where}: {key} was written to")


def _short(x: Tensor) -> list[Any]:
    """``x`` as a person reads it."""
    return [round(v, 6) if isinstance(v, float) else v for v in x.detach().tolist()]


# A function of a batch that gives one number per token or per response


def check_order(run: Callable[[Batch], Tensor], axis: str, split: Callable[[Batch], Sequence[Tensor]]) -> None:
    """Neither splitting, nor the order of the responses, nor the names of the prompts may change a number."""
    for name, batch in batches():
        whole = run(batch)
        expect_close(run(renumbered(batch)), whole, f"{name}, prompts renumbered")
        order = reversed_order(batch)
        places = order if axis == "sample" else rows_of(batch.lengths, order)
        expect_close(run(batch.select(order)), whole[places], f"{name}, in reverse")
        for part in split(batch):
            places = part if axis == "sample" else rows_of(batch.lengths, part)
            expect_close(run(batch.select(part)), whole[places], f"{name}, rows {part.tolist()} alone")


# Advantages


def advantages_of(function: Function, batch: Batch) -> tuple[Tensor, Tensor]:
    """With the outcome at the last sampled token and a little on every other one."""
    rows = Rows.of(batch)
    rewards = there(batch.rewards)
    token = torch.where(batch.mask, there(batch.ref_logprobs) / 10, 0.0).to(rewards.dtype)
    last = [int((rows.row_of == i).logical_and(rows.mask).nonzero()[-1]) for i in range(len(batch)) if rows.count()[i]]
    token[torch.tensor(last, dtype=torch.long)] += rewards[rows.count() > 0]
    return function(batch, token, AdvantageConfig(gamma=0.9, lam=0.8))


def check_advantage_is_finite(function: Function) -> None:
    """Finite on empty and fully masked answers, groups of one, equal rewards and policies far apart."""
    for name, batch in [*batches(), *extremes()]:
        for column in advantages_of(function, batch):
            expect_finite(column, name)


def check_advantage_is_zero_where_nothing_was_sampled(function: Function) -> None:
    """Exactly 0 at tokens that the policy did not sample, and one number per token."""
    for name, batch in batches():
        for column in advantages_of(function, batch):
            expect_shape(column, batch.tokens, name)
            expect_zero(column[~batch.mask], f"{name}, at the tokens that were not sampled")


def check_advantage_ignores_what_was_not_sampled(function: Function) -> None:
    """Whatever stands at tokens that were not sampled changes nothing."""
    for name, batch in batches():
        for a, b in zip(advantages_of(function, spoiled(batch)), advantages_of(function, batch), strict=True):
            expect_close(a, b, name)


def check_advantage_is_by_group_not_by_place(function: Function) -> None:
    """A group alone, answers in another order and prompts under other names give the same; one that says that it ``needs`` the
    batch may take its statistics over all of it."""
    split = whole_part if "batch" in needs_of(function) else group_parts
    for which in (0, 1):
        check_order(lambda batch, which=which: advantages_of(function, batch)[which], "token", split)


def needs_of(function: Function) -> frozenset[str]:
    """As it was registered with, or its own attribute."""
    function = inspect.unwrap(function)
    tables: tuple[Registry[Any], ...] = (ADVANTAGES, CORRECTIONS)
    registered = [table.about(name).needs for table in tables for name in table if table[name] is function]
    return frozenset(getattr(function, "needs", ())).union(*registered)


def check_advantage_keeps_the_dtype(function: Function) -> None:
    """float32 stays float32 and float64 stays float64."""
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            for column in advantages_of(function, with_dtype(batch, dtype)):
                expect(column.dtype == dtype, f"{name}: {column.dtype} of numbers in {dtype}")


def check_advantage_is_the_same_in_float32(function: Function) -> None:
    """float32 gives what float64 does, up to rounding."""
    for which in (0, 1):
        expect_same_in_float32(lambda batch, which=which: advantages_of(function, batch)[which])


def check_advantage_leaves_its_input_alone(function: Function) -> None:
    """No column of the batch is written to."""
    for name, batch in batches():
        before = copy.deepcopy(batch)
        advantages_of(function, batch)
        expect_unchanged(batch, before, name)


# Policy losses


def losses_of(function: Function, batch: Batch, logprobs: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """On policy's neighbour: the behaviour log-probs stand for the new ones."""
    new = batch.behavior_logprobs if logprobs is None else logprobs
    return function(new, batch.old_logprobs, batch.advantages, Rows.of(batch), LossConfig(dual_clip=3.0))


def loss_gradient(function: Function, batch: Batch) -> Tensor:
    """Of the summed losses at sampled tokens, with respect to the log-probs ``[N]``."""
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
            for column in (losses, loss_gradient(function, small), *stats.values()):
                expect_finite(column, name)
                expect_shape(column, batch.tokens, name)


def check_loss_without_advantage_has_no_gradient(function: Function) -> None:
    """Where every advantage is 0 the gradient is exactly 0."""
    for name, batch in [*batches(), *extremes()]:
        flat = batch.replace(advantages=torch.zeros_like(there(batch.advantages)))
        expect_zero(loss_gradient(function, flat), f"{name}, gradient where every advantage is 0")


def check_loss_on_policy_pushes_along_the_advantage(function: Function) -> None:
    """On policy, descent raises what has a positive advantage and lowers what has a negative one."""
    for name, batch in batches():
        found = loss_gradient(function, batch.replace(behavior_logprobs=batch.old_logprobs))
        advantages = there(batch.advantages)
        along = f"{name}: gradient {_short(found)} of the loss, advantages {_short(advantages)}"
        expect(((found * advantages)[batch.mask] <= 0).all(), along)
        expect(found.any() == advantages.any(), along)


def check_loss_ignores_what_was_not_sampled(function: Function) -> None:
    """Tokens that were not sampled have no gradient and change nobody else's loss."""
    for name, batch in batches():
        expect_close(losses_of(function, spoiled(batch))[0][batch.mask], losses_of(function, batch)[0][batch.mask], name)
        expect_close(loss_gradient(function, spoiled(batch))[batch.mask], loss_gradient(function, batch)[batch.mask], name)
        expect_zero(loss_gradient(function, batch)[~batch.mask], f"{name}, gradient of tokens that were not sampled")


def check_loss_is_by_response(function: Function) -> None:
    """An answer alone, or in another place, has the same loss and gradient."""
    check_order(lambda batch: torch.where(batch.mask, losses_of(function, batch)[0], 0.0), "token", row_parts)
    check_order(lambda batch: loss_gradient(function, batch), "token", row_parts)


def check_loss_keeps_the_dtype(function: Function) -> None:
    """float32 stays float32 and float64 stays float64; statistics carry no gradient."""
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            losses, stats = losses_of(function, with_dtype(batch, dtype))
            expect(losses.dtype == dtype, f"{name}: {losses.dtype} of numbers in {dtype}")
            for key, column in stats.items():
                expect(not column.requires_grad, f"{name}: {key} among the statistics carries gradient")


def check_loss_is_the_same_in_float32(function: Function) -> None:
    """float32 gives the loss and gradient of float64, up to rounding."""
    expect_same_in_float32(lambda batch: torch.where(batch.mask, losses_of(function, batch)[0], 0.0))
    expect_same_in_float32(lambda batch: loss_gradient(function, batch))


# Aggregations


def check_aggregation_is_finite_and_not_negative(function: Function) -> None:
    """One finite weight per token, none below 0."""
    for name, batch in batches():
        weights = function(Rows.of(batch), LIMIT)
        expect_finite(weights, name)
        expect_shape(weights, batch.tokens, name)
        expect((weights >= 0).all(), f"{name}: {_short(weights)}")


def check_aggregation_is_zero_exactly_where_nothing_was_sampled(function: Function) -> None:
    """Every sampled token has a weight, and no other does."""
    for name, batch in batches():
        weights = function(Rows.of(batch), LIMIT)
        expect(((weights > 0) == batch.mask).all(), f"{name}: weights {_short(weights)}")


def check_aggregation_is_by_response(function: Function) -> None:
    """Answers in another order and prompts under other names give the same."""
    check_order(lambda batch: function(Rows.of(batch), LIMIT), "token", lambda batch: [])


def check_aggregation_is_a_mean(function: Function) -> None:
    """A batch beside a copy of itself has the loss of the batch."""
    for name, batch in batches():
        twice = Batch.cat([batch, batch])
        expected = function(Rows.of(batch), LIMIT) / 2
        expect_close(function(Rows.of(twice), LIMIT), torch.cat([expected, expected]), name)


# KL estimators


def check_kl_is_finite(function: Function) -> None:
    """Finite, with a finite gradient, for log-ratios up to 20, and as wide as its input."""
    for dtype in (torch.float32, torch.float64):
        d = torch.tensor([-20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 20.0], dtype=dtype, requires_grad=True)
        found = function(d, torch.zeros_like(d))
        expect_finite(found.detach(), "log-ratios up to 20")
        expect_finite(torch.autograd.grad(found.sum(), d)[0], "gradient at log-ratios up to 20")
        expect(found.dtype == dtype, f"{found.dtype} of numbers in {dtype}")
        expect_shape(function(d[:0], d[:0]), 0, "no token")


def check_kl_is_zero_between_equals(function: Function) -> None:
    """Exactly 0 where the two log-probs are equal."""
    logprobs = torch.tensor([-20.0, -0.3, 0.0])
    expect_zero(function(logprobs, logprobs), f"log-probs {_short(logprobs)} of both")


def check_kl_is_by_token(function: Function) -> None:
    """A token alone gives the same."""
    for name, batch in batches():
        old, ref = there(batch.old_logprobs), there(batch.ref_logprobs)
        whole = function(old, ref)
        alone = [function(a[None], b[None]) for a, b in zip(old, ref, strict=True)]
        expect_close(torch.cat([whole[:0], *alone]), whole, name)


# Corrections


def correction_of(function: Function, batch: Batch, logprobs: Tensor | None = None) -> Tensor:
    """``[N]`` at sampled tokens, 0 elsewhere, with something for every option that must be given."""
    now = there(batch.logprobs) if logprobs is None else logprobs
    columns = now, there(batch.old_logprobs), there(batch.behavior_logprobs), there(batch.advantages)
    weights = function(*columns, Rows.of(batch), **example_options(function))
    expect_shape(weights, batch.tokens, shown(batch))
    return torch.where(batch.mask, weights, 0.0)


def check_correction_is_finite_and_not_negative(function: Function) -> None:
    """Finite and at least 0, on empty and fully masked answers and 20 nats off policy."""
    for dtype in (torch.float32, torch.float64):
        for name, batch in [*batches(), *extremes()]:
            weights = correction_of(function, with_dtype(batch, dtype))
            expect_finite(weights, name)
            expect((weights >= 0).all(), f"{name}: {_short(weights)}")
            expect(weights.dtype == dtype, f"{name}: {weights.dtype} of numbers in {dtype}")


def check_correction_is_one_between_equals(function: Function) -> None:
    """Where sampler, old policy and policy are one, nothing is corrected."""
    for name, batch in batches():
        same = batch.replace(behavior_logprobs=batch.old_logprobs, logprobs=batch.old_logprobs)
        weights = correction_of(function, same)[batch.mask]
        expect((weights == 1).all(), f"{name}: {_short(weights)}, not 1")


def check_correction_ignores_what_was_not_sampled(function: Function) -> None:
    """Whatever stands at tokens that were not sampled changes nothing."""
    for name, batch in batches():
        expect_close(correction_of(function, spoiled(batch)), correction_of(function, batch), name)


def check_correction_is_by_response(function: Function) -> None:
    """An answer alone, or in another place, has the same weights; one that says that it ``needs`` the batch may compare all of it."""
    split = whole_part if "batch" in needs_of(function) else row_parts
    check_order(lambda batch: correction_of(function, batch), "token", split)


# Gates


def gate_of(function: Function, batch: Batch, settings: LossConfig | None = None) -> Tensor:
    """``[2, N]``: what is kept, and the pull, as two rows of numbers."""
    generator = torch.Generator().manual_seed(3)
    gate = function(batch, settings or LossConfig(), generator, **example_options(function))
    pull = torch.zeros(batch.tokens) if gate.pull is None else gate.pull
    for part in (gate.keep, pull):
        expect_shape(part, batch.tokens, shown(batch))
    return torch.stack([gate.keep.double(), pull.double()])


def check_gate_keeps_a_share_between_nothing_and_all(function: Function) -> None:
    """Finite, in [0, 1] and exactly 0 where nothing was sampled; the pull is finite, not negative and 0 there too."""
    for name, batch in [*batches(), *extremes()]:
        keep, pull = gate_of(function, batch)
        expect_finite(pull, name)
        expect(((keep >= 0) & (keep <= 1)).all(), f"{name}: {_short(keep)}")
        expect((pull >= 0).all(), f"{name}: pull {_short(pull)}")
        expect_zero(keep[~batch.mask], f"{name}, kept at the tokens that were not sampled")
        expect_zero(pull[~batch.mask], f"{name}, pull of the tokens that were not sampled")


def check_gate_ignores_what_was_not_sampled(function: Function) -> None:
    """Whatever stands at tokens that were not sampled changes nothing."""
    for name, batch in batches():
        expect_close(gate_of(function, spoiled(batch)), gate_of(function, batch), name)


def check_gate_is_by_content_not_by_place(function: Function) -> None:
    """Answers in another order and prompts under other names give the same choice, a random one too."""
    for index in (0, 1):
        check_order(lambda batch, index=index: gate_of(function, batch)[index], "token", whole_part)


def check_gate_leaves_its_input_alone(function: Function) -> None:
    """No column of the batch is written to."""
    for name, batch in batches():
        before = copy.deepcopy(batch)
        gate_of(function, batch)
        expect_unchanged(batch, before, name)


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
    """``[B]``, with something for every option that must be given."""
    return function(batch, batch.rewards, max_new_tokens=LIMIT, **example_options(function))


def check_shaping_is_finite(function: Function) -> None:
    """Finite on empty and fully masked answers, groups of one and equal rewards; one number per answer."""
    for name, batch in [*batches(), *extremes()]:
        expect_finite(shaped(function, batch), name)
        expect_shape(shaped(function, batch), len(batch), name)


def check_shaping_is_by_group_not_by_place(function: Function) -> None:
    """A group alone, answers in another order and prompts under other names give the same."""
    check_order(lambda batch: shaped(function, batch), "sample", group_parts)


def check_shaping_keeps_the_dtype(function: Function) -> None:
    """float32 stays float32 and float64 stays float64."""
    for dtype in (torch.float32, torch.float64):
        for name, batch in batches():
            found = shaped(function, with_dtype(batch, dtype))
            expect(found.dtype == dtype, f"{name}: {found.dtype} of numbers in {dtype}")


def check_shaping_is_the_same_in_float32(function: Function) -> None:
    """float32 gives what float64 does, up to rounding."""
    expect_same_in_float32(lambda batch: shaped(function, batch))


def check_shaping_leaves_its_input_alone(function: Function) -> None:
    """No column of the batch is written to."""
    for name, batch in batches():
        before = copy.deepcopy(batch)
        shaped(function, batch)
        expect_unchanged(batch, before, name)


def check_filter_gives_a_reason_or_nothing(function: Function) -> None:
    """The empty text or a reason on one line, also for a group without answers."""
    for group in groups():
        reason = function(group, **example_options(function))
        expect(isinstance(reason, str), f"{_rewards(group)}: {reason!r} is not text")
        expect("\n" not in reason, f"{_rewards(group)}: {reason!r} is not one line")


def check_filter_is_by_content_not_by_place(function: Function) -> None:
    """Answers in another order and another prompt give the same, and the group is left as it is."""
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
    return f"group of answers with rewards {[r.reward for r in group]}"


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
GATE_CHECKS = [
    check_gate_keeps_a_share_between_nothing_and_all,
    check_gate_ignores_what_was_not_sampled,
    check_gate_is_by_content_not_by_place,
    check_gate_leaves_its_input_alone,
]
SHAPING_CHECKS = [
    check_shaping_is_finite,
    check_shaping_is_by_group_not_by_place,
    check_shaping_keeps_the_dtype,
    check_shaping_is_the_same_in_float32,
    check_shaping_leaves_its_input_alone,
]
FILTER_CHECKS = [check_filter_gives_a_reason_or_nothing, check_filter_is_by_content_not_by_place]
