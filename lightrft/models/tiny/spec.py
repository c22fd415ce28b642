"""What a family must say for a tiny model of it to be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Tiny:
    """``special``: tokens of the family, last in the vocabulary. ``written``: what the chat template writes for each kind of part.
    ``config`` is made from the text config's fields, the ids of ``special`` and fields of the tower's config; ``processor`` is what
    is saved beside the model."""

    special: tuple[str, ...]
    written: dict[str, str]
    config: Callable[[dict[str, Any], dict[str, int], dict[str, Any]], PreTrainedConfig]
    processor: Callable[..., Any]
