"""The verb ``lightrft check``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lightrft.config.base import parse_yaml
from lightrft.utils.errors import ConfigError

USAGE = "lightrft check <module:function | file.py:function | name> [option=value ...] [--kind <kind>] [--limit <seconds>]"
LIMIT = 10.0
"""Maximum seconds of each reward call, unless ``--limit`` is given."""


def run(arguments: Sequence[str]) -> int:
    """Check a function against the contract of its kind. The exit status is 1 if it fails."""
    from lightrft.algorithms.contracts.run_checks import CHECKS

    words = list(arguments)
    if not words or {"-h", "--help"} & set(words):
        sys.stdout.write(f"{USAGE}\n\nkinds: {', '.join([*CHECKS, 'reward'])}\n")
        return 0
    kind, limit = _take("--kind", words), _seconds(_take("--limit", words))
    names = [w for w in words if "=" not in w]
    if len(names) != 1:
        raise ConfigError(f"{len(names)} functions are named; it takes one: {USAGE}")
    options = {key: _value(text) for key, _, text in (w.partition("=") for w in words if "=" in w)}
    return _report(names[0], kind, options, limit)


def _report(name: str, kind: str, options: dict[str, Any], limit: float | None) -> int:
    from lightrft.algorithms.contracts.run_checks import CHECKS, run_contract_checks
    from lightrft.algorithms.validate.component_kinds import kind_of
    from lightrft.rewards.contracts import is_reward, reward_verdicts

    kind = kind or ("reward" if is_reward(name) else kind_of(name))
    if kind not in (*CHECKS, "reward"):
        raise ConfigError(f"--kind {kind}: there is no such kind; known: {', '.join([*CHECKS, 'reward'])}")
    if kind != "reward" and limit is not None:
        raise ConfigError(
            f"--limit {limit:g} is for rewards, and {name} is taken for a {kind}; leave it out, or add --kind reward"
        )
    found = reward_verdicts(name, options, limit or LIMIT) if kind == "reward" else run_contract_checks(name, kind, options)
    given = "".join(f" {key}={value}" for key, value in options.items())
    sys.stdout.write(f"{name} as {kind}{given}\n\n")
    width = max(len(v.check) for v in found)
    for v in found:
        sys.stdout.write(f"  {'FAIL' if v.broken else 'pass'}  {v.check:<{width}}  {v.asks}\n")
        if v.broken:
            sys.stdout.write("".join(f"        {line}\n" for line in v.broken.splitlines()))
    failed = sum(1 for v in found if v.broken)
    sys.stdout.write(f"\n{failed} of {len(found)} checks failed\n" if failed else f"\nall {len(found)} checks hold\n")
    return 1 if failed else 0


def _take(option: str, words: list[str]) -> str:
    """Remove ``option x`` or ``option=x`` from ``words`` and return x, or "" without it."""
    for i, word in enumerate(words):
        if word.startswith(f"{option}="):
            return words.pop(i).partition("=")[2]
        if word == option:
            if i + 1 == len(words):
                raise ConfigError(f"{option} names no {option[2:]}: {USAGE}")
            given = words[i + 1]
            del words[i : i + 2]
            return given
    return ""


def _seconds(text: str) -> float | None:
    """Parse a time limit in seconds. Raises ``ConfigError`` unless it is above 0."""
    if not text:
        return None
    value = _value(text)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"--limit {text}: it is a number of seconds above 0")
    return float(value)


def _value(text: str) -> Any:
    return parse_yaml(text) if text else None
