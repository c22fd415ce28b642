"""Rendering of one message by a chat template."""

from __future__ import annotations

from collections.abc import Callable


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
