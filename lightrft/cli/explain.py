"""The verb ``lightrft explain``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from lightrft.cli.arguments import is_word, parse, wants_usage
from lightrft.cli.verbs import config_of
from lightrft.config.base import Loaded
from lightrft.config.preference.presets import PREFERENCE_PRESETS
from lightrft.config.presets import PRESETS
from lightrft.config.verbs import IterateConfig, TrainingConfig
from lightrft.utils.errors import ConfigError
from lightrft.verbs import VERBS

if TYPE_CHECKING:
    from lightrft.trainer.explanation.explain import Explanation

MARK = f"{VERBS['explain'].section}.verb="


def run(arguments: Sequence[str]) -> int:
    """Print the objective of a preset or of a config. ``--latex`` prints it as LaTeX."""
    words = [a for a in arguments if a != "--latex"]
    if wants_usage(words):
        presets = ", ".join(sorted(PRESETS))
        preferences = ", ".join(sorted(PREFERENCE_PRESETS))
        sys.stdout.write(
            "lightrft explain <preset | config.yaml> [key=value ...] [--latex]\n\n"
            f"presets of rl: {presets}\n\npresets of dpo and kto: {preferences}\n\n"
            "explain.verb=<rl | sft | dpo | kto | distill | rm | prm | iterate | grm-sft | grm-rl "
            "| grm-dpo> names the verb of a config\n"
        )
        return 0
    from lightrft.trainer.explanation.explain import to_latex, to_text

    show = to_latex if "--latex" in arguments else to_text
    sys.stdout.write(show(explanation_of(words)) + "\n")
    return 0


def explanation_of(words: Sequence[str]) -> Explanation:
    """Return the explanation of a preset, or of a config of any verb that trains."""
    from lightrft.diagnostics.prompts.prompt_texts import prompt_texts
    from lightrft.trainer.explanation.of_config import explained

    verb, settings = "auto", []
    for word in words:
        if word.startswith(MARK):
            verb = word.removeprefix(MARK)
        elif is_word(word) and word in PREFERENCE_PRESETS:
            settings.append(f"preference={word}")
        else:
            settings.append(f"algorithm={word}" if is_word(word) else word)
    loaded = _loaded(verb, settings)
    config = loaded.settings
    found = explained(config, loaded.sources)
    if isinstance(config, IterateConfig):
        return found
    return replace(found, prompts=tuple(prompt_texts(config)))


def _loaded(verb: str, arguments: Sequence[str]) -> Loaded[TrainingConfig] | Loaded[IterateConfig]:
    """Parse ``arguments`` as the config of ``verb``; ``auto`` takes the verb that fits."""
    if verb == "iterate":
        return parse(IterateConfig, arguments)
    try:
        return config_of(verb, arguments)
    except ConfigError:
        if verb != "auto":
            raise
        # rounds of trainings fit no verb of one training
        with suppress(ConfigError):
            return parse(IterateConfig, arguments)
        raise
