"""The verb ``lightrft explain``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightrft.cli.arguments import parse
from lightrft.config.presets import PRESETS
from lightrft.config.verbs import RLConfig


def run(arguments: Sequence[str]) -> int:
    """Print the objective of a preset or of a config. ``--latex`` prints it as LaTeX."""
    words = [a for a in arguments if a != "--latex"]
    if not words or {"-h", "--help"} & set(words):
        presets = ", ".join(sorted(PRESETS))
        sys.stdout.write(
            "lightrft explain <preset | config.yaml> [key=value ...] [--latex]\n\npresets: "
            f"{presets}\n"
        )
        return 0
    from lightrft.algorithms.validate.check_parts import check_parts
    from lightrft.diagnostics.explain import explain, to_latex, to_text

    words = [
        f"algorithm={w}" if "=" not in w and not w.endswith((".yaml", ".yml")) else w for w in words
    ]
    loaded = parse(RLConfig, words)
    check_parts(loaded.settings.algorithm)
    explanation = explain(loaded.settings, loaded.sources)
    sys.stdout.write(
        (to_latex(explanation) if "--latex" in arguments else to_text(explanation)) + "\n"
    )
    return 0
