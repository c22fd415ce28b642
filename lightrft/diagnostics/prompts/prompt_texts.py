"""Describe how the prompts of a config are written, without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from lightrft.config.data import DataConfig
from lightrft.config.verbs import ScoringConfig, TrainingConfig


def prompt_texts(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Yield the name and the form of the prompts of each data section with sources."""
    sections: list[tuple[str, DataConfig]] = [("data", config.data)]
    if not isinstance(config, ScoringConfig):
        sections.append(("eval.data", config.eval.data))
    for name, section in sections:
        if section.sources:
            yield name, prompt_text(section)
    validation = getattr(config, "validation", None)
    if isinstance(validation, DataConfig) and validation.sources:
        yield "validation", prompt_text(validation)


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
