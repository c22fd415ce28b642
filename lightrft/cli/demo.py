"""The verb ``lightrft demo`` and its kinds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import filterfalse
from typing import Any

from lightrft.api.progress import ACCURACIES, closing_lines, watching, with_report
from lightrft.api.start import check_trained, exit_status, memory_errors, quick_imports, set_threads
from lightrft.cli.arguments import is_word, settings_of
from lightrft.config.demo import DemoConfig
from lightrft.utils.errors import ConfigError, did_you_mean
from lightrft.verbs import VERBS

DEMOS = {
    "arithmetic": "a language model learns to work sums out",
    "vision": "a vision-language model learns to read handwritten digits",
    "preference": "a language model learns from pairs of right and wrong solutions",
    "audio": "an audio-language model learns to recognise spoken digits",
    "real": "SmolLM2-135M-Instruct learns to answer sums by the number alone",
    "reward": "reward models learn to judge readings of digits, and policies learn from them",
}
"""Task of each demo, by name. The first is the default. Each has a settings file in this folder."""


def run(arguments: Sequence[str]) -> int:
    """Train a tiny model and write a report about it."""
    name, arguments = demo_of(arguments)
    kinds = "\n".join(f"  {which:<10} {what}" for which, what in DEMOS.items())
    about = f"{VERBS['demo'].purpose}\n\n{kinds}"
    with resources.as_file(preset(name)) as file:
        config = settings_of(
            f"demo [{' | '.join(DEMOS)}]", DemoConfig, arguments, about, [str(file)]
        )
    if config is None:
        return 0
    with quick_imports():
        set_threads(config.run.threads)
        from lightrft.trainer.demo import run_demo
        from lightrft.trainer.reward_demo import part_run, run_reward_demo

    run_all = run_reward_demo if config.learned_rewards else run_demo
    with memory_errors(), watching(config.run) as observer:
        summary = run_all(config, observer)
    lines = [*learned_lines(summary), *closing_lines(config.run, summary)]
    if summary["verb"] == "demo" and summary.get("finished"):
        reported = [part_run(config.run, name) for name in config.learned_rewards] or [config.run]
        for part in reported:
            lines = with_report(part, lines)
    sys.stdout.write("\n".join(lines) + "\n")
    check_trained(summary)
    return exit_status(summary)


def learned_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the numbers of each reward model and of its policy, one line each."""
    lines = []
    for name, judged in summary.get("reward_models", {}).items():
        policy = summary["policies"][name]
        pairs = " -> ".join(f"{judged[key]:.1%}" for key in ACCURACIES if key in judged)
        gold = " -> ".join(f"{policy[key]:.1%}" for key in ACCURACIES if key in policy)
        names = ("proxy_before", "proxy_after")
        proxy = " -> ".join(f"{policy[key]:.2f}" for key in names if key in policy)
        lines.append(f"{name}: reward model {pairs} of held-out pairs")
        lines.append(f"{name}: policy {gold} right, score of the reward model {proxy}")
    return lines


def demo_of(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the selected demo and the other arguments. Raise ``ConfigError`` for unknown ones."""
    names = list(filter(is_word, arguments))
    name = " ".join(names) or next(iter(DEMOS))
    if name in DEMOS:
        return name, list(filterfalse(is_word, arguments))
    # Several names are a misunderstanding, and no misspelling of one.
    near = did_you_mean(name, DEMOS) if len(names) == 1 else ""
    hint = near or f"; there are {', '.join(DEMOS)}"
    raise ConfigError(f"there is no demo {name!r}{hint}")


def preset(name: str) -> resources.abc.Traversable:
    """Return the settings file of a demo."""
    file = "demo.yaml" if name == "arithmetic" else f"demo_{name}.yaml"
    return resources.files("lightrft.cli") / file
