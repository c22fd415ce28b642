"""Run every check of a kind on one function."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType

from lightrft.algorithms.contracts import checks, results
from lightrft.algorithms.contracts.checks import ContractViolation
from lightrft.algorithms.contracts.loss_checks import PREFERENCE_CHECKS, REWARD_CHECKS
from lightrft.algorithms.validate.component_kinds import (
    COMPONENT_KINDS,
    Function,
    signature_problems,
)
from lightrft.config.base import ComponentConfig
from lightrft.config.preference.sections import PreferenceLossConfig
from lightrft.utils.contract_result import CheckResult
from lightrft.utils.errors import ConfigError

_log = logging.getLogger(__name__)
RAISED = "raised "
"""Start of the description of a check that ended with an exception."""

CHECKS: Mapping[str, Sequence[FunctionType]] = {
    "advantage": [
        results.check_advantage_gives_advantages_and_returns,
        *checks.ADVANTAGE_CHECKS,
    ],
    "loss": [results.check_loss_gives_losses_and_statistics, *checks.POLICY_LOSS_CHECKS],
    "correction": [results.check_correction_gives_weights, *checks.CORRECTION_CHECKS],
    "token_mask": [results.check_token_mask_gives_a_mask, *checks.TOKEN_MASK_CHECKS],
    "aggregation": [results.check_aggregation_gives_weights, *checks.AGGREGATION_CHECKS],
    "kl": [results.check_kl_gives_estimates, *checks.KL_CHECKS],
    "shaping": [results.check_shaping_gives_rewards, *checks.SHAPING_CHECKS],
    "filter": [results.check_filter_gives_text, *checks.FILTER_CHECKS],
    "preference": [results.check_preference_loss_gives_losses, *PREFERENCE_CHECKS],
    "reward_model": [results.check_reward_loss_gives_losses, *REWARD_CHECKS],
}
"""The checks of each kind of ``COMPONENT_KINDS``. The first is of the type and shape alone."""


def run_contract_checks(name: str, kind: str, options: Mapping[str, object]) -> list[CheckResult]:
    """Run every check of a kind on a function and return one verdict per check.

    A failed check does not stop the others.

    Args:
        name: A registered name, or ``package.module:function``.
        kind: A key of ``COMPONENT_KINDS``.
        options: Options of the function.

    Raises:
        ConfigError: If the function does not exist or its signature does not fit its kind.
    """
    row = COMPONENT_KINDS[kind]
    problems = list(
        signature_problems(
            row.key,
            row.registry,
            ComponentConfig(name=name, options=dict(options)),
            len(row.arguments),
            *row.given,
        )
    )
    if problems:
        raise ConfigError("\n".join(problems))
    function = with_options(row.registry[name], options)
    return [verdict(check, function) for check in CHECKS[kind]]


def check_own_parts(
    parts: Iterable[tuple[str, str, ComponentConfig | PreferenceLossConfig]],
) -> None:
    """Check the functions of the user, and warn of what they break.

    Args:
        parts: Kind, setting, and name with options of each function. Built-in functions are left
            out.

    Raises:
        ConfigError: If the result of a function has another type or shape than its kind.
    """
    problems = []
    for kind, key, part in parts:
        if ":" not in part.name:
            continue
        shape, *others = run_contract_checks(part.name, kind, part.options)
        # A function may be written for the data of its run, so an exception here is no refusal.
        if shape.broken and not shape.broken.startswith(RAISED):
            problems.append(f"{key}: {part.name!r}: {shape.broken}. {shape.asks}")
        elif broken := [one for one in (shape, *others) if one.broken]:
            _log.warning(
                "%s: %r breaks %d of %d rules of its kind, which 'lightrft check %s' lists. The "
                "first: %s (%s)",
                key,
                part.name,
                len(broken),
                1 + len(others),
                part.name,
                broken[0].asks.removesuffix("."),
                broken[0].broken,
            )
    if problems:
        raise ConfigError("\n".join(problems))


def with_options(function: Function, options: Mapping[str, object]) -> Function:
    """Bind ``options`` to ``function``; they override other keywords."""

    # wraps, since the checks look up the needs and the signature of the function inside
    @functools.wraps(function)
    def held(*values: object, **keywords: object) -> object:
        return function(*values, **{**keywords, **options})

    return held


def verdict(check: FunctionType, function: Function) -> CheckResult:
    """Run ``check`` on ``function``. Any exception that the function raises fails the check."""
    words = check.__name__.removeprefix("check_").partition("_")[2].replace("_", " ")
    asks = " ".join((check.__doc__ or "").split())
    try:
        check(function)
    except ContractViolation as error:
        return CheckResult(words, asks, str(error))
    # a user's function may raise anything, and the other checks must still run
    except Exception as error:
        return CheckResult(words, asks, f"{RAISED}{type(error).__name__}: {error}")
    return CheckResult(words, asks, "")
