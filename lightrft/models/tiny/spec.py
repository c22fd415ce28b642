"""The description of a family from which a tiny model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedConfig

Fields = dict[str, Any]
"""Fields of a config: numbers, texts, lists, and configs of parts."""


class SavedProcessor(Protocol):
    """A processor that can write its files into a model folder."""

    def save_pretrained(self, path: str, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Tiny:
    """Tokens, template, config and processor of a tiny family.

    Attributes:
        special: Tokens of the family, last in the vocabulary.
        written: Text that the chat template writes for each kind of part.
        config: Builds the config from fields of the text config, the ids of ``special``, and fields
            of the tower's config.
        processor: Builds the processor that is saved with the model.
        named: Tokens by the attribute of the tokenizer that names each.
    """

    special: tuple[str, ...]
    written: dict[str, str]
    config: Callable[[Fields, dict[str, int], Fields], PreTrainedConfig]
    processor: Callable[..., SavedProcessor]
    named: Mapping[str, str] = field(default_factory=dict)
