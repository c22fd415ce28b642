"""Check that the result of a function has the type and the shape of its kind.

Each ``check_*`` calls one function on an ordinary batch: two groups of four responses, each with
two sampled tokens. A run refuses a function whose result has another type or shape.
"""

from __future__ import annotations

from lightrft.algorithms.contracts.cases import filled, plain_batch, rollout
from lightrft.algorithms.contracts.checks import (
    LIMIT,
    Function,
    advantages_of,
    correction_of,
    example_options,
    expect,
    expect_shape,
    gate_of,
    losses_of,
    shaped,
    there,
)
from lightrft.algorithms.contracts.loss_checks import (
    about_reward_loss,
    head_of,
    kind_of_loss,
    losses_of_preferences,
    number_of_losses,
    reward_losses,
)
from lightrft.algorithms.contracts.preference_cases import preferences
from lightrft.algorithms.contracts.reward_cases import scored_cases
from lightrft.algorithms.token_ops import TokenRows
from lightrft.types import Batch

GROUP = 4


def ordinary() -> Batch:
    """Return two groups of ``GROUP`` responses with different rewards."""
    return filled(plain_batch([[True, True]] * 2 * GROUP, [i // GROUP for i in range(2 * GROUP)]))


def check_advantage_gives_advantages_and_returns(function: Function) -> None:
    """The result is a pair of tensors ``[N]``: advantages and returns."""
    batch = ordinary()
    found = advantages_of(function, batch)
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    expect(is_pair, f"the result is {_kind(found)}, not a pair of advantages and returns")
    for name, column in zip(("advantages", "returns"), found):
        expect_shape(column, batch.tokens, name)


def check_loss_gives_losses_and_statistics(function: Function) -> None:
    """The result is a pair: the loss of each token, ``[N]``, and a dict of statistics ``[N]``."""
    batch = ordinary()
    found = losses_of(function, batch)
    is_pair = isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], dict)
    expect(is_pair, f"the result is {_kind(found)}, not a pair of losses and a dict")
    losses, statistics = found
    for name, column in {"the losses": losses, **statistics}.items():
        expect_shape(column, batch.tokens, name)


def check_aggregation_gives_weights(function: Function) -> None:
    """The result is one weight per token, ``[N]``."""
    batch = ordinary()
    expect_shape(function(TokenRows.of(batch), LIMIT), batch.tokens, "the weights")


def check_kl_gives_estimates(function: Function) -> None:
    """The result is one estimate per token, ``[N]``."""
    batch = ordinary()
    found = function(there(batch.old_logprobs), there(batch.ref_logprobs))
    expect_shape(found, batch.tokens, "the estimates")


def check_correction_gives_weights(function: Function) -> None:
    """The result is one weight per token, ``[N]``."""
    correction_of(function, ordinary())


def check_token_mask_gives_a_mask(function: Function) -> None:
    """The result has ``weight`` and ``kl_pull_coef``, each ``[N]``."""
    gate_of(function, ordinary())


def check_shaping_gives_rewards(function: Function) -> None:
    """The result is one reward per response, ``[B]``."""
    batch = ordinary()
    expect_shape(shaped(function, batch), len(batch), "the rewards")


def check_filter_gives_text(function: Function) -> None:
    """The result is the reason to drop the group, or an empty string or None."""
    group = [rollout(float(i % 2), i + 1) for i in range(GROUP)]
    found = function(group, **example_options(function))
    expect(
        isinstance(found, str | None),
        f"the result is {_kind(found)}, not a reason or an empty text",
    )


def check_preference_loss_gives_losses(function: Function) -> None:
    """The result is one loss per example."""
    name, data = next(iter(preferences(kind_of_loss(function))))
    expect_shape(losses_of_preferences(function, data), len(data), name)


def check_reward_loss_gives_losses(function: Function) -> None:
    """The result is one loss per pair, tie, group or rating."""
    kind = about_reward_loss(function).kind
    name, data = next(iter(scored_cases(head_of(function))))
    expect_shape(reward_losses(function, data), number_of_losses(kind, data), name)


def _kind(found: object) -> str:
    name = type(found).__name__
    return f"a {name} of {len(found)}" if isinstance(found, tuple | list) else f"a {name}"
