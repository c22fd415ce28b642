"""Rendering of one message by a chat template, and the names that a template reads."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag of transformers around what the assistant says."""


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
    """
    from jinja2 import Environment, meta

    # with the tags of transformers; another one cannot be rendered either
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
    return frozenset(meta.find_undeclared_variables(parsed))
