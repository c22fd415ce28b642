"""The verb ``lightrft grm``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightrft.cli.arguments import wants_usage
from lightrft.cli.verbs import train
from lightrft.utils.errors import ConfigError, did_you_mean
from lightrft.verbs import VERBS

JUDGE = VERBS["grm"].methods


def run(arguments: Sequence[str]) -> int:
    """Train a judge by the method that is the first word, and return the exit status."""
    if not arguments or wants_usage(arguments[:1]):
        lines = "".join(f"  {name:<4} {row.purpose}\n" for name, row in JUDGE.items())
        sys.stdout.write(
            f"lightrft grm <{' | '.join(JUDGE)}> [config.yaml ...] [key=value ...]\n\n{lines}"
        )
        return 0
    method, *words = arguments
    if method not in JUDGE:
        raise ConfigError(
            f"the first word is the method, one of {', '.join(JUDGE)}, not "
            f"{method!r}{did_you_mean(method, JUDGE)}"
        )
    return train("grm", JUDGE[method], words, (method,))
