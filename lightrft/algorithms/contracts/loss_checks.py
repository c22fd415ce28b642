"""Check the contract of losses of preferences and of reward models, whatever their formula.

Each ``check_*`` takes one function. ``PREFERENCE_CHECKS`` and ``REWARD_CHECKS`` list them; see
``checks``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lightrft.algorithms.contracts.checks import (
    ROUNDING,
    TOLERANCE,
    ContractViolation,
    Function,
    example_options,
    expect,
    expect_close,
    expect_finite,
    expect_shape,
    needs_of,
)
from lightrft.algorithms.contracts.preference_cases import (
    cast,
    each_responses,
    each_tensor,
    far_preferences,
    leaning,
    preferences,
    selected,
)
from lightrft.algorithms.contracts.reward_cases import (
    far_scored_cases,
    leaning_scores,
    mirrored,
    scored_cases,
    scored_responses,
    shifted,
)
from lightrft.algorithms.preference.inputs import Preferences, Ranked, Responses
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.registry import KINDS
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import About

SETTINGS: dict[str, Any] = {"losses": ["sigmoid"], "beta": 0.1, "label_smoothing": 0.1}
"""Shared settings of the checks. Some losses need ``label_smoothing`` above 0."""


def kind_of_loss(function: Function) -> str:
    """Return the kind of a registered loss, or the attribute ``kind`` of another one."""
    function = inspect.unwrap(function)
    for name in PREFERENCE_LOSSES:
        if PREFERENCE_LOSSES[name] is function:
            return PREFERENCE_LOSSES.about(name).kind
    kind = getattr(function, "kind", "")
    if kind not in ("pair", "labelled", "ranked"):
        raise ContractViolation(
            f"the attribute kind of the function is {kind!r}; set it to pair, labelled or ranked"
        )
    return kind


def losses_of_preferences(function: Function, data: Preferences) -> Tensor:
    """Call a loss with a value for every required option."""
    settings = PreferenceConfig.model_validate(SETTINGS)
    return function(data, settings, **example_options(function))


def preference_gradient(function: Function, data: Preferences) -> list[Tensor]:
    """Return the gradient of the summed losses for the log-probs of each ``Responses``."""
    leaves: list[Tensor] = []

    def leaf(responses: Responses) -> Responses:
        leaves.append(responses.logprobs.clone().requires_grad_())
        return dataclasses.replace(responses, logprobs=leaves[-1])

    losses = losses_of_preferences(function, each_responses(data, leaf))
    expect(losses.requires_grad, "the losses carry no gradient of the log-probs")
    found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    zeros = [torch.zeros_like(one) for one in leaves]
    return [zero if one is None else one for one, zero in zip(found, zeros, strict=True)]


def check_preference_loss_is_finite(function: Function) -> None:
    """Losses and gradient are finite, also where the policy is 10,000 nats from the reference."""
    kind = kind_of_loss(function)
    for dtype in (torch.float32, torch.float64):
        for name, data in [*preferences(kind), *far_preferences(kind)]:
            small = cast(data, dtype)
            losses = losses_of_preferences(function, small)
            expect_shape(losses, len(data), name)
            expect_finite(losses, name)
            for gradient in preference_gradient(function, small):
                expect_finite(gradient, f"{name}, gradient")


def check_preference_loss_is_lower_if_the_policy_agrees(function: Function) -> None:
    """The loss is lower where the policy prefers the better response than where it prefers the
    worse one.
    """
    kind = kind_of_loss(function)
    agrees = losses_of_preferences(function, leaning(kind, 2.5, -2.5)).mean()
    differs = losses_of_preferences(function, leaning(kind, -2.5, 2.5)).mean()
    expect(
        agrees < differs,
        f"{float(agrees):g} where the policy prefers the better response, {float(differs):g} where "
        "it prefers the worse one",
    )


def check_preference_loss_is_by_example(function: Function) -> None:
    """A pair or labelled response has the same loss alone, and in any other place.

    A loss that ``needs`` the ``whole_batch`` has the same sum in any order.
    """
    kind = kind_of_loss(function)
    if kind == "ranked":
        _check_groups(function)
    else:
        _check_examples(function, kind)


def _check_examples(function: Function, kind: str) -> None:
    """Check that an example has the same loss alone and in any place, if its kind allows it."""
    coupled = "whole_batch" in needs_of(function)
    for name, data in preferences(kind):
        whole = losses_of_preferences(function, data)
        order = torch.arange(len(data) - 1, -1, -1)
        turned = losses_of_preferences(function, selected(data, order))
        if coupled:
            expect_close(turned.sum()[None], whole.sum()[None], f"{name}, in reverse, sum")
            continue
        expect_close(turned, whole[order], f"{name}, in reverse")
        for i in range(len(data)):
            alone = losses_of_preferences(function, selected(data, torch.tensor([i])))
            expect_close(alone, whole[i : i + 1], f"{name}, example {i} alone")


def _check_groups(function: Function) -> None:
    """Check that a group has the same loss alone, and with its responses in any order."""
    for name, data in preferences("ranked"):
        assert isinstance(data, Ranked)
        whole = losses_of_preferences(function, data)
        order = torch.arange(data.group_of.numel() - 1, -1, -1)
        turned = losses_of_preferences(function, selected(data, order))
        expect_close(turned, whole, f"{name}, responses in reverse")
        for group in range(len(data)):
            members = (data.group_of == group).nonzero()[:, 0]
            part = selected(data, members)
            assert isinstance(part, Ranked)
            alone = dataclasses.replace(part, group_of=torch.zeros_like(members))
            found = losses_of_preferences(function, alone)
            expect_close(found, whole[group : group + 1], f"{name}, group {group} alone")


def check_preference_loss_keeps_the_dtype(function: Function) -> None:
    """The loss has the dtype of the input. Float32 and float64 agree up to rounding."""
    _check_dtype(
        lambda data: losses_of_preferences(function, data), preferences(kind_of_loss(function))
    )


def _check_dtype(losses: Callable[[Any], Tensor], cases: Sequence[tuple[str, Any]]) -> None:
    for name, data in cases:
        exact, found = losses(data), losses(cast(data, torch.float32))
        expect(exact.dtype == torch.float64, f"{name}: {exact.dtype} of numbers in float64")
        expect(found.dtype == torch.float32, f"{name}: {found.dtype} of numbers in float32")
        close = torch.isclose(found.double(), exact, rtol=ROUNDING, atol=ROUNDING)
        expect(close.all(), f"{name}: {found.tolist()} in float32, {exact.tolist()} in float64")


def check_preference_loss_leaves_its_input_alone(function: Function) -> None:
    """The data are the same after the call."""
    for name, data in preferences(kind_of_loss(function)):
        before = each_tensor(data, torch.clone)
        losses_of_preferences(function, data)
        expect(_same(before, data), f"{name}: a column was written to")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if not dataclasses.is_dataclass(a):
        return a == b
    names = [field.name for field in dataclasses.fields(a)]
    return all(_same(getattr(a, name), getattr(b, name)) for name in names)


PREFERENCE_CHECKS = [
    check_preference_loss_is_finite,
    check_preference_loss_is_lower_if_the_policy_agrees,
    check_preference_loss_is_by_example,
    check_preference_loss_keeps_the_dtype,
    check_preference_loss_leaves_its_input_alone,
]


def about_reward_loss(function: Function) -> About:
    """Return the row of a registered loss, or the attributes of another one.

    Raises:
        ContractViolation: If the attribute ``kind`` is missing or unknown.
    """
    function = inspect.unwrap(function)
    for name in REWARD_LOSSES:
        if REWARD_LOSSES[name] is function:
            return REWARD_LOSSES.about(name)
    kind, heads = getattr(function, "kind", ""), getattr(function, "heads", None)
    if kind not in KINDS:
        raise ContractViolation(
            f"the attribute kind of the function is {kind!r}; set it to one of {', '.join(KINDS)}"
        )
    return About(kind=kind, heads=None if heads is None else frozenset(heads))


def head_of(function: Function) -> str:
    """Return a kind of head that a loss fits, ``linear`` if it can."""
    heads = about_reward_loss(function).heads
    return "linear" if heads is None or "linear" in heads else min(heads)


def reward_losses(function: Function, data: ScoredResponses) -> Tensor:
    """Call a loss with a value for every required option."""
    return function(data, **example_options(function))


def number_of_losses(kind: str, data: ScoredResponses) -> int:
    """Return how many losses a loss of this kind has."""
    if kind == "rating":
        return data.rated().numel()
    if kind == "group":
        return data.groups
    ties = data.ties()[0].numel() if kind == "tie" else 0
    return data.pairs()[0].numel() + ties


def reward_gradient(function: Function, data: ScoredResponses) -> tuple[Tensor, Tensor]:
    """Return the gradient of the summed losses for outputs ``[B, C]`` and scores ``[B]``."""
    outputs = data.outputs.clone().requires_grad_()
    scores = data.scores.clone().requires_grad_()
    losses = reward_losses(function, dataclasses.replace(data, outputs=outputs, scores=scores))
    expect(losses.requires_grad, "the losses carry no gradient of the outputs or the scores")
    found = torch.autograd.grad(losses.sum(), (outputs, scores), allow_unused=True)
    of_outputs, of_scores = found
    if of_outputs is None:
        of_outputs = torch.zeros_like(outputs)
    if of_scores is None:
        of_scores = torch.zeros_like(scores)
    return of_outputs, of_scores


def is_even(function: Function) -> bool:
    """Return whether opposite scores have the same losses, as those of a regulariser have."""
    data = scored_responses([0, 0, 0, 1, 1], head_of(function))
    plain, opposite = reward_losses(function, data), reward_losses(function, mirrored(data))
    return bool(torch.isclose(plain, opposite, rtol=TOLERANCE, atol=TOLERANCE).all())


def check_reward_loss_is_finite(function: Function) -> None:
    """There is one loss per pair, tie, group or rating. Losses and gradient are finite, also for
    scores of 10,000.
    """
    head, kind = head_of(function), about_reward_loss(function).kind
    for dtype in (torch.float32, torch.float64):
        for name, data in [*scored_cases(head), *far_scored_cases(head)]:
            small = cast(data, dtype)
            losses = reward_losses(function, small)
            expect_shape(losses, number_of_losses(kind, small), name)
            expect_finite(losses, name)
            for gradient in reward_gradient(function, small):
                expect_finite(gradient, f"{name}, gradient")


def check_reward_loss_is_no_higher_if_the_scores_agree(function: Function) -> None:
    """The loss is lower where the scores agree with the labels than where they contradict them. A
    regulariser has the same loss.
    """
    head = head_of(function)
    agrees = reward_losses(function, leaning_scores(head, 2.5, -2.5)).mean()
    differs = reward_losses(function, leaning_scores(head, -2.5, 2.5)).mean()
    lower = agrees <= differs if is_even(function) else agrees < differs
    expect(
        lower,
        f"{float(agrees):g} where the better response has the larger score, {float(differs):g} "
        "where it has the smaller one",
    )


def check_reward_loss_raises_the_better_response(function: Function) -> None:
    """At equal scores, a step against the gradient raises the better response of a pair and lowers
    the worse one. A regulariser, and a loss of ratings, may do neither.
    """
    head, kind = head_of(function), about_reward_loss(function).kind
    if kind == "rating" or is_even(function):
        return
    of_outputs, of_scores = reward_gradient(function, leaning_scores(head, 0.5, 0.5))
    slope = of_outputs[:, 0] + of_scores
    expect(
        bool((slope[0::2] < 0).all() and (slope[1::2] > 0).all()),
        f"gradient {slope.tolist()} for better and worse responses in turn",
    )


def check_reward_loss_ignores_a_shift_of_all_scores(function: Function) -> None:
    """Losses of pairs, ties and groups are the same if all scores are larger by a constant. A
    regulariser has the same losses for opposite scores instead.
    """
    if about_reward_loss(function).kind == "rating" or is_even(function):
        return
    for name, data in scored_cases(head_of(function)):
        for by in (-3.0, 7.0):
            moved = reward_losses(function, shifted(data, by))
            # a shift rounds the scores themselves
            close = torch.isclose(moved, reward_losses(function, data), rtol=1e-9, atol=1e-9)
            expect(close.all(), f"{name}: other losses with all scores {by:+g}")


def check_reward_loss_is_by_group(function: Function) -> None:
    """A group has the same losses alone, and with its responses in any order."""
    head = head_of(function)
    for name, data in scored_cases(head):
        kind = about_reward_loss(function).kind
        whole = reward_losses(function, data)
        group_of_loss = _groups_of_losses(kind, data)
        order = torch.arange(len(data) - 1, -1, -1)
        reverse = selected(data, order)
        turned = _by_group(reward_losses(function, reverse), _groups_of_losses(kind, reverse), data)
        expect_close(turned, _by_group(whole, group_of_loss, data), f"{name}, in reverse, sums")
        for group in range(data.groups):
            members = (data.group_of == group).nonzero()[:, 0]
            alone = dataclasses.replace(selected(data, members), group_of=torch.zeros_like(members))
            expected = whole[group_of_loss == group]
            expect_close(reward_losses(function, alone), expected, f"{name}, group {group} alone")


def _groups_of_losses(kind: str, data: ScoredResponses) -> Tensor:
    """Return the group of each loss."""
    if kind == "group":
        return torch.arange(data.groups)
    if kind == "rating":
        return data.group_of[data.rated()]
    first = data.pairs()[0]
    if kind == "tie":
        first = torch.cat([first, data.ties()[0]])
    return data.group_of[first]


def _by_group(losses: Tensor, group: Tensor, data: ScoredResponses) -> Tensor:
    """Return the sum of the losses of each group, ``[G]``."""
    return torch.zeros(data.groups, dtype=losses.dtype).index_add(0, group, losses)


def check_reward_loss_keeps_the_dtype(function: Function) -> None:
    """The loss has the dtype of the input. Float32 and float64 agree up to rounding."""
    _check_dtype(lambda data: reward_losses(function, data), scored_cases(head_of(function)))


def check_reward_loss_leaves_its_input_alone(function: Function) -> None:
    """The data are the same after the call."""
    for name, data in scored_cases(head_of(function)):
        before = each_tensor(data, torch.clone)
        reward_losses(function, data)
        for field in dataclasses.fields(data):
            old, new = getattr(before, field.name), getattr(data, field.name)
            same = old is None or torch.allclose(old, new, rtol=0, atol=0, equal_nan=True)
            expect(same, f"{name}: {field.name} was written to")


REWARD_CHECKS = [
    check_reward_loss_is_finite,
    check_reward_loss_is_no_higher_if_the_scores_agree,
    check_reward_loss_raises_the_better_response,
    check_reward_loss_ignores_a_shift_of_all_scores,
    check_reward_loss_is_by_group,
    check_reward_loss_keeps_the_dtype,
    check_reward_loss_leaves_its_input_alone,
]
