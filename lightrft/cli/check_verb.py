"""``lightrft check``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lightrft.utils.errors import ConfigError
from lightrft.utils.settings import parse_yaml

USAGE = "lightrft check <module:function | file.py:function | name> [option=value ...] [--kind <kind>]"


def run(arguments: Sequence[str]) -> int:
    """Hold one part of an algorithm to the contract of its kind; the exit status is 1 where it breaks it."""
    from lightrft.trainer.contracts.verdicts import CHECKS

    words = list(arguments)
    if not words or {"-h", "--help"} & set(words):
        sys.stdout.write(f"{USAGE}\n\nkinds: {', '.join(CHECKS)}\n")
        return 0
    kind = _take_kind(words)
    names = [w for w in words if "=" not in w]
    if len(names) != 1:
        raise ConfigError(f"{len(names)} functions are named; it takes one: {USAGE}")
    options = {key: _value(text) for key, _, text in (w.partition("=") for w in words if "=" in w)}
    return _report(names[0], kind, options)


def _report(name: str, kind: str, options: dict[str, Any]) -> int:
    from lightrft.trainer.contracts.verdicts import CHECKS, verdicts
    from lightrft.trainer.kinds import kind_of

    kind = kind or kind_of(name)
    if kind not in CHECKS:
        raise ConfigError(f"--kind {kind}: there is no such kind; known: {', '.join(CHECKS)}")
    found = verdicts(name, kind, options)
    given = "".join(f" {key}={value}" for key, value in options.items())
    sys.stdout.write(f"{name} as {kind}{given}\n\n")
    width = max(len(v.check) for v in found)
    for v in found:
        sys.stdout.write(f"  {'FAIL' if v.broken else 'pass'}  {v.check:<{width}}  {v.asks}\n")
        if v.broken:
            sys.stdout.write(f"        {v.broken}\n")
    failed = sum(1 for v in found if v.broken)
    sys.stdout.write(f"\n{failed} of {len(found)} checks failed\n" if failed else f"\nall {len(found)} checks hold\n")
    return 1 if failed else 0


def _take_kind(words: list[str]) -> str:
    """What ``--kind x`` or ``--kind=x`` says, which is taken out of ``words``; empty without it."""
    for i, word in enumerate(words):
        if word.startswith("--kind="):
            return words.pop(i).partition("=")[2]
        if word == "--kind":
            if i + 1 == len(words):
                raise ConfigError(f"--kind names no kind: {USAGE}")
            kind = words[i + 1]
            del words[i : i + 2]
            return kind
    return ""


def _value(text: str) -> Any:
    return parse_yaml(text) if text else None
