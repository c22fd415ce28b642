"""What is the same for every family: a processor is a table of parts, one for each kind of media."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.models.families import family_of
from lightrft.models.loading.from_pretrained import model_settings
from lightrft.types import Extent
from lightrft.utils.errors import ModelError


class Part(Protocol):
    """One kind of media of one family. Numbers are those of the family's own processor in transformers, without torchvision."""

    @property
    def written(self) -> str:
        """What the chat template writes for one of this kind, to be replaced by ``expand``."""
        ...

    @property
    def around(self) -> tuple[str, str]:
        """What the family's own chat template writes before and after ``written``, and a text without template must have there."""
        ...

    @property
    def rate(self) -> int:
        """Samples per second that ``inputs`` takes; 0 for what has none."""
        ...

    def expand(self, extent: Extent) -> str:
        """The text, placeholders in it, that stands for one of this size. Raises ``ValueError`` for a size that cannot be read."""
        ...

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        """Media of one: pictures ``[H, W, 3]`` and frames ``[T, H, W, 3]`` uint8, sound ``[N]`` float32 in [-1, 1]."""
        ...

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        """Features that the tower makes of ``inputs``: there must be as many placeholders."""
        ...

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Part:
        """The same with other bounds on the pixels of a picture or frame."""
        ...

    def save(self, path: Path) -> None:
        """Write what transformers needs to build the same."""
        ...


@dataclass(frozen=True, slots=True)
class Processor:
    """``parts`` by kind, and the id of each kind's placeholder token."""

    parts: Mapping[str, Part]
    tokens: Mapping[str, int]

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Processor:
        if min_pixels is None and max_pixels is None:
            return self
        return replace(self, parts={kind: part.limited(min_pixels, max_pixels) for kind, part in self.parts.items()})

    def save(self, path: str | Path) -> None:
        for part in self.parts.values():
            part.save(Path(path))


def spelling(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """How ``tokenizer`` writes a token."""
    return str(tokenizer.convert_ids_to_tokens(token))


def known(tokenizer: PreTrainedTokenizerBase, token: str) -> str:
    """``token``. Raises ``ValueError`` when ``tokenizer`` does not have it."""
    if token not in tokenizer.get_vocab():
        raise ValueError(f"the tokenizer has no token {token!r}")
    return token


def within(pixels: int, min_pixels: int | None, max_pixels: int | None) -> None:
    """Refuse bounds for a family that brings every picture to ``pixels``, unless that is within them."""
    for name, bound, wrong in (
        ("min_pixels", min_pixels, pixels < (min_pixels or 0)),
        ("max_pixels", max_pixels, max_pixels is not None and pixels > max_pixels),
    ):
        if wrong:
            raise ModelError(f"{name} = {bound}: this model reads pictures of {pixels} pixels and cannot take it; leave it unset")


def write_settings(file: Path, fields: Mapping[str, Any]) -> None:
    """Write ``fields`` as JSON, as transformers does."""
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


Build = Callable[[ModelConfig, Any, PreTrainedTokenizerBase], Mapping[str, Part]]
"""``(model settings, the model's config, tokenizer)`` to the parts of a family."""


def load_processor(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """How the model of ``config.path`` reads media; ``None`` where it reads text alone.

    Raises ``ModelError`` when the folder lacks what its processors are made from.
    """
    settings = model_settings(config)
    reader = family_of(settings).reader
    if reader is None:
        return None
    from lightrft.models.processors.registry import BUILD

    folder = Path(config.path).expanduser()
    placed = config.model_copy(update={"path": str(folder)}) if folder.is_dir() else config
    try:
        parts = BUILD[settings.model_type](placed, settings, tokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path = {config.path!r}: how it reads media cannot be loaded ({error})") from error
    tokens = {tower.kind: tower.token_id(settings) for tower in reader.towers}
    return Processor(parts, {kind: tokens[kind] for kind in parts})
