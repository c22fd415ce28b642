"""Rendering of one message by a chat template, and the names that a template reads."""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lightrft.utils.errors import ConfigError, ModelError, did_you_mean

GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag of transformers around what the assistant says."""
_OF_RENDERING = frozenset({"messages", "conversations", "raise_exception", "strftime_now"})
"""Names that transformers gives to every template, or needs itself."""


def rendered(apply: Callable[[list[dict[str, object]]], str], content: object) -> str | None:
    """Return the text that ``apply`` renders for a user message with ``content``.

    ``content`` is text or a list of parts. Returns None if the template does not accept it.
    """
    try:
        text = apply([{"role": "user", "content": content}])
    # A template can raise any error, by jinja or by its own checks.
    except Exception:
        return None
    # A template for text alone prints a list of parts with Python's ``repr()``.
    return None if "'type'" in text else text


@functools.lru_cache(maxsize=16)
def names_read(template: str) -> frozenset[str]:
    """Return the names of the arguments that a chat template reads.

    Args:
        template: The source of the template.

    Raises:
        ModelError: It cannot be parsed.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta

    # with the tags of transformers; another one cannot be rendered either
    known = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = known.parse(GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        problem = f"the chat template is malformed in line {error.lineno}: {error.message}"
        raise ModelError(f"{problem}; set model.chat_template to another") from error
    return frozenset(meta.find_undeclared_variables(parsed))


def names_of_rendering(tokenizer: Any) -> set[str]:
    """Return the names that ``tokenizer`` takes itself when it renders, or gives to templates."""
    return {*inspect.signature(tokenizer.apply_chat_template).parameters, *_OF_RENDERING}


def argument_problem(
    field: str, given: Iterable[str], templates: Iterable[str], reserved: set[str]
) -> str:
    """Return what is wrong with the arguments of chat templates; empty if each of them is read.

    Args:
        field: Name of the setting or field that gives the arguments.
        given: Names of the arguments.
        templates: The sources of the templates that may get them.
        reserved: Names that cannot be given.

    Raises:
        ModelError: A template cannot be parsed.
    """
    read = frozenset[str]().union(*map(names_read, templates)) - reserved
    for name in given:
        if name in reserved:
            return f"{field}.{name} is set by lightrft itself; leave it out"
        if name not in read:
            names = ", ".join(sorted(read)) or "no argument"
            problem = f"{field}: the chat template does not read {reprlib.repr(name)}"
            return f"{problem}; it reads {names}{did_you_mean(name, read) or '; leave it out'}"
    return ""


def check_options(setting: str, options: Collection[str], tokenizer: Any) -> None:
    """Check that a chat template of ``tokenizer`` reads all options that hold for every row.

    Args:
        setting: Name of the setting that gives the options.
        options: Names of the options.
        tokenizer: The tokenizer with its chat template.

    Raises:
        ConfigError: No template reads an option, or an option cannot be set.
        ModelError: A template cannot be parsed.
    """
    if not options:
        return
    source = tokenizer.chat_template
    # some tokenizers have another template for rows with tools
    templates = source.values() if isinstance(source, Mapping) else [source]
    reserved = names_of_rendering(tokenizer) - {"tools", "documents"}
    if problem := argument_problem(setting, options, templates, reserved):
        raise ConfigError(problem)
