"""Replace a method of a class, remember the original, and restore it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)
_ORIGINALS: dict[tuple[type, str], Callable[..., Any]] = {}


def replace(owner: type, name: str, new: Callable[..., object], effect: str) -> None:
    """Set ``owner.name`` to ``new`` and log a warning that states the ``effect``.

    A second call replaces the first patch.

    Args:
        owner: The class.
        name: Name of the method.
        new: The new method.
        effect: Text of the warning.
    """
    # the first one stays: after a second patch the current method is not the original
    _ORIGINALS.setdefault((owner, name), vars(owner)[name])
    setattr(owner, name, new)
    _log.warning("patched %s.%s for this process: %s", owner.__name__, name, effect)


def original(owner: type, name: str) -> Callable[..., Any]:
    """Return ``owner.name`` as it was before any patch."""
    return _ORIGINALS.get((owner, name), vars(owner)[name])


def remove_monkey_patches() -> None:
    """Restore every method that a function of this package replaced."""
    for (owner, name), method in _ORIGINALS.items():
        setattr(owner, name, method)
    _ORIGINALS.clear()
