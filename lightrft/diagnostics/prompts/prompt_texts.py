"""Describe how the prompts of a config are written, without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from lightrft.config.data import DataConfig
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    ScoringConfig,
    SFTConfig,
    TrainingConfig,
)


def prompt_texts(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Yield the name and the form of the prompts of each data section with sources."""
    sections: list[tuple[str, DataConfig]] = [("data", config.data)]
    sections += [("validation", section) for section in validation_of(config)]
    if not isinstance(config, ScoringConfig):
        sections.append(("eval.data", config.eval.data))
    for name, section in sections:
        if section.sources:
            yield name, prompt_text(section)


def validation_of(config: TrainingConfig) -> list[DataConfig]:
    """Return the settings of the held-out rows with responses, in a list that may be empty."""
    if isinstance(config, SFTConfig | DPOConfig | DistillVerbConfig | ScoringConfig):
        return [config.validation]
    return []


def prompt_text(data: DataConfig) -> str:
    """Return the form of the prompts of ``data``, such as ``user: {prompt}``."""
    text = "{prompt}" if data.template is None else data.template
    if data.apply_chat_template is False:
        return f"{text!r}, without a chat template"
    messages = [] if data.system is None else [f"system: {data.system!r}"]
    messages.append(f"user: {text!r}")
    where = "in the chat template"
    if data.apply_chat_template == "auto":
        where += " if the tokenizer has one"
    if data.chat_template_options:
        options = (f"{name}={value!r}" for name, value in data.chat_template_options.items())
        where += f", with {', '.join(options)}"
    return f"{', '.join(messages)}, {where}"
