"""LightRFT's options, in the forms in which programs have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def options_of(args: Any) -> dict[str, Any]:
    """Return the options of a namespace, a mapping, a dataclass, or any object with attributes.

    The attributes of an object's class are options too.
    """
    if isinstance(args, Mapping):
        return dict(args)
    named = [name for name in dir(args) if not name.startswith("_")]
    given = {name: getattr(args, name) for name in named}
    return {name: value for name, value in given.items() if not callable(value)}
