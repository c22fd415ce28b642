"""What a chat template makes of a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rendered(apply: Callable[[list[dict[str, Any]]], str], content: Any) -> str | None:
    """The text that ``apply`` writes for a user's message of ``content``, text or parts; None where it takes no such content."""
    try:
        text = apply([{"role": "user", "content": content}])
    except Exception:  # jinja's errors and whatever a template raises
        return None
    return None if "'type'" in text else text  # parts that were written as Python writes them
