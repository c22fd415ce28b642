"""Rendering of one message by a chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rendered(apply: Callable[[list[dict[str, Any]]], str], content: Any) -> str | None:
    """Return the text that ``apply`` renders for a user message with ``content``.

    ``content`` is text or a list of parts. Returns None if the template does not accept it.
    """
    try:
        text = apply([{"role": "user", "content": content}])
    except Exception:  # jinja's errors and whatever a template raises
        return None
    return (
        None if "'type'" in text else text
    )  # the template printed the list of parts with Python's repr()
