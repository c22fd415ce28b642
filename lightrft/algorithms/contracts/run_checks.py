"""Every check of a kind, run on one function."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from lightrft.algorithms.contracts import checks
from lightrft.algorithms.contracts.checks import Broken
from lightrft.algorithms.validate.component_kinds import KINDS, Function, misfit
from lightrft.config.base import Part
from lightrft.utils.contract_result import Verdict
from lightrft.utils.errors import ConfigError

CHECKS: Mapping[str, Sequence[FunctionType]] = {
    "advantage": checks.ADVANTAGE_CHECKS,
    "loss": checks.POLICY_LOSS_CHECKS,
    "correction": checks.CORRECTION_CHECKS,
    "gate": checks.GATE_CHECKS,
    "aggregation": checks.AGGREGATION_CHECKS,
    "kl": checks.KL_CHECKS,
    "shaping": checks.SHAPING_CHECKS,
    "filter": checks.FILTER_CHECKS,
}
"""The checks of each kind of ``KINDS``."""


def verdicts(name: str, kind: str, options: Mapping[str, Any]) -> list[Verdict]:
    """Every check of ``kind`` on the function ``name`` with ``options``, whatever the others say.

    Raises ``ConfigError`` where the function does not exist, or cannot be called as its kind is.
    """
    row = KINDS[kind]
    problems = list(misfit(row.key, row.registry, Part(name=name, options=dict(options)), len(row.arguments), *row.given))
    if problems:
        raise ConfigError("\n".join(problems))
    function = with_options(row.registry[name], options)
    return [verdict(check, function) for check in CHECKS[kind]]


def with_options(function: Function, options: Mapping[str, Any]) -> Function:
    """``function`` with these ``options``, whatever else it is given."""

    @functools.wraps(function)
    def held(*values: Any, **keywords: Any) -> Any:
        return function(*values, **{**keywords, **options})

    return held


def verdict(check: FunctionType, function: Function) -> Verdict:
    """``check`` on ``function``. Whatever the function raises breaks the check."""
    words = check.__name__.removeprefix("check_").partition("_")[2].replace("_", " ")
    asks = " ".join((check.__doc__ or "").split())
    try:
        check(function)
    except Broken as error:
        return Verdict(words, asks, str(error))
    except Exception as error:
        return Verdict(words, asks, f"raised {type(error).__name__}: {error}")
    return Verdict(words, asks, "")
