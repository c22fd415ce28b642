"""The verb ``lightrft check``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.arguments import wants_usage
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import parse_yaml

USAGE = (
    "lightrft check <module:function | file.py:function | name> [run folder] [option=value ...] "
    "[--kind <kind>] [--limit <seconds>]"
)
LIMIT = 10.0
"""Maximum seconds of each reward call, unless ``--limit`` is given."""


def run(arguments: Sequence[str]) -> int:
    """Check a function against the contract of its kind, or score the responses of a run again.

    The exit status is 1 if a check fails, or a response is not scored.
    """
    from lightrft.algorithms.contracts.run_checks import CHECKS

    words = list(arguments)
    if wants_usage(words):
        sys.stdout.write(f"{USAGE}\n\nkinds: {', '.join([*CHECKS, 'reward'])}\n")
        return 0
    kind = _take("--kind", words)
    limit = _seconds(_take("--limit", words))
    names: list[str] = []
    options: dict[str, object] = {}
    for word in words:
        key, is_option, text = word.partition("=")
        if is_option:
            options[key] = parse_yaml(text)
        else:
            names.append(word)
    folders = [name for name in names if Path(name).expanduser().is_dir()]
    functions = [name for name in names if name not in folders]
    if len(functions) != 1 or len(folders) > 1:
        raise ConfigError(
            f"{len(functions)} functions and {len(folders)} run folders are named; it takes one "
            f"function: {USAGE}"
        )
    if folders:
        return _rescore(functions[0], kind, options, Path(folders[0]).expanduser(), limit)
    return _report(functions[0], kind, options, limit)


def _rescore(
    name: str, kind: str, options: dict[str, object], folder: Path, limit: float | None
) -> int:
    """Print how the responses of a run are scored by a reward. Return the exit status.

    Args:
        name: The function.
        kind: Its kind, or "".
        options: Options of the function.
        folder: The run folder.
        limit: Seconds for each call.
    """
    if kind not in ("", "reward"):
        raise ConfigError(f"--kind {kind}: responses of a run are scored by a reward")
    from lightrft.diagnostics.rescoring import rescore

    found = rescore(name, options, folder, limit or LIMIT)
    width = shutil.get_terminal_size().columns
    sys.stdout.write("\n".join([f"{name} on {folder}", *found.lines(width)]) + "\n")
    return int(found.failures > 0)


def _report(name: str, kind: str, options: dict[str, object], limit: float | None) -> int:
    """Run the checks and print their results. Return the exit status.

    Args:
        name: The function.
        kind: Its kind, or "" to find it out.
        options: Options of the function.
        limit: Seconds for each call of a reward.
    """
    from lightrft.algorithms.contracts.run_checks import CHECKS, run_contract_checks
    from lightrft.algorithms.validate.component_kinds import kind_of
    from lightrft.rewards.contracts import is_reward, reward_verdicts

    kinds = [*CHECKS, "reward"]
    kind = kind or ("reward" if is_reward(name) else kind_of(name))
    if kind not in kinds:
        raise ConfigError(f"--kind {kind}: there is no such kind; known: {', '.join(kinds)}")
    if kind == "reward":
        found = reward_verdicts(name, options, limit or LIMIT)
    elif limit is not None:
        raise ConfigError(
            f"--limit {limit:g} is for rewards, and {name} is taken for a {kind}; leave it out, "
            "or add --kind reward"
        )
    else:
        found = run_contract_checks(name, kind, options)
    given = "".join(f" {key}={value}" for key, value in options.items())
    sys.stdout.write(f"{name} as {kind}{given}\n\n")
    width = max(len(result.check) for result in found)
    failed = 0
    for result in found:
        mark = "FAIL" if result.broken else "pass"
        failed += bool(result.broken)
        sys.stdout.write(f"  {mark}  {result.check:<{width}}  {result.asks}\n")
        for line in result.broken.splitlines():
            sys.stdout.write(f"        {line}\n")
    if failed:
        sys.stdout.write(f"\n{failed} of {len(found)} checks failed\n")
        return 1
    sys.stdout.write(f"\nall {len(found)} checks hold\n")
    return 0


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
    value = parse_yaml(text)
    # ``bool`` is a subclass of ``int``, and true is no time.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Not ``value <= 0``, which is false for nan.
    if not is_number or not value > 0:
        raise ConfigError(f"--limit {text}: it is a number of seconds above 0")
    return float(value)
