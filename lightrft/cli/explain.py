"""The verb ``lightrft explain``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightrft.cli.arguments import is_bare_word, parse, wants_usage
from lightrft.config.presets import PRESETS
from lightrft.config.verbs import RLConfig


def run(arguments: Sequence[str]) -> int:
    """Print the objective of a preset or of a config. ``--latex`` prints it as LaTeX."""
    words = [a for a in arguments if a != "--latex"]
    if wants_usage(words):
        presets = ", ".join(sorted(PRESETS))
        sys.stdout.write(
            "lightrft explain <preset | config.yaml> [key=value ...] [--latex]\n\npresets: "
            f"{presets}\n"
        )
        return 0
    from lightrft.algorithms.validate.check_parts import check_parts
    from lightrft.diagnostics.explain import explain, to_latex, to_text

    settings = [f"algorithm={word}" if is_bare_word(word) else word for word in words]
    loaded = parse(RLConfig, settings)
    check_parts(loaded.settings.algorithm)
    explanation = explain(loaded.settings, loaded.sources)
    show = to_latex if "--latex" in arguments else to_text
    sys.stdout.write(show(explanation) + "\n")
    return 0
