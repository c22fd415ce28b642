"""The verb ``lightrft explain``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from lightrft.cli.arguments import is_word, parse, wants_usage
from lightrft.cli.verbs import config_of
from lightrft.config.base import Loaded
from lightrft.config.preference.presets import PREFERENCE_PRESETS
from lightrft.config.presets import PRESETS
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    IterateConfig,
    PRMVerbConfig,
    RLConfig,
    RMConfig,
    TrainingConfig,
)
from lightrft.utils.errors import ConfigError

if TYPE_CHECKING:
    from lightrft.diagnostics.explain import Explanation

MARK = "explain.verb="


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
    from lightrft.diagnostics.explain import to_latex, to_text

    show = to_latex if "--latex" in arguments else to_text
    sys.stdout.write(show(explanation_of(words)) + "\n")
    return 0


def explanation_of(words: Sequence[str]) -> Explanation:
    """Return the explanation of a preset, or of a config of any verb that trains."""
    from lightrft.diagnostics.prompts.prompt_texts import prompt_texts

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
    if isinstance(config, IterateConfig):
        from lightrft.diagnostics.explain_iterate import explain_iterate

        return explain_iterate(config, loaded.sources)
    return replace(_explained(config, loaded.sources), prompts=tuple(prompt_texts(config)))


def _explained(config: TrainingConfig, sources: Mapping[str, str]) -> Explanation:
    """Return the explanation of one training, without its prompts."""
    from lightrft.algorithms.preference.compatibility import check_preference
    from lightrft.diagnostics.explain import explain
    from lightrft.diagnostics.explain_distill import explain_distillation
    from lightrft.diagnostics.explain_supervised import explain_supervised
    from lightrft.trainer.checks.check_rollout import check_algorithm

    if isinstance(config, RLConfig):
        check_algorithm(config)
        return explain(config, sources)
    if isinstance(config, DistillVerbConfig):
        return explain_distillation(config, sources)
    if isinstance(config, RMConfig):
        # Here, since they import more than other verbs need.
        from lightrft.algorithms.reward_model.compatibility import check_reward_model
        from lightrft.diagnostics.explain_reward_model import explain_reward_model

        check_reward_model(config.reward_model)
        return explain_reward_model(config, sources)
    if isinstance(config, PRMVerbConfig):
        from lightrft.algorithms.process_reward.objective import check_process_model
        from lightrft.diagnostics.explain_reward_model import explain_process_model

        check_process_model(config.process_model)
        return explain_process_model(config, sources)
    if isinstance(config, DPOConfig):
        check_preference(config.preference)
    return explain_supervised(config, sources)


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
