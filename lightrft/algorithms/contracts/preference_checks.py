"""Check the contract of preference losses, whatever their formula.

Each ``check_*`` takes one function, and ``PREFERENCE_CHECKS`` lists them; see ``checks``.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from lightrft.algorithms.contracts.checks import (
    ROUNDING,
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
from lightrft.algorithms.preference.inputs import Preferences, Ranked, Responses
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.lazy_imports import Tensor, torch

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
    for name, data in preferences(kind_of_loss(function)):
        exact = losses_of_preferences(function, data)
        found = losses_of_preferences(function, cast(data, torch.float32))
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
